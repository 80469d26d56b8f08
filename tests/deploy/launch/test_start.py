"""What a start puts on record."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from agents import until
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
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.fields import Nodes as NodeRange


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


@pytest.mark.parametrize("is_placed", [True, False])
def test_a_new_run_is_on_record_with_what_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_placed: bool
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    planned = Plan("lab-2", (nodes.client.node("a"),))
    options = Options(inventory=nodes.inventory.path, command=("job.py", "--lr", "1"), skip_check=True)
    start._record(nodes.inventory, None, planned, {"a": facts("a")}, options, is_placed=is_placed)
    run = find_runs.find("lab-2")
    assert (run.name, run.command, run.inventory_path) == (
        "lab",
        ["job.py", "--lr", "1"],
        str(nodes.inventory.path),
    )
    assert (run.state, run.generation, run.started, run.ended) == ("starting", 0, run.created, None)
    assert (run.is_placed, run.skip_check, set(run.nodes)) == (is_placed, True, {"a"})
    assert len(run.token) == 32, "by which its agents know each other"


def test_a_run_that_goes_on_keeps_its_token_and_not_what_its_last_start_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that the stop did not reach, and that is called in again, has the same."""
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.token, nodes.run.skip_check = "abc", True
    run = goes_on(nodes, "a", "b")
    assert (run.token, run.skip_check, run.state) == ("abc", False, "starting")
    assert run.started > run.created


@pytest.mark.parametrize(
    ("is_resumed", "broken", "drained"),
    [
        (False, {}, {"d": "as before"}),
        (False, {"c": "GPU 1 is lost"}, {"c": "GPU 1 is lost"}),
        (True, {}, {}),
        (True, {"c": "GPU 1 is lost"}, {"c": "GPU 1 is lost"}),
    ],
)
def test_a_start_has_those_out_that_are_broken_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    is_resumed: bool, broken: dict[str, str], drained: dict[str, str],
) -> None:  # fmt: skip
    """A node that the user has drained comes back with the next start; the supervisor starts no broken one."""
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.drain({"d": "as before"})
    planned = Plan("lab-1", (nodes.client.node("a"),))
    channels = dict(nodes.client.channels)
    monkeypatch.setattr(start._Starting, "connect", lambda *_: channels)
    monkeypatch.setattr(start._Starting, "check_and_plan", lambda *_: ({"a": facts("a")}, planned))
    monkeypatch.setattr(start._Starting, "tell", Mock(side_effect=KitError("that is all")))
    monkeypatch.setattr(broken_hosts, "leave_out", lambda given, *_: (given, broken))
    options = Options(inventory=nodes.inventory.path, command=("job.py",), quiet=True)
    resumed = nodes.run if is_resumed else None
    with contextlib.ExitStack() as stack, pytest.raises(KitError, match="that is all"):
        start.start(stack, nodes.inventory, resumed, options, placed="lab-1")
    assert find_runs.find("lab-1").drained_because == drained


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
    """And `kit rm` finds the nodes that it goes on without, now and since an earlier start."""
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.earlier = {"z": {"host": {"name": "z"}}}
    nodes.run.say_stop("kit down")
    nodes.run.finish("stopped", "stopped by kit down", {"cure": "start it"})
    for generation, step in ((0, 90), (1, 40), (1, 20)):
        nodes.run.event("snapshot", about="b", generation=generation, step=step)
    run = goes_on(nodes, "a")
    assert (run.state, run.ended, run.verdict, run.cause, run.stopped_by) == ("starting", None, "", {}, "")
    assert run.was_resumed
    assert list(run.nodes) == ["a"]
    assert {name: node["host"]["name"] for name, node in run.earlier.items()} == {"z": "z", "b": "b"}
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


def test_a_node_whose_ranks_are_done_before_those_of_the_others_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 5.0)
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.answers["status"] = lambda host, _: {
        **STATUS,
        "state": "waiting" if host == "b" else "running",
        "members": [],
    }
    assert started.wait_started(nodes.client, ["a", "b"], least=1, say=print) == {}


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


