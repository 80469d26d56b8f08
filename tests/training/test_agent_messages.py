"""What kit's agent tells a rank, and what a rank does with it while it joins the others."""

import os
import queue
import select
import signal
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from agents import until
from free_ports import free_port

from nodekit.deploy.agent.ranks.messages import Messages
from nodekit.training.attempts import reform
from nodekit.training.group import agent_messages
from nodekit.training.group.agent_messages import AgentMessages, messages_from
from nodekit.training.process.kept import Kept
from nodekit.training.process.stop import Stop
from nodekit.training.world import World

SOON_S = 60.0
"""For what a thread hears at once, unless the machine stands still."""


@pytest.fixture
def agent(tmp_path: Path) -> Messages:
    messages = Messages(tmp_path / "messages")
    messages.prepare(range(2))
    messages.prepare(range(2))  # each attempt does
    return messages


def test_who_reads_is_told_and_the_others_are_known_not_to(agent: Messages) -> None:
    assert not agent.send(0, {"kind": "lost"}), "nobody reads yet"
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    rank = AgentMessages(agent.path(0))
    rank.when("lost", lambda: heard.put("lost"))
    rank.when("lost", lambda: heard.put("default"), is_default=True)
    rank.when("pause", lambda: heard.put("default"), is_default=True)
    assert agent.send(0, {"kind": "lost"})
    assert agent.send(0, {"kind": "pause"})
    assert [heard.get(timeout=SOON_S) for _ in range(2)] == ["lost", "default"]
    assert not agent.send(1, {"kind": "lost"})
    rank.ignore()
    assert agent.send(0, {"kind": "lost"})
    agent.path(0).write_bytes(b'{"kind": "ne\n')
    assert agent.send(0, {"kind": "next", "env": {"RANK": "1", "LONG": "x" * 5000}, "log": "a log"})
    found = rank.next_attempt(SOON_S)
    assert found is not None
    assert (found.env["RANK"], len(found.env["LONG"]), found.log) == ("1", 5000, "a log")
    assert heard.empty()
    assert rank.next_attempt(0.01) is None


