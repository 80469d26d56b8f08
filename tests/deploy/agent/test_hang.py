"""A hang is found in time, no slow job is taken for one, and the rank that holds up the others is named."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from agents import until
from driver import Driver
from free_ports import free_port
from hypothesis import given, settings
from hypothesis import strategies as st

from nodekit.deploy.agent import hang_diagnosis
from nodekit.deploy.agent.hang import hang
from nodekit.deploy.agent.hang import stacks as stacks_module
from nodekit.deploy.agent.hang.culprit import explain, waiting
from nodekit.deploy.agent.hang.hang import Learnt, Progress, Watch, read_progress
from nodekit.deploy.agent.hang.stacks import Frame, Stack, parse_faulthandler, stacks
from nodekit.training.process.stages import MEETING, STARTING

POLL_S = 1.0


class Job:
    """Ranks that are looked at every `POLL_S`, by a clock that starts anywhere."""

    def __init__(self, watch: Watch, now: float = 1000.0) -> None:
        self.watch = watch
        self.now = now
        self.files: dict[int, Progress] = {}
        self.logs: dict[int, int] = {}

    def write(self, rank: int, text: str) -> None:
        self.files[rank] = Progress.parse(text, self.now)

    def step(self, text: str, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.write(rank, text)

    def wait(self, seconds: float, *, talks: bool = False) -> float | None:
        """Look on; after how many seconds a hang was suspected, None if it never was."""
        waited = 0.0
        while waited < seconds:
            self.watch.observe(self.now, self.files, self.logs)
            if self.watch.suspect(self.now):
                return waited
            self.now += POLL_S
            waited += POLL_S
            if talks:
                self.logs[0] = self.logs.get(0, 0) + 10
        return None

    def train(self, *steps: int, every_s: float = 5, ranks: tuple[int, ...] = (0, 1)) -> None:
        for step in steps:
            self.step(f"{step}/100 loss 0.1", *ranks)
            assert self.wait(every_s) is None


def test_a_stop_is_suspected_at_the_floor_when_steps_are_quick():
    job = Job(Watch(floor_s=30))
    job.train(1, 2, 3)
    assert job.wait(100) == pytest.approx(30 - 5 + POLL_S)
    found = job.watch.suspect(job.now)
    assert found is not None
    assert found.ranks == (0, 1)
    assert found.quiet_s == 31
    assert found.text == "no progress for 31 s, with a limit of 30 s (the longest pause before was 5.0 s)"


def test_a_pause_seen_once_widens_the_limit():
    job = Job(Watch(floor_s=30, factor=2))
    job.train(1, 2)
    job.train(3, every_s=25)
    job.train(4)
    assert job.watch.limit_s == 50
    assert job.wait(100) == 50 - 5 + POLL_S


def test_nothing_is_suspected_before_the_first_step():
    for announcement in (None, "", "0/100 compiling"):
        job = Job(Watch(floor_s=30))
        if announcement is not None:
            job.step(announcement)
        assert job.wait(3600) is None


def test_after_the_last_step_there_is_much_time_and_not_all_of_it():
    job = Job(Watch(floor_s=30))
    job.train(98, 99, 100)
    assert job.wait(290) is None
    job.watch.observe(job.now, {}, {0: 10})  # it writes a line
    assert job.wait(290) is None
    assert job.wait(20) is not None
    found = job.watch.suspect(job.now)
    assert found is not None
    assert found.ranks == (0, 1)
    assert "no progress for" in found.text


def test_a_start_that_tells_its_stages_has_a_limit_too():
    job = Job(Watch(floor_s=30))
    job.step("starting: meeting the other ranks", 0)
    assert job.wait(100) is None
    job.step("starting: loading the snapshot", 0)  # rank 1 has not come as far as to tell
    assert job.wait(1000) == 5 * 30 + POLL_S
    found = job.watch.suspect(job.now)
    assert found is not None
    assert (found.ranks, found.text) == (
        (0,),
        "no first step: loading the snapshot for 151 s, with a limit of 150 s",
    )
    job.watch.begin()
    job.step("starting: loading the snapshot")
    assert job.wait(1000) == 2 * 5 * 30 + POLL_S, "it may have been a false alarm"
    job.watch.begin()
    job.step("starting: loading the snapshot")
    job.train(1, 2)
    assert job.watch.limit_s == 30, "and is none any more"


def test_a_start_that_talks_has_more_time():
    job = Job(Watch(floor_s=30))
    job.step("starting: making the model and reading the data")
    assert job.wait(10_000, talks=True) == 10 * 5 * 30 + POLL_S


@pytest.mark.parametrize("stages", [(), ("",), ("starting: meeting the other ranks", "")])
def test_a_start_that_tells_no_stage_is_told_of_and_not_ended(stages):
    """With `World` alone, a script's own start follows, of which nothing is known."""
    job = Job(Watch(floor_s=30))
    for stage in stages:
        job.step(stage)
        assert job.wait(5) is None
    assert not job.watch.is_silent(job.now)
    assert job.wait(36_000) is None
    assert job.watch.is_silent(job.now)
    job.train(1, 2)
    assert not job.watch.is_silent(job.now)


