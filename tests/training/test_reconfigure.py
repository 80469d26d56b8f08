"""gloo's group, kept from one attempt to the next: with a torch that can do so, which `.ci/setup test` installs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from agents import until
from places import NEWER_TORCH

from nodekit.training.group import reconfigure

pytestmark = pytest.mark.slow

RANK = """
import json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from nodekit.training.group import connections, reconfigure

torch.set_num_threads(1)
tensor, more = torch.ones(1), []

def join(rank, size, port, *, timeout_s=30.0):
    global _store
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    before = None
    if dist.is_initialized():
        before = dist.group.WORLD._get_backend(torch.device("cpu")) if reconfigure.keep() else None
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # as reform.leave
    with reconfigure.enabled():
        connections.remember()
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
    dist.all_reduce(summed := torch.tensor([10.0**rank]))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return {
        "sum": summed.item(), "rank": dist.get_rank(), "size": dist.get_world_size(),
        "same": backend is before, "left": reconfigure.num_left(),
        "threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd")),
    }

def begin_alone():
    '''A collective that the others do not come to.'''
    more.append(dist.all_reduce(tensor, async_op=True))

def hold_on():
    '''Let no connection be shut, so that what waits for others waits on.'''
    connections.shut_down = lambda *_: None

def fall_silent():
    '''In the middle of the next meeting.'''
    dist.distributed_c10d.ReconfigureOptions = lambda: time.sleep(600)

def leave():
    reconfigure.keep()
    dist.destroy_process_group()

def end():
    sys.exit(3)

def sum_in_a_group_of_its_own():
    group = dist.new_group([*range(dist.get_world_size())], timeout=timedelta(seconds=30))
    dist.all_reduce(summed := torch.ones(1), group=group)
    more.append(group)
    return summed.item()

def begin_an_ordinary_group(port):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return reconfigure.keep()

is_available = reconfigure.is_available

for line in sys.stdin:
    name, args, kwargs = json.loads(line)
    try:
        said = globals()[name](*args, **kwargs)
    except Exception as error:
        said = [type(error).__name__, connections.is_lost_rank(error)]
    print(json.dumps(said), flush=True)
os._exit(0)
"""


class Rank:
    """A process with torch 2.14 that does what it is told."""

    def __init__(self, **env: str) -> None:
        argv = [NEWER_TORCH, "-c", RANK]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"GLOO_SOCKET_IFNAME": "lo", **env},
        )

    def tell(self, name: str, *args: Any, **kwargs: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([name, args, kwargs]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.tell(name, *args, **kwargs)
        return self.answer()


Start = Callable[..., Rank]


@pytest.fixture
def start() -> Iterator[Start]:
    ranks: list[Rank] = []

    def start(**env: str) -> Rank:
        ranks.append(Rank(**env))
        return ranks[-1]

    yield start
    for each in ranks:
        each.process.kill()
        each.process.communicate()


class Meeting:
    """A store for one attempt, which ends with it."""

    def __init__(self) -> None:
        self.server: Any = dist.TCPStore(  # type: ignore[attr-defined]  # no stub
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def of(self, *ranks: Rank, **options: Any) -> list[Any]:
        """Have these join each other, in this order."""
        for number, each in enumerate(ranks):
            each.tell("join", number, len(ranks), self.server.port, **options)
        return [each.answer() for each in ranks]


def test_a_group_goes_on_with_others_and_leaves_nothing_behind(start: Start) -> None:
    """Ranks get other numbers, rank 0 is lost, and the store of the attempt before is gone each time."""
    lost, first, second = start(), start(), start()
    assert [each["sum"] for each in Meeting().of(lost, first, second)] == [111] * 3
    lost.process.kill()
    found = [Meeting().of(second, first)]
    for _ in range(4):
        new = start()
        found.append(Meeting().of(new, second, first)[1:])
        new.process.kill()
        found.append(Meeting().of(first, second)[::-1])
    for number, attempt in enumerate(found):
        size = 3 if number % 2 else 2
        assert [(each["sum"], each["size"], each["same"]) for each in attempt] == [
            (111 if size == 3 else 11, size, True)
        ] * 2
        assert sorted(each["rank"] for each in attempt) == ([1, 2] if size == 3 else [0, 1])
    for each in zip(*found[::2], strict=True):
        assert len({(one["threads"], one["descriptors"], one["left"]) for one in each}) == 1, each


def test_what_waited_for_a_lost_rank_has_ended_before_the_group_goes_on(start: Start) -> None:
    lost, left = start(), start()
    Meeting().of(lost, left)
    left.ask("begin_alone")
    (found,) = Meeting().of(left)
    assert (found["same"], found["left"], found["sum"]) == (True, 0, 1)


def test_a_group_is_left_with_a_collective_that_does_not_end(start: Start) -> None:
    """gloo does not tell a thread of half a message that its other half will not come."""
    silent, deaf, other = start(), start(), start()
    Meeting().of(silent, deaf)
    deaf.ask("begin_alone")
    deaf.ask("hold_on")
    found = Meeting().of(other, deaf)
    assert [(each["sum"], each["same"], each["left"]) for each in found] == [(11, False, 0), (11, False, 1)]
    again = Meeting().of(deaf, other)
    assert [(each["sum"], each["same"], each["left"]) for each in again] == [(11, True, 1), (11, True, 0)]


@pytest.mark.parametrize("joins_again", [True, False])
def test_a_process_ends_although_a_collective_that_was_left_does_not(start: Start, joins_again: bool) -> None:
    """Python's shutdown would free the group, and so wait for it: as long as a collective may take."""
    silent, deaf, other = start(), start(), start()
    Meeting().of(silent, deaf)
    deaf.ask("begin_alone")
    deaf.ask("hold_on")
    deaf.ask("leave")
    if joins_again:
        assert Meeting().of(other, deaf)[1]["left"] == 1
    deaf.tell("end")
    assert deaf.process.wait(timeout=20) == 3, "before the 30 s of the collective are over"


