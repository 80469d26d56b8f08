"""How a run ended, by what its nodes said; what the policy observes of a node's status; the supervisor's threads."""

import contextlib
import dataclasses
import itertools
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fake_nodes
import pytest
from agents import until
from disks import full, small_disk
from fake_nodes import NAMES, Nodes, facts

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.agent.ranks.failures import Failure
from nodekit.deploy.connect.channel import RemoteError
from nodekit.deploy.host import files
from nodekit.deploy.plan import check
from nodekit.deploy.records import events, find_runs, runs
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.screen.view import View
from nodekit.deploy.story.verdict import Told, verdict
from nodekit.deploy.supervise import drain, policy, record_writer, supervise
from nodekit.deploy.supervise.node_client import BrokenHost
from nodekit.deploy.supervise.observation import seen_of
from nodekit.deploy.supervise.observer import Over
from nodekit.deploy.supervise.state import (
    Action,
    Drain,
    Exclude,
    Fence,
    Finish,
    Join,
    Notice,
    Observation,
    Rules,
    SetVoters,
    Start,
    State,
    Stop,
)
from nodekit.deploy.supervise.supervise import Supervisor
from nodekit.inventory.errors import HostError, KitError, NotWritten

DONE = Told(state="succeeded")
STOPPED = Told(state="stopped")
GONE = Told(state="running")


def failure(node: str, rank: int, attempt: str, error: str, when: float = 0.0) -> Failure:
    return Failure(
        node=node, rank=rank, world_size=2, attempt=attempt, exitcode=1, when=when, log="/l", error=error
    )


def test_all_succeeded_is_success() -> None:
    assert verdict({"a": DONE, "b": DONE}, max_restarts=3).outcome == "succeeded"


def test_the_last_attempts_first_failure_is_the_verdict() -> None:
    nodes = {
        "a": Told(
            state="failed",
            failures=(
                failure("a", 0, "0.0", "Connection reset by peer"),
                failure("a", 0, "0.1", "Connection reset by peer"),
            ),
        ),
        "b": Told(
            state="failed",
            failures=(failure("b", 1, "0.0", "ValueError: old"), failure("b", 1, "0.1", "ValueError: new")),
            message="2 crashes without progress",
            no_progress=True,
        ),
    }
    found = verdict(nodes, max_restarts=1)
    assert found.outcome == "failed"
    assert found.text.startswith("rank 1 on b failed first (exit status 1), in the last of 2 attempts")
    assert found.first is not None
    assert found.first.error == "ValueError: new"
    assert found.others == "1 other rank ended because of it: lost its connection to b, at once"
    assert found.notes == ("b: 2 crashes without progress",)
    assert found.no_progress


def test_attempts_are_ordered_as_numbers() -> None:
    nodes = {
        "a": Told(
            state="failed",
            failures=(failure("a", 0, "0.9", "ValueError: old"), failure("a", 0, "0.10", "ValueError: new")),
        )
    }
    first = verdict(nodes, max_restarts=1).first
    assert first is not None
    assert first.error == "ValueError: new"


def test_a_node_that_is_gone_is_named_rather_than_those_who_lost_it() -> None:
    echo = Told(state="failed", failures=(failure("a", 0, "0.0", "Connection reset by peer"),))
    found = verdict({"a": echo, "b": GONE}, max_restarts=0)
    assert found.outcome == "failed"
    assert found.text.startswith("b was lost: its agent is gone without a word")


@pytest.mark.parametrize("other", [GONE, STOPPED], ids=["gone", "stopped, for it had missed the end"])
def test_survivors_that_trained_to_the_end_are_a_success_that_names_the_others(other: Told) -> None:
    found = verdict({"a": DONE, "b": other}, max_restarts=0)
    assert (found.outcome, found.text) == ("succeeded", "trained to the end without b")


def test_stopped_everywhere_is_stopped() -> None:
    assert verdict({"a": STOPPED, "b": STOPPED}, max_restarts=0).outcome == "stopped"


def test_a_wait_that_was_given_up_is_a_failure_with_its_reason() -> None:
    found = verdict({"a": STOPPED, "b": GONE}, max_restarts=0, also="waited 60 s for enough nodes")
    why = "waited 60 s for enough nodes: b was lost: its agent is gone without a word"
    assert (found.outcome, found.text) == ("failed", why)
    assert found.cause is not None
    assert "With nodes: MIN:MAX in the inventory the job goes on without it" in found.cause.cure


STATUS = {
    "alive": True,
    "agent": "12.34",
    "state": "running",
    "generation": 1,
    "workers": [{"pid": 7}],
    "members": ["a", "b"],
    "fence": 1,
    "port": 4711,
    "electorate": {"generation": 1, "version": 0, "nodes": ["a", "b"]},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {"fence": 1, "port": 4711, "members": ("a", "b")}, id="as it is"),
        pytest.param({"fence": 2}, {"fence": 1}, id="workers of the old generation still run"),
        pytest.param({"fence": 2, "workers": []}, {"fence": 2}, id="they have ended"),
        pytest.param({"fence": 2, "alive": False}, {"fence": 2, "alive": False}, id="no agent is left"),
        pytest.param({"fence": -1, "alive": False}, {"fence": -1}, id="no folder of the run"),
        pytest.param({"snapshot": [2, 40]}, {"held": (2, 40)}, id="the newest snapshot it holds"),
        pytest.param({"no_quorum": True}, {"blocked": True}, id="it waits for a majority"),
        pytest.param(
            {"granted": {"generation": 1, "version": 3, "nodes": ["a"]}},
            {"voters": Voters(1, 3, ("a",))},
            id="the newer electorate",
        ),
        pytest.param(
            {"granted": {"generation": 0, "version": 3, "nodes": ["a"]}},
            {"voters": Voters(1, 0, ("a", "b"))},
            id="one of an older generation does not count",
        ),
    ],
)
def test_what_the_judge_sees_of_a_status(changes: dict[str, object], expected: dict[str, object]) -> None:
    seen: Observation = seen_of({**STATUS, **changes})
    assert {name: getattr(seen, name) for name in expected} == expected


# --- the supervisor's threads ---

Decide = Callable[[State, int], tuple[State, list[Action]]]


class Said(View):
    """What the user is told."""

    def __init__(self) -> None:
        super().__init__(list(NAMES), logs=False)
        self.said: list[str] = []

    def say(self, text: str, *, is_event: bool = False) -> None:
        self.said.append(text)
        super().say(text, is_event=is_event)


def begin(nodes: Nodes) -> State:
    """The first generation, which is on record then."""
    begun = policy.begin(Rules.of(nodes.inventory), generation=0, host="a", port=4711, nodes=("a", "b"))
    with nodes.run.changing():
        nodes.run.judgement = begun.to_dict()
    return begun


