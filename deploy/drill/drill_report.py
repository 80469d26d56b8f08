"""Evaluates an observed run of a drill: detection, resumption, lost steps and loss curve; pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nodekit.deploy.output.wording import count

ROUNDING = 1e-3
"""Tolerance between two curves, relative to the curve's mean: sums over another number of ranks round differently, as
do most GPU kernels from run to run, and the difference grows with the steps."""
NEAR = 0.25
"""With another world size, a curve may fall short of the reference's progress by this share: layers such as dropout
draw other numbers then, and only lost training progress should be detected."""
_ROUTINE = (
    "phase", "first-progress", "run-ended", "drill", "first-step", "sample", "snapshot", "evaluation", "replica-kept",
    "replicas-gathered", "logs-removed", "logs-cut", "logs-not-bounded", "gpu-slow", "notify-failed",
)  # fmt: skip
"""Kinds of events that also occur without a fault."""
_ROUTINE_STATES = ("running", "waiting", "succeeded")
_WORDS = {
    "attempt-ended": "all ranks ended",
    "worker-failed": "a rank failed",
    "membership": "another node was missed",
    "store-lost": "the rendezvous host was missed",
    "agent-ended": "the agent ended",
    "agent-started": "an agent started",
    "node-state": "the agent is",
    "start": "an agent is started",
    "slow": "a rank that makes the others wait",
}
_UNSAVED = re.compile(r"no snapshot of step|NO SNAPSHOT FOR")

Outcome = Literal["survived", "not survived", "not tried"]
Sameness = Literal["equal", "same", "near", "different", "unknown"]


@dataclass(frozen=True)
class Step:
    """One step that a node has reported."""

    time: float
    step: int
    loss: float | None = None
    """None if it is known only from the progress file."""
    attempt: str = ""
    """Its attempt; empty: the last one that was started before `time`."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What was observed of one run; times are by the control machine's clock."""

    events: Sequence[Mapping[str, Any]] = ()
    """Events of the nodes and of the run, ordered by time."""
    steps: Sequence[Step] = ()
    """Ordered by time; a repeated step is listed again."""
    said: Sequence[tuple[float, str]] = ()
    """(time, line) of the job's output."""
    nproc: Mapping[str, int] = field(default_factory=dict)
    """Node → its number of ranks."""


@dataclass(frozen=True)
class Attempt:
    """One set of workers, from start to end."""

    name: str
    started: float
    world_size: int


@dataclass(frozen=True)
class Curve:
    """The comparison of a loss curve with that of the run without a fault."""

    sameness: Sameness
    text: str
    greatest_difference: float | None = None
    """Relative to the mean of the reference curve."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one fault."""

    fault: str
    where: str = ""
    outcome: Outcome
    problem: str = ""
    """Why it was not survived, or not tried."""
    run: str = ""
    struck_at: float | None = None
    """When the fault was injected, by this machine's clock; None: it was not."""
    detected_s: float | None = None
    detected_by: str = ""
    resumed_s: float | None = None
    """Seconds until training resumed; None with `went_on`: the training never stopped."""
    went_on: bool = False
    steps_lost: int | None = None
    world_sizes: tuple[int, ...] = ()
    curve: Curve = Curve("unknown", "")
    took_s: float = 0.0


def attempts(trace: Trace) -> list[Attempt]:
    """Return the attempts in the order of their start."""
    members: dict[str, list[str]] = {}
    started: dict[str, float] = {}
    for event in trace.events:
        name = str(event.get("attempt"))
        if event["kind"] == "rendezvous":
            members[name] = event["members"]
        elif event["kind"] == "workers-started":
            started.setdefault(name, event["time"])
    found = [
        Attempt(name, when, sum(trace.nproc.get(node, 1) for node in members.get(name, ())))
        for name, when in started.items()
    ]
    return sorted(found, key=lambda attempt: attempt.started)


