"""A rank that has lost another saves the step that it alone still has, before it ends."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from test_training import finish, losses, metrics, result, task, torchrun  # noqa: F401
from torch import nn

from nodekit.training import rank
from nodekit.training.group import collectives, connections
from nodekit.training.loop import Loop
from nodekit.training.options.arguments import parse
from nodekit.training.process import stages
from nodekit.training.process.kept import AttemptOver, Kept
from nodekit.training.process.stop import Stop
from nodekit.training.snapshots import emergency
from nodekit.training.snapshots.emergency import EmergencySave, LastWholeStep
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.fence import Fence, Fenced
from nodekit.training.snapshots.files.manifest import Manifest
from nodekit.training.snapshots.sharded import ShardedSnapshots
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.steps import step_sums
from nodekit.training.tasks.digits import Digits
from nodekit.training.world import World


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.slow
def test_no_step_is_lost_with_a_killed_rank(tmp_path: Path, task: str, killed: int) -> None:  # noqa: F811
    """Rank 0 writes the snapshots otherwise. The means of its batch norm are lost with it, so then there is none."""
    arguments = ["--task", task, "--batch-size", 16, "--micro-batch", 5, "--epochs", 3, "--snapshot-every", 6]
    extra = {"SEEN": tmp_path / "seen"} | ({"PLAIN": 1} if killed == 0 else {})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with torchrun(2, *arguments, "--output", whole, **extra) as process:
        finish(process)
    kill_at = 25 + 2 * 7 + 1  # two micro-batches a step, one in the short last step of epoch 1
    with torchrun(
        2, *arguments, "--output", broken, **extra, KILL_AT=kill_at, KILL_RANK=killed, restarts=1
    ) as process:
        assert "resumed at step 20 (epoch 2, 112 of 200 samples done) from" in finish(process)
    assert metrics(broken) == metrics(whole)
    assert result(broken)["weights_sha256"] == result(whole)["weights_sha256"]


def test_only_the_newest_step_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = Snapshots(tmp_path, generation=1)
    assert snapshots.save_if_newest({"x": torch.ones(1)}, step=7)
    assert snapshots.save_if_newest({"x": torch.zeros(1)}, step=7) is None, "another rank has saved it"
    assert snapshots.save_if_newest({"x": torch.zeros(1)}, step=6) is None
    assert Snapshots(tmp_path, generation=2).save_if_newest({"x": torch.zeros(1)}, step=5), "done again since"
    assert snapshots.save_if_newest({"x": torch.zeros(1)}, step=8) is None, (
        "the next generation has saved since"
    )
    found = Snapshots(tmp_path).load()
    assert found is not None
    assert found.manifest.age == (2, 5)
    snapshots.entered = 3
    snapshots.save_async({"x": torch.zeros(1)}, step=9)
    with pytest.raises(Fenced):
        snapshots.wait()  # it is of its own generation yet
    assert snapshots.save_if_newest({"x": torch.ones(1)}, step=8)
    found = Snapshots(tmp_path).load()
    assert found is not None
    assert found.manifest.age == (3, 8), (
        "told of the next generation, what is in memory is saved as of that one"
    )
    allowing = Snapshots(tmp_path, generation=3, allow_nan=True)
    assert allowing.save_if_newest({"x": torch.tensor(torch.nan)}, step=9) is None
    assert "nan" in caplog.text


def test_the_last_step_of_a_fenced_generation_is_saved_where_the_next_one_has_none(tmp_path: Path) -> None:
    """It may wait for nodes for long, while the step is in memory alone."""
    snapshots = Snapshots(tmp_path, generation=1)
    snapshots.save({"x": torch.zeros(1)}, step=2)
    Fence(tmp_path).raise_to(2)
    with pytest.raises(Fenced):
        snapshots.save({"x": torch.zeros(1)}, step=3)
    (begun := tmp_path / f".tmp-{'0' * 16}").touch()
    assert snapshots.save_if_newest({"x": torch.ones(1)}, step=8)
    assert begun.exists(), "it may be what the next one saves at this moment"
    with pytest.raises(Fenced):
        snapshots.save({"x": torch.zeros(1)}, step=9)
    found = Snapshots(tmp_path).load()
    assert found is not None
    assert (found.manifest.age, Fence(tmp_path).read()) == ((1, 8), 2)
    Snapshots(tmp_path, generation=2).save({"x": torch.zeros(1)}, step=4)
    found = Snapshots(tmp_path).load()
    assert found is not None
    assert found.manifest.age == (2, 4), "what the next one saves counts for more"


def test_a_rank_whose_disk_is_full_does_not_take_its_step_for_saved(tmp_path: Path, alone: World) -> None:
    """It may be in this memory alone: who asks waits longer for the others then."""
    snapshots = Snapshots(tmp_path / "snapshots", generation=0)
    assert emergency.save_alone(snapshots, alone, lambda: state(4), step=4)
    shutil.rmtree(snapshots.folder)
    snapshots.folder.write_text("in its place")
    assert not emergency.save_alone(snapshots, alone, lambda: state(5), step=5)


def test_two_ranks_that_save_at_once_leave_one_snapshot(tmp_path: Path) -> None:
    done: list[object] = []
    start = threading.Barrier(4)

    def save(number: int) -> None:
        start.wait()
        done.append(
            Snapshots(tmp_path, generation=0).save_if_newest({"x": torch.full((1000,), number)}, step=3)
        )

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(each is not None for each in done) == 1
    assert len([*tmp_path.glob("*.json")]) == len([*tmp_path.glob("*.pt")]) == 1


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_process_that_still_saves_is_left_alone(
    is_alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large state takes longer than another process waits: what is half written is no leftover."""
    monkeypatch.setattr(commit, "RETRY_S", 0.3)
    half = tmp_path / f".tmp-{'0' * 16}"
    second = Snapshots(tmp_path, generation=0)
    save = second.save_if_newest if is_alone else second.save
    first = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        half.write_text("half")
        assert save({"x": torch.ones(1)}, step=3) is None
        assert half.exists()
    finally:
        os.close(first)
    assert second.num_failed == 1
    assert "another save is under way there" in caplog.text
    assert save({"x": torch.ones(1)}, step=3)
    assert not half.exists(), "now nobody writes it"


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some file servers."""

    def flock(_descriptor: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_a_file_server_without_locks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit.time, "sleep", lambda _: pytest.fail("it waits"))
    with commit.locked(tmp_path):
        pass


class SlowDisk:
    """A save of these snapshots goes on until it is let end."""

    def __init__(self, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_writing, self.goes_on = threading.Event(), threading.Event()
        write = snapshots._write

        def slow(*arguments: Any) -> Any:
            self.is_writing.set()
            assert self.goes_on.wait(60)
            return write(*arguments)

        monkeypatch.setattr(snapshots, "_write", slow)

    @classmethod
    def being_written(cls, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> "SlowDisk":
        """The snapshot of step 3 is on its way."""
        disk = cls(snapshots, monkeypatch)
        snapshots.save_async(state(3), step=3)
        assert disk.is_writing.wait(60)
        return disk


@pytest.fixture
def alone() -> Iterator[World]:
    with World.from_env({}) as world:
        yield world


def state(number: int) -> dict[str, Any]:
    return {"model": {"x": torch.full((9,), number)}, "optimizer": {"state": {}}}


def sent_by_another(folder: Path) -> tuple[Manifest, bytes]:
    manifest = Snapshots(folder, generation=0).save(state(4), step=4)
    assert manifest
    return manifest, (folder / manifest.payload).read_bytes()


def saves_alone(later: Snapshots, other: Path) -> None:
    assert later.save_if_newest(state(4), step=4) is None


def receives(later: Snapshots, other: Path) -> None:
    manifest, payload = sent_by_another(other)
    with later.receiving(manifest) as file:
        file.write(payload)


def adopts(later: Snapshots, other: Path) -> None:
    later.adopt(sent_by_another(other)[0])


@pytest.fixture(params=["locks", "no locks"])
def locks(request: pytest.FixtureRequest) -> None:
    """Whether the file system has some."""
    if request.param == "no locks":
        request.getfixturevalue("without_locks")


@pytest.fixture(params=["whole", "sharded"])
def earlier(request: pytest.FixtureRequest, alone: World, tmp_path: Path) -> Snapshots:
    """Those of an attempt that is over."""
    whole = Snapshots(tmp_path / "snapshots", generation=0)
    return whole if request.param == "whole" else ShardedSnapshots(whole, alone)


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("then", [saves_alone, receives, adopts])
def test_an_attempts_last_save_is_not_disturbed_by_the_next_attempt(
    then: Callable[[Snapshots, Path], None],
    earlier: Snapshots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process goes on with other `Snapshots` in the same folder while a thread of it still writes."""
    monkeypatch.setattr(commit, "RETRY_S", 0.3)
    disk = SlowDisk.being_written(earlier, monkeypatch)
    there = set(earlier.folder.rglob("*"))
    assert there
    later = Snapshots(earlier.folder, generation=0)
    then(later, tmp_path / "theirs")
    assert set(earlier.folder.rglob("*")) == there
    assert "another save is under way there" in caplog.text
    disk.goes_on.set()
    earlier.wait()
    assert earlier.num_failed == 0
    assert later.save(state(5), step=5), "now it is over"
    assert [each.step for each in later.manifests()] == [5, 3]
    assert len(list(earlier.folder.iterdir())) == 4


