"""What an agent does between its rounds, without a process or other agents."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodekit.deploy.agent import agent as agent_module
from nodekit.deploy.agent.agent import MAX_ORPHANED_RETRY_S, ORPHANED_OFTEN_S, Agent
from nodekit.deploy.agent.orders import Fenced, Superseded
from nodekit.deploy.agent.rendezvous.rendezvous import StoreLost
from nodekit.deploy.agent.rendezvous.signed_store import Forged
from nodekit.deploy.agent.round_watch import DYING_S
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.unfit import Unfit, WaitedInVain


class Lone:
    """An agent without a process, and what it has written; its clock goes on only while it sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.now = 1000.0
        self.said: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ends: list[tuple[Any, ...]] = []
        self.answers: Callable[[], bool] = lambda: False
        self.asked: list[float] = []
        monkeypatch.setattr(
            agent_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        )
        monkeypatch.setattr(agent_module, "answers", self._answers)
        self.agent = Agent.__new__(Agent)
        fields: dict[str, Any] = {"name": "n0", "is_host": False, "wait_s": 600.0, "generation": 0, "call": 0}
        self.agent._spec = SimpleNamespace(master_addr="", master_port=0, **{**fields, **spec})  # type: ignore[assignment]
        self.agent._record = SimpleNamespace(  # type: ignore[assignment]
            update=lambda **changes: self.said.append(changes),
            event=lambda kind, **told: self.events.append((kind, told)),
            end=lambda state, **told: self.events.append((state, told)),
        )

        def end(*how: Any, tell: str | None = None, waits: bool = False) -> None:
            assert waits or tell is None, "a fence is to be sure"
            self.ends.append((*how, tell))

        self.agent._attempts = SimpleNamespace(end=end)  # type: ignore[assignment]
        self.agent._orders = SimpleNamespace(check_spec=lambda _: None)  # type: ignore[assignment]
        self.agent._rendezvous = self.agent._formed = None
        self.agent._orphaned = []
        self.agent._folder = Path()
        self.agent._watch = SimpleNamespace(dying_s=0.25)  # type: ignore[assignment]
        self.agent._pause = self.agent._check_stop = lambda: None  # type: ignore[method-assign]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _answers(self, *_: object) -> bool:
        self.asked.append(self.now)
        return self.answers()


Make = Callable[..., Lone]


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **spec: Lone(monkeypatch, **spec)


def lost(own: Lone, why: str = "its connection ended", cause: Exception | None = None) -> None:
    error = StoreLost(why)
    error.__cause__ = cause
    own.agent._wait_orphaned(error)


def test_a_host_that_is_lost_often_is_asked_for_less_often(lone: Make) -> None:
    own = lone()
    own.answers = lambda: True
    waits = []
    for _ in range(9):
        before = own.now
        lost(own)
        waits.append(own.asked[-1] - before)
    wanted = [min(2.0**number, MAX_ORPHANED_RETRY_S) for number in range(9)]
    assert waits == pytest.approx(wanted, abs=0.2)
    own.now += ORPHANED_OFTEN_S + 1
    before = own.now
    lost(own)
    assert own.asked[-1] - before == pytest.approx(1.0, abs=0.2), "that was long ago"
    assert own.said[0]["state"] == "orphaned"
    assert own.said[0]["blocked"] == "the rendezvous host is lost (its connection ended)"
    assert own.events[0] == ("store-lost", {"why": "its connection ended"})
    assert own.ends[0] == (DYING_S, "the rendezvous host is lost", "lost")
    assert own.agent._is_orphan


def test_a_host_that_does_not_answer_is_asked_again_every_second_until_the_wait_is_over(lone: Make) -> None:
    own = lone(wait_s=10.0)
    with pytest.raises(WaitedInVain, match="the rendezvous host has been lost for 10 s"):
        lost(own)
    assert len(own.asked) == pytest.approx(9, abs=1)


def test_somebody_else_who_writes_to_the_store_is_told_of(lone: Make) -> None:
    own = lone()
    own.answers = lambda: True
    lost(own, "somebody else writes", Forged("somebody else writes"))
    assert own.events == [("store-lost", {"why": "somebody else writes", "forged": True})]
    assert own.said[0] == {"notice": "n0: somebody else writes"}


def test_the_host_of_a_store_that_is_lost_waits_for_the_next_generation(lone: Make) -> None:
    with pytest.raises(Fenced):
        lost(lone(is_host=True))


def test_a_fenced_node_waits_for_its_call_and_ends_by_itself_where_none_comes(lone: Make) -> None:
    own = lone(wait_s=10.0)
    with pytest.raises(WaitedInVain, match="nobody called this node into the next generation for 10 s"):
        own.agent._wait_fenced()
    assert own.said == [{"state": "fenced", "workers": [], "members": [], "blocked": ""}]
    assert own.ends == [(0.25, "fenced", "lost")]

    def called(_: object) -> None:
        if own.now > began + 5:
            raise Superseded

    began, own.agent._orders.check_spec = own.now, called  # type: ignore[method-assign]
    with pytest.raises(Superseded):
        own.agent._wait_fenced()


@pytest.mark.parametrize(
    ("state", "restarted", "fruitless", "status", "no_progress"),
    [
        ("succeeded", True, True, 0, False),
        ("failed", False, False, 3, False),
        ("failed", True, False, 3, True),
        ("failed", False, True, 3, True),
    ],
)
def test_how_the_job_has_ended_is_told_with_whether_restarts_had_brought_nothing(
    state: Any, restarted: bool, fruitless: bool, status: int, no_progress: bool, lone: Make
) -> None:
    own, closed = lone(), []
    own.agent._watch.budget = SimpleNamespace(was_restarted=restarted, is_fruitless=fruitless)  # type: ignore[assignment]
    own.agent._rendezvous = SimpleNamespace(close=lambda outcome: closed.append(outcome))  # type: ignore[assignment]
    assert own.agent._end(state, "why") == status
    assert own.events == [(state, {"message": "why", "cause": "", "no_progress": no_progress})]
    assert (closed, own.ends) == ([state], [(0, "why", None)])


def test_a_host_that_is_called_into_its_own_generation_opens_no_second_store(
    lone: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes may still know the first one."""
    own = lone()
    spec: Any = SimpleNamespace(is_host=True, generation=0, call=2)
    monkeypatch.setattr(AgentSpec, "load", lambda _: spec)
    monkeypatch.setattr(agent_module, "replace", lambda old, **more: SimpleNamespace(**{**vars(old), **more}))
    with pytest.raises(Fenced):
        own.agent._take_new_spec()
    assert (own.agent._spec.call, own.agent._spec.is_host) == (2, False), "it was heard"


def test_what_ends_a_generation_decides_what_comes_next(lone: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own, done = lone(), []
    what: list[BaseException | int] = [
        Superseded(), Fenced(), StoreLost("gone"), OSError(errno.EMFILE, "Too many open files"), 3
    ]  # fmt: skip

    def generation() -> int:
        done.append("generation")
        found = what.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    agent: Any = own.agent
    agent._generation = generation
    for name in ("take_new_spec", "wait_fenced", "wait_orphaned", "wait_for_descriptors"):
        setattr(agent, f"_{name}", lambda *_, name=name: done.append(name))
    assert own.agent.run() == 3
    assert done[1::2] == ["take_new_spec", "wait_fenced", "wait_orphaned", "wait_for_descriptors"]
    what = [OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")]
    with pytest.raises(Unfit, match="Cannot assign"):
        own.agent.run()
    what = [OSError(errno.EIO, "Input/output error")]
    with pytest.raises(OSError, match="Input/output"):
        own.agent.run()
