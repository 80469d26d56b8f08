"""A rank says how long it waits, for others and for its data."""

import itertools
import json
import time
from pathlib import Path

import pytest
import torch

from nodekit.training.reporting import waits
from nodekit.training.reporting.waits import Waits


class _WaitsAtTheEnd(torch.autograd.Function):
    """As DistributedDataParallel: when the last gradient is there, it queues what waits for the other ranks."""

    @staticmethod
    def forward(_, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(_, gradient):  # type: ignore[no-untyped-def]
        time.sleep(0.05)  # its own work
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(0.1))
        return gradient


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in which each step is told, and all but the first are measured."""
    monkeypatch.setattr(waits, "_TELL_EVERY_S", 0.0)
    monkeypatch.setattr(waits, "_LONG_S", 0.0)
    return tmp_path / ".waits3"


def test_what_is_waited_at_the_end_of_a_backward_pass_is_told_from_the_pass(told: Path) -> None:
    own = Waits(torch.device("cpu"), told.with_name("rank3"), rank=3)
    own.step()
    assert not told.exists(), "the first step has what is slow only once"
    begin = time.monotonic()
    batches = own.loading(iter(range(2)))
    assert list(batches) == [0, 1]
    loading_s, begin = time.monotonic() - begin, time.monotonic()
    for _ in range(2):
        loss = _WaitsAtTheEnd.apply(torch.ones((), requires_grad=True)) * 2
        with own.backward(loss):
            loss.backward()
    took_s = time.monotonic() - begin
    begin = time.monotonic()
    with own.for_others():
        time.sleep(0.03)
    others_s = time.monotonic() - begin
    own.step()
    found = json.loads(told.read_text())
    assert found["steps"] == 1
    # A busy machine makes each of these longer, but nothing is counted that is another's.
    assert 0.2 + 0.03 <= found["waited_s"] <= took_s - 0.1 + others_s + 0.001
    assert found["waited_s"] < found["seconds"]
    assert found["loading_s"] <= loading_s + 0.001


def test_the_time_until_a_batch_comes_is_told(told: Path) -> None:
    own = Waits(torch.device("cpu"), told.with_name("rank3"), rank=3)
    own.step()

    def slow() -> object:
        for number in range(3):
            time.sleep(0.02)
            yield number

    for _ in own.loading(slow()):
        pass
    own.step()
    assert json.loads(told.read_text())["loading_s"] >= 0.06


def test_one_in_four_short_steps_is_measured_the_same_on_all_ranks(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_LONG_S", 60.0)
    ranks = [Waits(torch.device("cpu"), told.with_name("rank3"), rank=rank) for rank in range(3)]
    measured = []
    for step in range(400):
        for rank in ranks:
            rank.step()
        assert len({rank.is_measured for rank in ranks}) == 1
        if ranks[0].is_measured and step:  # the second of all is measured in any case
            measured.append(step)
    apart = {after - before for before, after in itertools.pairwise(measured)}
    assert apart == set(range(1, 8)), "in no rhythm, which that of a loader's workers might be"
    assert 80 <= len(measured) <= 120


def test_what_is_not_measured_leaves_no_hook_and_counts_nowhere(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "_LONG_S", 60.0)
    own = Waits(torch.device("cpu"), told.with_name("rank3"), rank=3)
    num_measured = 0
    for _ in range(30):
        own.step()
        num_measured += own.is_measured
        assert list(own.loading(iter(range(2)))) == [0, 1]
        loss = torch.ones((), requires_grad=True) * 2
        with own.backward(loss):
            loss.backward()  # type: ignore[no-untyped-call]
        assert bool(loss._backward_hooks) == own.is_measured
        with own.for_others():
            time.sleep(0 if own.is_measured else 0.02)
    own.step()
    found = json.loads(told.read_text())
    assert found["steps"] == num_measured < 15
    # Of the others there are 16 at least; a busy machine makes those that are measured longer.
    assert found["waited_s"] < 0.3 <= 16 * 0.02


def test_a_disk_that_is_full_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_TELL_EVERY_S", 0.0)
    own = Waits(torch.device("cpu"), tmp_path / "no" / "rank0", rank=0)
    for _ in range(3):
        own.step()
    Waits(torch.device("cpu"), None, rank=0).step()


class _Event:
    """A CUDA event that counts the milliseconds of a clock of ours, and knows nothing else."""

    clock_ms = 0.0
    is_done = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = _Event.clock_ms

    def query(self) -> bool:
        return _Event.is_done

    def elapsed_time(self, other: "_Event") -> float:
        assert _Event.is_done, "CUDA raises where the event has not come"
        return other.at - self.at


def test_on_a_gpu_the_waiting_of_its_stream_is_measured_and_never_waited_for(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    own = Waits(torch.device("cuda", 0), told.with_name("rank3"), rank=3)
    own.step()
    loss = torch.ones((), requires_grad=True) * 2

    def backward() -> None:
        loss.backward()
        _Event.clock_ms += 250.0  # the stream waits for the gradients of others

    with own.backward(loss):
        backward()
    with own.for_others():  # which is also its own work
        time.sleep(0.03)
    own.step()
    assert json.loads(told.read_text())["waited_s"] == 0.0
    _Event.is_done = True
    own.step()
    assert json.loads(told.read_text())["waited_s"] == 0.25
