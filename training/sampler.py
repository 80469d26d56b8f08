"""Which samples each rank takes: every sample once per epoch, whatever the world size is or becomes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Micro:
    """What one rank puts through the model at once: its part, or a part of its part, of a global batch."""

    indices: list[int]
    """Indices into the data set; never empty (see ``share``)."""
    share: float
    """These samples' part of the global batch, 0 to 1. It is 0 on a rank that no sample is left for: it
    computes one of the others' samples, to take part in the collectives, and counts it for nothing."""
    weight: float
    """Multiply the mean loss of these samples by this before ``backward()``; DDP's average over the ranks is
    then the gradient of the mean over the global batch, however unevenly it was split."""
    is_last: bool
    """Whether the global batch ends here: synchronize the gradients, step the optimizer, ``advance()``."""


class ElasticSampler:
    """A batch sampler whose order depends on seed and epoch only; its state is one global sample offset.

    A global batch is split over the ranks (uneven parts allowed), and each rank's part into micro-batches of
    at most ``micro_batch`` samples, as many on every rank. So a restart with another world size changes
    neither the batches nor the number of steps::

        sampler = ElasticSampler(len(data), batch_size=256, rank=world.rank, world_size=world.world_size)
        loader = DataLoader(data, batch_sampler=sampler)
        while sampler.epoch < epochs:
            for micro, batch in zip(sampler.micro_batches(), loader):
                with nullcontext() if micro.is_last else model.no_sync():
                    (loss_fn(model, batch) * micro.weight).backward()
                if micro.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    sampler.advance()  # from here on sampler.state_dict() points behind this batch
            sampler.next_epoch()
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        micro_batch: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Start at the beginning of epoch 0.

        Args:
            num_samples: samples in the data set.
            batch_size: samples per step, over all ranks.
            micro_batch: most samples a rank computes at once; None for no limit.
            seed: 0 or more; another seed, another order.
            rank: this process, 0 to ``world_size - 1``.
            world_size: how many ranks share each batch.
        """
        for name, value in (
            ("num_samples", num_samples),
            ("batch_size", batch_size),
            ("micro_batch", micro_batch),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: at least 1 was wanted")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, of a world of {world_size}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.micro_batch = micro_batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.offset = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; the last batch may be smaller."""
        return -(-self.num_samples // self.batch_size)

    @property
    def steps_left(self) -> int:
        """Optimizer steps left in this epoch."""
        return -(-(self.num_samples - self.offset) // self.batch_size)

    def micro_batches(self) -> Iterator[Micro]:
        """This rank's micro-batches from the present offset to the end of the epoch."""
        # The start is taken now, not at the first next(): a loader may run ahead of advance().
        return self._micro_batches(self.epoch, self.offset)

    def _micro_batches(self, epoch: int, offset: int) -> Iterator[Micro]:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        for start in range(offset, self.num_samples, self.batch_size):
            batch = order[start : start + self.batch_size].tolist()
            own = batch[
                _cut(len(batch), self.rank, self.world_size) : _cut(
                    len(batch), self.rank + 1, self.world_size
                )
            ]
            largest = _cut(len(batch), 1, self.world_size)  # rank 0's: no rank has more
            num_parts = -(-largest // self.micro_batch) if self.micro_batch else 1
            for part in range(num_parts):
                indices = own[_cut(len(own), part, num_parts) : _cut(len(own), part + 1, num_parts)]
                share = len(indices) / len(batch)
                yield Micro(indices or batch[:1], share, share * self.world_size, part == num_parts - 1)

    def __iter__(self) -> Iterator[list[int]]:
        micro_batches = self.micro_batches()
        return (micro.indices for micro in micro_batches)

    def advance(self) -> None:
        """Count one global batch as done."""
        self.offset = min(self.offset + self.batch_size, self.num_samples)

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch, in another order."""
        self.epoch += 1
        self.offset = 0

    def state_dict(self) -> dict[str, int]:
        """Where the next step begins."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "offset": self.offset,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at ``state``, in its order.

        Raises:
            ValueError: the data set has another number of samples now, so the offset means nothing.
        """
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the snapshot was taken with {state['num_samples']} training samples, now there are "
                f"{self.num_samples}: give the same data, or start anew in another folder"
            )
        self.seed, self.epoch, self.offset = state["seed"], state["epoch"], state["offset"]


def _cut(num: int, part: int, num_parts: int) -> int:
    """Where part ``part`` of ``num`` things begins, in nearly equal parts, larger ones first."""
    return -(-num * part // num_parts)
