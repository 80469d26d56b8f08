"""A loss that is not a number: named with rank and step, never in a snapshot, and left out by --on-nan rollback."""

import json
import logging
import math
import re
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_runs import losses, task, train
from torch import nn

from nodekit.deploy.agent.ranks.budget import Budget
from nodekit.deploy.agent.ranks.failures import WorkerFailure
from nodekit.deploy.story.causes import recognise
from nodekit.training import ElasticSampler, LossWatch, NotFinite, Snapshots, World, loop, rank
from nodekit.training.options.arguments import parse
from nodekit.training.steps.not_finite import check_loss, check_weights

NAN, INF = math.nan, math.inf


class Ranks:
    """A world of some ranks that have these values; this is rank 0."""

    def __init__(self, *others: float) -> None:
        self.others = others
        self.world_size = 1 + len(others)

    def gather(self, own: tuple[float, str]) -> Sequence[tuple[float, str]]:
        assert own[1], "the host is wanted too"
        return [(own[0], "gpu1"), *((value, f"gpu{rank + 2}") for rank, value in enumerate(self.others))]


def failure(error: str) -> WorkerFailure:
    return cast(WorkerFailure, {"error": error, "exitcode": 1})


@pytest.mark.parametrize(
    ("own", "others", "said", "batches"),
    [
        (0.5, [NAN], "the loss of step 7 is nan on rank 1 (gpu2)", [(2, 64)]),
        (-INF, [0.5, NAN], "the loss of step 7 is -inf on rank 0 (gpu1), rank 2 (gpu3)", [(2, 64)]),
        # The update before may have broken the weights of all.
        (NAN, [NAN], "the loss of step 7 is nan on rank 0 (gpu1), rank 1 (gpu2)", [(2, 64), (2, 0)]),
        (0.5, [NAN] * 6, "rank 3 (gpu4), rank 4 (gpu5) and 2 more", [(2, 64)]),
    ],
)
def test_the_ranks_and_the_step_are_named(
    own: float, others: list[float], said: str, batches: list[tuple[int, int]]
) -> None:
    world = cast(World, Ranks(*others))
    with pytest.raises(NotFinite) as raised:
        check_loss(world, 7, own + sum(others), torch.tensor(own), ((2, 64), (2, 0)))
    assert said in str(raised.value)
    assert list(raised.value.batches) == batches
    assert raised.value.ranks == tuple(
        rank for rank, each in enumerate([own, *others]) if not math.isfinite(each)
    )


def test_weights_of_ones_own_may_be_broken_on_one_rank_alone() -> None:
    world = cast(World, Ranks(NAN))
    with pytest.raises(NotFinite) as raised:
        check_loss(world, 7, NAN, torch.tensor(0.5), ((2, 64), (2, 0)), weights_differ=True)
    assert raised.value.batches == ((2, 64), (2, 0))


def test_while_the_sum_is_finite_the_device_is_not_waited_for() -> None:
    check_loss(cast(World, None), 7, 0.5, cast(torch.Tensor, None), ((0, 0), None))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_weights_that_are_not_finite_are_found_in_any_part(bad: float) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16))
    module.register_buffer("mask", torch.tensor([-INF]))  # which is meant
    module.register_parameter("empty", nn.Parameter(torch.empty(0)))
    check_weights(cast(World, Ranks()), 3, module, (0, 64))
    with torch.no_grad():
        cast(nn.Linear, module[1]).bias[2] = bad
    with pytest.raises(
        NotFinite, match=r"the weights after step 3 are not finite \(.*\) on rank 0"
    ) as raised:
        check_weights(cast(World, Ranks()), 3, module, (0, 64))
    assert raised.value.batches == ((0, 64),)


def test_kit_does_not_start_a_training_again_that_was_to_stop_then() -> None:
    with pytest.raises(NotFinite) as raised:
        check_loss(cast(World, Ranks(NAN)), 7, NAN, torch.tensor(0.5), ((0, 0), None))
    before, after = str(raised.value), str(raised.value.final("on_nan: stop"))
    names = "python -m nodekit.training", "nodekit.training.steps.not_finite.NotFinite", "NotFinite"
    for name in names:
        assert Budget(3).crashed(failure(f"{name}: {after}")) == ""
        assert Budget(3).crashed(failure(f"{name}: {before}")) is None
    assert Budget(3).crashed(failure(f"ValueError: they say that {after}")) is None
    cause = recognise(f"{names[0]}: {after}")
    assert cause is not None
    assert (cause.name, cause.what) == ("not-a-number", "the loss of step 7 is nan on rank 1 (gpu2)")


