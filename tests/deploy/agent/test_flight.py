"""The flight recorders of all ranks tell who has not entered the collective that the others wait in."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from agents import until
from free_ports import free_port

from nodekit.deploy.agent.hang import flight
from nodekit.deploy.agent.hang.culprit import explain
from nodekit.deploy.agent.hang.flight import Call, Finding, Group, compare
from nodekit.deploy.agent.hang.stacks import Frame, Stack
from nodekit.deploy.agent.ranks.target import READ_AT_START


def record(*calls: str, ranks: tuple[int, ...] = (0, 1, 2), first: int = 811) -> Group:
    """Calls as ``all_reduce``, ``all_reduce [[4]]`` with sizes; ``…`` after one that is not over."""
    found = []
    for number, text in enumerate(calls, first):
        name, _, sizes = text.rstrip("…").strip().partition(" ")
        found.append(Call(number, name, sizes or "[[8]]", is_over=not text.endswith("…")))
    return Group(ranks, tuple(found))


@pytest.mark.parametrize(
    ("records", "finding"),
    [
        (
            [record("all_reduce", "all_reduce…"), record("all_reduce"), record("all_reduce", "all_reduce…")],
            Finding((1,), "never entered all_reduce 812"),
        ),
        (  # NCCL's ranks run ahead of what is over
            [record("x…", "all_reduce…", "all_reduce…"), record("x…"), record("x…", "all_reduce…")],
            Finding((1,), "never entered all_reduce 812"),
        ),
        (
            [record("x", "barrier…"), record("x", "all_reduce…"), record("x", "all_reduce…")],
            Finding((0,), "called barrier where others called all_reduce 812"),
        ),
        (
            [record("all_reduce [[4]]…"), record("all_reduce [[3]]…"), record("all_reduce [[4]]…")],
            Finding((1,), "called all_reduce 811 with [[3]] where others have [[4]]"),
        ),
        ([record("all_gather [[4]]…"), record("all_gather [[3]]…"), record("all_gather [[4]]…")], None),
        ([record("all_reduce…")] * 3, None),
        ([record("all_reduce")] * 3, None),
        ([record("barrier…"), record("all_reduce…")], None),  # one of two: neither is the odd one
        # The root of a broadcast goes on, and nobody waits for who comes later.
        ([record("broadcast", "broadcast"), record("broadcast"), record("broadcast")], None),
        (
            [record("all_reduce…", first=1), record(), record("all_reduce…", first=1)],
            Finding((1,), "never entered all_reduce 1"),
        ),
        ([], None),
    ],
)  # fmt: skip
def test_who_has_not_entered_what_the_others_wait_in_is_found(
    records: list[Group], finding: Finding | None
) -> None:
    assert compare({rank: {"0": each} for rank, each in enumerate(records)}) == finding
    sent = json.loads(json.dumps({rank: {"0": each} for rank, each in enumerate(records)}))
    assert compare({int(rank): flight.load(each) for rank, each in sent.items()}) == finding


def test_of_two_groups_the_rank_that_waits_in_none_is_named() -> None:
    """Ranks 0 and 1 wait for 2 in their row; 3 waits for 2 in its column, and so does 0 for 3."""
    found = compare(
        {
            0: {"rows": record("all_gather…", ranks=(0, 1)), "columns": record("x", "all_reduce…", ranks=(0, 3))},
            1: {"rows": record("all_gather…", ranks=(0, 1))},
            3: {"columns": record("x", ranks=(0, 3)), "world": record("x", "barrier…", ranks=(2, 3))},
            2: {"world": record("x", ranks=(2, 3))},
        }
    )  # fmt: skip
    assert found == Finding((2,), "never entered barrier 812")


def test_the_culprit_is_told_with_what_it_does() -> None:
    stuck = (Frame("load_batch", "/home/me/data.py", 11, "time.sleep(1000)"),)
    waits = (Frame("train", "/home/me/train.py", 5, "total += loss.item()"),)
    stacks = {rank: Stack(rank, 9, "R", "py-spy", stuck if rank == 1 else waits) for rank in range(8)}
    ahead, behind = (
        record("all_reduce", "all_reduce…", ranks=tuple(range(8))),
        record("x", ranks=tuple(range(8))),
    )
    records = {rank: {"0": behind if rank == 1 else ahead} for rank in range(8)}
    found = explain(stacks, {}, records=records, nodes={1: "n1"}, world_size=8)
    assert (found.ranks, found.line) == (
        (1,),
        "rank 1 on n1 never entered all_reduce 812: it hangs in load_batch (data.py:11); 7 others wait there",
    )
    assert found.stack == ("load_batch (/home/me/data.py:11)  time.sleep(1000)",)
    stacks[1] = Stack(1, 9, "R", "py-spy", waits)  # where the stacks say that all wait
    found = explain(stacks, {}, records=records, world_size=8)
    assert found.line == (
        "rank 1 never entered all_reduce 812: it waits in item (train.py:5); 7 others wait there"
    )
    stacks[3] = Stack(3, 9, "T", "none")
    assert explain(stacks, {}, records=records, world_size=8).ranks == (3,), "a stopped one cannot answer"


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("2.15.0+cu132", {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_DIST_USE_NCCL2"}),
        ("2.13.0+cpu", {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"}),
        ("2.8.0", {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"}),
        ("2.6.0a0+git", {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
    ],
)
def test_the_recorder_is_set_by_the_names_that_this_torch_knows(version: str, names: set[str]) -> None:
    found = flight.environment(Path("/n/flight"), {}, version)
    assert set(found) == {*names, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}
    own = dict.fromkeys(found, "the user's")
    assert flight.environment(Path("/n/flight"), own, version) == own
    assert not [name for name in found if READ_AT_START.match(name)], "or no rank would be a fork"


def test_a_rank_that_stands_by_has_what_torch_reads_once() -> None:
    """It starts NCCL before its attempt is known."""
    found = flight.environment(Path("/n/flight"), {}, "2.15.0")
    once = flight.read_once({}, "2.15.0")
    assert once == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_DIST_USE_NCCL2": "0"}
    assert once.items() <= found.items()


DUMP = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0, "is_p2p": False,
            "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "state": "started", "retired": False,
        },
        {
            "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 1, "is_p2p": True,
            "profiling_name": "nccl:send 0->1", "input_sizes": [[4]], "state": "completed", "retired": True,
        },
    ],
}  # fmt: skip


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/owned",)


def test_a_dump_is_read_and_nothing_in_it_is_run() -> None:
    expected = {"0": Group((0, 1), (Call(1, "all_reduce", "[[4]]", is_over=False),))}
    assert flight.parse(json.dumps(DUMP).encode()) == expected
    assert flight.parse(pickle.dumps(DUMP, protocol=2)) == expected
    for bad in (
        pickle.dumps(Evil()),
        pickle.dumps({**DUMP, "entries": [Evil()]}),
        pickle.dumps(DUMP)[:-20],
        json.dumps(DUMP).encode()[:-20],
        b"",
        b"\x80",
        b"{}x",
        json.dumps({"entries": [{"state": "completed"}]}).encode(),
        json.dumps({"pg_config": {"0": {"ranks": "x"}}}).encode(),
    ):
        with pytest.raises(ValueError, match=r"."):
            flight.parse(bad)


def test_of_groups_of_one_name_that_a_process_has_left_nothing_is_taken() -> None:
    """Who has taken part in more attempts would be found ahead of who comes in."""
    (call, _), earlier = DUMP["entries"], []
    for number in (1, 2, 3):
        earlier.append({**call, "collective_seq_id": number, "pg_id": 0})
    dump = {**DUMP, "entries": [*earlier, {**call, "profiling_name": "nccl:broadcast", "pg_id": 2}]}
    (group,) = flight.parse(json.dumps(dump).encode()).values()
    assert [(each.number, each.name) for each in group.calls] == [(1, "broadcast")]


def test_torch_numbers_the_groups_of_a_process_that_have_one_name(tmp_path: Path) -> None:
    """What the test above takes for granted of a dump, on gloo."""
    files = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/d"}
    env = {**files, "TORCH_FR_BUFFER_SIZE": "10"}
    script = """
