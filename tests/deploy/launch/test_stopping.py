"""What is said and recorded of a stop that did not reach every node: which of them may go on, and what ends them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_nodes import FakeChannel, Nodes

from nodekit.deploy.commands import cli
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import ChannelLost, RemoteError
from nodekit.deploy.launch import stopping, watch
from nodekit.deploy.launch.options import Options, StopOptions
from nodekit.deploy.output.interrupts import Interrupts
from nodekit.deploy.records.find_runs import find
from nodekit.deploy.records.runs import Outcome, Run
from nodekit.deploy.ssh_backend.backend import SshBackend
from nodekit.deploy.story.verdict import Verdict
from nodekit.deploy.supervise import policy
from nodekit.deploy.supervise.state import Rules
from nodekit.deploy.supervise.supervise import Supervisor
from nodekit.inventory.errors import KitError

STOPPED = {"was": "running", "killed": False}
NOTHING = {"logs": False, "snapshots": False, "curves": False, "weights": "", "written": None, "code": ""}


def frozen(host: str) -> RemoteError:
    """Of a node whose agent waits in a driver for ever."""
    told = {"type": "RuntimeError", "message": "SIGKILL does not end pid 7 (state D)", "traceback": ""}
    return RemoteError(host, {**told, "cure": "reboot the host"})


def silent(host: str) -> ChannelLost:
    return ChannelLost(host, "no answer within 30 s")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """A run on a and b, of which a may go on alone."""
    found = Nodes(tmp_path, monkeypatch)
    found.run.is_placed = False
    begun = policy.begin(Rules.of(found.inventory), generation=0, host="a", port=1, nodes=["a"])
    found.run.judgement = begun.to_dict()
    found.run.save()
    return found


WAIT = "kit down lab-1 when they can, or, where you know that they are off, kit down --lost lab-1"


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({"a": STOPPED, "b": frozen("b")}, []),
        (
            {"a": frozen("a"), "b": STOPPED},
            [
                "a was not stopped: SIGKILL does not end pid 7 (state D); reboot the host",
                "lab-1 is not over: kit down lab-1 when that is mended",
            ],
        ),
        (
            {"a": silent("a"), "b": STOPPED},
            [f"a cannot be reached and may be training together, so lab-1 is not over: {WAIT}"],
        ),
        (
            {"b": frozen("b")},
            [
                "b was not stopped: SIGKILL does not end pid 7 (state D); reboot the host",
                f"a cannot be reached and may be training together, so lab-1 is not over: {WAIT}",
            ],
        ),
    ],
)
def test_a_node_that_answers_is_not_said_to_be_out_of_reach(
    nodes: Nodes, results: Mapping[str, Any], said: list[str]
) -> None:
    told: list[str] = []
    left = stopping.unheard(nodes.run, results)
    stopping.record_end(
        nodes.run, left, nodes.run.finish_stopped, told.append, alive=stopping.refused(results)
    )
    assert "\n".join(told).splitlines() == said
    assert find("lab-1").state == ("running" if said else "stopped")


def test_who_only_watched_goes_by_the_record_as_it_is_now(nodes: Nodes) -> None:
    """Another led the run meanwhile: other nodes vote, it is over, or it is another start."""
    told: list[str] = []

    def ended(watcher: Run, lost: str) -> str:
        stopping.record_end(watcher, [lost], watcher.finish_stopped, told.append)
        return find("lab-1").state

    first, second = find("lab-1"), find("lab-1")
    begun = policy.begin(Rules.of(nodes.inventory), generation=0, host="b", port=1, nodes=["b"])
    with nodes.run.changing():
        nodes.run.judgement = begun.to_dict()
    assert ended(first, "b") == "running"
    assert len(told) == 1
    assert ended(second, "a") == "stopped"
    assert ended(first, "b") == "stopped"
    with nodes.run.changing():
        nodes.run.state, nodes.run.started = "running", nodes.run.started + 1
    assert ended(second, "a") == ended(first, "b") == "running"
    assert len(told) == 1


def test_what_is_known_of_each_node_is_said(nodes: Nodes) -> None:
    assert watch.stopped_text(nodes.run, {"a": STOPPED, "b": frozen("b")}).splitlines() == [
        "lab-1 is stopped on 1 node",
        "b was not stopped: SIGKILL does not end pid 7 (state D); reboot the host",
    ]
    assert watch.stopped_text(nodes.run, {"b": silent("b")}).splitlines() == [
        "lab-1 is stopped on 0 nodes",
        "not known: b: no answer within 30 s",
        "not known: a cannot be reached",
        "an agent may still run there: kit down lab-1 ends it once the host answers",
    ]


@pytest.mark.parametrize(
    ("b", "is_lost", "is_over"),
    [
        (None, False, False),
        (None, True, True),
        (silent("b"), False, False),
        (silent("b"), True, True),
        (frozen("b"), True, False),
        (TypeError("a mistake"), True, False),
    ],
)
def test_the_user_knows_that_what_is_out_of_reach_is_off_and_not_what_answers(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    b: Exception | None, is_lost: bool, is_over: bool,
) -> None:  # fmt: skip
    def stop(host: str, _: Any) -> Any:
        if host == "b" and b is not None:
            raise b
        return STOPPED

    @contextlib.contextmanager
    def channels(*_: Any, **__: Any) -> Iterator[dict[str, FakeChannel]]:
        yield {name: FakeChannel(name, nodes) for name in ("a", "b") if name == "a" or b is not None}

    nodes.answers["stop"] = stop
    monkeypatch.setattr(cluster, "channels", channels)
    run: Run = find("lab-1")
    assert SshBackend().down(run, StopOptions(lost=is_lost)) == (0 if is_over else 1)
    assert find("lab-1").state == ("stopped" if is_over else "running")
    said = capsys.readouterr().out
    assert ("b was not stopped: SIGKILL" in said) == isinstance(b, RemoteError)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (KeyboardInterrupt(), ("stopped", "stopped by Ctrl-C")),
        (KeyboardInterrupt("SIGTERM"), ("stopped", "stopped by SIGTERM")),
        (KitError("no room", cure="make some"), ("failed", "it did not start")),
    ],
)
def test_a_start_that_the_user_breaks_off_has_not_failed(
    nodes: Nodes, error: BaseException, end: tuple[str, str]
) -> None:
    nodes.answers["stop"] = lambda *_: STOPPED
    assert stopping.undo(nodes.client, error, Interrupts(), print)
    run = find("lab-1")
    assert (run.state, run.verdict) == end
    assert run.cause == (
        {"name": "did-not-start", "what": "no room", "cure": "make some"} if end[0] == "failed" else {}
    )


def test_a_start_that_somebody_has_stopped_is_said_to_be_stopped_by_them(nodes: Nodes) -> None:
    nodes.answers["stop"] = lambda *_: STOPPED
    nodes.run.say_stop("kit down on laptop")
    assert stopping.undo(nodes.client, KeyboardInterrupt(), Interrupts(), print)
    assert find("lab-1").verdict == "stopped by kit down on laptop"


def test_a_run_in_slurms_hands_is_over_also_where_a_node_was_not_told(nodes: Nodes) -> None:
    """Slurm ends what it has started."""
    with nodes.run.changing():
        nodes.run.is_placed = True
    stopping.record_end(nodes.run, ["a", "b"], nodes.run.finish_stopped, print)
    assert find("lab-1").state == "stopped"


def test_nobody_goes_on_who_had_no_go_in_this_start(nodes: Nodes) -> None:
    with nodes.run.changing():
        nodes.run.generation = 1  # what is known of the voters is of the one before
    stopping.record_end(nodes.run, ["a", "b"], nodes.run.finish_stopped, print)
    assert find("lab-1").state == "stopped"


def test_a_second_ctrl_c_kills_what_does_not_stop() -> None:
    interrupts, told, is_killed = Interrupts(), list[str](), threading.Event()

    def stop_all(*, force: bool) -> dict[str, Any]:
        if not force:
            interrupts.again = True  # it comes while this is under way
            assert is_killed.wait(30)
            return {}
        is_killed.set()
        return {"a": {"was": "running", "killed": True}}

    assert stopping.stop(stop_all, interrupts, told.append)["a"]["killed"]
    assert told == ["killing it"]


def test_a_stopped_run_goes_on_by_the_command_it_was_started_with(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kit up lab.yaml` alone would begin the inventory's own job."""
    with nodes.run.changing():
        nodes.run.command = ["train.py"]
    nodes.run.finish_stopped()
    nodes.answers["artifacts.list_artifacts"] = lambda *_: NOTHING
    watch.conclude(nodes.run, nodes.client.channels, Verdict("stopped", "it was stopped"))
    assert f"kit up {nodes.run.inventory_path} -- train.py begins it anew" in capsys.readouterr().out


