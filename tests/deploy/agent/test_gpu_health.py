"""GPUs that are watched while ranks train: what is told of them, and which faults a rank's failure is put down to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agents import until
from fake_nvml import FakeNvml

from nodekit.deploy.agent.telemetry import gpu_health
from nodekit.deploy.agent.telemetry.gpu_health import GpuHealth
from nodekit.deploy.host.probes.gpu import gpu_watch
from nodekit.deploy.host.probes.gpu.gpu_watch import Lost, Nvml
from nodekit.deploy.host.probes.kernel import Log
from nodekit.deploy.host.schema import WorkerFailure

Health = Callable[..., GpuHealth]
OFF = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def told() -> list[dict[str, Any]]:
    """The events."""
    return []


@pytest.fixture
def health(told: list[dict[str, Any]]) -> Iterator[Health]:
    started: list[GpuHealth] = []

    def start(*gpus: int) -> GpuHealth:
        started.append(GpuHealth(gpus, lambda kind, **fields: told.append({"kind": kind, **fields})))
        return started[-1]

    yield start
    for each in started:
        each.close()


def failure(error: str, *kernel: str) -> WorkerFailure:
    return {
        "attempt": "0.0", "rank": 3, "local_rank": 1, "world_size": 4, "exitcode": 1, "when": 0.0, "log": "",
        "error": error, "kernel": list(kernel),
    }  # fmt: skip


def test_a_gpu_says_how_it_is_and_why_its_clock_is_low(fake_nvml: FakeNvml) -> None:
    nvml = Nvml.load()
    assert nvml is not None
    assert [nvml.find(index) for index in (0, 1, 2)] == [True, True, False]
    assert (nvml.bus(0), nvml.bus(1)) == ("0000:3a:00", "0000:3b:00")
    assert nvml.sample(0) == {
        "index": 0, "use": 0.87, "memory": 40 << 30, "memory_total": 80 << 30, "temperature": 61, "clock": 1755,
        "clock_max": 1980, "slow": [], "power": 512, "power_limit": 700, "uncorrectable": 0,
    }  # fmt: skip
    fake_nvml.gpu(1, use=None, ecc=None, slow=0x44, temperature=92)
    found = nvml.sample(1)
    assert (found["use"], found["slow"], found["temperature"]) == (
        None,
        ["sw_power_cap", "hw_thermal_slowdown"],
        92,
    )
    assert "uncorrectable" not in found
    assert nvml.usable == [0, 1]
    fake_nvml.gpu(1, lost=1)
    with pytest.raises(Lost):
        nvml.sample(1)


def test_a_gpu_that_is_not_ours_to_ask_is_not_taken_for_missing(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(1, forbidden=1)
    nvml = Nvml.load()
    assert nvml is not None
    look = next(gpu_watch.looks(nvml, [0, 1], Log("/nonexistent")))
    assert ([each["index"] for each in look["gpus"]], look["missing"], look["lost"]) == ([0], [], [])


def test_a_look_tells_of_our_gpus_alone(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "INTERVAL_S", 0.02)
    nvml = Nvml.load()
    assert nvml is not None
    fake_nvml.kernel_says(OFF)  # of before
    looks = gpu_watch.looks(nvml, [1, 7], Log(str(fake_nvml.log)))
    first = next(looks)
    assert ([each["index"] for each in first["gpus"]], first["xids"]) == ([1], [])
    assert (first["lost"], first["missing"]) == ([], [7])
    fake_nvml.kernel_says(OFF.replace("3b", "3a"))  # another job's
    fake_nvml.kernel_says(OFF.replace("79", "31"))  # what a program does, too
    fake_nvml.kernel_says(OFF)
    fake_nvml.gpu(1, lost=1)
    second = next(looks)
    assert second["xids"] == [(1, 79, OFF.partition("79, ")[2])]
    assert (second["gpus"], second["lost"], next(looks)["lost"]) == ([], [1], [1])


def test_an_xid_that_only_the_driver_tells_of_is_seen(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml.load()
    assert nvml is not None
    looks = gpu_watch.looks(nvml, [0], Log("/nonexistent"))
    next(looks)
    fake_nvml.xid(0, 119)
    # A look that is late does not wait for the driver.
    assert until(lambda: next(looks)["xids"]) == [(0, 119, "")]


def test_a_lost_gpu_is_fatal_and_told_once(
    fake_nvml: FakeNvml, health: Health, told: list[dict[str, Any]]
) -> None:
    own = health(0, 1)
    until(own.usage)
    assert (own.fatal, own.blamed_for([failure("RuntimeError: boom")])) == (None, None)
    fake_nvml.gpu(1, lost=1)
    fault = until(lambda: own.fatal)
    assert str(fault) == "GPU 1: it has fallen off the bus"
    seen = own._num_looks
    until(lambda: own._num_looks > seen + 1)
    assert told == [{"kind": "gpu-error", "gpu": 1, "what": "lost", "text": fault.text, "fatal": True}]
    assert own.blamed_for([failure("RuntimeError: boom")]) == fault


def test_fewer_gpus_than_planned_are_fatal(fake_nvml: FakeNvml, health: Health) -> None:
    assert str(until(lambda: own.fatal) if (own := health(0, 1, 2)) else None) == (
        "GPU 2: it was planned for this node, and the driver does not list it"
    )


def test_without_a_driver_nothing_is_told(monkeypatch: pytest.MonkeyPatch, health: Health) -> None:
    monkeypatch.setenv("NODEKIT_NVML", "/nonexistent.so")
    own = health(0)
    until(lambda: own._is_over)
    assert (own.usage(), own.fatal, own.blamed_for([failure("CUDA error: unspecified launch failure")])) == (
        [],
        None,
        None,
    )


def test_a_driver_that_answers_no_more_holds_nobody_up(
    fake_nvml: FakeNvml, health: Health, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = health(0)
    until(own.usage)
    fake_nvml.gpu(0, block=1)
    monkeypatch.setattr(gpu_health, "STALE_S", 0.0)
    monkeypatch.setattr(gpu_health, "SILENT_S", 0.0)
    monkeypatch.setattr(gpu_health, "LAST_LOOK_S", 0.01)
    until(lambda: own.usage() == [] and told)
    assert [(each["kind"], each["what"], each["fatal"]) for each in told[:1]] == [
        ("gpu-error", "silent", False)
    ]
    assert own.blamed_for([failure("NCCL error")]) is None
    fake_nvml.gpu(0)


class Looks:
    """A `GpuHealth` that is shown what the driver says."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self.health = GpuHealth((), lambda kind, **fields: told.append({"kind": kind, **fields}))
        self.health._gpus = (0,)

    def sees(self, *, xids: Any = (), lost: Any = (), **gpu: Any) -> GpuHealth:
        sample = {"index": 0, "use": 1.0, "memory": 0, "memory_total": 1, **gpu}
        self.health._take({"gpus": [sample], "xids": xids, "lost": lost, "missing": ()})
        return self.health


