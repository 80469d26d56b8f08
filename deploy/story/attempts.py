"""Derives the attempts of a run, and when it was up, from its events (docs/events.md); pure."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.agent.ranks.failures import is_secondary
from nodekit.deploy.records.events import Event


@dataclass(frozen=True)
class Attempt:
    """One attempt: a rendezvous of the nodes, and the training after it."""

    attempt: str
    """``GENERATION.ROUND``."""
    generation: int
    members: tuple[str, ...]
    world_size: int
    """The number of ranks; 0 if unknown."""
    started: float
    """When the rendezvous was complete, in seconds since 1970, like all times here."""
    ran_at: float | None
    """When its ranks were started; None if no start is known."""
    first_step_time: float | None
    """When its first step was reported; None if none was."""
    first_step: int | None
    last_step: int | None
    """The last step that any rank reported."""
    resumed_at: int | None
    """The step of the snapshot that it resumed from, if known."""
    ended: float | None
    """None if it is running."""
    trained_until: float
    """When its last step was done, as far as known: a job that hangs, or waits for a lost node, does no steps."""
    redone_steps: int
    """The number of steps that an earlier attempt had done already."""
    why: str
    """Why it ended."""
    steps: tuple[tuple[float, int], ...] = ()
    """Pairs (time, step) at which steps were known to be done, in order."""

    @property
    def trained_s(self) -> float:
        """Seconds from its first step to its last."""
        return 0.0 if self.first_step_time is None else self.trained_until - self.first_step_time

    @property
    def steps_per_s(self) -> float | None:
        """The mean number of steps per second, pauses between steps included; None if unknown."""
        if self.first_step is None or self.last_step is None or self.trained_s <= 0:
            return None
        return (self.last_step - self.first_step) / self.trained_s or None


def has_told_steps(attempts: Iterable[Attempt]) -> bool:
    """Whether any step was ever reported; a script that writes no progress file reports none, however far it trains."""
    return any(each.first_step_time is not None for each in attempts)


@dataclass
class Session:
    """A period in which the run was up: from a start of the run to its end."""

    start: float
    end: float
    state: str = ""
    verdict: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, and its outcome is known."""
        return bool(self.state)


@dataclass
class _Try:
    """An attempt under construction, while the events are read."""

    name: str
    started: float = math.inf
    ran_at: float = math.inf
    members: tuple[str, ...] = ()
    world_size: int = 0
    num_workers: dict[str, int] = dataclasses.field(default_factory=dict)
    first: tuple[float, int | None] | None = None
    steps: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    last_step: int | None = None
    resumed_at: int | None = None
    ends: dict[str, float] = dataclasses.field(default_factory=dict)
    """node → when its ranks had ended."""
    heard: dict[str, float] = dataclasses.field(default_factory=dict)
    """node → the time of its last event while its ranks ran."""
    troubled: float = math.inf
    """The time of the first failure or loss, which will end the attempt."""
    why: str = ""
    end_why: str = ""
    """Why it ended according to the agents at its end; used only without `why`, which says more."""
    why_by: str = ""
    """The node whose agent reported `why`, if one did."""

    @property
    def order(self) -> tuple[int, int]:
        return order(self.name)


def order(attempt: str) -> tuple[int, int]:
    """Return the sort key of an attempt's name: its generation and its round."""
    generation, _, number = attempt.partition(".")
    return (int(generation) if generation.isdecimal() else 0, int(number) if number.isdecimal() else 0)


def read_sessions(events: Sequence[Event], now: float) -> list[Session]:
    """Return a run's sessions, from events in the order of time; a session that has not ended lasts until `now`."""
    starts = [event.time for event in of_kind(events, "run-started")]
    if not starts:
        starts = [events[0].time if events else now]
    starts[0] = min(starts[0], events[0].time) if events else starts[0]
    sessions = []
    for start, until in zip(starts, [*starts[1:], math.inf], strict=True):
        inside = [event for event in events if start <= event.time < until]
        if ends := of_kind(inside, "run-ended"):
            # Several processes may record the end; under Slurm, the last of them knows who cancelled the job.
            last = ends[-1]
            session = Session(start, ends[0].time, str(last.get("state")), str(last.get("verdict") or ""))
            # Without a supervisor the end is recorded at the next kit command, perhaps days later.
            session.end = min(session.end, max(start, _all_ended(inside)))
        elif until < math.inf:  # its supervisor was lost before it could record the end
            session = Session(start, inside[-1].time if inside else start, "failed")
        else:
            session = Session(start, max(start, now))
        sessions.append(session)
    return sessions


