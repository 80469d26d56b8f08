"""How a run has ended that nobody supervised: by the nodes on which it has, as a supervisor would have told."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nodes import NAMES, FakeChannel, Nodes

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import RemoteError
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.launch.options import Options, StopOptions
from nodekit.deploy.records.events import Gatherer
from nodekit.deploy.records.find_runs import find
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.ssh_backend.backend import SshBackend
from nodekit.inventory.errors import HostError, KitError

DONE = {"alive": False, "state": "succeeded", "generation": 1}
FAILED = {"alive": False, "state": "failed", "generation": 1}
ENDED = {"alive": False, "state": "stopped", "generation": 1}
NEVER_BEGUN = {"alive": False, "fence": 1, "agent": "", "state": "", "generation": -1}
REPLACED = {"alive": False, "state": "running", "generation": 0}
OLD = {"alive": False, "state": "failed", "generation": 0}
KILLED = {"alive": False, "state": "running", "generation": 1}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """A run of a, b and the spare c, in its second generation."""
    found = Nodes(tmp_path, monkeypatch)
    with found.run.changing():
        found.run.nodes = {**found.run.nodes, "c": found.run.nodes["b"]}
        found.run.generation = 1
    found.answers["stop"] = lambda *_: {"was": "not running", "killed": False}
    return found


def end(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, dict[str, Any] | None]) -> None:
    """The nodes say so; None: it cannot be reached."""

    @contextlib.contextmanager
    def channels(*_: Any, **__: Any) -> Iterator[dict[str, FakeChannel]]:
        yield {name: FakeChannel(name, nodes) for name in NAMES if statuses.get(name)}

    nodes.answers["status"] = lambda host, _: {"agent": "1.2", "fence": 1, **(statuses.get(host) or {})}
    monkeypatch.setattr(cluster, "channels", channels)


CASES = [
    ({"a": DONE, "b": DONE, "c": NEVER_BEGUN}, "succeeded"),
    ({"a": DONE, "b": REPLACED, "c": DONE}, "succeeded"),
    ({"a": DONE, "b": OLD, "c": DONE}, "succeeded"),
    ({"a": DONE, "b": ENDED, "c": DONE}, "succeeded"),
    ({"a": DONE, "b": FAILED, "c": NEVER_BEGUN}, "failed"),
    ({"a": ENDED, "b": FAILED, "c": NEVER_BEGUN}, "failed"),
]


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        *CASES,
        ({"a": DONE, "b": None, "c": DONE}, "succeeded"),
        ({"a": KILLED, "b": KILLED, "c": NEVER_BEGUN}, "failed"),
    ],
)
def test_kit_up_records_how_it_ended_and_does_not_train_it_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    statuses: dict[str, Any], outcome: str,
) -> None:  # fmt: skip
    def begun(*_: Any, **__: Any) -> None:
        raise RuntimeError("it is started")

    from nodekit.deploy.launch import start

    monkeypatch.setattr(start, "start", begun)
    end(nodes, monkeypatch, statuses)
    goes_on = pytest.raises(RuntimeError, match="it is started")
    with contextlib.nullcontext() if outcome == "succeeded" else goes_on:
        assert SshBackend().up(nodes.inventory, Options(inventory=nodes.inventory.path)) == 0
    assert (find("lab-1").state, find("lab-1").verdict) == (outcome, "ended while nobody watched")
    said = "lab-1 trained to the end while nobody watched; kit up "
    assert (said in capsys.readouterr().out) == (outcome == "succeeded")


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        (CASES[0][0], "trained to the end while nobody watched"),
        (CASES[-1][0], "ended while nobody watched; kit up goes on"),
        ({"a": KILLED, "b": KILLED, "c": KILLED}, "ended while nobody watched; kit up goes on"),
        ({"a": DONE, "b": None, "c": DONE}, "trained to the end while nobody watched"),
        (
            {"a": KILLED, "c": FAILED},
            "may still be running on b, which cannot be reached; kit up goes on when it can",
        ),
        ({}, "may still be running on a, b, c, which cannot be reached; kit up goes on when it can"),
        ({"a": {**KILLED, "alive": True}}, "running"),
    ],
)
def test_kit_status_says_whether_there_is_more_to_do(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, statuses: dict[str, Any], state: str
) -> None:
    end(nodes, monkeypatch, statuses)
    assert SshBackend().status(nodes.run, SshOptions()).state == state
    lock = SupervisorLock(nodes.run)
    assert lock.acquire()  # who supervises it is about to say how it has ended
    assert SshBackend().status(nodes.run, SshOptions()).state == "running"
    lock.release()


def test_kit_watch_takes_no_run_for_ended_whose_nodes_it_cannot_reach(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end(nodes, monkeypatch, {"a": KILLED})
    with pytest.raises(
        KitError, match="lab-1 may still be running on b, c, which cannot be reached"
    ) as error:
        SshBackend().watch(nodes.run, SshOptions())
    assert error.value.problem.cure == "kit watch lab-1 again when it can"
    end(nodes, monkeypatch, {"a": KILLED, "b": KILLED, "c": KILLED})
    assert SshBackend().watch(nodes.run, SshOptions()) == 0
    assert "lab-1 has ended while nobody watched; kit up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        *CASES,
        ({"a": ENDED, "b": ENDED, "c": NEVER_BEGUN}, "stopped"),
        ({"a": KILLED, "b": KILLED, "c": NEVER_BEGUN}, "stopped"),
    ],
)
def test_kit_down_stops_no_run_that_has_ended(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    statuses: dict[str, Any], outcome: str,
) -> None:  # fmt: skip
    end(nodes, monkeypatch, statuses)
    assert SshBackend().down(nodes.run, StopOptions()) == 0
    run = find("lab-1")
    assert (run.state, run.verdict) == (
        outcome,
        "stopped by kit down" if outcome == "stopped" else "ended while nobody watched",
    )
    assert f"lab-1 is not running ({outcome})" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [False, True])
def test_kit_down_stops_the_others_where_a_node_cannot_be_stopped(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, lost: bool
) -> None:
    end(nodes, monkeypatch, {"a": {**KILLED, "alive": True}, "b": KILLED})

    def stop(host: str, args: dict[str, Any]) -> dict[str, Any]:
        if host == "b":
            raise HostError("b", "the connection is gone")
        return {"was": "running", "killed": args["force"]}

    nodes.answers["stop"] = stop
    assert SshBackend().down(nodes.run, StopOptions(force=True, lost=lost)) == (0 if lost else 1)
    assert find("lab-1").state == ("stopped" if lost else "running")
    assert [args["force"] for _, args in nodes.of("stop")] == [True, True]
    assert "is not running" not in capsys.readouterr().out


NOT_UP = {"alive": False, "agent": "", "state": "", "generation": -1}


@pytest.mark.parametrize(
    ("state", "statuses", "lines", "states"),
    [
        ("running", {"a": KILLED, "b": NOT_UP}, ["gone", "spare"], ["gone", "spare"]),
        ("failed", {"a": NOT_UP, "b": NOT_UP}, ["not started"] * 2, ["not started"] * 2),
        ("failed", {"a": KILLED, "b": NOT_UP}, ["gone", "spare"], ["gone", "spare"]),
        (
            "running",
            {"a": {**KILLED, "alive": True}, "b": DONE},
            ["running", "succeeded"],
            ["running", "succeeded"],
        ),
    ],
)
def test_kit_status_tells_of_each_node_that_answers(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch,
    state: Any, statuses: dict[str, Any], lines: list[str], states: list[str],
) -> None:  # fmt: skip
    with nodes.run.changing():
        nodes.run.state = state
    end(nodes, monkeypatch, {**statuses, "c": NEVER_BEGUN})
    found = SshBackend().status(nodes.run, SshOptions())
    assert [found.nodes[name].split("  ")[0] for name in ("a", "b")] == lines
    assert [found.data["status"][name]["state"] for name in ("a", "b")] == states
    assert [found.data["status"][name]["alive"] for name in ("a", "b")] == [
        statuses[name]["alive"] for name in ("a", "b")
    ]


def test_kit_status_says_of_drained_nodes_why_they_are(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    (nodes.run.folder / "drained").write_text('{"b": "GPU 1 is lost", "a": ""}')
    end(nodes, monkeypatch, {"a": {**KILLED, "alive": True}, "b": KILLED, "c": NEVER_BEGUN})
    found = SshBackend().status(nodes.run, SshOptions())
    assert (found.nodes["b"], found.data["status"]["b"]["state"]) == ("drained  GPU 1 is lost", "drained")
    assert found.nodes["a"].startswith("running"), "it leaves soon"


def test_kit_status_has_of_a_node_that_does_not_answer_what_was_heard_last(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = {**KILLED, "alive": True, "time": 1000.0, "agent": "1.2", "run": "lab-1"}
    nodes.run.event("said", text="it has begun")
    gatherer = Gatherer(nodes.run.folder)
    gatherer.heard("b", heard, clock_offset=0.0)  # type: ignore[arg-type]
    gatherer.heard("a", heard, clock_offset=0.0)  # type: ignore[arg-type]
    end(nodes, monkeypatch, {"a": KILLED, "c": KILLED})

    def status(host: str, _: Any) -> dict[str, Any]:
        if host == "c":
            raise RemoteError("c", {"type": "OSError", "message": "Input/output error", "traceback": ""})
        return {"agent": "1.2", "fence": 1, **KILLED}

    nodes.answers["status"] = status
    found = SshBackend().status(nodes.run, SshOptions())
    assert found.nodes["a"] == "gone"
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(1000))
    assert found.nodes["b"].startswith(f"unreachable; last heard of {when}: running")
    assert re.fullmatch(r"its status cannot be read: .*Input/output error.*", found.nodes["c"])
    assert found.data["status"]["b"]["alive"] is None, "which is not known"
    assert "c" not in found.data["status"]


def test_how_a_supervised_run_ends_is_its_supervisors_to_say(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its nodes say may be what `kit down` has just had them stopped with."""
    end(nodes, monkeypatch, {"a": ENDED, "b": FAILED, "c": NEVER_BEGUN})
    lock = SupervisorLock(nodes.run)
    assert lock.acquire()
    SshBackend().down(nodes.run, StopOptions())
    lock.release()
    assert find("lab-1").state == "stopped"
