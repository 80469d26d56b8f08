"""Builds the history of a run from its events (docs/events.md); pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodekit.deploy.records.events import Event, with_set_back
from nodekit.deploy.story.attempts import (
    Attempt,
    is_number,
    mapping_of,
    of_kind,
    read_attempts,
    read_sessions,
    session_of,
)
from nodekit.deploy.story.goodput import CAUSES, Goodput, goodput
from nodekit.deploy.story.timeline import Span, spans_by_node
from nodekit.training.measures import is_least_best

__all__ = ["CAUSES", "Attempt", "Goodput", "History", "Point", "Span", "standing"]


@dataclass(frozen=True)
class Point:
    """One value of a curve."""

    step: int
    value: float
    time: float
    attempt: str


@dataclass(frozen=True)
class History:
    """The history of a run up to now; times are in seconds since 1970."""

    started: float
    ended: float | None
    """None if it is running."""
    state: str
    """starting, running, succeeded, failed, stopped."""
    verdict: str
    sessions: tuple[tuple[float, float], ...]
    """(start, end) of each period in which the run was up; more than one if it was resumed."""
    attempts: tuple[Attempt, ...]
    spans: Mapping[str, tuple[Span, ...]]
    """node → its states, without gaps from its first event on."""
    failures: tuple[Event, ...]
    """The events of kind ``worker-failed``."""
    snapshots: tuple[Event, ...]
    evaluations: tuple[Event, ...]
    """The evaluations that count: those of steps that were redone later are left out."""
    samples: Mapping[str, tuple[Event, ...]]
    step: int | None
    """The last step of the last attempt that reported one."""
    total_steps: int | None
    restarts: int
    """The number of attempts that were not the first of a session."""
    best: Mapping[str, tuple[float, int]]
    """metric → (its best value, its step): the lowest value of a loss or an error, else the highest."""
    result: Mapping[str, Any]
    """The job's own result at its end, from ``output/result.json``."""
    goodput: Goodput

    @classmethod
    def of(cls, events: Sequence[Event], *, now: float, min_nodes: int | None = None) -> History:
        """Build the history of one run.

        Args:
            events: of the run, in the order of time.
            now: in seconds since 1970; a running run lasts until then.
            min_nodes: the fewest nodes that the job needs; None for as many as it trained with next.
        """
        finite = _by_the_last_clock([each for each in events if math.isfinite(each.time)])
        found = sorted(finite, key=lambda event: event.time)
        sessions = read_sessions(found, max([now, *(each.time for each in found[-1:])]))
        attempts = read_attempts(found, sessions)
        spans = spans_by_node(found, sessions, attempts)
        last = sessions[-1]
        samples: dict[str, list[Event]] = {}
        for event in of_kind(found, "sample"):
            if event.node:
                samples.setdefault(event.node, []).append(event)
        evaluations = _standing_evaluations(found, attempts)
        totals = [each.get("total_steps") for each in found if is_number(each.get("total_steps"))]
        results = [
            mapping_of(each.get("result")) for each in of_kind(found, "agent-ended") if each.get("result")
        ]
        num_sessions = len({session_of(sessions, each.started) for each in attempts})
        has_run = any((each.first_step_time or each.ran_at) is not None for each in attempts)
        return cls(
            started=sessions[0].start,
            ended=last.end if last.is_over else None,
            state=last.state or ("running" if has_run else "starting"),
            verdict=last.verdict,
            sessions=tuple((each.start, each.end) for each in sessions),
            attempts=tuple(attempts),
            spans=spans,
            failures=tuple(of_kind(found, "worker-failed")),
            snapshots=tuple(of_kind(found, "snapshot")),
            evaluations=tuple(evaluations),
            samples={name: tuple(samples[name]) for name in spans if name in samples},
            step=next((each.last_step for each in reversed(attempts) if each.last_step is not None), None),
            total_steps=totals[-1] if totals else None,
            restarts=len(attempts) - num_sessions,
            best=_best(evaluations),
            result={
                name: each for name, each in results[-1].items() if isinstance(each, str) or is_number(each)
            }
            if results
            else {},
            goodput=goodput(found, sessions, attempts, spans, min_nodes),
        )

    def losses(self) -> list[Point]:
        """Return the loss at each sampled step; of redone steps, the last one's."""
        return standing(
            [
                Point(each.get("step"), each.get("loss"), each.time, attempt.attempt)
                for each in told
                if is_number(each.get("step")) and is_number(each.get("loss"))
            ]
            for attempt, told in self._told()
        )

    def metric(self, name: str) -> list[Point]:
        """Return the values of a metric in the evaluations that count."""
        return [
            Point(each.get("step"), each.get("metrics")[name], each.time, str(each.get("attempt")))
            for each in self.evaluations
            if is_number(mapping_of(each.get("metrics")).get(name))
        ]

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics that were evaluated to a number."""
        told = [mapping_of(each.get("metrics")) for each in self.evaluations]
        return list(dict.fromkeys(name for each in told for name, value in each.items() if is_number(value)))

    def speeds(self) -> list[Point]:
        """Return the steps per second between every two samples, at the second one's step, redone steps included."""
        found = []
        for attempt, told in self._told():
            known = [(each.time, int(each.get("step"))) for each in told if is_number(each.get("step"))]
            for (before, low), (after, high) in itertools.pairwise(known):
                if after > before:
                    found.append(Point(high, (high - low) / (after - before), after, attempt.attempt))
        return found

    def _told(self) -> list[tuple[Attempt, Sequence[Event]]]:
        """Return each attempt with the samples of rank 0's node, or of the first node that has some."""
        by_attempt: dict[str, dict[str, list[Event]]] = {}
        for node, samples in self.samples.items():
            for each in samples:
                by_attempt.setdefault(str(each.get("attempt")), {}).setdefault(node, []).append(each)
        found: list[tuple[Attempt, Sequence[Event]]] = []
        for attempt in self.attempts:
            own = by_attempt.get(attempt.attempt, {})
            voice = next((node for node in attempt.members if node in own), min(own, default=""))
            found.append((attempt, own.get(voice, ())))
        return found


