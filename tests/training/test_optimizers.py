"""The state of an optimizer, from one device to another, and from a file that is mapped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nodekit.training import Snapshots
from nodekit.training.options.arguments import parse
from nodekit.training.snapshots.files import manifest
from nodekit.training.steps.optimizers import is_fused, load_state, unlike


def trained(**how: Any) -> torch.optim.AdamW:
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(50, 7))
    optimizer = torch.optim.AdamW([weights], lr=0.1, **how)
    for _ in range(2):
        weights.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "device", "expected"),
    [
        ([], "cuda", True),
        ([], "cpu", False),
        (["--engine", "fsdp"], "cuda", True),
        (["--amp", "fp16"], "cuda", True),
        (["--amp", "fp16", "--engine", "fsdp"], "cuda", False),
        (["--amp", "fp16", "--engine", "fabric"], "cuda", False),
        (["--amp", "bf16", "--engine", "fabric"], "cuda", True),
    ],
)
def test_torchs_own_optimizers_are_fused_on_gpus_alone(
    arguments: list[str], device: str, expected: bool
) -> None:
    assert is_fused(parse(arguments, {}), torch.device(device)) is expected


@pytest.mark.parametrize(("saved", "own"), [(True, None), (None, True), (False, False)])
def test_a_snapshot_does_not_say_how_this_device_computes(saved: bool | None, own: bool | None) -> None:
    state = trained(fused=saved).state_dict()
    optimizer = trained(fused=own)
    optimizer.param_groups[0]["weight_decay"] = 0.7
    load_state(optimizer, state)
    (group,) = optimizer.param_groups
    assert group["fused"] is own
    assert group["weight_decay"] == 0.01, "what is about the training is the snapshot's"
    group["params"][0].square().sum().backward()
    optimizer.step()
    (values,) = optimizer.state.values()
    assert values["step"] == 3


def test_which_settings_go_on_with_the_snapshots_is_told() -> None:
    state, own = trained(fused=True).state_dict(), trained(weight_decay=5, betas=(0.5, 0.999))
    own.param_groups[0].update(lr=0.3, eps=1e-8)
    assert unlike(own, state) == [
        "the optimizer goes on with betas 0.9, 0.999 of the snapshot, not 0.5, 0.999",
        "the optimizer goes on with weight_decay 0.01 of the snapshot, not 5",
    ]
    state["param_groups"][0].update(weight_decay=5.0, betas=[0.5, 0.999])
    assert unlike(own, state) == []


def test_the_learning_rates_are_this_runs_own() -> None:
    """A run that goes on with another --lr, or another batch with --lr-scale, is to have that."""
    saved, own = trained(), trained()
    saved.param_groups[0].update(lr=0.02, initial_lr=0.1)
    own.param_groups[0].update(lr=0.3, initial_lr=0.3)
    load_state(own, saved.state_dict())
    assert (own.param_groups[0]["lr"], own.param_groups[0]["initial_lr"]) == (0.3, 0.3)


def test_a_state_of_another_model_is_refused_as_torch_refuses_it() -> None:
    state = trained().state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_state(trained(), {**state, "param_groups": state["param_groups"] * 2})


def test_a_state_of_another_class_of_optimizer_is_refused_before_a_step_fails_by_it() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    with pytest.raises(
        ValueError, match="the saved optimizer has no betas, eps, so it is not the task's AdamW"
    ):
        load_state(torch.optim.AdamW(parameters), torch.optim.SGD(parameters, lr=0.1).state_dict())


def mapped(folder: Path) -> bool:
    return str(folder) in Path("/proc/self/maps").read_text()


def test_a_mapped_state_is_shared_until_it_is_loaded_and_then_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_SMALL_BYTES", 1000)  # the moments are larger, the count of steps is not
    before = trained()
    assert Snapshots(tmp_path).save(before.state_dict(), step=1)
    found = Snapshots(tmp_path).read_age((0, 1), is_mapped=True)
    assert found
    assert mapped(tmp_path)
    steps, moments = found.state["state"][0]["step"], found.state["state"][0]["exp_avg"]
    assert moments.equal(before.state_dict()["state"][0]["exp_avg"])
    optimizer = trained()
    load_state(optimizer, found.state)
    del found, moments
    assert steps == 2
    assert not mapped(tmp_path), "or the disk would not get the room of a removed snapshot back"
    assert torch.equal(*(next(iter(each.state.values()))["exp_avg"] for each in (optimizer, before)))
