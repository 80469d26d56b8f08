"""Remember that this host is broken, in its work folder, until somebody says that it is mended."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Dict, TypedDict

from nodekit.deploy.host import files


class Broken(TypedDict):
    """What a run has found broken."""

    run: str
    why: str
    time: float
    """Seconds since 1970."""


def remember(workdir: str, node: str, run: str, why: str) -> None:
    """Write down that a run has let go of this host, and why."""
    path = _path(workdir)
    files.make_private(os.path.dirname(path))
    known = recall(workdir)
    known[node] = {"run": run, "why": why, "time": time.time()}
    files.write_private(path, json.dumps(known).encode(), durable=True)


def recall(workdir: str) -> Dict[str, Broken]:
    """Return what is known: the node's name in that run → what is broken; {} of a host that is fit."""
    found = files.load(_path(workdir))
    return found if isinstance(found, dict) else {}


def forgive(workdir: str) -> Dict[str, Broken]:
    """Forget it; what was known, as of `recall`."""
    found = recall(workdir)
    if found:
        os.unlink(_path(workdir))
    return found


def _path(workdir: str) -> str:
    """Each host has its own file, for hosts may share the folder."""
    return os.path.join(os.path.expanduser(workdir), "broken", socket.gethostname() + ".json")