def test_a_stage_after_steps_is_no_progress():
    job = Job(Watch(floor_s=30))
    job.train(1, 2, 3)
    job.step("starting: meeting the other ranks")
    assert job.wait(100) == 30 - 5 + POLL_S


def test_a_stage_is_known_by_what_it_begins_with():
    assert Progress.parse("starting: meeting the other ranks   \n", 0.0).stage == "meeting the other ranks"


def test_files_left_by_the_attempt_before_are_no_progress():
    job = Job(Watch(floor_s=30))
    job.train(1, 2, 3)
    job.watch.begin()
    assert job.wait(600) is None
    job.train(3)
    assert job.wait(100) == 30 - 5 + POLL_S


def test_what_was_learnt_outlives_the_attempt_and_the_agent():
    job = Job(Watch(floor_s=30, factor=2))
    job.train(1, every_s=28)
    job.train(2)
    kept = json.loads(json.dumps(dataclasses.asdict(job.watch.learnt)))
    job = Job(Watch(floor_s=30, factor=2, learnt=Learnt(**kept)))
    job.train(1)
    assert job.wait(100) == 56 - 5 + POLL_S


def test_an_alarm_that_progress_belies_widens_the_limit():
    job = Job(Watch(floor_s=30, factor=2))
    job.train(1)
    assert job.wait(40) is not None
    job.train(2, 3)
    assert job.watch.limit_s == 2 * (5 + 26)


def test_each_alarm_at_the_same_step_doubles_the_patience():
    watch = Watch(floor_s=30, factor=2)
    job = Job(watch)
    for limit_s in (30, 60, 120):
        watch.begin()
        job.train(8, 9, 10)
        assert job.wait(1000) == limit_s - 5 + POLL_S
        assert job.watch.suspect(job.now), "it stays suspected until the restart"
    watch.begin()
    job.train(9, 10)
    assert job.wait(200) is None  # the evaluation after step 10 takes that long
    job.train(11)
    assert watch.learnt.patience == 1
    assert watch.limit_s == 2 * 205


def test_a_rank_that_only_touches_its_file_gets_on():
    job = Job(Watch(floor_s=30))
    for _ in range(20):
        job.step("")
        assert job.wait(20) is None
    assert job.wait(100) == 40 - 20 + POLL_S


def test_one_rank_of_several_is_behind_while_the_others_go_on():
    job = Job(Watch(floor_s=30))
    job.train(1, 2, 3)
    for step in range(4, 20):
        job.step(f"{step}/100", 0)
        if job.wait(5) is not None:
            break
    found = job.watch.suspect(job.now)
    assert found is not None
    assert found.ranks == (1,)
    assert found.limit_s == 30


def test_a_rank_that_tells_of_epochs_only_is_not_behind():
    job = Job(Watch(floor_s=30))
    for step in range(1, 61):
        job.step(f"{step}/100", 0)
        if step % 20 == 1:
            job.write(1, f"epoch {step}")
        assert job.wait(5) is None


def test_the_rank_with_the_lowest_step_is_named_when_all_stop():
    job = Job(Watch(floor_s=30))
    job.train(1, 2, ranks=(0, 1, 2))
    job.step("3/100", 0, 2)
    assert job.wait(100) is not None
    found = job.watch.suspect(job.now)
    assert found is not None
    assert found.ranks == (1,)


def test_output_buys_time_but_not_for_ever():
    job = Job(Watch(floor_s=30))
    job.train(1, 2)
    assert job.wait(1000, talks=True) == 300 - 5 + POLL_S


@pytest.mark.parametrize("scripts_output", [False, True])
def test_a_job_that_tells_nothing_is_not_suspected(scripts_output):
    assert Job(Watch(floor_s=30)).wait(3600, talks=scripts_output) is None
    assert Job(Watch(hang=120)).wait(3600) is None


def test_with_seconds_set_the_output_of_a_silent_job_counts():
    job = Job(Watch(hang=120))
    job.logs = {0: 10, 1: 10}
    assert job.wait(500, talks=True) is None
    assert job.wait(500) == 120 + POLL_S
    found = job.watch.suspect(job.now)
    assert found is not None
    assert found.ranks == (0, 1)
    assert "limit of 120 s (as configured)" in found.text


def test_with_seconds_set_they_hold_whatever_was_learnt():
    job = Job(Watch(hang=120))
    job.train(1, 2, every_s=100)
    job.train(3)
    assert job.wait(1000, talks=True) == 120 - 5 + POLL_S  # and output does not count beside progress


def test_output_before_the_first_step_is_no_progress_of_a_job_that_tells_its_steps():
    job = Job(Watch(hang=120))
    job.step("")
    assert job.wait(10, talks=True) is None
    assert job.wait(3600) is None


def test_off_is_off():
    job = Job(Watch(hang="never"))
    assert job.wait(100) is None
    job.train(1, 2, 3)
    assert job.wait(36000) is None


def test_time_that_nobody_observed_does_not_count():
    job = Job(Watch(floor_s=30))
    job.train(1, 2)
    job.now += 36000  # the lid was closed
    assert job.watch.suspect(job.now) is None
    assert job.wait(100) == 30 - 5 - 5 + POLL_S + POLL_S
    job.train(3)
    job.now -= 72000  # and a clock set back is no time at all
    assert job.wait(20) is None
    assert job.wait(100) is not None


