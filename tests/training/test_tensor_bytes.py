"""A state's tensors go as bytes, whatever they are, and come out as what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nodekit.training.snapshots.tensor_bytes import (
    Place,
    TensorBytes,
    places_in,
    tensors_of,
    with_tensors,
    without_tensors,
)


def sent(state: Any, chunk_bytes: int) -> tuple[Any, bool]:
    """What another process would have of a state, and whether it has the same hash."""
    rest = without_tensors(state)
    received = [place.empty() for place in places_in(rest)]
    size_bytes = sum(place.size_bytes for place in places_in(rest))
    reading, writing = TensorBytes(tensors_of(state)), TensorBytes(received)
    for start in range(0, size_bytes, chunk_bytes):
        part = torch.zeros(min(chunk_bytes, size_bytes - start), dtype=torch.uint8)
        reading.read(part)
        writing.write(part.numpy().data)
    return with_tensors(rest, received), reading.sha256 == writing.sha256


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout) and torch.equal(
            one.to_dense(), other.to_dense()
        )
    if isinstance(one, dict):
        return (type(one), [*one]) == (type(other), [*other]) and all(
            is_same(each, other[key]) for key, each in one.items()
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
def test_every_kind_of_tensor_comes_out_as_it_was(chunk_bytes: int) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3)).state_dict()
    state = {
        "module": module,
        "flags": torch.arange(4) > 1,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "one number": torch.tensor(3.0),
        "transposed": torch.arange(20.0).view(4, 5).t(),
        "half": torch.arange(3).bfloat16(),
        "sparse": torch.eye(3).to_sparse(),
        "nested": [1, (torch.ones(2), "text"), torch.return_types.max((torch.ones(1), torch.zeros(1)))],
    }
    found, is_alike = sent(state, chunk_bytes)
    assert is_alike
    assert is_same(state, found)
    assert found["module"]._metadata == module._metadata  # type: ignore[attr-defined]  # the modules' versions


def test_the_hash_is_of_what_has_come() -> None:
    writing = TensorBytes([torch.zeros(4)])
    writing.write(memoryview(bytearray(8)))
    half = writing.sha256
    writing.write(memoryview(bytearray(b"\1" * 8)))
    assert writing.sha256 not in (half, TensorBytes([]).sha256)


def test_a_place_says_how_many_bytes_are_to_come() -> None:
    assert [Place(torch.bfloat16, (3, 5)).size_bytes, Place(torch.bool, ()).size_bytes] == [30, 1]
