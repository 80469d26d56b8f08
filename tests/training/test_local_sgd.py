"""Ranks that make steps apart: what they make of it together, and going on from a snapshot."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python
from engine_runs import killed_once, losses, task, train
from torch import nn

from nodekit.training import World
from nodekit.training.group import collectives
from nodekit.training.loop import Loop
from nodekit.training.options.arguments import parse
from nodekit.training.options.options import Options
from nodekit.training.process.stop import Stop
from nodekit.training.steps import local_sgd
from nodekit.training.steps.local_sgd import LocalSgd
from nodekit.training.tasks.digits import Digits

PLAIN_SGD = """
import torch
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr)
"""
# Each rank clips its own gradients: here none are, so that the sum of both ranks' steps is ddp's.
NOT_CLIPPED = ["--clip", "1000", "--lr", "0.1"]


def weights(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["weights_sha256"])


@pytest.mark.slow
def test_to_meet_after_each_step_of_sgd_is_ddp(tmp_path: Path) -> None:
    common = [*task(tmp_path, PLAIN_SGD), *NOT_CLIPPED, "--epochs", "1", "--batch-size", "50"]
    train(tmp_path / "ddp", *common, num_ranks=3)  # 17, 17 and 16 samples
    train(tmp_path / "apart", *common, "--local-sgd", "1", num_ranks=3)
    assert losses(tmp_path / "apart") == pytest.approx(losses(tmp_path / "ddp"), abs=1e-5)


@pytest.mark.slow
def test_steps_apart_are_steps_apart_and_engines_agree(tmp_path: Path) -> None:
    common = ["--epochs", "1"]
    train(tmp_path / "ddp", *common)
    train(tmp_path / "apart", *common, "--local-sgd", "5")
    train(tmp_path / "trainer", *common, "--local-sgd", "5", "--engine", "trainer")
    # DiLoCo's whole way to the mean, and no momentum: the mean.
    train(
        tmp_path / "diloco", *common, "--diloco", "5", "--outer-lr", "1", "--outer-momentum", "0",
    )  # fmt: skip
    apart = losses(tmp_path / "apart")
    assert max(abs(loss - apart[step]) for step, loss in losses(tmp_path / "ddp").items()) > 1e-3
    for other in ("trainer", "diloco"):
        assert losses(tmp_path / other) == pytest.approx(apart, abs=1e-5)


SLOW_DATA = """
import time
from nodekit.training.tasks.digits import Digits, Pixels
class Slow(Pixels):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)
class Task(Digits):
    def train_data(self):
        data = super().train_data()
        return Slow(data.images, data.labels)
"""


@pytest.mark.slow
def test_what_a_rank_waits_for_in_steps_apart_is_compared_with_the_time_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its data would be said to be what the others wait for."""
    monkeypatch.setenv("NODEKIT_PROGRESS_FILE", str(tmp_path / "rank0"))
    train(tmp_path / "out", *task(tmp_path, SLOW_DATA), "--epochs", "1", "--local-sgd", "5", num_ranks=1)
    found = json.loads((tmp_path / ".waits0").read_text())
    assert 0.05 * found["steps"] <= found["loading_s"] <= found["seconds"]


@pytest.mark.slow
def test_a_rank_is_lost_between_two_meetings(tmp_path: Path) -> None:
    # Due at 10, 20, 30 …, taken at the next meeting: 12, 20, 32 …
    common = ["--epochs", "2", "--diloco", "4", "--snapshot-every", "10"]
    said = train(
        tmp_path / "broken", *common, *killed_once(tmp_path, step=35), launcher=["--max-restarts", "1"]
    )
    assert "resumed at step 32 " in said, "what was due at 30 was taken when the ranks met"
    train(tmp_path / "whole", *common)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


