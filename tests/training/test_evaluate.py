"""How good the model is said to be, and the best weights that are kept."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_runs import task, train

from nodekit.training.data.evaluate import Evaluation, macro_f1
from nodekit.training.data.loading import loading
from nodekit.training.errors import TrainingError
from nodekit.training.loop import Loop
from nodekit.training.measures import is_least_best
from nodekit.training.options.arguments import parse
from nodekit.training.process.stop import Stop
from nodekit.training.rank import check
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.tasks import MEASURES
from nodekit.training.tasks.digits import Digits
from nodekit.training.weights.best import Best
from nodekit.training.weights.epochs import EpochWeights
from nodekit.training.weights.export import read_facts, read_weights
from nodekit.training.world import World


@pytest.mark.parametrize("num_classes", [2, 3, 6])
def test_f1_is_that_of_scikit_learn(num_classes: int) -> None:
    from sklearn.metrics import f1_score  # 1.7 s, for every worker at the top

    generator = torch.Generator().manual_seed(num_classes)
    predicted, targets = torch.randint(num_classes, (2, 40), generator=generator)
    expected = f1_score(targets, predicted, average="macro")
    assert macro_f1(predicted, targets) == pytest.approx(expected)


def test_f1_leaves_out_classes_that_do_not_occur() -> None:
    assert macro_f1(torch.tensor([5, 5, 1]), torch.tensor([5, 5, 1])) == 1.0


@pytest.mark.slow
def test_every_so_many_steps_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    # A learning rate with which it gets worse again.
    # 360 samples on three ranks, 9 batches of which the last steps have a remainder.
    train(tmp_path, "--epochs", "2", "--eval-every", "9", "--lr", "0.02", "--clip", "100", num_ranks=3)
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


STOPPED_ONCE = """
import pathlib, signal
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    num_left = 4 * 14 + 1
    def loss(self, model, batch):
        self.num_left -= 1
        mark = pathlib.Path(__file__ + ".stopped")
        if self.num_left == 0 and not mark.exists():
            mark.touch()
            signal.raise_signal(signal.SIGTERM)  # in this thread: before the step ends
        return super().loss(model, batch)
    def measure(self, model, batch):
        return {"same": float(len(batch[1]))}
"""


STOPPED_WHILE_EVALUATING = """
import os, pathlib, signal, time
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    num_left = 3
    def predict(self, model, batch):
        mark = pathlib.Path(__file__ + ".stopped")
        if not model.training:
            time.sleep(0.05)
        if not model.training and os.environ["RANK"] == "1" and not mark.exists():
            self.num_left -= 1
            if self.num_left == 0:
                mark.touch()
                os.kill(os.getpid(), signal.SIGTERM)
        return super().predict(model, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "stopped_at"),
    [(["--epochs", "1"], "23/23"), (["--epochs", "1", "--eval-every", "9", "--engine", "fsdp"], "9/23")],
)
def test_a_stop_ends_an_evaluation_on_all_ranks_and_it_is_done_again(
    tmp_path: Path, given: list[str], stopped_at: str
) -> None:
    """Of 360 samples, rank 0 has 90 batches of 2, and rank 1, the only one that is asked to stop, as many."""
    own = [*task(tmp_path, STOPPED_WHILE_EVALUATING), "--eval-batch-size", "2", *given]
    said = train(tmp_path, *own, code=1)
    assert f"stopped at step {stopped_at}, to go on from there" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not any("test" in line for line in lines)
    step = stopped_at.partition("/")[0]
    said = train(tmp_path, *own, "--eval-batch-size", "256")
    assert f"resumed at step {step} " in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert next(line["step"] for line in lines if "test" in line) == int(step)


