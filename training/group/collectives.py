"""Collectives that work over NCCL for any tensors and objects, and do not make this process wait for the device."""

import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from nodekit.training.process.devices import sum_dtype

_SMALL_BYTES, _LENGTH_BYTES = 1024, 8
_FIRST_BYTES = 1 << 16
_BUCKET_BYTES = 25 << 20

NOT_SENT = "_ddp_params_and_buffers_to_ignore"
"""The attribute in which a module lists parameters and buffers that DistributedDataParallel is not to send."""


def sent_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers that DDP would send; do not keep the list, since a forward pass may replace buffers."""
    own = module.module if isinstance(module, DistributedDataParallel) else module
    kept_apart = getattr(own, NOT_SENT, ())
    return [each for name, each in own.named_buffers() if name not in kept_apart]


def broadcast_from_first(tensors: Iterable[Any], device: torch.device) -> None:
    """Broadcast rank 0's values in place, many tensors in one message; they may be on the CPU, or not contiguous.

    Values that are not tensors, such as a module's extra state in a state dict, are left as they are.
    """
    # Use ``data``, which autograd does not track: a GAN's discriminator is updated while the generator's graph, which
    # refers to batch norm's means, is still needed.
    own = [each.data for each in tensors if isinstance(each, torch.Tensor)]
    # Send as bytes: neither NCCL nor gloo supports all types of buffers (int16, uint32).
    send_together(own, device, lambda flat: dist.broadcast(flat.view(torch.uint8), src=0))


def send_together(
    tensors: Sequence[torch.Tensor], device: torch.device, send: Callable[[torch.Tensor], object]
) -> None:
    """Apply an in-place collective to tensors, many in one message.

    Args:
        tensors: in the same order on all ranks.
        device: of this rank; NCCL cannot send tensors that are on the CPU.
        send: the collective; gets a 1-D tensor on the device.
    """
    for some in _take_tensors(tensors, _BUCKET_BYTES):  # type: ignore[no-untyped-call]  # each of one type
        flat = _flatten_dense_tensors(some).resolve_conj().resolve_neg().to(device)  # type: ignore[no-untyped-call]
        send(flat)
        for own, value in zip(some, _unflatten_dense_tensors(flat, some), strict=True):  # type: ignore[no-untyped-call]
            own.copy_(value)


def gather_objects(value: Any, gather: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[Any]:
    """Return every rank's ``value``, by rank: by one collective if all are small, while torch always takes two.

    Args:
        value: of any type that can be pickled.
        gather: returns every rank's tensor, given this rank's; all are 1-D, of uint8 and of one length.
    """
    data = pickle.dumps(value)
    first = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _SMALL_BYTES - _LENGTH_BYTES]
    parts = [each.cpu().numpy().tobytes() for each in gather(_padded(first, _SMALL_BYTES))]
    sizes = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in parts]
    found = [each[_LENGTH_BYTES:] for each in parts]
    if (rest := max(sizes) + _LENGTH_BYTES - _SMALL_BYTES) > 0:
        more = gather(_padded(data[_SMALL_BYTES - _LENGTH_BYTES :], rest))
        found = [begin + each.cpu().numpy().tobytes() for begin, each in zip(found, more, strict=True)]
    return [pickle.loads(each[:size]) for each, size in zip(found, sizes, strict=True)]  # noqa: S301  # our ranks'


def broadcast_object(
    value: Any, broadcast: Callable[[torch.Tensor], torch.Tensor], *, is_source: bool
) -> Any:
    """Return the source's ``value``: by one collective if it takes less than 64 kB, while torch always takes two.

    Args:
        value: of any type that can be pickled; ignored on ranks other than the source.
        broadcast: returns the source's tensor, given this rank's; all are 1-D, of uint8 and of one length.
        is_source: whether this rank is the source.
    """
    data = pickle.dumps(value) if is_source else b""
    size = len(data).to_bytes(_LENGTH_BYTES, "little")
    first = broadcast(_padded((size + data)[:_FIRST_BYTES], _FIRST_BYTES)).cpu().numpy().tobytes()
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    found = first[_LENGTH_BYTES:]
    if (rest := length - len(found)) > 0:
        found += broadcast(_padded(data[len(found) :], rest)).cpu().numpy().tobytes()
    return pickle.loads(found[:length])  # noqa: S301  # our ranks'


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def numbers_on(device: torch.device, numbers: Sequence[float]) -> torch.Tensor:
    """Return a tensor of `sum_dtype` on the device, copied from pinned memory so as not to wait for work on the GPU."""
    own = torch.tensor(numbers, dtype=sum_dtype(device), device="cpu")
    if device.type == "cuda":
        # Not by `pin_memory=True` above, which holds the GIL: allocating pinned memory may wait for the GPU, where NCCL
        # may wait for a lost rank, and the thread that hears of the loss would wait for the GIL.
        own = own.pin_memory()
    return own.to(device, non_blocking=True)


def start_sum(values: torch.Tensor, world_size: int) -> Callable[[], list[float]]:
    """Start to sum a 1-D tensor over all ranks; the returned function waits for the sums, equal on every rank.

    With NCCL, the sums are also copied to the host beside other work on the GPU: a caller that reads them a step later
    need not wait.
    """
    work = dist.all_reduce(values, async_op=True) if world_size > 1 else None
    if values.device.type != "cuda" or (work is not None and dist.get_backend() != "nccl"):

        def sums() -> list[float]:
            if work is not None:
                work.wait()
            return [float(value) for value in values.tolist()]

        return sums

    here = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copying, arrived = _copying_stream(values.device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copying.wait_stream(torch.cuda.current_stream(values.device))
    with torch.cuda.stream(copying):
        if work is not None:
            work.wait()  # by the stream, not by this process
        here.copy_(values, non_blocking=True)
        arrived.record()
    # Once this function returns, nothing refers to `values`. Without `record_stream`, torch would reuse the memory for
    # the backward pass while NCCL and the copy still use it: garbage in the sums and in the gradients.
    values.record_stream(copying)

    def sums_here() -> list[float]:
        arrived.synchronize()
        return [float(value) for value in here.tolist()]

    return sums_here


@functools.cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for copying sums, made once: torch has a pool of 32 streams, and would reuse them in turn."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
