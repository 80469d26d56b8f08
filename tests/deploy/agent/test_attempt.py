"""How long an attempt's ranks are waited for, which of them stay, and which have failed: without a process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nodekit.deploy.agent.hang.hang import Progress
from nodekit.deploy.agent.ranks import attempt, children
from nodekit.deploy.agent.ranks.attempt import (
    ALSO_S,
    HEARD_LOOKS,
    LOOK_S,
    UNREAD_LOOKS,
    Attempts,
)
from nodekit.deploy.agent.ranks.target import TRAINING
from nodekit.deploy.agent.ranks.workers import WorkerStart
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.training.process import stages

RAISED = b"Traceback (most recent call last):\nValueError: mine\n"
PEER = b"Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"
NEXT_LOOK_S = LOOK_S * 1.25


class Node:
    """A node's ranks 4 and 5, which do what a test says; its clock goes on only while it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now = 1000.0
        self.exits: dict[int, int] = {}
        self.progress: dict[int, Progress] = {}
        self.sent: list[tuple[int, str]] = []
        self.deaf: set[int] = set()
        self.unread: set[int] = set()
        self.stops: list[tuple[float, dict[str, Any]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.done: list[str] = []
        self.begun: list[int] = []
        self.later: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr(
            attempt, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + 1e6)
        )
        (folder / "logs").mkdir()
        own: Any = Attempts.__new__(Attempts)
        own.ranks, own._folder, own._attempt, own._world_size = {0: 4, 1: 5}, folder, "0.7", 6
        own._told, own._heard_looks, own._ended = {}, 0, {}
        own._keeping, own._staying, own._stayed, own._standing_by = set(), set(), set(), set()
        own._may_stay, own._have_stayed, own.is_on = False, False, True
        own._grace_s, own._started, own._pids_then = 20.0, self.now - 5.0, {}
        own._has_gpus = own._is_own_loop = False
        own.workers = SimpleNamespace(
            pids={0: 100, 1: 101}, poll=lambda: dict(self.exits), wait=self.wait, stop=self._stop, stuck=[]
        )
        own._messages = SimpleNamespace(
            send=self._send,
            is_unread=lambda local_rank: local_rank in self.unread,
            keep_no_more=lambda: self.done.append("keep no more"),
        )
        own._record = SimpleNamespace(
            progress=lambda: self.progress,
            event=lambda kind, **fields: self.events.append((kind, fields)),
            look=lambda is_last: self.done.append(f"look, last: {is_last}"),
            step=12,
            make_snapshot_dir=lambda: self.done.append("snapshot dir"),
            forget_progress=self.progress.clear,
        )
        own._logbook = SimpleNamespace(look=lambda: self.done.append("logs"))
        own._start_standing_by = lambda _, local_ranks, *, num_ranks: self.begun.extend(
            [*local_ranks, num_ranks]
        )
        self.attempts: Attempts = own
        self.own = own

    def wait(self, seconds: float) -> bool:
        """Let time go on by this much, or until a rank does something."""
        until = self.now + seconds
        for item in sorted((each for each in self.later if each[0] <= until), key=lambda each: each[0]):
            self.later.remove(item)
            item[1]()
        self.now = until
        return False

    def _stop(self, grace_s: float, **how: Any) -> bool:
        self.stops.append((grace_s, how))
        if "staying" in how:
            how["staying"]()
        return False

    def _send(self, local_rank: int, message: dict[str, str]) -> bool:
        self.sent.append((local_rank, message["kind"]))
        return local_rank not in self.deaf

    def says(self, local_rank: int, text: str) -> None:
        self.progress[self.attempts.ranks[local_rank]] = Progress.parse(text, 0.0)

    def ends(self, local_rank: int, code: int, log: bytes = b"") -> None:
        self.exits[local_rank] = code
        rank = self.attempts.ranks[local_rank]
        (self.own._folder / "logs" / f"rank{rank}-attempt0.7.log").write_bytes(log)

    def waits(self, is_kept: Callable[[], bool], *, at_most_s: float = 1000.0) -> float:
        """How long is waited as `Workers.stop` does."""
        began = self.now
        while is_kept() and self.now < began + at_most_s:
            self.wait(NEXT_LOOK_S)
        return self.now - began


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    return Node(monkeypatch, tmp_path)


def looks(number: int) -> Any:
    return pytest.approx(number * NEXT_LOOK_S, abs=1.5 * NEXT_LOOK_S)


def test_ranks_that_read_what_they_are_told_and_keep_nothing_are_given_a_moment(node: Node) -> None:
    assert node.waits(node.own._tell("lost")) == looks(HEARD_LOOKS)
    assert node.sent == [(0, "lost"), (1, "lost")]


def test_ranks_that_read_nothing_are_not_waited_for(node: Node) -> None:
    node.deaf = {0, 1}
    assert node.waits(node.own._tell("lost")) == 0
    assert node.own._told == {}


def test_who_has_not_read_it_yet_is_waited_for_a_while(node: Node) -> None:
    node.unread = {1}
    node.later = [(node.now + 50 * NEXT_LOOK_S, node.unread.clear)]
    assert node.waits(node.own._tell("lost")) == looks(50 + HEARD_LOOKS)
    node.own._told = {}
    node.unread = {1}
    assert node.waits(node.own._tell("lost")) == looks(UNREAD_LOOKS + HEARD_LOOKS)


def test_who_has_ended_or_cannot_be_told_has_nothing_to_read(node: Node) -> None:
    node.unread = {1}
    node.ends(1, 0)
    assert node.waits(node.own._tell("lost")) == looks(HEARD_LOOKS)
    node.exits, node.deaf, node.own._told = {}, {1}, {}
    assert node.waits(node.own._tell("lost")) == looks(HEARD_LOOKS)


def test_looks_in_quick_succession_count_once(node: Node) -> None:
    is_kept = node.own._tell("lost")
    assert all(is_kept() for _ in range(3 * HEARD_LOOKS))


@pytest.mark.parametrize("says", [stages.KEEPING, stages.PAUSING])
def test_a_rank_that_keeps_its_step_has_the_grace_for_it_and_no_more(says: str, node: Node) -> None:
    node.says(0, f"12/50 {says}")
    assert node.waits(node.own._tell("lost")) == pytest.approx(20.0, abs=0.1)
    node.own._told = {}
    assert node.waits(node.own._tell("lost", 3.0)) == pytest.approx(3.0, abs=0.1)


def test_a_rank_that_keeps_its_step_is_waited_for_until_it_has_ended_or_stays(node: Node) -> None:
    node.says(0, f"12/50 {stages.KEEPING}")
    node.says(1, f"12/50 {stages.KEEPING}")
    node.later = [
        (node.now + 3.0, lambda: node.ends(0, 143)),
        (node.now + 5.0, lambda: node.says(1, f"12/50 {stages.WAITING}")),
    ]
    assert node.waits(node.own._tell("lost")) == pytest.approx(5.0, abs=0.1)


def test_one_that_has_stayed_and_says_nothing_yet_in_this_attempt_has_a_step_to_keep(node: Node) -> None:
    node.own._stayed = {1}
    assert node.waits(node.own._tell("lost", 3.0)) == pytest.approx(3.0, abs=0.1)
    node.own._told = {}
    node.says(1, "1/50 loss 1.0")
    assert node.waits(node.own._tell("lost", 3.0)) == looks(HEARD_LOOKS)


def test_what_a_rank_did_when_it_was_told_before_counts_no_more(node: Node) -> None:
    node.says(0, f"12/50 {stages.PAUSING}")
    assert node.own._tell("lost", 3.0)()
    node.says(0, "13/50 loss 1.0")
    assert node.waits(node.own._tell("lost", 3.0)) < 1


def test_no_rank_is_told_twice_and_one_that_pauses_is_told_of_a_loss(node: Node) -> None:
    node.deaf = {1}
    node.own._tell("pause")
    assert node.own._told == {0: "pause"}
    node.own._tell("pause")
    assert node.sent == [(0, "pause"), (1, "pause"), (1, "pause")], "it may listen by now"
    node.deaf, node.sent = set(), []
    node.own._tell("lost")
    node.own._tell("lost")
    node.own._tell("pause")
    assert node.sent == [(0, "lost"), (1, "lost")], "who leaves does not pause"


def test_who_can_go_on_in_another_attempt_is_waited_for_until_it_pauses(node: Node) -> None:
    assert node.waits(node.attempts.pause()) == looks(HEARD_LOOKS), "it cannot"
    node.own._told, node.own._may_stay = {}, True
    is_pausing = node.attempts.pause()
    assert node.waits(is_pausing, at_most_s=60.0) == pytest.approx(60.0, abs=0.1), "it evaluates"
    for local_rank in (0, 1):
        node.says(local_rank, f"12/50 {stages.WAITING}")
    assert not is_pausing()
    assert node.own._staying == {0, 1}


def test_of_a_loss_who_can_go_on_but_says_nothing_is_waited_for_a_moment_only(node: Node) -> None:
    node.own._may_stay = True
    assert node.waits(node.own._tell("lost")) == looks(HEARD_LOOKS)


def test_who_waits_for_the_next_attempt_has_not_stayed_once_it_has_ended(node: Node) -> None:
    node.says(0, f"12/50 {stages.WAITING}")
    assert node.own._stay() == set(), "nobody was told yet: it is what it said in the last attempt"
    node.own._tell("lost")
    assert node.own._stay() == {0}
    node.ends(0, -9)
    assert node.own._stay() == set()


# --- failures -----------------------------------------------------------------------------------------------


def failed(node: Node, wait_s: float) -> list[int]:
    return [each["rank"] for each in node.attempts.failures(wait_s)]


def test_who_lost_a_peer_is_waited_for_to_say_so(node: Node) -> None:
    node.deaf = {0, 1}
    node.ends(0, 1, PEER)
    node.later = [(node.now + 3.0, lambda: node.ends(1, 1, RAISED))]
    began = node.now
    assert failed(node, 10.0) == [4, 5]
    assert node.now - began == pytest.approx(3.0, abs=0.1)
    assert node.done == ["logs"]


def test_those_that_say_nothing_are_waited_for_as_long_as_was_asked_and_no_longer(node: Node) -> None:
    node.deaf = {0, 1}
    node.ends(0, 1, PEER)
    began = node.now
    assert failed(node, 10.0) == [4]
    assert node.now - began == pytest.approx(10.0, abs=0.1)


def test_where_one_says_why_it_failed_the_others_have_a_moment_to_fail_of_the_same(node: Node) -> None:
    node.deaf = {0, 1}
    node.ends(0, 1, RAISED)
    began = node.now
    assert failed(node, 10.0) == [4]
    assert node.now - began == pytest.approx(ALSO_S, abs=0.03)


def test_a_rank_that_keeps_its_step_is_waited_for_beyond_that(node: Node) -> None:
    node.ends(0, 1, RAISED)
    node.says(1, f"12/50 {stages.KEEPING}")
    node.later = [(node.now + 7.0, lambda: node.says(1, f"12/50 {stages.WAITING}"))]
    began = node.now
    assert failed(node, 1.0) == [4], "who waits for the next attempt has not failed"
    assert node.now - began == pytest.approx(7.0, abs=0.1)


def test_nobody_waits_once_all_have_ended_or_stay(node: Node) -> None:
    node.ends(0, 1, PEER)
    node.later = [(node.now + 2.0, lambda: node.says(1, f"12/50 {stages.WAITING}"))]
    began = node.now
    assert failed(node, 10.0) == [4]
    assert node.now - began == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("code", attempt.EXITS_NO_FAILURE)
def test_who_ended_as_it_was_asked_to_has_not_failed(code: int, node: Node) -> None:
    node.ends(0, code, RAISED)
    node.ends(1, -9, b"")
    assert failed(node, 10.0) == [5]


def test_what_is_on_record_of_a_failure(node: Node) -> None:
    node.deaf, began = {0, 1}, node.now
    text = b"x" * attempt.LOG_TAIL_BYTES + b"\n" + RAISED
    logs = [node.own._folder / "logs" / f"rank{rank}-attempt0.7.log" for rank in (4, 5)]

    def raises() -> None:
        node.ends(0, 1, text)
        for log, when in zip(logs, (77.0, 88.0), strict=True):
            os.utime(log, (when, when))

    node.ends(1, -9, b"step 3\n")
    node.later = [(began + 0.06, raises)]
    killed, raised = node.attempts.failures(10.0)
    assert (raised["attempt"], raised["local_rank"], raised["world_size"]) == ("0.7", 0, 6)
    assert "ValueError: mine" in raised["error"]
    assert "xxx" not in raised["error"]
    assert raised["when"] == 77.0, "its last words come before its sockets close"
    assert killed["when"] == began + 1e6, "when it was found; it wrote its last line at some other time"
    assert killed["log"] == str(logs[1])


def test_a_rank_that_stays_says_to_whom_it_could_not_connect(node: Node) -> None:
    log = Path(node.own._log_of(5))
    log.write_text(
        "nodekit: another rank is lost: waiting with step 66 (Connection closed by peer [10.0.0.2]:9)\n"
    )
    assert node.own.not_connected() == ""
    said = (
        "connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: "
        "SO_ERROR: No route to host, remote=[10.0.0.3]"
    )
    log.write_text(f"nodekit: another rank is lost: waiting with step 66 (Gloo {said}:61358$2)\n")
    assert node.own.not_connected() == f"rank 5: {said}"
    said = "connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.h:311] Connect timeout"
    log.write_text(f"nodekit: another rank is lost: waiting with step 66 (Gloo {said} [none])\n")
    assert node.own.not_connected() == f"rank 5: {said}", "of torch 2.14's _reconfigure"


def test_who_ended_without_a_word_failed_when_it_was_found(node: Node) -> None:
    """Not at the time 0, before all others."""
    node.ends(0, -signal.SIGTERM)
    node.ends(1, 1)
    assert [each["when"] for each in node.attempts.failures(10.0)] == [node.now + 1e6] * 2


def test_the_kernel_is_asked_of_who_may_have_been_ended_by_it(node: Node) -> None:
    asked: list[list[int]] = []

    def said(pids: list[int]) -> list[str]:
        asked.append(pids)
        return ["Out of memory"]

    node.own._kernel = SimpleNamespace(said=said)
    node.attempts.ranks = dict(enumerate(range(4, 9)))
    node.own.workers.pids = {local_rank: 100 + local_rank for local_rank in range(5)}
    node.ends(0, 1, RAISED)
    node.ends(1, -signal.SIGTERM, b"")
    node.ends(2, -9, b"")
    workers = b"RuntimeError: DataLoader worker (pid(s) 77, 78) exited unexpectedly\n"
    node.ends(3, 1, b"Traceback (most recent call last):\n" + workers)
    node.ends(4, -9, b"DataLoader worker (pid 79) is killed by signal: Killed.\n")
    failures = node.attempts.failures(10.0)
    node.own.workers.pids = {}  # it is asked when they are gone
    node.attempts.ask_the_kernel(failures)
    assert asked == [[102], [103, 77, 78], [104, 79]]
    assert [each["kernel"] for each in failures] == [[], [], *[["Out of memory"]] * 3]


def test_one_that_says_why_it_failed_is_enough(node: Node) -> None:
    node.ends(0, 1, PEER)
    assert not node.attempts.say_why({4: 1})
    node.ends(1, 1, RAISED)
    assert node.attempts.say_why({4: 1, 5: 1})
    assert not node.attempts.say_why({5: 143}), "it ended after a snapshot, whatever it has printed"


# --- failed while pausing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "told", "keeps", "has_failed"),
    [
        (1, None, False, True),
        (0, None, False, False),
        (143, None, False, False),
        (144, None, False, False),
        (1, "pause", True, True),
        (1, "pause", False, False),  # it cannot pause, and ends by any code
        (-signal.SIGTERM, "pause", True, False),  # by a signal of its own
        (-signal.SIGTERM, None, False, True),
        (-signal.SIGKILL, "pause", True, True),
        (1, "lost", False, True),
    ],
)
def test_who_was_to_pause_and_cannot_may_end(
    code: int, told: Any, keeps: bool, has_failed: bool, node: Node
) -> None:
    node.own._told, node.own._keeping = {1: told} if told else {}, {1} if keeps else set()
    node.exits = {1: code}
    assert node.attempts.failed_while_pausing() == ({5: code} if has_failed else {})


