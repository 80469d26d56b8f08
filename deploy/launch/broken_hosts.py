"""Hosts that remember being drained because something of them is broken (`deploy/host/node/broken.py`)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from nodekit.deploy.connect.link import CALL_TIMEOUT_S, Link, all_or_raise, on_all
from nodekit.inventory.errors import HostError, KitErrors
from nodekit.inventory.schema import Inventory


def leave_out(
    links: Mapping[str, Link], inventory: Inventory, say: Callable[[str], None]
) -> tuple[dict[str, Link], dict[str, str]]:
    """The links of the hosts that are fit; of the others, host → what is broken.

    Raises:
        KitError: the job needs them.
    """
    broken = _remembered(links, inventory)
    left = {name: link for name, link in links.items() if name not in broken}
    cure = f"when it is mended: kit clean --forgive {shlex.quote(str(inventory.path))}"
    if len(left) < inventory.nodes.min:
        raise KitErrors(HostError(name, why, cure=cure) for name, why in broken.items())
    for name, why in broken.items():
        say(f"warning: without {name}: {why}; {cure}")
    return left, broken


def _remembered(links: Mapping[str, Link], inventory: Inventory) -> dict[str, str]:
    """Host → what is broken, of those that an earlier run has let go of for it and nobody has forgiven since."""
    hosts = {host.name: host for host in inventory.hosts}

    def ask(link: Link) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = link.call(
            "broken.recall", timeout_s=CALL_TIMEOUT_S, workdir=hosts[link.host].workdir
        )
        return found

    broken = {}
    for name, found in all_or_raise(on_all(links, ask)).items():
        # Nodes of this machine share it, but not their GPUs.
        own = [each for node, each in found.items() if node == name or hosts[name].connection != "local"]
        if own:
            newest = max(own, key=lambda each: float(each["time"]))
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest["time"]))
            broken[name] = f"{newest['why']} (drained by {newest['run']}, {when})"
    return broken
