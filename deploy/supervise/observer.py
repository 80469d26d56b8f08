"""The interfaces through which a running job is shown: observers, the view, and the exceptions that end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.records.events import Event


class Observer(Protocol):
    """Receives the statuses and events of a run while it goes on; an error that it raises does not affect the run."""

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Get each reachable node's status, as its agent wrote it; called on changes and from time to time."""

    def event(self, event: Event) -> None:
        """Get one event of the run (docs/events.md), in the order in which they arrive."""

    def close(self) -> None:
        """Clean up: the run is over, or this process follows it no longer."""


class View(Protocol):
    """Shows a run to the user while it goes on."""

    tick_s: float
    """How often `status` and `keys` are called while nothing happens, in seconds."""

    def say(self, text: str, *, is_event: bool = False) -> None:
        """Show one line; `is_event` says that there is also an event with this content."""

    def log(self, node: str, rank: str, lines: list[str]) -> None:
        """Show lines of a rank's output."""

    def status(self, lines: Mapping[str, str]) -> None:
        """Show each node's status line."""

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Get each reachable node's status, as its agent wrote it."""

    def event(self, event: Event) -> None:
        """Get one event of the run."""

    def keys(self) -> None:
        """Read pressed keys; raise `Left` or `StopAsked` if the user asks for that."""


class Left(Exception):
    """The user leaves the view; the job goes on."""


class Over(Exception):
    """Another process has ended the run, or started it again: this process has nothing left to do."""


class StopAsked(Exception):
    """The user wants the job stopped."""