def test_ranks_that_can_go_on_are_joining_until_each_has_told_a_step(node: Node) -> None:
    node.says(0, "3/50 loss 1.0")
    assert not node.attempts.is_joining, "they cannot go on"
    node.own._may_stay = True
    assert node.attempts.is_joining
    node.says(1, f"{stages.STARTING}reading its data")
    assert node.attempts.is_joining
    node.says(1, "0/50")
    assert node.attempts.is_joining
    node.ends(1, 1)
    assert not node.attempts.is_joining, "it is gone"
    node.exits = {}
    assert node.attempts.is_joining
    node.own._staying = {1}
    assert not node.attempts.is_joining, "it waits for the next attempt"
    node.own._staying = set()
    node.says(1, "1/50 loss 1.0")
    assert not node.attempts.is_joining


def test_a_loop_that_tells_no_steps_has_begun_once_its_ranks_have_joined(node: Node) -> None:
    """Or a node that comes in would wait for a minute."""
    node.own._may_stay = node.own._is_own_loop = True
    node.says(0, "\n")
    node.says(1, f"{stages.STARTING}meeting the other ranks")
    assert node.attempts.is_joining
    node.says(1, "\n")
    assert not node.attempts.is_joining
    node.own._is_own_loop = False
    assert node.attempts.is_joining, "kit's module says what it does next"