@pytest.mark.parametrize(
    ("number", "is_fatal", "is_blamed"),
    [*((each, True, True) for each in (62, 79, 95, 119, 120)), *((each, False, True) for each in (48, 63, 64, 74, 94)),
     (92, False, False)],
)  # fmt: skip
def test_an_xid_ends_the_ranks_or_explains_their_end(
    told: list[dict[str, Any]], number: int, is_fatal: bool, is_blamed: bool
) -> None:
    own = Looks(told).sees(xids=[(0, number, "pid=7, said")])
    assert (own.fatal is not None) == is_fatal
    blamed = own.blamed_for([failure("RuntimeError: boom")])
    assert (blamed is not None) == is_blamed
    if blamed is not None:
        assert str(blamed).startswith(f"GPU 0: Xid {number} (")
        assert [(each["number"], each["fatal"]) for each in told] == [(number, is_fatal)]


def test_the_same_xid_from_the_driver_and_the_kernel_is_one(told: list[dict[str, Any]]) -> None:
    looks = Looks(told)
    looks.sees(xids=[(0, 94, "")])
    looks.sees(xids=[(0, 94, "Contained ECC error"), (0, 63, "")])
    assert [each["number"] for each in told] == [94, 63]


def test_an_old_fault_that_ranks_have_survived_explains_nothing(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Looks(told).sees(xids=[(0, 94, "")])
    monkeypatch.setattr(gpu_health, "BEFORE_S", -1.0)
    assert own.recent(-1.0) is None
    assert own.recent(60.0) is not None


def test_ecc_errors_are_news_where_they_grow(told: list[dict[str, Any]]) -> None:
    looks = Looks(told)
    looks.sees(uncorrectable=3)
    assert looks.sees(uncorrectable=3).recent() is None
    assert str(looks.sees(uncorrectable=5).recent()) == "GPU 0: 2 ECC errors could not be corrected"
    assert [each["text"] for each in told] == ["2 ECC errors could not be corrected"]


@pytest.mark.parametrize(
    ("error", "kernel", "blamed"),
    [
        ("RuntimeError: boom", "", ""),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "", ""),
        ("RuntimeError: CUDA error: device-side assert triggered", "", ""),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "", "uncorrectable ECC error"),
        (
            "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
            "",
            "NVLink",
        ),
        ("RuntimeError: CUDA error: unspecified launch failure", OFF, "Xid 79"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", OFF.replace("79", "31"), ""),
    ],
)
def test_what_a_driver_does_not_tell_is_read_in_the_ranks_last_words(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, error: str, kernel: str, blamed: str
) -> None:
    monkeypatch.setattr(gpu_health, "LAST_LOOK_S", 0.0)
    own = Looks(told).sees()
    found = own.blamed_for([failure(error, *filter(None, [kernel]))])
    assert blamed in str(found) if blamed else found is None


def test_for_a_rank_that_was_killed_the_driver_is_not_asked(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log may end with what NCCL has said of an earlier loss, a second ago."""
    own, asked = Looks(told).sees(), []
    monkeypatch.setattr(own, "_wait_for_look", lambda: asked.append(1))
    said = failure("Some NCCL operations have failed or timed out")
    assert own.blamed_for([{**said, "exitcode": -signal.SIGKILL}]) is None
    assert asked == []
    assert own.blamed_for([{**said, "exitcode": -signal.SIGKILL}, said]) is None
    assert asked == [1]


def test_a_clock_that_stays_low_is_told_once_with_its_end(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    looks = Looks(told)
    for seconds, slow in enumerate(
        [[], ["sw_power_cap"], *[["hw_thermal_slowdown"]] * 10, [], ["hw_slowdown"]]
    ):
        now += 1
        looks.sees(slow=slow, temperature=80 + seconds, clock=900, clock_max=1980)
    assert told == [
        {"kind": "gpu-slow", "gpu": 0, "reasons": ["hw_thermal_slowdown"], "temperature": 87, "clock": 900,
         "clock_max": 1980, "power": None},
        {"kind": "gpu-slow", "gpu": 0, "over": True, "seconds": 10.0},
    ]  # fmt: skip
