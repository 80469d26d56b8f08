"""Why a node cannot take part: for now, or until something of it is mended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.ranks.workers import Stuck
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.telemetry.event_log import EventLog
from nodekit.deploy.agent.telemetry.gpu_health import CURE, FORGIVE, Fault
from nodekit.deploy.host.errors import cure_of
from nodekit.deploy.host.schema import EndCause
from nodekit.inventory.errors import KitError


class Unfit(KitError):
    """This node cannot take part now; others may go on without it, and it is tried again."""

    cause: EndCause = ""
    """As the last status has it."""


class Unreached(Unfit):
    """Another member has what the ranks are to start with, and cannot be reached: it may be lost itself."""


class WaitedInVain(Unfit):
    """The others did not come, or were not found, for as long as it is to wait for them; they may train without it."""

    cause: EndCause = "too-few-nodes"


class Broken(Unfit):
    """Something of this node is broken: no node is to count on it until it is mended."""

    cause: EndCause = "broken"

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


class Shortage:
    """All file descriptors are in use, by strangers' connections most likely: told of once, waited out each time."""

    def __init__(self, record: EventLog) -> None:
        self._record = record
        self._is_told = False

    def wait(
        self, error: OSError, spec: AgentSpec, end: Callable[[], None], pause: Callable[[], object]
    ) -> None:
        """Until there are some again.

        Args:
            error: that there are none.
            spec: of the node.
            end: ends its ranks.
            pause: called while it waits; what it raises ends that.
        """
        limit, text = descriptors.limit(), descriptors.used_up(spec.name, spec.local_addr)
        is_first, self._is_told = not self._is_told, True
        if is_first:
            print(f"{text} {error}", file=sys.stderr, flush=True)
        descriptors.when_there(end, pause)
        descriptors.when_there(descriptors.check, pause)
        if is_first:
            self._record.event("no-descriptors", limit=limit, why=str(error))
            self._record.update(notice=text)
