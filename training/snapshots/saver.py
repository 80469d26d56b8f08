"""When snapshots are taken: the ranks agree on that by an all-reduce after each step."""

import logging
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nodekit.training.reporting.report import Report
from nodekit.training.snapshots.emergency import save_alone
from nodekit.training.snapshots.files.fence import Fenced, fence_or_zero
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

SHORTEST_S = 5.0
"""The shortest interval between snapshots, in seconds."""
LONGEST_S = 600.0
"""The longest interval in seconds, however reliable the machines, or wrong the measured cost."""
MOST_SHARE = 0.01
"""The fraction of time that snapshots may cost; exceeded only if one costs more than ``MOST_SHARE * LONGEST_S``."""
FIRST_S = 3.0
"""Seconds until the first snapshot: early, so that a job that fails soon has one, and its cost is known."""
PRIOR_S = 24 * 3600.0
"""The time between failures, in seconds, that is assumed before there was a failure."""
MANY_FAILED = 3
"""How many saves in a row must fail until rank 0 prints a warning."""
_FENCE_EVERY_S = 1.0
_WAKE_EVERY_S = 0.5
_QUIET_STEPS = 20
_SETTLE_S = 20.0  # less than kit's grace, in which a rank has to end, or to wait for its next attempt
_STUCK_S = 120.0


def interval_s(cost_s: float, *, trained_s: float, num_restarts: int) -> float:
    """Return the best interval in seconds, by Young and Daly: √(2 · cost · mean time between failures), within bounds.

    Args:
        cost_s: how long a snapshot delays the training.
        trained_s: how long the job has trained so far, restarts included.
        num_restarts: how often it was started again.
    """
    mtbf_s = (PRIOR_S + trained_s) / (1 + num_restarts)
    return min(LONGEST_S, max(SHORTEST_S, cost_s / MOST_SHARE, math.sqrt(2 * cost_s * mtbf_s)))


