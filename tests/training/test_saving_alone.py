"""A rank that has lost another saves the step that it alone still has, before it ends."""

import errno
import fcntl
import os
import signal
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from test_training import finish, losses, metrics, result, task, torchrun  # noqa: F401
from torch import nn

from nodekit.deploy.agent.hang import hang
from nodekit.training import world
from nodekit.training.group import connections
from nodekit.training.kept import AttemptOver
from nodekit.training.snapshots import commit
from nodekit.training.snapshots.emergency import EmergencySave, LastWholeStep
from nodekit.training.snapshots.fence import Fenced
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import World


@pytest.mark.parametrize("killed", [0, 1])
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
    with pytest.raises(Fenced):
        snapshots.save_if_newest({"x": torch.zeros(1)}, step=8)
    found = Snapshots(tmp_path).load()
    assert found is not None
    assert found.manifest.age == (2, 5)
    allowing = Snapshots(tmp_path, generation=2, allow_nan=True)
    assert allowing.save_if_newest({"x": torch.tensor(torch.nan)}, step=9) is None
    assert "nan" in caplog.text


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


def test_a_rank_that_still_saves_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state takes longer than another rank waits: what is half written is no leftover."""
    monkeypatch.setattr(commit, "RETRY_S", 0.3)
    half = tmp_path / f".tmp-{'0' * 16}"
    second = Snapshots(tmp_path, generation=0)
    with commit.locked(tmp_path) as is_free:
        assert is_free
        half.write_text("half")
        assert second.save_if_newest({"x": torch.ones(1)}, step=3) is None
        assert half.exists()
    assert second.num_failed == 1
    assert second.save_if_newest({"x": torch.ones(1)}, step=3)
    assert not half.exists(), "now nobody writes it"


def test_a_file_server_without_locks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_descriptor: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(commit.time, "sleep", lambda _: pytest.fail("it waits"))
    with commit.locked(tmp_path) as is_free:
        assert is_free


def test_a_state_that_cannot_be_made_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def state() -> object:
        raise KeyError("no such tensor")

    def train(alone: World) -> None:
        with EmergencySave(Snapshots(tmp_path), alone, state) as emergency:
            with emergency.update(3):
                pass
            raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    with World.from_env({}) as alone, pytest.raises(RuntimeError, match="closed by peer"):
        train(alone)
    assert "step 3 was not saved by this rank alone: 'no such tensor'" in caplog.text


@pytest.mark.parametrize("may_stay", [True, False])
def test_a_step_of_a_generation_that_is_over_is_for_the_next_one(tmp_path: Path, may_stay: bool) -> None:
    """A process that does not stay cannot give it to anyone: it may not save it."""

    def train(alone: World) -> None:
        with EmergencySave(Snapshots(tmp_path), alone, lambda: {"x": 1}) as emergency:
            with emergency.update(3):
                pass
            raise Fenced(0, 1, str(tmp_path))

    with World.from_env({}) as alone, pytest.raises(AttemptOver if may_stay else Fenced) as raised:
        train(replace(alone, may_stay=may_stay))
    if isinstance(raised.value, AttemptOver):
        assert (raised.value.kept.state, raised.value.kept.age) == ({"x": 1}, (0, 3))
        assert "its generation is over: waiting with step 3" in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_the_last_whole_step_has_the_buffers_of_its_end() -> None:
    module = nn.BatchNorm1d(2)
    step = LastWholeStep(module)
    assert step.found() is None
    step.is_done(4)
    before = module.running_mean.clone()  # type: ignore[union-attr]
    step.next_begins()
    module(torch.randn(8, 2) + 5)
    assert not torch.equal(before, module.running_mean)  # type: ignore[arg-type]
    assert step.found() == 4
    assert torch.equal(before, module.running_mean)  # type: ignore[arg-type]
    step.update_begins()
    assert step.found() is None, "some weights are of the next step by now"


def test_buffers_that_changed_after_the_step_stay() -> None:
    module = nn.BatchNorm1d(2)
    step = LastWholeStep(module)
    step.next_begins()
    module(torch.randn(8, 2) + 5)
    after = module.running_mean.clone()  # type: ignore[union-attr]
    step.is_done(1)
    step.found()
    assert torch.equal(after, module.running_mean)  # type: ignore[arg-type]


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


def test_kit_knows_the_stage_by_its_name() -> None:
    assert (hang.KEEPING, hang.PAUSING) == (world.KEEPING, world.PAUSING)
    assert hang.WAITING == world.WAITING
    for stage in (world.KEEPING, world.PAUSING, world.WAITING):
        assert len(f"{10**9} {stage}") < 80, "a progress file has no room for more"
