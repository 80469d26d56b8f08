"""Errors of a node that cannot take part in training, for now or until it is repaired."""

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
    """This node cannot take part now; the others may train without it, and it will be tried again."""

    cause: EndCause = ""
    """The cause to give in the agent's last status."""


class Unreached(Unfit):
    """Another member that has files which the ranks need to start is unreachable, and may be lost."""


class WaitedInVain(Unfit):
    """Too few other nodes came, or were found, within the time limit; they may train without this one."""

    cause: EndCause = "too-few-nodes"


class Broken(Unfit):
    """This node is broken, and must not be used until it is repaired."""

    cause: EndCause = "broken"

    @classmethod
    def of(cls, fault: Fault | None, stuck: Sequence[Stuck]) -> Broken:
        """Build it from a GPU's fault, from processes that SIGKILL does not end, or from both."""
        found = [str(fault)] if fault is not None else []
        if stuck:
            found.append("SIGKILL does not end " + ", ".join(map(str, stuck)))
        return cls("; ".join(found), cure=f"reboot the host; {FORGIVE}" if stuck else CURE)


def unfit(text: str, error: OSError) -> Exception:
    """Return the exception to raise for this error: `error` itself if only descriptors ran out, else `Unfit`."""
    return error if descriptors.are_used_up(error) else Unfit(text, cure=cure_of(error))


class Shortage:
    """Waits while all file descriptors are in use, probably by strangers' connections; reports only the first time."""

    def __init__(self, record: EventLog) -> None:
        self._record = record
        self._is_told = False

    def wait(
        self, error: OSError, spec: AgentSpec, end: Callable[[], None], pause: Callable[[], object]
    ) -> None:
        """End the ranks, and wait until descriptors are free again.

        Args:
            error: of the call that found none free.
            spec: of the node.
            end: ends the node's ranks.
            pause: called during the wait; an exception that it raises ends the wait.
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
