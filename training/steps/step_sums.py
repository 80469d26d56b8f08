"""What all ranks sum with each step: the losses to report, and numbers by which they decide together."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from nodekit.training.errors import TrainingError
from nodekit.training.group import nccl
from nodekit.training.group.collectives import numbers_on, start_sum
from nodekit.training.process.devices import sum_dtype
from nodekit.training.world import World

Sums = Callable[[], list[float]]
"""Waits for sums that are on their way, and returns them."""

LATE_ON = {"cuda"}
"""Devices where the sums of a step may be read after the next step has been launched."""
LATE_BELOW_S = 1.0
"""The longest step for which they are: waiting is a small part of longer ones, and a stop must not take one more."""


@dataclass(slots=True)
class Step:
    """A step that is not reported yet."""

    step: int
    loss_sum: float | torch.Tensor
    """This rank's part of the mean loss (see `part_of_loss`)."""
    lr: float
    num_samples: int
    batch: tuple[int, int] = (0, 0)
    """The epoch and offset of its global batch."""
    ended: float = 0.0
    """Seconds since 1970; 0 while the optimizer steps."""


def part_of_loss(loss: torch.Tensor, share: float, device: torch.device) -> float | torch.Tensor:
    """A micro-batch's part of the mean loss: a number on a CPU, else a scalar for which nobody has to wait.

    On a CPU each of torch's calls between two steps takes 20 to 100 µs: the step has left nothing of it in the caches.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        raise TrainingError(
            f"the task's loss gives {found}: wanted the mean over the batch's samples, a scalar tensor"
        )
    if device.type == "cpu":
        return loss.item() * share
    return loss.detach().to(device, sum_dtype(device)).reshape(()) * share


class _Started:
    """Sums that are on their way."""

    def __init__(self, steps: list[Step], sums_of: Sums) -> None:
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

    def __init__(
        self,
        world: World,
        start: Callable[[Sequence[float]], Sums] | None = None,
        *,
        may_be_late: bool,
        is_guarded: bool = False,
    ) -> None:
        """No sum yet.

        Args:
            world: of these ranks.
            start: what the engine has for this, in place of an all-reduce.
            may_be_late: whether a decision may take one step more.
            is_guarded: whether it is known when another rank is lost which updates were made (`GuardedUpdates`).
        """
        self.is_late = False
        """Whether the newest sums are better left until the next step: waiting for them leaves a GPU without work."""
        self._world = world
        self._by_engine = start
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
        sums_of = self._start([each.loss_sum for each in self._added], [step_s, *numbers])
        self._started.append(_Started(self._added, sums_of))
        self._added = []

    def _start(self, losses: Sequence[float | torch.Tensor], numbers: Sequence[float]) -> Sums:
        if self._by_engine is not None:
            return self._by_engine([*map(float, losses), *numbers])
        device = self._world.device
        if device.type == "cpu":
            values = numbers_on(device, [*map(float, losses), *numbers])
        else:
            values = torch.cat([torch.stack(cast(list[torch.Tensor], losses)), numbers_on(device, numbers)])
        return start_sum(values, self._world.world_size)

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