@contextlib.contextmanager
def supervising(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, decide: Decide
) -> Iterator[tuple[Supervisor, Said]]:
    """One that decides as it is told: `decide` gets the state and how often it was asked."""
    asked = 0

    def decided(state: State, seen: Mapping[str, Observation], now: float, rules: Rules) -> Any:
        nonlocal asked
        asked += 1
        new, actions = decide(state, asked)
        return new, tuple(actions)

    rules = Rules.of(nodes.inventory)
    if not nodes.run.judgement:
        begin(nodes)
    monkeypatch.setattr(policy, "decide", decided)
    view = Said()
    lock = SupervisorLock(nodes.run)
    others = set(threading.enumerate())
    supervisor = Supervisor(nodes.client, view, lock, rules=rules, reopen=nodes.reopen)
    try:
        yield supervisor, view
    finally:
        supervisor.close()
        lock.release()
        nodes.are_gone = True
        until(lambda: set(threading.enumerate()) <= others, what="the end of its threads")


def generation_after(state: State) -> State:
    number = state.generation + 1
    return dataclasses.replace(state, generation=number, voters=Voters(number, 0, ("a", "b")))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """By which thread the record was written, and what; each write takes its time."""
    found: list[tuple[str, dict[str, Any]]] = []
    write = runs.write_private

    def writes(path: str, data: bytes, durable: bool = False) -> None:
        if path.endswith("run.json"):
            found.append((threading.current_thread().name, json.loads(data)))
            time.sleep(0.002)
        write(path, data, durable=durable)

    monkeypatch.setattr(runs, "write_private", writes)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_however_threads_interleave_nothing_older_is_recorded_and_nothing_is_done_before_it_is(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[str, dict[str, Any]]]
) -> None:
    nodes = Nodes(tmp_path, monkeypatch, seed=seed)
    nodes.loses_channels = True
    chance = random.Random(seed)
    early: list[str] = []

    def given(name: str, args: dict[str, Any]) -> None:
        record = json.loads((nodes.run.folder / "run.json").read_text())
        if args["spec"]["generation"] > record["generation"] or name not in record["nodes"]:
            early.append(f"{name} in {args['spec']['generation']}, on record is {record['generation']}")

    nodes.answers = {"start": given, "join": given}

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        # Until some node was started, too: on a quick machine that takes longer than 30 decisions.
        if number > 30 and (nodes.of("start") or number > 10_000):
            return state, [Finish("succeeded")]
        if chance.random() < 0.4:
            state = generation_after(state)
        actions: list[Action] = [Start(name, is_new=True) for name in NAMES if chance.random() < 0.4]
        actions += [Join("a")] if chance.random() < 0.3 else []
        actions += [Fence("b", state.generation)] if chance.random() < 0.3 else []
        return state, actions

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()

    assert early == []
    assert {thread for thread, _ in written} == {threading.current_thread().name}
    generations = [record["generation"] for _, record in written]
    assert generations == sorted(generations)
    assert generations[-1] == find_runs.find(None).generation > 0
    for (_, before), (_, after) in itertools.pairwise(written):
        assert set(before["nodes"]) <= set(after["nodes"]), "a node that runs is not forgotten"
    assert nodes.of("start")
    assert {name for name, _ in nodes.of("start")} <= set(find_runs.find(None).nodes)


def test_the_clock_of_a_node_that_comes_later_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.clock_offsets = {"a": -0.5, "b": 0.25}
    found = dataclasses.replace(facts("c", address="10.0.0.3"), clock_offset_s=7.0)
    monkeypatch.setattr(check, "gather", lambda *_, **__: {"c": found})

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        is_over = bool(nodes.of("start")) or number > 10_000
        return state, [Start("c", is_new=True)] if number == 1 else [Finish("succeeded")] if is_over else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    run = find_runs.find(None)
    assert run.clock_offsets == {"a": -0.5, "b": 0.25, "c": 7.0}
    assert run.skew_s == 7.5


@pytest.mark.parametrize("stayed", [[], [1]])
def test_who_comes_in_hears_whether_ranks_have_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stayed: list[int]
) -> None:
    """Then the script has `run_attempts`, and its ranks can be started before the others wait for them.

    Where a node is lost and comes back at once, the others have stayed by the time that its agent is there.
    """
    monkeypatch.setitem(fake_nodes.STATUS, "stayed", [])
    nodes = Nodes(tmp_path, monkeypatch)

    def begins(*_: object) -> None:
        fake_nodes.STATUS["stayed"] = stayed
        until(lambda: supervisor._has_stayed() == bool(stayed), what="the others' status")

    nodes.answers["prestart"] = begins

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        is_over = bool(nodes.of("start")) or number > 10_000
        return state, [Start("c", is_new=True)] if number == 1 else [Finish("succeeded")] if is_over else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    ((_, given),) = nodes.of("start")
    assert (given["spec"]["joins"], given["spec"]["stands_by"]) == (True, bool(stayed))


@pytest.mark.parametrize(
    ("found", "raised"),
    [
        (None, None),
        (NotWritten("run.json cannot be written"), NotWritten),
        (Over("lab-1 has ended"), KitError),
    ],
)
def test_a_plan_is_waited_for_until_it_is_on_record_or_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Exception | None, raised: type[KitError] | None
) -> None:
    monkeypatch.setattr(supervise, "LOOK_AGAIN_S", 0.01)
    nodes = Nodes(tmp_path, monkeypatch)
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        monkeypatch.setattr(supervisor._writer, "write_plan", Mock(side_effect=found))
        waiting = threading.Timer(0.1, lambda: supervisor._take(*supervisor._queue.get()))
        waiting.start()
        with pytest.raises(raised, match=str(found)) if raised else contextlib.nullcontext():
            supervisor._record("a", nodes.client.node("a"), 0.0)
        waiting.join()


def test_what_is_to_be_recorded_when_a_run_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    may_end, over = threading.Event(), threading.Event()
    start = supervise.NodeClient.start_anew

    def late(*args: Any, **named: Any) -> None:
        may_end.wait(30)
        try:
            start(*args, **named)
        finally:
            over.set()

    monkeypatch.setattr(supervise.NodeClient, "start_anew", late)

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        return state, [Start("c", is_new=True)] if number == 1 else [Finish("succeeded")]

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
        may_end.set()
        until(over.is_set, what="the end of who wanted to start c")
    assert nodes.of("prestart") == []
    assert "c" not in find_runs.find(None).nodes


