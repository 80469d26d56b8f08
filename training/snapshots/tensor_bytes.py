"""Stream the tensors of a state as one row of bytes between processes, without a copy of all of them."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nodekit.training.snapshots.hostcopy import map_tensors


@dataclass(frozen=True)
class Place:
    """A placeholder for a tensor in a state that is sent without its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this dtype and shape on the CPU."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")


def without_tensors(state: Any) -> Any:
    """Return the state with a `Place` for each of its dense tensors; others, such as sparse ones, stay."""
    return map_tensors(lambda each: Place(each.dtype, tuple(each.shape)) if _is_dense(each) else each, state)


def tensors_of(state: Any) -> list[torch.Tensor]:
    """Return the dense tensors of a state, in the order in which `with_tensors` takes them."""
    found: list[torch.Tensor] = []
    map_tensors(lambda each: found.append(each) if _is_dense(each) else None, state)
    return found


def places_in(rest: Any) -> list[Place]:
    """Return the places in a result of `without_tensors`, in the order of the tensors."""
    found: list[Place] = []
    _in_places(rest, lambda place: found.append(place))
    return found


def with_tensors(rest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a result of `without_tensors` with these tensors in its places."""
    following = iter(tensors)
    return _in_places(rest, lambda _: next(following))


def _in_places(rest: Any, value: Callable[[Place], Any]) -> Any:
    return map_tensors(
        lambda tensor: tensor, rest, other=lambda leaf: value(leaf) if isinstance(leaf, Place) else leaf
    )


class TensorBytes:
    """Reads or writes the bytes of tensors, one after the other, and hashes them on the way."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors` must be dense; to `write`, they must also be contiguous and on the CPU."""
        self._parts = [_bytes_of(each) for each in tensors]
        self._hash = hashlib.sha256()
        self._done = 0

    @property
    def sha256(self) -> str:
        """The SHA-256, in hex, of the bytes read or written so far."""
        return self._hash.hexdigest()

    def read(self, into: torch.Tensor) -> None:
        """Fill a 1-D tensor of uint8 with the next bytes of the tensors."""
        torch.cat([*self._next(len(into))], out=into)
        self._hash.update(into.numpy().data)

    def write(self, data: memoryview) -> None:
        """Write the next bytes into the tensors."""
        self._hash.update(data)
        given = torch.frombuffer(data, dtype=torch.uint8)
        for part in self._next(len(given)):
            part.copy_(given[: len(part)])
            given = given[len(part) :]

    def _next(self, size: int) -> Iterator[torch.Tensor]:
        """Yield views of the next ``size`` bytes, and advance."""
        start, self._done = self._done, self._done + size
        for part in self._parts:
            if start < len(part) and size:
                view = part[start : start + size]
                yield view
                size -= len(view)
            start = max(0, start - len(part))


def _is_dense(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.layout == torch.strided and not tensor.is_quantized


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return own.reshape(-1).view(torch.uint8)