def detected(trace: Trace, struck: float) -> tuple[float, str] | None:
    """Return when the fault was first noticed, and by which event: of a node that is cut off, by the others."""
    since = [event for event in trace.events if event["time"] > struck]
    cut_off = {event.get("about") for event in since if event["kind"] == "unreachable"}
    unusual = [
        event
        for event in since
        if event["kind"] not in _ROUTINE and event.get("state") not in _ROUTINE_STATES
    ]
    of_others = [event for event in unusual if event.get("node") not in cut_off]
    signs = [(float(event["time"]), _sign(event)) for event in of_others or unusual]
    signs += [
        (when, "a save that failed") for when, line in trace.said if when > struck and _UNSAVED.search(line)
    ]
    return min(signs, default=None)


def _sign(event: Mapping[str, Any]) -> str:
    where = event.get("node") or event.get("about")
    kind = str(event["kind"])
    if kind == "said":
        return str(event["text"])
    if kind == "unreachable":
        return f"{where} is unreachable"
    what = _WORDS.get(kind, kind.replace("-", " "))
    if state := event.get("state"):
        what += f" {state}"
    by = "" if event.get("node") else " (the supervisor)"
    return f"{what} on {where}{by}" if where else what


def resumed(trace: Trace, struck: float) -> Step | None:
    """Return the first step of an attempt started after the fault; step -1 for a script that reports none."""
    for attempt, steps in _by_attempt(trace):
        if attempt.started > struck and (steps or not trace.steps):
            return steps[0] if steps else Step(attempt.started, -1, attempt=attempt.name)
    return None


def steps_lost(trace: Trace) -> int | None:
    """Return how many steps were repeated in all attempts; None for a script that reports none."""
    if not trace.steps:
        return None
    lost, furthest = 0, 0
    for _, steps in _by_attempt(trace):
        if steps:
            lost += max(0, furthest + 1 - steps[0].step) if furthest else 0
            furthest = max(furthest, *(each.step for each in steps))
    return lost


def world_sizes(trace: Trace) -> tuple[int, ...]:
    """Return the successive world sizes of the training."""
    sizes: list[int] = []
    for attempt, steps in _by_attempt(trace):
        if (steps or not trace.steps) and attempt.world_size and attempt.world_size != (sizes or [0])[-1]:
            sizes.append(attempt.world_size)
    return tuple(sizes)


def _by_attempt(trace: Trace) -> list[tuple[Attempt, list[Step]]]:
    """Return each attempt with the steps first reported in it, by number."""
    found = attempts(trace)
    steps: dict[str, dict[int, Step]] = {attempt.name: {} for attempt in found}
    for each in trace.steps:
        name = each.attempt
        if not name:
            before = [attempt.name for attempt in found if attempt.started <= each.time]
            name = before[-1] if before else ""
        if name in steps:
            steps[name].setdefault(each.step, each)
    return [(each, [steps[each.name][step] for step in sorted(steps[each.name])]) for each in found]


def losses(trace: Trace) -> dict[int, float]:
    """Return step → its loss, as last computed."""
    last: dict[int, Step] = {}
    for each in trace.steps:
        if each.loss is not None and (each.step not in last or last[each.step].time <= each.time):
            last[each.step] = each
    return {step: float(last[step].loss or 0.0) for step in sorted(last)}


def compare(reference: Trace, trace: Trace) -> Curve:
    """Compare a loss curve with the reference: equal, same to rounding, near, or different."""
    wanted, found = losses(reference), losses(trace)
    if not wanted:
        return Curve("unknown", "no metrics.jsonl")
    lacking = [step for step in wanted if step not in found]
    height = statistics.fmean(map(abs, wanted.values())) or 1.0
    apart = {step: abs(found[step] - wanted[step]) / height for step in wanted if step in found}
    greatest = max(apart.values(), default=0.0)
    known = greatest if math.isfinite(greatest) else None  # JSON cannot represent NaN or infinity
    if lacking:
        return Curve("different", f"lacks {len(lacking)} steps from {lacking[0]} on", known)
    if more := [step for step in found if step not in wanted]:
        return Curve("different", f"has {len(more)} steps more", known)
    if all(found[step] == wanted[step] for step in wanted):
        return Curve("equal", "equal", 0.0)
    far = next((step for step, each in apart.items() if not each <= ROUNDING), None)
    if far is None:
        return Curve("same", f"±{greatest:.0e}", greatest)
    if world_sizes(trace) != world_sizes(reference) and _is_near(wanted, found, far):
        return Curve("near", f"±{greatest:.0%}", greatest)
    return Curve("different", f"differs from step {far} on", known)


