"""DDP: a copy of the model on each rank; gradients are averaged while the backward pass still runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nodekit.training.engines import single
from nodekit.training.engines.gradient_sums import GradientSums
from nodekit.training.engines.single import AMP_DTYPES

POWER_SGD_FROM = 10
"""The step from which gradients are sent as low-rank matrices: those of the first steps differ too much from later."""


class Engine(single.Engine):
    """Wraps the module in DistributedDataParallel."""

    model: DistributedDataParallel

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap the module in DDP, which sends rank 0's weights to all ranks, unless they are alike already."""
        device, options = self.world.device, self.options
        self._sums: GradientSums | None = None
        # Only on CPUs, since a GPU computes a sum beside its other work; and only if the gradients of each step are
        # sent uncompressed, and DDP does not search for unused parameters.
        is_plain = options.compress == "off" and not (options.find_unused or options.local_steps)
        takes_more = not isinstance(module, torch.jit.ScriptModule)
        if is_plain and takes_more and device.type == "cpu" and self.world.world_size > 1:
            self._sums = GradientSums(module, self.world.rank, self.world.world_size)
            self.start_sum = self._sums.start
        with nullcontext() if self._sums is None else self._sums.found_in_module():
            model = DistributedDataParallel(
                module,
                device_ids=[device.index] if device.type == "cuda" else None,
                find_unused_parameters=options.find_unused,
                init_sync=not self.are_alike,
            )
            set_up(model, options.compress)
        return model

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        if self._sums is None:
            super().backward(loss)
        else:
            self._sums.backward(self.scaler.scale(loss))


def set_up(model: torch.nn.Module, compress: str) -> None:
    """Lay out a DistributedDataParallel's buckets and set its ``--compress``; do nothing for any other module.

    Afterwards DDP sends no buffers: the loop does, before an update. DDP would do so in the next forward pass, and if
    rank 0 is lost between the two, no other rank has its buffers (the means of BatchNorm) of a step that all have made.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    model.broadcast_buffers = False
    lay_out_buckets(model)
    if compress == "off":
        return
    if compress == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # not needed otherwise

        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWER_SGD_FROM)
        model.register_comm_hook(state, _powersgd)
    else:
        model.register_comm_hook(AMP_DTYPES[compress], _average_in_16_bits)


def _powersgd(
    state: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks this annotation
) -> torch.futures.Future[torch.Tensor]:
    """Run torch's PowerSGD hook; over gloo, for one bucket at a time.

    The hook sends two or three messages, the later ones from a thread of gloo's when the earlier have arrived. With two
    buckets in flight, ranks would send in different orders, and mistake one message for another.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    future: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
    if dist.get_backend() == "gloo":
        future.wait()
    return future


def _average_in_16_bits(
    dtype: torch.dtype,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # likewise
) -> torch.futures.Future[torch.Tensor]:
    """Average in 16 bits, as torch's own hooks do; torch's hook for bf16 refuses gloo, although gloo supports bf16."""
    whole = bucket.buffer()
    half = whole.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda summed: whole.copy_(summed.value()[0])
    )
    return future


def lay_out_buckets(model: DistributedDataParallel) -> None:
    """Make DDP lay out its buckets now, by a backward pass through zeros; call it on all ranks before the first step.

    By itself, DDP does so after its first backward pass. The first step after a resume would then use another layout
    than the same step of an uninterrupted run, and sums over three or more ranks would be rounded differently.
    """
    module = model.module
    model.module = _Zeros(module)
    try:
        model(torch.zeros(())).backward()
    finally:
        model.module = module
    model.zero_grad()


class _Zeros(torch.nn.Module):
    """Stands in for a model: returns a sum whose gradients are zeros for all of the model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._trained = [each for each in model.parameters() if each.requires_grad]
        # DDP accepts no dense gradients for these.
        self._sparse = {
            each.weight
            for each in model.modules()
            if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag) and each.sparse
        }
        # DDP sends its module's buffers before each forward pass, unless `set_up` has turned that off.
        self.named_buffers = model.named_buffers  # type: ignore[method-assign]

    def forward(self, _: torch.Tensor) -> Any:
        """Return the sum; the argument is unused, but on a GPU, DDP needs one that it has moved there."""
        return sum(self._used(each).abs().float().sum() * 0 for each in self._trained)

    def _used(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._sparse:
            return parameter
        row = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        return torch.nn.functional.embedding(row, parameter, sparse=True)
