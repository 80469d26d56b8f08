"""A copy of a state in host memory, in one block that is reused."""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from nodekit.training.process.devices import module_of
from nodekit.training.snapshots.background import Background

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ALIGNED_BYTES = 64
_PAGE_BYTES = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Stands in a state for a tensor of which each rank has a part; it is gathered when the state is copied.

    Tensors are gathered one at a time. Tied weights are one `Gathered` at several places, which is gathered once.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    gather: Callable[[], torch.Tensor]
    """Returns the whole tensor; all ranks call it, also ranks that do not keep the result."""


def gather_for_others(state: Any) -> None:
    """Take part in gathering the tensors of a state that other ranks copy, without keeping them."""
    gathered: set[Gathered] = set()

    def other(leaf: Any) -> Any:
        if isinstance(leaf, Gathered) and leaf not in gathered:
            gathered.add(leaf)
            leaf.gather()
        return leaf

    map_tensors(lambda tensor: tensor, state, other=other)


def holds_gathered(state: Any) -> bool:
    """Whether a state holds a `Gathered`, so that no rank can copy it without the others."""
    found = []

    def other(leaf: Any) -> Any:
        found.append(isinstance(leaf, Gathered))
        return leaf

    map_tensors(lambda tensor: tensor, state, other=other)
    return any(found)


class HostCopy:
    """Copies nested dicts, lists and tuples of tensors and plain values; one copy is valid at a time.

    Tied weights stay tied. For CUDA tensors the block is page-locked, so that the copy runs at the bus's full rate. The
    block has the exact size; torch's own pinned memory would round each tensor up to a power of two.
    """

    def __init__(self, *, pins: bool = True) -> None:
        """Allocate nothing yet: ``prepare`` or the first copy does.

        Args:
            pins: page-lock the memory for CUDA tensors; locking costs more than one copy gains.
        """
        self._pins = pins
        self._memory: Any = np.empty(0, np.uint8)
        self._maker = Background("nodekit-host-memory")

    def prepare(self, state: Any) -> None:
        """Allocate the memory for such a state in a thread: page-locking takes long, and would delay the first copy."""
        self._maker.wait()
        self._maker.start(partial(self._make, *_needs(state)))

    def take(self, state: Any) -> Any:
        """Return a copy of ``state``; its tensors are on the CPU, and the next ``take`` overwrites them."""
        self._maker.wait()
        self._make(*_needs(state))
        copied: dict[object, torch.Tensor] = {}
        devices: set[torch.device] = set()
        start = 0

        def buffer(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            """Return the next tensor of the block, with a storage of its own: torch.save writes whole storages."""
            nonlocal start
            if not shape.numel():
                return torch.empty(shape, dtype=dtype, device="cpu")
            flat = torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=start)
            start += _aligned(flat.nbytes)
            return flat.as_strided(shape, stride)

        def tensor(source: torch.Tensor) -> torch.Tensor:
            if (known := copied.get(identity := _identity(source))) is not None:
                return known
            if not is_in_one_piece(source):
                copied[identity] = source.detach().to("cpu", copy=True)
                return copied[identity]
            copied[identity] = own = buffer(source.shape, _stride(source), source.dtype)
            fill(own, source)
            return own

        def fill(own: torch.Tensor, source: torch.Tensor) -> None:
            # Conjugate on the GPU: torch would conjugate the host's copy, before the data has arrived.
            own.copy_(source.detach().resolve_conj().resolve_neg(), non_blocking=True)
            if source.device.type != "cpu":
                devices.add(source.device)

        def other(leaf: Any) -> Any:
            if not isinstance(leaf, Gathered):
                return copy.deepcopy(leaf)
            if leaf not in copied:
                stride = torch.empty(leaf.shape, device="meta").stride()
                copied[leaf] = own = buffer(leaf.shape, stride, leaf.dtype)
                fill(own, leaf.gather())
            return copied[leaf]

        result = map_tensors(tensor, state, other=other)
        for device in devices:
            module_of(device.type).current_stream(device).synchronize()
        return result

    def _make(self, size_bytes: int, gpu: torch.device | None) -> None:
        """Make sure that the block has at least this size, page-locked for ``gpu`` if given."""
        if size_bytes <= self._memory.nbytes:
            return
        self._memory = np.empty(0, np.uint8)  # free the old block first: the host may lack room for both
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").numpy()
        memory[::_PAGE_BYTES] = 0  # the system assigns a page when it is first written
        if gpu is not None and self._pins:
            _lock(memory, gpu)
        self._memory = memory