def _by_the_last_clock(events: Sequence[Event]) -> list[Event]:
    """Return the events by the clock of the last start: if it was set back, events before are moved by as much."""
    found: list[Event] = []
    for event, set_back_s in with_set_back(events):
        if set_back_s:  # plus 1 ms, so that all of them come before this one
            found = [replace(each, time=each.time - set_back_s - 1e-3) for each in found]
        found.append(event)
    return found


def standing(attempts: Iterable[Sequence[Point]]) -> list[Point]:
    """Join the points of all attempts to one curve; steps that a later attempt redid replace the earlier ones."""
    curve: list[Point] = []
    for points in attempts:
        if points:
            first = min(point.step for point in points)
            curve = [point for point in curve if point.step < first] + sorted(
                points, key=lambda point: point.step
            )
    return curve


def _standing_evaluations(events: Sequence[Event], attempts: Sequence[Attempt]) -> list[Event]:
    """Return the evaluations without those of steps that were redone later."""
    all_of_them = of_kind(events, "evaluation")
    kept: list[Event] = []
    for attempt in attempts:
        own = [each for each in all_of_them if each.get("attempt") == attempt.attempt]
        own = [each for each in own if is_number(each.get("step"))]
        if attempt.resumed_at is not None:
            kept = [each for each in kept if each.get("step") <= attempt.resumed_at]
        steps = {each.get("step") for each in own}
        kept = [each for each in kept if each.get("step") not in steps] + own
    return sorted(kept, key=lambda each: int(each.get("step")))


def _best(evaluations: Iterable[Event]) -> dict[str, tuple[float, int]]:
    best: dict[str, tuple[float, int]] = {}
    for event in evaluations:
        for name, value in mapping_of(event.get("metrics")).items():
            if not is_number(value):
                continue
            old = best.get(str(name))
            is_better = old is None or (value < old[0] if is_least_best(str(name)) else value > old[0])
            if is_better:
                best[str(name)] = (float(value), int(event.get("step")))
    return best
