"""Sums over the ranks that DistributedDataParallel makes beside its gradients, with no all-reduce of their own."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

_NAME = "nodekit_sums"
_MOST = 16
"""How many numbers there may be, beside two for each rank."""


class GradientSums:
    """Numbers that go as the gradient of one parameter more than the model has.

    On CPUs an all-reduce of their own takes 1 ms of a core, however few they are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.parameter = torch.nn.Parameter(torch.zeros(_MOST + 2 * world_size))
        self._own: Sequence[float] = ()  # what goes with the next backward pass
        self._means: list[torch.Tensor] = []

    @contextmanager
    def part_of(self, module: torch.nn.Module) -> Iterator[None]:
        """While DDP is made, let it find the parameter in its module, where nobody else is to see it."""
        module.register_parameter(_NAME, self.parameter)
        try:
            yield
        finally:
            delattr(module, _NAME)

    def start(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Have the next backward pass sum these; the returned function gives the sums after it, equal on every rank."""
        self._own, self._means = numbers, []
        return functools.partial(self._read, len(numbers), self._means)

    def backward(self, loss: torch.Tensor) -> None:
        """Make the backward pass of a loss."""
        values = torch.tensor([*self._own, *[0.0] * (len(self.parameter) - len(self._own))])
        torch.autograd.backward([loss, self.parameter], [None, values])
        assert self.parameter.grad is not None
        self._means.append(self.parameter.grad)
        self._own, self._means, self.parameter.grad = (), [], None

    def _read(self, num: int, means: list[torch.Tensor]) -> list[float]:
        (found,) = means
        return [each * self._world_size for each in found.tolist()[:num]]
