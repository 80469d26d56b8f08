"""Who a rank is, from the environment, and the group it forms with the others."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agents import until

from nodekit.training import LossWatch, Stop, World
from nodekit.training import rank as rank_module
from nodekit.training import world as world_module
from nodekit.training.group import connections, nccl, recorder
from nodekit.training.options.arguments import parse
from nodekit.training.process.stages import KEEPING

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip


def test_torchruns_environment_is_read() -> None:
    world = World.from_env(TORCHRUN)
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (5, 1, 8, 4)
    assert (world.node_rank, world.run_id, world.generation) == (1, None, None)
    assert not world.is_main
    assert not world.is_first_on_node


def test_kits_environment_is_read() -> None:
    kits = {
        "NODEKIT_RUN_ID": "lab-7", "NODEKIT_GENERATION": "3", "NODEKIT_SNAPSHOT_DIR": "/a b/s",
        "NODEKIT_OUTPUT_DIR": "/a b/o", "NODEKIT_PROGRESS_FILE": "/a b/p",
    }  # fmt: skip
    world = World.from_env({**TORCHRUN, **kits})
    assert (world.run_id, world.generation) == ("lab-7", 3)
    assert (world.snapshot_dir, world.output_dir, world.progress_file) == (
        Path("/a b/s"),
        Path("/a b/o"),
        Path("/a b/p"),
    )


@pytest.mark.parametrize(
    ("told", "name", "wanted"),
    [
        ({"GROUP_RANK": None}, "node_rank", 1),  # rank 5, of four on each node
        ({"GROUP_RANK": None, "LOCAL_WORLD_SIZE": None, "LOCAL_SIZE": "2"}, "node_rank", 2),
        ({"GROUP_RANK": None, "LOCAL_WORLD_SIZE": None}, "node_rank", 5),
        ({"GROUP_RANK": None, "CROSS_RANK": "3"}, "node_rank", 3),
        ({"TORCHELASTIC_RUN_ID": "mine"}, "run_id", "mine"),
        ({"TORCHELASTIC_RUN_ID": "lab-7.0", "NODEKIT_RUN_ID": "lab-7"}, "run_id", "lab-7"),
        ({}, "num_restarts", 0),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "num_restarts", 3),
        ({"TORCHELASTIC_RESTART_COUNT": "3", "NODEKIT_GENERATION": "2"}, "num_restarts", 5),
        ({}, "is_by_kit", False),
        ({"NODEKIT_GENERATION": "0"}, "is_by_kit", True),
        ({}, "snapshot_is_shared", False),
        ({"NODEKIT_SNAPSHOT_SHARED": "0"}, "snapshot_is_shared", False),
        ({"NODEKIT_SNAPSHOT_SHARED": "1"}, "snapshot_is_shared", True),
        ({"NODEKIT_SNAPSHOT_EXPECTED": "step 6"}, "expected_snapshot", "step 6"),
        ({"NODEKIT_ON_NAN": ""}, "on_nan", "stop"),
        ({"NODEKIT_ON_NAN": "rollback"}, "on_nan", "rollback"),
        ({}, "standby_world_size", None),
        ({"NODEKIT_STANDBY": "0"}, "standby_world_size", 0),
        ({"NODEKIT_STANDBY": "8"}, "standby_world_size", 8),
    ],
)
def test_what_launchers_tell_or_leave_out_is_read(
    told: dict[str, str | None], name: str, wanted: object
) -> None:
    environ = {key: value for key, value in {**TORCHRUN, **told}.items() if value is not None}
    assert getattr(World.from_env(environ), name) == wanted


def test_where_ranks_meet_is_told_to_people(tmp_path: Path) -> None:
    assert World.from_env({}).meets_at == ""
    assert World.from_env(TORCHRUN).meets_at == "127.0.0.1:1"
    assert World.from_env(TORCHRUN, init_method="tcp://gpu1:29500").meets_at == "gpu1:29500"
    assert World.from_env(TORCHRUN, init_method=f"file://{tmp_path}/meet").meets_at == f"{tmp_path}/meet"


def test_the_file_where_ranks_have_met_is_removed_at_the_end(tmp_path: Path) -> None:
    """The next run, which is given the same, would take it for its own."""
    with World.from_env({"RANK": "0", "WORLD_SIZE": "1"}, init_method=f"file://{tmp_path}/meet"):
        assert (tmp_path / "meet").exists()
        (tmp_path / "meet.beat").write_text("of a rank 0 that was killed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("backend", "may_stay", "aborts", "keeps"),
    [
        ("gloo", False, False, True),
        ("gloo", True, False, True),
        ("nccl", False, False, False),
        ("nccl", True, True, True),
        ("mpi", True, False, False),
    ],
)
def test_what_a_rank_can_do_that_has_lost_another(
    backend: str, may_stay: bool, aborts: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    monkeypatch.setattr(connections, "shut_down", lambda: left.append("gloo"))
    monkeypatch.setattr(nccl, "leave", lambda: left.append("nccl"))
    world = replace(World.from_env({}), backend=backend, may_stay=may_stay)
    assert (world.aborts_nccl, world.keeps_steps) == (aborts, keeps)
    world.leave_others()
    # A script may have groups on gloo beside NCCL's.
    assert left == ["nccl"] * aborts + ["gloo"] * (backend == "gloo" or aborts)


def told_by_an_agent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[World, dict[str, Callable[[], object]]]:
    """A world, and what it has the agent's messages call, by their kind."""
    handlers: dict[str, Callable[[], object]] = {}
    agent: Any = SimpleNamespace(when=handlers.__setitem__, has_left=threading.Event())
    monkeypatch.setattr(world_module, "messages_from", lambda _: agent)
    return replace(World.from_env({}), agent_pipe=folder, progress_file=folder / "rank0"), handlers


