"""Share samples out to the ranks: every sample once per epoch, even if the world size changes meanwhile."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch: the samples that a rank computes at once, which are its part of a global batch or less."""

    indices: list[int]
    """Indices into the data set; never empty (see ``share``)."""
    share: float
    """These samples' fraction of the global batch, 0 to 1. It is 0 on a rank for which no sample is left: that rank
    computes a sample of another rank with weight 0, to take part in the collectives."""
    weight: float
    """Multiply the mean loss of these samples by this before ``backward()``; DDP's average over the ranks is then the
    gradient of the mean over the global batch, even if the batch was split unevenly."""
    is_last: bool
    """Whether the global batch ends here: synchronize the gradients, step the optimizer, ``advance()``."""


class ElasticSampler:
    """A batch sampler whose order depends on seed and epoch only; its state is one global sample offset.

    A global batch is split over the ranks (unevenly if need be), and each rank's part into micro-batches of at most
    ``micro_batch`` samples, the same number on every rank. So a restart with another world size changes neither the
    batches nor the number of steps::

        sampler = ElasticSampler(len(data), batch_size=256, rank=world.rank, world_size=world.world_size)
        loader = DataLoader(data, batch_sampler=sampler)
        while sampler.epoch < epochs:
            for micro, batch in zip(sampler.micro_batches(), loader):
                with nullcontext() if micro.is_last else model.no_sync():
                    (loss_fn(model, batch) * micro.weight).backward()
                if micro.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    sampler.advance()  # sampler.state_dict() now points behind this batch
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
        sizes = {"num_samples": num_samples, "batch_size": batch_size, "micro_batch": micro_batch}
        for name, value in sizes.items():
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
        self.left_out: set[tuple[int, int]] = set()
        """Global batches that no rank takes: (epoch, offset)."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; the last batch may be smaller."""
        return -(-self.num_samples // self.batch_size)

    @property
    def steps_left(self) -> int:
        """Optimizer steps left in this epoch."""
        return self.steps_to(self.epoch + 1)

    def steps_to(self, epochs: int) -> int:
        """Return the number of optimizer steps from here until ``epochs`` epochs are done."""
        whole = (epochs - self.epoch - 1) * self.steps_per_epoch
        in_this = -(-(self.num_samples - self.offset) // self.batch_size)
        here = (self.epoch, self.offset)
        ahead = [(epoch, offset) for epoch, offset in self.left_out if here <= (epoch, offset) < (epochs, 0)]
        starts = [offset - self.offset * (epoch == self.epoch) for epoch, offset in ahead]
        return in_this + whole - sum(start % self.batch_size == 0 for start in starts)

    def micro_batches(self) -> Iterator[Micro]:
        """Return this rank's micro-batches from the current offset to the end of the epoch."""
        # Take the start now, not at the first next(): a loader may run ahead of advance().
        return self._micro_batches(self.epoch, self.offset)

    def _micro_batches(self, epoch: int, offset: int) -> Iterator[Micro]:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        for start in range(offset, self.num_samples, self.batch_size):
            if (epoch, start) in self.left_out:
                continue
            batch = order[start : start + self.batch_size]
            begin, end = (_cut(len(batch), rank, self.world_size) for rank in (self.rank, self.rank + 1))
            own = batch[begin:end].tolist()
            num_parts = self._num_parts(len(batch))
            for part in range(num_parts):
                indices = own[_cut(len(own), part, num_parts) : _cut(len(own), part + 1, num_parts)]
                share = len(indices) / len(batch)
                yield Micro(
                    indices or batch[:1].tolist(), share, share * self.world_size, part == num_parts - 1
                )

    def _num_parts(self, num: int) -> int:
        """Return the number of micro-batches of each rank for a global batch of ``num`` samples."""
        largest = _cut(num, 1, self.world_size)  # rank 0's: no rank has more
        return -(-largest // self.micro_batch) if self.micro_batch else 1

    def __iter__(self) -> Iterator[list[int]]:
        return (micro.indices for micro in self.micro_batches())

    def __len__(self) -> int:
        """Return the number of micro-batches left in this epoch; it is a DataLoader's length, for progress bars."""
        starts = range(self.offset, self.num_samples, self.batch_size)
        return sum(
            self._num_parts(min(self.batch_size, self.num_samples - start))
            for start in starts
            if (self.epoch, start) not in self.left_out
        )

    def advance(self) -> None:
        """Move the offset behind one global batch, and behind left-out batches that follow it."""
        self.offset = min(self.offset + self.batch_size, self.num_samples)
        self._pass_left_out()

    def leave_out(self, batches: Iterable[tuple[int, int]]) -> None:
        """Leave out global batches from now on; a batch is named by the sampler's (epoch, offset) before it."""
        self.left_out.update(batches)
        self._pass_left_out()

    def _pass_left_out(self) -> None:
        while self.offset < self.num_samples and (self.epoch, self.offset) in self.left_out:
            self.offset = min(self.offset + self.batch_size, self.num_samples)

    def next_epoch(self) -> None:
        """Start the next epoch, in another order."""
        self.epoch += 1
        self.offset = 0
        self._pass_left_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next step, and the batches that are left out."""
        own = {name: getattr(self, name) for name in ("seed", "epoch", "offset", "num_samples")}
        return own | ({"left_out": [list(each) for each in sorted(self.left_out)]} if self.left_out else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of ``state``, in the order of its seed.

        Raises:
            ValueError: the data set has another number of samples now, so that the offset is meaningless.
        """
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the snapshot was taken with {state['num_samples']} training samples, now there are "
                f"{self.num_samples}: give the same data, or start anew in another folder"
            )
        self.seed, self.epoch, self.offset = state["seed"], state["epoch"], state["offset"]
        self.leave_out((epoch, offset) for epoch, offset in state.get("left_out", ()))


def _cut(num: int, part: int, num_parts: int) -> int:
    """Return where part ``part`` begins if ``num`` items are cut into nearly equal parts, the first one largest."""
    return -(-num * part // num_parts)
