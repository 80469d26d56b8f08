"""What ends a round, whom it is put down to, and whether there is another one: without agents or ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nodekit.deploy.agent import round_watch
from nodekit.deploy.agent.ranks.budget import A_HANG
from nodekit.deploy.agent.rendezvous.formed import DONE, LEAVES, Formed
from nodekit.deploy.agent.round_watch import DYING_S, EXPLAINED_S, JOINING_S, PAUSE_S, TOLD_S, RoundWatch

RAISED = "ValueError: mine"
PEER = "RuntimeError: Connection closed by peer"


class Round:
    """Node n0 of three, with two ranks; what it is told, and what it has done."""

    def __init__(self, gpus: tuple[int, ...] = (), max_restarts: int = 3) -> None:
        self.ends: list[tuple[Any, ...]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.broken: list[tuple[int, bool]] = []
        self.waited_s: list[float] = []
        self.killed: list[tuple[int, ...]] = []
        self.updates: list[dict[str, Any]] = []
        self.num_looks = self.num_pauses = 0
        self.began: list[Any] = []
        self.replaced = 0
        self.exits: dict[int, int] = {}
        self.failed: list[dict[str, Any]] = []
        self.is_pausing: Callable[[], bool] = lambda: False
        self.told: dict[str, str] = {}
        members = tuple({"name": f"n{rank}", "nproc": 2, "trains_in": 6, "identity": ""} for rank in range(3))
        store: Any = SimpleNamespace(get=self.told.get, set=self.told.__setitem__)
        self.formed = Formed(
            round=7, group_rank=0, members=members, store=store, master_addr="", master_port=0
        )
        self.rendezvous: Any = SimpleNamespace(
            waiting=0,
            num_nodes_waiting=lambda: self.rendezvous.waiting,
            num_lost=0,
            is_closed=False,
            here={"n0", "n1", "n2"},
            lost_store_is_told=contextlib.nullcontext,
            tell_broken=lambda number, *, is_explained: self.broken.append((number, is_explained)),
            is_broken=lambda number: (number, True) in self.broken or (number, False) in self.broken,
            is_explained=lambda number: (number, True) in self.broken,
            gone=lambda _: [],
        )
        self.attempts: Any = SimpleNamespace(
            is_on=True, is_joining=False, have_stayed=False, seconds=5.0,
            logs={}, pids={}, recorder={}, ranks={0: 0, 1: 1},
            workers=SimpleNamespace(wait=lambda _: True),
            end=self._end, look=lambda: setattr(self, "num_looks", self.num_looks + 1),
            tell_end=lambda why: self.ends.append((why,)),
            replace=lambda _: setattr(self, "replaced", self.replaced + 1),
            poll=lambda: self.exits, failed_while_pausing=lambda: self.exits,
            say_why=lambda _: False, hears_of_a_loss=lambda: False,
            not_connected=lambda: "", failures=self._failures, ask_the_kernel=lambda _: None, kill=self.killed.append,
            pause=lambda: self.is_pausing,
        )  # fmt: skip
        self.record: Any = SimpleNamespace(
            step=None, seems_to_train=False, update=lambda **changes: self.updates.append(changes),
            failed=lambda _: None,
            event=lambda kind, **fields: self.events.append((kind, fields)),
            gpus=SimpleNamespace(blamed_for=lambda _: "a GPU", recent=lambda: "a recent one"),
        )  # fmt: skip
        self.left_for: list[Any] = []
        self.spec: Any = SimpleNamespace(
            hang="auto", window_s=60.0, gpus=gpus, grace_s=20.0, max_restarts=max_restarts
        )
        self.watch = RoundWatch(
            self.spec,
            self.record,
            self.attempts,
            pause=lambda: None,
            pause_briefly=lambda: setattr(self, "num_pauses", self.num_pauses + 1),
            leave_if_broken=self.left_for.append,
        )
        self.hangs: Callable[[], bool] = lambda: False
        self.hang: Any = SimpleNamespace(
            begin=lambda formed, *_: self.began.append(formed), finds_a_hang=lambda *_, **__: self.hangs(),
            may_stay=False, behind=(1,), active_s=3.0, is_stepless=False,
        )  # fmt: skip
        self.watch._hang_diagnosis = self.hang
        self.watch._straggler_watch = self.hang
        self.hang.look = lambda: None

    def _end(self, grace_s: float, why: str, *, tell: str | None, keep_s: float | None) -> None:
        self.ends.append((grace_s, why, tell, keep_s))

    def _failures(self, wait_s: float) -> list[dict[str, Any]]:
        self.waited_s.append(wait_s)
        return self.failed

    def fails(self, *failures: tuple[str, float], exitcode: int = 1) -> None:
        """Ranks of this node end with these last words, at these times."""
        self.failed = [
            {"error": error, "exitcode": exitcode, "when": when, "rank": rank}
            for rank, (error, when) in enumerate(failures)
        ]
        self.exits = dict.fromkeys(range(len(failures)), exitcode)

    def until_over(self) -> str:
        return self.watch.until_over(self.spec, self.rendezvous, self.formed)

    def changes(self, *, is_ending: bool = False) -> str | None:
        return self.watch.members_changed(self.rendezvous, self.formed, is_ending=is_ending)

    @property
    def lost(self) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.events if kind == "membership"]


LEFT_HERE = f"{LEAVES}/0"


def test_while_nobody_comes_or_goes_a_round_goes_on() -> None:
    own = Round()
    assert own.changes() is None
    assert not own.ends
    assert not own.told


def test_a_job_that_was_ended_elsewhere_ends_here() -> None:
    own = Round()
    own.rendezvous.is_closed = True
    assert own.changes() == "again"
    assert own.ends == [(DYING_S, "another node ended the job", None, None)]


def test_who_comes_in_is_met_while_the_ranks_train_on() -> None:
    own = Round()
    own.rendezvous.waiting = 1
    assert own.changes() == "again"
    assert LEFT_HERE in own.told
    assert not own.ends


@pytest.mark.parametrize(("seconds", "why"), [(JOINING_S - 1, None), (JOINING_S + 1, "again")])
def test_ranks_that_join_each_other_are_left_alone_for_a_while(seconds: float, why: str | None) -> None:
    own = Round()
    own.rendezvous.waiting, own.attempts.is_joining, own.attempts.seconds = 1, True, seconds
    assert own.changes() == why
    assert (LEFT_HERE in own.told) == bool(why)
    assert not own.ends


@pytest.mark.parametrize("what", ["ranks of this node", "all ranks of another"])
def test_who_comes_in_when_ranks_have_ended_well_comes_too_late(what: str) -> None:
    own = Round()
    own.rendezvous.waiting = 1
    if what == "all ranks of another":
        own.told[f"{DONE}/1"] = ""
    assert own.changes(is_ending=what == "ranks of this node") is None
    assert not own.ends
    assert LEFT_HERE not in own.told


@pytest.mark.parametrize(("is_ending", "is_joining"), [(True, False), (False, True), (False, False)])
def test_another_member_that_has_left_to_meet_who_comes_in_is_followed(
    is_ending: bool, is_joining: bool
) -> None:
    own = Round()
    own.rendezvous.waiting, own.rendezvous.here = 1, {"n0", "n2"}
    own.attempts.is_joining, own.attempts.seconds = is_joining, 1.0
    own.told[f"{LEAVES}/1"] = ""
    assert own.changes(is_ending=is_ending) == "again"
    assert LEFT_HERE in own.told
    assert not own.ends


def test_who_has_no_ranks_any_more_follows_too_and_is_not_taken_for_one_that_was_lost() -> None:
    own = Round()
    own.rendezvous.waiting, own.rendezvous.here, own.attempts.is_on = 1, {"n0", "n2"}, False
    own.told[f"{LEAVES}/1"] = ""
    assert own.changes() == "again"
    assert not own.lost


def test_a_lost_member_ends_the_attempt_and_is_told_apart_from_who_comes_in() -> None:
    own = Round()
    own.rendezvous.waiting, own.rendezvous.num_lost, own.rendezvous.here = 2, 1, {"n0", "n2"}
    assert own.changes() == "again"
    assert own.lost == [{"lost": 1, "waiting": 1, "names": ["n1"]}]
    assert own.ends == [(DYING_S, "a node is lost", "lost", None)]
    assert LEFT_HERE not in own.told


def test_a_lost_member_whose_ranks_had_ended_well_is_not_missed() -> None:
    own = Round()
    own.rendezvous.waiting, own.rendezvous.num_lost, own.rendezvous.here = 1, 1, {"n0", "n2"}
    own.told[f"{DONE}/1"] = ""
    assert own.changes() is None
    assert not own.ends


def test_ranks_that_wait_in_nccl_are_given_no_time_to_find_out() -> None:
    own = Round(gpus=(0,))
    own.rendezvous.waiting, own.rendezvous.here = 1, {"n0", "n2"}
    own.changes()
    assert own.ends[0][0] == 0


def test_a_round_is_done_when_every_rank_has_ended_with_status_0() -> None:
    own = Round()
    exits = [{0: 0}, {0: 0, 1: 0}]
    own.attempts.poll = lambda: exits.pop(0)
    assert own.until_over() == "done"
    assert own.ends == [("done",)]
    assert own.updates == [{"ended": [0]}, {"ended": [0, 1]}, {"workers": []}]
    assert (own.num_looks, own.num_pauses) == (2, 2), "at the logs, and whether it is to stop"
    assert own.began == [own.formed] * 2, "for hangs and for stragglers"


def test_a_rank_that_ends_badly_ends_the_round_everywhere() -> None:
    own = Round()
    own.fails((RAISED, 1.0))
    assert own.until_over() == "again"
    assert own.broken == [(7, False)]
    assert own.ends == [(0, "a rank failed", "lost", None)]
    assert (own.replaced, own.waited_s) == (1, [DYING_S])
    assert own.left_for == ["a GPU"]


def test_a_round_whose_last_rank_fails_is_not_done() -> None:
    own = Round()
    own.fails((RAISED, 1.0))
    own.exits = {0: 1, 1: 0}
    assert own.until_over() == "again"


@pytest.mark.parametrize(("gpus", "wait_s"), [((), EXPLAINED_S), ((0,), TOLD_S)])
def test_where_it_is_known_why_others_are_waited_for_less(gpus: tuple[int, ...], wait_s: float) -> None:
    own = Round(gpus=gpus)
    own.fails((RAISED, 1.0))
    own.attempts.say_why = lambda _: True
    own.until_over()
    assert (own.broken, own.waited_s) == ([(7, True)], [wait_s])


def test_a_rank_that_says_that_it_has_lost_another_has_the_round_broken_for_all() -> None:
    own = Round()
    own.attempts.hears_of_a_loss = lambda: True
    assert own.until_over() == "again"
    assert own.broken == [(7, False)]
    assert own.ends == [(0, "a rank of another node failed", "lost", None)]
    assert not own.left_for, "this node's GPUs have nothing to do with it"


def test_only_the_node_whose_rank_failed_first_by_itself_is_charged() -> None:
    own = Round(max_restarts=0)
    own.fails((PEER, 1.0))
    assert own.until_over() == "again", "it has lost a peer"
    own = Round(max_restarts=0)
    own.fails((PEER, 1.0), ("ImportError: later", 3.0), (RAISED, 2.0))
    seen: list[dict[str, Any]] = []
    own.watch.budget.crashed = lambda failure, **_: seen.append(failure) or "one too many"  # type: ignore[method-assign,func-returns-value]
    assert own.until_over() == "failed"
    assert own.watch.failed_as == "one too many"
    assert [each["when"] for each in seen] == [2.0]


@pytest.mark.parametrize("has_trained", [True, False])
def test_that_rank_0_printed_of_its_training_counts_on_other_nodes(has_trained: bool) -> None:
    own = Round()
    own.fails(("ModuleNotFoundError: No module named 'late'", 1.0))
    if has_trained:
        own.told["trains/1"] = ""
    assert own.until_over() == ("again" if has_trained else "failed")
    assert own.watch.failed_as == ("" if has_trained else "the command does not start")


def test_it_is_told_once_that_a_rank_seems_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_watch, "MEMBERS_S", 0.0)
    own, told, looks = Round(), [], iter([False, False, True])
    own.attempts.workers.wait = lambda _: False
    own.record.seems_to_train = True
    own.formed.store.set = lambda key, _: told.append(key)
    own.hangs = lambda: next(looks)
    own.until_over()
    assert told == ["trains/0"]


@pytest.mark.parametrize("may_stay", [True, False])
@pytest.mark.parametrize(("is_stepless", "verdict"), [(True, "failed"), (False, "again")])
def test_a_hang_ends_the_round_and_is_charged_where_no_rank_had_told_a_step(
    may_stay: bool, is_stepless: bool, verdict: str
) -> None:
    own, took = Round(max_restarts=0), []
    own.hang.may_stay, own.hang.is_stepless, own.hangs = may_stay, is_stepless, lambda: True
    own.watch.budget.took_steps = lambda _, **fields: took.append(fields)  # type: ignore[method-assign]
    assert own.until_over() == verdict
    assert own.watch.failed_as == ("it hung, and job.max_restarts is 0" if is_stepless else "")
    assert own.ends == [(0, "a hang", "lost" if may_stay else None, round_watch.ANSWERS_S)]
    assert (own.killed, own.replaced) == (([(1,)], 1) if may_stay else ([], 0))
    assert took == [{"seconds": 3.0, "seems_trained": False, "ended_by": A_HANG}]


def test_ranks_that_hang_in_the_join_have_time_to_save_the_step_that_they_came_with() -> None:
    own = Round()
    own.attempts.have_stayed, own.hang.is_stepless, own.hangs = True, True, lambda: True
    assert own.until_over() == "again"
    assert own.ends == [(own.spec.grace_s, "a hang", None, round_watch.ANSWERS_S)]
    assert own.left_for == ["a recent one"]
    assert not own.told, "that rank 0 trains"


def test_a_lost_member_is_found_while_the_ranks_train() -> None:
    own = Round()
    own.attempts.workers.wait = lambda _: False
    own.rendezvous.waiting, own.rendezvous.here = 1, {"n0", "n2"}
    assert own.until_over() == "again"
    assert own.lost[0]["names"] == ["n1"]


def test_ten_attempts_in_a_row_without_progress_are_enough_whatever_ended_them() -> None:
    own = Round()
    own.rendezvous.waiting, own.rendezvous.here = 1, {"n0", "n2"}
    assert [own.changes() for _ in range(10)] == ["again"] * 9 + ["failed"]
    assert own.watch.failed_as == "10 attempts in a row without progress"
    own.attempts.not_connected = lambda: "rank 2: connectFullMesh failed"
    assert own.changes() == "failed"
    assert own.watch.failed_as == "10 attempts in a row without progress: rank 2: connectFullMesh failed"


# --- while the agents meet, and the ranks train on ----------------------------------------------------------


def pauses(own: Round, *, comes: bool = True, without: str = "") -> str:
    """What becomes of the ranks when all have met for the next round, and whether a node has come in, or one not."""
    members = [each for each in own.formed.members if each["name"] != without]
    if comes:
        members.append({"name": "n3", "nproc": 2, "trains_in": None, "identity": ""})
    last = replace(own.formed, round=6)
    return own.watch.pause_for(own.rendezvous, replace(own.formed, members=tuple(members)), last)


def test_ranks_pause_for_a_node_that_comes_in() -> None:
    own = Round()
    looks = iter([True, True, False])
    own.is_pausing = lambda: next(looks)
    assert pauses(own) == "again"
    assert own.lost == [{"lost": 0, "waiting": 1, "names": []}]
    assert own.ends == [(own.spec.grace_s, "a node comes in", "pause", None)]
    assert not own.broken
    assert not list(looks), "they are waited for"


def test_nobody_is_said_to_come_in_where_the_same_have_met() -> None:
    own = Round()
    assert pauses(own, comes=False) == "again"
    assert not own.events
    assert own.ends == [(own.spec.grace_s, "a node comes in", "pause", None)]


@pytest.mark.parametrize("is_joining", [True, False])
def test_ranks_that_do_not_come_to_pause_leave_the_others_as_if_one_was_lost(
    is_joining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def look() -> bool:
        now[0] += 0 if is_joining else PAUSE_S / 2 + 1
        return not is_joining

    monkeypatch.setattr(round_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    own = Round()
    own.is_pausing, own.attempts.is_joining = look, is_joining
    assert pauses(own) == "again"
    assert own.broken == [(6, False)], "others may wait for these"
    assert own.ends == [(own.spec.grace_s, "a node comes in", "lost", None)]


def test_who_has_not_met_again_was_lost() -> None:
    own = Round()
    assert pauses(own, without="n1") == "again"
    assert own.lost == [{"lost": 1, "waiting": 1, "names": ["n1"]}]
    assert own.ends == [(DYING_S, "a node is lost", "lost", None)]


def test_who_was_lost_and_is_back_trains_no_more() -> None:
    own = Round()
    own.formed.members[1]["trains_in"] = None
    assert pauses(own, comes=False) == "again"
    assert own.lost == [{"lost": 1, "waiting": 0, "names": ["n1"]}]


@pytest.mark.parametrize("when", ["before", "while they pause"])
def test_a_loss_ends_the_pause(when: str) -> None:
    own = Round()
    lost = iter([[], ["n2"]] if when == "while they pause" else [["n2"]])
    own.rendezvous.gone = lambda _: next(lost)
    own.is_pausing = lambda: True
    assert pauses(own) == "again"
    assert own.lost[-1] == {"lost": 1, "waiting": 0, "names": ["n2"]}
    assert own.ends == [(DYING_S, "a node is lost", "lost", None)]


def test_a_rank_that_fails_meanwhile_ends_the_others() -> None:
    own = Round()
    own.fails((RAISED, 1.0))
    assert pauses(own) == "again"
    assert own.broken == [(6, False)]
    assert own.ends == [(0, "a rank failed", "lost", None)]