def test_what_others_have_sent_is_on_the_disk_before_it_is_committed(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what an earlier start has received, and a power failure could take: each file, and each name."""
    theirs = ShardedSnapshots(Snapshots(tmp_path / "theirs", generation=0), alone)
    manifest = theirs.save(state(4), step=4)
    assert manifest
    ours = Snapshots(tmp_path / "ours", generation=0)
    shutil.copytree(theirs.folder / manifest.payload, ours.folder / manifest.payload)
    synced: set[Path] = set()
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        if target.name == manifest.name:
            payload = ours.folder / manifest.payload
            assert {*payload.iterdir(), payload, ours.folder} <= synced
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    ours.adopt(manifest)
    assert ours.manifests() == [manifest]


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_attempts_first_save_waits_for_the_last_one_of_the_attempt_before(
    is_sharded: bool, earlier: Snapshots, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for one of its own: it is of this process, and its end is known."""
    monkeypatch.setattr(commit, "RETRY_S", 0.1)
    disk = SlowDisk.being_written(earlier, monkeypatch)
    there = set(earlier.folder.rglob("*"))
    later = Snapshots(earlier.folder, generation=0)
    if is_sharded:
        later = ShardedSnapshots(later, alone)
    later.save_async(state(4), step=4)
    assert not later.wait(0.5)
    assert set(earlier.folder.rglob("*")) == there
    disk.goes_on.set()
    earlier.wait()
    later.wait()
    assert (earlier.num_failed, later.num_failed) == (0, 0)
    assert [each.step for each in later.manifests()] == [4, 3]
    assert len(list(earlier.folder.iterdir())) == 4


LOST = RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")


class Script:
    """A training loop of a user's: what an `EmergencySave` saves when it ends with an error."""

    def __init__(self, world: World, folder: Path, *, step: int = 0) -> None:
        self.step = step
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.emergency = EmergencySave(
            Snapshots(folder), world, self.net.state_dict, lambda: self.step, self.optimizer, module=self.net
        )

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.net(torch.randn(8, 2) + 5).sum()
        return loss

    def update(self) -> None:
        self.forward().backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.update()
            self.step += 1

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.clone() for name, each in self.net.state_dict().items()}