def test_what_is_decided_is_in_the_debug_log_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number == 1:
            return state, [Notice("d is lost"), Fence("d", 7)]
        is_refused = "Fence(node='d', generation=7): HostError" in caplog.text
        return state, [Finish("succeeded")] if is_refused or number > 10_000 else []

    with (
        caplog.at_level(logging.DEBUG, "nodekit"),
        supervising(nodes, monkeypatch, decide) as (supervisor, _),
    ):
        supervisor.watch()
    assert [each.getMessage() for each in caplog.records if each.name == supervise.__name__] == [
        "generation 0: Notice(text='d is lost')",
        "generation 0: Fence(node='d', generation=7)",
        "generation 0: Fence(node='d', generation=7): HostError",
        "generation 0: Finish(outcome='succeeded', text='')",
    ]
    said = [each.fields["text"] for each in events.read(nodes.run.folder) if each.kind == "said"]
    assert said == ["d is lost"]


def test_a_clock_that_was_set_is_on_record_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.clock_offsets = {"a": 0.5, "b": 0.25}
    began = time.time()

    def told(end: int, *, ahead_s: float) -> list[Any]:
        return ["1.0", end, json.dumps({"time": began + ahead_s, "node": "a", "kind": "sample"})]

    nodes.parts = {
        "a": [
            {"events": [told(1, ahead_s=0.0)]},
            {"events": [told(2, ahead_s=86_400.0)]},
            {"events": [told(3, ahead_s=86_401.0)]},
        ]
    }

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        is_over = len([each for each in events.read(nodes.run.folder) if each.node == "a"]) == 3
        return state, [Finish("succeeded")] if is_over or number > 10_000 else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    assert find_runs.find(None).clock_offsets == {"a": pytest.approx(86_400, abs=60), "b": 0.25}
    found = events.read(nodes.run.folder)
    assert all(abs(event.time - began) < 60 for event in found if event.node == "a")
    (said,) = [str(event.get("text")) for event in found if event.kind == "said"]
    assert said.startswith("a: its clock was set forward by about 86")


