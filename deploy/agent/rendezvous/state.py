"""Upstream's holder of the rendezvous state, changed so that it never compares the clocks of two hosts.

Upstream compares heartbeats and the end of the last call, which other hosts have written, with this host's clock. Here
such a time only counts as changed or unchanged; `time.monotonic` tells how long ago this node saw it change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as upstream

# Heartbeats are a fallback: for a stopped agent (SIGSTOP) the kernel still acknowledges its keepalives.
HEARTBEAT_S, HEARTBEATS = 5.0, 3
_NEVER = datetime.max


class State(upstream._BackendRendezvousStateHolder):
    """Upstream's holder of the state, with the keepalives' word on which nodes are lost and which are still to come."""

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
        """Read nothing yet.

        Args:
            backend: stores the state.
            settings: upstream's `RendezvousSettings`.
            node: this node.
            is_gone: whether a node's keepalive has ended.
            are_all_here: whether a round of these participants (``is_first_round``) need not wait for more nodes.
            poll_s: returns how many seconds old the local copy may be.
        """
        super().__init__(backend, settings, cache_duration=poll_s())  # type: ignore[arg-type]  # it is only ever subtracted from a time
        self._node, self._is_gone, self._are_all_here, self._poll_s = node, is_gone, are_all_here, poll_s
        self._last_look = time.monotonic()
        self._silences: dict[Any, tuple[datetime, float]] = {}  # node → heartbeat, seconds watched since
        self._told_deadline = self._own_deadline = _NEVER
        self._last_call_ends = math.inf

    def sync(self) -> bool | None:
        """Write the state if it was changed here, then read it."""
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
            # This host's clock was set back: upstream would write no heartbeat until the clock has caught up.
            state.last_heartbeats[self._node] = _long_ago(own)
        if state.complete or state.deadline is None:
            return
        if self._are_all_here(set(state.participants), is_first_round=state.round == 0):
            state.deadline = _long_ago(state.deadline)
        else:
            state.deadline = self._own_deadline = self._by_own_clock(state.deadline)

    def _silent(self, told: Mapping[Any, datetime]) -> set[Any]:
        """Return the nodes without a new heartbeat for `HEARTBEAT_S` × `HEARTBEATS` seconds of watching.

        At most `HEARTBEAT_S` counts between two calls, so that a pause of this node makes no other node look silent.
        """
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
        """Return a past time once the last call is over, else a future one.

        The last call lasts for its timeout, from when this node first sees the deadline, which it does not compare.
        """
        now = time.monotonic()
        if deadline != self._told_deadline:
            self._told_deadline = deadline
            self._last_call_ends = now + self._settings.timeout.last_call.total_seconds()
        return _long_ago(deadline) if now > self._last_call_ends else _NEVER.replace(tzinfo=deadline.tzinfo)


def _long_ago(like: datetime) -> datetime:
    """Return the earliest time that compares with `like`; upstream's times have no time zone before torch 2.6."""
    return datetime.min.replace(tzinfo=like.tzinfo)


def _now(like: datetime) -> datetime:
    return datetime.now(timezone.utc).replace(tzinfo=like.tzinfo)