pauses = st.lists(st.floats(0.0, 1.0), max_size=8)


@given(pauses, st.integers(1, 4), st.booleans())
@settings(max_examples=60)
def test_progress_within_the_limit_is_never_suspected_and_its_end_always(fractions, num_ranks, only_touches):
    watch = Watch(floor_s=30, factor=2)
    job = Job(watch)
    ranks = tuple(range(num_ranks))
    job.step("x" if only_touches else "1/1000", *ranks)
    for step, fraction in enumerate(fractions, start=2):
        within = int(fraction * watch.limit_s / POLL_S) * POLL_S
        assert job.wait(within) is None
        job.step("x" if only_touches else f"{step}/1000", *ranks)
    assert job.wait(POLL_S) is None
    limit_s = watch.limit_s
    after_s = job.wait(10 * limit_s)
    assert after_s is not None
    assert limit_s < after_s + POLL_S <= limit_s + POLL_S


def test_progress_files_are_read_by_rank(tmp_path: Path):
    folder = tmp_path / "a 'b $HOME;"
    assert read_progress(folder) == {}
    folder.mkdir()
    (folder / "rank0").write_text("12/40 epoch 1 loss 0.4\n")
    (folder / "rank13").write_text("7")
    (folder / "rank2").touch()
    (folder / "rank2.tmp").write_text("9")
    found = read_progress(folder)
    assert {rank: each.step for rank, each in found.items()} == {0: 12, 13: 7, 2: None}
    os.utime(folder / "rank2", (1, 1))
    assert read_progress(folder)[2] != found[2]
    assert [Progress.parse(text, 0).is_done for text in ("39/40", "40/40 x", "40", "")] == [
        False,
        True,
        False,
        False,
    ]


# --- who holds up the others --------------------------------------------------------------------------------

# As py-spy 0.4.3 showed them of gloo jobs under torch 2.13: function, file, line.
ALL_REDUCE = """
all_reduce (torch/distributed/distributed_c10d.py:3252)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
train (coll.py:19)
<module> (coll.py:37)"""
BACKWARD = """
_engine_run_backward (torch/autograd/graph.py:979)
backward (torch/autograd/__init__.py:395)
Tensor.backward (torch/_tensor.py:623)
<module> (ddp.py:26)"""
LOAD_BATCH = """
load_batch (ddp.py:11)
<module> (ddp.py:21)"""
BARRIER = """
barrier (torch/distributed/distributed_c10d.py:5356)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
train (coll.py:17)
<module> (coll.py:37)"""
DATA_LOADER = """
_PollLikeSelector.select (selectors.py:415)
wait (multiprocessing/connection.py:947)
Connection._poll (multiprocessing/connection.py:440)
_ConnectionBase.poll (multiprocessing/connection.py:257)
Queue.get (multiprocessing/queues.py:113)
_MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py:1291)
_MultiProcessingDataLoaderIter._get_data (torch/utils/data/dataloader.py:1464)
_MultiProcessingDataLoaderIter._next_data (torch/utils/data/dataloader.py:1505)
_BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:725)
train (coll.py:12)
<module> (coll.py:37)"""
SUBPROCESS = """
Popen._try_wait (subprocess.py:2004)
Popen._wait (subprocess.py:2046)
Popen.wait (subprocess.py:1264)
Popen.communicate (subprocess.py:1201)
run (subprocess.py:550)
train (coll.py:16)
<module> (coll.py:37)"""
INIT = """
_create_c10d_store (torch/distributed/rendezvous.py:199)
_env_rendezvous_handler (torch/distributed/rendezvous.py:280)
init_process_group (torch/distributed/distributed_c10d.py:1892)
_time_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:97)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
<module> (coll.py:4)"""
GATHER_OBJECT = """
all_gather (torch/distributed/distributed_c10d.py:4287)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
all_gather_object (torch/distributed/distributed_c10d.py:3513)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
train (coll.py:22)"""
MONITORED = """
monitored_barrier (torch/distributed/distributed_c10d.py:5435)
train (coll.py:23)"""
FUNCTIONAL = """
OpOverloadPacket.__call__ (torch/_ops.py:1279)
wait_tensor (torch/distributed/_functional_collectives.py:142)
AsyncCollectiveTensor.trigger_wait (torch/distributed/_functional_collectives.py:1115)
TreeSpec.unflatten (torch/utils/_pytree.py:1313)
tree_map_only (torch/utils/_pytree.py:1754)
AsyncCollectiveTensor.__torch_dispatch__ (torch/distributed/_functional_collectives.py:1155)
train (coll.py:31)"""
FSDP = """
all_gather_single (torch/distributed/distributed_c10d.py:4394)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
DefaultAllGather.__call__ (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:119)
foreach_all_gather (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:364)
FSDPParamGroup.unshard (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:407)
FSDPState._pre_forward (torch/distributed/fsdp/_fully_shard/_fsdp_state.py:314)
Module._call_impl (torch/nn/modules/module.py:1884)
train (coll.py:34)"""
DDP_INIT = """
_verify_param_shape_across_processes (torch/distributed/utils.py:286)
DistributedDataParallel.__init__ (torch/nn/parallel/distributed.py:1064)
train (coll.py:36)"""
DDP_REBUILDS = """
DistributedDataParallel._pre_forward (torch/nn/parallel/distributed.py:1775) if self.reducer._rebuild_buckets():
DistributedDataParallel.forward (torch/nn/parallel/distributed.py:1886)
Module._call_impl (torch/nn/modules/module.py:1789)
train (coll.py:37)"""
RECV = """
recv (torch/distributed/distributed_c10d.py:2799)
_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
train (coll.py:26)"""
WORK_WAIT = "train (coll.py:25) w=dist.all_reduce(t,async_op=True); w.wait()"
STORE_GET = 'train (coll.py:27) dist.distributed_c10d._get_default_store().get("x")'
ITEM = "train (coll.py:30) total += loss.item()"
TOLIST = "sums (coll.py:31) return [float(each) for each in values.tolist()]"
SYNCHRONIZE = """
synchronize (torch/cuda/__init__.py:1140) return torch._C._cuda_synchronize()
train (coll.py:32)"""
FOUND_INF = """
<genexpr> (torch/amp/grad_scaler.py:350) if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
GradScaler._maybe_opt_step (torch/amp/grad_scaler.py:350)
GradScaler.step (torch/amp/grad_scaler.py:461)
train (coll.py:33)"""
LOCK = "train (coll.py:14) l.acquire(); l.acquire()"
WAITS_FOR_A_THREAD = """
Event.wait (threading.py:629) signaled = self._cond.wait(timeout)
train (coll.py:18) done.wait()"""
COMPUTES_IN_FSDP1 = """
Linear.forward (torch/nn/modules/linear.py:125)
Module._call_impl (torch/nn/modules/module.py:1884)
FullyShardedDataParallel.forward (torch/distributed/fsdp/fully_sharded_data_parallel.py:850)
train (coll.py:34)"""
SAVES = """
_write_item (torch/distributed/checkpoint/filesystem.py:400)
save (torch/distributed/checkpoint/state_dict_saver.py:170)
train (coll.py:40)"""