@pytest.mark.parametrize("set_s", [86_400.0, -86_400.0])
def test_our_own_clock_that_was_set_is_told_and_the_events_before_have_the_time_of_after(
    set_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.clock_offsets = {"a": 0.5, "b": 0.25}
    real, is_set = time.time, threading.Event()
    began = real()
    monkeypatch.setattr(time, "time", lambda: real() + set_s * is_set.is_set())

    def told(end: int) -> list[Any]:
        return ["1.0", end, json.dumps({"time": began + end, "node": "a", "kind": "sample", "when": began})]

    nodes.parts = {"a": [{"events": [told(1)]}, {"events": [told(2)]}]}
    nodes.pause_s = {"a": 0.5}

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        found = len([each for each in events.read(nodes.run.folder) if each.node == "a"])
        if found == 1 and not is_set.is_set():
            is_set.set()
        return state, [Finish("succeeded")] if found == 2 or number > 10_000 else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    offsets = find_runs.find(None).clock_offsets
    assert offsets["a"] == pytest.approx(0.5 - set_s, abs=60)
    assert offsets["b"] == pytest.approx(offsets["a"] - 0.25)
    found = events.read(nodes.run.folder)
    assert all(abs(event.time - began - set_s) < 60 for event in found)
    assert all(abs(event.get("when") - began - set_s) < 60 for event in found if event.node == "a")
    (said,) = [str(event.get("text")) for event in found if event.kind == "said"]
    assert said.startswith(f"this machine's clock was set {'forward' if set_s > 0 else 'back'} by about 86")


def test_who_only_watches_leaves_the_record_of_a_clock_that_was_set_to_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would correct the times, and by twice as much."""
    nodes = Nodes(tmp_path, monkeypatch)
    with nodes.run.changing():
        nodes.run.clock_offsets = {"a": 0.5, "b": 0.25}
    begin(nodes)
    acts = SupervisorLock(nodes.run)
    assert acts.acquire()
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        was = supervise.processes.clock_ahead_s()
        monkeypatch.setattr(supervise.processes, "clock_ahead_s", lambda: was + 3600)
        supervisor._see_to_clock("a", time.time() + 0.5 - 3600)
        assert find_runs.find(None).clock_offsets == {"a": 0.5, "b": 0.25}
        assert view.said == []
    acts.release()


def test_only_nodes_that_were_drained_do_not_count_in_how_a_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end no node runs any more."""
    nodes = Nodes(tmp_path, monkeypatch)
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        supervisor._rules = dataclasses.replace(supervisor._rules, drained=frozenset("c"))
        supervisor._told |= {
            "a": Told(state="succeeded"),
            "b": Told(state="succeeded"),
            "c": Told(state="failed"),
        }
        found = supervisor._end(Finish(""))
        assert (found.outcome, found.without) == ("succeeded", ("c",))
        supervisor._told["b"] = Told(state="failed")
        assert supervisor._end(Finish("")).outcome == "failed"


def event_of(kind: str, end: int) -> list[Any]:
    return ["1.0", end, json.dumps({"run": "lab-1", "time": float(end), "node": "a", "kind": kind})]


def test_who_only_watched_and_takes_over_gathers_what_it_has_seen_and_goes_on_from_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    # The node says it once; then it is out of reach for whoever asks it for its events.
    nodes.parts = {
        "a": [
            {"events": [event_of("agent-started", 10), event_of("rendezvous", 20)]},
            {"events": [event_of("hang", 30)]},
        ]
    }
    other = SupervisorLock(nodes.run)
    assert other.acquire()
    generations: list[int] = []

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        generations.append(state.generation)
        if number == 5:  # it has gathered the first itself, has begun a generation, and is killed
            assert events.read(nodes.run.folder) == [], "who watches gathers nothing"
            events.Gatherer(nodes.run.folder).add_of_node(
                "a", [event_of("agent-started", 10)], clock_offset=0.0
            )
            seventh = dataclasses.replace(generation_after(state), generation=7)
            record = find_runs.find(None)
            with record.changing():
                record.generation, record.judgement = 7, seventh.to_dict()
            other.release()
        # The node's thread may wait for a core while others are heard, and this one is asked ten times.
        is_heard = any(event.kind == "hang" for event in events.read(nodes.run.folder))
        return state, [Finish("succeeded")] if number > 10 and (is_heard or number > 10_000) else [Stop("b")]

    with supervising(nodes, monkeypatch, decide) as (supervisor, view):
        supervisor.watch()

    found = [event.kind for event in events.read(nodes.run.folder) if event.node == "a"]
    assert found == ["agent-started", "rendezvous", "hang"], "each once"
    assert "supervising now: the one before is gone" in view.said
    assert (generations[4], generations[-1]) == (0, 7)
    assert find_runs.find(None).generation == 7


def test_who_acts_at_once_goes_by_what_the_one_before_has_decided_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    begun = begin(nodes)
    record = find_runs.find(None)  # by another, after this one has read it, while it opens its channels
    with record.changing():
        record.judgement = generation_after(begun).to_dict()
    generations: list[int] = []

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        generations.append(state.generation)
        return state, [Finish("succeeded")]

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    assert generations == [1]


def test_who_stands_by_follows_and_stops_a_node_that_another_has_had_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    other = SupervisorLock(nodes.run)
    assert other.acquire()
    deadline = time.monotonic() + 3

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number == 1:
            record = find_runs.find(None)
            with record.changing():
                record.nodes = {**record.nodes, "c": {**record.nodes["a"], "name": "c"}}
        is_known = "c" in nodes.run.nodes or time.monotonic() > deadline
        return state, [Finish("stopped")] if is_known else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
        supervisor.stop(force=False)
    other.release()
    assert {name for name, _ in nodes.of("stop")} == {"a", "b", "c"}


def test_the_connection_to_a_node_that_was_never_started_is_opened_anew_when_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    lost = nodes.client.channels["c"]
    monkeypatch.setattr(lost, "is_lost", True)
    deadline = time.monotonic() + 20

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        is_open = nodes.client.channels.get("c") not in (None, lost)
        return state, [Finish("succeeded")] if is_open or time.monotonic() > deadline else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    assert nodes.client.channels["c"] is not lost


@pytest.mark.parametrize(("orphan", "is_heard"), [("b", True), ("b", False), (None, True)])
def test_a_silent_rendezvous_host_is_missed_sooner_if_another_node_that_is_heard_has_lost_it(
    orphan: str | None, is_heard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody is heard, the control machine may be what is cut off, and the nodes have met again."""
    monkeypatch.setattr(supervise, "HOST_UNREACHABLE_AFTER_S", 0.3)
    monkeypatch.setattr(supervise, "_LATER_S", 0.2)
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.silent = set(NAMES)
    nodes.parts = {name: [{"status": {**fake_nodes.STATUS, "state": "running"}}] for name in NAMES}
    if orphan:
        nodes.parts[orphan] = [{"status": {**fake_nodes.STATUS, "state": "orphaned"}}] * (
            100 if is_heard else 1
        )
        nodes.pause_s[orphan] = 0.02
    missed: list[float] = []

    def decide(state: State, seen: Mapping[str, Observation], now: float, rules: Rules) -> Any:
        assert all(each.reachable for name, each in seen.items() if name != state.host)
        if not seen[state.host].reachable:
            missed.append(time.monotonic())
        return state, (Finish("succeeded"),) if missed or time.monotonic() - began > 1.0 else ()

    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        monkeypatch.setattr(policy, "decide", decide)
        began = time.monotonic()
        supervisor.watch()
        nodes.silent.clear()
    assert bool(missed) == bool(orphan and is_heard)
    assert not missed or missed[0] - began >= 0.3
    assert len([text for text in view.said if "no answer within" in text]) == len(missed)


@pytest.mark.parametrize(
    ("silent_s", "waits_s"),
    [(1.0, View.tick_s), (2.0, supervise.SOON_S), (4.0, View.tick_s), (None, View.tick_s)],
)
def test_a_rendezvous_host_that_is_late_is_looked_at_more_often_until_it_is_taken_for_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float | None, waits_s: float
) -> None:
    """Not after that: who waits for hours for a host to come back would wake up ten times a second."""
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        _,
    ):
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now)
        supervisor._heard = {"b": now} if silent_s is None else {"a": now - silent_s}
        assert supervisor._wait_s() == waits_s
        monkeypatch.undo()


def test_a_full_disk_is_told_once_and_no_generation_is_begun_before_it_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "RETRY_S", 0.05)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "small"))
    with small_disk(tmp_path / "small"):
        nodes = Nodes(tmp_path, monkeypatch)
        nodes.run.event("run-started")
        nodes.parts = {"b": [{}, {}, {"events": [event_of("hang", 5000)]}]}
        asked_while_full: list[int] = []

        def decide(state: State, number: int) -> tuple[State, list[Action]]:
            if state.generation:
                return state, [Finish("succeeded")]
            if is_full.is_set():
                asked_while_full.append(number)
            return generation_after(state), [Join("a")]

        is_full = threading.Event()
        with supervising(nodes, monkeypatch, decide) as (supervisor, view):
            watching = threading.Thread(target=supervisor.watch, daemon=True)
            with full(tmp_path / "small"):
                is_full.set()
                watching.start()
                until(lambda: not nodes.parts["b"], what="b's event")
                enough = len(asked_while_full) + 20
                until(lambda: len(asked_while_full) > enough, what="supervision")
                assert watching.is_alive()
                assert nodes.of("join") == []
                assert json.loads((nodes.run.folder / "run.json").read_text())["generation"] == 0
                is_full.clear()
            watching.join(30)
            assert not watching.is_alive()
            until(lambda: nodes.of("join"), what="what was decided")

        assert find_runs.find(None).generation == 1
        assert len(nodes.of("join")) == 1
        told = [text for text in view.said if "written" in text]
        assert len(told) == 2
        assert told[0].startswith(
            f"{nodes.run.folder}/run.json cannot be written: No space left on device; see to"
        )
        assert "nothing is started in place of what is lost" in told[0]
        assert told[1] == f"{nodes.run.folder} can be written again"
        kinds = [event.kind for event in events.read(nodes.run.folder)]
        assert "hang" in kinds, "what there was no room for was kept"
        assert "join" in kinds


def test_a_disk_that_did_not_answer_for_a_while_is_told_of_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "STALLED_S", 0.1)
    add = events.append_private

    def slow(path: str, data: bytes) -> None:
        time.sleep(0.2 if b"first-progress" in data else 0)
        add(path, data)

    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        monkeypatch.setattr(events, "append_private", slow)
        supervisor._note("first-progress", about="a")
        folder = supervisor._run.folder
        (said,) = (text for text in view.said if "did not answer" in text)
        assert said.startswith(f"{folder} could not be written for 0 s: its disk did not answer; ")
        (noted,) = (each for each in events.read(folder) if each.kind == "said")
        assert noted.get("text") == said


def test_no_node_is_started_before_it_is_known_who_is_drained_and_what_is_known_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    file = nodes.run.folder / "drained"
    file.mkdir()  # it is there, and cannot be read
    drained: list[frozenset[str]] = []

    def decide(state: State, seen: Mapping[str, Observation], now: float, rules: Rules) -> Any:
        drained.append(rules.drained)
        match len(drained):
            case 20:
                file.rmdir()
                nodes.run.drain({"d": "GPU 3: Xid 79"})
            case 40:
                file.unlink()
                file.mkdir()
            case 60:
                return state, (Finish("succeeded"),)
        return state, () if "d" in rules.drained else (Start("d", is_new=True),)

    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        monkeypatch.setattr(policy, "decide", decide)
        supervisor.watch()

    assert drained == [frozenset()] * 20 + [{"d"}] * 40
    assert nodes.of("prestart") == []
    told = [text for text in view.said if str(file) in text]
    assert len(told) == 1
    assert told[0].endswith("until then nothing is started")


def test_the_words_of_who_lost_another_rank_are_not_said_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo = (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
    )
    told = {"rank": 0, "world_size": 2, "attempt": "0.0", "exitcode": 1, "when": 1.0, "log": "/l"}
    failures = [{**told, "error": gloo}, {**told, "rank": 1, "error": "ValueError: boom"}]
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        supervisor._tell("a", {"alive": True, "state": "running", "failures": failures})  # type: ignore[typeddict-item]
    assert [each for each in view.said if "rank" in each] == [
        "a: rank 0 ended with exit status 1: it has lost another rank",
        "a: rank 1 ended with exit status 1: ValueError: boom",
    ]


def test_a_node_that_can_write_nothing_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        status: Any = {"alive": True, "state": "running"}
        why = "nothing can be written to /r/a: Read-only file system"
        for each in (status, {**status, "unwritable": why}, status, {**status, "unwritable": why}):
            supervisor._tell("a", each)
        (noted,) = (each for each in events.read(supervisor._run.folder) if each.get("unwritable"))
        assert (noted.about, noted.get("unwritable"), supervisor._told["a"].unwritable) == ("a", why, why)
        supervisor._tell("a", {**status, "attempt": "0.1"})
        assert supervisor._told["a"].unwritable == ""  # it has written that
    told = [text for text in view.said if why in text]
    assert told == [f"warning: a: {why}; see to that disk (`sudo dmesg` there tells more)"]


def test_the_failures_of_weeks_are_compared_only_when_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"rank": 0, "world_size": 1, "exitcode": 1, "when": 1.0, "log": "/l", "error": "ValueError"}
    failures = [{**told, "attempt": f"0.{number}"} for number in range(500)]
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        for end in range(50, 501, 50):
            status: Any = {"alive": True, "state": "running", "failures": failures[end - 50 : end]}
            supervisor._tell("a", status)
        compared, equal = list[Failure](), Failure.__eq__
        monkeypatch.setattr(Failure, "__eq__", lambda one, other: compared.append(one) or equal(one, other))
        supervisor._tell("a", status)
        assert len(compared) <= 50
        assert len(supervisor._told["a"].failures) == 500
    assert len([each for each in view.said if "rank" in each]) == 500


@pytest.mark.parametrize(
    "error", [KitError("drained cannot be read: stale"), NotWritten("drained cannot be written: full")]
)
def test_a_broken_node_that_could_not_be_drained_is_so_as_soon_as_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: KitError
) -> None:
    """As often as a disk is tried again, and told once."""
    nodes = Nodes(tmp_path, monkeypatch)
    broken = ("c1", "GPU 3: Xid 79")
    exclude, tried, deadline = drain.exclude, list[float](), time.monotonic() + 20

    def fails_thrice(*args: Any) -> None:
        tried.append(time.monotonic())
        if len(tried) <= 3:
            raise error
        exclude(*args)

    def decide(state: State, seen: Mapping[str, Observation], now: float, rules: Rules) -> Any:
        if "c" in rules.drained or time.monotonic() > deadline:
            return state, (Finish("succeeded"),)
        known = state.known["c"]
        if known.excluded == broken:
            return state, ()
        known = dataclasses.replace(known, excluded=broken)
        return dataclasses.replace(state, known={**state.known, "c": known}), (Exclude("c", broken[1]),)

    remember = Mock()
    monkeypatch.setattr(nodes.client, "remember", remember)
    monkeypatch.setattr(drain, "RETRY_S", 0.3)
    monkeypatch.setattr(drain, "exclude", fails_thrice)
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        monkeypatch.setattr(policy, "decide", decide)
        supervisor.watch()

    assert nodes.run.drained_because == {"c": broken[1]}
    assert len(tried) == 4
    assert min(later - earlier for earlier, later in itertools.pairwise(tried)) >= 0.3
    told = [text for text in view.said if str(error) in text]
    assert [text.startswith("c is not drained, though broken") for text in told] == [type(error) is KitError]
    assert len([text for text in view.said if broken[1] in text]) == 1
    drained = [each.fields for each in events.read(nodes.run.folder) if each.kind == "drain"]
    assert [(each["about"], each["why"]) for each in drained] == [("c", broken[1])]
    until(lambda: remember.called, what="its host being told")
    remember.assert_called_once_with("c", broken[1])


def test_the_first_step_is_on_record_once_and_not_what_is_said_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a start took is counted up to it."""
    nodes = Nodes(tmp_path, monkeypatch)
    said = ("", "0/10", "1/10", "2/10")
    status = {**fake_nodes.STATUS, "progress_time": 1.0}
    nodes.parts["a"] = [{"status": {**status, "progress": each}} for each in said]
    deadline = time.monotonic() + 20

    def decide(state: State, _: int) -> tuple[State, list[Action]]:
        is_over = not nodes.parts["a"] or time.monotonic() > deadline
        return state, [Finish("succeeded")] if is_over else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    first = [each for each in events.read(nodes.run.folder) if each.kind == "first-progress"]
    assert [(each.fields["about"], each.fields["progress"]) for each in first] == [("a", "1/10")]


def test_a_node_that_is_reached_again_sends_of_its_logs_what_is_not_shown_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    offsets = [None, {"x.log": 5, "y.log": 3}, {}, {"x.log": 9}]
    nodes.parts["a"] = [{"offsets": each} for each in offsets] + [HostError("a", "the connection is gone")]

    def asked() -> list[Any]:
        return [args["offsets"] for name, args in nodes.of("hostfollow.follow") if name == "a"]

    def decide(state: State, _: int) -> tuple[State, list[Action]]:
        return state, [Finish("succeeded")] if len(asked()) > 1 else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    assert asked()[:2] == [None, {"x.log": 9, "y.log": 3}]


def test_who_asked_is_told_how_it_has_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put on record between the last look and the end: of it a notification tells."""

    class Asked:
        def __init__(self) -> None:
            self.events: list[str] = []

        def event(self, event: events.Event) -> None:
            self.events.append(event.kind)

        def see(self, statuses: Mapping[str, Any]) -> None:
            pass

        def close(self) -> None:
            self.events.append("closed")

    nodes, asked = Nodes(tmp_path, monkeypatch), Asked()
    with supervising(nodes, monkeypatch, lambda state, _: (state, [Finish("failed", "no node is left")])) as (
        supervisor,
        _,
    ):
        supervisor._observers.append(asked)
        supervisor.watch()
        nodes.run.finish("failed", "no node is left", None)
    assert asked.events[-2:] == ["run-ended", "closed"]


def test_a_node_whose_disk_fails_is_not_told_of_as_one_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        error = RemoteError(
            "b", {"type": "OSError", "message": "[Errno 5] Input/output error: '/r/b'", "traceback": ""}
        )
        supervisor._take("b", "lost", error)
    assert view.said == ["b: its status cannot be read: [Errno 5] Input/output error: '/r/b'; trying again"]


def test_a_node_that_cannot_be_reached_is_said_so_once_and_again_when_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    del nodes.client.channels["d"]  # it is reached only now
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        gone = HostError("b", "no answer within 3 s")
        for _ in range(3):
            supervisor._take("b", "lost", gone)
        for name in "bbad":
            supervisor._take(name, "ended", dict(fake_nodes.STATUS))
        supervisor._take("b", "lost", gone)
    lost = "b: no connection from here: no answer within 3 s; trying again"
    assert view.said == [lost, "b: reached again", lost]
    found = [(each.kind, each.about) for each in events.read(nodes.run.folder) if each.kind != "node-state"]
    assert found == [("unreachable", "b"), ("reached", "b"), ("unreachable", "b")]


def test_what_a_node_says_counts_until_it_says_something_else_or_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    runs_: Any = {**fake_nodes.STATUS, "attempt": "0.1", "workers": [{"rank": 3}], "address": "10.0.0.1"}
    away: Any = {**fake_nodes.STATUS, "state": "rendezvous", "ended": [3]}
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        for status in (runs_, runs_, away):
            supervisor._take("a", "part", {"status": status, "logs": [], "events": [], "time": time.time()})
        assert supervisor._statuses == {"a": away}
        assert supervisor._lines["a"].startswith("rendezvous")
        told = supervisor._told["a"]
        assert (told.state, told.ended) == ("rendezvous", (3,))
        assert (told.attempt, told.ranks, told.address) == ("0.1", (3,), "10.0.0.1"), "what it had last"
        supervisor._take("a", "lost", HostError("a", "no answer within 3 s"))
        assert supervisor._statuses == {}
        assert supervisor._told["a"].silent_since is not None
        assert not supervisor._seen["a"].reachable
        assert supervisor._lines["a"] == "unreachable  trying again"
    found = [
        each.fields for each in events.read(nodes.run.folder) if each.kind in ("node-state", "unreachable")
    ]
    assert [(each.get("state"), each.get("attempt"), each.get("why")) for each in found] == [
        ("running", "0.1", None),
        ("rendezvous", None, None),
        (None, None, "no answer within 3 s"),
    ]


@pytest.mark.parametrize(
    ("kind", "error"), [("problem", BrokenHost("a", "Xid 79")), ("refused", KitError("full"))]
)
def test_why_a_start_failed_counts_until_an_agent_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: supervise.Heard, error: KitError
) -> None:
    dead = {**fake_nodes.STATUS, "alive": False, "state": None, "agent": "", "agent_log": ""}
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        _,
    ):

        def known() -> tuple[str, str]:
            return supervisor._seen["a"].problem, supervisor._seen["a"].broken

        supervisor._take("a", "ended", dead)
        supervisor._take("a", kind, error)
        why = ("Xid 79", "Xid 79") if kind == "problem" else ("", "")
        assert known() == why
        supervisor._take("a", "ended", dead)
        assert known() == why
        supervisor._take("a", "unknown", None)
        assert known() == why
        assert supervisor._seen["a"] == Observation(problem=why[0], broken=why[1]), "no folder, and no fence"
        supervisor._take("a", "ended", {**dead, "alive": True, "state": "starting"})
        assert known() == ("", "")


@pytest.mark.parametrize(
    ("status", "state", "message"),
    [
        ({"alive": False, "state": None, "agent": "1.2"}, "starting", "no torch"),
        ({"alive": False, "state": "running", "message": "m"}, "running", "no torch"),
        ({"alive": False, "state": "failed", "message": "m"}, "failed", "m"),
        ({"alive": False, "state": "running", "message": "m", "cure": "c"}, "running", "m"),
        ({"alive": True, "state": "running", "message": "m"}, "running", "m"),
    ],
)
def test_why_an_agent_is_gone_is_told_by_itself_or_else_by_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Any, state: str, message: str
) -> None:
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        _,
    ):
        supervisor._tell("a", {"agent_log": "no torch\n", **status})
        assert (supervisor._told["a"].state, supervisor._told["a"].message) == (state, message)


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        monkeypatch.setattr(view, "log", Mock())
        logs = [("rank12-0.1.log", "1%\r50%\r100%\r\n\nloss 3\n")]
        part = {"status": dict(fake_nodes.STATUS), "logs": logs, "events": [], "time": time.time()}
        supervisor._take("a", "part", part)
        view.log.assert_called_once_with("a", "12", ["100%", "", "loss 3"])


def test_when_a_rank_failed_is_told_by_the_supervisors_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one failed first would be another by the clocks of their hosts."""
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.clock_offsets = {"a": 7.0, "b": -7.0}
    told = {"rank": 0, "world_size": 2, "attempt": "0.0", "exitcode": 1, "log": "/l", "error": "ValueError"}
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        nodes.run.clock_offsets = {"a": 7.0, "b": -7.0}
        for name, when in (("a", 107.0), ("b", 94.0)):
            status: Any = {"alive": True, "state": "running", "failures": [{**told, "when": when}]}
            supervisor._tell(name, status)
        assert [supervisor._told[name].failures[0].when for name in "ab"] == [100.0, 101.0]


def test_of_a_node_whose_agent_is_gone_it_is_shown_what_is_done_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    dead = {**fake_nodes.STATUS, "alive": False, "agent_log": ""}
    failed = {**dead, "state": "failed"}
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):

        def shown(status: dict[str, Any], busy: str | None = None) -> str:
            if busy is not None:
                supervisor._take("a", "busy", busy)
            supervisor._take("a", "ended", status)
            return supervisor._lines["a"]

        assert shown(dead) == "gone"
        assert shown(dead, "starting its agent") == "starting its agent"
        assert shown(failed) == "failed"
        assert shown(dead, "") == "gone"
        nodes.run.drain({"a": ""})
        supervisor._drained.look()
        assert shown(dead) == shown(failed) == "drained"
        assert shown({**dead, "alive": True}) == "running"


@pytest.mark.parametrize("by", ["", "kit down"])
def test_nobody_is_started_or_called_in_any_more_once_somebody_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.run.say_stop(by)
    asked: list[str] = []
    monkeypatch.setattr(nodes.client, "start_anew", lambda name, *_, **__: asked.append(name))
    monkeypatch.setattr(nodes.client, "join", lambda name, _: asked.append(name))
    monkeypatch.setattr(nodes.client, "fence", lambda *_: asked.append("fenced"))
    actions: list[Action] = [Start("c", is_new=True), Join("b"), Fence("a", 1)]
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        for action in actions:
            supervisor._do(action, supervisor._state)
        until(lambda: "fenced" in asked and (bool(by) or len(asked) == 3))
    assert sorted(asked) == (["fenced"] if by else ["b", "c", "fenced"])


@pytest.mark.parametrize(
    ("action", "op", "given"),
    [
        (SetVoters("a", Voters(0, 1, ("a",))), "set_voters", {"voters": Voters(0, 1, ("a",)).to_dict()}),
        (Stop("b"), "stop", {"for_good": True}),
        (Drain("b"), "stop", {"for_good": False}),
    ],
)
def test_what_is_decided_of_a_node_is_what_its_host_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Action, op: str, given: dict[str, Any]
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        supervisor._do(action, supervisor._state)
        ((name, args),) = until(lambda: nodes.of(op))
    assert isinstance(action, SetVoters | Stop | Drain)
    assert name == action.node
    assert given.items() <= args.items()


def test_an_observer_that_fails_is_left_out_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port for metrics, say: the run is supervised without."""
    broken = Mock(see=Mock(side_effect=ValueError("no such series")))
    good = Mock()
    with supervising(Nodes(tmp_path, monkeypatch), monkeypatch, lambda state, _: (state, [])) as (
        supervisor,
        view,
    ):
        supervisor._observers += [broken, good]
        monkeypatch.setattr(view, "event", Mock())
        monkeypatch.setattr(view, "see", Mock())
        supervisor._note("reached", about="a")
        for _ in range(2):
            supervisor._tell_observers()
    assert view.said == ["Mock failed and is left out: ValueError: no such series"]
    assert broken.see.call_count == 1
    for each in (view, good):
        assert each.see.call_count == 3, "each time, and at the end"
        assert [call.args[0].kind for call in each.event.call_args_list] == ["reached"]
    good.close.assert_called_once_with()


@pytest.mark.parametrize(("acts", "alive"), [(True, True), (True, False), (False, True)])
def test_only_who_acts_stops_at_the_end_what_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acts: bool, alive: bool
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    other = SupervisorLock(nodes.run)
    assert acts or other.acquire()
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, _):
        supervisor._take("a", "ended", {**fake_nodes.STATUS, "alive": alive, "agent_log": ""})
        for name in "bcd":
            supervisor._take(name, "lost", HostError(name, "no answer within 3 s"))
        supervisor._end(Finish("failed", "waited 60 s for enough nodes"))
    other.release()
    assert bool(nodes.of("stop")) == (acts and alive)


@pytest.mark.parametrize("why", ["watches", "ended", "drained is unknown", "nothing can be written"])
def test_what_is_decided_and_may_not_be_done_is_forgotten_and_time_goes_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Who only watches ends by the same clock, and who takes over has waited as long."""
    nodes = Nodes(tmp_path, monkeypatch)
    passed = {"clock": 7.0, "elapsed_s": 5.0, "ended_since": 6.0}

    def decide(state: State, _: int) -> tuple[State, list[Action]]:
        return dataclasses.replace(generation_after(state), **passed), [Fence("a", 1)]

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        if why == "watches":
            monkeypatch.setattr(supervisor, "_acts", False)
            monkeypatch.setattr(supervisor._lock, "acquire", lambda: False)
        elif why == "ended":
            nodes.run.finish("stopped", "stopped by kit down")
        elif why == "drained is unknown":
            (nodes.run.folder / "drained").mkdir()
        else:
            monkeypatch.setattr(supervisor._writer, "is_written", lambda *_: False)
        before = supervisor._state
        supervisor._decide()
        assert supervisor._state == dataclasses.replace(before, **passed)
    assert nodes.of("fence") == []


def test_where_the_lock_cannot_be_known_one_only_watches_and_asks_again_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    other = SupervisorLock(nodes.run)
    assert other.acquire()
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        acquire = Mock(side_effect=NotWritten("supervisor.lock cannot be opened: Input/output error"))
        monkeypatch.setattr(supervisor._lock, "acquire", acquire)
        for _ in range(3):
            supervisor._decide()
        assert acquire.call_count == 1
        assert not supervisor._acts
    other.release()
    assert view.said == []


@pytest.mark.parametrize(("on_slow", "acts"), [("drain", True), ("drain", False), ("tell", True)])
def test_who_acts_drains_slow_nodes_and_counts_on_nobody_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_slow: str, acts: bool
) -> None:
    nodes, found = Nodes(tmp_path, monkeypatch), list[str]()
    job = nodes.inventory.job.model_copy(update={"on_slow": on_slow})
    nodes.client.inventory = nodes.inventory.model_copy(update={"job": job})
    other = SupervisorLock(nodes.run)
    assert acts or other.acquire()

    def look(*_: object, absent: list[str]) -> list[str]:
        found.extend(absent)
        return ["c makes the others wait"]

    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        monkeypatch.setattr(supervisor._slow_nodes, "drain", look)
        supervisor._take("b", "lost", HostError("b", "no answer within 3 s"))
        supervisor._decide()
    other.release()
    drains = acts and on_slow == "drain"
    assert found == (["b"] if drains else [])
    recorded = [each.fields["text"] for each in events.read(nodes.run.folder) if each.kind == "said"]
    assert recorded == view.said[1:] == (["c makes the others wait"] if drains else [])


