"""A run's summary in a few numbers, cached beside its record, so that a table of runs need not read all events."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, replace

from nodekit.deploy.agent.telemetry.notes import parse_progress
from nodekit.deploy.host.files import NOT_FOUND, read, write_private
from nodekit.deploy.host.schema import Guess
from nodekit.deploy.records import events, runs
from nodekit.deploy.records.runs import Run
from nodekit.deploy.story.attempts import is_number
from nodekit.deploy.story.history import History
from nodekit.inventory.errors import KitError
from nodekit.training.measures import is_least_best

FILE = "summary.json"
VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers; unknown ones are None."""

    step: int | None = None
    total_steps: int | None = None
    best: dict[str, tuple[float, int | None]] = field(default_factory=dict)
    """Metric → its best value and that value's step; without evaluations, the job's final result."""
    goodput: float | None = None
    """The share of the time spent on training steps that count, 0 to 1; None if no step was ever reported."""
    seconds: float | None = None
    """How long the run was up."""
    restarts: int | None = None
    world_size: int | None = None
    """The number of ranks in its last attempt."""
    guess: Guess | None = None
    """Its progress as guessed from rank 0's output (`deploy/agent/telemetry/guess.py`), if no step was reported."""
    problem: str = ""
    """Why the events cannot be read, so that nothing is known; "" if they can."""

    @classmethod
    def of(cls, history: History) -> Summary:
        """Return the summary of a history."""
        if not history.attempts:
            return cls(seconds=history.goodput.total_s)
        best: dict[str, tuple[float, int | None]] = dict(history.best)
        if not best:
            numbers = {name: float(value) for name, value in history.result.items() if is_number(value)}
            best = {name: (value, None) for name, value in numbers.items() if name in ("accuracy", "loss")}
        return cls(
            step=history.step,
            total_steps=history.total_steps,
            best=best,
            goodput=history.goodput.share,
            seconds=history.goodput.total_s,
            restarts=history.restarts,
            world_size=history.attempts[-1].world_size or None,
        )

    @property
    def headline(self) -> tuple[str, float] | None:
        """The most telling metric and its best value: accuracy, else another that is no loss, else a loss."""
        names = sorted(self.best, key=lambda name: (is_least_best(name), name != "accuracy"))
        return (names[0], self.best[names[0]][0]) if names else None


def summary(run: Run) -> Summary:
    """Return the summary of a run, from its files on this machine.

    Once the run has ended the summary is cached, with the size of the events file: if that differs, it is made again.
    """
    try:
        return _summary(run)
    except KitError as error:
        return Summary(problem=str(error))


def _summary(run: Run) -> Summary:
    try:
        size_bytes = (run.folder / events.FILE).stat().st_size
    except NOT_FOUND:
        return Summary()
    except OSError as error:
        raise events.unreadable(run.folder / events.FILE, error) from error
    if (kept := _load(run, size_bytes)) is not None:
        return kept
    found = Summary.of(History.of(events.read(run.folder), now=run.end_or_now()))
    if found.step is None:
        found = replace(found, guess=guess_now(run))
    if run.state in runs.ENDED:
        data = {"version": VERSION, "events_bytes": size_bytes, "summary": asdict(found)}
        with contextlib.suppress(OSError):  # the disk may be full, or the record read-only
            write_private(str(run.folder / FILE), json.dumps(data).encode())
        return found
    return replace(found, step=_step_now(run) or found.step)


def guess_now(run: Run) -> Guess | None:
    """Return the last guess at the progress of a run that reports no steps; None if there is none."""
    said = [each for each in events.now(run.folder).values() if each.get("guess")]
    return max(said, key=lambda each: float(each.get("time") or 0.0))["guess"] if said else None


def _step_now(run: Run) -> int | None:
    """Return the step of the least advanced node by its last status, which is newer than the samples of a long run."""
    said = [
        str(each.get("progress") or "")
        for each in events.now(run.folder).values()
        if each.get("state") == "running"
    ]
    return min((step for each in said if (step := parse_progress(each)["step"]) is not None), default=None)


def _load(run: Run, size_bytes: int) -> Summary | None:
    """Return the cached summary if it belongs to an events file of this size; None if not, or if it is damaged."""
    try:
        kept = json.loads(read(str(run.folder / FILE)))
        if (kept["version"], kept["events_bytes"]) != (VERSION, size_bytes):
            return None
        best = {name: (float(value), step) for name, (value, step) in kept["summary"].pop("best").items()}
        found = Summary(best=best, **kept["summary"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    numbers = (found.step, found.total_steps, found.goodput, found.seconds, found.restarts, found.world_size)
    are_right = all(isinstance(each, int | float | None) for each in numbers)
    return found if are_right and isinstance(found.guess, dict | None) else None