PLACES = {
    "torch": "/home/me/venv/lib/python3.11/site-packages/",
    "coll.py": "/home/me/code/",
    "ddp.py": "/home/me/code/",
}


def frames_of(text: str) -> tuple[Frame, ...]:
    found = []
    for line in text.strip().splitlines():
        function, _, rest = line.partition(" (")
        at, _, code = rest.partition(")")
        file, _, number = at.rpartition(":")
        folder = PLACES.get(file.split("/")[0], "/usr/lib/python3.11/")
        found.append(Frame(function, folder + file, int(number), code.strip()))
    return tuple(found)


def ranks_in(*texts: str, states: str = "") -> dict[int, Stack]:
    return {
        rank: Stack(rank, 100 + rank, (states or "S" * len(texts))[rank], "py-spy", frames_of(text))
        for rank, text in enumerate(texts)
    }


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        (ALL_REDUCE, "all_reduce"),
        (BACKWARD, "backward"),
        (BARRIER, "barrier"),
        (INIT, "init_process_group"),
        (GATHER_OBJECT, "all_gather_object"),
        (MONITORED, "monitored_barrier"),
        (FUNCTIONAL, "wait_tensor"),
        (FSDP, "all_gather_single"),
        (DDP_INIT, "_verify_param_shape_across_processes"),
        (DDP_REBUILDS, "_rebuild_buckets"),
        (RECV, "recv"),
        (WORK_WAIT, "wait"),
        (STORE_GET, "get"),
        (ITEM, "item"),
        (TOLIST, "tolist"),
        (SYNCHRONIZE, "synchronize"),
        (FOUND_INF, "item"),
        (LOAD_BATCH, None),
        (DATA_LOADER, None),
        (SUBPROCESS, None),
        (LOCK, None),
        (WAITS_FOR_A_THREAD, None),
        (COMPUTES_IN_FSDP1, None),
        (SAVES, None),
        ("", None),
    ],
)
def test_waiting_for_others_is_told_from_work_of_its_own(text, operation):
    found = waiting(frames_of(text))
    assert (found.operation if found else None) == operation


def steps(*values: int | None) -> dict[int, Progress]:
    return {rank: Progress("", 0.0, step) for rank, step in enumerate(values)}


def at(*stages: str) -> dict[int, Progress]:
    return {rank: Progress.parse(f"{STARTING}{stage}", 0.0) for rank, stage in enumerate(stages)}


