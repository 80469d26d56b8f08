"""Measuring the model over all ranks, each sample counted once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from nodekit.training.engines import Engine
from nodekit.training.process.devices import sum_dtype
from nodekit.training.reporting.report import Report
from nodekit.training.snapshots.hostcopy import map_tensors
from nodekit.training.tasks import Task
from nodekit.training.world import World


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures a model on one data set, of which each rank takes a contiguous part."""

    task: Task
    """Its ``measure`` is used; without one, ``predict`` and ``targets`` give accuracy, loss and macro F1."""
    data: Any
    """The samples."""
    world: World
    """Its process group must exist."""
    report: Report
    """Tells kit that this rank is at work."""
    loading: Mapping[str, Any]
    """Keywords for the DataLoader."""
    batch_size: int
    """Most samples that a rank evaluates at once."""

    @torch.no_grad()
    def __call__(self, engine: Engine, module: torch.nn.Module) -> dict[str, float]:
        """Return the means over all samples; every rank calls it. The module is in eval mode afterwards."""
        module.eval()
        num, rank, world_size = len(self.data), self.world.rank, self.world.world_size
        own = range(num * rank // world_size, num * (rank + 1) // world_size)
        # On the device, which is waited for at the end and not for each batch.
        added: dict[str, torch.Tensor] = {}
        measured_pairs: list[torch.Tensor] = []
        for batch in self._batches(own):
            measured = self._measure(engine, module, batch)
            if "pairs" in measured:
                measured_pairs.append(measured.pop("pairs"))
            for name, value in measured.items():
                value = torch.as_tensor(value, dtype=sum_dtype(self.world.device))
                added[name] = added[name] + value if name in added else value
        if engine.forwards_together:
            # A rank with fewer batches than others makes up for them with forward passes that do not count.
            most = -(-num // world_size)
            for _ in range(-(-most // self.batch_size) - -(-len(own) // self.batch_size)):
                self._measure(engine, module, next(iter(self._batches(range(1)))))
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
            means["f1"] = macro_f1(predicted, targets)
        return means

    def _batches(self, own: range) -> Iterable[Any]:
        return DataLoader(Subset(self.data, own), batch_size=self.batch_size, **self.loading) if own else ()

    def _measure(self, engine: Engine, module: torch.nn.Module, batch: Any) -> dict[str, Any]:
        self.report.alive()
        task: Any = self.task
        batch = to_device(batch, self.world.device)
        with engine.autocast():
            if callable(getattr(task, "measure", None)):
                return dict(task.measure(module, batch))
            scores, targets = task.predict(module, batch).float(), task.targets(batch)
        predicted = scores.argmax(1)
        return {
            "accuracy": (predicted == targets).sum(),
            "loss": functional.cross_entropy(scores, targets, reduction="sum"),
            "pairs": torch.stack([predicted, targets], dim=1),
        }


def macro_f1(predicted: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean F1 of the classes that occur in either; both int64 ``(num,)``."""
    num = int(max(predicted.max(), targets.max())) + 1
    hits = torch.bincount(targets[predicted == targets], minlength=num)
    both = torch.bincount(predicted, minlength=num) + torch.bincount(targets, minlength=num)
    return float((2 * hits[both > 0] / both[both > 0]).mean())


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, however it is nested."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
