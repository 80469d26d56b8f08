"""A copy of a state in host memory, consistent with one moment, in buffers that are used again."""

import copy
from collections.abc import Callable
from typing import Any

import torch

_Identity = tuple[object, ...]


class HostCopy:
    """Copies nested dicts, lists and tuples of tensors and plain values; one copy is valid at a time.

    Tensors that are one in the state (tied weights) stay one. On CUDA the buffers are pinned, so that the copy
    goes at the bus's full rate.
    """

    def __init__(self) -> None:
        """No buffers yet: the first copy makes them."""
        self._buffers: list[torch.Tensor] = []

    def take(self, state: Any) -> Any:
        """The copy; its tensors are on the CPU, and are overwritten by the next ``take``."""
        old, self._buffers = self._buffers, []
        copied: dict[_Identity, torch.Tensor] = {}
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

        result = _map(tensor, state)
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
        except RuntimeError:  # the system's limit of pinned memory: slower, but a snapshot
            pass
    return torch.empty_like(source, device="cpu", requires_grad=False)


def _map(tensor: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # a state_dict carries versions in an attribute
        for key, item in value.items():
            mapped[key] = _map(tensor, item)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(tensor, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(tensor, item) for item in value)
    return copy.deepcopy(value)
