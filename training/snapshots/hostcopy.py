"""A copy of a state in host memory, in buffers that are reused."""

import copy
from collections.abc import Callable
from typing import Any

import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class HostCopy:
    """Copies nested dicts, lists and tuples of tensors and plain values; one copy is valid at a time.

    Tied weights stay tied. For CUDA tensors the buffers are pinned, so that the copy runs at the bus's full rate.
    """

    def __init__(self) -> None:
        """No buffers yet: the first copy makes them."""
        self._buffers: list[torch.Tensor] = []

    def take(self, state: Any) -> Any:
        """Return the copy; its tensors are on the CPU, and the next ``take`` overwrites them."""
        old, self._buffers = self._buffers, []
        copied: dict[tuple[object, ...], torch.Tensor] = {}
        devices: set[torch.device] = set()

        def tensor(source: torch.Tensor) -> torch.Tensor:
            identity = (
                source.untyped_storage()._cdata, source.storage_offset(), source.shape, source.stride(),
                source.dtype, source.device,
            )  # fmt: skip
            if (known := copied.get(identity)) is not None:
                return known
            place = len(self._buffers)
            buffer = old[place] if place < len(old) and _fits(old[place], source) else _buffer(source)
            buffer.copy_(source.detach(), non_blocking=True)
            self._buffers.append(buffer)
            copied[identity] = buffer
            if source.device.type == "cuda":
                devices.add(source.device)
            return buffer

        result = map_tensors(tensor, state, other=copy.deepcopy)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return result


def _fits(buffer: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        buffer.shape == source.shape
        and buffer.dtype == source.dtype
        and buffer.stride() == torch.empty_like(source, device="meta").stride()
        and buffer.is_pinned() == (source.device.type == "cuda")
    )


def _buffer(source: torch.Tensor) -> torch.Tensor:
    if source.device.type == "cuda":
        try:
            return torch.empty_like(source, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError:  # the system's limit of pinned memory: unpinned is slower
            pass
    return torch.empty_like(source, device="cpu", requires_grad=False)


def map_tensors(
    function: Callable[[torch.Tensor], Any], value: Any, *, other: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Apply ``function`` to the tensors in nested dicts, lists and tuples, and ``other`` to other leaves."""

    def mapped(item: Any) -> Any:
        return map_tensors(function, item, other=other)

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        result = copy.copy(value)  # a state_dict has its modules' versions in an attribute
        result.update((key, mapped(item)) for key, item in value.items())
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(mapped, value))
    if isinstance(value, list | tuple):
        return type(value)(map(mapped, value))
    return other(value)


def nan_in(value: Any, name: str = "") -> str:
    """Return where nested dicts, lists and tuples have a tensor that holds nan, as ``model.bias``; "" if none does."""
    if isinstance(value, torch.Tensor):
        # The minimum is nan if any is; infinity may be meant, as in a mask.
        has_nan = value.dtype in _FLOATS and value.numel() and bool(value.min().isnan())
        return name * has_nan
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    found = (nan_in(each, f"{name}.{key}" if name else str(key)) for key, each in parts)
    return next(filter(None, found), "")
