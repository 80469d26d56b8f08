"""Ranks without torchrun: spawned by the module itself, or started by hand with a file to meet at."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from places import TESTS
from test_engines import SAME, losses, train
from test_plan import TWO, TWO_FACTS, build, inventory

from nodekit.deploy.plan.command import refuse_options
from nodekit.inventory.errors import KitError
from nodekit.training.group.initmethod import InitMethod
from nodekit.training.options.arguments import parse

MODULE = [sys.executable, "-u", "-m", "nodekit.training"]
SPAWN = ["--launcher", "spawn", "--nproc-per-node", "2"]

TASK = """
import os, signal, threading, time
from nodekit.training.tasks.digits import Digits

class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)
    def train_data(self):
        data = super().train_data()
        data.not_to_be_pickled = lambda: None
        return data

class Faulty(Digits):
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        if "KILL" not in os.environ:  # on both ranks at once: later, rank 0 is busy with TensorBoard
            raise RuntimeError("the first batch is bad")
        if self.calls == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

class FailsWhileOthersEnd(Digits):
    def loss(self, model, batch):
        if os.environ["RANK"] == "0":
            if "KILL" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the first batch is bad")
        while not any(each.name == "nodekit-deadline" for each in threading.enumerate()):
            time.sleep(0.05)
        raise RuntimeError("this rank is late")
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tasks $HOME; 'x'.py"
    path.write_text(TASK)
    return str(path)