def off_the_gpu(state: Any, device: torch.device) -> Any:
    """Return a state's copy in host memory, so that ``device`` has room for another model; on a CPU, the state."""
    return state if device.type == "cpu" else HostCopy(pins=False).take(state)


def _lock(memory: Any, gpu: torch.device) -> None:
    """Page-lock memory until nothing refers to it; if the system refuses, copies are only slower.

    This runs in a thread of its own: CUDA reports a refusal again at the next kernel that the same thread launches.
    """

    def lock() -> None:
        with torch.cuda.device(gpu):  # a new thread is set to GPU 0, and would allocate memory there
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)) == 0:
                weakref.finalize(memory, cudart.cudaHostUnregister, memory.ctypes.data).atexit = False

    locking = Background("nodekit-host-memory")
    locking.start(lock)
    locking.wait()


def _needs(state: Any) -> tuple[int, torch.device | None]:
    """Return the size of a state's copy in bytes, and a GPU that holds some of the state, if any."""
    sizes: dict[object, int] = {}
    gpus: list[torch.device] = []

    def tensor(source: torch.Tensor) -> torch.Tensor:
        if not is_in_one_piece(source):
            return source
        sizes[_identity(source)] = _aligned(source.numel() * source.itemsize)
        gpus.extend([source.device] if source.device.type == "cuda" else [])
        return source

    def other(leaf: Any) -> Any:
        if isinstance(leaf, Gathered):
            sizes[leaf] = _aligned(leaf.shape.numel() * leaf.dtype.itemsize)
            gpus.extend([leaf.device] if leaf.device.type == "cuda" else [])
        return leaf

    map_tensors(tensor, state, other=other)
    return sum(sizes.values()), gpus[0] if gpus else None


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _stride(source: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(source, device="meta").stride()


def is_in_one_piece(tensor: torch.Tensor) -> bool:
    """Whether a tensor is neither sparse, with its indices in another tensor, nor quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def _identity(source: torch.Tensor) -> object:
    if not is_in_one_piece(source):
        return id(source)
    storage = source.untyped_storage()._cdata
    place = storage, source.storage_offset(), source.shape, source.stride(), source.dtype, source.device
    return place, source.is_conj(), source.is_neg()


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
        # A Counter's `update` would add to its counts (a scheduler's milestones).
        for key, item in value.items():
            result[key] = mapped(item)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(mapped, value))
    if isinstance(value, list | tuple):
        return type(value)(map(mapped, value))
    return other(value)


def on_cpu(value: Any) -> Any:
    """Return a state dict's value on the CPU; a module's extra state, which may be of any type, stays as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def nan_in(value: Any, name: str = "") -> str:
    """Return the path of the first tensor that holds nan in nested containers, as ``model.bias``; "" if none does."""
    if isinstance(value, torch.Tensor):
        return name * _has_nan(value)
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    found = (nan_in(each, f"{name}.{key}" if name else str(key)) for key, each in parts)
    return next(filter(None, found), "")


def _has_nan(tensor: torch.Tensor) -> bool:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype in _SMALL_FLOATS:
        tensor = tensor.half()
    # The minimum is nan if any value is nan. Infinity passes: it may be intended, as in a mask.
    return tensor.dtype in _FLOATS and bool(tensor.numel()) and bool(tensor.min().isnan())
