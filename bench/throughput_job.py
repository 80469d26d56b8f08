"""The training of bench/throughput: as a task for kit's training module, and as a plain DDP script."""

import itertools
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from nodekit.training.tasks.digits import Digits, Pixels

_NUM_SAMPLES = 1 << 22
_WARM_STEPS = 20


class _Endless(torch.utils.data.Dataset[Any]):
    """The same samples again and again: an epoch that does not end during the measurement."""

    def __init__(self, samples: Pixels) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


class Task(Digits):
    """Endless digits, with steps that are long enough to compare."""

    _turns: "_Turns | None" = None
    _optimizer: torch.optim.Optimizer

    def model(self) -> nn.Module:
        """Return a model with two convolutions over all pixels."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Return the same optimizer as the script's."""
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        return self._optimizer

    def train_data(self) -> Any:
        """Return four million samples."""
        return _Endless(super().train_data())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss; the training module calls this once per step."""
        if "BENCH_TURNS" in os.environ:
            self._turns = self._turns or _Turns(plain_steps(self, model, self._optimizer), self._optimizer)
            self._turns.step()
        return super().loss(model, batch)


class _Turns:
    """Runs the plain script's steps in kit's ranks, in turns with the module's own steps, on the same model.

    It does so while the file ``$BENCH_TURNS`` exists. ``.times`` beside it gets a line per turn: the seconds of the
    same number of steps, by the module and by the script.
    """

    def __init__(self, plain: Iterator[None], optimizer: torch.optim.Optimizer) -> None:
        self._file = Path(os.environ["BENCH_TURNS"])
        self._num_steps = int(os.environ["BENCH_TURN_STEPS"])
        self._plain, self._optimizer = plain, optimizer
        self._is_warm = False
        self._count = 0
        self._began_s: float | None = None

    def step(self) -> None:
        """Count a step of the module, before its forward pass; if a turn is over, make the script's steps."""
        self._count += 1
        if self._count % self._num_steps:
            return
        ended_s, began_s = time.monotonic(), self._began_s
        is_wanted = torch.tensor(float(self._file.exists()))
        distributed.broadcast(is_wanted, src=0)
        if not is_wanted:
            return
        for _ in range(0 if self._is_warm else _WARM_STEPS):
            next(self._plain)
        self._is_warm = True
        distributed.barrier()
        plain_s = time.monotonic()
        for _ in range(self._num_steps):
            next(self._plain)
        plain_s = time.monotonic() - plain_s
        self._optimizer.zero_grad()  # as the module does after a step, and the script before it
        if distributed.get_rank() == 0 and began_s is not None:
            with self._file.with_suffix(".times").open("a") as file:
                file.write(json.dumps([ended_s - began_s, plain_s]) + "\n")
        self._began_s = time.monotonic()


def plain_steps(task: Task, model: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Train a DistributedDataParallel as in torch's tutorial; make one step each time the iterator advances."""
    from torch.utils.data import DataLoader, DistributedSampler

    # One parameter gets kit's per-step sums as its gradient; DDP would wait for that forever.
    own = {id(each) for each in model.module.parameters()}
    sums = [each for each in model._module_parameters if id(each) not in own]
    zeros = [torch.zeros_like(each, requires_grad=False) for each in sums]
    data = task.train_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batch_size = int(os.environ["BENCH_BATCH_SIZE"]) // distributed.get_world_size()
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            torch.autograd.backward([Digits.loss(task, model, batch), *sums], [None, *zeros])
            for each in sums:
                each.grad = None
            optimizer.step()
            yield


def main() -> None:
    """Train, and record when each step was done: eight bytes per step."""
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    task = Task()
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model, float(os.environ["BENCH_LR"]))
    with open(os.environ["BENCH_STEPS"], "ab", buffering=0) as steps:  # noqa: PTH123
        for _ in plain_steps(task, model, optimizer):
            if distributed.get_rank() == 0:
                steps.write(struct.pack("d", time.time()))


if __name__ == "__main__":
    main()
