"""Devices other than CUDA's, in imitation: what kit asks of torch's module for them, and where it does without."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_runs import losses
from torch.overrides import TorchFunctionMode

from nodekit.deploy.host.probes.gpu.accelerators import ACCELERATORS
from nodekit.training import World, rank
from nodekit.training.engine_info import ENGINES, EngineError
from nodekit.training.engines.load import check_engine
from nodekit.training.group import collectives
from nodekit.training.options.arguments import parse
from nodekit.training.process import devices, rng
from nodekit.training.process.stop import Stop
from nodekit.training.snapshots.hostcopy import Gathered, HostCopy
from nodekit.training.tasks.digits import Digits

XPU = torch.device("xpu", 0)


class Event:
    """Of torch.xpu, which wants the device's own work to be timed."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.is_recorded
        assert end.is_recorded
        return 3.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two devices of Intel's, whose module has what is here and no more; returns what was asked of it."""
    told: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: told.append("synchronized"))
    xpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda device: told.append(("set", device)),
        manual_seed=lambda _: told.append("seeded"),
        manual_seed_all=lambda _: told.append("all seeded"),
        current_stream=lambda device: {XPU: stream}[device],
        max_memory_allocated=lambda number: 100 + number,
        Event=Event,
    )
    modules = {"xpu": xpu, "cpu": torch.cpu}
    for name, module in list(sys.modules.items()):
        if name.startswith("nodekit.training") and hasattr(module, "module_of"):
            monkeypatch.setattr(module, "module_of", modules.__getitem__)
        if name.startswith("nodekit.training") and hasattr(module, "kind_here"):
            monkeypatch.setattr(module, "kind_here", lambda: "xpu")
    available = dist.is_backend_available
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "xccl" or available(name))
    return told


class OnCpu(TorchFunctionMode):
    """Has the tensors of an imitated device on the CPU; those of any other are refused."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def there(value: Any) -> Any:
            if not isinstance(value, torch.device) or value.type == "cpu":
                return value
            assert value == XPU
            return torch.device("cpu")

        return func(*map(there, args), **{name: there(value) for name, value in (kwargs or {}).items()})


def test_the_devices_are_those_that_are_counted_on_hosts() -> None:
    kinds = {"cuda": "cuda", "hip": "cuda", "xpu": "xpu", "npu": "npu", "cpu": "cpu"}
    rows = ACCELERATORS.values()
    assert {kinds[row.torch_build]: row.backend for row in rows} == devices.BACKENDS
    assert {kinds[row.torch_build] for row in rows if not row.is_proven} - {"cuda"} == set(devices.UNPROVEN)


def test_a_rank_takes_its_device_and_the_backend_of_its_kind(asked: list[Any]) -> None:
    environ = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODEKIT_NUM_GPUS": "2",
    }  # fmt: skip
    world = World.from_env(environ)
    assert (world.device, world.backend) == (torch.device("xpu", 1), "xccl")
    with pytest.raises(ValueError, match="local rank 2 has no GPU: 2 visible"):
        World.from_env({**environ, "LOCAL_RANK": "2"})
    for backend in ("gloo", "nccl"):
        with pytest.raises(ValueError, match="the tensors are on xpu, and only xccl sends these"):
            World.from_env(environ, backend=backend)
    assert not asked, "before it has met the others"


def test_without_its_backend_a_kind_is_refused(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(ValueError, match=r"--backend auto: .* a torch with xccl"):
        World.from_env({})


@pytest.mark.parametrize("engine", ENGINES)
def test_there_are_torchs_own_engines_alone(engine: str) -> None:
    options = parse(["--engine", engine], {})
    if engine in ("ddp", "fsdp", "single"):
        check_engine(options, "xpu")
    else:
        with pytest.raises(EngineError, match=f"--engine {engine}"):
            check_engine(options, "npu")


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on an imitated device."""

    device = XPU  # type: ignore[assignment]


def test_a_copy_to_host_memory_is_waited_for_and_not_pinned(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace())  # which is not asked
    own, part = torch.randn(5).as_subclass(Elsewhere), torch.randn(3)
    state = {"own": own, "part": Gathered(part.shape, part.dtype, XPU, lambda: part.as_subclass(Elsewhere))}
    copies = HostCopy()
    copies.prepare(state)
    copied = copies.take(state)
    assert asked == ["synchronized"]
    assert torch.equal(copied["own"], own.as_subclass(torch.Tensor))
    assert torch.equal(copied["part"], part)


def test_what_is_summed_is_in_a_type_that_all_of_these_devices_have() -> None:
    with OnCpu():
        assert collectives.numbers_on(XPU, [1.0, 2.0]).dtype == torch.float32
        assert collectives.numbers_on(torch.device("cpu"), [1.0]).dtype == torch.float64


class Few(Digits):
    def train_data(self) -> Any:
        data = super().train_data()
        return type(data)(data.images[:192], data.labels[:192])


def test_a_training_asks_nothing_else_and_has_the_curve_of_the_cpu(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = dist.init_process_group

    def joined(backend: str, *args: Any, device_id: None, **kwargs: Any) -> None:
        asked.append(backend)
        join("gloo", *args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", joined)
    how = ["--epochs", "2", "--batch-size", "32", "--snapshot-every", "4", "--clip", "0.5"]

    def train(folder: Path, *more: str) -> None:
        with World.from_env({}) as world, Stop(20) as stop, OnCpu():
            assert rank._run_loops([], parse([*how, *more], {}), world, Few(), folder, stop)

    train(tmp_path / "xpu", "--epochs", "1")
    train(tmp_path / "xpu")
    assert asked[:2] == [("set", XPU), "xccl"]
    assert (asked.count("seeded"), asked.count("all seeded")) == (12, 4)
    result = json.loads((tmp_path / "xpu" / "result.json").read_text())
    assert (result["resumed_at_step"], result["peak_memory_bytes"]) == (6, 101)
    asked.clear()
    for module in (devices, rng):
        monkeypatch.setattr(module, "kind_here", lambda: "cpu")
    train(tmp_path / "cpu", "--epochs", "1")
    train(tmp_path / "cpu")
    assert asked == ["gloo", "gloo"]
    assert len(losses(tmp_path / "cpu")) == 12
    assert losses(tmp_path / "xpu") == pytest.approx(losses(tmp_path / "cpu"), abs=1e-6)