def ended_by(error: Exception, train: Callable[[World], object]) -> None:
    """Have a script do this, and then end with that error."""

    def script() -> None:
        with World.from_env({}) as alone:
            train(alone)
            raise error

    with pytest.raises(type(error)) as raised:
        script()
    assert raised.value is error


def loaded(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    found = Snapshots(folder).load()
    assert found is not None
    return found.manifest.step, found.state


def test_a_script_that_loses_a_rank_saves_its_last_step(tmp_path: Path) -> None:
    """As it was when the step ended: a forward pass has changed the batch norm's means since."""
    before = {}

    def train(alone: World) -> None:
        script = Script(alone, tmp_path, step=4)
        script.train(3)
        before.update(script.weights)
        script.forward()

    ended_by(LOST, train)
    step, state = loaded(tmp_path)
    assert step == 7
    assert all(torch.equal(before[name], state[name]) for name in before)


def test_the_step_that_was_loaded_is_saved_before_there_is_another(tmp_path: Path) -> None:
    ended_by(LOST, lambda alone: Script(alone, tmp_path, step=4))
    assert loaded(tmp_path)[0] == 4


def test_a_state_between_two_steps_is_not_saved(tmp_path: Path) -> None:
    """The weights are updated, and the script has not come to what else belongs to the step."""

    def train(alone: World) -> None:
        script = Script(alone, tmp_path)
        script.train(3)
        script.update()

    ended_by(LOST, train)
    assert not list(tmp_path.iterdir())


def test_nor_is_one_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """A script that counts micro-batches has a part of the next update's gradients."""

    def train(alone: World) -> None:
        script = Script(alone, tmp_path)
        for _ in range(3):
            script.forward().backward()
            script.step += 1
            script.train(1)
        script.forward().backward()
        script.step += 1

    ended_by(LOST, train)
    assert not list(tmp_path.iterdir())


def test_a_script_whose_steps_are_never_counted_right_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        for step in range(30):
            script.update()
            assert not caplog.text or step >= 20, "a gradient scaler may leave an update out"
            script.emergency.stops(False)
            script.step += 1
    assert caplog.text.count("EmergencySave's `step` is 19, and after the last update it should be 20.") == 1


@pytest.mark.parametrize("accumulated", [2, 4])
def test_a_script_that_counts_micro_batches_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accumulated: int
) -> None:
    """Else it would lose what it has done since its newest snapshot at most losses, and not know why."""
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        for number in range(1, 100):
            script.forward().backward()
            if number % accumulated == 0:
                script.optimizer.step()
            script.step += 1
            script.emergency.stops(False)
    assert caplog.text.count("Count an update after it, by one") == 1


