"""The ways to train, ``--engine NAME``: one file each, with a class `Engine` that follows the protocol below.

An engine gets a plain module and a plain torch optimizer that have the snapshot's state already, and returns such plain
state, so that any engine can load what another has saved. Module and optimizer are on the rank's device, or on the CPU
for engines that partition them (``load.begins_on_cpu``). An engine may import `snapshots` and what is below that.
CONTRIBUTING.md says how to add one.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # `kit compare` checks engines without torch
    import torch

    from nodekit.training.snapshots.files.manifest import Loaded

State = Mapping[str, Any]
"""``model``, ``optimizer`` and ``scaler``: full state dicts, as the plain module and optimizer would give them."""


class Engine(Protocol):
    """The interface by which the training loop uses an engine.

    An engine that can sum numbers over the ranks with a step's last backward pass also has ``start_sum(numbers)``: the
    loop calls it right before that pass; it returns a function that gives the sums after the pass.
    """

    model: "torch.nn.Module"
    """The module that the task's loss calls."""
    optimizer: "torch.optim.Optimizer"
    """The optimizer; the loop sets its groups' ``lr`` before each step."""
    forwards_together: bool
    """Whether a forward pass is a collective: every rank must then make the same number of them."""

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Wrap forward and backward of a micro-batch; gradients are exchanged with the step's last micro-batch only."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Wrap a forward pass, for ``--amp``."""

    def backward(self, loss: "torch.Tensor") -> None:
        """Add a loss's gradients; the loss is weighted so that its mean over the ranks is the global batch's."""

    def average(self) -> None:
        """Average the step's gradients over the ranks, unless the backward pass has done so.

        If another rank is lost meanwhile, the weights are still those of the step before.
        """

    def update(self, clip: float | None) -> None:
        """Clip the gradients to this norm, step the optimizer and clear the gradients.

        An engine with a training loop of its own has ``drive(num_steps, compute, end_step)`` instead: for each step it
        calls ``compute``, steps the optimizer, and calls ``end_step``. ``drive`` returns False if it has stopped early,
        because ``end_step`` returned True.
        """

    def weights(self) -> Mapping[str, "torch.Tensor"]:
        """Return the plain module's full state dict, at least on the first rank of each node; all ranks call it."""

    def state(self) -> State:
        """Return everything that a snapshot needs, on all ranks.

        A tensor of which each rank has a part is a ``Gathered``, which all ranks gather when any of them copies it.
        """


class ShardedEngine(Engine, Protocol):
    """An engine that can also save and load while no rank holds the full state."""

    def shards(self) -> State:
        """Return this rank's part of `state`: DTensors, and values that are the same on all ranks."""

    def load_shards(self, found: "Loaded") -> None:
        """Read this rank's part of a sharded snapshot, which any number of ranks may have saved.

        Raises:
            ValueError: the snapshot is of another model.
        """