def test_a_node_that_could_not_be_asked_may_have_a_snapshot(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.run.finish_stopped()
    nodes.answers["artifacts.list_artifacts"] = lambda *_: NOTHING
    channels = {name: each for name, each in nodes.client.channels.items() if name != "b"}
    watch.conclude(nodes.run, channels, Verdict("stopped", "it was stopped"))
    said = capsys.readouterr().out
    assert "goes on from its snapshot, if a node that could not be asked has one\n" in said
    assert "begins it anew" not in said


def test_why_a_run_was_stopped_is_told_with_how_to_go_on(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = nodes.run
    run.say_stop("kit down")
    run.finish_stopped()
    again = f"kit up {run.inventory_path}"
    assert cli.main(["why", run.run_id]) == 0
    assert capsys.readouterr().out == f"{run.run_id} was stopped by kit down; {again} goes on with it\n"
    assert cli.main(["why", "--json", run.run_id]) == 0
    assert json.loads(capsys.readouterr().out)["resume"] == again


@pytest.mark.parametrize("outcome", ["stopped", "failed"])
@pytest.mark.parametrize(("may_go_on", "resumes"), [(("a",), False), (("b",), True), ((), True)])
def test_no_kit_up_is_named_that_would_be_refused(
    nodes: Nodes, capsys: pytest.CaptureFixture[str],
    outcome: Outcome, may_go_on: tuple[str, ...], resumes: bool,
) -> None:  # fmt: skip
    """It is, as long as the nodes that did not hear of the end may train together."""
    told: list[str] = []
    verdict = Verdict(outcome, "it ended", may_go_on=may_go_on if not resumes else ())
    stopping.record_end(nodes.run, may_go_on, nodes.run.finish_stopped, told.append)
    watch.conclude(nodes.run, {}, verdict)
    assert bool(told) is not resumes
    assert ("kit up" in capsys.readouterr().out) == resumes


@pytest.mark.parametrize("b", [None, silent("b")])
def test_after_ctrl_c_all_is_told_that_a_stop_from_elsewhere_ends_with(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], b: Exception | None
) -> None:
    """Unless the run is not over: what cannot be reached may train on."""

    def stop(host: str, _: Any) -> Any:
        if host == "b" and b is not None:
            raise b
        return STOPPED

    def interrupted(_: Supervisor) -> None:
        raise KeyboardInterrupt

    nodes.answers["stop"] = stop
    nodes.answers["artifacts.list_artifacts"] = lambda *_: {
        "logs": True, "snapshots": True, "curves": False, "weights": "", "written": None, "code": "",
    }  # fmt: skip
    voters = policy.begin(Rules.of(nodes.inventory), generation=0, host="b", port=1, nodes=["b"])
    with nodes.run.changing():
        nodes.run.judgement = voters.to_dict()
    monkeypatch.setattr(Supervisor, "watch", interrupted)
    options = Options(inventory=Path(nodes.run.inventory_path), plain=True)
    assert watch.watch(nodes.client, options) == 130
    said = capsys.readouterr().out
    is_over = b is None
    assert (find("lab-1").state == "stopped") is is_over
    assert (
        f"lab-1 was stopped; kit up {nodes.run.inventory_path} goes on from its snapshot" in said
    ) is is_over
    assert ("\n  snapshots  a:" in said) is is_over


def test_a_ctrl_c_just_after_the_end_does_not_keep_it_off_the_record(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes next is to record it, to have the logs and to tell all who asked."""
    done: list[str] = []
    status = None

    def interrupted(run: Run, verdict: Verdict) -> None:
        signal.raise_signal(signal.SIGINT)
        write_end(run, verdict)

    write_end = watch._write_end

    monkeypatch.setattr(Supervisor, "watch", lambda _: Verdict("failed", "it ended"))
    monkeypatch.setattr(Supervisor, "close", lambda _: done.append("close"))
    monkeypatch.setattr(watch, "_fetch_logs", lambda *_: done.append("logs"))
    monkeypatch.setattr(watch, "_write_end", interrupted)
    with Interrupts() as interrupts, contextlib.suppress(KeyboardInterrupt):
        status = watch.watch(
            nodes.client, Options(inventory=Path(nodes.run.inventory_path), plain=True), interrupts=interrupts
        )
    assert (status, done, find("lab-1").state) == (3, ["logs", "close"], "failed")
    assert "lab-1 failed: it ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ('{"accuracy": 0.98765}', ", accuracy 98.77%"),
        (
            '{"accuracy": 0.5, "stopped_early": "loss is nan"}',
            ", accuracy 50.00%; it ended early: loss is nan",
        ),
        ('{"accuracy": "high"}', ""),
        ('[{"accuracy": 0.5}]', ""),
        ("0.5", ""),
        ("{", ""),
        (None, ""),
    ],
)
def test_a_job_that_has_succeeded_is_said_to_have_whatever_its_script_wrote_as_its_result(
    nodes: Nodes, capsys: pytest.CaptureFixture[str], result: str | None, said: str
) -> None:
    # Rank 0 is on a.
    nodes.answers["read_file"] = lambda host, _: result if host == "a" else '{"accuracy": 0.1}'
    nodes.run.started, nodes.run.ended = nodes.run.created, nodes.run.created + 7.0
    assert watch.conclude(nodes.run, nodes.client.channels, Verdict("succeeded", "trained to the end")) == 0
    assert capsys.readouterr().out.strip().splitlines()[0] == f"lab-1 trained to the end in 7 s{said}"


@pytest.mark.parametrize(
    ("verdict", "status", "said"),
    [
        (
            Verdict("stopped", "stopped"),
            130,
            "lab-1 was stopped; kit up {} begins it anew: it has no snapshot",
        ),
        (Verdict("failed", "it ended"), 3, "lab-1 failed: it ended"),
        (Verdict("failed", "2 crashes", no_progress=True), 4, "lab-1 failed: 2 crashes"),
    ],
)
def test_the_exit_status_says_how_a_run_ended_also_where_it_was_stopped_elsewhere(
    nodes: Nodes, capsys: pytest.CaptureFixture[str], verdict: Verdict, status: int, said: str
) -> None:
    nodes.run.state = verdict.outcome
    nodes.answers["artifacts.list_artifacts"] = lambda *_: NOTHING
    assert watch.conclude(nodes.run, nodes.client.channels, verdict) == status
    assert said.format(nodes.run.inventory_path) in capsys.readouterr().out.splitlines()
