"""Sums over all ranks with each step: the losses to report, and numbers from which all ranks decide alike."""

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
"""Waits for sums that have been started, and returns them."""

LATE_ON = {"cuda"}
"""Devices where the sums of a step may be read after the next step has been launched."""
LATE_BELOW_S = 1.0
"""Sums are read late only if steps are shorter than this: longer ones lose little by a wait, and would delay a stop."""


@dataclass(slots=True)
class Step:
    """A step whose loss is not reported yet."""

    step: int
    loss_sum: float | torch.Tensor
    """This rank's part of the mean loss (see `part_of_loss`)."""
    lr: float
    num_samples: int
    batch: tuple[int, int] = (0, 0)
    """The epoch and offset of the step's global batch."""
    ended: float = 0.0
    """When the step ended, in seconds since 1970; 0 while the optimizer steps."""


def part_of_loss(loss: torch.Tensor, share: float, device: torch.device) -> float | torch.Tensor:
    """Return a micro-batch's part of the mean loss: a number on a CPU, otherwise a scalar tensor, without waiting.

    On a CPU, numbers are cheaper: each call of torch's between two steps takes 20 to 100 µs, since the step has evicted
    the caches.

    Raises:
        TrainingError: the loss is not a scalar tensor.
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
    """Sums that have been started, perhaps not read yet."""

    def __init__(self, steps: list[Step], sums_of: Sums) -> None:
        self.steps, self.sums_of = steps, sums_of
        self._sums: list[float] | None = None

    def settle(self) -> list[float]:
        """Wait for the sums and return them; after that, they stay available even if a rank is lost."""
        if self._sums is None:
            sums = self.sums_of()
            nccl.check()
            self._sums = sums
        return self._sums


class StepSums:
    """Starts sums over the ranks, and reads them such that all ranks get the same sums at the same step."""

    def __init__(
        self,
        world: World,
        start: Callable[[Sequence[float]], Sums] | None = None,
        *,
        may_be_late: bool,
        is_guarded: bool = False,
    ) -> None:
        """Start no sum yet.

        Args:
            world: of these ranks.
            start: the engine's own way to start a sum, in place of an all-reduce.
            may_be_late: whether decisions may come one step later.
            is_guarded: whether `GuardedUpdates` tells which updates were made when another rank is lost.
        """
        self.is_late = False
        """Whether to read the newest sums one step later, since waiting for them now would leave a GPU idle."""
        self._world = world
        self._by_engine = start
        # A rank that loses another keeps its last step, whose loss must be known. Late sums would come after the next
        # step's update.
        is_kept = world.keeps_steps and (world.world_size > 1 or world.may_stay)
        self._may_be_late = may_be_late and world.device.type in LATE_ON and (is_guarded or not is_kept)
        self._added: list[Step] = []
        self._started: list[_Started] = []
        self._last_s: float | None = None

    def __len__(self) -> int:
        """The number of sums that were started and not read."""
        return len(self._started)

    def add(self, step: Step) -> None:
        """Add the loss of this step to the next sums."""
        self._added.append(step)

    def start(self, numbers: Sequence[float]) -> None:
        """Start to sum the losses of the added steps, and these numbers, in parallel with the backward pass."""
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
        """Wait for the newest sums, unless `is_late`, so that no update is made while its step's loss is unknown.

        The sums were started before the backward pass, so this takes hardly any time.
        """
        if self._started and not self.is_late:
            self._started[-1].settle()

    def read(self, *, but: int = 0) -> Iterator[tuple[list[tuple[Step, float]], list[float]]]:
        """Wait for all sums but the newest ``but``, and yield each: the steps with their losses, and the other sums."""
        while len(self._started) > but:
            steps, sums = self._started[0].steps, self._started[0].settle()
            # Pop only now: if the wait fails since a rank is lost, `losses_until` still needs this entry.
            self._started.pop(0)
            step_s, *numbers = sums[len(steps) :]
            # Use the mean over the ranks, so that all ranks decide alike.
            self.is_late = self._may_be_late and step_s / self._world.world_size < LATE_BELOW_S
            yield list(zip(steps, sums, strict=False)), numbers

    def losses_until(self, step: int) -> Iterator[tuple[Step, float]]:
        """Yield the losses not read yet, up to ``step``, whose sums must have arrived; for a rank that has left."""
        for each in self._started:
            if each.steps[-1].step <= step:
                yield from zip(each.steps, each.sums_of(), strict=False)