def test_a_node_whose_ranks_have_failed_with_the_others_has_a_moment_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the start would say that it only waits, and the job had ended on both."""
    nodes = Nodes(tmp_path, monkeypatch)
    asked: list[str] = []

    def status(host: str, _: Any) -> Any:
        asked.append(host)
        return {**STATUS, "state": "failed" if host == "a" or asked.count("b") > 5 else "rendezvous"}

    nodes.answers["status"] = status
    assert started.wait_started(nodes.client, ["a", "b"], least=2, say=print) == {}


@pytest.mark.parametrize(
    ("names", "failing", "least", "are_enough"),
    [
        pytest.param("abc", "c", 2, True, id="enough are left"),
        pytest.param("abc", "c", 3, False, id="one too few"),
        pytest.param("abc", "a", 1, False, id="the rendezvous host has failed"),
        pytest.param("abcd", "cd", 1, True, id="half are left"),
        pytest.param("abcde", "cde", 1, False, id="more than half have failed"),
    ],
)
def test_those_that_are_left_meet_without_nodes_whose_agent_has_failed_where_they_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, failing: str, least: int, are_enough: bool
) -> None:
    monkeypatch.setattr(started, "STARTED_TIMEOUT_S", 30.0)
    monkeypatch.setattr(started, "FAILED_S", 0.2)
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.nodes = dict.fromkeys(names, nodes.run.nodes["a"])
    nodes.client.channels.setdefault("e", nodes.reopen("e"))
    left = [name for name in names if name not in failing]
    polls = dict.fromkeys(names, 0)

    def status(host: str, _: Any) -> dict[str, Any]:
        polls[host] += 1
        have_met = are_enough and polls[host] > 12
        state = "failed" if host in failing else "running" if have_met else "rendezvous"
        return {**STATUS, "state": state, "members": left if state == "running" else []}

    nodes.answers["status"] = status
    told = started.wait_started(nodes.client, list(names), least=least, say=print)
    assert sorted(told) == ([] if are_enough else list(names))


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


LOST_B = ChannelLost("b", "no answer within 30 s")
NO_TORCH = HostError("b", "no torch")


@pytest.mark.parametrize(
    ("error", "silent", "least", "is_unfit", "without"),
    [
        pytest.param(LOST_B, "", 3, False, "b", id="one is lost, and just enough are left"),
        pytest.param(LOST_B, "", 4, False, None, id="one is lost of those that are all needed"),
        pytest.param(LOST_B, "c", 2, False, "bc", id="another does not answer any more"),
        pytest.param(LOST_B, "c", 3, False, None, id="with that one too few are left"),
        pytest.param(KitError("the build was cut short"), "c", 3, False, "c", id="the error is another's"),
        pytest.param(KitError("the code cannot be read"), "", 1, False, None, id="all hosts answer"),
        pytest.param(NO_TORCH, "", 1, False, None, id="a host that answers is not as it is wanted"),
        pytest.param(NO_TORCH, "", 1, True, "b", id="once the plan is made, it is left out"),
        pytest.param(ChannelLost("z", "gone"), "", 1, False, None, id="one that was left out before"),
    ],
)
def test_a_phase_is_done_again_with_those_that_are_left_where_they_are_enough(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: KitError,
    silent: str,
    least: int,
    is_unfit: bool,
    without: str | None,
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)

    def now(host: str, _: Any) -> float:
        if host in silent:
            raise ChannelLost(host, "no answer")
        return 1.0

    nodes.answers["probes.now"] = now
    inventory = nodes.inventory.model_copy(update={"nodes": NodeRange(least, 4)})
    starting = start._Starting(inventory, None, Options(inventory=nodes.inventory.path), "lab-1")
    channels: dict[str, Any] = dict(nodes.client.channels)
    closed = set[str]()
    for name, channel in channels.items():
        monkeypatch.setattr(channel, "close", functools.partial(closed.add, name))
    tried: list[str] = []

    def do() -> str:
        tried.append("".join(channels))
        if len(tried) == 1:
            raise error
        return "done"

    unfit = HostError if is_unfit else ChannelLost
    if without is None:
        with pytest.raises(KitError) as raised:
            starting.on_those_left(channels, do, unfit=unfit)
        assert raised.value is error
        assert (tried, closed) == (["abcd"], set())
        return
    assert starting.on_those_left(channels, do, unfit=unfit) == "done"
    assert tried == ["abcd", "".join(name for name in "abcd" if name not in without)]
    until(lambda: closed == set(without), what="an agent that waits for its start would wait on")
    said = capsys.readouterr().out
    assert [f"without {name}: " in said for name in "abcd"] == [name in without for name in "abcd"]


@pytest.mark.parametrize(("lost", "host", "prestarted"), [("a", "b", ["c"]), ("b", "a", ["a", "c"])])
def test_where_the_rendezvous_host_is_lost_before_its_agent_was_started_another_host_holds_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, host: str, prestarted: list[str]
) -> None:
    """Its agent is started once more, with the port. `kit rm` finds the host that was lost."""
    nodes = Nodes(tmp_path, monkeypatch)
    run = nodes.run
    with run.changing():
        run.is_placed = False
        run.nodes["c"] = {**run.nodes["b"], "name": "c", "local_addr": "10.0.0.3"}
    planned = Plan("lab-1", tuple(nodes.client.node(name) for name in "abc"))
    nodes.answers["hold_port"] = lambda *_: 4712
    starting = start._Starting(nodes.inventory, None, Options(inventory=nodes.inventory.path), "lab-1")
    assert starting._planned_of_those_left(nodes.client, planned) is planned
    starting._prestarted = {name for name in "abc" if name != lost}
    nodes.client.channels.pop(lost)
    left = starting._planned_of_those_left(nodes.client, planned)
    names = [name for name in "abc" if name != lost]
    assert [node.name for node in left.nodes] == names
    first = nodes.client.node(host).local_addr, 4712 if host == "b" else 4711
    assert {(node.master_addr, node.master_port) for node in left.nodes} == {first}
    assert [name for name, _ in nodes.of("hold_port")] == ([host] if host == "b" else [])
    assert sorted(starting._prestarted) == prestarted
    assert list(find_runs.find("lab-1").nodes) == names
    assert list(find_runs.find("lab-1").earlier) == [lost]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Of a run that goes on in generation 2."""
    found = Nodes(tmp_path, monkeypatch)
    with found.run.changing():
        found.run.state, found.run.generation = "starting", 2
    return found


