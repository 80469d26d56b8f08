"""A rank says how long it waits, for others and for its data."""

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
    monkeypatch.setattr(waits, "_TELL_EVERY_S", 0.0)
    return tmp_path / ".waits3"


@pytest.mark.parametrize(
    "is_known", [False, True], ids=["by a hook on the loss", "by a parameter that is known"]
)
def test_what_is_waited_at_the_end_of_a_backward_pass_is_told_from_the_pass(
    told: Path, is_known: bool
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    known = parameter if is_known else None
    own = Waits(torch.device("cpu"), told.with_name("rank3"), rank=3, always_trained=known)
    own.step()
    assert not told.exists(), "the first step has what is slow only once"
    begin = time.monotonic()
    for _ in range(2):
        loss = _WaitsAtTheEnd.apply(torch.ones((), requires_grad=True)) * 2
        with own.backward(loss):
            torch.autograd.backward([loss, parameter], [None, torch.ones(1)])
    took_s = time.monotonic() - begin
    begin = time.monotonic()
    with own.for_others():
        time.sleep(0.03)
    others_s, begin = time.monotonic() - begin, time.monotonic()
    batches = own.loading(iter(range(2)))
    assert list(batches) == [0, 1]
    loading_s = time.monotonic() - begin
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
