"""Divides a run's time into training that counts, and time lost by cause, from its events; pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nodekit.deploy.records.events import Event
from nodekit.deploy.story.attempts import (
    Attempt,
    Session,
    has_told_steps,
    is_number,
    of_kind,
    session_of,
)
from nodekit.deploy.story.timeline import Span

CAUSES = ("start", "restart", "redone", "snapshots", "waiting", "end")
"""The causes of lost time, see `Goodput`."""


@dataclass(frozen=True)
class Goodput:
    """How a run's time was spent, in seconds; `trained_s`, `untold_s` and all of `lost` add up to `total_s`.

    The causes: ``start`` (until the first step), ``restart`` (from a loss or failure to the next first step),
    ``redone`` (steps that had been done before), ``snapshots`` (training paused for them), ``waiting`` (too few nodes
    to train), ``end`` (after the last step: the last copies of snapshots, and shutting down).
    If no step was ever reported, ``start`` lasts until the ranks run, and ``end`` begins when they have ended.
    """

    total_s: float
    """While the run was up; the time between a stop and resuming does not count."""
    trained_s: float
    """Spent on training steps that count."""
    untold_s: float
    """While ranks ran that never reported a step: how much of it counts is unknown."""
    is_told: bool
    """Whether any step was ever reported."""
    lost: Mapping[str, float]
    """Cause → seconds."""

    @property
    def share(self) -> float | None:
        """The share of the time spent on training steps that count, 0 to 1; None if no step was ever reported."""
        if not self.is_told:
            return None
        return self.trained_s / self.total_s if self.total_s > 0 else 0.0


def goodput(
    events: Sequence[Event],
    sessions: Sequence[Session],
    attempts: Sequence[Attempt],
    spans: Mapping[str, Sequence[Span]],
    min_nodes: int | None,
) -> Goodput:
    """Return how a run's time was spent; see `History.of` for `min_nodes`."""
    return _Account(events, sessions, attempts, spans, min_nodes).goodput()


class _Account:
    """Divides the run's time."""

    def __init__(
        self,
        events: Sequence[Event],
        sessions: Sequence[Session],
        attempts: Sequence[Attempt],
        spans: Mapping[str, Sequence[Span]],
        min_nodes: int | None,
    ) -> None:
        self._events = events
        self._sessions = sessions
        self._attempts = attempts
        self._spans = spans
        self._min_nodes = min_nodes
        self._snapshots = sorted(of_kind(events, "snapshot"), key=lambda event: event.time)
        self._quorumless = self._without_quorum()

    def goodput(self) -> Goodput:
        """Return how all of it was spent."""
        lost = dict.fromkeys(CAUSES, 0.0)
        trained = untold = total = 0.0
        done = 0
        is_told = has_told_steps(self._attempts)
        for number, session in enumerate(self._sessions):
            total += session.end - session.start
            attempts = [each for each in self._attempts if session_of(self._sessions, each.started) == number]
            at, cause = session.start, "start"
            for attempt in attempts:
                began = attempt.first_step_time if is_told else attempt.ran_at
                if began is None:
                    continue
                begin = min(max(began, at), session.end)
                end = min(max(attempt.trained_until, begin), session.end)
                waited = self._waited(at, begin, attempts, attempt)
                lost[cause] += begin - at - waited
                lost["waiting"] += waited
                redone = self._redone_s(attempt, done, begin, end)
                paused = min(self._paused_s(attempt, done), end - begin - redone)
                lost["redone"] += redone
                lost["snapshots"] += paused
                if is_told:
                    trained += end - begin - redone - paused
                else:
                    untold += end - begin - redone - paused
                done = max(done, attempt.last_step or 0)
                at, cause = end, "restart"
            waited = self._waited(at, session.end, attempts, None)
            is_ending = session.is_over or all(each.ended is None for each in attempts[-1:])
            lost["end" if is_ending and cause == "restart" else cause] += session.end - at - waited
            lost["waiting"] += waited
        return Goodput(total_s=total, trained_s=trained, untold_s=untold, is_told=is_told, lost=lost)

    def _redone_s(self, attempt: Attempt, done: int, begin: float, end: float) -> float:
        """Return how many seconds of [begin, end] an attempt took to reach step `done`, which was done before."""
        if attempt.last_step is None or attempt.first_step is None or done < attempt.first_step:
            return 0.0
        if attempt.last_step <= done:
            return end - begin
        before = (begin, attempt.first_step)
        for time, step in attempt.steps:
            if step > done:
                share = (done - before[1]) / (step - before[1]) if step > before[1] else 0.0
                return min(max(before[0] + share * (time - before[0]) - begin, 0.0), end - begin)
            before = (max(time, begin), step)
        return end - begin

    def _paused_s(self, attempt: Attempt, done: int) -> float:
        """Return how many seconds snapshots paused an attempt; all nodes pause together, so it is the greatest sum."""
        number = self._attempts.index(attempt)
        until = math.inf
        if number + 1 < len(self._attempts):
            until = self._attempts[number + 1].started
        paused: dict[str, float] = {}
        begin, end = (
            bisect.bisect_left(self._snapshots, when, key=lambda event: event.time)
            for when in (attempt.started, until)
        )
        # Bisect, since a run of weeks has thousands of snapshots, and as many attempts.
        for event in self._snapshots[begin:end]:
            step, seconds = event.get("step"), event.get("pause_s")
            if is_number(seconds) and not (is_number(step) and step <= done):
                paused[str(event.node)] = paused.get(str(event.node), 0.0) + max(0.0, float(seconds))
        return max(paused.values(), default=0.0)

    def _waited(self, start: float, end: float, attempts: Sequence[Attempt], until: Attempt | None) -> float:
        """Return how many of the seconds from `start` to `end`, in which nothing trained, nodes were missing.

        Args:
            start: when training ended.
            end: when it began again, in attempt `until`, or the session ended.
            attempts: all of the session.
            until: None if training did not begin again.
        """
        if end <= start:
            return 0.0
        between = [each for each in attempts if start <= each.started <= end]
        if until is not None and until not in between:
            between.append(until)
        before = [each for each in attempts if each.started < start]
        missing: list[tuple[float, float, int]] = [(*each, 0) for each in self._quorumless]
        for each in between or before[-1:]:
            # The members of the next attempt were missing until they came; after the last attempt, its own members are.
            is_next = each in between
            limit = min(end, each.started) if is_next else end
            for name in each.members:
                missing += [
                    (span.start, min(span.end, limit), len(each.members))
                    for span in self._spans[name]
                    if span.state == "away" and span.start < limit
                ]
        edges = sorted({start, end, *(t for each in missing for t in each[:2] if start < t < end)})
        waited = 0.0
        for low, high in itertools.pairwise(edges):
            here = [each for each in missing if each[0] <= low and each[1] >= high]
            voted = [each for each in here if not each[2]]
            away = [each for each in here if each[2]]
            few = self._min_nodes is None or any(each[2] - len(away) < self._min_nodes for each in away)
            if voted or (away and few):
                waited += high - low
        return waited

    def _without_quorum(self) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        open_since: dict[str | None, float] = {}
        for event in self._events:
            if event.kind == "no-quorum":
                open_since.setdefault(event.node, event.time)
            elif event.node in open_since and event.kind in (
                "rendezvous",
                "generation",
                "agent-started",
                "agent-ended",
                "store-lost",
            ):
                found.append((open_since.pop(event.node), event.time))
        return [*found, *((since, self._sessions[-1].end) for since in open_since.values())]
