"""What an agent does in one round, and at the end of its last: without a process or other agents."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from nodekit.deploy.agent import agent as agent_module
from nodekit.deploy.agent.agent import LOST_S, SETTLE_S, Agent, GivenUp
from nodekit.deploy.agent.orders import Fenced
from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.agent.ranks.target import TRAINING
from nodekit.deploy.agent.rendezvous.formed import DONE, Formed
from nodekit.deploy.agent.rendezvous.rendezvous import FormAgain, StoreLost
from nodekit.deploy.agent.round_watch import MEMBERS_S
from nodekit.deploy.agent.unfit import Broken, Unfit, Unreached, WaitedInVain

NODES = ("n0", "n1", "n2")
ALL = Voters(0, 0, NODES)


class Node:
    """Node n0 of three; what it does, in its order. Its clock goes on only while it sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now = 1000.0
        self.done: list[Any] = []
        self.said: list[dict[str, Any]] = []
        self.told: dict[str, str] = {}
        self.own: dict[str, Any] = {}
        self.why, self.pauses_as, self.changed = "done", "again", ""
        self.forms: Callable[[], Formed] = lambda: self.formed
        self.shares: Callable[[], None] = lambda: None
        self.loses_at = float("inf")
        self.at: Callable[[float], object] = lambda _: None
        self.waiting = 0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(agent_module, "time", clock)
        monkeypatch.setattr(agent_module, "share_snapshots", self._share)
        store: Any = SimpleNamespace(get=self.told.get, set=self.told.__setitem__)
        members = tuple(
            {"name": name, "nproc": 2, "electorate": ALL.to_dict(), "trains_in": None} for name in NODES
        )
        self.formed = Formed(
            round=7, group_rank=0, members=members, store=store, master_addr="", master_port=0
        )
        self.rendezvous: Any = SimpleNamespace(
            form=self._form,
            outcome="",
            num_nodes_waiting=lambda: self.waiting,
            has_lost=lambda _: self.now >= self.loses_at,
            workers_begin=lambda: self.done.append("workers begin"),
            lost_store_is_told=contextlib.nullcontext,
            wait_for=self._wait_for,
            close=lambda outcome: self.done.append(("closes", outcome)),
        )
        own: Any = Agent.__new__(Agent)
        own._folder = folder
        own._spec = self.spec = SimpleNamespace(
            name="n0", generation=2, wait_s=600.0, min_nodes=2, is_host=False, grace_s=20.0, keep_alive_s=0.5,
            lost_after=6, local_addr="10.0.0.1", nproc_per_node=2, argv=["train.py"], joins=False,
        )  # fmt: skip
        own._record = SimpleNamespace(
            update=lambda **changes: self.said.append(changes),
            event=lambda kind, **fields: self.done.append((kind, fields)),
            end=lambda state, **how: self.done.append((state, how)),
        )
        self.attempts = own._attempts = SimpleNamespace(
            is_on=False,
            prepare=lambda *_: self.done.append("prepare"),
            start=lambda *_: self.done.append("start"),
            end=lambda *how: self.done.append(("ends", *how)),
            stand_by=lambda *_: self.done.append("stand by"),
            workers=SimpleNamespace(wake=None, stuck=[], warm_up=lambda _: self.done.append("warm up")),
        )
        budget = SimpleNamespace(was_restarted=False, is_fruitless=False)
        own._watch = SimpleNamespace(
            until_over=lambda *_: self._does("watch", self.why),
            pause_for=lambda *_: self._does("pause for", self.pauses_as),
            members_changed=self._members_changed,
            failed_as="too many restarts",
            budget=budget,
        )
        self.orders = own._orders = SimpleNamespace(
            voters=lambda voters: voters, check_fence=lambda *_: self.done.append("fence")
        )
        self.replicas: Any = SimpleNamespace(
            announce=lambda *what: self.done.append(("announce", *what)),
            finish_copying=lambda seconds: self.done.append(("copies", seconds)),
            endpoint=["10.0.0.1", 5],
            has_files=False,
        )
        own._replicas = None
        own._voters = ALL
        own._formed, own._rendezvous = None, self.rendezvous
        own._is_meeting = own._is_done = own._is_orphan = False
        own._pause = lambda: self.at(self.now)
        own._pause_briefly = lambda: self.at(self.now)
        own._leave_if_broken = lambda: self.done.append("broken?")
        self.agent = own

    def _does(self, what: str, comes_to: Any) -> Any:
        self.done.append(what)
        return comes_to

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _form(self, own: dict[str, Any]) -> Formed:
        assert self.agent._is_meeting
        assert not self.agent._is_done
        self.own = own
        return self.forms()

    def _share(self, _: object, folder: Path, formed: Formed, generation: int) -> None:
        assert (folder, formed, generation) == (self.agent._folder / "snapshots", self.formed, 2)
        self.done.append("share")
        self.shares()

    def _members_changed(self, *_: object, is_ending: bool) -> str:
        assert is_ending
        self.done.append(("members", self.now))
        return self.changed

    def _wait_for(self, formed: Formed, what: str, *_: object, until: float = 0.0) -> None:
        assert formed is self.formed
        self.done.append(("waits for", what, until and until - self.now))

    def round(self) -> int | None:
        status = self.agent._round(self.rendezvous)
        assert not self.agent._is_meeting
        return status  # type: ignore[no-any-return]

    def all_are(self, what: str) -> None:
        self.told.update({f"{what}/{rank}": "" for rank in range(len(NODES))})


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    return Node(monkeypatch, tmp_path)


