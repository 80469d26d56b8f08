"""The elastic sampler: every sample once per epoch, and the gradient of the mean over the global batch."""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nodekit.training import ElasticSampler, Micro

worlds = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), min_size=1, max_size=6)


def steps(sampler: ElasticSampler) -> Iterator[list[Micro]]:
    step = []
    for micro in sampler.micro_batches():
        step.append(micro)
        if micro.is_last:
            yield step
            step = []
    assert not step


def counted(step: list[Micro]) -> list[int]:
    return [index for micro in step for index in micro.indices if micro.share]


@given(
    num_samples=st.integers(1, 120),
    batch_size=st.integers(1, 40),
    micro_batch=st.none() | st.integers(1, 9),
    seed=st.integers(0, 3),
    changes=worlds,
)
def test_every_sample_comes_once_per_epoch_whatever_the_world_size_becomes(
    num_samples: int, batch_size: int, micro_batch: int | None, seed: int, changes: list[tuple[int, int]]
) -> None:
    unbroken = ElasticSampler(num_samples, batch_size=batch_size, seed=seed)
    unbroken.next_epoch()
    batches = [sorted(counted(step)) for step in steps(unbroken)]
    assert sorted(chain(*batches)) == list(range(num_samples))
    assert len(batches) == unbroken.steps_per_epoch

    state, seen = unbroken.state_dict(), list[list[int]]()
    for world_size, num_steps in [*changes, (2, num_samples)]:
        ranks = [
            ElasticSampler(
                num_samples, batch_size=batch_size, micro_batch=micro_batch, rank=rank, world_size=world_size
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        assert ranks[0].steps_left == len(batches) - len(seen)
        assert len(ranks[0]) == len([*ranks[0]])
        for _, parts in zip(range(num_steps), zip(*map(steps, ranks), strict=True), strict=False):
            assert len({len(part) for part in parts}) == 1, "ranks differ in their number of forward passes"
            assert sum(micro.share for part in parts for micro in part) == pytest.approx(1)
            assert all(micro.indices for part in parts for micro in part)
            assert all(len(m.indices) <= (micro_batch or batch_size) for part in parts for m in part)
            seen.append(sorted(chain(*map(counted, parts))))
            for rank in ranks:
                rank.advance()
        state = ranks[0].state_dict()
        assert all(rank.state_dict() == state for rank in ranks)
    assert seen == batches


@pytest.mark.parametrize(
    ("num_samples", "world_size", "micro_batch"), [(12, 2, None), (11, 3, 2), (2, 4, None), (5, 2, 1)]
)
def test_the_ranks_weighted_gradients_average_to_that_of_the_whole_batch(
    num_samples: int, world_size: int, micro_batch: int | None
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(num_samples, 3, dtype=torch.float64)
    whole = torch.nn.Linear(3, 1, dtype=torch.float64)
    whole(inputs).square().mean().backward()
    split = torch.nn.Linear(3, 1, dtype=torch.float64)
    split.load_state_dict(whole.state_dict())
    for rank in range(world_size):
        sampler = ElasticSampler(
            num_samples, batch_size=64, micro_batch=micro_batch, rank=rank, world_size=world_size
        )
        for micro in sampler.micro_batches():
            (split(inputs[micro.indices]).square().mean() * micro.weight / world_size).backward()
    torch.testing.assert_close(split.weight.grad, whole.weight.grad)


def test_order_depends_on_epoch_and_seed_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ElasticSampler(50, batch_size=50, seed=seed)
        for _ in range(epoch):
            sampler.next_epoch()
        return next(iter(sampler))

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4
    assert order(1, 0) == orders[2]


def test_a_loader_that_runs_ahead_is_not_disturbed_by_advance() -> None:
    sampler = ElasticSampler(10, batch_size=4)
    ahead = iter(sampler)
    sampler.advance()
    assert len(list(ahead)) == 3
    assert len(list(sampler)) == 2


def test_another_number_of_samples_is_refused_with_both_numbers() -> None:
    state = ElasticSampler(10, batch_size=4).state_dict()
    with pytest.raises(ValueError, match="10 training samples, now there are 11"):
        ElasticSampler(11, batch_size=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2, of a world of 2"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticSampler(**{"num_samples": 5, "batch_size": 2, **changed})
