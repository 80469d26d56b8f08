"""What a run has come to, in a few numbers: kept beside its record, so that nobody reads all its events for a table."""

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
    """A run in numbers; what is not known is None."""

    step: int | None = None
    total_steps: int | None = None
    best: dict[str, tuple[float, int | None]] = field(default_factory=dict)
    """Metric → its best value, and at which step; without an evaluation what the job said at its end."""
    goodput: float | None = None
    """Share of the time that trained steps which count; None as well where no step was ever told."""
    seconds: float | None = None
    """How long it was up."""
    restarts: int | None = None
    world_size: int | None = None
    """Ranks, in its last attempt."""
    guess: Guess | None = None
    """How far it seems to be by what rank 0 printed (`deploy/agent/telemetry/guess.py`), where it told of no step."""
    problem: str = ""
    """Why nothing is known: its events cannot be read."""

    @classmethod
    def of(cls, history: History) -> Summary:
        """That of a history."""
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
        """The metric that says most, and its best value: the first one that is no loss."""
        names = sorted(self.best, key=lambda name: (is_least_best(name), name != "accuracy"))
        return (names[0], self.best[names[0]][0]) if names else None


def summary(run: Run) -> Summary:
    """That of a run, from what is on this machine.

    Once it has ended it is kept, with the size of the events file that it is of: one that has grown since is read anew.
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
        with contextlib.suppress(OSError):  # a full disk, or a record that is only to be read
            write_private(str(run.folder / FILE), json.dumps(data).encode())
        return found
    return replace(found, step=_step_now(run) or found.step)


def guess_now(run: Run) -> Guess | None:
    """How far a run seems to be that tells no step, as it was last heard of."""
    said = [each for each in events.now(run.folder).values() if each.get("guess")]
    return max(said, key=lambda each: float(each.get("time") or 0.0))["guess"] if said else None


def _step_now(run: Run) -> int | None:
    """That of the least advanced node, as it was last heard of: samples are minutes apart in a long run."""
    said = [
        str(each.get("progress") or "")
        for each in events.now(run.folder).values()
        if each.get("state") == "running"
    ]
    return min((step for each in said if (step := parse_progress(each)["step"]) is not None), default=None)


def _load(run: Run, size_bytes: int) -> Summary | None:
    """The one that was kept, if it is of this many bytes of events; None where it is damaged: it is made anew."""
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
