"""Who sees a run while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.records.events import Event


class Observer(Protocol):
    """Is told of a run while it goes on; whatever it raises does not hurt the run."""

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Each reachable node's status, as its agent wrote it; when it is new, and now and then."""

    def event(self, event: Event) -> None:
        """One event of the run (docs/events.md), in the order in which they come in."""

    def close(self) -> None:
        """The run is over, or this process has no more to do with it."""


class View(Protocol):
    """What shows a run to the user while it goes on."""

    tick_s: float
    """How often it wants to be told, and asked for keys, where nothing happens."""

    def say(self, text: str, *, is_event: bool = False) -> None:
        """One line; `is_event`: it is told as an event, too."""

    def log(self, node: str, rank: str, lines: list[str]) -> None:
        """What a rank has written."""

    def status(self, lines: Mapping[str, str]) -> None:
        """Each node's status line."""

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Each reachable node's status, as its agent wrote it."""

    def event(self, event: Event) -> None:
        """One event of the run."""

    def keys(self) -> None:
        """Look for pressed keys; raises what the user asks for, `Left` or `StopAsked`."""


class Left(Exception):
    """The user leaves, and the job is to go on."""


class Over(Exception):
    """Another process has ended the run, or started it anew: there is nothing left to do for this one."""


class StopAsked(Exception):
    """The user wants the job stopped."""