def test_nothing_is_saved_while_an_optimizer_is_at_work(tmp_path: Path) -> None:
    """Another thread may ask then."""
    found: list[int | None] = []
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        script.train(2)
        for each in script.net.parameters():
            each.grad = torch.zeros_like(each)
        script.optimizer.step(lambda: found.append(script.emergency._found()))
        script.step += 1
        found.append(script.emergency._found())
    assert found == [None, 3]


def test_an_error_of_the_scripts_own_saves_nothing(tmp_path: Path) -> None:
    shapes = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    ended_by(shapes, lambda alone: Script(alone, tmp_path).train(3))
    assert not list(tmp_path.iterdir())


def test_the_newest_of_several_counts(tmp_path: Path) -> None:
    """A script that begins its loop again, from an earlier snapshot, forgets what it did before."""

    def train(alone: World) -> None:
        Script(alone, tmp_path, step=4).train(5)
        Script(alone, tmp_path, step=4).train(1)

    ended_by(LOST, train)
    assert loaded(tmp_path)[0] == 5


def test_what_is_closed_saves_nothing(tmp_path: Path) -> None:
    """The script has other weights in its model by now."""

    def train(alone: World) -> None:
        script = Script(alone, tmp_path)
        script.train(3)
        script.emergency.close()

    ended_by(LOST, train)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ends_by", ["the error", "the end of the world", "another one"])
def test_an_optimizer_that_outlives_an_attempt_is_left_alone(tmp_path: Path, ends_by: str) -> None:
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        script.train(1)
        assert script.optimizer._optimizer_step_pre_hooks
        if ends_by == "the error":
            assert alone.kept_on(LOST)
        if ends_by == "another one":
            Script(alone, tmp_path)
        assert bool(script.optimizer._optimizer_step_pre_hooks) == (ends_by == "the end of the world")
    assert not script.optimizer._optimizer_step_pre_hooks
    assert not script.optimizer._optimizer_step_post_hooks
    assert not alone.emergency, "nor does the world keep the model"


def test_what_was_kept_of_the_attempt_before_is_let_go_once_it_is_loaded(tmp_path: Path) -> None:
    kept = Kept({"x": 1}, (0, 3), lambda: True)
    with World.from_env({}) as alone:
        Script(replace(alone, kept=kept), tmp_path, step=3)
        assert not kept.is_held, "it has the size of model and optimizer"