@pytest.mark.slow
def test_early_stop_counts_over_a_stop_at_an_evaluation_and_the_same_command_ends_there_again(
    tmp_path: Path,
) -> None:
    own = [*task(tmp_path, STOPPED_ONCE), "--best", "same", "--early-stop", "3", "--eval-every", "5"]
    said = train(tmp_path, *own, num_ranks=1, code=1)
    assert "stopped at step 15/460, to go on from there" in said
    for resumed_at, seed in ((15, 0), (20, 7)):
        said = train(tmp_path, *own, "--seed", str(seed), num_ranks=1)
        assert f"resumed at step {resumed_at} " in said
        assert ("the order of the data goes on with --seed 0 of the snapshot, not 7" in said) == (seed == 7)
        why = "same was no better than 1.0000 in 3 evaluations (--early-stop 3)"
        assert f"ended early at step 20/460: {why}" in said
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["steps"], result["epochs"], result["stopped_early"]) == (20, 1, why)
        assert read_facts(tmp_path / "last")["means"] == {"same": 1.0}
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "test" in line] == [5, 10, 15, 20]


def test_a_training_that_ends_early_at_the_end_of_an_epoch_has_a_snapshot_of_its_last_step(
    tmp_path: Path,
) -> None:
    """The same command would train the last steps again."""
    task = Digits()
    task.measure = lambda _, batch: {"same": torch.tensor(1.0 * len(batch[1]))}  # type: ignore[attr-defined]
    how = ["--output", str(tmp_path), "--batch-size", "512", "--best", "same", "--early-stop", "1"]
    with World.from_env({}) as world, Stop(1.0) as stop:
        result = Loop(parse([*how, "--snapshot-every", "1000"]), world, task, tmp_path, stop).run()
    assert result is not None
    assert result["stopped_early"]
    assert Snapshots(tmp_path / "snapshots").newest_age() == (0, result["steps"])


def test_a_stop_during_the_evaluation_at_the_end_of_an_epoch_saves_its_last_step(tmp_path: Path) -> None:
    task = Digits()
    how = ["--output", str(tmp_path), "--epochs", "2", "--batch-size", "512", "--eval-batch-size", "64"]
    with World.from_env({}) as world, Stop(60.0) as stop:

        def measure(_: object, batch: Any) -> dict[str, torch.Tensor]:
            stop.request()
            return {"same": torch.tensor(1.0 * len(batch[1]))}

        task.measure = measure  # type: ignore[attr-defined]
        loop = Loop(parse([*how, "--snapshot-every", "1000"]), world, task, tmp_path, stop)
        assert loop.run() is None
    assert 0 < loop.step < loop.total_steps
    assert Snapshots(tmp_path / "snapshots").newest_age() == (0, loop.step)


def test_a_measure_that_is_no_number_is_never_the_best_and_counts_for_early_stop(tmp_path: Path) -> None:
    model = Digits().model()
    best = Best("auto", tmp_path, World.from_env({}), Digits(), {"task": "digits"})
    for step, why in enumerate(("", "loss was not a number in 2 evaluations (--early-stop 2)"), 1):
        assert best.improved({"loss": math.nan}) == ""
        best.look({"loss": math.nan}, model.state_dict, step=step)
        assert best.why_stop(2) == why
    assert best.improved({"loss": math.inf}) == "loss"
    best.look({"loss": 0.5}, model.state_dict, step=3)
    assert best.improved({"loss": math.nan}) == ""
    best.wait()
    assert read_facts(tmp_path / "best")["step"] == 3


def test_early_stop_counts_evaluations_and_a_value_that_is_no_number_is_no_best(tmp_path: Path) -> None:
    world, model = World.from_env({}), Digits().model()
    best = Best("auto", tmp_path, world, Digits(), {"task": "digits"})
    for step, (loss, why) in enumerate(
        [(math.nan, ""), (0.5, ""), (0.7, ""), (0.4, ""), (0.4, ""), (0.9, "2")]
    ):
        best.look({"loss": loss}, model.state_dict, step=step)
        assert best.why_stop(None) == ""
        assert best.why_stop(2) == (
            why and "loss was no better than 0.4000 in 2 evaluations (--early-stop 2)"
        )
        other = Best("auto", tmp_path / "other", world, Digits(), {})
        other.load(best.state())
        other.look({"loss": 9.0}, model.state_dict, step=step)  # the same again, after a resume
        other.wait()
        assert other.why_stop(2) == best.why_stop(2)
    best.wait()
    assert read_facts(tmp_path / "best")["step"] == 3