def test_a_group_that_did_not_meet_is_left(start: Start) -> None:
    """Two new ranks that have failed to meet could come with the same handle."""
    one, other = start(), start()
    Meeting().of(one, other)
    alone = Meeting()
    assert one.ask("join", 0, 2, alone.server.port, timeout_s=0.5) == ["DistStoreError", True]
    found = Meeting().of(other, one)
    assert [(each["sum"], each["same"], each["left"]) for each in found] == [(11, True, 0), (11, False, 1)]


def test_ranks_of_different_attempts_meet(start: Start) -> None:
    """Both were rank 1 in their last attempt."""
    one, other, lost = start(), start(), start()
    Meeting().of(lost, one)
    Meeting().of(start(), other)
    assert [each["same"] for each in Meeting().of(one, other)] == [True, True]


class Barriers:
    """A backend that says of each barrier whether it ends."""

    def __init__(self, *end: bool) -> None:
        self._end = iter(end)

    def barrier(self) -> Any:
        ends = next(self._end)
        return SimpleNamespace(is_completed=lambda: ends)


@pytest.mark.parametrize(
    ("end", "has_ended"), [((True, True), True), ((True, False), False), ((False,), False)]
)
def test_a_barrier_that_fails_with_what_came_first_says_nothing_of_the_rest(
    end: tuple[bool, ...], has_ended: bool
) -> None:
    store = reconfigure._Forwarding(None)
    assert reconfigure._has_ended(reconfigure._Gloo(Barriers(*end), store, set())) is has_ended


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(("lost", "error"), [("rank", "DistStoreError"), ("store", "DistNetworkError")])
def test_a_loss_while_they_meet_is_told_by_torchs_own_error(
    start: Start, lost: str, error: str, stays: bool
) -> None:
    """It has gone through gloo, whose store is a Python object then."""
    one, silent, meeting = start(), start(), Meeting()
    if stays:
        Meeting().of(one)
    silent.ask("fall_silent")
    silent.tell("join", 1, 2, meeting.server.port)
    one.tell("join", 0, 2, meeting.server.port, timeout_s=1.0 if lost == "rank" else 30.0)
    claimed = "0//cpu//reconfigure"
    until(
        lambda: any(claimed in each for each in meeting.server.list_keys()),
        what="one of them meets the other",
    )
    if lost == "store":
        del meeting.server
    assert one.answer() == [error, True]


def test_groups_of_a_scripts_own_are_torchs(start: Start) -> None:
    ranks, meeting = [start(), start()], Meeting()
    meeting.of(*ranks)
    for each in ranks:
        each.tell("sum_in_a_group_of_its_own")
    assert [each.answer() for each in ranks] == [2, 2]
    assert all(each["same"] for each in Meeting().of(*ranks)), "and they do not keep it from going on"
    assert ranks[0].ask("begin_an_ordinary_group", Meeting().server.port) is False


@pytest.mark.parametrize(
    ("env", "is_available"),
    [
        ({}, True),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, False),
        ({"TORCH_GLOO_LAZY_INIT": "1"}, False),
        ({"TORCH_GLOO_LAZY_INIT": "0"}, True),
    ],
)
def test_where_torch_wraps_its_backends_or_connects_later_they_are_made_anew(
    start: Start, env: dict[str, str], is_available: bool
) -> None:
    assert start(**env).ask("is_available") is is_available


def test_with_an_earlier_torch_groups_are_made_anew() -> None:
    """As here; the processes above have another one."""
    assert sys.executable != str(NEWER_TORCH)
    assert not reconfigure.is_available()
