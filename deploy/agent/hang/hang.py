"""Detect a hang: every rank is alive, but some or all make no progress. Standard library only.

The time limit is learnt from the job's own steps. After that `deploy/agent/hang/stacks.py` reads what each rank does,
and `deploy/agent/hang/culprit.py` names the rank that the others wait for.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nodekit.training.process.stages import STARTING

FLOOR_S = 120.0  # a pause no longer than this is no hang, unless the inventory says so (timings.hang)
# The most that counts between two calls: after a longer gap, this process was suspended, and maybe the ranks too.
_GAP_S = 5.0
_TALKING = 10  # how many times the learnt limit a job may stay at a step while its logs grow: it may evaluate
_MAX_PATIENCE = 64
# How many times the limit a rank may stay at a stage of its start: imports, downloads, compilation.
_STAGE_TIMES = 5
_OWN_CHANGES = 3  # after so many signs of progress a rank can be judged by its own pace
_STEP = re.compile(r"\s*(\d+)(?:\s*/\s*(\d+))?")


@dataclass(frozen=True)
class Progress:
    """The content of a rank's progress file, and when it was written."""

    text: str
    mtime: float
    step: int | None
    """The number that the text begins with; None if there is none, as in a file that is only touched."""

    @classmethod
    def parse(cls, text: str, mtime: float) -> Progress:
        """Parse the content of the file: ``STEP/TOTAL …``, ``STEP …`` or anything else."""
        found = _STEP.match(text)
        return cls(text, mtime, int(found[1]) if found else None)

    @property
    def is_done(self) -> bool:
        """Whether the last step is done; what follows it, such as a last evaluation, may take long."""
        found = _STEP.match(self.text)
        return bool(found and found[2] and int(found[1]) >= int(found[2]))

    @property
    def is_start(self) -> bool:
        """Whether this only announces a first step: an empty text, step 0, or a stage of the start."""
        return not self.text.strip() or self.step == 0 or bool(self.stage)

    def says(self, stages: tuple[str, ...]) -> bool:
        """Whether the text ends with one of these stages."""
        return self.text.rstrip().endswith(stages)

    @property
    def stage(self) -> str:
        """The stage of the rank's start, before its first step; "" if it reports none."""
        return self.text[len(STARTING) :].strip() if self.text.startswith(STARTING) else ""


def read_progress(folder: Path) -> dict[int, Progress]:
    """Read the files ``rank<R>`` in `folder`, by rank; skip one that vanishes meanwhile."""
    found = {}
    with contextlib.suppress(OSError):
        for path in folder.glob("rank*"):
            with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                text = file.read(200).decode("utf-8", "replace")
                found[int(path.name[4:])] = Progress.parse(text, os.fstat(file.fileno()).st_mtime)
    return found


@dataclass
class Learnt:
    """What is learnt of the job's pace and kept across attempts; plain values that JSON can hold."""

    longest_s: float = 0.0
    """The longest pause between two signs of progress."""
    patience: int = 1
    """Factor on the limit, doubled by each alarm, which may be false, until the job gets past its step."""
    alarm_step: int | None = None
    """The step of the last alarm; for ranks that report no steps, the number of progress reports until then."""
    writes_progress: bool = False


@dataclass(frozen=True)
class Suspicion:
    """A suspected hang: no progress for longer than the job's pace allows."""

    ranks: tuple[int, ...]
    """The ranks that are behind; all silent ones if progress does not tell."""
    quiet_s: float
    limit_s: float
    text: str


@dataclass
class _Rank:
    progress: Progress
    since: float
    num_changes: int
    longest_s: float = 0.0