@pytest.mark.parametrize(
    ("found", "progress", "ranks", "line"),
    [
        (
            ranks_in(BACKWARD, LOAD_BATCH, BACKWARD), {}, [1],
            "rank 1 on n1 hangs in load_batch (ddp.py:11); 2 others wait for it in backward",
        ),
        (
            ranks_in(ALL_REDUCE, DATA_LOADER), {}, [1],
            "rank 1 on n1 hangs in train (coll.py:12), inside _BaseDataLoaderIter.__next__; "
            "1 other waits for it in all_reduce",
        ),
        (
            ranks_in(ALL_REDUCE, SUBPROCESS, LOCK, ALL_REDUCE), {}, [1, 2],
            "rank 1 on n1 hangs in train (coll.py:16), inside run and rank 2 on n0 hangs in train (coll.py:14); "
            "2 others wait for them in all_reduce",
        ),
        (  # what it does outweighs how far it says it is
            ranks_in(BACKWARD, LOAD_BATCH, BACKWARD), steps(3, 4, 3), [1],
            "rank 1 on n1 hangs in load_batch (ddp.py:11); 2 others wait for it in backward",
        ),
        (
            ranks_in(BACKWARD, BACKWARD, BACKWARD, states="SST"), {}, [2],
            "rank 2 on n0 is stopped (by SIGSTOP or a debugger) in backward (ddp.py:26); "
            "2 others wait for it in backward",
        ),
        (
            ranks_in(BACKWARD, LOAD_BATCH, BACKWARD, states="SDS"), {}, [1],
            "rank 1 on n1 is stuck in the kernel (state D: a disk or NFS?) in load_batch (ddp.py:11); "
            "2 others wait for it in backward",
        ),
        (
            ranks_in(BACKWARD, "", BACKWARD, states="SZS"), {}, [1],
            "rank 1 on n1 is gone; 2 others wait for it in backward",
        ),
        (
            ranks_in(BACKWARD, "", BACKWARD), {}, [1],
            "rank 1 on n1 hangs, its stack could not be read; 2 others wait for it in backward",
        ),
        (  # it computes its gradients while the others sleep in theirs
            ranks_in(BACKWARD, BACKWARD, BACKWARD, states="SRS"), {}, [1],
            "rank 1 on n1 hangs in <module> (ddp.py:26), inside Tensor.backward; "
            "2 others wait for it in backward",
        ),
        (  # they spin for a GPU, all of them
            ranks_in(ITEM, ITEM, states="RR"), {}, [],
            "all wait, is it the network between them? ranks 0 on n0 and 1 on n1 wait in item (coll.py:30)",
        ),
        (  # spinning for a GPU is waiting, and goes with any collective
            ranks_in(ITEM, ITEM, ITEM, ALL_REDUCE, states="RRRS"), {}, [],
            "all wait, is it the network between them? ranks 0 on n0, 1 on n1 and 2 on n0 wait in item (coll.py:30) "
            "and rank 3 on n1 waits in all_reduce (coll.py:19)",
        ),
        (
            ranks_in(TOLIST, SYNCHRONIZE, FOUND_INF, LOAD_BATCH, states="RRRS"), {}, [3],
            "rank 3 on n1 hangs in load_batch (ddp.py:11); 3 others wait for it in item or synchronize or tolist",
        ),
        (  # one alone computes, where the others are in a collective of the CPU's
            ranks_in(ALL_REDUCE, ALL_REDUCE, ITEM, ALL_REDUCE, states="SSRS"), {}, [2],
            "rank 2 on n0 hangs in train (coll.py:30); 3 others wait for it in all_reduce",
        ),
        (
            ranks_in(LOCK, LOCK, LOCK), at("loading the snapshot", "meeting", "meeting"), [0],
            "rank 0 on n0 is behind (loading the snapshot, others meeting), in train (coll.py:14)",
        ),
        (  # nothing goes from rank 1 to rank 2, and rank 0 has met both
            ranks_in(ALL_REDUCE, INIT, INIT), at("making the engine", MEETING, MEETING), [1, 2],
            f"ranks 1 on n1 and 2 on n0 are behind ({MEETING}: is it the network between them? "
            "others making the engine), in init_process_group (coll.py:4); 1 other waits for them in all_reduce",
        ),
        (
            ranks_in(ALL_REDUCE, ALL_REDUCE, ALL_REDUCE), steps(7, 3, 7), [1],
            "rank 1 on n1 is behind (step 3, others 7), in all_reduce (coll.py:19); "
            "2 others wait for it in all_reduce",
        ),
        (
            ranks_in(ALL_REDUCE, BARRIER, ALL_REDUCE), steps(7, 7, 7), [1],
            "the ranks wait for each other in different operations: ranks 0 on n0 and 2 on n0 wait in all_reduce "
            "(coll.py:19) and rank 1 on n1 waits in barrier (coll.py:17)",
        ),
        (
            ranks_in(ALL_REDUCE, BARRIER), {}, [],
            "the ranks wait for each other in different operations: rank 0 on n0 waits in all_reduce (coll.py:19) "
            "and rank 1 on n1 waits in barrier (coll.py:17)",
        ),
        (
            ranks_in(LOAD_BATCH, LOAD_BATCH), {}, [],
            "none waits for another: ranks 0 on n0 and 1 on n1 hang in load_batch (ddp.py:11)",
        ),
        (
            ranks_in(LOAD_BATCH, LOAD_BATCH), steps(5, 4), [1],
            "rank 1 on n1 is behind (step 4, others 5), in load_batch (ddp.py:11)",
        ),
        (
            ranks_in(*[ALL_REDUCE] * 8), {}, [],
            "all wait, is it the network between them? "
            "ranks 0 on n0, 1 on n1, 2 on n0 and 5 more wait in all_reduce (coll.py:19)",
        ),
        (ranks_in(ITEM), {}, [0], "rank 0 on n0 hangs in train (coll.py:30)"),
        ({}, steps(1, 2), [], "there is no rank to look at"),
    ],
)  # fmt: skip
def test_the_rank_that_holds_up_the_others_is_named(found, progress, ranks, line):
    blame = explain(found, progress, nodes={rank: f"n{rank % 2}" for rank in found})
    assert (blame.line, list(blame.ranks)) == (line, ranks)