STARTS = ["share", "prepare", "fence", "workers begin", "start"]


def raising(error: BaseException) -> Callable[[], Any]:
    def raises() -> None:
        raise error

    return raises


def test_nodes_meet_start_their_ranks_and_have_succeeded_when_all_have(node: Node) -> None:
    node.all_are(DONE)
    assert node.round() == 0
    assert node.done[:7] == ["broken?", *STARTS, "watch"]
    assert node.done[-2:] == [
        ("succeeded", {"message": "", "cause": "", "no_progress": False}), ("closes", "succeeded")
    ]  # fmt: skip
    assert node.said[0] == {"state": "rendezvous", "workers": [], "members": []}
    assert node.agent._is_done


@pytest.mark.parametrize(
    ("error", "outcome", "status", "end"),
    [
        (FormAgain(), "", None, None),
        (GivenUp(), "", 3, ("failed", "too many restarts", "")),
        (RendezvousClosedError(), "succeeded", 0, ("succeeded", "the others had trained to the end", "")),
        (RendezvousClosedError(), "failed", 3, ("failed", "another node ended the job", "ended-elsewhere")),
        (RendezvousGracefulExitError(), "", 3, ("failed", "another node ended the job", "ended-elsewhere")),
    ],
)
def test_what_comes_of_a_meeting_that_does_not_come_about(
    error: Exception, outcome: str, status: int | None, end: Any, node: Node
) -> None:
    node.forms, node.rendezvous.outcome = raising(error), outcome
    assert node.round() == status
    assert "start" not in node.done
    ends = [each[0:1] + tuple(each[1].values())[:2] for each in node.done if isinstance(each[-1], dict)]
    assert ends == ([end] if end else [])


def test_who_has_waited_for_too_few_nodes_says_so(node: Node) -> None:
    node.forms = raising(RendezvousTimeoutError())
    with pytest.raises(WaitedInVain, match="waited 600 s for 2 nodes"):
        node.round()
    assert not node.agent._is_meeting


def test_after_a_failure_too_many_the_job_has_failed_and_after_another_the_nodes_meet_again(
    node: Node,
) -> None:
    node.why = "failed"
    assert node.round() == 3
    assert not node.agent._is_done
    node.why, node.done[:], node.agent._is_done = "again", [], True
    assert node.round() is None
    assert not node.agent._is_done, "its ranks train again"
    assert node.agent._formed is node.formed
    assert "pause for" not in node.done, "none trained while they met"
    assert not [each for each in node.done if each[0] in ("failed", "succeeded")]


def test_ranks_that_train_while_a_node_comes_in_are_paused_when_all_have_met(node: Node) -> None:
    node.attempts.is_on, node.agent._formed, node.agent._replicas = True, node.formed, node.replicas
    node.why = "again"
    assert node.round() is None
    assert node.done == ["broken?", ("announce", (2, 7), 20.0), "pause for", *STARTS, "watch"]
    assert node.own["trains_in"] == 7
    assert {"state": "rendezvous", "workers": [], "members": []} not in node.said, "they train"


def test_ranks_that_fail_while_they_are_to_pause_may_have_failed_too_often(node: Node) -> None:
    node.attempts.is_on, node.agent._formed, node.pauses_as = True, node.formed, "failed"
    assert node.round() == 3
    assert "share" not in node.done


def test_where_another_is_lost_before_paused_ranks_go_on_all_meet_again(node: Node) -> None:
    node.attempts.is_on, node.agent._formed, node.loses_at = True, node.formed, 0.0
    assert node.round() is None
    assert node.done[-1] == "share"
    node.attempts.is_on, node.why = False, "again"
    node.round()
    assert node.done[-1] == "watch", "of new ranks none waits for it: that is seen while they start"


