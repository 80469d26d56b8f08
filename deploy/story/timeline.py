"""Derives the timeline of each node (starting, waiting, training, away, ended) from a run's events; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import ENDED
from nodekit.deploy.story.attempts import Attempt, Session, has_told_steps, names_of, of_kind, text_of


@dataclass(frozen=True)
class Span:
    """A period during which a node was in one state."""

    start: float
    end: float
    state: str
    """starting, waiting, training, away, ended; if the run never reported a step, running in place of training."""
    why: str = ""


def spans_by_node(
    events: Sequence[Event], sessions: Sequence[Session], attempts: Sequence[Attempt]
) -> dict[str, tuple[Span, ...]]:
    """Return node → its spans, without gaps from its first event on."""
    own: dict[str, list[Event]] = {name: [] for name in nodes_of(events, attempts)}
    for event in events:
        if event.kind == "run-started":
            for name in names_of(event.get("nodes")):
                own[name].append(event)
        elif event.kind != "sample" and event.about:
            own[str(event.about)].append(event)
    return {name: _spans_of(name, found, sessions, attempts) for name, found in own.items()}


def nodes_of(events: Sequence[Event], attempts: Iterable[Attempt]) -> list[str]:
    """Return the names of all nodes that took part in a run, in the order of starts, attempts and events."""
    named: list[str] = []
    for event in of_kind(events, "run-started"):
        named += names_of(event.get("nodes"))
    for attempt in attempts:
        named += attempt.members
    named += [str(event.about) for event in events if event.about]
    return list(dict.fromkeys(named))


def _spans_of(
    name: str, events: Sequence[Event], sessions: Sequence[Session], every: Sequence[Attempt]
) -> tuple[Span, ...]:
    """Return the spans of one node; `events` are those about it."""
    marks: list[tuple[float, str, str]] = []
    for session in sessions:
        if session.is_over:
            marks.append((session.end, "ended", f"the run {session.state}"))
    attempts = [each for each in every if name in each.members]
    is_done = every[-1].attempt if every and sessions[-1].state == "succeeded" else ""
    is_told = has_told_steps(every)
    own_ends = {str(each.get("attempt")) for each in of_kind(events, "attempt-ended") if each.node == name}
    for attempt in attempts:
        if attempt.first_step_time is not None:
            marks.append((attempt.first_step_time, "training", ""))
        if attempt.ended is not None and attempt.attempt not in own_ends:
            marks.append((attempt.ended, "away", attempt.why))
    ends = {each.attempt: each for each in attempts}
    for event in events:
        if event.kind == "run-started":
            marks.append((event.time, "starting", ""))
        elif event.kind == "workers-started" and not is_told:
            marks.append((event.time, "running", ""))
        elif (mark := _mark(event, ends, is_done)) is not None:
            marks.append((event.time, *mark))
    marks.sort(key=lambda mark: mark[0])
    return _merged(marks, until=sessions[-1].end)


def _mark(event: Event, attempts: Mapping[str, Attempt], is_done: str) -> tuple[str, str] | None:
    """Return the (state, why) that begins for an event's node with that event; None if none does."""

    # Called for few kinds of events, since a run of weeks has thousands of attempts.
    def is_in_one() -> bool:
        return any(
            each.started <= event.time < (math.inf if each.ended is None else each.ended)
            for each in attempts.values()
        )

    match event.kind:
        case "agent-started" | "generation" | "rendezvous":
            return "starting", ""
        case "no-quorum":
            return "waiting", "those that were here were no majority"
        case "store-lost":
            return "waiting", "the rendezvous host was lost"
        case "attempt-ended":
            if is_done and event.get("attempt") == is_done:
                return "waiting", "trained to the end; others had not"
            return "starting", text_of(event.get("why"))
        case "agent-ended":
            state = str(event.get("state"))
            return ("ended", "") if state in ENDED else ("away", "its agent was ended")
        case "start" | "join" | "reached" if not is_in_one():
            return "starting", ""
        case "unreachable" if not is_in_one():
            return "away", f"could not be reached: {text_of(event.get('why'))}"
        case "node-state" if event.get("state") in ("fenced", "orphaned") and not is_in_one():
            return "waiting", f"it was {event.get('state')}"
    return None


def _merged(marks: Sequence[tuple[float, str, str]], *, until: float) -> tuple[Span, ...]:
    """Turn the (time, state, why) at which each state began into spans; the last one ends at `until`."""
    spans: list[Span] = []
    for number, (time, state, why) in enumerate(marks):
        end = marks[number + 1][0] if number + 1 < len(marks) else max(until, time)
        if spans and spans[-1].state == state:
            spans[-1] = dataclasses.replace(spans[-1], end=end, why=spans[-1].why or why)
        elif end > time:
            spans.append(Span(time, end, state, why))
    return tuple(spans)
