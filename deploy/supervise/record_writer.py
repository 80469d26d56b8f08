"""Writes the run's record for the supervisor, and reports a full disk to the user."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.records.events import Gatherer
from nodekit.deploy.records.record_files import FILE
from nodekit.deploy.records.runs import ENDED, Run
from nodekit.deploy.supervise.observer import Over, View
from nodekit.deploy.supervise.state import Observation, State
from nodekit.inventory.errors import NotWritten

RETRY_S = 1.0
LOOK_S = 1.0  # how often to check whether another process has ended the run, or started it again
STALLED_S = 5.0  # a write that took longer than this is reported: meanwhile nothing was decided
LAST_WORDS_S = 5.0  # once the record has the run's end, how long its nodes may still report how they ended


class RecordWriter:
    """Writes the record of a run; reports a full disk once, and once more when it can be written again."""

    def __init__(self, run: Run, view: View) -> None:
        self._run = run
        self._view = view
        self._started = run.started
        self._look_at = 0.0
        """When to read the record again, by time.monotonic()."""
        self._ended_at: float | None = None
        """When the record was first seen to have the run's end."""
        self._problem = ""
        """Why the record cannot be written at present; "" if it can."""
        self._write_at = 0.0
        """When to try to write again, by time.monotonic()."""

    def has_ended(self, seen: Mapping[str, Observation], *, at_once: bool = False) -> bool:
        """Whether the record has the run's end; it is read again each second, or now with `at_once`.

        Raises:
            Over: the run has ended and no reachable node may still report how, or it was started again.
        """
        now = time.monotonic()
        if now >= self._look_at or at_once:
            self._look_at = now + LOOK_S
            record = self._run.as_recorded()
            if record.started != self._started:
                raise Over(f"{record.run_id} was started anew by another kit up; this one leaves it alone")
            # The supervisor that acts may have added a node, which this process has to follow, and to stop, too.
            self._run.nodes, self._run.clock_offsets = record.nodes, record.clock_offsets
            if record.state in ENDED:
                self._ended_at = now if self._ended_at is None else self._ended_at
                in_sight = any(each.reachable for each in seen.values())
                if not in_sight or now - self._ended_at > LAST_WORDS_S:
                    raise Over(f"{record.run_id} has ended: {record.verdict or record.state}")
        return self._ended_at is not None

    def is_written(self, state: State, gatherer: Gatherer) -> bool:
        """Write a decision's state to the record, and return whether it is there.

        Only then may its actions be carried out, or a supervisor that takes over might repeat them. If the run has
        ended or was started again, the record is another process's: nothing is written, and False returned.

        Args:
            state: the policy's state after the decision.
            gatherer: adds the events that there was no room for, once the disk can be written again.
        """
        judgement = state.to_dict()
        is_known = judgement == self._run.judgement
        if is_known and not self._problem:
            return True
        if self._problem and time.monotonic() < self._write_at:
            return is_known
        self._write_at = time.monotonic() + RETRY_S
        try:
            with self._changing():
                self._run.generation, self._run.judgement = state.generation, judgement
        except Over:
            return False
        except NotWritten:
            return is_known
        if self._problem and gatherer.add():
            num_lost, self._problem, gatherer.num_lost = gatherer.num_lost, "", 0
            text = f"{self._run.folder} can be written again"
            if num_lost:
                text += f"; {num_lost} events are lost"
                self._run.event("said", text=text, num_lost=num_lost)
            self._view.say(text, is_event=True)
        return True

    def write_plan(self, name: str, node: NodePlan, clock_offset_s: float) -> None:
        """Record what a node runs, and its clock's offset from ours in seconds.

        Raises:
            NotWritten: the disk is full or gone, which is reported to the user here.
            Over: the run has ended, or was started again.
        """
        with self._changing():
            self._run.nodes = {**self._run.nodes, name: dataclasses.asdict(node)}
            self._run.clock_offsets = {**self._run.clock_offsets, name: clock_offset_s}

    def write_clocks(self, clock_offsets: Mapping[str, float]) -> bool:
        """Record nodes' clock offsets after a clock was set; False if they cannot be written."""
        try:
            with self._changing():
                self._run.clock_offsets = {**self._run.clock_offsets, **clock_offsets}
        except (Over, NotWritten):
            return False
        return True

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the record, and write it; raises as `write_plan`."""
        try:
            with self.timed(), self._run.changing(mends=True) as is_damaged:
                self._refuse_over()
                yield
        except NotWritten as error:
            self.cannot_write(str(error))
            raise
        self._tell_of_mending(is_damaged=is_damaged)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Report it afterwards where a write to the run's folder has taken long, as to a disk that is frozen."""
        began = time.monotonic()
        try:
            yield
        finally:
            if (took_s := time.monotonic() - began) > STALLED_S:
                folder = self._run.folder
                text = (
                    f"{folder} could not be written for {took_s:.0f} s: its disk did not answer; meanwhile the job "
                    f"trained on, but nothing was started in place of what was lost; see to the disk (df {folder})"
                )
                self._view.say(text, is_event=True)
                self._run.event("said", text=text)

    def _refuse_over(self) -> None:
        """Raise Over if the record, just read, shows that this supervisor's run has ended or was started again."""
        if not self._run.is_still(self._started):
            raise Over(f"{self._run.run_id} has ended, or was started anew")

    def cannot_write(self, problem: str) -> None:
        """Report why nothing can be written, unless a problem is reported already."""
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
