"""Sums of numbers over the ranks by DistributedDataParallel's gradients, without an all-reduce of their own."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from nodekit.training.errors import TrainingError

_NAME = "nodekit_sums"
_MOST = 16
"""The most numbers in one sum, in addition to two for each rank."""


class GradientSums:
    """Sums numbers over the ranks as the gradient of an additional parameter.

    On CPUs a separate all-reduce takes 1 ms of a core, however few the numbers are. They are sent as float32, and DDP
    returns their mean: the sums are precise to some seven digits.
    """

    def __init__(self, module: torch.nn.Module, rank: int, world_size: int) -> None:
        self._module, self._rank, self._world_size = module, rank, world_size
        self.parameter = torch.nn.Parameter(torch.zeros(_MOST + 2 * world_size, dtype=torch.float32))
        """The additional parameter, part of each backward pass."""
        self._values = torch.zeros_like(self.parameter, requires_grad=False)
        self._numbers = self._values.numpy()  # the same memory
        self._own: Sequence[float] = ()  # what goes with the next backward pass
        self._means: list[torch.Tensor] = []

    @contextmanager
    def found_in_module(self) -> Iterator[None]:
        """Add the parameter to the module, after all others, for the block in which DDP is made, and remove it then."""
        holder = torch.nn.Module()
        holder.register_parameter(_NAME, self.parameter)
        self._module.add_module(_NAME, holder)
        try:
            yield
        finally:
            # Not by delattr, which torch.compile's wrapper passes on to the wrapped module.
            self._module._modules.pop(_NAME)

    def start(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Sum these numbers by the next backward pass; the returned function gives the sums, equal on every rank.

        Call that function after the pass. It raises a `TrainingError`, on all ranks, if DDP has averaged nothing.
        """
        self._own, self._means = [float(self._rank == 0), *numbers], []
        return functools.partial(self._read, len(numbers), self._means)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, together with the numbers to sum."""
        self._numbers[: len(self._own)], self._numbers[len(self._own) :] = self._own, 0.0
        torch.autograd.backward([loss, self.parameter], [None, self._values])
        assert self.parameter.grad is not None
        self._means.append(self.parameter.grad)
        self._own, self._means, self.parameter.grad = (), [], None

    def _read(self, num: int, means: list[torch.Tensor]) -> list[float]:
        (found,) = means
        num_first, *sums = [each * self._world_size for each in found.tolist()]
        # Only rank 0 adds 1: these are this rank's own numbers, not the ranks' mean.
        if round(num_first) != 1:
            raise TrainingError(
                f"DistributedDataParallel has averaged no gradients over the ranks: {self._why()}"
            )
        return sums[:num]

    def _why(self) -> str:
        unused = [
            name for name, each in self._module.named_parameters() if each.requires_grad and each.grad is None
        ]
        if not unused:
            return "let the task's loss call the model that it is given, not model.module or a part of it"
        shown = f"{', '.join(unused[:4])}{f' and {len(unused) - 4} more' if len(unused) > 4 else ''}"
        return (
            f"{shown} had no part in the loss of this step: leave such parameters out, or give --find-unused"
        )
