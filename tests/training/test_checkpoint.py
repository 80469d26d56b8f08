"""Checkpoints as the tutorials save them: what is found in them, and that training continues where they ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from engine_runs import SAME, losses, train
from torch import nn
from torch.nn import functional

from nodekit.training.data.sampler import ElasticSampler
from nodekit.training.errors import TrainingError
from nodekit.training.process import rng
from nodekit.training.tasks.digits import Digits
from nodekit.training.weights.checkpoint import load_optimizer, read_checkpoint

WEIGHTS = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}


def saved(folder: Path, state: Mapping[str, Any]) -> Path:
    torch.save(dict(state), folder / "model_0.pth")
    return folder / "model_0.pth"


@pytest.mark.parametrize(
    ("state", "epochs", "has_optimizer"),
    [
        ({"MODEL_STATE": WEIGHTS, "EPOCHS_RUN": 3}, 3, False),
        (
            {
                "start_epoch": 2,
                "model_state_dict": WEIGHTS,
                "Optimizer_state_dict": {"state": {}},
                "scheduler_state_dict": {"last_epoch": 2},
            },
            3,
            True,
        ),
        ({"epoch": 5, "state_dict": WEIGHTS, "optimizer": {"state": {}}, "arch": "resnet18"}, 5, True),
        ({"epoch": 5, "model": WEIGHTS, "best_acc": 0.5}, 5, False),
    ],
)
def test_the_next_epoch_is_the_one_their_own_script_would_begin(
    state: Mapping[str, Any], epochs: int, has_optimizer: bool, tmp_path: Path
) -> None:
    found = read_checkpoint(saved(tmp_path, state))
    assert (found.epochs, found.optimizer is not None) == (epochs, has_optimizer)
    assert {name: value.tolist() for name, value in found.weights.items()} == {
        name: value.tolist() for name, value in WEIGHTS.items()
    }


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            WEIGHTS,
            "does not say which epoch is next: wanted it as epochs_run, start_epoch, epoch; --init-from",
        ),
        ({"model": WEIGHTS, "epoch": "3"}, "epoch is '3', wanted a whole number from 0"),
        ({"model": WEIGHTS, "epoch": -1}, "epoch is -1, wanted"),
        ({"model": {}, "epoch": 1}, "wanted a state dict"),
        (
            {"model": WEIGHTS, "epoch": 1, "best": np.float64(0.5)},
            "it holds a numpy.* and to load that could run code",
        ),
        ({"net": WEIGHTS, "epoch": 1}, "holds at 'net' a dict: wanted a state dict, .* perhaps its 'net'"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_a_line(
    state: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, state)
    with pytest.raises(TrainingError, match=message) as refused:
        read_checkpoint(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def stepped(module: nn.Module, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
    optimizer = kind(module.parameters(), lr=0.5, **settings)
    sum(each.sum() for each in module.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def test_the_optimizers_state_is_taken_without_its_learning_rate() -> None:
    module = nn.Linear(3, 2)
    theirs = stepped(module, torch.optim.AdamW, betas=(0.8, 0.9)).state_dict()
    own = torch.optim.AdamW(module.parameters(), lr=0.1)
    own.param_groups[0]["initial_lr"] = 0.1
    load_optimizer(own, theirs, Path("a.pt"))
    (group,) = own.param_groups
    assert (group["lr"], group["initial_lr"], group["betas"]) == (0.1, 0.1, (0.8, 0.9))
    assert own.state[module.weight]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        (nn.Linear(3, 2), torch.optim.SGD, "has no betas, eps, so it is not the task's AdamW"),
        (nn.Linear(2, 3), torch.optim.AdamW, r"has exp_avg of \(3, 2\) for a parameter of \(2, 3\)"),
        (nn.Linear(3, 2, bias=False), torch.optim.AdamW, "its optimizer's state does not fit"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    module: nn.Module, kind: type[torch.optim.Optimizer], message: str
) -> None:
    own = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=0.1)
    with pytest.raises(TrainingError, match=rf"^a\.pt: .*{message}.*; --init-from takes its weights alone"):
        load_optimizer(own, stepped(module, kind).state_dict(), Path("a.pt"))


def test_what_is_no_optimizers_state_is_refused() -> None:
    own = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    for state in ({"state": {}}, {"param_groups": 3}, {"param_groups": [{"lr": 1}]}):
        with pytest.raises(TrainingError, match=r"^a\.pt: its optimizer"):
            load_optimizer(own, state, Path("a.pt"))


def by_plain_torch() -> dict[str, Any]:
    """A script's first epoch, saved as the tutorial for DDP on one machine does."""
    rng.seed_all(0, rank=0)
    task = Digits()
    model, data = task.model(), task.train_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0003)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for indices in ElasticSampler(len(data), batch_size=64):
        functional.cross_entropy(model(data.images[indices]), data.labels[indices]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    return {
        "start_epoch": 0,
        "model_state_dict": nn.DataParallel(model).state_dict(),
        "Optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
    }


@pytest.mark.slow
def test_training_continues_where_the_script_ended(tmp_path: Path) -> None:
    state = by_plain_torch()
    path = saved(tmp_path, state)
    train(tmp_path / "whole", "--epochs", "2", num_ranks=1)
    whole = losses(tmp_path / "whole")
    said = train(tmp_path / "resumed", "--epochs", "2", "--resume-from", str(path))
    assert f"resumed at step 23 (epoch 2, 0 of 1437 samples done) from {path}" in said
    found = losses(tmp_path / "resumed")
    assert found == pytest.approx({step: whole[step] for step in range(24, 47)}, abs=2e-6)

    snapshot = saved(tmp_path, {"MODEL_STATE": state["model_state_dict"], "EPOCHS_RUN": 1})
    said = train(tmp_path / "weights", "--epochs", "2", "--resume-from", str(snapshot), num_ranks=1)
    assert f"left out of {snapshot}: the optimizer's state, which it does not have" in said
    assert losses(tmp_path / "weights")[24] == pytest.approx(whole[24], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "state", "message"),
    [
        ("--init-from", {"state_dict": WEIGHTS}, r"model_0\.pth: 8 of 8 weights do not fit .*none fits"),
        ("--resume-from", {"model": Digits().model().state_dict(), "epoch": 9}, "is in epoch 10 already"),
    ],
)
def test_what_does_not_fit_is_one_line(
    option: str, state: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    argv = ["-m", "nodekit.training", *SAME, "--epochs", "2", "--output", str(tmp_path / "run")]
    done = subprocess.run(
        [warm_python.program(), *argv, option, str(saved(tmp_path, state))],
        env={**os.environ, **warm_python.environment()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert done.stderr.startswith("python -m nodekit.training: ")
    assert done.stderr.count("\n") == 1, done.stderr
