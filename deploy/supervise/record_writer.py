"""Writes the run's record for the supervisor, and tells of a disk that is full."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.records.events import Gatherer
from nodekit.deploy.records.record_files import FILE
from nodekit.deploy.records.runs import ENDED, Run
from nodekit.deploy.supervise.observer import Over, View
from nodekit.deploy.supervise.state import Observation, State
from nodekit.inventory.errors import NotWritten

RETRY_S = 1.0
LOOK_S = 1.0  # between looks whether another process has ended the run, or started it anew
LAST_WORDS_S = 5.0  # after it has ended on record, how long its nodes may still tell how


class RecordWriter:
    """Writes the record of a run; a disk that is full is told of once, and once when there is room again."""

    def __init__(self, run: Run, view: View) -> None:
        self._run = run
        self._view = view
        self._started = run.started
        self._look_at = 0.0
        """When to look at the record again."""
        self._ended_at: float | None = None
        """When it was seen to have the run's end."""
        self._problem = ""
        """Why nothing could be written, since it could be the last time."""
        self._write_at = 0.0
        """When to try again."""

    def has_ended(self, seen: Mapping[str, Observation], *, at_once: bool = False) -> bool:
        """Whether the run has ended on record, which is read at once, or each second.

        Raises:
            Over: and no node that is `seen` has more to tell of that; or it was started anew.
        """
        now = time.monotonic()
        if now >= self._look_at or at_once:
            self._look_at = now + LOOK_S
            record = self._run.as_recorded()
            if record.started != self._started:
                raise Over(f"{record.run_id} was started anew by another kit up; this one leaves it alone")
            # Whoever acts may have had a node come in: it is to be followed, and stopped, by this one, too.
            self._run.nodes, self._run.clock_offsets = record.nodes, record.clock_offsets
            if record.state in ENDED:
                self._ended_at = now if self._ended_at is None else self._ended_at
                in_sight = any(each.reachable for each in seen.values())
                if not in_sight or now - self._ended_at > LAST_WORDS_S:
                    raise Over(f"{record.run_id} has ended: {record.verdict or record.state}")
        return self._ended_at is not None

    def is_written(self, state: State, gatherer: Gatherer) -> bool:
        """Whether what was decided is on record: only then it is done, so that who takes over cannot repeat it.

        Nothing is written where the run has ended, or was started anew: the record is another's then.

        Args:
            state: what was decided.
            gatherer: what could not be added to the run's events is added by it when there is room again.
        """
        judgement = state.to_dict()
        is_known = judgement == self._run.judgement
        if is_known and not self._problem:
            return True
        if self._problem and time.monotonic() < self._write_at:
            return is_known
        self._write_at = time.monotonic() + RETRY_S
        try:
            with self._run.changing(mends=True) as is_damaged:
                self._refuse_over()
                self._run.generation, self._run.judgement = state.generation, judgement
        except Over:
            return False
        except NotWritten as error:
            self.cannot_write(str(error))
            return is_known
        self._tell_of_mending(is_damaged=is_damaged)
        if self._problem and gatherer.add():
            lost = f"; {gatherer.num_lost} events are lost" if gatherer.num_lost else ""
            self._problem, gatherer.num_lost = "", 0
            self._view.say(f"{self._run.folder} can be written again{lost}", is_event=True)
        return True

    def write_plan(self, name: str, node: NodePlan, clock_offset_s: float) -> None:
        """Put what a node runs on record, and how far its clock is from ours.

        Raises:
            NotWritten: it cannot be, which is told of.
            Over: the run has ended, or was started anew.
        """
        try:
            with self._run.changing(mends=True) as is_damaged:
                self._refuse_over()
                self._run.nodes = {**self._run.nodes, name: dataclasses.asdict(node)}
                self._run.clock_offsets = {**self._run.clock_offsets, name: clock_offset_s}
        except NotWritten as error:
            self.cannot_write(str(error))
            raise
        self._tell_of_mending(is_damaged=is_damaged)

    def write_clock(self, name: str, clock_offset_s: float) -> bool:
        """Put on record how far a node's clock is from ours since it was set; False where that cannot be written."""
        try:
            with self._run.changing(mends=True) as is_damaged:
                self._refuse_over()
                self._run.clock_offsets = {**self._run.clock_offsets, name: clock_offset_s}
        except Over:
            return False
        except NotWritten as error:
            self.cannot_write(str(error))
            return False
        self._tell_of_mending(is_damaged=is_damaged)
        return True

    def _refuse_over(self) -> None:
        """Raise Over where the record, which was just read, is no longer that of this supervisor's start."""
        if not self._run.is_still(self._started):
            raise Over(f"{self._run.run_id} has ended, or was started anew")

    def cannot_write(self, problem: str) -> None:
        """Tell why nothing can be written, unless that is known."""
        if not self._problem:
            text = f"{problem}; until then the job trains on, but nothing is started in place of what is lost"
            self._view.say(text, is_event=True)
            self._problem, self._write_at = problem, time.monotonic() + RETRY_S

    def _tell_of_mending(self, *, is_damaged: bool) -> None:
        if is_damaged:
            path = self._run.folder / FILE
            self._view.say(
                f"{path} was damaged and is written anew; it is kept as {path}.damaged", is_event=True
            )
