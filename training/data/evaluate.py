"""Evaluate the model over all ranks, each sample counted once."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from nodekit.training.engines import Engine
from nodekit.training.errors import TrainingError
from nodekit.training.group.collectives import numbers_on
from nodekit.training.process.devices import sum_dtype
from nodekit.training.reporting.report import Report
from nodekit.training.snapshots.hostcopy import map_tensors
from nodekit.training.tasks import Task
from nodekit.training.world import World

_ASK_EVERY_S = 1.0
"""Seconds, roughly, between exchanges of stop requests: each time, the ranks wait for the slowest one."""


class _StopRequests:
    """Exchanges stop requests, such that all ranks see a request of any rank after the same number of batches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = self._num_between = 1
        self._last_s = time.monotonic()

    def found_after(self, num_batches: int, *, is_asked: bool) -> bool:
        """Return whether any rank is asked to stop; all ranks call this after each of their batches."""
        if num_batches < self._next:
            return False
        now_s = time.monotonic()
        batch_s, self._last_s = (now_s - self._last_s) / self._num_between, now_s
        num_asked, batch_s = self._world.start_sum(numbers_on(self._world.device, [is_asked, batch_s]))()
        # At most double the distance: the first batches seem fast on a GPU, where they are only launched by now.
        most = max(1, int(_ASK_EVERY_S / max(batch_s / self._world.world_size, 1e-6)))
        self._num_between = min(2 * self._num_between, most)
        self._next = num_batches + self._num_between
        return num_asked > 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures a model on one data set, of which each rank takes a contiguous part."""

    task: Task
    """The task, whose ``measure`` is used; without it, ``predict`` and ``targets`` give accuracy, loss and macro F1."""
    data: Any
    """The samples: ``len(data)`` and ``data[i]``."""
    world: World
    """This rank's world; its process group must exist."""
    report: Report
    """Tells kit, after each batch, that this rank is alive."""
    loading: Mapping[str, Any]
    """Keywords for the DataLoader."""
    batch_size: int
    """The most samples that a rank evaluates at once."""

    @torch.no_grad()
    def __call__(
        self, engine: Engine, module: torch.nn.Module, is_asked_to_stop: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return the means over all samples, by measure; every rank calls it. The module is in eval mode afterwards.

        Return None, on all ranks, if a rank was asked to stop before the last batch.
        """
        module.eval()
        num, rank, world_size = len(self.data), self.world.rank, self.world.world_size
        own = range(num * rank // world_size, num * (rank + 1) // world_size)
        # Add up on the device, so as to wait for it at the end, not after each batch.
        added: dict[str, torch.Tensor] = {}
        measured_pairs: list[torch.Tensor] = []
        stops = _StopRequests(self.world)
        most = len(range(0, -(-num // world_size), self.batch_size))  # the most batches of any rank
        for number, batch in zip_longest(range(1, most + 1), self._batches(own)):
            if batch is not None:
                measured, own_pairs = self._measure(engine, module, batch)
                if own_pairs is not None:
                    measured_pairs.append(own_pairs)
                for name, value in measured.items():
                    value = torch.as_tensor(value, dtype=sum_dtype(self.world.device))
                    added[name] = added[name] + value if name in added else value
            elif engine.forwards_together:
                # A rank with fewer batches than others takes part in their collectives by passes that do not count.
                self._measure(engine, module, next(iter(self._batches(range(1)))))
            if number < most and stops.found_after(number, is_asked=is_asked_to_stop()):
                return None
        sums = {name: float(value) for name, value in added.items()}
        pairs = torch.cat(measured_pairs).cpu() if measured_pairs else None
        parts = self.world.gather((len(own), sums, pairs))
        assert sum(count for count, _, _ in parts) == num
        names = dict.fromkeys(name for _, part, _ in parts for name in part)
        means = {name: sum(part.get(name, 0.0) for _, part, _ in parts) / num for name in names}
        all_pairs = [each for *_, each in parts if each is not None]
        if all_pairs:
            predicted, targets = torch.cat(all_pairs).unbind(1)
            assert len(targets) == num
            if (least := int(targets.min())) < 0:  # such as torch's -100, for targets to ignore
                raise TrainingError(f"the task's targets have the class {least}: wanted 0 and more")
            means["f1"] = macro_f1(predicted, targets)
        return means

    def _batches(self, own: range) -> Iterable[Any]:
        return DataLoader(Subset(self.data, own), batch_size=self.batch_size, **self.loading) if own else ()

    def _measure(
        self, engine: Engine, module: torch.nn.Module, batch: Any
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Return the sums over a batch, and without ``measure`` the pairs (predicted, right class), ``(num, 2)``."""
        self.report.alive()
        task: Any = self.task
        batch = to_device(batch, self.world.device)
        with engine.autocast():
            if callable(getattr(task, "measure", None)):
                return dict(task.measure(module, batch)), None
            scores, targets = task.predict(module, batch).float(), task.targets(batch)
        if scores.ndim != 2 or targets.shape != scores.shape[:1]:
            raise TrainingError(
                f"the task's predict gives {tuple(scores.shape)} and its targets {tuple(targets.shape)}: wanted "
                "(num, num_classes) and (num,); a task of another kind has measure() in place of them"
            )
        predicted = scores.argmax(1)
        sums = {
            "accuracy": (predicted == targets).sum(),
            "loss": functional.cross_entropy(scores, targets, reduction="sum"),
        }
        return sums, torch.stack([predicted, targets], dim=1)


def macro_f1(predicted: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean F1 over the classes that occur in ``predicted`` or ``targets``; both int64 ``(num,)``."""
    num = int(max(predicted.max(), targets.max())) + 1
    hits = torch.bincount(targets[predicted == targets], minlength=num)
    both = torch.bincount(predicted, minlength=num) + torch.bincount(targets, minlength=num)
    return float((2 * hits[both > 0] / both[both > 0]).mean())


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, however it is nested."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