# --- the end of an attempt -----------------------------------------------------------------------------------


def test_who_is_told_of_a_loss_gets_no_signal_and_may_stay(node: Node) -> None:
    node.own._standing_by = {0, 1}
    node.says(1, f"12/50 {stages.WAITING}")
    node.attempts.end(0.25, "a node is lost", tell="lost")
    [(grace_s, how)] = node.stops
    assert grace_s == 0.25
    assert set(how) == {"is_wanted", "unsignalled", "staying", "waits"}
    assert how["waits"] is False, "for memory: what takes a place waits for it"
    assert how["unsignalled"] == {0: "lost", 1: "lost"}
    assert how["staying"]() == {1}
    assert node.own._standing_by == {1}, "it waits for its first attempt yet"
    told = {"attempt": "0.7", "step": 12, "seconds": 5.0, "why": "a node is lost"}
    assert node.events == [("attempt-ended", told)]
    assert node.done == ["keep no more", "logs", "look, last: True"]
    assert not node.attempts.is_on
    for gpus, waits in (
        (True, False),
        (False, True),
    ):  # a driver may keep it from ending; a fence is to be sure
        node.own._has_gpus = gpus
        node.attempts.end(0.25, "again", tell="lost", waits=waits)
        assert node.stops[-1][1]["waits"]


