"""Ranks that make steps apart: what they make of it together, and going on from a snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_runs import killed_once, losses, task, train

pytestmark = pytest.mark.slow

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


def test_to_meet_after_each_step_of_sgd_is_ddp(tmp_path: Path) -> None:
    common = [*task(tmp_path, PLAIN_SGD), *NOT_CLIPPED, "--epochs", "1", "--batch-size", "50"]
    train(tmp_path / "ddp", *common, num_ranks=3)  # 17, 17 and 16 samples
    train(tmp_path / "apart", *common, "--local-sgd", "1", num_ranks=3)
    assert losses(tmp_path / "apart") == pytest.approx(losses(tmp_path / "ddp"), abs=1e-5)


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
