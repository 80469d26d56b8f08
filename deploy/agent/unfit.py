"""Why a node cannot take part: for now, or until something of it is mended."""

from __future__ import annotations

from collections.abc import Sequence

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.ranks.workers import Stuck
from nodekit.deploy.agent.telemetry.gpu_health import CURE, FORGIVE, Fault
from nodekit.deploy.host.errors import cure_of
from nodekit.inventory.errors import KitError


class Unfit(KitError):
    """This node cannot take part now; others may go on without it, and it is tried again."""


class Broken(Unfit):
    """Something of this node is broken: no node is to count on it until it is mended."""

    @classmethod
    def of(cls, fault: Fault | None, stuck: Sequence[Stuck]) -> Broken:
        """For a GPU, processes that cannot be ended, or both."""
        found = [str(fault)] if fault is not None else []
        if stuck:
            found.append("SIGKILL does not end " + ", ".join(map(str, stuck)))
        return cls("; ".join(found), cure=f"reboot the host; {FORGIVE}" if stuck else CURE)


def unfit(text: str, error: OSError) -> Exception:
    """What is raised of an error of this node's: itself, where it will pass."""
    return error if descriptors.are_used_up(error) else Unfit(text, cure=cure_of(error))