def _is_near(wanted: Mapping[int, float], found: Mapping[int, float], far: int) -> bool:
    """Whether little training progress is lost, both where the curves part (step `far`) and at the end."""
    steps = [*wanted]
    # The mean of this many losses hardly depends on the random numbers that a layer draws.
    size = max(5, len(steps) // 10)
    begin = statistics.fmean(wanted[step] for step in steps[:size])
    for window in ([step for step in steps if step >= far][:size], steps[-size:]):
        reference, own = (statistics.fmean(curve[step] for step in window) for curve in (wanted, found))
        if not abs(own - reference) < NEAR * (begin - reference):
            return False
    return True


def judge(
    fault: str,
    *,
    where: str,
    at: float,
    unbroken: Trace,
    trace: Trace,
    problem: str,
    run: str = "",
    took_s: float = 0.0,
) -> Result:
    """Return the result of a fault.

    Args:
        fault: the fault's name.
        where: the node or nodes it struck.
        at: when it was injected.
        unbroken: the run to compare with.
        trace: the run with the fault.
        problem: why it was not survived, apart from the curve; "" if it was.
        run: the run's id.
        took_s: duration of the whole attempt, in seconds.
    """
    sign, again, curve = detected(trace, at), resumed(trace, at), compare(unbroken, trace)
    if not problem and curve.sameness == "different":
        problem = f"its loss curve {curve.text}"
    return Result(
        fault=fault,
        where=where,
        outcome="not survived" if problem else "survived",
        problem=problem,
        run=run,
        struck_at=at,
        detected_s=sign[0] - at if sign else None,
        detected_by=sign[1] if sign else "",
        resumed_s=again.time - at if again else None,
        went_on=again is None and not problem,
        steps_lost=steps_lost(trace),
        world_sizes=world_sizes(trace),
        curve=curve,
        took_s=took_s,
    )


def are_survived(results: Iterable[Result], *, asked_for: bool) -> bool:
    """Whether all faults were survived; one that was not tried counts only if `asked_for` by name."""
    bad = ("not survived", "not tried") if asked_for else ("not survived",)
    return not any(result.outcome in bad for result in results)


COLUMNS = ("fault", "on", "detected", "resumed", "lost", "world", "curve", "")


def row(result: Result) -> tuple[str, ...]:
    """Return the table row of a result."""
    curve = {
        "equal": "equal",
        "same": result.curve.text,
        "near": "near",
        "different": "differs",
        "unknown": "–",
    }
    return (
        result.fault,
        result.where or "–",
        _seconds(result.detected_s),
        "went on" if result.went_on else _seconds(result.resumed_s),
        "–" if result.steps_lost is None or not result.where else str(result.steps_lost),
        "→".join(map(str, result.world_sizes)) or "–",
        curve[result.curve.sameness],
        result.outcome,
    )


def sentence(result: Result) -> str:
    """Return the result in words."""
    if result.problem:
        return f"{result.outcome}: {result.problem}"
    curve = {
        "equal": "; the curve equals the unbroken run's, bit for bit",
        "same": f"; the curve is the unbroken run's to rounding ({result.curve.text})",
        "near": f"; the curve is near the unbroken run's ({result.curve.text}), as it is to be if there is dropout: "
        "with another number of ranks it draws other numbers",
    }
    return result.outcome + curve.get(result.curve.sameness, "")


def verdict(results: Sequence[Result]) -> str:
    """Return the last line of the report."""
    survived = sum(result.outcome == "survived" for result in results)
    parts = [f"{survived} of {len(results)} faults survived"]
    if lost := [result.steps_lost for result in results if result.where and result.steps_lost is not None]:
        parts[0] += f", {count(sum(lost), 'step')} lost"
    for outcome in ("not survived", "not tried"):
        if names := [result.fault for result in results if result.outcome == outcome]:
            parts.append(f"{outcome}: {', '.join(names)}")
    return "; ".join(parts)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{max(0.0, value):.1f} s"
