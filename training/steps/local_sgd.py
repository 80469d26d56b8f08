"""Local SGD: each rank trains by itself for some steps, then all average their weights; for slow networks.

Local SGD (Stich 2018, arXiv:1805.09767) uses the average itself. DiLoCo (Douillard et al. 2023, arXiv:2311.08105) takes
the difference between the last average and this one for a gradient, and makes a step of SGD with Nesterov momentum.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from nodekit.training.options.options import Options
from nodekit.training.world import World

_BUCKET_BYTES = 25 << 20
_SYNC_EVERY_S = 2.0
"""About how often ranks exchange losses, stop requests and due snapshots; each time they wait for the slowest."""


class LocalSgd:
    """After which steps the ranks synchronize, and the averaging."""

    def __init__(self, options: Options, world: World, module: torch.nn.Module, *, step: int) -> None:
        """Start after ``step`` with weights that are the same on all ranks."""
        assert options.local_steps is not None
        self.step_s = 0.0
        """How long a step has taken since the last sync, on this rank."""
        self._every, self._world = options.local_steps, world
        self._parameters = [each for each in module.parameters() if each.requires_grad]
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
        """Give all ranks the same weights; all ranks call it."""
        average_tensors(self._parameters, self._world.world_size)
        if self._outer is not None:
            for common, own in zip(self._common, self._parameters, strict=True):
                common.grad = common - own
            self._outer.step()
            self._outer.zero_grad()
            for common, own in zip(self._common, self._parameters, strict=True):
                own.copy_(common)

    @torch.no_grad()
    def average_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the optimizers' state over the ranks, so that one rank's snapshot serves all."""
        kept = (value for values in optimizer.state.values() for value in values.values())
        average_tensors(
            [each for each in kept if torch.is_tensor(each) and each.ndim], self._world.world_size
        )

    def state(self) -> dict[str, Any]:
        """The outer optimizer's state for a snapshot, which is taken right after an average."""
        return {} if self._outer is None else self._outer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a snapshot's momentum; a snapshot that was trained without DiLoCo has none."""
        if self._outer is not None and state:
            groups = self._outer.state_dict()["param_groups"]  # by the options of this run
            self._outer.load_state_dict({"state": state["state"], "param_groups": groups})


def average_tensors(tensors: Iterable[torch.Tensor], world_size: int) -> None:
    """Replace each tensor by its mean over the ranks, many tensors in one message."""
    for bucket in _take_tensors(tensors, _BUCKET_BYTES):  # type: ignore[no-untyped-call]
        flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
        dist.all_reduce(flat)
        flat /= world_size
        for own, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):  # type: ignore[no-untyped-call]
            own.copy_(mean)
