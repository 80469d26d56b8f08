"""Find a hang: every rank is alive, and all or some make no progress. Standard library only.

The limit is learnt from the job's own steps. Then `deploy/agent/hang/stacks.py` shows what each rank does, and
`deploy/agent/hang/culprit.py` which rank the others wait for.
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
# At most so much counts between two calls: after more, we, and maybe the ranks too, were suspended.
_GAP_S = 5.0
_TALKING = 10  # how many times the learnt limit a job may stay at a step while its logs grow: it may evaluate
_MAX_PATIENCE = 64
# How many times the limit a rank may stay at a stage of its start: imports, downloads, compilation.
_STAGE_TIMES = 5
_OWN_CHANGES = 3  # from then on a rank has a rhythm of its own that it can fall behind
_STEP = re.compile(r"\s*(\d+)(?:\s*/\s*(\d+))?")


@dataclass(frozen=True)
class Progress:
    """A rank's progress file as it was found."""

    text: str
    mtime: float
    step: int | None
    """What the text begins with; None for a file that is only touched."""

    @classmethod
    def parse(cls, text: str, mtime: float) -> Progress:
        """From the content of the file, ``STEP/TOTAL …``, ``STEP …`` or anything."""
        found = _STEP.match(text)
        return cls(text, mtime, int(found[1]) if found else None)

    @property
    def is_done(self) -> bool:
        """Whether the last step of all is done: what comes after it (a last evaluation) may take long."""
        found = _STEP.match(self.text)
        return bool(found and found[2] and int(found[1]) >= int(found[2]))

    @property
    def is_start(self) -> bool:
        """Whether this, found first, is only the announcement of a step to come."""
        return not self.text.strip() or self.step == 0 or bool(self.stage)

    def says(self, stages: tuple[str, ...]) -> bool:
        """Whether it ends with one of these, after a step."""
        return self.text.rstrip().endswith(stages)

    @property
    def stage(self) -> str:
        """What it does before its first step; "" where it does not say."""
        return self.text[len(STARTING) :].strip() if self.text.startswith(STARTING) else ""


def read_progress(folder: Path) -> dict[int, Progress]:
    """The files ``rank<R>`` in `folder`, by rank; one that vanishes meanwhile is left out."""
    found = {}
    with contextlib.suppress(OSError):
        for path in folder.glob("rank*"):
            with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                text = file.read(200).decode("utf-8", "replace")
                found[int(path.name[4:])] = Progress.parse(text, os.fstat(file.fileno()).st_mtime)
    return found


@dataclass
class Learnt:
    """What outlives an attempt; plain values, so that it can be kept in JSON for the next agent."""

    longest_s: float = 0.0
    """The longest pause between two signs of progress that was followed by progress."""
    patience: int = 1
    """Times the limit: doubled by each alarm until the job gets past it, since it may have been a false one."""
    alarm_step: int | None = None
    """Where the last alarm was; where no steps are told, how often progress had been."""
    writes_progress: bool = False


@dataclass(frozen=True)
class Suspicion:
    """No progress for longer than this job's steps explain."""

    ranks: tuple[int, ...]
    """The ones behind as far as progress tells, all that are silent when it does not."""
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
    """Judges the progress of one node's ranks; time counts only while it is observed."""

    def __init__(
        self,
        *,
        hang: float | Literal["auto", "never"] = "auto",
        floor_s: float | None = None,
        factor: float = 2.0,
        learnt: Learnt | None = None,
    ) -> None:
        """`hang`: seconds, or ``auto``: `factor` × the longest pause seen, at least `floor_s` (None: `FLOOR_S`)."""
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
        """How long the node may be without progress now."""
        if not isinstance(self._hang, str):
            return self._hang
        return max(self._floor_s, self._factor * self.learnt.longest_s) * self._patience

    def begin(self) -> None:
        """A new attempt: what the files say from the one before is no progress, what was learnt stays."""
        self._stale |= {rank: each.progress for rank, each in self._ranks.items()}
        self._ranks = {}
        self._log_sizes: dict[int, int] = {}
        self._begun = self._clock
        self._changed: float | None = None
        self._talked: float | None = None
        self._staged = self._clock
        self._patience = self.learnt.patience

    def observe(
        self, now: float, progress: Mapping[int, Progress], log_sizes: Mapping[int, int] | None = None
    ) -> None:
        """Take in what the ranks' progress files say, and how long their logs are; `now` in seconds, any clock."""
        self._clock, self._now = self._at(now), now
        before = self._changed
        for rank, found in progress.items():
            self._observe_rank(rank, found)
        if before is not None and self._changed == self._clock:
            self.learnt.longest_s = max(self.learnt.longest_s, self._clock - before)
        if any(size > self._log_sizes.get(rank, 0) for rank, size in (log_sizes or {}).items()):
            self._talked = self._clock
        self._log_sizes.update(log_sizes or {})

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
        """Whether this is a hang, by all that was observed."""
        found = None if self._hang == "never" else self._judge(self._at(now))
        if found and self._changed is not None:
            self.learnt.alarm_step = self._position()
            self.be_more_patient()
        elif found and any(each.progress.stage for each in self._ranks.values()):
            self.learnt.alarm_step = -1 if self.learnt.alarm_step is None else self.learnt.alarm_step
            self.be_more_patient()
        return found

    def is_silent(self, now: float) -> bool:
        """Whether ranks that tell no stage have not begun in a time that is long for a start: they may only be slow."""
        is_begun = self._changed is not None or self._hang == "never"
        return not is_begun and self._silence_s(self._at(now)) > self.limit_s * _STAGE_TIMES

    @property
    def has_begun(self) -> bool:
        """Whether some rank has told of progress in this attempt."""
        return self._changed is not None

    def be_more_patient(self) -> None:
        """From the next attempt on, wait twice as long: it may have been a false alarm."""
        self.learnt.patience = min(self._patience * 2, _MAX_PATIENCE)

    def quiet_s(self, now: float) -> float:
        """For how long no rank has told of progress or written a line, in this attempt."""
        return self._silence_s(self._at(now))

    @property
    def active_s(self) -> float:
        """From the beginning of this attempt to the last sign of life: progress, or a line in a log."""
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
        # After the last step they may evaluate and save for long, but not for ever and without a word.
        if not undone and (silence_s := self._silence_s(clock)) > limit_s * _TALKING:
            return self._suspicion(self._ranks, silence_s, limit_s * _TALKING)
        if undone and quiet_s > node_s:
            steps = {rank: each.progress.step for rank, each in undone.items()}
            lowest = min((step for step in steps.values() if step is not None), default=None)
            return self._suspicion([rank for rank in steps if steps[rank] == lowest], quiet_s, node_s)
        for rank, each in undone.items():
            own_s = max(limit_s, self._factor * each.longest_s)
            if each.num_changes >= _OWN_CHANGES and self._changed - each.since > own_s:  # others went on
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
        # A script that tells us nothing: with a limit set for it, its output speaks for it.
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
        """How far the last rank is: its step, or how often it told of progress in this attempt."""
        told = {rank: each.progress.step for rank, each in self._ranks.items()}
        return min(self._ranks[rank].num_changes if step is None else step for rank, step in told.items())

    def _at(self, now: float) -> float:
        return self._clock + (0.0 if self._now is None else min(max(now - self._now, 0.0), _GAP_S))
