"""What all ranks sum with each step: the losses to report, and numbers by which they decide together."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nodekit.training.group import nccl
from nodekit.training.group.collectives import numbers_on, start_sum
from nodekit.training.world import World

LATE_ON = {"cuda"}
"""Devices where the sums of a step may be read after the next step has been launched."""
LATE_BELOW_S = 1.0
"""The longest step for which they are: waiting is a small part of longer ones, and a stop must not take one more."""


@dataclass(slots=True)
class Step:
    """A step that is not reported yet."""

    step: int
    loss_sum: torch.Tensor
    """This rank's part of the mean loss, a scalar."""
    lr: float
    num_samples: int
    batch: tuple[int, int] = (0, 0)
    """The epoch and offset of its global batch."""
    ended: float = 0.0
    """Seconds since 1970; 0 while the optimizer steps."""


class _Started:
    """Sums that are on their way."""

    def __init__(self, steps: list[Step], sums_of: Callable[[], list[float]]) -> None:
        self.steps, self.sums_of = steps, sums_of
        self._sums: list[float] | None = None

    def settle(self) -> list[float]:
        """Wait for them. Once this has returned they count, whatever comes after."""
        if self._sums is None:
            sums = self.sums_of()
            nccl.check()
            self._sums = sums
        return self._sums


class StepSums:
    """The sums that are on their way, from which all ranks read the same at the same step."""

    def __init__(self, world: World, *, may_be_late: bool, is_guarded: bool = False) -> None:
        """No sum yet.

        Args:
            world: of these ranks.
            may_be_late: whether a decision may take one step more.
            is_guarded: whether it is known when another rank is lost which updates were made (`GuardedUpdates`).
        """
        self.is_late = False
        """Whether the newest sums are better left until the next step: waiting for them leaves a GPU without work."""
        self._world = world
        # A rank that loses another keeps its last step; of one whose sums are on their way, the loss is not known yet,
        # and the next one's update would come before it.
        is_kept = world.keeps_steps and (world.world_size > 1 or world.may_stay)
        self._may_be_late = may_be_late and world.device.type in LATE_ON and (is_guarded or not is_kept)
        self._added: list[Step] = []
        self._started: list[_Started] = []
        self._last_s: float | None = None

    def __len__(self) -> int:
        """How many were started and not read."""
        return len(self._started)

    def add(self, step: Step) -> None:
        """Let the loss of this step be part of the next sums."""
        self._added.append(step)

    def start(self, numbers: Sequence[float]) -> None:
        """Start to sum the losses of the steps added, and these numbers; beside the backward pass."""
        now_s = time.monotonic()
        step_s, self._last_s = math.inf if self._last_s is None else now_s - self._last_s, now_s
        losses = torch.stack([each.loss_sum for each in self._added])
        own = numbers_on(self._world.device, [step_s, *numbers])
        self._started.append(
            _Started(self._added, start_sum(torch.cat([losses, own]), self._world.world_size))
        )
        self._added = []

    def settle(self) -> None:
        """Wait for the newest sums, unless they may be late: no update is made by a step whose loss is unknown then.

        They were started before the backward pass, so this takes no time.
        """
        if self._started and not self.is_late:
            self._started[-1].settle()

    def read(self, *, but: int = 0) -> Iterator[tuple[list[tuple[Step, float]], list[float]]]:
        """Wait for all but the newest ``but``: the steps, each with its loss, and the sums of the numbers."""
        while len(self._started) > but:
            steps, sums = self._started[0].steps, self._started[0].settle()
            # Not before: of one that the loss of another rank cuts off, `losses_until` may know more.
            self._started.pop(0)
            step_s, *numbers = sums[len(steps) :]
            # The ranks' mean, so that all decide alike.
            self.is_late = self._may_be_late and step_s / self._world.world_size < LATE_BELOW_S
            yield list(zip(steps, sums, strict=False)), numbers

    def losses_until(self, step: int) -> Iterator[tuple[Step, float]]:
        """The losses not read yet, up to those of a ``step`` of which all has arrived, for a rank that has left."""
        for each in self._started:
            if each.steps[-1].step <= step:
                yield from zip(each.steps, each.sums_of(), strict=False)
