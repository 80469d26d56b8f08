"""How good the model is: over all ranks, each sample counted once."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from nodekit.training.engines import Engine
from nodekit.training.reporting.report import Report
from nodekit.training.tasks import Task
from nodekit.training.world import World

_BATCH = 256


class Evaluation:
    """Of one set of samples, which the ranks share out in runs of neighbours, uneven ones if need be."""

    def __init__(
        self, task: Task, data: Any, world: World, report: Report, loading: Mapping[str, Any]
    ) -> None:
        """Nothing is computed yet.

        Args:
            task: knows what is measured: what its ``measure`` gives; without one, by ``predict`` and ``targets``,
                accuracy, loss and macro F1.
            data: the samples.
            world: its process group must exist.
            report: is told that this rank is at work.
            loading: keywords for the DataLoader.
        """
        self._task, self._data, self._world, self._report = task, data, world, report
        self._loading = loading
        self._classifies = not callable(getattr(task, "measure", None))

    @torch.no_grad()
    def __call__(self, engine: Engine, module: torch.nn.Module) -> dict[str, float]:
        """The means over all samples, the same on every rank; every rank calls it. The module is in eval mode after."""
        module.eval()
        num, rank, world_size = len(self._data), self._world.rank, self._world.world_size
        own = range(num * rank // world_size, num * (rank + 1) // world_size)
        sums: dict[str, float] = {}
        pairs: list[torch.Tensor] = []
        for batch in self._batches(own):
            measured = self._measure(engine, module, batch)
            if "pairs" in measured:
                pairs.append(measured.pop("pairs").cpu())
            for name, value in measured.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        if engine.forwards_together:
            # Who has a batch less than others goes through one that does not count.
            most = -(-num // world_size)
            for _ in range(-(-most // _BATCH) - -(-len(own) // _BATCH)):
                self._measure(engine, module, next(iter(self._batches(range(1)))))
        parts = self._world.gather((len(own), sums, torch.cat(pairs) if pairs else None))
        assert sum(count for count, _, _ in parts) == num
        names = dict.fromkeys(name for _, part, _ in parts for name in part)
        means = {name: sum(part.get(name, 0.0) for _, part, _ in parts) / num for name in names}
        if self._classifies:
            predicted, targets = torch.cat([each for *_, each in parts if each is not None]).unbind(1)
            assert len(targets) == num
            means["f1"] = macro_f1(predicted, targets)
        return means

    def _batches(self, own: range) -> Iterable[Any]:
        chosen = Subset(self._data, own)
        return DataLoader(chosen, batch_size=_BATCH, **self._loading) if own else ()

    def _measure(self, engine: Engine, module: torch.nn.Module, batch: Any) -> dict[str, Any]:
        self._report.alive()
        task: Any = self._task
        batch = to_device(batch, self._world.device)
        with engine.autocast():
            if not self._classifies:
                return dict(task.measure(module, batch))
            scores, targets = task.predict(module, batch).float(), task.targets(batch)
        predicted = scores.argmax(1)
        return {
            "accuracy": (predicted == targets).sum(),
            "loss": functional.cross_entropy(scores, targets, reduction="sum"),
            "pairs": torch.stack([predicted, targets], dim=1),
        }


def macro_f1(predicted: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean of the classes' F1, over those that occur in either; both int64 ``(num,)``."""
    num = int(max(predicted.max(), targets.max())) + 1
    hits = torch.bincount(targets[predicted == targets], minlength=num)
    both = torch.bincount(predicted, minlength=num) + torch.bincount(targets, minlength=num)
    return float((2 * hits[both > 0] / both[both > 0]).mean())


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, however it is nested."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