@contextlib.contextmanager
def started(*arguments: object, log: Path, **extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """The module in a process group of its own, as a shell would start it; nobody of it may be left at the end."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*MODULE, *map(str, arguments)], env=environ, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def group_is_over(group: int, *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_goes_on_from_torchruns_snapshot_to_the_identical_curve(tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--snapshot-every", "23"]
    train(tmp_path, *arguments)
    unbroken = losses(tmp_path)
    (newest,) = (tmp_path / "snapshots").glob("g*-s000000046.json")
    newest.unlink()
    said = train_spawned(tmp_path, *arguments, *SAME, log=tmp_path / "log")
    assert "resumed at step 23 " in said
    assert losses(tmp_path) == unbroken


def train_spawned(folder: Path, *arguments: object, log: Path, code: int = 0, **extra: str) -> str:
    with started(*SPAWN, "--output", folder, *arguments, log=log, **extra) as process:
        assert process.wait(150) == code, log.read_text()
        # Multiprocessing's tracker of semaphores may be the last: 5 s are less than a machine may stand still.
        assert group_is_over(process.pid, within_s=60)
    return log.read_text()


@pytest.mark.slow
def test_the_windows_recipe_needs_nothing_that_windows_has_not(tmp_path: Path) -> None:
    """With a file left by an earlier run, which blocks plain torch."""
    meet = tmp_path / "a b" / "meet;$x"
    meet.parent.mkdir()
    meet.write_bytes(os.urandom(300))
    paths = [str(TESTS / "windows"), os.environ.get("PYTHONPATH", "")]
    arguments = ["--init-method", f"file://{meet}", "--backend", "gloo", "--epochs", "1"]
    said = train_spawned(tmp_path, *arguments, log=tmp_path / "log", PYTHONPATH=os.pathsep.join(paths))
    assert "epoch 1 done at step 23/23" in said
    assert "first step" not in said  # it is told by what was taken away: so something was
    assert list(meet.parent.iterdir()) == []
    assert list((tmp_path / "snapshots").glob("g*.json"))


IMPORT_ALL = """
import importlib, os, pkgutil, signal
import nodekit.training as package
for module in pkgutil.walk_packages(package.__path__, "nodekit.training."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name in ("horovod",), error  # an extra that is not installed
"""


@pytest.mark.slow
def test_every_module_is_imported_where_posix_is_not(tmp_path: Path) -> None:
    paths = [str(TESTS / "windows"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGKILL, False, -9)],
    ids=["ctrl-c", "sigterm", "sigkill"],
)
def test_a_stop_saves_and_leaves_no_process_behind(
    number: signal.Signals, to_all: bool, code: int, task: str, tmp_path: Path
) -> None:
    """Nor do the loaders' processes end first, which start as they do elsewhere."""
    log = tmp_path / "log"
    arguments = [
        "--task",
        f"{task}:Slow",
        "--output",
        tmp_path,
        "--snapshot-every",
        "100000",
        "--num-workers",
        "1",
    ]
    with started(*SPAWN, *arguments, log=log) as process:
        wait_for(log, "first step")
        (os.killpg if to_all else os.kill)(process.pid, number)
        assert process.wait(30) == code, log.read_text()
        assert group_is_over(process.pid, within_s=30)
    said, num_steps = log.read_text(), max(losses(tmp_path))
    assert f"stopped at step {num_steps}/" in said
    assert "Traceback" not in said
    assert list((tmp_path / "snapshots").glob(f"g*-s{num_steps:09d}.json"))


@pytest.mark.slow
def test_what_all_ranks_fail_with_is_shown_once(task: str, tmp_path: Path) -> None:
    arguments = ["--task", f"{task}:Faulty"]
    said = train_spawned(tmp_path / "out", *arguments, log=tmp_path / "log", code=1)
    assert said.count("Traceback") == 1
    assert said.count("RuntimeError: the first batch is bad") == 1
    assert said.count("has failed; the others are ended") == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [{}, {"KILL": "1"}], ids=["fails", "is killed"])
def test_a_rank_that_is_ended_since_another_has_failed_does_not_say_it_was_stopped(
    killed: dict[str, str], task: str, tmp_path: Path
) -> None:
    arguments = ["--task", f"{task}:FailsWhileOthersEnd"]
    said = train_spawned(tmp_path / "out", *arguments, log=tmp_path / "log", code=1, **killed)
    assert ("was killed by SIGKILL" if killed else "RuntimeError: the first batch is bad") in said
    assert "stopped" not in said


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_and_is_named(task: str, tmp_path: Path) -> None:
    arguments = ["--task", f"{task}:Faulty", "--init-method", f"tcp://127.0.0.1:{free_port()}"]
    said = train_spawned(tmp_path / "out", *arguments, log=tmp_path / "log", code=1, KILL="1")
    assert "nodekit: rank 1 (process " in said
    assert said.count("was killed by SIGKILL") == 1


@pytest.mark.slow
def test_what_all_ranks_would_refuse_is_said_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = ["--init-method", f"tcp://127.0.0.1:{port}"]
        said = train_spawned(tmp_path / "out", *arguments, log=tmp_path / "log", code=2)
    assert said.count("\n") == 1
    assert f"rank 0 cannot listen on 127.0.0.1 port {port} of this machine: Address already in use" in said


BY_HAND = """
import os, random, sys, time
import torch.distributed as dist, torch.multiprocessing as mp
from nodekit.training.world import World

def rank(rank, barrier, folder):
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for turn in range(21):
        barrier.wait()
        if rank != turn % 3:
            time.sleep(0.1 * random.random())
        with World.from_env(variables, timeout_s=60, init_method=f"file://{folder}/meet") as world:
            assert world.gather((turn, rank)) == [(turn, each) for each in range(3)]
        barrier.wait()
        if rank == 0:
            # Who lets go of torch's store after rank 0 has removed its file makes it anew, empty.
            assert os.listdir(folder) in ([], ["meet"]), os.listdir(folder)
            if turn % 2:  # of a run that was cut off: all have been there, with addresses that are gone
                store = dist.FileStore(f"{folder}/meet", 4)
                for each in range(3):
                    store.set(f"nodekit/rank{each}", "")
                    store.set(f"default_pg/0//0//cpu//0/{each}", "x" * 50)
                del store
            else:
                open(f"{folder}/meet", "wb").write(os.urandom(500))
            open(f"{folder}/meet.beat", "w").write("0123456789abcdef")
            assert len(os.listdir(folder)) == 2

if __name__ == "__main__":
    mp.spawn(rank, (mp.get_context("spawn").Barrier(3), sys.argv[1]), 3)
"""


@pytest.mark.slow
def test_a_file_of_an_earlier_run_never_blocks_ranks_that_are_started_by_hand(tmp_path: Path) -> None:
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    (tmp_path / "meeting").mkdir()
    argv = [sys.executable, "by_hand.py", str(tmp_path / "meeting")]
    done = subprocess.run(
        argv, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("url", "is_windows", "expected"),
    [
        ("env://", False, InitMethod(scheme="env")),
        ("tcp://10.0.0.1:29500", False, InitMethod(scheme="tcp", host="10.0.0.1", port=29500)),
        ("tcp://[::1]:29500", False, InitMethod(scheme="tcp", host="::1", port=29500)),
        ("file:///tmp/meet", False, InitMethod(scheme="file", path="/tmp/meet")),
        ("file:////tmp/meet", False, InitMethod(scheme="file", path="/tmp/meet")),
        ("file:///tmp/a b/$x;'%23", False, InitMethod(scheme="file", path="/tmp/a b/$x;'#")),
        ("file:///C:/meet", False, InitMethod(scheme="file", path="/C:/meet")),
        ("file:///C:/Users/a b/meet", True, InitMethod(scheme="file", path="C:/Users/a b/meet")),
        ("file:///C:\\Users\\me\\meet", True, InitMethod(scheme="file", path="C:\\Users\\me\\meet")),
    ],
)
def test_urls_are_read_on_either_system(url: str, is_windows: bool, expected: InitMethod) -> None:
    assert InitMethod.parse(url, is_windows=is_windows) == expected


@pytest.mark.parametrize(
    ("url", "is_windows", "reason"),
    [
        ("tcp://host", False, "has no host and port"),
        ("tcp://:29500", False, "has no host and port"),
        ("tcp://host:0", False, "has no host and port"),
        ("tcp://host:70000", False, "Port out of range"),
        ("tcp://host:port", False, "Port could not be cast"),
        ("file://meet", False, "names no file by its absolute path, as file:///PATH does"),
        ("file:meet", False, "names no file"),
        ("file:///tmp/", False, "names no file"),
        ("file:///tmp/x?y", False, "which a path has as %3F"),
        ("file:///tmp/meet", True, "as file:///C:/PATH does"),
        ("udp://host:1", False, "is no such URL"),
        ("env://x", False, "is no such URL"),
        ("/tmp/meet", False, "is no such URL"),
    ],
)
def test_a_url_that_names_no_place_is_refused_with_the_forms_that_do(
    url: str, is_windows: bool, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT or file:///PATH was wanted") as refused:
        InitMethod.parse(url, is_windows=is_windows)
    assert reason in str(refused.value)
    if not is_windows:
        with pytest.raises(SystemExit):
            parse(["--init-method", url], {})
        said = capsys.readouterr().err
        assert reason in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        (SPAWN, {"RANK": "0", "WORLD_SIZE": "2"}, "RANK says that kit or torchrun does"),
        (SPAWN, {"WORLD_SIZE": "2"}, "leave the option out"),
        ([*SPAWN, "--engine", "single"], {}, "--engine single is one process, and there are 2 ranks"),
        ([*SPAWN, "--backend", "mpi"], {}, "started by mpirun, not by --launcher spawn"),
        (["--nproc-per-node", "2"], {}, "--nproc-per-node is for --launcher spawn"),
    ],
)
def test_what_does_not_go_with_spawn_is_refused(
    arguments: list[str], environ: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments, environ)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_kit_refuses_it_before_anything_starts(tmp_path: Path) -> None:
    command = ["-m", "nodekit.training", "--launcher", "spawn"]
    planned = build(inventory(tmp_path, TWO), TWO_FACTS, command=command)
    with pytest.raises(KitError, match="kit or torchrun does: leave the option out"):
        refuse_options(planned.nodes[0].argv, tmp_path, world_size=2, env=planned.nodes[0].env, modules={})
