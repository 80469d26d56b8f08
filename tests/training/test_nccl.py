"""Leaving NCCL's group, as far as a machine without a GPU can show it: gloo's stands in for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from agents import until

from nodekit.training import World
from nodekit.training import world as world_module
from nodekit.training.group import nccl

CUDA = torch.device("cuda", 0)


class SlowEnd:
    """Of all groups: how they are ended, and that it takes as long as the test wants."""

    def __init__(self) -> None:
        self.how: list[str] = []
        self.may_end = threading.Event()

    def __call__(self, how: str) -> None:
        self.how.append(how)
        self.may_end.wait(60)


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowEnd]:
    made = SlowEnd()
    monkeypatch.setattr(nccl, "_ending", [])
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", lambda _: made("shutdown"))
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda _: made("abort"))
    nccl.prepare(aborts=False)
    form()
    yield made
    made.may_end.set()
    if dist.is_initialized():
        nccl.close()
    nccl.prepare(aborts=False)


def alive() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "nodekit-nccl"]


def form() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("is_lost", [False, True], ids=["for a node that comes in", "a rank is lost"])
def test_who_goes_on_meets_the_others_while_the_old_group_still_ends(end: SlowEnd, is_lost: bool) -> None:
    if is_lost:
        nccl.leave()
        assert nccl.has_left()
    nccl.close_in_thread()
    assert not dist.is_initialized()
    nccl.prepare(aborts=False)
    form()
    dist.all_reduce(ones := torch.ones(2))
    assert ones.tolist() == [1, 1]
    until(lambda: end.how)
    assert set(end.how) == {"abort" if is_lost else "shutdown"}
    assert alive()


def test_where_a_gpu_is_nearly_full_the_old_groups_memory_is_waited_for(
    end: SlowEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [nccl._ROOM_BYTES]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 << 30))
    nccl.make_room(CUDA)
    nccl.close_in_thread()
    nccl.make_room(CUDA)
    assert alive()
    free[0] -= 1
    threading.Timer(0.2, end.may_end.set).start()
    nccl.make_room(CUDA)
    assert not alive()


def test_the_last_group_is_closed_when_all_have_ended(end: SlowEnd) -> None:
    nccl.close_in_thread()
    form()
    threading.Timer(0.2, end.may_end.set).start()
    nccl.close()
    assert end.how == ["shutdown", "shutdown"]
    assert not alive()


def test_a_group_that_is_not_nccls_is_closed_at_once(end: SlowEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of gloo's may still use it: it is torch's to end."""
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    end.may_end.set()
    nccl.close_in_thread()
    assert not dist.is_initialized()
    assert nccl._ending == []


def test_a_loop_with_groups_of_its_own_waits_for_them_all(end: SlowEnd) -> None:
    """NCCL would have to be told that several are aborted together."""
    dist.new_group([0])
    threading.Timer(0.2, end.may_end.set).start()
    nccl.close_in_thread()
    assert not dist.is_initialized()
    assert len(end.how) == 2
    assert not alive()


def test_a_lost_rank_ends_also_the_groups_of_ones_own_in_which_this_one_may_wait(end: SlowEnd) -> None:
    """One after the other, the first might wait for the second."""
    dist.new_group([0])
    nccl.leave()
    until(lambda: end.how == ["abort", "abort"])
    assert len(alive()) == 2
    nccl.leave()
    assert len(alive()) == 2, "each is aborted once"


def test_where_no_thread_can_be_started_who_leaves_aborts_by_itself(
    end: SlowEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    end.may_end.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        nccl.leave()
    assert end.how == ["abort"]
    nccl.close_in_thread()


def test_what_does_not_end_is_waited_for_once(end: SlowEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_END_TIMEOUT_S", 0.2)
    nccl.leave()
    nccl.close_in_thread()
    nccl.wait_until_ended()
    assert alive()
    monkeypatch.setattr(nccl, "_END_TIMEOUT_S", 3600.0)
    nccl.wait_until_ended()


def test_a_group_that_fails_to_end_is_told_in_a_line(end: SlowEnd, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("ncclUnhandledCudaError: out of memory\nframe #0: …")

    nccl._end_in_thread(fail)
    nccl.wait_until_ended()
    assert caplog.messages == ["NCCL's old group: ncclUnhandledCudaError: out of memory"]


def test_a_start_of_nccl_that_fails_leaves_no_trace(end: SlowEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks name their groups by how many they have made: this one would wait for the others in another one."""
    nccl.close_in_thread()
    init = dist.init_process_group

    def fail(_backend: str, **more: Any) -> None:
        """As where NCCL cannot start: torch has counted the group, and forms none."""
        init("gloo", **{**more, "device_id": None, "world_size": 2, "timeout": timedelta(seconds=0.1)})

    monkeypatch.setattr(dist, "init_process_group", fail)
    before = nccl._num_groups
    with pytest.raises(RuntimeError, match="timeout"):
        nccl.warm_up(CUDA)
    assert (dist.is_initialized(), dist.distributed_c10d._world.group_count) == (False, 0)
    assert nccl._num_groups == before + 1


def test_a_group_that_was_left_at_once_counts_as_the_first_too(
    monkeypatch: pytest.MonkeyPatch, end: SlowEnd
) -> None:
    """For it torch has answered kit's question for the flight recorder, and for no later one."""
    nccl.close_in_thread()
    end.may_end.set()
    init = dist.init_process_group
    monkeypatch.setattr(nccl, "_num_groups", 0)
    monkeypatch.setattr(nccl, "make_room", lambda _: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda _, **more: init("gloo", **{**more, "device_id": None})
    )

    def lost() -> None:
        raise nccl.LostRank("another rank is lost")

    monkeypatch.setattr(nccl, "check", lost)
    world = replace(World.from_env({}), backend="nccl")
    with pytest.raises(nccl.LostRank):
        world.__enter__()
    assert nccl._num_groups == 1


def test_no_collective_is_begun_once_the_group_is_left(end: SlowEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch aborts, it would wait."""
    begun: list[torch.Tensor] = []
    monkeypatch.setattr(world_module, "start_sum", lambda values, _: begun.append(values))
    nccl.leave()
    with pytest.raises(nccl.LostRank):
        World.from_env({}).start_sum(torch.ones(1))
    assert begun == []


@pytest.mark.parametrize(("given", "found"), [({}, "0"), ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "1")])
def test_torch_dumps_by_itself_where_ranks_stay_only_if_the_user_says_so(
    given: dict[str, str], found: str
) -> None:
    with mock.patch.dict(os.environ, given):
        os.environ.pop("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", None)
        nccl.prepare(aborts=True)
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == found
        assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "250", "a close waits four times that"
    nccl.prepare(aborts=False)
