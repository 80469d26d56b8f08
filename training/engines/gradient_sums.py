"""Sums over the ranks that DistributedDataParallel makes beside its gradients, with no all-reduce of their own."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from nodekit.training.errors import TrainingError

_NAME = "nodekit_sums"
_MOST = 16
"""How many numbers there may be, beside two for each rank."""


class GradientSums:
    """Numbers that go as the gradient of one parameter more than the model has.

    On CPUs an all-reduce of their own takes 1 ms of a core, however few they are. They are sent as float32, and DDP
    returns their mean: the sums have some seven digits, and what is summed must not need more.
    """

    def __init__(self, module: torch.nn.Module, rank: int, world_size: int) -> None:
        self._module, self._rank, self._world_size = module, rank, world_size
        self.parameter = torch.nn.Parameter(torch.zeros(_MOST + 2 * world_size, dtype=torch.float32))
        """Part of each backward pass."""
        self._values = torch.zeros_like(self.parameter, requires_grad=False)
        self._numbers = self._values.numpy()  # the same memory
        self._own: Sequence[float] = ()  # what goes with the next backward pass
        self._means: list[torch.Tensor] = []

    @contextmanager
    def found_in_module(self) -> Iterator[None]:
        """While DDP is made and set up, the module has the parameter, after all others; nobody else is to see it."""
        holder = torch.nn.Module()
        holder.register_parameter(_NAME, self.parameter)
        self._module.add_module(_NAME, holder)
        try:
            yield
        finally:
            # Not by delattr, which torch.compile's module passes on to the one within.
            self._module._modules.pop(_NAME)

    def start(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Have the next backward pass sum these; the returned function gives the sums after it, equal on every rank.

        That raises `TrainingError`, on all ranks, if DDP has averaged nothing.
        """
        self._own, self._means = [float(self._rank == 0), *numbers], []
        return functools.partial(self._read, len(numbers), self._means)

    def backward(self, loss: torch.Tensor) -> None:
        """Make the backward pass of a loss."""
        self._numbers[: len(self._own)], self._numbers[len(self._own) :] = self._own, 0.0
        torch.autograd.backward([loss, self.parameter], [None, self._values])
        assert self.parameter.grad is not None
        self._means.append(self.parameter.grad)
        self._own, self._means, self.parameter.grad = (), [], None

    def _read(self, num: int, means: list[torch.Tensor]) -> list[float]:
        (found,) = means
        num_first, *sums = [each * self._world_size for each in found.tolist()]
        if round(num_first) != 1:  # each rank has its own numbers, in place of the ranks' mean
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
