"""Remember in the work folder that this host is broken, until a user says that it is repaired."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Dict, TypedDict

from nodekit.deploy.host import errors, files


class Broken(TypedDict):
    """A fault of this host that a run has found."""

    run: str
    why: str
    time: float
    """Seconds since 1970."""


def remember(workdir: str, node: str, run: str, why: str) -> None:
    """Record that a run has dropped this host, and why."""
    path = _path(workdir)
    files.make_private(os.path.dirname(path))
    known = recall(workdir)
    known[node] = {"run": run, "why": why, "time": time.time()}
    files.write_private(path, json.dumps(known).encode(), durable=True)


def recall(workdir: str) -> Dict[str, Broken]:
    """Return the known faults: the node's name in that run → the fault; {} for a healthy host."""
    path = _path(workdir)
    try:
        found = files.load(path)
    except PermissionError as error:  # perhaps another user's folder
        cure = "that is %s's: set `workdir:` to a folder of your own" % files.owner(path)
        raise errors.with_cure(error, cure) from None
    return found if isinstance(found, dict) else {}


def forgive(workdir: str) -> Dict[str, Broken]:
    """Forget all faults; return them, as `recall`."""
    found = recall(workdir)
    if found:
        os.unlink(_path(workdir))
    return found


def _path(workdir: str) -> str:
    """Return the path of this host's own file, as hosts may share the folder."""
    return os.path.join(os.path.expanduser(workdir), "broken", socket.gethostname() + ".json")