def test_a_start_that_failed_counts_and_what_is_broken_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, decide, deadline = Nodes(tmp_path, monkeypatch), policy.decide, time.monotonic() + 20

    def start_anew(name: str, *_: object, **__: object) -> None:
        raise BrokenHost("c", "GPU 3: Xid 79") if name == "c" else HostError(name, "no torch")

    def until_drained(state: State, seen: Mapping[str, Observation], now: float, rules: Rules) -> Any:
        if ("c" in rules.drained and state.known["d"].failures) or time.monotonic() > deadline:
            return state, (Finish("succeeded"),)
        return decide(state, seen, now, rules)

    monkeypatch.setattr(nodes.client, "start_anew", start_anew)
    with supervising(nodes, monkeypatch, lambda state, _: (state, [])) as (supervisor, view):
        monkeypatch.setattr(policy, "decide", until_drained)
        supervisor.watch()
    assert nodes.run.drained_because == {"c": "GPU 3: Xid 79"}
    assert len(supervisor._state.known["d"].failures) == 1
    assert "d: not started: no torch" in view.said


def test_a_node_whose_plan_finds_no_room_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "RETRY_S", 0.05)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "small"))
    with small_disk(tmp_path / "small"):
        nodes = Nodes(tmp_path, monkeypatch)

        def decide(state: State, number: int) -> tuple[State, list[Action]]:
            if any("c: not started" in text for text in view.said):
                return state, [Finish("succeeded")]
            return state, [Start("c", is_new=True)] if number == 1 else []

        with supervising(nodes, monkeypatch, decide) as (supervisor, view), full(tmp_path / "small"):
            supervisor.watch()

    assert nodes.of("prestart") == []
    assert any("c: not started" in text and "No space left on device" in text for text in view.said)