import sys, torch, torch.distributed as dist
from nodekit.training import World
from nodekit.training.attempts import reform
from pathlib import Path
for number in (3, 1):
    with World.from_env() as world:
        for _ in range(number):
            dist.all_reduce(torch.ones(3))
        if number == 1:
            print("up", flush=True)
            sys.stdin.read()
        reform.leave(world)
"""
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(
        argv, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (group,) = flight.ask(files, [0], timeout_s=60)[0].values()
    assert [(each.number, each.name) for each in group.calls] == [(1, "all_reduce")]


class Recorder:
    """A rank as torch's DumpPipe has it: makes the pipe, looks at it now and then, and writes the dump in place."""

    def __init__(self, pipe: Path, file: Path) -> None:
        os.mkfifo(pipe)
        self._handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._file = file
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.ended.wait(0.01):
            if os.read(self._handle, 128):
                data = pickle.dumps(DUMP, protocol=2)
                with self._file.open("wb", buffering=0) as file:
                    file.write(data[:50])
                    time.sleep(0.02)
                    file.write(data[50:])

    def close(self) -> None:
        self.ended.set()
        self._thread.join()
        os.close(self._handle)


def test_ranks_are_asked_by_their_pipes_and_who_does_not_answer_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "a 'b $HOME;"
    folder.mkdir()
    environ = flight.environment(folder, {}, "2.13.0")
    assert flight.ask(environ, [0], timeout_s=5) == {}, "no pipe: nothing is waited for"
    (folder / "rank1.pipe").write_text("")
    os.mkfifo(folder / "rank2.pipe")  # nobody reads it
    (folder / "rank0").write_bytes(json.dumps({**DUMP, "entries": []}).encode())
    recorder = Recorder(folder / "rank0.pipe", folder / "rank0")
    try:
        found = flight.ask(environ, [0, 1, 2, 3], timeout_s=60)  # it answers, whatever holds the machine up
    finally:
        recorder.close()
    assert found == {0: flight.parse(json.dumps(DUMP).encode())}, "not the dump of an earlier time"
    assert flight.ask({}, [0], timeout_s=5) == {}