@pytest.mark.parametrize("when", ["a stop", "an evaluation"])
def test_between_two_meetings_the_mean_is_taken_for_a_stop_and_an_evaluation(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot, and the best weights, would be those of one rank."""
    averaged: list[int] = []

    class Watched(Digits):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if when == "a stop" and loop.step == 2:
                stop.request()
            return super().loss(model, batch)

    monkeypatch.setattr(LocalSgd, "average", lambda _: averaged.append(loop.step))
    # After each step they say whether one is to stop, or only where there is another reason to meet.
    monkeypatch.setattr(local_sgd, "_SYNC_EVERY_S", 0.0 if when == "a stop" else 1e9)
    how = ["--output", str(tmp_path), "--epochs", "1", "--batch-size", "256", "--local-sgd", "1000"]
    more = ["--eval-every", "3"] if when == "an evaluation" else []
    with World.from_env({}) as world, Stop(60.0) as stop:
        loop = Loop(parse([*how, *more]), world, Watched(), tmp_path, stop)
        loop.run()
        assert averaged[0] == 3


BRANCHES = """
import torch
from nodekit.training import World
from nodekit.training.options.options import Options
from nodekit.training.steps.local_sgd import LocalSgd

def momentum(parameters):
    return torch.optim.SGD(parameters, momentum=0.9)

BY_RANK = ["a", "b", "b"], ["wide", "b", "a", "only"], ["b", "a"]  # which branch each step takes
with World.from_env() as world:
    for make in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.Rprop, momentum):
        torch.manual_seed(world.rank)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("a", "b", "only", "never")})
        model["wide"] = torch.nn.Linear(4, 9)
        names = {parameter: name for name, parameter in model.named_parameters()}
        optimizer = make(model.parameters())
        for branch in BY_RANK[world.rank]:
            model[branch](torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def state():
            return {names[each]: {key: value.clone() for key, value in values.items()}
                    for each, values in optimizer.state.items() if values}

        before = world.gather(state())
        LocalSgd(Options(task="digits", local_sgd=1), world, model, step=0).average_optimizer(optimizer)
        after = world.gather(state())
        assert after[0].keys() == {name for name in names.values() if "never" not in name}
        for name, values in after[0].items():
            having = [each[name] for each in before if name in each]
            for key, value in values.items():
                mean = torch.stack([each[key] for each in having]).mean(0)
                torch.testing.assert_close(value, mean, msg=f"{make} {name} {key}")
                for other in after[1:]:
                    assert torch.equal(other[name][key], value), (name, key)
        for branch in ("only", "wide"):  # which are new to some
            model[branch](torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_each_parameter_has_the_mean_of_its_own_state_in_whatever_order_they_came(tmp_path: Path) -> None:
    """Ranks whose samples take other branches of a model first, or never, have their state in another order."""
    (tmp_path / "branches.py").write_text(BRANCHES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [warm_python.program(), *torchrun, str(tmp_path / "branches.py")],
        env={**os.environ, **warm_python.environment()},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def alone() -> Iterator[World]:
    with World.from_env({}) as world:
        yield world


def begun(world: World, module: nn.Module, **options: Any) -> LocalSgd:
    """One that begins after step 8, and averages after every fourth."""
    how = options if "diloco" in options else {"local_sgd": 4, **options}
    return LocalSgd(Options(task="digits", **how), world, module, step=8)


def test_ranks_meet_about_every_two_seconds_and_where_something_is_due(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(local_sgd, "time", SimpleNamespace(monotonic=lambda: now[0]))
    apart = begun(alone, nn.Linear(2, 1), snapshot_every=7)
    now[0] += 3.0
    assert apart.syncs_after(9), "how long a step takes is not known yet"
    assert apart.step_s == 3.0
    apart.synced(9, 0.3)
    assert [step for step in range(10, 18) if apart.syncs_after(step)] == [12, 14, 15, 16, 17]
    assert [step for step in range(10, 18) if apart.averages_after(step)] == [12, 16]
    now[0] += 3.0
    apart.syncs_after(12)
    assert apart.step_s == 1.0, "since they met last"
    apart.synced(17, 60.0)
    assert apart.syncs_after(18), "a step is longer than that"
    apart.synced(17, 0.0)
    assert not apart.syncs_after(18)
    assert apart.step_s == 0.0
    apart = begun(alone, nn.Linear(2, 1))
    assert apart.step_s == 0.0, "none is made yet"
    apart.synced(8, 0.3)
    assert not apart.syncs_after(9), "no snapshot is ever due"


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_dilocos_step_is_one_of_sgd_along_the_way_that_all_have_gone(alone: World, momentum: float) -> None:
    module, frozen = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    frozen.requires_grad_(requires_grad=False)
    nn.init.constant_(module.weight, 1.0)
    kept = frozen.weight.clone()
    options = {"diloco": 4, "outer_lr": 0.5, "outer_momentum": momentum}
    apart = begun(alone, nn.Sequential(module, frozen), **options)
    common, buffer = 1.0, 0.0
    for own in (0.0, -2.0):
        nn.init.constant_(module.weight, own)
        apart.average()
        way = common - own
        buffer = momentum * buffer + way
        common -= 0.5 * (way + momentum * buffer)
        assert module.weight.item() == pytest.approx(common)
    assert frozen.weight.equal(kept)

    again = begun(alone, nn.Sequential(module, frozen), **{**options, "outer_lr": 0.25})
    again.load({})
    assert not again.state()["state"], "a snapshot without DiLoCo has no momentum"
    again.load(apart.state())
    nn.init.constant_(module.weight, 3.0)
    again.average()
    way = common - 3.0
    buffer = momentum * buffer + way
    assert module.weight.item() == pytest.approx(common - 0.25 * (way + momentum * buffer))


def test_the_plain_average_has_no_state_of_its_own(alone: World) -> None:
    module = nn.Linear(2, 1)
    weight = module.weight.clone()
    apart = begun(alone, module)
    apart.average()
    assert module.weight.equal(weight), "of one rank"
    assert apart.state() == {}
    apart.load({"state": {}, "param_groups": []})


def test_the_average_of_many_tensors_goes_in_messages_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    def all_reduce(flat: torch.Tensor) -> None:
        sent.append(flat.numel())
        flat.mul_(3)

    monkeypatch.setattr(collectives, "_BUCKET_BYTES", 40)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    tensors = [torch.full((4,), float(number)) for number in range(5)]
    local_sgd.average_tensors(tensors, [3, 3, 1, 1, 6], torch.device("cpu"))
    assert [each[0].item() for each in tensors] == [0.0, 1.0, 6.0, 9.0, 2.0]
    assert len(sent) > 1
    assert sum(sent) == 20
    local_sgd.average_tensors([], [], torch.device("cpu"))
    assert sum(sent) == 20


def test_the_mean_of_an_optimizers_state_is_of_the_ranks_that_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, unused, never = (nn.Parameter(torch.full((2,), 3.0)) for _ in range(3))
    optimizer = torch.optim.AdamW([{"params": [used]}, {"params": [unused, never]}])
    used.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[used]["how often"] = 1  # no tensor, and a count that is none of floats
    optimizer.state[used]["counted"] = torch.tensor(7)
    told: list[dict[tuple[int, str], Any]] = []

    def gather(own: dict[tuple[int, str], Any]) -> list[Any]:
        told.append(own)
        both = {(number, name): each for (_, name), each in own.items() for number in (0, 1)}
        return [own, {}, both]

    averaged: list[tuple[list[torch.Tensor], list[int]]] = []
    monkeypatch.setattr(local_sgd, "average_tensors", lambda tensors, by, _: averaged.append((tensors, by)))
    world: Any = SimpleNamespace(world_size=3, device=torch.device("cpu"), gather=gather)
    begun(world, nn.Linear(1, 1)).average_optimizer(optimizer)

    assert {number for number, _ in told[0]} == {0}
    (tensors, by) = averaged[0]
    had, new = optimizer.state[used], optimizer.state[unused]
    names = sorted(name for name in had if name not in ("how often", "counted"))
    wanted = [*(had[name] for name in names), *(new[name] for name in names)]
    assert [id(each) for each in tensors] == [id(each) for each in wanted], "the same order on all ranks"
    assert by == [2, 2, 2, 1, 1, 1]
    assert not any(new[name].any() for name in names), "that of the others is added"
    assert (had["how often"], had["counted"].item(), new["how often"]) == (1, 7, 1)
    assert never not in optimizer.state