def test_ranks_that_cannot_be_seen_may_be_the_ones():
    assert explain(ranks_in(ALL_REDUCE, ALL_REDUCE), {}, world_size=4).line == (
        "ranks 0 and 1 wait in all_reduce (coll.py:19) for ranks elsewhere"
    )
    blame = explain(ranks_in(LOAD_BATCH), {}, world_size=4)
    assert (blame.ranks, blame.line) == ((0,), "rank 0 hangs in load_batch (ddp.py:11)")


def test_frames_of_libraries_are_folded():
    assert explain(ranks_in(ALL_REDUCE, DATA_LOADER), {}).stack == (
        "_BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py:725) and 8 more below it",
        "train (/home/me/code/coll.py:12)",
        "<module> (/home/me/code/coll.py:37)",
    )
    assert explain(ranks_in(ALL_REDUCE, LOCK), {}).stack == (
        "train (/home/me/code/coll.py:14)  l.acquire(); l.acquire()",
    )


def test_a_stack_survives_json():
    for stack in ranks_in(ALL_REDUCE, WORK_WAIT).values():
        assert Stack.load(json.loads(json.dumps(dataclasses.asdict(stack)))) == stack


@pytest.mark.parametrize("took_it", ["helper", "main", "native"])
def test_what_faulthandler_writes_is_read_whichever_thread_took_the_signal(took_it):
    def who(thread: str) -> str:
        return "Current thread" if thread == took_it else "Thread"

    text = (
        "step 3\nFatal Python error: Aborted\n\n"
        f"{who('helper')} 0x00007f96e0 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n\n'
        f"{who('main')} 0x00007f96ed5f9b80 (most recent call first):\n"
        '  File "/tmp/a b/ddp.py", line 11 in load_batch\n  File "/tmp/a b/ddp.py", line 21 in <module>\n\n'
        "Extension modules: numpy.linalg._umath_linalg (total: 22)\n"
    )
    second = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "child.py", line 1 in f\n'
    assert parse_faulthandler(text + second) == (
        Frame("load_batch", "/tmp/a b/ddp.py", 11),
        Frame("<module>", "/tmp/a b/ddp.py", 21),
    )


@pytest.mark.parametrize(
    "text",
    [
        "all is well\n",
        "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  <no Python frame>\n",
    ],
)
def test_where_faulthandler_wrote_no_frames_there_are_none(text):
    assert parse_faulthandler(text) == ()


# --- real processes -----------------------------------------------------------------------------------------

DATA_PY = """\
import os, signal, sys, time

def load_batch(kind, fifo):
    if kind == "sleep":
        time.sleep(1000)  # HERE
    if kind == "loop":
        while True: pass  # HERE
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # HERE
    if kind == "fifo":
        open(fifo).read()  # HERE
"""
TRAIN_PY = """\
import os, sys, torch, torch.distributed as dist
from data import load_batch

dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(10):
    if step == 3 and dist.get_rank() == 1:
        load_batch(*sys.argv[1:])
    model(torch.ones(4, 8)).sum().backward()
"""


LONG_S = 100.0
"""To read stacks that are there at once: the last step of it has a tenth, and a machine may stand still for 8 s."""


