"""What a start puts on record."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_nodes import STATUS, Nodes, facts

from nodekit.deploy.connect.channel import ChannelLost
from nodekit.deploy.launch import broken_hosts, start, started, stopping
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.interrupts import NothingLeft
from nodekit.deploy.plan.plan import Plan
from nodekit.deploy.records import find_runs
from nodekit.deploy.records.runs import Run
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.sync import SyncResult
from nodekit.inventory.errors import KitError


def test_the_code_on_record_is_what_the_hosts_have_also_where_it_changed_while_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node whose agent is started anew has to have that."""
    has = SyncResult(digest="as it was sent", files_sent=1, bytes_sent=1, kept=())
    monkeypatch.setattr(sync, "send", lambda *_, **__: {"a": has})
    read: Any = SimpleNamespace(digest="as it was read", root=tmp_path)
    channels: dict[str, Any] = {"a": None}
    options = Options(inventory=tmp_path / "lab.yaml", quiet=True)
    _, digest = start._send(read, channels, {"a": facts("a")}, "lab-1", options)
    assert digest == "as it was sent"


def goes_on(nodes: Nodes, *names: str) -> Run:
    """What is on record of the run once it is started again on some of its nodes."""
    planned = Plan("lab-1", tuple(nodes.client.node(name) for name in names))
    found = {name: facts(name) for name in names}
    options = Options(inventory=nodes.inventory.path)
    start._record(nodes.inventory, nodes.run, planned, found, options, is_placed=False)
    return find_runs.find("lab-1")


@pytest.mark.parametrize(
    ("told", "generation"),
    [
        ({}, 3),
        ({"next_generation": None, "called_off": -1}, 3),
        ({"next_generation": None, "called_off": 5}, 6),
        ({"next_generation": 7, "called_off": 5}, 8),
    ],
)
def test_a_run_goes_on_in_a_generation_that_no_host_was_fenced_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], generation: int
) -> None:
    """Also where that one was called off, or has not begun: its fence would be in the way on some hosts."""
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.generation, nodes.run.judgement = 2, told
    assert goes_on(nodes, "a", "b").generation == generation