def session_of(sessions: Sequence[Session], time: float) -> int:
    """Return the index of the session that a time is in."""
    return max(0, bisect.bisect_right([each.start for each in sessions], time) - 1)


def read_attempts(events: Sequence[Event], sessions: Sequence[Session]) -> list[Attempt]:
    """Return all attempts, in their order."""
    tries = _read_tries(events)
    found: list[Attempt] = []
    done = 0  # the highest step so far
    for number, tried in enumerate(tries):
        session = sessions[session_of(sessions, tried.started)]
        following = tries[number + 1] if number + 1 < len(tries) else None
        is_last = following is None or session_of(sessions, following.started) != session_of(
            sessions, tried.started
        )
        limit = session.end if is_last or following is None else following.started
        limit = max(limit, tried.started)
        members = tried.members or tuple(sorted({*tried.ends, *tried.num_workers}))
        ended = _ended(tried, members, session, limit, is_last=is_last)
        stop = limit if ended is None else min(ended, max(tried.troubled, tried.started))
        if is_last and session.state == "succeeded" and ended is not None:
            stop = ended
        first_time = tried.first[0] if tried.first else None
        until = stop
        known: list[tuple[float, int]] = []
        if first_time is not None:
            first_time = min(max(first_time, tried.started), limit)
            # Attempts cannot overlap, even if the nodes' clocks differ.
            first_time = max([first_time, *(each.trained_until for each in found[-1:])])
            stop = max(stop, first_time)
            is_good = is_last and (not session.is_over or session.state in ("succeeded", "stopped"))
            until = stop if is_good else _last_step_time(tried, first_time, stop)
            known = [(time, step) for time, step in tried.steps if first_time <= time <= until]
            if tried.last_step is not None:
                known.append((until, tried.last_step))
        first_step = tried.first[1] if tried.first else None
        resumed_at = tried.resumed_at
        if resumed_at is None and first_step is not None:
            resumed_at = max(0, first_step - 1)
        last_step = tried.last_step if tried.first else None
        redone = 0
        if resumed_at is not None and last_step is not None:
            redone = max(0, min(done, last_step) - resumed_at)
            done = max(done, last_step)
        found.append(
            Attempt(
                attempt=tried.name,
                generation=tried.order[0],
                members=members,
                world_size=tried.world_size or sum(tried.num_workers.values()),
                started=tried.started,
                ran_at=min(max(tried.ran_at, tried.started), limit) if tried.ran_at < math.inf else None,
                first_step_time=first_time,
                first_step=first_step,
                last_step=last_step,
                resumed_at=resumed_at,
                ended=ended,
                trained_until=until,
                redone_steps=redone,
                why=tried.why or tried.end_why,
                steps=tuple(known),
            )
        )
    return found


def _ended(
    tried: _Try, members: Sequence[str], session: Session, limit: float, *, is_last: bool
) -> float | None:
    """Return when an attempt ended; None if it is running."""
    ended: float | None
    if is_last and not session.is_over and not all(name in tried.ends for name in members):
        # A failure on one node ends the attempt on all nodes; the others will report that soon.
        ended = tried.troubled if tried.troubled < math.inf else None
    elif tried.ends:
        is_whole = is_last and session.state == "succeeded"
        ended = max(tried.ends.values()) if is_whole else min(tried.ends.values())
    else:  # all its nodes were lost, and reported no end
        ended = min(limit, tried.troubled, max(tried.heard.values(), default=math.inf))
    return None if ended is None else min(max(ended, tried.started), limit)