def test_a_record_that_is_damaged_while_its_run_is_supervised_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    path = nodes.run.folder / "run.json"

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number == 5:
            path.write_bytes(path.read_bytes()[:100])
        if number < 5:
            return state, []
        return (state, [Finish("succeeded")]) if number > 6 else (generation_after(state), [])

    with supervising(nodes, monkeypatch, decide) as (supervisor, view):
        supervisor.watch()

    assert (find_runs.find(None).generation, list(find_runs.find(None).nodes)) == (2, list(nodes.run.nodes))
    told = [text for text in view.said if "damaged" in text]
    assert told == [f"{path} was damaged and is written anew; it is kept as {path}.damaged"]
    assert len(path.with_name("run.json.damaged").read_bytes()) == 100


@pytest.mark.parametrize("is_first", [True, False])
def test_a_record_that_cannot_be_read_is_told_once_and_who_cannot_read_it_does_not_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Nor does the first one act by what it has read before: the one before may have decided more."""
    monkeypatch.setattr(supervise, "RETRY_S", 0.05)
    monkeypatch.setattr(files, "PATIENCE_S", 0.0)
    nodes = Nodes(tmp_path, monkeypatch)
    path = nodes.run.folder / "run.json"
    good = path.with_name("good")
    other = SupervisorLock(nodes.run)

    def spoil() -> None:
        path.rename(good)
        path.symlink_to("run.json")

    if is_first:
        begin(nodes)
        spoil()
    else:
        assert other.acquire()

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number == 3 and not is_first:
            spoil()
            other.release()
        if number == 10:
            free = SupervisorLock(nodes.run)  # who has a disk that can be read may take over
            assert free.acquire()
            free.release()
            good.replace(path)
        if supervisor._acts and not state.generation:
            return generation_after(state), []
        return state, [Finish("succeeded")] if state.generation else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, view):
        supervisor.watch()

    told = [text for text in view.said if "run.json" in text]
    assert len(told) == 1
    assert told[0].startswith(f"nobody supervises this run: {path} cannot be read: Too many levels of")
    assert view.said.index(told[0]) < view.said.index("supervising now: the one before is gone")
    assert find_runs.find(None).generation == 1


# --- who has nothing to do any more ---


def start_anew() -> dict[str, Any]:
    """As `kit down --lost` and another `kit up` do, which cannot reach the nodes; what is on record then."""
    record = find_runs.find(None)
    record.finish("stopped", "stopped by kit down")
    with record.changing():
        record.generation, record.state, record.started = 1, "starting", record.started + 1
        record.judgement = {**record.judgement, "generation": 1, "port": 5000}
    found: dict[str, Any] = json.loads((record.folder / "run.json").read_text())
    return found


@pytest.mark.parametrize("blind", [True, False], ids=["blind", "in sight"])
@pytest.mark.parametrize("acts", [True, False], ids=["acts", "stands by"])
def test_a_supervisor_whose_run_another_has_started_anew_ends_and_does_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: bool, acts: bool
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.are_gone = blind
    other = SupervisorLock(nodes.run)
    if not acts:
        assert other.acquire()
    record: dict[str, Any] = {}
    deadline = time.monotonic() + 20

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number < 5 or time.monotonic() > deadline:
            return state, [Finish("failed")] if number > 5 else []
        if number == 5:
            record.update(start_anew())
            other.release()
        return generation_after(state), [Start("c", is_new=True), Fence("b", 1)]

    with supervising(nodes, monkeypatch, decide) as (supervisor, _), pytest.raises(Over, match="anew"):
        supervisor.watch()

    assert nodes.of("prestart") == nodes.of("fence") == []
    assert json.loads((nodes.run.folder / "run.json").read_text()) == record


def test_a_supervisor_that_can_reach_no_node_ends_when_the_run_is_on_record_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    nodes.are_gone = True
    deadline = time.monotonic() + 20

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number == 5:
            find_runs.find(None).finish("stopped", "stopped by kit down")
        return state, [Finish("failed")] if time.monotonic() > deadline else []

    with supervising(nodes, monkeypatch, decide) as (supervisor, _), pytest.raises(Over) as over:
        supervisor.watch()
    assert str(over.value) == "lab-1 has ended: stopped by kit down"


def test_once_a_run_is_on_record_as_ended_its_nodes_may_still_tell_how_and_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)

    def decide(state: State, number: int) -> tuple[State, list[Action]]:
        if number == 5:
            find_runs.find(None).finish("stopped", "stopped by kit down")
        actions: list[Action] = [Join("a")] if number >= 5 else []
        return state, [*actions, Finish("stopped")] if number > 20 else actions

    with supervising(nodes, monkeypatch, decide) as (supervisor, _):
        supervisor.watch()
    assert nodes.of("join") == nodes.of("stop") == []


def test_nothing_is_written_or_started_where_the_run_was_started_anew_since_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    state = policy.begin(Rules.of(nodes.inventory), generation=0, host="a", port=4711, nodes=("a", "b"))
    with nodes.run.changing():
        nodes.run.judgement = state.to_dict()
    writer = record_writer.RecordWriter(nodes.run, Said())
    gatherer = events.Gatherer(nodes.run.folder)
    assert writer.is_written(state, gatherer)
    record: dict[str, Any] = {}
    nodes.answers["prestart"] = lambda *_: record.update(start_anew())

    with pytest.raises(KitError, match="started anew"):
        nodes.client.start_anew("a", state, is_new=False, stands_by=lambda: False, record=lambda *_: None)
    assert not writer.is_written(generation_after(state), gatherer)
    with pytest.raises(Over):
        writer.write_plan("a", nodes.client.node("a"), 0.0)
    del nodes.run.nodes["a"]  # as of a node that the other start alone has
    with pytest.raises(KitError, match="started anew"):
        nodes.client.start_anew("a", state, is_new=True, stands_by=lambda: False, record=lambda *_: None)

    assert (len(nodes.of("prestart")), nodes.of("start"), nodes.of("stop")) == (1, [], [])
    assert json.loads((nodes.run.folder / "run.json").read_text()) == record