@pytest.mark.parametrize(
    ("on_nan", "number", "batches", "why"),
    [
        ("stop", 1, [(0, 64)], "--on-nan stop"),
        ("rollback", 5, [(0, 64)], ""),
        ("rollback", 6, [(0, 64)], "--on-nan rollback has gone back 5 times within an epoch's steps already"),
        ("rollback", 1, [], "it was so in the snapshot already"),
    ],
)
def test_a_training_that_diverges_is_not_taken_back_for_ever(
    on_nan: str,
    number: int,
    batches: list[tuple[int, int]],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = NotFinite("loss", 7, [(0, NAN, "gpu1")])
    error.batches = tuple(batches)
    world = World.from_env({"NODEKIT_EVENTS_FILE": str(tmp_path / "told")})
    options = parse(["--on-nan", on_nan], {})
    if why:
        with pytest.raises(NotFinite, match=re.escape(f"training ends here ({why})")):
            rank._judge(error, options, world, number)
    else:
        rank._judge(error, options, world, number)
        assert (
            "(5 of 5 within an epoch's steps), without the batch that begins at epoch 1"
            in capsys.readouterr().out
        )
    (told,) = map(json.loads, (tmp_path / "told").read_text().splitlines())
    assert told["action"] == ("stop" if why else "rollback")


def test_the_loop_that_is_gone_back_from_is_freed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has saved its snapshot, with which the next one begins."""
    made: list[weakref.ref[Any]] = []
    settled: list[int] = []

    class InACycle:
        def __init__(self, *_: object, without: set[tuple[int, int]]) -> None:
            assert without == {(0, number) for number, _ in enumerate(made, 1)}
            assert all(each() is None for each in made), "the next one needs its memory"
            assert len(settled) == len(made)
            self.own = self
            self.sampler = SimpleNamespace(steps_per_epoch=8)
            self.saver = SimpleNamespace(
                settle=lambda: settled.append(1), snapshots=SimpleNamespace(peers=None)
            )
            made.append(weakref.ref(self))

        def run(self) -> dict[str, Any]:
            if len(made) < 3:
                error = NotFinite("loss", 7, [(0, NAN, "gpu1")])
                error.batches = ((0, len(made)),)
                raise error
            return {"steps": 8}

    monkeypatch.setattr(loop, "Loop", InACycle)
    world, options = World.from_env({}), parse(["--on-nan", "rollback"])
    assert rank._run_loops([], options, world, cast(Any, None), tmp_path, cast(Any, None)) == {"steps": 8}
    assert len(made) == 3


@pytest.mark.parametrize(
    ("bad_steps", "num_rollbacks"),
    [
        (
            [3, 12, 14, 25, 39, 43, 58, 60, 76],
            9,
        ),  # one bad sample in epochs of ten steps, nine with which it trains
        ([7, 8, 9, 10, 11, 12], 5),
        ([7, 7, 8, 7, 7, 8], 5),
        ([50, 52, 20, 20, 20, 20], 5),  # back to a snapshot of long ago, it diverges earlier
        ([7, 8, 9, 10, 11, 17, 17], 6),
    ],
)
def test_only_what_happens_within_an_epochs_steps_counts(
    bad_steps: list[int], num_rollbacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Diverging:
        def __init__(self, *_: object, without: object) -> None:
            self.sampler = SimpleNamespace(steps_per_epoch=10)
            self.saver = SimpleNamespace(settle=lambda: None, snapshots=SimpleNamespace(peers=None))
            made.append(self)

        def run(self) -> dict[str, Any]:
            if len(made) > len(bad_steps):
                return {}
            error = NotFinite("loss", bad_steps[len(made) - 1], [(0, NAN, "gpu1")])
            error.batches = ((0, 0),)
            raise error

    monkeypatch.setattr(loop, "Loop", Diverging)
    world, options = World.from_env({}), parse(["--on-nan", "rollback"])
    is_ended = num_rollbacks < len(bad_steps)
    with pytest.raises(NotFinite, match="gone back 5 times") if is_ended else nullcontext():
        rank._run_loops([], options, world, cast(Any, None), tmp_path, cast(Any, None))
    assert len(made) == num_rollbacks + 1


@pytest.mark.parametrize(("on_nan", "is_final"), [("stop", True), ("rollback", False)])
def test_a_loop_of_ones_own_hears_of_it_one_step_later(tmp_path: Path, on_nan: str, is_final: bool) -> None:
    environ = {"NODEKIT_ON_NAN": on_nan, "NODEKIT_EVENTS_FILE": str(tmp_path / "told")}
    with World.from_env(environ) as world:
        watch = LossWatch(world)
        watch.look(torch.tensor([1.0, 2.0]), step=1)
        loss = torch.tensor(NAN)
        watch.look(loss, step=2)
        loss.fill_(0.5)  # a graph's output is overwritten by its next replay
        with pytest.raises(NotFinite, match="the loss of step 2 is nan on rank 0") as raised:
            watch.look(torch.tensor(0.5), step=3)
        assert ("training ends here" in str(raised.value)) is is_final
        watch.wait()  # told once
        watch.look(torch.tensor(INF), step=4)
        with pytest.raises(NotFinite, match="the loss of step 4 is inf"):
            watch.wait()
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [(each["kind"], each["step"], each["ranks"], each["action"]) for each in told] == [
        ("not-finite", 2, [0], on_nan),
        ("not-finite", 4, [0], on_nan),
    ]


def test_a_state_with_nan_is_not_saved_and_the_snapshots_before_it_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state(value: float) -> dict[str, Any]:
        moments = {0: {"exp_avg": torch.tensor([0.0, value]), "step": torch.tensor(3)}}
        mask = {"mask": torch.tensor([-INF, 0.0]), "empty": torch.empty(0), "half": torch.ones(2).half()}
        return {"model": mask, "optimizer": {"state": moments, "groups": [{"lr": NAN}]}}

    snapshots = Snapshots(tmp_path)
    assert snapshots.save(state(1.0), step=1)
    with caplog.at_level(logging.WARNING):
        assert snapshots.save(state(NAN), step=2) is None
    assert "no snapshot of step 2" in caplog.text
    assert "optimizer.state.0.exp_avg holds nan" in caplog.text
    snapshots.save_async(state(NAN), step=3)
    snapshots.wait()
    assert [each.step for each in snapshots.manifests()] == [1]
    assert snapshots.num_failed == 0
    assert Snapshots(tmp_path, allow_nan=True).save(state(NAN), step=4)


@pytest.mark.parametrize("offsets", [[0], [4], [8], [0, 4], [4, 8], [0, 4, 8]])
def test_a_batch_that_is_left_out_is_taken_by_no_rank(offsets: list[int]) -> None:
    """Ten samples in batches of 4, 4 and 2, over two epochs, of which the second lacks some."""
    sampler = ElasticSampler(10, batch_size=4)
    whole = [each.indices for each in ElasticSampler(10, batch_size=4, seed=0).micro_batches()]
    sampler.leave_out((1, offset) for offset in offsets)
    assert [each.indices for each in sampler.micro_batches()] == whole
    assert sampler.steps_to(2) == 6 - len(offsets)
    assert sampler.steps_to(1) == sampler.steps_left == 3
    sampler.next_epoch()
    other = ElasticSampler(10, batch_size=4)
    other.next_epoch()
    wanted = [
        each.indices
        for offset, each in zip((0, 4, 8), other.micro_batches(), strict=True)
        if offset not in offsets
    ]
    resumed = ElasticSampler(10, batch_size=4)
    resumed.load_state_dict(sampler.state_dict())
    assert [each.indices for each in sampler.micro_batches()] == wanted
    assert [each.indices for each in resumed.micro_batches()] == wanted
    for left in reversed(range(len(wanted))):
        assert sampler.steps_left == left + 1
        sampler.advance()
    assert sampler.steps_left == 0
    assert sampler.offset == 10 or not wanted
    assert ElasticSampler(10, batch_size=4).state_dict().keys() == {"seed", "epoch", "offset", "num_samples"}


def test_the_batch_that_comes_next_is_passed_at_once_where_it_is_left_out() -> None:
    """As in a rollback to the snapshot right before it: the state after a step points behind that step's batch."""
    sampler = ElasticSampler(10, batch_size=4)
    sampler.leave_out([(0, 0)])
    assert sampler.offset == 4
    sampler.advance()
    assert sampler.offset == 8


def test_a_batch_that_is_left_out_counts_where_batches_begin_elsewhere_now() -> None:
    """One batch of 3 samples was done; batches are of 2 samples now, and begin at 3, 5, 7 and 9."""
    before = ElasticSampler(10, batch_size=3)
    before.advance()
    after = ElasticSampler(10, batch_size=2)
    after.load_state_dict({**before.state_dict(), "left_out": [[0, 5]]})
    assert after.steps_left == len(list(after.micro_batches())) == 3


BAD_SAMPLE = """
import torch
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def train_data(self):
        data = super().train_data()
        data.images[700] = float("nan")
        return data
"""


@pytest.mark.slow
def test_a_bad_sample_stops_the_training_or_its_batch_is_left_out(tmp_path: Path) -> None:
    """1,437 samples: 23 steps of an epoch; in the first, sample 700 is in one of them."""
    position = next(
        number
        for number, each in enumerate(ElasticSampler(1437, batch_size=64).micro_batches())
        if 700 in each.indices
    )
    step, own = position + 1, task(tmp_path, BAD_SAMPLE)
    stopped, back = tmp_path / "stopped", tmp_path / "back"
    said = train(stopped, *own, "--epochs", "1", "--snapshot-every", "1", code=1)
    assert f"the loss of step {step} is nan on rank " in said
    assert "training ends here (--on-nan stop)" in said
    newest = Snapshots(stopped / "snapshots").load()
    assert newest is not None
    assert newest.manifest.step == step - 1
    assert all(bool(each.isfinite().all()) for each in newest.state["model"].values())

    said = train(back, *own, "--epochs", "7", "--snapshot-every", "4", "--on-nan", "rollback")
    assert f"the loss of step {step} is nan on rank " in said
    assert "back to the newest snapshot (1 of 5 within an epoch's steps)" in said
    assert said.count("back to the newest snapshot") == 7, "an epoch has a batch with it again"
    after = losses(back)
    assert sorted(after) == list(range(1, 7 * 22 + 1)), "one batch of each epoch is left out"
    before = losses(stopped)
    assert {number: after[number] for number in before} == before
    assert all(map(math.isfinite, after.values()))
    assert json.loads((back / "result.json").read_text())["steps"] == 7 * 22


BROKEN_WEIGHTS = """
import torch
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    num_left = 10
    def loss(self, model, batch):
        self.num_left -= 1
        loss = super().loss(model, batch)
        if self.num_left == 0:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss
"""


@pytest.mark.slow
def test_weights_that_an_update_has_broken_are_in_no_snapshot(tmp_path: Path) -> None:
    """The loss itself is finite, and its gradients are not: only the weights show it, and the next loss."""
    own = task(tmp_path, BROKEN_WEIGHTS)
    same = ["--lr", "0.0003", "--engine", "fsdp", "--snapshot-format", "sharded"]
    said = train(tmp_path, *own, "--epochs", "1", "--snapshot-every", "1", "--on-nan", "rollback", same=same)
    assert "the weights after step 10 are not finite" in said
    assert "back to the newest snapshot (1 of 5 " in said
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 22


BREAKS_WEIGHTS = """
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def train_data(self):
        data = super().train_data()
        data.images[{sample}] = 0.5
        return data
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if (batch[0] == 0.5).flatten(1).all(1).any():
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, 12])
def test_local_sgd_leaves_out_the_batch_that_has_broken_the_weights_of_one_rank(
    step: int, tmp_path: Path
) -> None:
    """The next loss shows it: on that rank, or after step 12, an average, on all."""
    batch = list(ElasticSampler(1437, batch_size=64).micro_batches())[step - 1]
    own = task(tmp_path, BREAKS_WEIGHTS.format(sample=batch.indices[0]))
    how = ["--epochs", "1", "--snapshot-every", "8", "--on-nan", "rollback", "--local-sgd", "4"]
    said = train(tmp_path, *own, *how)
    assert said.count("back to the newest snapshot") == 1
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 23 - 2