def test_who_waits_for_an_attempt_that_does_not_come_has_the_grace_to_save_what_it_has(node: Node) -> None:
    node.attempts.end(0.25, "stopped")
    node.own._staying = {1}
    node.own._standing_by = {1}
    node.attempts.end(0.25, "stopped")
    node.own._staying = {1}
    node.attempts.end(60.0, "stopped")
    assert [grace_s for grace_s, _ in node.stops] == [0.25, 20.0, 60.0]
    assert (node.own._staying, node.own._standing_by) == (set(), set())
    assert [kind for kind, _ in node.events] == ["attempt-ended"], "once"


def test_who_has_not_stopped_soon_is_told_once_that_another_may_have_stalled(node: Node) -> None:
    """It may wait in a collective for one whose disk does not answer, and alone can save what it has."""
    node.attempts.end(20.0, "stopped")
    [(_, how)] = node.stops
    assert not how["is_wanted"]()
    assert not node.sent
    node.wait(20.0 * attempt.STALLED_AFTER)
    assert [how["is_wanted"]() for _ in range(2)] == [False] * 2, "the grace stays as it is"
    assert node.sent == [(0, "stalled"), (1, "stalled")]


def test_a_rank_that_cannot_be_ended_is_told_of_once(node: Node) -> None:
    def stuck(local_rank: int | None, pid: int) -> Any:
        return SimpleNamespace(local_rank=local_rank, pid=pid, state="D", wchan="nfs_wait")

    node.own.workers.stuck = [stuck(0, 100)]

    def stop(*_: object, **__: object) -> None:
        node.own.workers.stuck += [stuck(1, 101), stuck(None, 55)]

    node.own.workers.stop = stop
    node.attempts.end(0, "stopped")
    fields = {"attempt": "0.7", "state": "D", "wchan": "nfs_wait"}
    assert node.events[:2] == [
        ("unkillable", {**fields, "rank": 5, "pid": 101}), ("unkillable", {**fields, "rank": None, "pid": 55})
    ]  # fmt: skip