class Watch:
    """Judges the progress of one node's ranks; counts time only while `observe` and `suspect` are called."""

    def __init__(
        self,
        *,
        hang: float | Literal["auto", "never"] = "auto",
        floor_s: float | None = None,
        factor: float = 2.0,
        learnt: Learnt | None = None,
    ) -> None:
        """Set the limit.

        Args:
            hang: seconds; ``auto`` for `factor` × the longest pause seen, at least `floor_s`; ``never`` for no limit.
            floor_s: None for `FLOOR_S`.
            factor: for ``auto``.
            learnt: by an earlier agent.
        """
        self.learnt = learnt or Learnt()
        self._hang = hang
        self._floor_s, self._factor = FLOOR_S if floor_s is None else floor_s, factor
        self._now: float | None = None
        self._clock = 0.0
        self._stale: dict[int, Progress] = {}
        self._ranks: dict[int, _Rank] = {}
        self.begin()

    @property
    def limit_s(self) -> float:
        """How long the node may make no progress, in seconds, as of now."""
        if not isinstance(self._hang, str):
            return self._hang
        return max(self._floor_s, self._factor * self.learnt.longest_s) * self._patience

    def begin(self) -> None:
        """Begin an attempt: progress files of the one before do not count, and what was learnt stays."""
        self._stale |= {rank: each.progress for rank, each in self._ranks.items()}
        self._ranks = {}
        self._log_sizes: dict[int, int] = {}
        self._begun = self._clock
        self._changed: float | None = None
        self._talked: float | None = None
        self._staged = self._clock
        self._patience = self.learnt.patience

    def observe(self, now: float, progress: Mapping[int, Progress], log_sizes: Mapping[int, int]) -> None:
        """Record the ranks' progress, and the sizes of their logs, at time `now`, in seconds by any steady clock."""
        self._clock, self._now = self._at(now), now
        before = self._changed
        for rank, found in progress.items():
            self._observe_rank(rank, found)
        if before is not None and self._changed == self._clock:
            self.learnt.longest_s = max(self.learnt.longest_s, self._clock - before)
        if any(size > self._log_sizes.get(rank, 0) for rank, size in log_sizes.items()):
            self._talked = self._clock
        self._log_sizes.update(log_sizes)

    def _observe_rank(self, rank: int, found: Progress) -> None:
        known = self._ranks.get(rank)
        if found == (known.progress if known else self._stale.get(rank)):
            return
        self.learnt.writes_progress = True
        if known is None:
            known = self._ranks[rank] = _Rank(found, self._clock, 0)
            if found.is_start:
                self._staged = self._clock
                return
        elif found.is_start and found.text != known.progress.text and (found.stage or not known.num_changes):
            known.progress, self._staged = found, self._clock
            return
        if known.num_changes:
            known.longest_s = max(known.longest_s, self._clock - known.since)
        known.progress, known.since, known.num_changes = found, self._clock, known.num_changes + 1
        self._changed = self._clock
        if self.learnt.alarm_step is not None and self._position() > self.learnt.alarm_step:
            self._patience, self.learnt.patience, self.learnt.alarm_step = 1, 1, None

    def suspect(self, now: float) -> Suspicion | None:
        """Return the hang that follows from all that was observed; None if there is none."""
        found = None if self._hang == "never" else self._judge(self._at(now))
        if found and self._changed is not None:
            self.learnt.alarm_step = self._position()
            self.be_more_patient()
        elif found and any(each.progress.stage for each in self._ranks.values()):
            self.learnt.alarm_step = -1 if self.learnt.alarm_step is None else self.learnt.alarm_step
            self.be_more_patient()
        return found

    def is_silent(self, now: float) -> bool:
        """Whether ranks that report no stage have been silent for longer than a start should take; they may be slow."""
        is_begun = self._changed is not None or self._hang == "never"
        return not is_begun and self._silence_s(self._at(now)) > self.limit_s * _STAGE_TIMES

    @property
    def has_begun(self) -> bool:
        """Whether some rank has reported progress in this attempt."""
        return self._changed is not None

    def excuse(self) -> None:
        """Count silence from now on only: the ranks had no way to report their progress."""
        if self._changed is not None:
            self._changed = self._clock
        for each in self._ranks.values():
            each.since = self._clock

    def be_more_patient(self) -> None:
        """Double the limit from the next attempt on, since this alarm may be false."""
        self.learnt.patience = min(self._patience * 2, _MAX_PATIENCE)

    def quiet_s(self, now: float) -> float:
        """Return for how many seconds of this attempt no rank has reported progress or written to its log."""
        return self._silence_s(self._at(now))

    @property
    def active_s(self) -> float:
        """Seconds from the beginning of this attempt to the last sign of life: progress, or output in a log."""
        return self._clock - self._silence_s(self._clock) - self._begun

    def _silence_s(self, clock: float) -> float:
        said = (self._changed, self._talked, self._begun)
        return clock - max(each for each in said if each is not None)

    def _judge(self, clock: float) -> Suspicion | None:
        if self._changed is None:
            return self._judge_start(clock)
        limit_s = self.limit_s
        undone = {rank: each for rank, each in self._ranks.items() if not each.progress.is_done}
        quiet_s = clock - self._changed
        talks = self._hang == "auto" and self._talked is not None and clock - self._talked <= limit_s
        node_s = limit_s * _TALKING if talks else limit_s
        # After the last step ranks may evaluate and save for long, but not without limit and without output.
        if not undone and (silence_s := self._silence_s(clock)) > limit_s * _TALKING:
            return self._suspicion(self._ranks, silence_s, limit_s * _TALKING)
        if undone and quiet_s > node_s:
            steps = {rank: each.progress.step for rank, each in undone.items()}
            lowest = min((step for step in steps.values() if step is not None), default=None)
            return self._suspicion([rank for rank in steps if steps[rank] == lowest], quiet_s, node_s)
        for rank, each in undone.items():
            own_s = max(limit_s, self._factor * each.longest_s)
            # Other ranks have made progress for that long, and this one has not.
            if each.num_changes >= _OWN_CHANGES and self._changed - each.since > own_s:
                return self._suspicion([rank], clock - each.since, own_s)
        return None

    def _judge_start(self, clock: float) -> Suspicion | None:
        ranks = self._ranks or self._log_sizes
        stages = {rank: each.progress.stage for rank, each in self._ranks.items() if each.progress.stage}
        limit_s, staged_s = self.limit_s * _STAGE_TIMES, clock - self._staged
        talks = self._talked is not None and clock - self._talked <= limit_s
        if stages and staged_s > (limit_s * _TALKING if talks else limit_s):
            what = " or ".join(sorted(set(stages.values())))
            text = f"no first step: {what} for {staged_s:.0f} s, with a limit of {limit_s:.0f} s"
            return Suspicion(tuple(sorted(stages)), staged_s, limit_s, text)
        # A script that reports no progress: with a limit in seconds set for it, its output counts instead.
        if isinstance(self._hang, str) or self.learnt.writes_progress or self._talked is None:
            return None
        quiet_s = clock - self._talked
        return self._suspicion(ranks, quiet_s, self._hang) if quiet_s > self._hang else None

    def _suspicion(self, ranks: Iterable[int], quiet_s: float, limit_s: float) -> Suspicion:
        why = "as configured"
        if self._changed is not None and isinstance(self._hang, str):
            why = f"the longest pause before was {self.learnt.longest_s:.1f} s"
        text = f"no progress for {quiet_s:.0f} s, with a limit of {limit_s:.0f} s ({why})"
        return Suspicion(tuple(sorted(ranks)), quiet_s, limit_s, text)

    def _position(self) -> int:
        """Return how far the slowest rank is: its step, or its number of progress reports in this attempt."""
        told = {rank: each.progress.step for rank, each in self._ranks.items()}
        return min(self._ranks[rank].num_changes if step is None else step for rank, step in told.items())

    def _at(self, now: float) -> float:
        return self._clock + (0.0 if self._now is None else min(max(now - self._now, 0.0), _GAP_S))