def test_a_rank_that_cannot_pause_gets_sigterm_unless_it_waits_already(
    agent: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(agent_messages.os, "kill", lambda *each: signals.put(each))
    rank = AgentMessages(agent.path(0))
    assert agent.send(0, {"kind": "pause"})
    assert signals.get(timeout=SOON_S) == (0, signal.SIGTERM), "to its process group, as the agent sends it"
    rank.ignore()
    assert agent.send(0, {"kind": "pause"})
    assert agent.send(0, {"kind": "next", "env": {}, "log": ""})
    assert rank.next_attempt(SOON_S)
    assert signals.empty()


def test_what_is_told_of_an_attempt_before_the_rank_listens_is_not_lost(agent: Messages) -> None:
    """On a busy machine a rank takes longer from one attempt to the next than another one takes to be lost again."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    rank = AgentMessages(agent.path(0))
    rank.ignore()
    for kind in ("lost", "pause"):
        assert agent.send(0, {"kind": kind}), "of the attempt that it has left"
    assert agent.send(0, {"kind": "next", "env": {"RANK": "1"}, "log": ""})
    assert rank.next_attempt(SOON_S)
    assert not rank.is_over
    for kind in ("pause", "lost"):  # in this order: once the loss has arrived, both have
        assert agent.send(0, {"kind": kind})
    until(lambda: rank.is_over, what="the loss")
    rank.when("pause", lambda: heard.put("pause"))
    rank.when("lost", lambda: heard.put("lost"))
    rank.when("lost", lambda: heard.put("default"), is_default=True)
    assert [heard.get(timeout=SOON_S) for _ in range(2)] == ["pause", "lost"]
    assert heard.empty()


def test_an_attempt_is_over_for_a_rank_that_is_told_of_the_next_one(agent: Messages) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    rank = AgentMessages(agent.path(0))
    rank.when("lost", lambda: heard.put("lost"))
    for number in (1, 2):
        assert agent.send(0, {"kind": "next", "env": {"RANK": str(number)}, "log": ""})
        assert heard.get(timeout=SOON_S) == "lost"
    assert rank.is_over
    found = rank.next_attempt(SOON_S)
    assert found is not None
    assert found.env == {"RANK": "2"}, "the newest"
    assert not rank.is_over


def test_a_rank_does_not_join_an_attempt_that_is_over(
    agent: Messages, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody would come. It waits again, where the agent looks at that attempt."""
    progress = tmp_path / "progress"
    tried: list[World] = []
    told = iter(["1", "2"])

    def make() -> World:  # between what it is told and the attempt
        number = next(told)
        if number == "1":
            assert agent.send(0, {"kind": "lost"})
            until(lambda: world.messages and world.messages.is_over, what="the loss")
            progress.unlink()
        return replace(world, num_restarts=int(number), progress_file=tmp_path / f"progress{number}")

    def attempt(each: World) -> Kept | int:
        tried.append(each)
        return 0 if each.num_restarts else Kept({"x": 1}, (0, 41), lambda: True)

    def tell() -> None:
        assert agent.send(0, {"kind": "next", "env": {}, "log": str(tmp_path / "log")})

    monkeypatch.setattr(reform, "_take_on", lambda _: None)
    assert world.messages is not None
    tell()
    again = threading.Thread(
        target=lambda: until(
            lambda: (tmp_path / "progress1").exists() and (tell(), True), what="it waits again"
        )
    )
    again.start()
    assert reform.run(world, Stop(), make, attempt, lambda _: True) == 0
    again.join()
    assert [each.num_restarts for each in tried] == [0, 2]
    assert (tmp_path / "progress1").read_text().startswith("41 waiting with the newest step")


def test_who_stands_by_does_not_join_an_attempt_that_is_over(
    agent: Messages, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODEKIT_STANDBY", "0")
    made: list[str] = []

    def make() -> World:
        made.append(os.environ["TRIED"])
        if len(made) == 1:
            assert agent.send(0, {"kind": "lost"})
            until(lambda: world.messages and world.messages.is_over, what="the loss")
            tell("2")
        return replace(world, run_id=made[-1])

    def tell(number: str) -> None:
        assert agent.send(0, {"kind": "next", "env": {"TRIED": number}, "log": ""})

    monkeypatch.setenv("TRIED", "")
    assert world.messages is not None
    tell("1")
    assert reform.attempt_of(world, make).run_id == "2"
    assert made == ["1", "2"]
    assert "NODEKIT_STANDBY" not in os.environ
    assert not agent.hears_of_a_loss(), (
        "its agent has not waited for it, and may take it for the word of a loss"
    )


def test_who_is_about_to_be_started_hears_what_it_is_told(agent: Messages) -> None:
    agent.keep(0)
    assert agent.send(0, {"kind": "next", "env": {"RANK": "1"}, "log": "a log"})
    found = AgentMessages(agent.path(0)).next_attempt(SOON_S)
    assert found is not None
    assert found.env == {"RANK": "1"}
    agent.keep(1)
    assert agent.send(1, {"kind": "lost"})
    agent.keep_no_more()
    assert not agent.send(1, {"kind": "lost"})
    with agent.path(1).open("r+b", buffering=0):  # who comes after it
        assert not agent.is_unread(1), "what the one before it has not read"


@pytest.mark.parametrize("is_kept", [True, False])
def test_who_is_told_is_not_the_process_before_it_which_has_not_ended_yet(
    agent: Messages, is_kept: bool
) -> None:
    """A thread that waits in a read takes what comes, though its process has been killed."""
    before = os.open(agent.path(0), os.O_RDWR | os.O_NONBLOCK)
    (agent.keep if is_kept else agent.renew)(0)
    assert agent.send(0, {"kind": "next", "env": {"RANK": "3"}, "log": "/x"}) == is_kept
    with pytest.raises(BlockingIOError):
        os.read(before, 1)
    rank = AgentMessages(agent.path(0))
    if not is_kept:
        assert agent.send(0, {"kind": "next", "env": {"RANK": "3"}, "log": "/x"})
    found = rank.next_attempt(SOON_S)
    os.close(before)
    assert found is not None
    assert found.env == {"RANK": "3"}


def test_a_rank_that_waits_is_heard_at_once(agent: Messages) -> None:
    assert agent.inbox is not None
    assert not agent.hears_of_a_loss()
    AgentMessages(agent.path(1)).say_waiting(has_paused=False)
    assert agent.hears_of_a_loss()
    assert not agent.hears_of_a_loss(), "once"
    AgentMessages(agent.path(1)).say_waiting(has_paused=True)
    assert select.select([agent.inbox], [], [], 0)[0], "it is looked at what the rank does"
    assert not agent.hears_of_a_loss()


def test_what_a_rank_has_not_read_yet_is_known(agent: Messages) -> None:
    assert not agent.is_unread(0), "nobody reads"
    with agent.path(0).open("r+b", buffering=0) as rank:
        assert not agent.is_unread(0)
        assert agent.send(0, {"kind": "lost"})
        assert agent.is_unread(0)
        assert not agent.is_unread(1)
        rank.read(4096)
        assert not agent.is_unread(0)


def test_without_a_fifo_a_rank_does_without(tmp_path: Path) -> None:
    assert messages_from(tmp_path / "no such") is None
    Messages(tmp_path / "no such folder" / "either").prepare([0])  # as where a file system has none


@pytest.fixture
def world(agent: Messages, tmp_path: Path) -> World:
    """Rank 0 of two, which nobody else joins."""
    return World.from_env(
        {
            "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "NODEKIT_AGENT_PIPE": str(agent.path(0)), "NODEKIT_PROGRESS_FILE": str(tmp_path / "progress"),
        },
        timeout_s=60,
    )  # fmt: skip


def test_what_was_kept_is_saved_by_a_rank_that_waits_in_vain_for_another(
    agent: Messages, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its main thread hears nothing: it waits for a connection."""
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(reform, "JOINING_S", 0.1)
    monkeypatch.setattr(reform.os, "_exit", done.put)
    kept = Kept({"x": 1}, (0, 41), lambda: done.put("saved") or True)
    with reform.guarded(replace(world, kept=kept), Stop()):
        assert agent.send(0, {"kind": "lost"})
        assert [done.get(timeout=SOON_S) for _ in range(2)] == ["saved", 1]
    assert (tmp_path / "progress").read_text().startswith("41 another rank is lost: keeping")


def test_a_rank_that_has_joined_is_not_ended(
    agent: Messages, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "nodekit-guard":
            guards.put(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(reform, "JOINING_S", 2 * SOON_S)
    monkeypatch.setattr(reform.os, "_exit", done.put)
    kept = Kept({"x": 1}, (0, 41), lambda: done.put("saved") or True)
    with reform.guarded(replace(world, kept=kept), Stop()):
        assert agent.send(0, {"kind": "lost"})
        guard = guards.get(timeout=SOON_S)
    guard.join(SOON_S)
    assert not guard.is_alive()
    assert done.empty()


def test_a_stop_while_a_rank_joins_the_others_saves_what_was_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(reform, "JOINING_S", 0.1)
    monkeypatch.setattr(reform.os, "_exit", done.put)
    entered: list[int] = []
    kept = Kept({"x": 1}, (0, 41), lambda: done.put("saved") or True, enters=entered.append)
    with Stop(grace_s=3600) as stop, reform.guarded(replace(world, kept=kept, generation=2), stop):
        stop.request()
        assert [done.get(timeout=SOON_S) for _ in range(2)] == ["saved", stop.exit_code]
    assert entered == [2], "its own generation can commit nothing any more"


def test_a_step_that_could_not_be_saved_is_not_given_up_at_once(
    agent: Messages, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    monkeypatch.setattr(reform, "JOINING_S", 0.1)
    monkeypatch.setattr(reform.os, "_exit", done.put)
    kept = Kept({"x": 1}, (0, 41), lambda: bool(done.put("not saved")))
    with reform.guarded(replace(world, kept=kept), Stop()):
        assert agent.send(0, {"kind": "lost"})
        assert done.get(timeout=SOON_S) == "not saved"
        with pytest.raises(queue.Empty):
            done.get(timeout=0.3)


def test_a_rank_that_joins_the_others_is_not_stopped_to_pause(agent: Messages, world: World) -> None:
    """It pauses once it trains."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    with reform.guarded(replace(world, kept=Kept({"x": 1}, (0, 41), lambda: True)), Stop()):
        assert agent.send(0, {"kind": "pause"})
        until(lambda: not agent.is_unread(0), what="it is read", timeout_s=SOON_S)
        assert world.messages is not None
        world.messages.when("pause", lambda: asked.put("asked"))
    assert asked.get(timeout=SOON_S) == "asked"


def test_what_cannot_be_followed_is_not_the_last_that_is_heard(agent: Messages, world: World) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fails() -> None:
        raise RuntimeError("can't start new thread")

    assert world.messages is not None
    world.messages.when("pause", fails)
    world.messages.when("lost", lambda: heard.put("lost"))
    assert agent.send(0, {"kind": "pause"})
    assert agent.send(0, {"kind": "lost"})
    assert heard.get(timeout=SOON_S) == "lost"


def test_a_group_that_was_not_formed_leaves_no_trace_in_the_name_of_the_next(world: World) -> None:
    """The ranks of a group find each other by that name, and a rank that is new counts from 0."""
    c10d: Any = dist.distributed_c10d
    with pytest.raises((RuntimeError, dist.DistError)):
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.2)
        )
    assert c10d._world.group_count == 1, "torch mends it: leave it to torch"
    reform.leave(world)
    assert c10d._world.group_count == 0