class Saver:
    """Decides on rank 0 when to take a snapshot, saves on the ranks with ``writes``, and reports failing saves.

    After every step, each rank adds its ``flags()`` to the sum over all ranks, and passes the sum to ``agree()``. While
    a save is running on any rank, the next one is put off step by step, so that no disk delays the training; with
    ``every``, which asks for certain steps, the training waits for it.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        world: World,
        report: Report,
        *,
        writes: bool,
        every: int | None,
        seconds: float | None,
        trained_s: float,
    ) -> None:
        """Start the clock; all ranks call it.

        Args:
            snapshots: of this rank's node.
            world: its process group must exist.
            report: prints, and tells kit that waiting for a disk is not a hang.
            writes: whether this rank saves.
            every: steps from one snapshot to the next; None: by time.
            seconds: from one snapshot to the next; None: by their cost (see ``interval_s``), which is the stall plus
                the time by which steps are slower while one is written.
            trained_s: how long the job had trained before this start.
        """
        self.snapshots = snapshots
        self.writes = writes
        self.interval_s = FIRST_S if seconds is None else seconds
        self._world = world
        self._report = report
        self._every = every
        self._is_auto = every is None and seconds is None
        self._trained_s = trained_s
        self._started_s = self._last_s = time.monotonic()
        self._is_last = False
        self._stall_s: float | None = None  # of the last snapshot; None once all ranks know its cost
        self._slowed_s = 0.0  # how much longer steps took, in all, while the last snapshot was being saved
        self._quiet_steps_s: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._agreed_s: float | None = None  # when the ranks last agreed
        self._agreed_step = 0
        self._fence = 0
        self._fence_read_s = 0.0
        self._failing: set[int] = set()

    @property
    def trained_s(self) -> float:
        """How many seconds the job has trained, restarts included; part of the snapshot."""
        return self._trained_s + time.monotonic() - self._started_s

    def flags(self, *, step: int, is_last: bool) -> list[float]:
        """Return this rank's ``4 + 2 * world_size`` numbers for the sum over all ranks after ``step``.

        Raises:
            ValueError: the state of the last save holds objects that could not be loaded safely.
        """
        own_fence = self._read_fence()
        self._is_last = is_last
        costs, unsaved = [0.0] * self._world.world_size, [0.0] * self._world.world_size
        costs[self._world.rank] = self._cost_of_the_last(step)
        if self.snapshots.num_failed >= MANY_FAILED or self._is_stuck():
            unsaved[self._world.rank] = time.monotonic() - self.snapshots.saved_s
        return [
            self._is_due(step) or is_last,
            self.snapshots.is_saving and not (is_last or self._every),
            own_fence > 0,
            own_fence,
            *costs,
            *unsaved,
        ]

    def is_certain(self, step: int) -> bool:
        """Whether ``every`` asks for a snapshot of this step: all ranks know that without the sum."""
        return bool(self._every) and step % (self._every or 1) == 0

    def agree(self, sums: Sequence[float]) -> bool:
        """Return whether to take a snapshot of this step, from the sum of all ranks' ``flags()``.

        Raises:
            Fenced: on all ranks, if a rank has found that this generation is over.
        """
        due, busy, num_fenced, fence, *each = sums
        if num_fenced:
            where = str(self.snapshots.folder) if self._fence else "the snapshot folder of another node"
            raise Fenced(self.snapshots.generation or 0, round(fence / num_fenced), where)
        self._report_failing(each[self._world.world_size :])
        self._agreed_s = time.monotonic()
        cost_s = max(each[: self._world.world_size])
        if self._is_auto and cost_s:
            self.interval_s = interval_s(
                cost_s, trained_s=self.trained_s, num_restarts=self._world.num_restarts
            )
            return self._is_last  # with the new interval, the next step decides
        return bool(due and not busy)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure how long the block stalls the training by a snapshot; all ranks call it."""
        started_s = time.monotonic()
        self._report.alive()
        yield
        self._last_s = self._agreed_s = time.monotonic()
        self._stall_s, self._slowed_s = self._last_s - started_s, 0.0
        if self._world.is_first_on_node:
            self._report.tell("pause", step=self._agreed_step, seconds=round(self._stall_s, 4))
        self._report.leave_out()
        self._report.alive()

    def paused(self) -> None:
        """Leave the time since the last step out of the measured step times."""
        self._agreed_s = None
        self._report.leave_out()

    def save(self, state: Any, *, step: int) -> None:
        """Wait for the previous save, copy ``state``, and save it in a thread."""
        self.wait()
        self.snapshots.save_async(state, step=step, world_size=self._world.world_size)

    def save_alone(self, state: Any, *, step: int) -> bool:
        """Save without the other ranks, unless training to ``step`` again takes less time; return False if that failed.

        Ranks that do not write otherwise save too: the rank that writes may be lost.
        """
        since_s = time.monotonic() - self._last_s  # before the wait for the last save
        if not self.settle():
            return False
        last_s = self.snapshots.last_save_s
        if last_s is not None and last_s > since_s and not self.snapshots.num_failed:
            return True
        return save_alone(self.snapshots, self._world, lambda: state, step=step)

    def wait(self) -> None:
        """Wait until the current save has succeeded or failed."""
        deadline_s = time.monotonic() + self._world.timeout_s
        while not self.snapshots.wait(_WAKE_EVERY_S):
            if time.monotonic() < deadline_s:  # after that it may be reported as a hang
                self._report.alive()

    def settle(self) -> bool:
        """As ``wait``, for a rank that has failed: log errors; return False if the save does not end within 20 s."""
        deadline_s = time.monotonic() + _SETTLE_S
        try:
            while not self.snapshots.wait(_WAKE_EVERY_S):
                if time.monotonic() > deadline_s:
                    log.warning("the last snapshot is given up: it was not saved within %.0f s", _SETTLE_S)
                    return False
                self._report.alive()
        except Exception as error:
            log.warning("the last snapshot was not saved: %s", error)
        return True

    def _cost_of_the_last(self, step: int) -> float:
        """Return by how many seconds the last snapshot delayed the training: once, after its save; otherwise 0."""
        steps_s = None if self._agreed_s is None else time.monotonic() - self._agreed_s
        num_steps, self._agreed_step = max(1, step - self._agreed_step), step
        if self._stall_s is None:
            if steps_s is not None:
                self._quiet_steps_s.append(steps_s / num_steps)
            return 0.0
        if steps_s is not None and self.writes and self._quiet_steps_s:
            self._slowed_s += steps_s - num_steps * statistics.mean(self._quiet_steps_s)
        if self.snapshots.is_saving:
            return 0.0
        cost_s, self._stall_s = self._stall_s + max(0.0, self._slowed_s), None
        return cost_s

    def _is_stuck(self) -> bool:
        """Whether the current save takes so long that it may never end, as on an unreachable file server."""
        since_s = time.monotonic() - self._last_s
        return self.snapshots.is_saving and since_s > max(_STUCK_S, 3 * self.interval_s)

    def _is_due(self, step: int) -> bool:
        """Whether a snapshot is due; False on all ranks but 0, which decides, since clocks differ."""
        if not self._world.is_main:
            return False
        if self._every:
            return step % self._every == 0
        return time.monotonic() - self._last_s >= self.interval_s

    def _read_fence(self) -> int:
        """Return the fence if this generation is below it, otherwise 0; the file is read once a second."""
        try:
            self.snapshots.check()
        except Fenced as error:
            self._fence = error.fence
        now_s = time.monotonic()
        if not self._fence and now_s - self._fence_read_s >= _FENCE_EVERY_S:
            self._fence_read_s = now_s
            fence, generation = fence_or_zero(self.snapshots.folder), self.snapshots.generation
            if generation is not None and generation < fence:
                self._fence = fence
        return self._fence

    def _report_failing(self, unsaved: Sequence[float]) -> None:
        """Print on rank 0 which nodes keep failing to save, and when all save again; all ranks pass the same sums."""
        failing = {rank for rank, since_s in enumerate(unsaved) if since_s}
        if failing == self._failing:
            return
        self._failing = failing
        if not failing:
            self._report.say("snapshots: saved on all nodes again")
            return
        hosts = self._world.gather(f"node {self._world.node_rank} ({socket.gethostname()})")
        where = ", ".join(hosts[rank] for rank in sorted(failing))
        self._report.say(
            f"*** NO SNAPSHOT FOR {max(unsaved):.0f} s on {where}: {MANY_FAILED} or more saves in a row have failed, "
            "or one does not end. Without the other nodes, all work since would be lost. That node's log has the "
            f"reason ('no snapshot of step'): make room or mend the disk behind {self.snapshots.folder}. Training "
            "goes on, and every next snapshot tries again ***"
        )