def test_weights_of_epochs_are_plain_and_as_many_as_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, world = Digits().model(), World.from_env({})
    weights = EpochWeights(2, tmp_path / "out", world)
    for epoch in range(1, 12):
        with torch.no_grad():
            model[0].weight.fill_(epoch)
        weights.look(epoch, model.state_dict)
    weights.wait()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model_10.pth", "model_11.pth"]
    loaded = torch.load(tmp_path / "out" / "model_10.pth", weights_only=True)
    assert loaded["0.weight"].unique().tolist() == [10]
    Digits().model().load_state_dict(loaded)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # a full disk
    try:
        weights.look(12, model.state_dict)
        weights.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "model_12.pth is not written, and going on without" in caplog.text
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"model_10.pth", "model_11.pth"}, "what was begun takes no room from snapshots"


def test_batches_of_an_evaluation_are_as_large_as_asked_for() -> None:
    evaluation = Evaluation(Digits(), Digits().test_data(), World.from_env({}), None, {}, 8)  # type: ignore[arg-type]
    assert [len(labels) for _, labels in evaluation._batches(range(20))] == [8, 8, 4]


@pytest.mark.parametrize(
    ("device", "given", "is_pinned"),
    [("cuda", [], True), ("cuda", ["--no-pin-memory"], False), ("cpu", [], False)],
)
def test_batches_are_pinned_for_a_gpu_unless_it_is_told_not_to(
    device: str, given: list[str], is_pinned: bool
) -> None:
    world = cast(World, SimpleNamespace(device=torch.device(device), rank=0))
    assert loading(parse(given, {}), world, Digits())["pin_memory"] == is_pinned


def test_a_measure_that_there_is_not_is_refused_before_the_training() -> None:
    for name in ("auto", "off", *MEASURES):
        check(parse(["--best", name], {}), {})
    with pytest.raises(ValueError, match=r"^--best acc: the task measures accuracy, loss, f1; wanted one of"):
        check(parse(["--best", "acc"], {}), {})


OWN_MEASURE = """
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def measure(self, model, batch):
        return {"same": float(len(batch[1]))}
"""


@pytest.mark.slow
def test_where_only_an_evaluation_shows_that_there_is_no_such_measure_the_training_is_kept(
    tmp_path: Path,
) -> None:
    own = [*task(tmp_path, OWN_MEASURE), "--eval-every", "5", "--snapshot-every", "1000", "--epochs", "1"]
    said = train(tmp_path, *own, "--best", "accuracy", code=1)
    assert "--best accuracy: the task measures same; wanted one of these, or off" in said
    said = train(tmp_path, *own, "--early-stop", "2", code=1)
    assert "resumed at step 5 " in said
    assert "that is auto: the task measures same, neither accuracy nor loss; name one with --best" in said
    said = train(tmp_path, *own, "--early-stop", "2", "--best", "same")
    assert "resumed at step 5 " in said
    assert "ended early at step 15/23: same was no better than 1.0000 in 2 evaluations" in said
    assert (
        "with more --epochs (if --early-stop 2 has ended it: without that, or with a greater one) trains on"
        in said
    )


ODD_MEASURE = """
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def measure(self, model, batch):
        return {"loss": float(len(batch[1])), "odd": float("nan"), "perplexity": float("inf")}
"""