@pytest.fixture
def without_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Make it absent from now on; the interpreter that is to be asked."""

    def hide() -> str:
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        return str(tmp_path / "bin/python")

    return hide


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, log: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
        with (log or Path(os.devnull)).open("wb") as file:
            process = subprocess.Popen(argv, stdout=file, stderr=file, env={**os.environ, **env})
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Has imported torch, once for the ranks of all kinds of hangs."""
    one = Driver(tmp_path_factory.mktemp("hang") / "driver", ["torch"], PYTHONFAULTHANDLER="1")
    with contextlib.closing(one):
        one.script(DATA_PY, "data.py")
        one.script(TRAIN_PY, "train.py")
        os.mkfifo(one.code / "fifo")
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sleep", "loop", "stopped", "fifo"])
def test_the_hanging_rank_and_line_are_named_with_and_without_py_spy(kind, driver, without_py_spy):
    driver.call("stop", 0)  # what a kind that failed has left
    pids = driver.start(
        *([("python", "train.py", kind, "fifo")] * 3),
        env={
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
    )
    lines = DATA_PY.splitlines()
    line = next(
        number for number, text in enumerate(lines, 1) if kind in lines[number - 2] and "HERE" in text
    )
    verb = "is stopped (by SIGSTOP or a debugger)" if kind == "stopped" else "hangs"
    expected = f"rank 1 {verb} in load_batch (data.py:{line}); 2 others wait for it in backward"
    found: dict[int, Stack] = {}

    def told() -> str:
        nonlocal found
        assert driver.call("poll") == {}, driver.log()
        found = stacks(pids, python=sys.executable, timeout_s=10, logs=None)
        return explain(found, {}).line

    # A rank that py-spy has just let go on may be seen running, before it sleeps again.
    state = {"sleep": "S", "loop": "R", "stopped": "T", "fifo": "S"}[kind]
    until(lambda: told() == expected and found[1].state == state, timeout_s=100, what=expected)
    assert {stack.how for stack in found.values()} == {"py-spy"}
    shown = f"load_batch ({driver.code}/data.py:{line})  {lines[line - 1].strip()}"
    assert explain(found, {}).stack[0] == shown

    python = without_py_spy()
    nothing = stacks(pids, python=python, timeout_s=10)
    assert {stack.how for stack in nothing.values()} == {"none"}
    assert driver.call("poll") == {}, "without logs nobody is ended"
    found = stacks(pids, python=python, timeout_s=LONG_S, logs=driver.logs)
    assert {stack.how for stack in found.values()} == {"faulthandler"}
    for stack in found.values():
        assert stack.text.rpartition(" 0x")[0].endswith("Current thread"), (
            "the main thread took the signal itself"
        )
    assert explain(found, {}).line == expected
    assert driver.end() == [-signal.SIGABRT] * 3


SLEEPER = "import time\ndef nap():\n    time.sleep(1000)\nnap()\n"


@pytest.mark.slow
def test_processes_of_every_kind_are_looked_at_without_an_error(tmp_path, started):
    (tmp_path / "nap.py").write_text(SLEEPER)
    ended = started("/bin/true")
    until(lambda: Path(f"/proc/{ended.pid}/stat").read_text().split()[2] == "Z", what="the zombie")
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    sleep = started("/bin/sleep", "1000")
    shell = started("/bin/sh", "-c", '"$0" "$1"; true', sys.executable, str(tmp_path / "nap.py"))
    until(lambda: Path(f"/proc/{sleep.pid}/stat").read_text().split()[2] == "S", what="the sleep")
    pids = {0: ended.pid, 1: gone.pid, 2: sleep.pid, 3: shell.pid}

    def look() -> dict[int, Stack]:
        return stacks(
            pids, python=sys.executable, timeout_s=LONG_S, logs=dict.fromkeys(pids, tmp_path / "no.log")
        )

    try:
        until(lambda: [each.function for each in look()[3].frames[:1]] == ["nap"], what="the child's nap")
        until(lambda: look()[3].state == "S", what="its sleep")
        found = look()
        assert [found[rank].how for rank in pids] == ["none", "none", "none", "py-spy"]
        assert [found[rank].state for rank in pids] == ["Z", "", "S", "S"]
        assert found[3].frames[0] == Frame("nap", str(tmp_path / "nap.py"), 3, "time.sleep(1000)")
        assert "Failed to find python version" in found[2].text
        assert explain(found, {}).ranks == (0, 1)
    finally:
        for child in stacks_module._family(shell.pid)[1:]:
            os.kill(child, signal.SIGKILL)
    assert sleep.poll() is None


@pytest.mark.slow
def test_a_child_that_keeps_the_rank_waiting_is_shown_too(tmp_path, started):
    (tmp_path / "parent.py").write_text(
        "import os, time\npid = os.fork()\ndef fetch():\n    time.sleep(1000)\n"
        "def next_batch():\n    os.waitpid(pid, 0)\nnext_batch() if pid else fetch()\n"
    )
    parent = started(sys.executable, str(tmp_path / "parent.py"))

    def text() -> str:
        return stacks({0: parent.pid}, python=sys.executable, timeout_s=10)[0].text

    try:
        until(lambda: "next_batch" in text() and "fetch" in text(), what="both stacks")
    finally:
        for child in stacks_module._family(parent.pid)[1:]:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spy", "said"),
    [
        ("echo 'Error: Permission Denied: try sudo' >&2; exit 1", "py-spy: Permission Denied: try sudo"),
        ("exec sleep 1000", "timed out"),
        ("echo nonsense", "py-spy: "),
    ],
)
def test_a_py_spy_that_fails_leads_to_faulthandler(spy, said, tmp_path, started):
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{spy}\n")
    (tmp_path / "py-spy").chmod(0o755)
    (tmp_path / "nap.py").write_text(SLEEPER)
    log = tmp_path / "log"

    def look(timeout_s: float, logs: dict[int, Path] | None = None) -> Stack:
        nap = started(sys.executable, str(tmp_path / "nap.py"), log=log, PYTHONFAULTHANDLER="1")
        until(lambda: stacks_module._catches_abort(nap.pid), what="faulthandler")
        until(lambda: Path(f"/proc/{nap.pid}/wchan").read_text() == "hrtimer_nanosleep", what="the nap")
        time_s = time.monotonic()
        found = stacks({0: nap.pid}, python=str(tmp_path / "python"), timeout_s=timeout_s, logs=logs)[0]
        assert time.monotonic() - time_s < 100, "one of them sleeps for 1000 s"
        assert logs is None or nap.wait(60) == -signal.SIGABRT
        return found

    # The one that sleeps is waited for, so these times are short: who comes too late for them is looked at again.
    alone = until(lambda: said in (found := look(2)).text and found, what=said)
    assert alone.how == "none"
    found = until(lambda: (found := look(4, {0: log})).frames and found, what="the stack")
    assert (found.how, found.frames[0].function, found.state) == ("faulthandler", "nap", "S")