def test_a_few_nodes_wait_until_others_come_or_the_voters_are_fewer(node: Node) -> None:
    node.formed = Formed(
        round=7, group_rank=0, members=node.formed.members[:1], store=node.formed.store, master_addr="",
        master_port=0,
    )  # fmt: skip
    node.at = lambda now: setattr(node, "waiting", int(now > 1005))
    assert node.round() is None
    assert node.now == pytest.approx(1005, abs=0.2)
    assert node.done == ["broken?", ("no-quorum", {"members": ["n0"], "electorate": ALL.to_dict()})]
    assert node.said[1:] == [
        {
            "members": ["n0"],
            "no_quorum": True,
            "blocked": "n0 alone are no majority of n0, n1, n2; they may be training elsewhere",
        },
        {"no_quorum": False, "blocked": ""},
    ]
    fewer = Voters(0, 1, ("n0",))
    node.at, node.waiting = lambda _: None, 0
    node.orders.voters = lambda voters: fewer if node.now > 1010 else voters
    assert node.round() is None
    assert node.now == pytest.approx(1010, abs=0.2)
    assert node.agent._voters == fewer


def test_nodes_go_by_the_newest_voters_that_any_of_them_has(node: Node) -> None:
    newer = Voters(0, 1, ("n1",))
    node.formed.members[2]["electorate"] = newer.to_dict()
    node.why = "again"
    node.round()
    assert node.agent._voters == newer


def test_where_another_has_what_ranks_begin_with_and_is_lost_all_meet_again(node: Node) -> None:
    node.shares = raising(Unreached("its files could not be fetched"))
    node.loses_at = 1003.0
    assert node.round() is None
    assert node.now == pytest.approx(1003.0, abs=0.1)
    assert "start" not in node.done
    node.loses_at = float("inf")
    before = node.now
    with pytest.raises(Unreached):
        node.round()
    node.at = lambda _: raising(Fenced())()
    with pytest.raises(Fenced):
        node.round()
    assert node.now - before == pytest.approx(LOST_S + 3.0, abs=0.1), "as long as it takes to know of a loss"


def test_ranks_are_not_started_where_their_folders_or_the_fence_cannot_be_read(node: Node) -> None:
    node.attempts.prepare = lambda *_: raising(OSError(errno.EIO, "Input/output error"))()
    with pytest.raises(Unfit, match="Input/output error"):
        node.round()
    node.attempts.prepare = lambda *_: None
    node.orders.check_fence = lambda *_: raising(OSError(errno.EIO, "Input/output error"))()
    with pytest.raises(Unfit, match=r"the fence of this node cannot be read .* no rank is started"):
        node.round()
    node.orders.check_fence = lambda *_: raising(OSError(errno.EMFILE, "Too many open files"))()
    with pytest.raises(OSError, match="Too many open files"):
        node.round()
    assert "start" not in node.done


def test_what_ends_the_agent_is_heard_before_ranks_are_started(node: Node) -> None:
    node.at = lambda _: raising(Fenced())() if "prepare" in node.done else None
    with pytest.raises(Fenced):
        node.round()
    assert "start" not in node.done


@pytest.mark.parametrize(
    ("argv", "has_files", "told"),
    [(["train.py"], False, True), (["-m", TRAINING], False, False), (["-m", TRAINING], True, True)],
)
def test_what_a_node_tells_of_itself(argv: list[str], has_files: bool, told: bool, node: Node) -> None:
    node.why, node.spec.argv, node.replicas.has_files = "again", argv, has_files
    node.agent._replicas, node.agent._formed = node.replicas, node.formed
    newer = Voters(0, 1, NODES)
    node.orders.voters = lambda _: newer
    node.round()
    assert node.own == {
        "name": "n0", "address": "10.0.0.1", "nproc": 2, "electorate": newer.to_dict(),
        "replicas": ["10.0.0.1", 5], "has_files": told, "trains_in": None,
    }  # fmt: skip
    node.agent._replicas = None
    node.round()
    assert (node.own["replicas"], node.own["has_files"]) == (None, False)


@pytest.fixture
def pausing(node: Node) -> Node:
    """One whose ranks train while it meets the others."""
    del node.agent._pause
    node.agent._record.gpus = SimpleNamespace(fatal="a GPU is lost")
    node.agent._check_stop = lambda: node.done.append("stop?")
    node.agent._leave_if_broken = lambda fault: node.done.append(fault)
    node.orders.check = lambda _: node.done.append("orders?")
    node.spec.who_is_missing = lambda present: f"waits for all but {present}"
    node.rendezvous.present = ("n0",)
    node.agent._watch.end_if_broken = lambda *_: node._does("broken?", node.pauses_as)
    node.agent._is_meeting, node.agent._formed, node.attempts.is_on = True, node.formed, True
    return node