def test_only_blamed_ranks_of_this_node_are_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[dict[int, int], int]] = []
    monkeypatch.setattr(children, "signal_groups", lambda *what: killed.append(what))
    node.attempts.kill([1, 5])
    assert killed == [({5: 101}, signal.SIGKILL)]


# --- the start of an attempt ---------------------------------------------------------------------------------


def test_who_waits_is_told_of_the_attempt_and_all_others_are_started(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five ranks one has stayed, one has stood by, one would not listen, one has ended since and one is new."""
    monkeypatch.setenv("MINE", "the same as when it was started")
    monkeypatch.setattr(attempt, "_started_now", lambda: {"NODEKIT_STARTED": "7"})
    monkeypatch.setattr(attempt, "kernel", Mock())
    monkeypatch.setattr(attempt, "processes", SimpleNamespace(start_time=lambda pid: pid + 0.5))
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    own, workers, told, renewed = node.own, node.own.workers, list[dict[str, Any]](), list[int]()
    messages: dict[int, dict[str, Any]] = {}

    def send(local_rank: int, message: dict[str, Any]) -> bool:
        messages[local_rank] = message
        return local_rank not in node.deaf

    def start(starts: Sequence[WorkerStart]) -> dict[int, int]:
        assert [each.local_rank for each in starts] == renewed
        assert all(each.env["NODEKIT_STARTED"] == "7" and each.env["MINE"] for each in starts)
        return {0: 100, 1: 101, 2: 102, 3: 203, 4: 204}

    own._messages = SimpleNamespace(
        send=send, renew=renewed.append, path=lambda key: node.own._folder / str(key)
    )
    own._record = Mock(
        update=lambda **fields: told.append(fields),
        flight_dir=own._folder,
        progress_dir=own._folder,
        told_dir=own._folder,
    )
    own._kernel, own._expected_snapshot, own.recorder, workers.start = Mock(), "", {}, start
    own.ranks = {local_rank: 4 + local_rank for local_rank in range(5)}
    workers.pids = {local_rank: 100 + local_rank for local_rank in range(4)}
    own._staying, own._standing_by, node.deaf = {0, 2, 3}, {1}, {2}
    own._told, own._stayed, own.is_on = {0: "lost"}, {3}, False
    node.ends(3, 1)
    members = ({"name": "n0", "nproc": 4}, {"name": "n1", "nproc": 5})
    formed = Formed(
        round=8, group_rank=1, members=members, store=Mock(), master_addr="10.0.0.1", master_port=29500
    )
    more = {"max_restarts": 0, "run_id": "r", "generation": 0, "code_dir": "/code", "local_addr": "10.0.0.2"}
    node.attempts.start(joining(nproc_per_node=5, stands_by=False, **more), formed)

    [(grace_s, how)] = node.stops
    assert (grace_s, how["staying"]()) == (0, {0, 1, 2}), "of who has ended, what it has started is ended"
    assert messages.keys() == {0, 1, 2}
    for local_rank, message in messages.items():
        assert message["kind"] == "next"
        assert (message["env"]["RANK"], message["env"]["MASTER_ADDR"]) == (str(4 + local_rank), "10.0.0.1")
        assert "MINE" not in message["env"], "a FIFO has room for so much"
        assert message["log"].endswith(f"rank{4 + local_rank}-attempt0.7.log")
    assert killed == [(102, signal.SIGKILL)], "it would wait for ever"
    assert renewed == [3, 4]
    assert told[0]["stayed"] == [4, 6]
    assert [each["pid"] for each in told[0]["workers"]] == [100, 101, 102, 203, 204]
    assert (own._staying, own._standing_by, own._stayed, own._told) == (set(), set(), {0, 2}, {})
    assert own._have_stayed
    assert own._may_stay, "the script can, since its ranks have"
    assert node.attempts.is_on


# --- standing by ---------------------------------------------------------------------------------------------


def joining(**more: Any) -> Any:
    fields = {"argv": ["train.py"], "stands_by": True, "nproc_per_node": 2, "max_nodes": 4, **more}
    return SimpleNamespace(**fields)


def test_a_node_that_joins_waits_until_all_its_ranks_have_read_their_data(node: Node) -> None:
    node.own.workers.pids = {}
    # Another agent's.
    node.progress.update(dict.fromkeys((0, 1), Progress.parse(f"9/50 {stages.WAITING}", 0.0)))
    pauses: list[float] = []
    node.later = [
        (node.now + 2.0, lambda: node.says(0, f"0/50 {stages.WAITING}")),
        (node.now + 4.0, lambda: node.progress.update({1: Progress.parse(f"0/50 {stages.WAITING}", 0.0)})),
    ]
    node.attempts.stand_by(joining(), lambda: pauses.append(node.now))
    assert node.begun == [0, 1, 8]
    assert node.attempts.ranks == {0: 0, 1: 1}
    assert pauses[-1] == pytest.approx(1004.0, abs=0.1)
    assert node.own._staying == {0, 1}
    assert node.stops == []
    assert node.done == ["snapshot dir"]


@pytest.mark.parametrize("ends", [True, False], ids=["one ends", "it takes too long"])
def test_ranks_that_do_not_come_to_stand_by_are_ended(
    ends: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "STAND_BY_S", 30.0)
    node.own.workers.pids, node.own._standing_by = {}, {0, 1}
    if ends:
        node.later = [(node.now + 2.0, lambda: node.exits.update({1: 1}))]
    began = node.now
    node.attempts.stand_by(joining(), lambda: None)
    assert node.now - began == pytest.approx(2.0 if ends else 30.0, abs=0.1)
    assert node.stops == [(0, {})]
    assert (node.own._staying, node.own._standing_by) == (set(), set())
    assert node.done[-1] == "keep no more"


@pytest.mark.parametrize("what", ["no program that can", "its ranks are there"])
def test_nobody_stands_by(what: str, node: Node) -> None:
    spec = joining(stands_by=what != "no program that can")
    if spec.stands_by is False:
        node.own.workers.pids = {}
    node.attempts.stand_by(spec, lambda: None)
    assert node.begun == []
    assert node.done == []


@pytest.mark.parametrize(
    ("argv", "have_stayed", "staying", "begun"),
    [
        (["train.py"], False, set(), []),
        (["train.py"], True, set(), [0, 0]),
        (["train.py"], False, {1}, [0, 0]),
        (["-m", TRAINING], False, set(), [0, 0]),
        (["-m", "mine", TRAINING], False, set(), []),
    ],
)
def test_a_rank_that_has_ended_is_replaced_where_others_can_stand_by(
    argv: list[str], have_stayed: bool, staying: Collection[int], begun: list[int], node: Node
) -> None:
    node.own.workers.pids = {1: 101}
    node.own._have_stayed, node.own._staying = have_stayed, staying
    node.attempts.replace(joining(argv=argv, stands_by=False))
    assert node.begun == begun
    node.own.workers.pids, node.begun[:] = {0: 100, 1: 101}, []
    node.attempts.replace(joining())
    assert node.begun == []


def test_a_pause_has_no_end_by_the_clock(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(node.own, "_tell", lambda *how: told.append(how))
    node.attempts.pause()
    assert told == [("pause", math.inf)]
