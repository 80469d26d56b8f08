"""Hosts that remember being drained because something of them is broken (`deploy/host/broken.py`)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from nodekit.deploy.connect.link import CALL_TIMEOUT_S, Link, all_or_raise, on_all
from nodekit.deploy.preflight.leftovers import broken_of
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

    answers = all_or_raise(on_all(links, ask))
    broken = {name: broken_of(hosts[name], found) for name, found in answers.items()}
    return {name: why for name, why in broken.items() if why}