def test_a_run_that_goes_on_has_ended_no_more_and_expects_the_snapshot_of_its_newest_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `kit rm` finds the node that it goes on without."""
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.say_stop("kit down")
    nodes.run.finish("stopped", "stopped by kit down", {"cure": "start it"})
    for generation, step in ((0, 90), (1, 40), (1, 20)):
        nodes.run.event("snapshot", about="b", generation=generation, step=step)
    run = goes_on(nodes, "a")
    assert (run.state, run.ended, run.verdict, run.cause, run.stopped_by) == ("starting", None, "", {}, "")
    assert run.was_resumed
    assert list(run.nodes) == ["a"]
    assert {name: node["host"]["name"] for name, node in run.earlier.items()} == {"b": "b"}
    expected = run.nodes["a"]["env"]["NODEKIT_SNAPSHOT_EXPECTED"]
    assert expected.startswith("step 40 of generation 1 was committed on ")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ChannelLost("b", "no answer within 30 s"), "b: no answer within 30 s"),
        ({"alive": False, "state": None, "agent_log": "no torch\n"}, "b: its agent ended at once: no torch"),
        ({"alive": False, "agent_log": ""}, "b: its agent ended at once: was it stopped?"),
    ],
)
def test_a_start_ends_with_the_node_that_is_lost_and_not_with_those_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: ChannelLost | dict[str, Any], said: str
) -> None:
    """They would be said not to reach each other, after two minutes."""
    nodes = Nodes(tmp_path, monkeypatch)

    def status(host: str, _: Any) -> Any:
        if host == "b" and isinstance(found, ChannelLost):
            raise found
        return {**STATUS, "state": "rendezvous", **(found if host == "b" else {})}

    nodes.answers["status"] = status
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 5.0)
    with pytest.raises(KitError) as error:
        started.wait_started(nodes.client, ["a", "b"], least=2, say=print)
    assert str(error.value) == said


def test_nodes_that_do_not_meet_in_time_are_said_not_to_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.answers["status"] = lambda host, _: {**STATUS, "state": "running" if host == "b" else "rendezvous"}
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 0.1)
    with pytest.raises(KitError, match=r"^a: still rendezvous after 0 s.*firewall"):
        started.wait_started(nodes.client, ["a", "b"], least=2, say=print)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"a": "running", "b": None}, "b (starting)"),
        ({"a": "rendezvous", "b": None}, "a (rendezvous), b (starting)"),
        ({"a": "rendezvous", "b": "rendezvous"}, f"a, b (rendezvous): {started.NOT_REACHED}"),
    ],
)
def test_a_start_that_takes_long_says_which_nodes_are_waited_for_and_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str | None], said: str
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    told: list[str] = []
    nodes.answers["status"] = lambda host, _: {**STATUS, "state": "running" if told else states[host]}
    monkeypatch.setattr(started, "SLOW_S", 0.3)
    assert started.wait_started(nodes.client, ["a", "b"], least=2, say=told.append) == {}
    assert told == [f"start    after 0 s still waiting for {said}"]


def test_a_start_that_takes_long_does_not_say_that_it_waits_for_a_node_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.nodes = dict.fromkeys("abc", nodes.run.nodes["a"])
    told: list[str] = []

    def status(host: str, _: Any) -> dict[str, Any]:
        found = {"state": None, "alive": False, "agent_log": ""} if host == "b" else {}
        return {**STATUS, "state": "running" if told else "rendezvous", "members": ["a", "c"], **found}

    nodes.answers["status"] = status
    monkeypatch.setattr(started, "SLOW_S", 0.3)
    assert list(started.wait_started(nodes.client, ["a", "b", "c"], least=1, say=told.append)) == ["b"]
    assert told == [f"start    after 0 s still waiting for a, c (rendezvous): {started.NOT_REACHED}"]


NOT_YET = f"b: not yet with the others: {started.NOT_REACHED}"


@pytest.mark.parametrize(
    ("found", "without"),
    [
        pytest.param(
            {"b": {"state": None, "alive": False}}, "b: its agent ended at once: was it stopped?", id="lost"
        ),
        pytest.param({"a": {"members": ["a"]}, "b": {"state": "rendezvous"}}, NOT_YET, id="not met"),
        pytest.param(
            {"a": {"state": "succeeded", "members": []}, "b": {"state": "rendezvous"}}, NOT_YET, id="too late"
        ),
    ],
)
def test_a_start_goes_on_without_a_node_where_enough_are_left_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, dict[str, Any]], without: str
) -> None:
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 5.0)
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.answers["status"] = lambda host, _: {**STATUS, "agent_log": "", **found.get(host, {})}
    told = started.wait_started(nodes.client, ["a", "b"], least=1, say=print)
    assert {name: str(error) for name, error in told.items()} == {"b": without}


@pytest.mark.parametrize(("failing", "waiting"), [("b", "a"), ("a", "b")])
def test_a_start_does_not_wait_for_nodes_whose_agent_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, waiting: str
) -> None:
    """The others were said to have a firewall between them, after two minutes."""
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 5.0)
    monkeypatch.setattr(started, "FAILED_S", 0.2)
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.answers["status"] = lambda host, _: {
        **STATUS,
        "state": "failed" if host == failing else "rendezvous",
    }
    told = started.wait_started(nodes.client, ["a", "b"], least=2, say=print)
    said = {
        waiting: f"{waiting}: waits for {failing}, which has failed",
        failing: f"{failing}: its agent has failed",
    }
    assert {name: str(error) for name, error in told.items()} == said


def test_a_node_that_the_others_have_met_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 5.0)
    nodes, states = Nodes(tmp_path, monkeypatch), ["rendezvous"] * 3
    nodes.answers["status"] = lambda host, _: {
        **STATUS,
        "state": states.pop() if host == "b" and states else "running",
    }
    assert started.wait_started(nodes.client, ["a", "b"], least=1, say=print) == {}
    assert states == []


@pytest.mark.parametrize("by", ["", "kit down"])
def test_where_the_rendezvous_host_is_lost_the_others_wait_for_another_generation_unless_the_run_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """That somebody has stopped the run is the reason then, and no fault of the host."""
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 5.0)
    nodes = Nodes(tmp_path, monkeypatch)

    def status(host: str, _: Any) -> dict[str, Any]:
        nodes.run.say_stop(by)
        state = {"state": None, "alive": False, "agent_log": ""} if host == "a" else {"state": "rendezvous"}
        return {**STATUS, **state}

    nodes.answers["status"] = status
    if by:
        with pytest.raises(KitError, match="lab-1 was stopped while it was being started, by kit down"):
            started.wait_started(nodes.client, ["a", "b"], least=1, say=print)
        return
    told = started.wait_started(nodes.client, ["a", "b"], least=1, say=print)
    assert [str(each) for each in told.values()] == [
        "a: its agent ended at once: was it stopped?",
        "b: waits for another generation to begin",
    ]


WAITS = "waits for another generation to begin"


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("names", "gone", "least", "without"),
    [
        pytest.param("abcd", "b", 1, {}, id="one that is not the rendezvous host"),
        pytest.param("abcd", "a", 1, dict.fromkeys("bcd", WAITS), id="the rendezvous host"),
        pytest.param("abcd", "cd", 1, dict.fromkeys("ab", WAITS), id="half: no majority is left"),
        pytest.param("abc", "bc", 1, None, id="more than half"),
        pytest.param("abc", "b", 3, None, id="one too many"),
    ],
)
def test_who_is_left_of_a_start_goes_on_or_waits_for_another_generation_or_the_start_ends_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: str,
    gone: str,
    least: int,
    without: dict[str, str] | None,
    is_known: bool,
) -> None:
    """More than half that cannot be reached may be training together. Some are known before: they got no go."""
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 3.0 if without is None else 30.0)
    timer = Mock()
    monkeypatch.setattr(started.threading, "Timer", timer)
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.nodes = dict.fromkeys(names, nodes.run.nodes["a"])
    lost = {name: ChannelLost(name, "no answer within 30 s") for name in gone}
    polls = dict.fromkeys(names, 0)
    asked = set[str]()

    def status(host: str, _: Any) -> dict[str, Any]:
        asked.add(host)
        if host in lost:
            raise lost[host]
        polls[host] += is_known or asked >= lost.keys()
        return {**STATUS, "state": "rendezvous" if polls[host] <= 3 else "running", "members": list(names)}

    nodes.answers["status"] = status
    known = lost if is_known else {}
    if without is None:
        with pytest.raises(KitError) as error:
            started.wait_started(nodes.client, list(names), least=least, say=print, lost=known)
        assert str(error.value) == "\n".join(map(str, lost.values()))
        assert not (is_known and asked)
    else:
        told = started.wait_started(nodes.client, list(names), least=least, say=print, lost=known)
        waits = {name: f"{name}: {why}" for name, why in without.items()}
        assert {name: str(each) for name, each in told.items()} == {
            **{each.host: str(each) for each in lost.values()},
            **waits,
        }
        assert asked == set(names) - known.keys()
        assert without or all(polls[name] == 4 for name in names if name not in gone), "until they run"
    timer.return_value.cancel.assert_called_once_with()


def test_a_ctrl_c_while_a_start_is_put_on_record_leaves_no_run_that_starts_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    planned = Plan("lab-1", (nodes.client.node("a"),))
    channels = dict(nodes.client.channels)
    monkeypatch.setattr(start._Starting, "connect", lambda *_: channels)
    monkeypatch.setattr(start._Starting, "check_and_plan", lambda *_: ({"a": facts("a")}, planned))
    monkeypatch.setattr(start._Starting, "tell", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(broken_hosts, "leave_out", lambda given, *_: (given, {}))
    monkeypatch.setattr(stopping, "NOT_STARTED_GRACE_S", 0.0)
    options = Options(inventory=nodes.inventory.path, command=("job.py",), quiet=True)
    with contextlib.ExitStack() as stack, pytest.raises(NothingLeft):
        start.start(stack, nodes.inventory, nodes.run, options, placed="lab-1")
    assert find_runs.find("lab-1").state == "stopped"
