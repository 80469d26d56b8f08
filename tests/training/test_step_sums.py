"""The sums of a step are on their way while the GPU works, and all ranks read the same ones at the same step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nodekit.training import World
from nodekit.training.engines.gradient_sums import GradientSums
from nodekit.training.errors import TrainingError
from nodekit.training.group import collectives, nccl
from nodekit.training.steps import step_sums
from nodekit.training.steps.step_sums import Step, StepSums

GPU = torch.device("cuda", 0)


class Values:
    """A tensor on a GPU: it can be summed and copied, and everything that waits for it fails."""

    device, dtype, shape = GPU, torch.float64, torch.Size([2])

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def record_stream(self, stream: Any) -> None:
        self._calls.append(f"kept for {stream.name}")


class Build:
    """A build of torch for CUDA and NCCL, as far as sums need it; every call is recorded."""

    float64 = torch.float64

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = "training's"
        self.cuda = SimpleNamespace(
            Stream=self.new_stream,
            Event=lambda: self,
            current_stream=lambda _: "training's",
            stream=self.using,
        )

    def empty(self, shape: torch.Size, *, dtype: torch.dtype, device: str, pin_memory: bool) -> Any:
        assert (device, pin_memory) == ("cpu", True)
        return SimpleNamespace(copy_=self.copy, tolist=lambda: [5.0, 7.0])

    def tensor(self, numbers: list[float], *, dtype: torch.dtype, device: str) -> Any:
        assert device == "cpu"
        # Only from pinned memory is it sent: a copy from other memory waits for all work on the GPU.
        return SimpleNamespace(pin_memory=lambda: SimpleNamespace(to=self.send))

    def send(self, device: torch.device, *, non_blocking: bool) -> Values:
        assert non_blocking
        return Values(self.calls)

    def new_stream(self, device: torch.device) -> Any:
        def waits(other: str) -> None:
            self.calls.append(f"copying waits for {other}")

        return SimpleNamespace(name="copying", wait_stream=waits)

    @contextmanager
    def using(self, _: Any) -> Any:
        self.stream = "copying"
        yield
        self.stream = "training's"

    def copy(self, source: Values, *, non_blocking: bool) -> None:
        assert non_blocking
        self.calls.append(f"copied on {self.stream}")

    def record(self) -> None:
        self.calls.append(f"recorded on {self.stream}")

    def synchronize(self) -> None:
        self.calls.append("this process waits")

    def all_reduce(self, values: Values, *, async_op: bool) -> Any:
        assert async_op
        self.calls.append("summed")
        return SimpleNamespace(wait=lambda: self.calls.append(f"{self.stream} waits for the sum"))

    def get_backend(self) -> str:
        return "nccl"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    made = Build()
    monkeypatch.setattr(collectives, "torch", made)
    monkeypatch.setattr(collectives, "dist", made)
    collectives._copying_stream.cache_clear()
    return made


def test_a_sum_on_a_gpu_makes_nobody_wait_until_it_is_read(build: Build) -> None:
    read = collectives.start_sum(collectives.numbers_on(GPU, [1.0, 2.0]), 2)  # type: ignore[arg-type]
    assert build.calls == [
        "summed",
        "copying waits for training's",
        "copying waits for the sum",
        "copied on copying",
        "recorded on copying",
        "kept for copying",  # else their memory would be the backward pass's by now
    ]
    assert read() == [5.0, 7.0]
    assert build.calls[6:] == ["this process waits"]


@pytest.mark.parametrize(
    ("device", "how", "step_s", "may_be_late", "is_late"),
    [
        ("cuda", "", 0.2, True, True),
        ("cuda", "", 0.2, False, False),
        ("cuda", "", 3.0, True, False),  # a stop would take three seconds more
        ("cuda", "keeps steps", 0.2, True, False),  # no step would ever be whole, and none be kept
        ("cuda", "keeps steps, guarded", 0.2, True, True),
        ("cpu", "keeps steps", 0.2, True, False),
    ],
)
def test_sums_are_read_a_step_later_where_a_gpu_makes_short_steps(
    device: str,
    how: str,
    step_s: float,
    may_be_late: bool,
    is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(step_sums.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        step_sums, "numbers_on", lambda _, numbers: torch.tensor(numbers, dtype=torch.float64)
    )
    world: Any = SimpleNamespace(
        device=torch.device(device),
        keeps_steps="keeps" in how,
        world_size=2,
    )
    monkeypatch.setattr(step_sums, "start_sum", lambda values, _: lambda: (2 * values).tolist())
    sums = StepSums(world, may_be_late=may_be_late, is_guarded="guarded" in how)
    seen = []
    for number in range(1, 5):
        sums.add(Step(number, torch.tensor(float(number), dtype=torch.float64), lr=0.1, num_samples=4))
        sums.start([number * 10.0])
        seen.append(sums.is_late)
        for steps, numbers in sums.read(but=int(sums.is_late)):
            assert numbers == [steps[0][0].step * 20.0]
            assert [loss for _, loss in steps] == [2.0 * step.step for step, _ in steps]
        assert len(sums) == int(seen[-1])
        now[0] += step_s
    assert seen == [False, False, is_late, is_late], "the first step's time is not known"
    assert [step.step for steps, _ in sums.read() for step, _ in steps] == [4] * is_late


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_number_is_summed_on_a_gpu_whatever_its_shape(shape: tuple[int, ...]) -> None:
    """As on the CPU. Another of torch's devices without values stands in for the GPU."""
    world: Any = SimpleNamespace(device=torch.device("meta"), keeps_steps=False, may_stay=False, world_size=1)
    sums = StepSums(world, may_be_late=True)
    for loss in (torch.zeros(shape, device="meta"), torch.zeros(shape)):
        sums.add(Step(1, step_sums.part_of_loss(loss, 0.5, world.device), lr=0.1, num_samples=4))
    sums.start([0.0, 1.0])
    assert len(sums) == 1


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepSums]:
    """Of which this one works ahead, with the sums of three steps on their way."""
    nccl.prepare(aborts=False)
    monkeypatch.setattr(step_sums, "start_sum", lambda values, _: lambda: (2 * values).tolist())
    world: Any = SimpleNamespace(device=torch.device("cpu"), keeps_steps=True, world_size=2)
    sums = StepSums(world, may_be_late=True, is_guarded=True)
    for number in range(1, 4):
        sums.add(Step(number, torch.tensor(float(number), dtype=torch.float64), lr=0.1, num_samples=4))
        sums.start([])
    yield sums
    nccl.prepare(aborts=False)