@pytest.mark.parametrize(("step", "is_deaf"), [(3, True), (3, False), (None, True)])
def test_a_rank_that_has_lost_another_says_that_it_keeps_its_step_and_ends_if_it_hears_nothing(
    step: int | None, is_deaf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    world, handlers = told_by_an_agent(tmp_path, monkeypatch)
    monkeypatch.setattr(connections, "is_deaf", lambda _: is_deaf)
    monkeypatch.setattr(connections, "shut_down", lambda: done.append("left"))
    monkeypatch.setattr(os, "_exit", done.append)
    world.keeps_when_lost(lambda: step, lambda: done.append("saved"))
    handlers["lost"]()
    until(lambda: not [each for each in threading.enumerate() if each.name == "nodekit-guard"])
    assert (tmp_path / "rank0").exists() == (step is not None)
    if step is not None:
        assert (tmp_path / "rank0").read_text().rstrip() == f"3 {KEEPING}"
    assert "left" in done
    assert [each for each in done if each != "left"] == ["saved", 1] * (step is not None and is_deaf)


@pytest.mark.parametrize("is_stalled", [True, False])
def test_a_rank_that_is_to_stop_leaves_the_others_where_it_waits_in_vain_for_one(
    is_stalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    world, handlers = told_by_an_agent(tmp_path, monkeypatch)
    monkeypatch.setattr(connections, "is_stalled", lambda _: is_stalled)
    monkeypatch.setattr(connections, "is_deaf", lambda _: False)
    monkeypatch.setattr(connections, "shut_down", lambda: done.append("left"))
    world.keeps_when_lost(lambda: 3, lambda: done.append("saved"))
    handlers["stalled"]()
    until(lambda: not [each for each in threading.enumerate() if each.name == "nodekit-guard"])
    assert done == ["left"] * is_stalled
    assert (tmp_path / "rank0").exists() == is_stalled


@pytest.mark.parametrize(("backend", "sent_on"), [("nccl", "meta"), ("gloo", "cpu")])
def test_a_loss_on_the_cpu_is_watched_whatever_the_backend_sends(
    backend: str, sent_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``watch.look(loss.cpu(), …)``; torch's device without values stands in for a GPU."""
    sent: list[str] = []

    def start(values: torch.Tensor, _: int) -> Callable[[], list[float]]:
        sent.append(values.device.type)
        return lambda: [0.0]

    monkeypatch.setattr(world_module, "start_sum", start)
    watch = LossWatch(replace(World.from_env({}), backend=backend, device=torch.device("meta")))
    watch.look(torch.tensor(0.5), step=1)
    watch.wait()
    assert sent == [sent_on]


def test_a_rank_that_can_start_no_thread_leaves_the_others_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for the lost one to the end of its timeout."""
    done: list[str] = []
    handlers: dict[str, Callable[[], object]] = {}
    agent: Any = SimpleNamespace(when=handlers.__setitem__, has_left=threading.Event())
    monkeypatch.setattr(world_module, "messages_from", lambda _: agent)
    monkeypatch.setattr(connections, "shut_down", lambda: done.append("left"))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    replace(World.from_env({}), agent_pipe=tmp_path).keeps_when_lost(lambda: 3, lambda: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError):
        handlers["lost"]()
    assert done == ["left"]


def test_stages_of_the_start_are_told_and_end_with_the_meeting(tmp_path: Path) -> None:
    file = tmp_path / "a 'b $HOME;" / "rank0"
    file.parent.mkdir()
    world = World.from_env({"NODEKIT_PROGRESS_FILE": str(file)})
    world.stage("meeting the other ranks")
    assert file.read_text().rstrip() == "starting: meeting the other ranks"
    world.stage("x" * 100)
    assert len(file.read_bytes()) == 80
    with world:
        assert not file.read_text().strip(), "what a script does then, kit does not know"
    World.from_env({"NODEKIT_PROGRESS_FILE": str(tmp_path / "no/folder")}).stage("nothing")


def test_the_flight_recorder_answers_by_its_pipe_until_the_group_is_left(tmp_path: Path) -> None:
    files = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/d"}
    with World.from_env(files) as world:
        assert world.recorder_files == (f"{tmp_path}/p", f"{tmp_path}/d")
        dist.all_reduce(torch.ones(3))
        (tmp_path / "p0.pipe").write_text("1")
        while not (tmp_path / "d0").exists():
            time.sleep(0.01)
        dump = json.loads((tmp_path / "d0").read_text())
        assert [each["profiling_name"] for each in dump["entries"]][-1] == "gloo:all_reduce"
    assert not (tmp_path / "p0.pipe").exists()
    assert World.from_env({"TORCH_FR_DUMP_TEMP_FILE": "d"}).recorder_files is None


def asked(folder: Path) -> list[str]:
    """The collectives that the flight recorder of rank 0 has, when it is asked."""
    (folder / "d0").unlink(missing_ok=True)
    (folder / "p0.pipe").write_text("1")
    until((folder / "d0").exists)
    return [each["profiling_name"] for each in json.loads((folder / "d0").read_text())["entries"]]


def test_the_recorder_of_a_later_group_has_none_of_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that hangs before its first collective would look ahead of those who wait there."""
    files = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/d"}
    so_far = 0
    for number in (3, 2):
        with World.from_env(files):
            assert asked(tmp_path) == []
            for _ in range(number):
                dist.all_reduce(torch.ones(3))
            assert asked(tmp_path) == ["gloo:all_reduce"] * number
            # By a clock that was set they cannot be told from each other, and none is left out.
            monkeypatch.setattr(recorder, "_CLOCK_WAS_SET_NS", -1)
            so_far += number
            assert len(asked(tmp_path)) >= so_far
            monkeypatch.undo()


def test_of_nccls_groups_torch_answers_for_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_num_groups", 0)
    assert [nccl.count_group(), nccl.count_group()] == [0, 1]
    said = json.dumps({"entries": [{"profiling_name": "nccl:all_reduce", "time_created_ns": 1 << 62}]})
    dump = "_dump_nccl_trace_json"  # which a torch for the CPU alone has not
    monkeypatch.setattr(torch._C._distributed_c10d, dump, said.encode, raising=False)
    recorder.answer(tmp_path / "p0.pipe", tmp_path / "d0", "nccl")
    assert asked(tmp_path) == ["nccl:all_reduce"]
    recorder.end()
    assert not (tmp_path / "p0.pipe").exists()


def test_without_a_launcher_it_is_a_world_of_one_with_a_group() -> None:
    with World.from_env({}) as world:
        assert (world.rank, world.world_size, world.backend) == (0, 1, "gloo")
        assert world.start_sum(torch.tensor([2.0, 3.0]))() == [2.0, 3.0]
        assert world.gather({"a": 1}) == [{"a": 1}]
    assert not dist.is_initialized()


def test_the_group_is_left_when_the_body_raises() -> None:
    with pytest.raises(RuntimeError, match="mine"), World.from_env({}):
        raise RuntimeError("mine")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": None, "MASTER_PORT": None}, "RANK is set but not WORLD_SIZE, MASTER_PORT"),
        ({"RANK": "-1"}, "RANK is '-1': a whole number from 0"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_RANK": "²"}, "LOCAL_RANK is '²'"),
        ({"NODEKIT_GENERATION": "new"}, "NODEKIT_GENERATION is 'new'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(changed: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changed}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        World.from_env(environ)


@pytest.mark.parametrize(
    ("environ", "asked", "message"),
    [
        (TORCHRUN, {"backend": "nccl"}, "--backend nccl is for GPUs, and torch sees none here: take gloo"),
        (TORCHRUN, {"backend": "mpi"}, "built without it; pip has no build of torch with it; take gloo"),
        (TORCHRUN, {"init_method": "file:///no/such/meet"}, "there is no folder /no/such for meet"),
        (TORCHRUN, {"init_method": "file:///tmp"}, "/tmp is a folder: name a file in it"),
        (TORCHRUN, {"init_method": "file://meet"}, "names no file by its absolute path"),
        (
            {},
            {"init_method": "tcp://127.0.0.1:1"},
            "RANK is not set: take --launcher spawn, or start every rank",
        ),
        ({"RANK": "0"}, {"init_method": "tcp://127.0.0.1:1"}, "RANK is set but not WORLD_SIZE: "),
        (
            {"HOROVOD_SIZE": "2"},
            {},
            "horovodrun has started 2 processes (HOROVOD_SIZE), each of which would train by",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, {}, "mpirun has started 4 processes"),
    ],
)
def test_where_ranks_cannot_meet_is_refused_before_they_wait(
    environ: dict[str, str], asked: dict[str, str], message: str
) -> None:
    if asked.get("backend", "gloo") != "gloo" and dist.is_backend_available(asked["backend"]):
        pytest.skip(f"this torch has {asked['backend']}")
    with pytest.raises(ValueError, match=re.escape(message)):
        World.from_env(environ, **asked)  # type: ignore[arg-type]  # no timeout among them


@pytest.mark.parametrize(
    ("rank", "message"), [("0", "rank 1 of 2 ranks has not come to"), ("1", "rank 0 has not come to")]
)
def test_a_rank_that_nobody_comes_to_says_who_is_missing(rank: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "meet").write_text("of an earlier run")
    (tmp_path / "meet.beat").write_text("0123")
    environ = {"RANK": rank, "WORLD_SIZE": "2"}
    world = World.from_env(environ, timeout_s=0.3, init_method=f"file://{tmp_path}/meet")
    with pytest.raises(TimeoutError, match=message):
        world.__enter__()
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_address_that_nobody_comes_to_is_waited_for_as_long_as_told(rank: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    world = World.from_env({"RANK": rank, "WORLD_SIZE": "2"}, timeout_s=0.3, init_method=url)
    with pytest.raises(dist.DistError):
        world.__enter__()


def test_the_package_is_light_until_a_name_is_used() -> None:
    code = "import sys, nodekit.training.options.arguments; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def has_deadline() -> bool:
    return any(thread.name == "nodekit-deadline" for thread in threading.enumerate())


def test_a_signal_sets_the_flag_and_leaving_calls_the_deadline_off() -> None:
    before = signal.getsignal(signal.SIGTERM)
    # Of a short grace, a machine that stands still would make the end of this process.
    with Stop(grace_s=200) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.requested)
        assert stop.exit_code == 143
        until(has_deadline)
    until(lambda: not has_deadline(), what="that it is called off")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_pool_of_a_script_ends_by_its_sigterm_and_stops_no_training() -> None:
    """A child that is forked would write what it gets to where this process reads what it gets itself."""
    with Stop(grace_s=200) as stop:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert not stop._requested.wait(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: stop.requested)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rank_that_never_comes_to_an_edge_ends_after_the_grace(number: int, code: int) -> None:
    """The main thread never comes back from C, as in a collective with nobody there."""
    stuck = (
        "import ctypes; from nodekit.training.process.stop import Stop\n"
        "with Stop(grace_s=0.3):\n"
        "    print('in', flush=True)\n"
        "    lock = ctypes.CDLL(None)\n"
        "    while True: lock.poll(None, 0, -1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", stuck], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as rank:
        assert rank.stdout
        assert rank.stderr
        assert rank.stdout.readline() == b"in\n"
        rank.send_signal(number)
        try:
            assert rank.wait(timeout=20) == code
            assert b"0.3 s of grace" in rank.stderr.read()
        finally:
            rank.kill()


def test_what_a_rank_has_printed_last_is_not_lost_at_its_end() -> None:
    code = "from nodekit.training.process.stop import leave; print('the last words'); leave(3)"
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "the last words\n")


def test_a_rank_that_was_planned_for_a_gpu_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for is_built, why in ((False, "is built for the CPU alone"), (True, "cannot use them")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=is_built: built)
        with pytest.raises(ValueError, match=rf"8 GPU\(s\) are planned for this node, and torch \S+ {why}: "):
            World.from_env({"NODEKIT_NUM_GPUS": "8"})
    assert World.from_env({"NODEKIT_NUM_GPUS": "0"}).device.type == "cpu"


@pytest.mark.parametrize(("num_tasks", "is_refused"), [("2", True), ("1", False), ("", False)])
def test_tasks_of_srun_that_would_train_apart_are_refused(num_tasks: str, *, is_refused: bool) -> None:
    """`srun -n2 python -m nodekit.training` trained twice, into the same folder."""
    options = parse([], {})
    environ = {"SLURM_STEP_NUM_TASKS": num_tasks, "SLURM_PROCID": "1"}
    refusal = pytest.raises(ValueError, match=r"one of 2 tasks of srun, .*srun --ntasks-per-node=1 torchrun")
    with refusal if is_refused else contextlib.nullcontext():
        rank_module._world(options, environ)
    rank_module._world(parse(["--output", "mine"], {}), environ)
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    rank_module._world(options, {**environ, **of_torchrun})
