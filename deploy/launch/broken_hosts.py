"""Hosts that remember being drained because something of them is broken (`deploy/host/broken.py`)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel, all_or_raise, on_all
from nodekit.deploy.host.broken import Broken
from nodekit.deploy.preflight.leftovers import broken_of
from nodekit.inventory.errors import HostError, KitErrors
from nodekit.inventory.schema import Inventory


def leave_out(
    channels: Mapping[str, HostChannel], inventory: Inventory, say: Callable[[str], None]
) -> tuple[dict[str, HostChannel], dict[str, str]]:
    """The channels of the hosts that are fit; of the others, host → what is broken.

    Raises:
        KitError: the job needs them.
    """
    broken = _remembered(channels, inventory)
    left = {name: channel for name, channel in channels.items() if name not in broken}
    cure = f"when it is mended: kit clean --forgive {shlex.quote(str(inventory.path))}"
    if len(left) < inventory.nodes.min:
        raise KitErrors(HostError(name, why, cure=cure) for name, why in broken.items())
    for name, why in broken.items():
        say(f"warning: without {name}: {why}; {cure}")
    return left, broken


def _remembered(channels: Mapping[str, HostChannel], inventory: Inventory) -> dict[str, str]:
    """Host → what is broken, of those that an earlier run has let go of for it and nobody has forgiven since."""
    hosts = {host.name: host for host in inventory.hosts}

    def ask(channel: HostChannel) -> dict[str, Broken]:
        found: dict[str, Broken] = channel.call(
            "broken.recall", timeout_s=CALL_TIMEOUT_S, workdir=hosts[channel.host].workdir
        )
        return found

    answers = all_or_raise(on_all(channels, ask))
    broken = {name: broken_of(hosts[name], found) for name, found in answers.items()}
    return {name: why for name, why in broken.items() if why}