def starting_of(nodes: Nodes, *, goes_on: bool = True) -> tuple[start._Starting, Plan]:
    """A start of a and b, whose code lies in its place; c and d are spares."""
    options = Options(inventory=nodes.inventory.path, quiet=True)
    starting = start._Starting(nodes.inventory, nodes.run if goes_on else None, options, "lab-1")
    starting._package = sync.package()
    return starting, Plan("lab-1", tuple(nodes.client.node(name) for name in "ab"))


@pytest.mark.parametrize("goes_on", [True, False])
def test_agents_are_prestarted_once_with_kits_package_there_and_what_was_left_of_others_ended(
    nodes: Nodes, goes_on: bool
) -> None:
    """No agent of an earlier generation goes on beside them. Tried again, the start ends none of its own."""
    starting, planned = starting_of(nodes, goes_on=goes_on)
    for _ in range(2):
        starting.send(nodes.client, planned, {name: facts(name) for name in "ab"})
    for name in "ab":
        once = ["tree.keep_package", *(["stop"] if goes_on else []), "prestart", "fence"]
        asked = [operation for each, operation, _ in nodes.calls if each == name]
        assert asked == [*once, "tree.keep_package", "fence"]
    assert {args["generation"] for _, args in nodes.of("fence")} == {2}
    assert [args["for_good"] for _, args in nodes.of("stop")] == [False, False] * goes_on


