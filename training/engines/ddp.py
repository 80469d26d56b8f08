"""A copy of the model on each rank; gradients are averaged while the backward pass still goes on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nodekit.training.engines import single
from nodekit.training.engines.single import AMP_DTYPES

POWER_SGD_FROM = 10
"""The step from which gradients are sent as thin matrices: the first ones differ too much from those after them."""


class Engine(single.Engine):
    """DistributedDataParallel."""

    model: DistributedDataParallel

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Send rank 0's weights to all."""
        device = self.world.device
        model = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=self.options.find_unused,
        )
        _settle_buckets(model, module)
        self.optimizer.zero_grad()
        compress(model, self.options.compress)
        return model

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP's own."""
        return nullcontext() if is_last else self.model.no_sync()


def compress(model: torch.nn.Module, how: str) -> None:
    """Have a DistributedDataParallel send its gradients so, as ``--compress`` has it; another has nothing to send."""
    if how == "off" or not isinstance(model, DistributedDataParallel):
        return
    if how == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # not needed otherwise

        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWER_SGD_FROM)
        model.register_comm_hook(state, _thin)
    else:
        model.register_comm_hook(AMP_DTYPES[how], _halve)


def _thin(
    state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP looks for this very annotation
) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD by torch's hook, one bucket at a time where there is gloo.

    It sends in two or three parts, the later ones from a thread of gloo's when the earlier have arrived. With two
    buckets on their way, ranks would send in different orders, and one take a part for another.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    future: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    if dist.get_backend() == "gloo":
        future.wait()
    return future


def _halve(
    dtype: torch.dtype,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # likewise
) -> torch.futures.Future[torch.Tensor]:
    """Average in 16 bits. torch's own hooks do as much, but that for bf16 refuses gloo, which can do it."""
    whole = bucket.buffer()
    half = whole.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda summed: whole.copy_(summed.value()[0])
    )
    return future


def _settle_buckets(model: DistributedDataParallel, module: torch.nn.Module) -> None:
    """Make DDP lay out its buckets now, by a backward pass through nothing.

    It does so once, after its first backward pass. Left to itself, the first step after a resume would
    have another layout than that step of the unbroken run, and three ranks' sums other roundings.
    """
    parameters = [each for each in module.parameters() if each.requires_grad]
    module.forward = lambda: sum(each.float().sum() * 0 for each in parameters)
    model().backward()
    del module.forward
