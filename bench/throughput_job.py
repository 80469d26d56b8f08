"""What bench/throughput trains: as a task for kit's training module, and as the plainest DDP script."""

import itertools
import os
import struct
import time
from typing import Any

import torch
from torch import nn

from nodekit.training.tasks.digits import Digits, Pixels

_NUM_SAMPLES = 1 << 22


class _Endless(torch.utils.data.Dataset[Any]):
    """The same samples again and again: an epoch that does not end while it is measured."""

    def __init__(self, samples: Pixels) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


class Task(Digits):
    """Digits without an end, with steps that are long enough to be compared."""

    def model(self) -> nn.Module:
        """Two convolutions that see all pixels."""
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

    def train_data(self) -> Any:
        """Four million."""
        return _Endless(super().train_data())


def main() -> None:
    """Train, as torch's own tutorial does, and write down when each step was done: eight bytes a step."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    task = Task()
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(os.environ["BENCH_LR"]))
    data = task.train_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batch_size = int(os.environ["BENCH_BATCH_SIZE"]) // world_size
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    with open(os.environ["BENCH_STEPS"], "ab", buffering=0) as steps:  # noqa: PTH123
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if rank == 0:
                    steps.write(struct.pack("d", time.time()))


if __name__ == "__main__":
    main()