HEARD = ["stop?", "a GPU is lost", "orders?"]


def test_while_it_meets_others_an_agent_hears_what_it_is_told_and_sees_its_ranks_fail(pausing: Node) -> None:
    pausing.agent._pause()
    assert pausing.done == [*HEARD, "broken?"]
    pausing.pauses_as = "failed"
    with pytest.raises(GivenUp):
        pausing.agent._pause()
    assert pausing.said == []


def test_without_ranks_an_agent_that_meets_others_says_who_is_missing(pausing: Node) -> None:
    pausing.attempts.is_on = False
    pausing.agent._pause()
    assert (pausing.done, pausing.said) == (HEARD, [{"blocked": "waits for all but ('n0',)"}])


@pytest.mark.parametrize("lacks", ["_rendezvous", "_is_meeting", "_formed"])
def test_an_agent_that_meets_nobody_only_hears_what_it_is_told(lacks: str, pausing: Node) -> None:
    setattr(pausing.agent, lacks, None)
    pausing.agent._pause()
    assert (pausing.done, pausing.said) == (HEARD, [])


def test_who_is_done_needs_no_gpu_any_more(pausing: Node) -> None:
    pausing.agent._is_done = True
    pausing.agent._pause()
    assert pausing.done == ["stop?", "orders?", "broken?"]


def test_while_nothing_changes_only_a_stop_is_asked_for(pausing: Node) -> None:
    del pausing.agent._pause_briefly
    changed = [False, True]
    pausing.orders.may_have_changed = lambda: changed.pop(0)
    pausing.agent._pause_briefly()
    assert pausing.done == ["stop?"]
    pausing.agent._pause_briefly()
    assert pausing.done[1:] == ["stop?", *HEARD, "broken?"]


def test_a_node_with_something_broken_ends_its_ranks_and_leaves(node: Node) -> None:
    del node.agent._leave_if_broken
    node.agent._leave_if_broken()
    fault: Any = "GPU 3 has fallen off the bus"
    with pytest.raises(Broken, match="GPU 3 has fallen off the bus"):
        node.agent._leave_if_broken(fault)
    assert node.done == [("ends", 0, fault)]
    node.attempts.workers.stuck = ["pid 7"]
    with pytest.raises(Broken, match="SIGKILL does not end pid 7"):
        node.agent._leave_if_broken()
    assert len(node.done) == 1, "they have been ended, as far as they can be"


# --- the end of all -----------------------------------------------------------------------------------------


def test_who_is_done_waits_for_the_others_and_keeps_copying_meanwhile(node: Node) -> None:
    node.agent._replicas, node.spec.is_host = node.replicas, True
    node.told["done/1"] = ""
    node.at = lambda now: node.all_are(DONE) if now > 1004 else None
    assert node.round() == 0
    waiting = node.said[1]
    assert waiting == {"state": "waiting", "done_at": 1000.0, "waits_for": ["n2"]}, "not for itself"
    assert {"waits_for": ["n2"]} in node.said[2:]
    end = node.done[node.done.index("watch") + 1 :]
    assert end[0] == ("copies", SETTLE_S), "while those who are to keep the last files are still here"
    looked = [each[1] for each in end if each[0] == "members"]
    assert len(looked) == pytest.approx(4 / MEMBERS_S, abs=1)
    assert ("waits for", "left", 0.0) in end, "who has the store keeps it until the others have seen that"
    assert "left/0" in node.told


def test_who_does_not_have_the_store_waits_for_nobody_to_leave(node: Node) -> None:
    node.all_are(DONE)
    assert node.round() == 0
    assert "left/0" in node.told
    assert not [each for each in node.done if each[0] == "waits for"]


@pytest.mark.parametrize("error", [StoreLost("gone"), Fenced()])
def test_a_job_that_all_have_ended_has_succeeded_whatever_happens_then(error: Exception, node: Node) -> None:
    node.all_are(DONE)
    node.spec.is_host = True
    node.rendezvous.wait_for = lambda *_: raising(error)()
    assert node.round() == 0


@pytest.mark.parametrize(("changed", "status"), [("again", None), ("failed", 3)])
def test_who_is_done_starts_again_where_another_is_lost(changed: str, status: int | None, node: Node) -> None:
    node.changed = changed
    assert node.round() == status
    assert "left/0" not in node.told


