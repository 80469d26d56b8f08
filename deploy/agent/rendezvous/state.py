"""Upstream's copy of the rendezvous state, which compares no times of two hosts' clocks.

Upstream compares times that other hosts have written with this host's clock: heartbeats, and the end of the last call.
Here only the change of such a time counts, and how long ago by `time.monotonic` this node has seen it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as upstream

# Heartbeats are the second line behind the keepalives, which the kernel answers for an agent that is stopped.
HEARTBEAT_S, HEARTBEATS = 5.0, 3
_NEVER = datetime.max


class State(upstream._BackendRendezvousStateHolder):
    """Upstream's holder of the state, which knows from the keepalives who is gone and who is still to come."""

    def __init__(
        self,
        backend: Any,
        settings: Any,
        *,
        node: Any,
        is_gone: Callable[[Any], bool],
        are_all_here: Callable[..., bool],
        poll_s: Callable[[], float],
    ) -> None:
        """Nothing is known yet.

        Args:
            backend: where the state is.
            settings: upstream's.
            node: this one.
            is_gone: whether a node's keepalive has ended.
            are_all_here: whether a round of these participants need not wait for anyone (``is_first_round``).
            poll_s: how old a copy may be.
        """
        super().__init__(backend, settings, cache_duration=poll_s())  # type: ignore[arg-type]  # it is only ever subtracted from a time
        self._node, self._is_gone, self._are_all_here, self._poll_s = node, is_gone, are_all_here, poll_s
        self._last_look = time.monotonic()
        self._silences: dict[Any, tuple[datetime, float]] = {}  # heartbeat, and the seconds watched since
        self._told_deadline = self._own_deadline = _NEVER
        self._last_call_ends = math.inf

    def sync(self) -> bool | None:
        """Write the state, if it was changed, and read it."""
        self._cache_duration = self._poll_s()  # type: ignore[assignment]  # it is only ever subtracted
        if self._dirty and self._state.deadline is self._own_deadline:  # it will be written
            self._state.deadline = self._told_deadline
        return super().sync()

    def _sanitize(self) -> None:
        state: Any = self._state
        told = dict(state.last_heartbeats)
        silent = self._silent(told)
        for node, heartbeat in told.items():
            is_gone = node in silent or self._is_gone(node)
            state.last_heartbeats[node] = _long_ago(heartbeat) if is_gone else _now(heartbeat)
        super()._sanitize()
        state.last_heartbeats.update({node: told[node] for node in state.last_heartbeats})
        own = state.last_heartbeats.get(self._node)
        if own is not None and own > _now(own):
            # This host's clock was set back: upstream would write the next one when it is as late again.
            state.last_heartbeats[self._node] = _long_ago(own)
        if state.complete or state.deadline is None:
            return
        if self._are_all_here(set(state.participants), is_first_round=state.round == 0):
            state.deadline = _long_ago(state.deadline)
        else:
            state.deadline = self._own_deadline = self._by_own_clock(state.deadline)

    def _silent(self, told: Mapping[Any, datetime]) -> set[Any]:
        """Those without a new heartbeat for so long; while this node does not look, nobody is silent."""
        now = time.monotonic()
        watched_s, self._last_look = min(now - self._last_look, HEARTBEAT_S), now
        self._silences = {
            node: (heartbeat, watched_s + before[1])
            if (before := self._silences.get(node)) and before[0] == heartbeat
            else (heartbeat, 0.0)
            for node, heartbeat in told.items()
        }
        return {node for node, (_, seconds) in self._silences.items() if seconds > HEARTBEAT_S * HEARTBEATS}

    def _by_own_clock(self, deadline: datetime) -> datetime:
        """The end of the last call: it begins when this node first sees a deadline."""
        now = time.monotonic()
        if deadline != self._told_deadline:
            self._told_deadline = deadline
            self._last_call_ends = now + self._settings.timeout.last_call.total_seconds()
        return _long_ago(deadline) if now > self._last_call_ends else _NEVER.replace(tzinfo=deadline.tzinfo)


def _long_ago(like: datetime) -> datetime:
    """The earliest time that can be compared with another: upstream's have no time zone before torch 2.6."""
    return datetime.min.replace(tzinfo=like.tzinfo)


def _now(like: datetime) -> datetime:
    return datetime.now(timezone.utc).replace(tzinfo=like.tzinfo)