@pytest.mark.slow
def test_a_measure_that_is_no_number_leaves_files_that_strict_readers_of_json_take(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def strict(name: str) -> Any:
        text = (tmp_path / name).read_text()
        lines = text.splitlines() if name.endswith(".jsonl") else [text]
        return [json.loads(line, parse_constant=refuse) for line in lines]

    wanted = {"loss": 1.0, "odd": None, "perplexity": None}
    for epochs in ("1", "2"):  # the second draws the first one's curves again
        shutil.rmtree(tmp_path / "tensorboard", ignore_errors=True)
        said = train(tmp_path, *task(tmp_path, ODD_MEASURE), "--epochs", epochs, num_ranks=1)
        assert "test loss 1.0000 odd nan perplexity inf" in said
        assert "no TensorBoard curves" not in said
        assert strict("result.json")[0].items() >= wanted.items()
        assert [strict(f"{kind}/nodekit.json")[0]["means"] for kind in ("best", "last")] == [wanted, wanted]
        tests = [line["test"] for line in strict("metrics.jsonl") if "test" in line]
        assert tests == [wanted] * int(epochs)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow

    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [math.isnan(each.value) for each in curves.Scalars("test/odd")] == [True, True]


def test_weights_that_cannot_be_written_do_not_end_the_training(
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
        best.write_last(model.state_dict(), step=9)
        assert f"the last weights are not written to {folder / 'last'}, and going on without" in caplog.text
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


def test_the_best_weights_that_could_not_be_written_are_at_the_end(tmp_path: Path) -> None:
    model = Digits().model()
    best = Best("accuracy", tmp_path / "output", World.from_env({}), Digits(), {"task": "digits"})
    (tmp_path / "output").write_text("")  # in place of the folder
    best.look({"accuracy": 0.5}, model.state_dict, step=1)
    best.wait()
    (tmp_path / "output").unlink()
    best.write_last(model.state_dict(), step=9)
    assert [read_facts(tmp_path / "output" / kind)["step"] for kind in ("best", "last")] == [1, 9]


@pytest.mark.parametrize(
    "name", ["loss", "val_Loss", "squared_error", "mse", "RMSE", "test/mae", "ppl_dev", "wer"]
)
def test_of_a_loss_or_an_error_the_least_is_the_best(name: str) -> None:
    assert is_least_best(name)
    assert not any(map(is_least_best, ["accuracy", "f1", "pearson", "fidelity", "power", "measure"]))


def test_what_was_the_best_by_another_measure_is_no_longer(tmp_path: Path) -> None:
    model, world = Digits().model(), World.from_env({})
    before = Best("loss", tmp_path / "before", world, Digits(), {"task": "digits"})
    before.look({"loss": 2.0, "accuracy": 0.5}, model.state_dict, step=1)
    before.wait()
    after = Best("accuracy", tmp_path / "after", world, Digits(), {"task": "digits"})
    after.load(before.state())
    assert after.improved({"loss": 1.0, "accuracy": 0.6}) == "accuracy"


def test_a_best_that_was_never_written_does_not_keep_the_next_one_from_being_written(tmp_path: Path) -> None:
    model, world = Digits().model(), World.from_env({})

    def look(best: Best, accuracy: float, step: int) -> None:
        best.look({"accuracy": accuracy}, model.state_dict, step=step)
        best.wait()

    before = Best("auto", tmp_path, world, Digits(), {"task": "digits"})
    look(before, 0.5, 1)
    before._writer.start = lambda _: None  # type: ignore[method-assign]  # killed meanwhile, with a newer snapshot
    look(before, 0.9, 2)
    after = Best("auto", tmp_path, world, Digits(), {"task": "digits"})
    after.load(before.state())
    look(after, 0.4, 3)
    assert read_facts(tmp_path / "best")["step"] == 1
    assert not after.improved({"accuracy": 0.6})
    look(after, 0.6, 4)
    look(after, 0.6, 5)
    assert read_facts(tmp_path / "best")["step"] == 4
    assert after.why_stop(3) == "accuracy was no better than 0.9000 in 3 evaluations (--early-stop 3)"


@pytest.mark.parametrize("call", ["read_text", "exists"])
def test_best_weights_whose_facts_cannot_be_read_are_kept_until_there_are_better_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    model, world = Digits().model(), World.from_env({})
    before = Best("auto", tmp_path, world, Digits(), {"task": "digits"})
    before.look({"accuracy": 0.9}, model.state_dict, step=1)
    before.wait()
    after = Best("auto", tmp_path, world, Digits(), {"task": "digits"})

    def fail(path: Path, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    after.load(before.state())
    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        after.look({"accuracy": 0.4}, model.state_dict, step=2)
        after.wait()
    assert "nodekit.json cannot be read ([Errno 5] Input/output error" in caplog.text
    assert read_facts(tmp_path / "best")["step"] == 1
    after.look({"accuracy": 0.95}, model.state_dict, step=3)
    after.wait()
    assert read_facts(tmp_path / "best")["step"] == 3


class Odd(Digits):
    """The digits, with something else in place of one of a task's results."""

    def __init__(self, method: str, result: object) -> None:
        super().__init__()
        setattr(self, method, lambda *_: result)


@pytest.mark.parametrize(
    ("method", "result", "says"),
    [
        ("train_data", iter([]), r"train_data\(\) gives a list_iterator, which has no length"),
        ("test_data", None, r"test_data\(\) gives a NoneType, which has no length"),
        ("train_data", [], r"train_data\(\) has no samples: wanted one or more"),
        ("loss", (torch.ones(()), 3), "loss gives a tuple: wanted the mean over the batch's samples"),
        ("loss", torch.ones(3), r"loss gives a tensor of \(3,\): wanted the mean"),
        (
            "targets",
            torch.zeros(64, 1),
            r"predict gives \(64, 10\) and its targets \(64, 1\): wanted \(num, num_cl",
        ),
        ("targets", torch.full((64,), -100), "targets have the class -100: wanted 0 and more"),
    ],
)
def test_what_a_task_gives_that_is_no_such_thing_is_named(
    method: str, result: object, says: str, tmp_path: Path
) -> None:
    options = parse(
        ["--output", str(tmp_path), "--epochs", "1", "--batch-size", "512", "--eval-batch-size", "64"]
    )
    task = Odd(method, result)
    if method == "targets":
        task.test_data = lambda: torch.utils.data.Subset(Digits().test_data(), range(64))  # type: ignore[method-assign]
    with World.from_env({}) as world, Stop(1.0) as stop, pytest.raises(TrainingError, match=says):
        Loop(options, world, task, tmp_path, stop).run()


def test_after_an_evaluation_within_an_epoch_the_model_trains_as_before(tmp_path: Path) -> None:
    """In the mode of an evaluation there is no dropout, and batch norm learns no means."""
    modes: list[bool] = []

    class Watched(Digits):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            modes.append(all(each.training for each in model.modules()))
            return super().loss(model, batch)

    how = ["--output", str(tmp_path), "--epochs", "2", "--batch-size", "512", "--eval-every", "1"]
    with World.from_env({}) as world, Stop(1.0) as stop:
        result = Loop(parse(how), world, Watched(), tmp_path, stop).run()
    assert result is not None
    assert modes == [True] * result["steps"]
    assert len(modes) > 4


def test_the_end_of_an_epoch_is_evaluated_once(tmp_path: Path) -> None:
    """--early-stop would count it twice."""
    how = ["--output", str(tmp_path), "--epochs", "2", "--batch-size", "512", "--eval-every", "1"]
    with World.from_env({}) as world, Stop(1.0) as stop:
        loop = Loop(parse(how), world, Digits(), tmp_path, stop)
        evaluated: list[int] = []
        evaluation = loop.evaluation
        loop.evaluation = lambda *what: evaluated.append(loop.step) or evaluation(*what)  # type: ignore
        assert loop.run() is not None
    assert evaluated == list(range(1, loop.total_steps + 1))


def test_a_measure_may_have_any_name(tmp_path: Path) -> None:
    options = parse(["--output", str(tmp_path), "--epochs", "1", "--batch-size", "512"])
    task = Digits()
    task.measure = lambda _, batch: {"pairs": torch.tensor(2.0 * len(batch[1]))}  # type: ignore[attr-defined]
    with World.from_env({}) as world, Stop(1.0) as stop:
        result = Loop(options, world, task, tmp_path, stop).run()
    assert result is not None
    assert result["pairs"] == 2.0