@pytest.mark.parametrize(
    "error", [None, ChannelLost("b", "no answer within 30 s"), HostError("b", "its disk is full")]
)
def test_who_votes_is_on_record_before_an_agent_is_started_and_who_may_have_missed_its_start_is_lost(
    nodes: Nodes, error: HostError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []

    def begins(name: str, given: dict[str, Any]) -> None:
        found = find_runs.find("lab-1")
        assert (found.judgement["generation"], found.judgement["host"], found.state) == (2, "a", "starting")
        assert (given["spec"]["generation"], given["port"]) == (2, 4711 if name == "a" else None)
        if name == "b" and error is not None:
            raise error

    def wait_started(_: object, names: list[str], *, least: int, lost: dict[str, Any], **__: object) -> Any:
        waits.append((names, least, [*lost], find_runs.find("lab-1").state))
        return lost

    monkeypatch.setattr(start, "wait_started", wait_started)
    nodes.answers["start"] = begins
    starting, planned = starting_of(nodes)
    lost = ["b"] if error else []
    assert [*starting.start_agents(nodes.client, planned, start._Code("abc", {}))] == lost
    assert waits == [(["a", "b"], 1, lost, "running")]
    assert find_runs.find("lab-1").code_digest == "abc"


@pytest.mark.parametrize("is_late", [True, False])
def test_a_run_that_somebody_stops_while_it_is_started_is_not_said_to_run(
    nodes: Nodes, is_late: bool
) -> None:
    def begins(*_: object) -> None:
        nodes.run.say_stop("kit down")

    starting, planned = starting_of(nodes)
    if is_late:
        nodes.answers["start"] = begins
    else:
        nodes.run.say_stop("kit down")
    with pytest.raises(KitError, match="was stopped while it was being started, by kit down"):
        starting.start_agents(nodes.client, planned, start._Code("abc", {}))
    assert find_runs.find("lab-1").state == "starting"
    assert bool(nodes.of("start")) == is_late


def test_a_start_that_fails_by_itself_ends_and_takes_that_for_no_lost_host(nodes: Nodes) -> None:
    def begins(name: str, _: object) -> None:
        if name == "b":
            raise KitError("no secrets.env")

    nodes.answers["start"] = begins
    starting, planned = starting_of(nodes)
    with pytest.raises(KitError, match=r"no secrets\.env"):
        starting.start_agents(nodes.client, planned, start._Code("abc", {}))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_ctrl_c_while_a_start_is_put_on_record_leaves_no_run_that_starts_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """Only where all is stopped, nothing is said to be left."""
    nodes = Nodes(tmp_path, monkeypatch)
    planned = Plan("lab-1", (nodes.client.node("a"),))
    channels = dict(nodes.client.channels)
    monkeypatch.setattr(start._Starting, "connect", lambda *_: channels)
    monkeypatch.setattr(start._Starting, "check_and_plan", lambda *_: ({"a": facts("a")}, planned))
    monkeypatch.setattr(start._Starting, "tell", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(broken_hosts, "leave_out", lambda given, *_: (given, {}))
    monkeypatch.setattr(stopping, "NOT_STARTED_GRACE_S", 0.0)
    options = Options(inventory=nodes.inventory.path, command=("job.py",), quiet=True)
    if not is_stopped:
        nodes.answers["stop"] = Mock(side_effect=ChannelLost("a", "no answer within 30 s"))
    with contextlib.ExitStack() as stack, pytest.raises(KeyboardInterrupt) as raised:
        start.start(stack, nodes.inventory, nodes.run, options, placed="lab-1")
    assert isinstance(raised.value, NothingLeft) == is_stopped
    assert find_runs.find("lab-1").state == "stopped"
