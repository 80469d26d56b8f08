"""Hosts that remember being drained because something of them is broken (`deploy/host/node/broken.py`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nodekit.deploy.connect.link import CALL_TIMEOUT_S, Link, all_or_raise, on_all
from nodekit.inventory.schema import Inventory


def remembered(links: Mapping[str, Link], inventory: Inventory) -> dict[str, str]:
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
