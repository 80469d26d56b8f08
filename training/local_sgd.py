"""Ranks that train apart for some steps and then take the mean of their weights: little traffic, for slow networks.

Local SGD (Stich 2018, arXiv:1805.09767) takes the mean itself. DiLoCo (Douillard et al. 2023, arXiv:2311.08105) takes
the way from the last mean to this one for a gradient, and makes a step of SGD with Nesterov's momentum.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nodekit.training.options import Options
from nodekit.training.world import World

_BUCKET_BYTES = 25 << 20
_TALK_EVERY_S = 2.0
"""About how often ranks hear of losses, a stop and snapshots; each time they wait for the slowest."""


class LocalSgd:
    """When the ranks meet, and what they do then."""

    def __init__(self, options: Options, world: World, module: torch.nn.Module, *, step: int) -> None:
        """Begin after ``step`` with weights that are the same on all ranks."""
        assert options.local_steps is not None
        self.step_s = 0.0
        """How long a step has taken lately, on this rank."""
        self._every, self._world = options.local_steps, world
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._talk_at, self._talked_at, self._talked_s = 0, step, time.monotonic()
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

    def is_due(self, step: int) -> bool:
        """Whether the ranks meet after this step."""
        return step % self._every == 0

    def talks(self, step: int) -> bool:
        """Whether the ranks agree on anything after this step; the same on all."""
        self.step_s = (time.monotonic() - self._talked_s) / max(1, step - self._talked_at)
        is_asked_for = self._snapshot_every is not None and step % self._snapshot_every == 0
        return step >= self._talk_at or self.is_due(step) or is_asked_for

    def have_talked(self, step: int, step_s: float) -> None:
        """Count from here; ``step_s`` is how long a step takes, the same number on all ranks."""
        self._talked_at, self._talked_s = step, time.monotonic()
        self._talk_at = step + max(1, int(_TALK_EVERY_S / max(step_s, 1e-6)))

    @torch.no_grad()
    def meet(self) -> None:
        """Give all ranks the same weights; all call it."""
        mean_of_all(self._parameters, self._world.world_size)
        if self._outer is not None:
            for common, own in zip(self._common, self._parameters, strict=True):
                common.grad = common - own
            self._outer.step()
            self._outer.zero_grad()
            for common, own in zip(self._common, self._parameters, strict=True):
                own.copy_(common)

    @torch.no_grad()
    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Give all ranks the mean of what their optimizers keep, so that a snapshot of one serves all."""
        kept = (value for values in optimizer.state.values() for value in values.values())
        mean_of_all([each for each in kept if torch.is_tensor(each) and each.ndim], self._world.world_size)

    def state(self) -> dict[str, Any]:
        """For a snapshot, which is taken where the ranks meet."""
        return {} if self._outer is None else self._outer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a snapshot's momentum; from one of another way of training there is none."""
        if self._outer is not None and state:
            groups = self._outer.state_dict()["param_groups"]  # as the options are now
            self._outer.load_state_dict({"state": state["state"], "param_groups": groups})


def mean_of_all(tensors: Iterable[torch.Tensor], world_size: int) -> None:
    """Replace each by its mean over the ranks, many of them in one message."""
    bucket: list[torch.Tensor] = []
    size_bytes = 0

    def send() -> None:
        flat = torch.cat([each.reshape(-1) for each in bucket])
        dist.all_reduce(flat)
        flat /= world_size
        for own, common in zip(bucket, torch.split(flat, [each.numel() for each in bucket]), strict=True):
            own.copy_(common.view_as(own))

    for tensor in tensors:
        if bucket and (bucket[0].dtype != tensor.dtype or size_bytes > _BUCKET_BYTES):
            send()
            bucket, size_bytes = [], 0
        bucket.append(tensor)
        size_bytes += tensor.numel() * tensor.element_size()
    if bucket:
        send()