def test_a_stop_leaves_time_for_a_snapshot_and_for_its_copies(node: Node) -> None:
    node.agent._replicas, node.agent._formed = node.replicas, node.formed
    node.agent.shut_down()
    assert node.done == [("ends", 20.0, "stopped"), ("copies", SETTLE_S)]
    assert node.said == [{"workers": [], "copying": True}]
    assert node.told == {}, "the others go on"
    (node.agent._folder / "stop").touch()
    node.agent.shut_down()
    assert node.told == {"settled/0": ""}
    assert node.done[-1] == ("waits for", "settled", SETTLE_S)


@pytest.mark.parametrize("error", [StoreLost("gone"), SignalException("asked to stop", 15)])  # type: ignore[arg-type]
def test_what_happens_while_the_others_are_waited_for_at_the_end_does_not_matter(
    error: Exception, node: Node
) -> None:
    node.agent._replicas, node.agent._formed = node.replicas, node.formed
    (node.agent._folder / "stop").touch()
    node.rendezvous.wait_for = lambda *_, **__: raising(error)()
    node.agent.shut_down()


@pytest.mark.parametrize("lacks", ["replicas", "formed", "rendezvous"])
def test_a_stop_waits_for_no_copies_where_there_are_none(lacks: str, node: Node) -> None:
    node.agent._replicas, node.agent._formed = node.replicas, node.formed
    setattr(node.agent, f"_{lacks}", None)
    node.agent.shut_down()
    assert node.done == [("ends", 20.0, "stopped")]


def test_a_stop_without_file_descriptors_ends_with_the_process(node: Node) -> None:
    node.agent._replicas, node.agent._formed = node.replicas, node.formed
    node.attempts.end = lambda *_: raising(OSError(errno.EMFILE, "Too many open files"))()
    node.agent.shut_down()
    assert node.done == []
    node.attempts.end = lambda *_: raising(OSError(errno.EIO, "Input/output error"))()
    with pytest.raises(OSError, match="Input/output"):
        node.agent.shut_down()


# --- generations --------------------------------------------------------------------------------------------


@pytest.fixture
def rounds(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the rounds of a generation come to."""
    found: list[Any] = []

    def round_(rendezvous: object) -> int | None:
        assert rendezvous is node.rendezvous
        assert node.agent._rendezvous is rendezvous
        what = found.pop(0)
        node.done.append("round")
        if isinstance(what, Exception):
            raise what
        return what  # type: ignore[no-any-return]

    node.agent._round, node.agent._rendezvous = round_, None
    node.agent._wait_for_descriptors = lambda error: node.done.append(error.strerror)
    monkeypatch.setattr(agent_module, "Rendezvous", lambda *_: node._does("meet", node.rendezvous))
    yield found
    assert found == []


@pytest.mark.parametrize("joins", [False, True])
def test_a_generation_goes_from_round_to_round_until_one_ends_it(
    joins: bool, node: Node, rounds: list[Any]
) -> None:
    node.spec.joins = joins
    rounds += [None, OSError(errno.EMFILE, "Too many open files"), None, 0]
    assert node.agent._generation() == 0
    begun = ["warm up", "stand by", "meet"] if joins else ["warm up", "meet"]
    assert node.done == [*begun, "round", "round", "Too many open files", "round", "round"]
    assert node.said == [{"state": "starting", "generation": 2, "workers": [], "blocked": ""}]


def test_what_a_round_cannot_mend_ends_the_generation(node: Node, rounds: list[Any]) -> None:
    rounds += [OSError(errno.EIO, "Input/output error")]
    with pytest.raises(OSError, match="Input/output"):
        node.agent._generation()


def test_an_orphan_is_one_until_it_has_found_its_way_back(node: Node, rounds: list[Any]) -> None:
    node.agent._is_orphan = True
    node.attempts.workers.warm_up = lambda _: raising(StoreLost("gone"))()
    with pytest.raises(StoreLost):
        node.agent._generation()
    assert node.agent._is_orphan
    node.attempts.workers.warm_up = lambda _: None
    rounds += [3]
    assert node.agent._generation() == 3
    assert not node.agent._is_orphan
    assert [each["state"] for each in node.said] == ["orphaned", "orphaned"]


def test_what_is_left_for_an_agent_is_heard_before_it_meets_the_others(node: Node, rounds: list[Any]) -> None:
    node.at = lambda _: raising(Fenced())()
    with pytest.raises(Fenced):
        node.agent._generation()
    assert (node.done, node.said, rounds) == ([], [], [])