def test_the_optimizer_within_accelerates_is_watched(tmp_path: Path) -> None:
    """It has no hooks of its own."""
    from accelerate import Accelerator  # slow to import
    from accelerate.state import AcceleratorState

    net = nn.Linear(2, 1)
    try:
        with World.from_env({}) as alone:
            optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(net.parameters(), lr=0.1))
            emergency = EmergencySave(Snapshots(tmp_path), alone, net.state_dict, lambda: 3, optimizer)
            net(torch.ones(1, 2)).sum().backward()
            assert emergency._found() == 3
            optimizer.step()
            assert emergency._found() is None
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_an_optimizer_without_torchs_hooks_is_refused_by_its_name(tmp_path: Path) -> None:
    class Plain:
        def step(self) -> None:
            pass

    optimizer: Any = Plain()
    with World.from_env({}) as alone:
        with pytest.raises(
            TypeError, match="when Plain updates the weights: it has no register_step_pre_hook"
        ):
            EmergencySave(
                Snapshots(tmp_path), alone, dict, lambda: 0, torch.optim.SGD([torch.ones(1)]), optimizer
            )
        assert not alone.emergency


def fails() -> Any:
    raise KeyError("no such tensor")


@pytest.mark.parametrize(("state", "step"), [(fails, lambda: 3), (dict, fails)])
def test_a_state_that_cannot_be_made_hides_no_error(
    state: Callable[[], Any], step: Callable[[], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    counts = [lambda: 3]

    def train(alone: World) -> None:
        EmergencySave(Snapshots(tmp_path), alone, state, lambda: counts[0](), optimizer)
        counts[0] = step

    ended_by(LOST, train)
    assert "the last step is not kept: 'no such tensor'" in caplog.text
    assert not dist.is_initialized()


def test_a_signal_does_not_cut_off_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun sends one to the ranks that are left. It acts when all is saved."""
    saved_by_then: list[int] = []
    write = Snapshots._write

    def interrupted(self: Snapshots, *arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(self, *arguments)

    monkeypatch.setattr(Snapshots, "_write", interrupted)
    before = signal.signal(signal.SIGTERM, lambda *_: saved_by_then.append(loaded(tmp_path)[0]))
    try:
        ended_by(LOST, lambda alone: Script(alone, tmp_path, step=4))
        assert saved_by_then == [4]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_saves_without_waiting_for_signals(tmp_path: Path) -> None:
    """Only the main thread can have them put off."""
    thread = threading.Thread(target=ended_by, args=(LOST, lambda alone: Script(alone, tmp_path, step=4)))
    thread.start()
    thread.join()
    assert loaded(tmp_path)[0] == 4


def test_a_node_that_comes_in_has_the_step_kept_as_soon_as_it_is_counted(tmp_path: Path) -> None:
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        script.train(2)
        script.update()
        script.emergency._ask_to_pause()
        assert not script.emergency.stops(False), "a gradient scaler may have left this one out"
        script.step += 1
        with pytest.raises(AttemptOver) as over:
            script.emergency.stops(False)
    assert (over.value.kept.age, over.value.kept.has_paused) == ((0, 3), True)


def test_a_script_that_never_counts_right_stops_for_a_node_that_comes_in(tmp_path: Path) -> None:
    """With a snapshot of its own, in place of being killed for not answering."""
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        script.emergency._ask_to_pause()
        stops = []
        for _ in range(4):
            script.update()
            stops.append(script.emergency.stops(False))
            script.step += 1
    assert stops == [False, False, False, True]


def test_what_is_closed_does_not_take_the_word_that_a_node_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(emergency, "stop_to_pause", lambda: stopped.append(True))
    with World.from_env({}) as alone:
        script = Script(alone, tmp_path)
        script.emergency.close()
        script.emergency._ask_to_pause()
        assert stopped == [True]


@pytest.mark.parametrize("may_stay", [True, False])
def test_a_step_of_a_generation_that_is_over_is_for_the_next_one(tmp_path: Path, may_stay: bool) -> None:
    """A process that does not stay cannot give it to anyone: it may not save it."""
    optimizer = torch.optim.SGD([torch.ones(1)])
    with World.from_env({}) as alone:
        world = replace(alone, may_stay=may_stay)
        EmergencySave(Snapshots(tmp_path), world, lambda: {"x": 1}, lambda: 3, optimizer)
        kept = world.kept_on(Fenced(0, 1, str(tmp_path)))
    assert (kept and (kept.state, kept.age)) == (({"x": 1}, (0, 3)) if may_stay else None)
    assert not list(tmp_path.iterdir())


def test_the_last_whole_step_has_the_buffers_of_its_end() -> None:
    module = nn.BatchNorm1d(2)
    step = LastWholeStep(module)
    assert step.found() is None
    step.is_done(4, {})
    before = module.running_mean.clone()  # type: ignore[union-attr]
    step.next_begins()
    module(torch.randn(8, 2) + 5)
    assert not torch.equal(before, module.running_mean)  # type: ignore[arg-type]
    assert step.found() == 4
    assert torch.equal(before, module.running_mean)  # type: ignore[arg-type]
    step.update_begins()
    assert step.found() is None, "some weights are of the next step by now"


class ReplacesBuffers(nn.Module):
    """Its forward pass assigns, adds and grows buffers."""

    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + x
        self.seen = torch.cat([self.seen, x])
        self.register_buffer(f"step{len(self.seen)}", x)


def test_buffers_that_a_forward_pass_replaces_are_those_of_the_step_too() -> None:
    module = ReplacesBuffers()
    step = LastWholeStep(module)
    for number in range(3):
        module(torch.full((2,), number + 1.0))
        step.is_done(number, {})
        before = {name: each.clone() for name, each in module.state_dict().items()}
        step.next_begins()
    module(torch.ones(2))
    assert step.found() == 2
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_buffers_that_ranks_get_are_those_that_the_last_forward_pass_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, sent = nn.BatchNorm1d(2), []
    setattr(module, collectives.NOT_SENT, ["num_batches_tracked"])
    monkeypatch.setattr(
        emergency, "broadcast_from_first", lambda tensors, _: sent.extend(each.tolist() for each in tensors)
    )
    optimizer = torch.optim.SGD(module.parameters())
    with World.from_env({}) as alone:
        world = replace(alone, world_size=2)
        EmergencySave(Snapshots(tmp_path), world, dict, lambda: 3, optimizer, module=module)
        module.running_mean = module.running_mean + 7  # type: ignore[operator]
        optimizer.step()
    assert sent == [[7, 7], [1, 1]], "and none that is each rank's own"


def test_257_ranks_that_have_counted_a_step_are_257_whatever_type_a_script_makes_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bfloat16 they were 256: no node could come in, and at the fourth step all ranks stopped."""
    num_ranks, module = 257, nn.Linear(1, 1)
    monkeypatch.setattr(World, "start_sum", lambda _, own: lambda: (own * num_ranks).tolist())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with World.from_env({}) as alone:
            world = replace(alone, world_size=num_ranks)
            optimizer = torch.optim.SGD(module.parameters())
            saver = EmergencySave(Snapshots(tmp_path), world, dict, lambda: 3, optimizer)
            saver._is_asked_to_pause = True
            with pytest.raises(AttemptOver):
                saver.stops(False)
    finally:
        torch.set_default_dtype(before)


def test_buffers_that_changed_after_the_step_stay() -> None:
    module = nn.BatchNorm1d(2)
    step = LastWholeStep(module)
    step.next_begins()
    module(torch.randn(8, 2) + 5)
    after = module.running_mean.clone()  # type: ignore[union-attr]
    step.is_done(1, {})
    step.found()
    assert torch.equal(after, module.running_mean)  # type: ignore[arg-type]


class Asked(Digits):
    """Asks, in each forward pass, which step would be kept if another rank were lost now."""

    def __init__(self, loops: list[Loop]) -> None:
        super().__init__()
        self.loops = loops
        self.found: list[tuple[int, int | None]] = []

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        (loop,) = self.loops
        kept = loop.keep()
        self.found.append((loop.step, kept.age[1] if kept else None))
        return super().loss(model, batch)


@pytest.mark.parametrize("may_stay", [False, True])
def test_each_step_is_kept_over_gloo_on_gpus_too(
    may_stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the sums of a step could be read one later; this process alone has others to lose only if it may stay."""
    monkeypatch.setattr(step_sums, "LATE_ON", {"cpu"})
    loops: list[Loop] = []
    asked, options = Asked(loops), parse(["--epochs", "1"], {})
    with World.from_env({}) as alone, Stop(20) as stop:
        here = replace(alone, may_stay=may_stay)
        assert rank._run_loops(loops, options, here, asked, tmp_path, stop)
    wanted = [(step, step or None) for step in range(loops[0].total_steps)]
    assert (asked.found == wanted) == may_stay


class OfOnesOwn(Digits):
    """Its model has buffers and parameters that are each rank's own."""

    def model(self) -> nn.Module:
        module = super().model()
        module.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        setattr(module, collectives.NOT_SENT, ["own.weight"])
        return module


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_a_model_keeps_apart_stays_apart_on_nccl_too(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There whole numbers are kept apart as well: an aborted collective would leave garbage in them."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    loops: list[Loop] = []
    with World.from_env({}) as alone, Stop(20) as stop:
        here = replace(alone, may_stay=True, backend=backend)
        assert rank._run_loops(loops, parse(["--epochs", "1"], {}), here, OfOnesOwn(), tmp_path, stop)
    apart = getattr(loops[0].module, collectives.NOT_SENT)
    assert apart == ["counts"] * (backend == "nccl") + ["own.weight"]


class Unmeasurable(Digits):
    """Its evaluation fails, on all ranks."""

    def targets(self, batch: Any) -> torch.Tensor:
        raise KeyError("f1")


def test_an_evaluation_that_fails_on_all_ranks_costs_no_step(tmp_path: Path) -> None:
    options = parse(["--epochs", "2", "--batch-size", "64", "--snapshot-every", "1000"], {})
    for _ in range(2):  # again, from that step
        loops: list[Loop] = []
        with World.from_env({}) as alone, Stop(20) as stop, pytest.raises(KeyError, match="f1"):
            rank._run_loops(loops, options, alone, Unmeasurable(), tmp_path, stop)
        assert loops[0].step == 23
    with World.from_env({}) as alone, Stop(20) as stop:
        result = rank._run_loops([], options, alone, Digits(), tmp_path, stop)
    assert result
    assert (result["resumed_at_step"], result["steps"]) == (23, 46)


@pytest.mark.parametrize("made_later", [False, True])
def test_a_rank_in_a_collective_is_woken_by_leaving_the_others(made_later: bool) -> None:
    """The other rank never comes, as one whose cable is cut; this process's other sockets stay."""

    def join(rank: int, store: dist.TCPStore) -> dist.ProcessGroup | None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        return dist.new_group() if made_later else None

    port = free_port()
    reader, writer = socket.socketpair()
    silent = os.fork()
    if silent == 0:
        join(1, dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20)))
        signal.pause()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=20))

        connections.remember()
        group = join(0, store)
        threading.Timer(0.3, connections.shut_down).start()
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        assert connections.is_lost_rank(error.value)
        writer.send(b"x")
        assert reader.recv(1) == b"x"
        dist.destroy_process_group()
    finally:
        reader.close()
        writer.close()
        os.kill(silent, signal.SIGKILL)
        os.waitpid(silent, 0)


def test_an_error_of_ones_own_is_no_lost_rank() -> None:
    gone = "Horovod has been shut down. This was caused by an exception on one of the ranks"
    assert connections.is_lost_rank(RuntimeError(gone)), "what waited when its threads had ended"
    assert not connections.is_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not connections.is_lost_rank(ConnectionError("Connection refused"))
    assert not connections.is_lost_rank(None)
    # An error with several arguments, from a data loader's worker, comes as a RuntimeError, with its traceback.
    assert not connections.is_lost_rank(RuntimeError("host data, port 80: [Errno 111] Connection refused"))
    assert not connections.is_lost_rank(RuntimeError("/data/igloos/0.png: Broken pipe"))


def test_a_progress_file_has_room_for_a_stage() -> None:
    for stage in (stages.KEEPING, stages.PAUSING, stages.WAITING):
        assert len(f"{10**9} {stage}") < 80, "a progress file has no room for more"
