"""Local SGD: each rank trains by itself for some steps, then all ranks average their weights; for slow networks.

Local SGD (Stich 2018, arXiv:1805.09767) uses the average itself. DiLoCo (Douillard et al. 2023, arXiv:2311.08105) takes
the difference between the last average and this one for a gradient, and makes a step of SGD with Nesterov momentum.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nodekit.training.group.collectives import send_together
from nodekit.training.options.options import Options
from nodekit.training.world import World

_SYNC_EVERY_S = 2.0
"""Seconds, roughly, between exchanges of losses, stop requests and due snapshots; each waits for the slowest rank."""


class LocalSgd:
    """Decides after which steps the ranks synchronize, and averages their weights and optimizer states."""

    def __init__(self, options: Options, world: World, module: torch.nn.Module, *, step: int) -> None:
        """Start after ``step``; the weights must be the same on all ranks."""
        assert options.local_steps is not None
        self.step_s = 0.0
        """The mean seconds of a step since the last sync, on this rank."""
        self._every, self._world = options.local_steps, world
        self._parameters: list[torch.Tensor] = [each for each in module.parameters() if each.requires_grad]
        self._next_sync, self._last_sync, self._last_sync_s = 0, step, time.monotonic()
        self._snapshot_every = options.snapshot_every
        self._outer: torch.optim.SGD | None = None
        if options.diloco:
            self._common = [each.detach().clone() for each in self._parameters]
            self._outer = torch.optim.SGD(
                self._common,
                lr=options.outer_lr,
                momentum=options.outer_momentum,
                nesterov=options.outer_momentum > 0,
            )

    def averages_after(self, step: int) -> bool:
        """Whether the weights are averaged after this step."""
        return step % self._every == 0

    def syncs_after(self, step: int) -> bool:
        """Whether the ranks exchange losses and requests after this step; the same on all ranks."""
        self.step_s = (time.monotonic() - self._last_sync_s) / max(1, step - self._last_sync)
        has_snapshot = self._snapshot_every is not None and step % self._snapshot_every == 0
        return step >= self._next_sync or self.averages_after(step) or has_snapshot

    def synced(self, step: int, step_s: float) -> None:
        """Plan the next sync; ``step_s`` is the duration of a step, averaged over all ranks."""
        self._last_sync, self._last_sync_s = step, time.monotonic()
        self._next_sync = step + max(1, int(_SYNC_EVERY_S / max(step_s, 1e-6)))

    @torch.no_grad()
    def average(self) -> None:
        """Average the weights over the ranks, with DiLoCo by an outer step towards the average; all ranks call it."""
        world = self._world
        average_tensors(self._parameters, [world.world_size] * len(self._parameters), world.device)
        if self._outer is not None:
            for common, own in zip(self._common, self._parameters, strict=True):
                common.grad = common - own
            self._outer.step()
            self._outer.zero_grad()
            for common, own in zip(self._common, self._parameters, strict=True):
                own.copy_(common)

    @torch.no_grad()
    def average_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the optimizers' state over the ranks, so that one rank's snapshot serves all; all ranks call it.

        An optimizer has no state for a parameter before its first gradient, which comes at another step on each rank if
        the model has branches. A rank without the state gets the mean of the other ranks', which is right also for
        optimizers whose state does not begin with zeros.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        own = {
            (number, name): _described(value)
            for number, parameter in enumerate(parameters)
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        by_rank = self._world.gather(own)
        tensors, num_ranks = [], []
        for where in sorted({each for had in by_rank for each in had}):  # the same order on all ranks
            parameter, name = parameters[where[0]], where[1]
            having = [had[where] for had in by_rank if where in had]
            if where not in own:
                optimizer.state[parameter][name] = _begun(having[0], parameter.device)
            value = optimizer.state[parameter][name]
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.ndim):
                tensors.append(value)
                num_ranks.append(len(having))
        average_tensors(tensors, num_ranks, self._world.device)

    def state(self) -> dict[str, Any]:
        """Return the outer optimizer's state for a snapshot, which must be taken right after an average."""
        return {} if self._outer is None else self._outer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a snapshot's momentum; a snapshot that was trained without DiLoCo has none."""
        if self._outer is not None and state:
            groups = self._outer.state_dict()["param_groups"]  # the settings are those of this run's options
            self._outer.load_state_dict({"state": state["state"], "param_groups": groups})


class _Tensor(NamedTuple):
    """Describes a tensor for ranks that have to make one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool
    """Whether the tensor is on the CPU, as the count of steps is, whatever the parameter's device."""


def _described(value: Any) -> Any:
    """Describe a value of an optimizer's state for other ranks: a tensor as a `_Tensor`, others as they are."""
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.dtype, value.device.type == "cpu")
    return value


def _begun(described: Any, device: torch.device) -> Any:
    """Make a value like the described one of another rank; a tensor is of zeros, so that it adds nothing to the sum."""
    if isinstance(described, _Tensor):
        where = torch.device("cpu") if described.is_on_cpu else device
        return torch.zeros(described.shape, dtype=described.dtype, device=where)
    return described


def average_tensors(tensors: list[torch.Tensor], num_ranks: Sequence[int], device: torch.device) -> None:
    """Replace each tensor by its sum over the ranks, divided by a number; many tensors in one message.

    Args:
        tensors: in the same order on all ranks.
        num_ranks: for each tensor, the number of ranks that have a value; the other ranks' tensors must be zeros.
        device: of this rank; NCCL cannot send tensors that are on the CPU.
    """
    send_together(tensors, device, dist.all_reduce)
    if tensors:
        torch._foreach_div_(tensors, list(map(float, num_ranks)))