@pytest.mark.slow
def test_a_rank_that_faulthandler_does_not_guard_is_left_alive(tmp_path, started, without_py_spy):
    (tmp_path / "nap.py").write_text(SLEEPER)
    nap = started(sys.executable, str(tmp_path / "nap.py"), log=tmp_path / "log")
    found = stacks({0: nap.pid}, python=without_py_spy(), timeout_s=2, logs={0: tmp_path / "log"})[0]
    assert (found.how, found.text) == ("none", "no stack: there is no py-spy")
    assert nap.poll() is None


def test_of_a_python_whose_threads_have_no_ids_the_main_thread_is_known_by_its_name(tmp_path, started):
    """As py-spy 0.4 tells of a sleeping rank's Python 3.10 (``--nonblocking``): its newest thread first."""
    threads = [
        {"os_thread_id": None, "thread_name": each, "frames": [{"name": each, "filename": "x", "line": 1}]}
        for each in ("Saver", "MainThread")
    ]
    (tmp_path / "said").write_text(json.dumps(threads))
    (tmp_path / "py-spy").write_text(f"#!/bin/sh\ncat '{tmp_path}/said'\n")
    (tmp_path / "py-spy").chmod(0o755)
    nap = started("sleep", "1000")
    found = stacks({0: nap.pid}, python=str(tmp_path / "python"), timeout_s=100)[0]
    assert [frame.function for frame in found.frames] == ["MainThread"]


def test_py_spy_is_found_beside_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("py-spy") is None
    assert stacks_module.find_spy(str(tmp_path / "python")) is None
    (tmp_path / "py-spy").write_text("#!/bin/sh\n")
    (tmp_path / "py-spy").chmod(0o755)
    assert stacks_module.find_spy(str(tmp_path / "python")) == str(tmp_path / "py-spy")


def test_a_clock_that_is_set_makes_no_rank_linger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the other node are done, and this one's still write: now and then, with times of an hour ago."""
    monkeypatch.setattr(hang, "FLOOR_S", 0.5)
    monkeypatch.setattr(hang_diagnosis, "LOOK_S", 0.0)
    told: list[str] = []

    store = SimpleNamespace(get=lambda _: None)
    formed = SimpleNamespace(store=store, members=("n0", "n1"), without=lambda _: ["n0"])
    record = SimpleNamespace(
        progress=lambda: hang.read_progress(tmp_path), event=lambda kind, **_: told.append(kind)
    )
    diagnosis = hang_diagnosis.HangDiagnosis("auto", record)  # type: ignore[arg-type]  # all that is used of it
    diagnosis.begin(formed, {}, {})  # type: ignore[arg-type]  # the same
    begun, hour_ago = time.monotonic(), time.time() - 3600
    for number in range(20):
        (tmp_path / "rank0").write_text("10/10")
        os.utime(tmp_path / "rank0", (hour_ago - number, hour_ago - number))
        assert not diagnosis.finds_a_hang(lambda: None)
        time.sleep(0.05)
    assert time.monotonic() - begun > hang.FLOOR_S
    assert until(lambda: diagnosis.finds_a_hang(lambda: None), what="the end of patience")
    assert told == ["lingering"]


def test_ranks_whose_files_cannot_be_written_are_not_taken_for_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_diagnosis, "LOOK_S", 0.0)
    formed = SimpleNamespace(
        store=SimpleNamespace(get=lambda _: None), members=("n0",), without=lambda _: ["n0"]
    )
    is_lost, shared = [True], list[str]()
    record = SimpleNamespace(
        progress=lambda: hang.read_progress(tmp_path), event=Mock(), cannot_be_told=lambda: is_lost[0]
    )
    diagnosis = hang_diagnosis.HangDiagnosis(0.2, record)  # type: ignore[arg-type]  # all that is used of it
    monkeypatch.setattr(diagnosis, "_share", lambda key, **_: shared.append(key))
    monkeypatch.setattr(diagnosis, "_explain", lambda *_: (Mock(ranks=(0,)), []))
    formed.world_size = 1
    diagnosis.begin(formed, {}, {})  # type: ignore[arg-type]  # the same
    for step in range(1, 4):
        (tmp_path / "rank0").write_text(f"{step}/10")
        assert not diagnosis.finds_a_hang(lambda: None)
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        assert not diagnosis.finds_a_hang(lambda: None)
        time.sleep(0.02)
    is_lost[0] = False
    assert not diagnosis.finds_a_hang(lambda: None), "the disk is back, and the next step not yet"
    assert until(lambda: diagnosis.finds_a_hang(lambda: None), what="the hang")
    assert shared == ["hang"]


def test_a_rank_whose_log_was_removed_is_still_heard(tmp_path: Path) -> None:
    log = tmp_path / "rank0-attempt0.0.log"
    with log.open("a") as file, subprocess.Popen(["sleep", "60"], stdout=file) as rank:
        try:
            log.unlink()
            sizes = []
            for _ in range(2):
                file.write("step\n")
                file.flush()
                sizes.append(hang_diagnosis._size(log, rank.pid))
        finally:
            rank.kill()
    assert sizes == [5, 10]