def test_the_losses_of_steps_that_are_kept_are_told_though_their_reading_was_cut_off(
    two_ranks: StepSums,
) -> None:
    nccl.leave()
    with pytest.raises(nccl.LostRank):
        next(two_ranks.read(but=1))
    assert [(step.step, loss) for step, loss in two_ranks.losses_until(2)] == [(1, 2.0), (2, 4.0)]


def test_sums_that_had_arrived_before_the_loss_count(two_ranks: StepSums) -> None:
    assert len([*two_ranks.read(but=1)]) == 2
    two_ranks.settle()
    nccl.leave()
    assert [steps[0][1] for steps, _ in two_ranks.read()] == [6.0]


def test_a_broadcast_is_of_what_nccl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(tensor: torch.Tensor, *, src: int) -> None:
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"
        assert src == 0
        assert tensor.dtype == torch.uint8
        tensor.view(torch.float32).fill_(9)

    monkeypatch.setattr(collectives.dist, "broadcast", broadcast)
    plain, turned = torch.nn.Parameter(torch.zeros(3)), torch.zeros(4, 3).t()
    collectives.broadcast_from_first([plain, turned], torch.device("cpu"))
    assert plain.eq(9).all()
    assert turned.eq(9).all()


def test_a_broadcast_of_buffers_leaves_a_graph_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GAN's generator is trained through it after the discriminator's update."""
    monkeypatch.setattr(collectives.dist, "broadcast", lambda *_, **__: None)
    generator = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    made = generator(torch.randn(4, 2)).sum()
    collectives.broadcast_from_first(generator.buffers(), torch.device("cpu"))
    made.backward()


def test_a_world_of_one_sums_at_once() -> None:
    with World.from_env({}) as world:
        assert world.start_sum(torch.tensor([2.0, 3.0]))() == [2.0, 3.0]


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2), (3, 9)])
def test_numbers_that_go_with_gradients_are_not_taken_for_sums_where_nobody_has_averaged(
    rank: int, num_ranks: int
) -> None:
    module = torch.nn.Linear(2, 1)
    sums = GradientSums(module, rank, num_ranks)
    sums.backward(module(torch.ones(2)).sum())  # nothing goes with this one
    read = sums.start([2.0, math.inf, 257.0])
    sums.backward(module(torch.ones(2)).sum())
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    if num_ranks == 1:
        assert read() == [2.0, math.inf, 257.0]
        return
    with pytest.raises(
        TrainingError, match=r"has averaged no gradients over the ranks: let the task's loss call the"
    ):
        read()
    module.bias.grad = None
    with pytest.raises(
        TrainingError, match=r"bias had no part in the loss of this step: .* or give --find-unused"
    ):
        read()


def test_numbers_that_go_with_gradients_are_exact_whatever_type_a_task_makes_the_default() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = torch.nn.Linear(2, 1)
        sums = GradientSums(module, 0, 1)
        read = sums.start([257.0])
        sums.backward(module(torch.ones(2)).sum())
        assert read() == [257.0]
    finally:
        torch.set_default_dtype(before)