# Both jobs are forks of one process, which imports torch once, as an agent's ranks are; it tells their pids.
TRAIN_PY = """\
import json, os, sys, time, torch, torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from nodekit.training.world import World

def load_batch(how):
    if how == "sleeps":
        time.sleep(1000)

def train(how, pickled):
    with World.from_env() as world:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
        for step in range(100):
            if step == 3 and world.rank == 0:
                open(pickled, "wb").write(_dump_fr_trace())
            if step == 3 and world.rank == 1:
                load_batch(how)
                dist.barrier()
            model(torch.ones(4, 8)).sum().backward()

pids = {}
for how, (pickled, env) in json.loads(sys.argv[1]).items():
    for rank in range(3):
        if not (pid := os.fork()):
            os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
            train(how, pickled)
            os._exit(1)
        pids.setdefault(how, []).append(pid)
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""
SAID = {
    "sleeps": "rank 1 never entered all_reduce {}: it hangs in load_batch (train.py:8); 2 others wait there",
    "calls": "rank 1 called barrier where others called all_reduce {}: it waits in barrier (train.py:18)",
}


@pytest.mark.slow
def test_ranks_on_gloo_answer_and_the_one_that_others_wait_for_is_named(tmp_path: Path) -> None:
    from nodekit.deploy.agent.hang.stacks import stacks

    (tmp_path / "train.py").write_text(TRAIN_PY)
    jobs, recorders = {}, {}
    for how in SAID:
        (tmp_path / how).mkdir()
        recorders[how] = flight.environment(tmp_path / how, {}, "2.13.0")
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        pickled = str(tmp_path / f"{how}.pickle")
        jobs[how] = (pickled, {**recorders[how], **place, "WORLD_SIZE": "3"})
    told: dict[str, dict[int, flight.Record]] = {how: {} for how in SAID}

    def line(how: str, pids: Mapping[int, int]) -> str:
        told[how].update(flight.ask(recorders[how], list(pids), timeout_s=5))
        seen = stacks(pids, python=sys.executable, timeout_s=10)
        return explain(seen, {}, records=told[how], world_size=3).line

    def is_said(how: str, pids: Mapping[int, int]) -> bool:
        found = line(how, pids)
        calls = {
            call.number for each in told[how].values() for group in each.values() for call in group.calls
        }
        return any(SAID[how].format(number) in found for number in calls or {0})

    with subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py"), json.dumps(jobs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        ranks = {how: dict(enumerate(pids)) for how, pids in json.loads(process.stdout.readline()).items()}
        try:
            for how, pids in ranks.items():
                until(lambda: is_said(how, pids), timeout_s=100, what=SAID[how])  # noqa: B023
        finally:
            for pid in [pid for pids in ranks.values() for pid in pids.values()]:
                os.kill(pid, signal.SIGKILL)  # of children that nobody has waited for: no other has the pid
            process.kill()
    for how, (pickled, _) in jobs.items():
        assert set(told[how]) == {0, 1, 2}
        for name, group in flight.parse(Path(pickled).read_bytes()).items():
            assert {call.name for call in group.calls} <= {call.name for call in told[how][0][name].calls}
            assert group.ranks == (0, 1, 2)
