"""How good the model is said to be, and the best weights that are kept."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from engine_runs import train
from sklearn.metrics import f1_score

from nodekit.training.evaluate import macro_f1
from nodekit.training.tasks.digits import Digits
from nodekit.training.weights.best import Best
from nodekit.training.weights.export import read_facts, read_weights
from nodekit.training.world import World


@pytest.mark.parametrize("num_classes", [2, 3, 6])
def test_f1_is_that_of_scikit_learn(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    predicted, targets = torch.randint(num_classes, (2, 40), generator=generator)
    expected = f1_score(targets, predicted, average="macro")
    assert macro_f1(predicted, targets) == pytest.approx(expected)


def test_f1_leaves_out_classes_that_do_not_occur() -> None:
    assert macro_f1(torch.tensor([5, 5, 1]), torch.tensor([5, 5, 1])) == 1.0


@pytest.mark.slow
def test_every_so_many_steps_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    # A learning rate with which it gets worse again.
    train(
        tmp_path, "--epochs", "2", "--eval-every", "9", "--lr", "0.02", "--clip", "100", num_ranks=3
    )  # 360 samples on three ranks, 9 batches of which the last steps have a remainder
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tests = {line["step"]: line["test"] for line in lines if "test" in line}
    assert list(tests) == [9, 18, 23, 27, 36, 45, 46]
    best_step = max(tests, key=lambda step: (tests[step]["accuracy"], -step))
    task = Digits()
    model = task.model()
    model.load_state_dict(read_weights(tmp_path / "best"))
    images, labels = task.test_data().images, task.test_data().labels
    with torch.no_grad():
        predicted = model.eval()(images).argmax(1)
    assert float((predicted == labels).float().mean()) == pytest.approx(tests[best_step]["accuracy"])
    assert macro_f1(predicted, labels) == pytest.approx(tests[best_step]["f1"])
    last = read_weights(tmp_path / "last")
    assert any(not torch.equal(last[name], value) for name, value in model.state_dict().items()) == (
        best_step != 46
    )


@pytest.mark.slow
def test_a_measure_that_there_is_not(tmp_path: Path) -> None:
    said = train(tmp_path, "--epochs", "1", "--best", "precision", num_ranks=1, code=1)
    assert "--best precision: the task measures accuracy, loss, f1; wanted one of these, or off" in said


def test_best_weights_that_cannot_be_written_do_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, task, world = tmp_path / "output", Digits(), World.from_env({})
    model = task.model()
    best = Best("accuracy", folder, world, task, {"task": "digits"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # a full disk
    try:
        best.look({"accuracy": 0.5}, model.state_dict, step=1)
        best.wait()
        assert "File too large" in caplog.text
        assert "going on without" in caplog.text
        with pytest.raises(OSError, match="File too large"):
            best.write_last(model.state_dict(), step=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(folder.iterdir())
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.fill_(0)
    best.look({"accuracy": 0.4}, model.state_dict, step=2)  # writes those of step 1
    best.wait()
    found = read_weights(folder / "best")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert read_facts(folder / "best")["step"] == 1