def _read_tries(events: Sequence[Event]) -> list[_Try]:
    tries: dict[str, _Try] = {}
    latest: dict[str, _Try] = {}
    for event in events:
        name, step = event.get("attempt"), event.get("step")
        if not event.node or event.kind == "node-state":
            continue
        if isinstance(name, str) and name:
            tried = tries.setdefault(name, _Try(name))
            tried.started = min(tried.started, event.time)
            if event.kind not in ("worker-failed", "attempt-ended"):
                latest[event.node] = tried
                tried.heard[event.node] = event.time
            _read(tried, event)
            if is_number(step) and event.kind in ("first-step", "sample", "attempt-ended", "evaluation"):
                tried.last_step = max(int(step), tried.last_step or 0)
        elif event.node in latest and event.kind in (
            "membership",
            "store-lost",
            "generation",
            "agent-started",
            "agent-ended",
            "hang",
        ):
            tried = latest[event.node]
            if event.kind in ("membership", "store-lost", "generation", "agent-ended"):
                tried.troubled = min(tried.troubled, event.time)
            if event.kind in ("store-lost", "generation", "agent-ended"):
                tried.ends.setdefault(event.node, event.time)
            if event.kind not in ("membership", "hang"):
                del latest[event.node]
            # A node that is cut off reports that the rendezvous host is lost. The nodes that miss it know better.
            if not tried.why or (event.kind == "membership" and tried.why_by in names_of(event.get("names"))):
                tried.why, tried.why_by = _why(event), event.node
    return sorted(tries.values(), key=lambda each: each.order)


def _read(tried: _Try, event: Event) -> None:
    assert event.node is not None
    step = event.get("step")
    match event.kind:
        case "rendezvous":
            tried.members = tuple(names_of(event.get("members"))) or tried.members
        case "workers-started":
            tried.ran_at = min(tried.ran_at, event.time)
            if is_number(event.get("world_size")):
                tried.world_size = int(event.get("world_size"))
            if isinstance(event.get("workers"), Sequence):
                tried.num_workers[event.node] = len(event.get("workers"))
        case "first-step":
            if tried.first is None:
                tried.first = (event.time, int(step) if is_number(step) else None)
        case "resumed":
            tried.resumed_at = int(step) if is_number(step) else None
        case "worker-failed":
            tried.troubled = min(tried.troubled, event.time)
            if not tried.why and not _is_secondary(event):
                tried.why = _why(event)
        case "attempt-ended":
            tried.ends.setdefault(event.node, event.time)
            tried.troubled = min(tried.troubled, event.time)
            tried.end_why = tried.end_why or text_of(event.get("why"))
    if event.kind in ("first-step", "sample", "evaluation") and is_number(step):
        if tried.first is None:  # its first-step event is lost
            tried.first = (event.time, int(step))
        if not tried.steps or step > tried.steps[-1][1]:
            tried.steps.append((event.time, int(step)))


def _last_step_time(tried: _Try, first_time: float, stop: float) -> float:
    """Estimate when an attempt that was cut short did its last step, by the step rate of its samples."""
    known = [(time, step) for time, step in tried.steps if first_time <= time <= stop]
    if tried.last_step is None or len(known) < 2:
        return stop
    (begin, low), (end, high) = known[0], known[-1]
    if end <= begin or high <= low:
        return stop
    return min(stop, end + (tried.last_step - high) * (end - begin) / (high - low))


def _all_ended(events: Sequence[Event]) -> float:
    """Return when the last agent ended; infinity if one has not ended."""
    last: dict[str, Event] = {}
    for event in events:
        if event.node and event.kind in ("agent-started", "agent-ended"):
            last[event.node] = event
    if not last or any(event.kind == "agent-started" for event in last.values()):
        return math.inf
    return max(event.time for event in last.values())


def _why(event: Event) -> str:
    """Return why an attempt ended according to one event of a node; "" if the event does not say."""
    match event.kind:
        case "worker-failed":
            said = text_of(event.get("error")).strip().splitlines() or ["it wrote nothing"]
            return f"rank {event.get('rank')} on {event.node} failed: {said[-1]}"
        case "membership":
            return "a node was lost" if event.get("lost") else "a node came"
        case "hang":
            return text_of(event.get("text")) or "it hung"
        case "store-lost":
            return "the rendezvous host was lost"
        case "generation":
            return "another generation was begun"
    return ""


def _is_secondary(failure: Event) -> bool:
    """Whether a rank failed only because it lost another rank."""
    exitcode = failure.get("exitcode")
    return is_secondary(text_of(failure.get("error")), int(exitcode) if is_number(exitcode) else 1)


def text_of(value: object) -> str:
    """Return the value if it is a string, else "" (the field of an event may hold anything)."""
    return value if isinstance(value, str) else ""


def names_of(value: object) -> list[str]:
    """Return the strings of the value if it is a list, else []."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return []
    return [each for each in value if isinstance(each, str)]


def mapping_of(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def is_number(value: object) -> bool:
    """Whether the value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    """Return the events of some kinds."""
    return [event for event in events if event.kind in kinds]
