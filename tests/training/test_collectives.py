"""What every rank says, or one of them, reaches every rank, however long it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nodekit.training.group.collectives import (
    NOT_SENT,
    broadcast_from_first,
    broadcast_object,
    gather_objects,
    sent_buffers,
)


def gathered(values: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """For each rank, what it has of all, and by how many collectives."""
    barrier = threading.Barrier(len(values), timeout=20)
    given: list[torch.Tensor] = [torch.empty(0)] * len(values)
    found: list[tuple[list[Any], int]] = [([], 0)] * len(values)

    def rank(number: int) -> None:
        count = 0

        def gather(own: torch.Tensor) -> list[torch.Tensor]:
            nonlocal count
            count += 1
            given[number] = own
            barrier.wait()
            assert len({(each.dtype, each.shape) for each in given}) == 1, "a collective takes equal ones"
            all_of_them = [each.clone() for each in given]
            barrier.wait()
            return all_of_them

        found[number] = (gather_objects(values[number], gather), count)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(values))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


@pytest.mark.parametrize("length", [0, 900, 1000, 1005, 1010, 1011, 1012, 1016, 1020, 1024, 5000])
def test_short_and_long_words_come_whole_side_by_side(length: int) -> None:
    values = [{"said": "a" * length}, None, ["b" * 10]]
    for found, _ in gathered(values):
        assert found == values


def test_short_ones_take_one_collective_and_a_long_one_has_all_make_another() -> None:
    assert [count for _, count in gathered(["a", "b" * 500, None])] == [1, 1, 1]
    assert [count for _, count in gathered(["a", "b" * 5000, None])] == [2, 2, 2]


@pytest.mark.parametrize("length", [0, 65000, 65500, 65510, 65520, 65528, 65536, 200_000])
def test_what_one_says_comes_whole_by_one_collective_or_two(length: int) -> None:
    value = {"state": "s" * length, "step": 7}
    sent: list[torch.Tensor] = []

    def sends(own: torch.Tensor) -> torch.Tensor:
        sent.append(own.clone())
        return own

    assert broadcast_object(value, sends, is_source=True) == value
    assert len(sent) == (1 if length < 65000 + 400 else 2)
    left = list(sent)

    def receives(own: torch.Tensor) -> torch.Tensor:
        of_source = left.pop(0)
        assert (own.dtype, own.shape) == (of_source.dtype, of_source.shape), "a collective takes equal ones"
        return of_source

    assert broadcast_object("not asked for", receives, is_source=False) == value
    assert not left


def test_the_buffers_that_are_sent_are_those_that_the_module_has_by_now() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.ReLU())
    setattr(module, NOT_SENT, ["0.num_batches_tracked", "1.own"])
    before = sent_buffers(module)
    module[0].running_mean = module[0].running_mean + 1  # as a forward pass may do
    module[1].register_buffer("late", torch.ones(3))
    module[1].register_buffer("own", torch.ones(4))
    assert [each.tolist() for each in before] == [[0, 0], [1, 1]]
    assert [each.tolist() for each in sent_buffers(module)] == [[1, 1], [1, 1], [1, 1, 1]]


OF_ALL_TYPES = {
    "int16": torch.tensor([-3, 7], dtype=torch.int16),
    "uint32": torch.tensor([3, 7], dtype=torch.uint32),
    "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex, conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "empty": torch.zeros(0, dtype=torch.int16),
    "of no dimension": torch.tensor(5, dtype=torch.int16),
}


@pytest.mark.parametrize("rank_0s", OF_ALL_TYPES.values(), ids=OF_ALL_TYPES)
def test_buffers_of_any_type_are_sent(rank_0s: torch.Tensor) -> None:
    """NCCL and gloo take some types only: a model with such a buffer would end at its first evaluation."""
    before = rank_0s.clone()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        broadcast_from_first([rank_0s], torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert rank_0s.dtype == before.dtype
    assert rank_0s.tolist() == before.tolist()
