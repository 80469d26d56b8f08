"""What `kit up` of a Slurm job leaves on the terminal when its live view is closed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.commands import cli
from nodekit.deploy.connect.channel import ChannelLost
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.launch.options import Options
from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen.screen import lines
from nodekit.deploy.screen.view_model import ViewModel
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import dump, load_inventory, restore
from nodekit.inventory.schema import Host
from nodekit.slurm import metrics, sweep
from nodekit.slurm import run as runner
from nodekit.slurm import watch as live
from nodekit.slurm.cluster import jobs, login
from nodekit.slurm.cluster.jobs import Job


class Folder:
    """The login node's channel: what lies in the shared folder of a run, which has one node."""

    host = "login"
    is_lost = False

    def __init__(self, record: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self.files = {"run.json": record, "result.json": {"exit": 3, "attempt": "7.0"}}
        self.events = [("1", number, json.dumps(each) + "\n") for number, each in enumerate(events, start=1)]

    def close(self) -> None:
        """There is nothing to close."""

    def call(self, op: str, **args: Any) -> Any:
        match op:
            case "read_file":
                return json.dumps(self.files.get(args["path"].rpartition("/")[2], {}))
            case "hostfollow.events":
                return self.events[args["offset"] :]
            case "artifacts.list_artifacts":
                return {
                    "code": "",
                    "logs": True,
                    "snapshots": True,
                    "curves": False,
                    "weights": "",
                    "written": None,
                }
            case "hostfollow.logs":
                return {}, []
            case "execute":
                return {"status": 1, "out": "", "err": "no accounts"}
        raise AssertionError(op)


class NoScreen:
    """A live view without a terminal."""

    def __init__(self, *_: object) -> None:
        """As FullScreen."""

    def __enter__(self) -> NoScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is left on the terminal."""

    def see(self, _: object) -> None:
        """It draws nothing."""

    def keys(self) -> None:
        """None is pressed."""


@pytest.fixture
def follow() -> Any:
    """`live._follow` itself, which `folder` replaces."""
    return live._follow


@pytest.fixture
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Folder]:
    path = tmp_path / "big.yaml"
    path.write_text(json.dumps({"slurm": {"nodes": 1, "shared_dir": "/shared"}}))
    inventory = load_inventory(path)
    slurm = {"job_id": "7", "run_dir": "/shared/runs/big-1", "private": ""}
    run = Run(
        run_id="big-1", name="big", inventory_path=str(path), inventory=dump(inventory), command=["train.py"],
        created=1.0, state="running", started=1.0, slurm=slurm,
    )  # fmt: skip
    run.save()
    node = {
        "node_dir": "/shared/runs/big-1/n1", "code_dir": "/shared/runs/big-1/code", "node_rank": 0,
        "argv": ["train.py"], "env": {"NODEKIT_SNAPSHOT_DIR": "/shared/snapshots/big-1"},
    }  # fmt: skip
    record = {**vars(run), "nodes": {"n1": node}, "state": "failed", "verdict": "x", "ended": time.time()}
    failure = {
        "attempt": "0.0", "rank": 0, "local_rank": 0, "world_size": 1, "exitcode": 1, "when": 5.0,
        "log": "/l/rank0.log",
        "error": "Traceback (most recent call last):\n  File \"train.py\", line 1, in f\nValueError: so it is",
        "kernel": [],
    }  # fmt: skip
    told = [
        {"time": 1.0, "node": None, "kind": "run-started", "nodes": ["n1"]},
        {"time": 2.0, "node": "n1", "kind": "agent-started"},
        {"time": 5.1, "node": "n1", "kind": "worker-failed", **failure},
        {"time": 6.0, "node": "n1", "kind": "agent-ended", "state": "failed"},
    ]
    channel = Folder(record, told)
    for each in (live, runner):
        monkeypatch.setattr(each, "login", lambda *_: contextlib.nullcontext(channel))
    monkeypatch.setattr(live, "fits_screen", lambda **_: True)
    monkeypatch.setattr(live, "FullScreen", NoScreen)
    monkeypatch.setattr(live, "_follow", lambda *_: Job(job_id="7", state="FAILED", reason="NonZeroExitCode"))
    monkeypatch.setattr(runner, "usage", lambda *_, **__: None)
    return run, channel


def test_a_live_view_ends_with_the_verdict(
    folder: tuple[Run, Folder], capsys: pytest.CaptureFixture[str]
) -> None:
    run, channel = folder
    assert live.watch(run, SshOptions()) == 3
    said = capsys.readouterr().out
    assert said.count("big-1 failed: rank 0 on n1 failed (exit status 1)\n") == 1
    assert "ValueError: so it is\n" in said
    assert "  full log  n1:/l/rank0.log\n            kit logs big-1 --node n1 --rank 0\n" in said
    assert "  resume    kit up " in said
    assert "  snapshots n1:/shared/snapshots/big-1\n" in said

    # Where what the leader says is shown, that has told it.
    job = Job(job_id="7", state="FAILED")
    assert runner.conclude(run, channel, job) == 3  # type: ignore[arg-type]  # all that is called
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("quiet", [True, False])
def test_without_the_leaders_output_the_verdict_is_told_here(
    quiet: bool,
    folder: tuple[Run, Folder],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = folder
    monkeypatch.setattr(runner.Slurm, "job", lambda *_: Job(job_id="7", state="FAILED"))
    assert runner.watch(run, Options(inventory=Path(run.inventory_path), quiet=quiet)) == 3
    verdict = "big-1 failed: rank 0 on n1 failed (exit status 1)\n"
    assert capsys.readouterr().out.count(verdict) == quiet, "the leader has told it where that is shown"


def test_a_run_whose_job_cannot_be_cancelled_is_not_on_record_as_stopped(
    folder: tuple[Run, Folder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's controller is away, say: of a run that is over, the next `kit up` would start a second job."""
    run, _ = folder
    answers = iter((KeyboardInterrupt, *(jobs.Unanswered("login: no answer") for _ in range(1000))))

    def asked(*_: object) -> dict[str, Job]:
        raise next(answers)

    monkeypatch.setattr(runner.Slurm, "jobs", asked)
    monkeypatch.setattr(runner, "STOP_S", 0.1)
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    with pytest.raises(KitError, match="job 7 is still there 0 s after scancel"):
        runner.watch(run, Options(inventory=Path(run.inventory_path)))
    run.reload()
    assert run.state == "running"
    assert "is stopped" not in capsys.readouterr().out


def test_kit_down_cancels_a_job_once_the_controller_is_back(
    folder: tuple[Run, Folder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = folder
    answers: list[Any] = [jobs.Unanswered("login: no answer"), jobs.Unanswered("login: no answer"), {}]

    def asked(*_: object) -> dict[str, Job]:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return {}

    monkeypatch.setattr(runner.Slurm, "jobs", asked)
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    assert runner.down(run, SshOptions()) == 0
    assert not answers
    assert (run.reload(), run.state)[1] == "stopped"
    assert capsys.readouterr().out.startswith(
        "job 7 goes on, as far as is known: Slurm does not answer (login:"
    )


@pytest.mark.parametrize("has_job", [True, False])
def test_kit_down_of_a_sweep_cancels_it_once_the_controller_is_back(
    folder: tuple[Run, Folder],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_job: bool,
) -> None:
    run, channel = folder
    run.slurm = {**run.slurm, "sweep": "big", "values": "lr=1", "job_id": "7_0" if has_job else ""}
    channel.files["result.json"] = {}
    answers: list[Any] = [jobs.Unanswered("login: no answer"), jobs.Unanswered("login: no answer"), {}]

    def asked(*_: object) -> dict[str, Job]:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return {"7_0": Job(job_id="7", state="CANCELLED")}

    cancelled: list[str] = []
    monkeypatch.setattr(sweep, "login", lambda *_: contextlib.nullcontext(channel))
    monkeypatch.setattr(runner.Slurm, "jobs", asked)
    monkeypatch.setattr(runner.Slurm, "job_below", asked)
    monkeypatch.setattr(runner.Slurm, "cancel", lambda _, job_id: cancelled.append(job_id) or True)
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    if not has_job:  # which one that is, only Slurm can tell
        with pytest.raises(jobs.Unanswered):
            sweep.down([run], SshOptions())
        return
    assert sweep.down([run], SshOptions()) == 0
    assert not answers
    assert cancelled == ["7"]
    assert (run.reload(), run.state)[1] == "stopped"
    said = capsys.readouterr().out
    assert said.startswith("all go on, as far as is known: Slurm does not answer (login:")
    assert said.endswith("big is stopped\n")


def test_a_live_view_of_a_success_ends_with_where_everything_is(
    folder: tuple[Run, Folder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, channel = folder
    channel.files["run.json"] |= {
        "state": "succeeded",
        "verdict": "trained to the end",
        "started": 1.0,
        "ended": 43.0,
    }
    channel.files["result.json"]["exit"] = 0
    del channel.events[2:]
    ended = {"time": 9.0, "node": "n1", "kind": "agent-ended", "state": "succeeded"}
    channel.events.append(("1", 3, json.dumps(ended) + "\n"))
    monkeypatch.setattr(live, "_follow", lambda *_: Job(job_id="7", state="COMPLETED"))
    assert live.watch(run, SshOptions()) == 0
    said = capsys.readouterr().out
    assert said.count("big-1 trained to the end in 42 s\n") == 1
    assert "  logs       n1:/shared/runs/big-1/n1/logs   (kit logs big-1)\n" in said
    assert "  snapshots  n1:/shared/snapshots/big-1\n" in said


def test_while_a_job_starts_its_live_view_shows_what_the_leader_does(
    follow: Any, folder: tuple[Run, Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting:
        """A job that starts, and runs from the second look on."""

        said = ("connect  1 host  (0.3 s)", "check    torch")

        def __init__(self, *_: object) -> None:
            self.looks = 0

        def events(self) -> list[Any]:
            return []

        def logs(self) -> list[Any]:
            return []

        def statuses(self, job: Job) -> tuple[dict[str, Any], dict[str, str]]:
            assert job.state == ("UNKNOWN" if self.looks == 0 else "RUNNING")
            self.looks += 1
            if self.looks == 1:
                return {}, {}
            self.said = ("n1  running",)
            return {"n1": {"state": "running"}}, {"n1": "running"}

    class Asked:
        """Slurm, whose job runs, and has run when it is asked again."""

        states = iter(("RUNNING", "COMPLETED"))

        def __init__(self, *_: object) -> None:
            """Of any channel."""

        def job(self, _: str) -> Job:
            return Job(state=next(self.states))

    monkeypatch.setattr(live, "SharedFolder", Starting)
    monkeypatch.setattr(live, "slurm_of", Asked)
    for name in ("LOOK_S", "LOOK_AT_JOB_S", "TICK_S"):
        monkeypatch.setattr(live, name, 0.0)
    run, channel = folder
    watched = ViewModel(run.run_id, [])
    title = lines(dataclasses.replace(watched.model(0.0), state="job 7 running"), 100, None)[0].plain
    assert "0 of 0" not in title
    follow(run, channel, watched, NoScreen(), None)
    assert [text for _, text in watched.sentences] == ["connect  1 host  (0.3 s)", "check    torch"]


def test_a_live_view_outlives_its_connection_to_the_login_node(
    follow: Any, folder: tuple[Run, Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, channel = folder
    pressed: list[str] = []
    tries = iter((HostError("login", "no route to host"), HostError("login", "no route to host"), None))

    class Keys(NoScreen):
        def keys(self) -> None:
            pressed.append("nothing")

    def reopen(again: object, host: Host, _: SshOptions) -> None:
        assert again is channel
        assert host.name == "login"
        if (failed := next(tries)) is not None:
            raise failed
        del channel.call

    def lost(*_: object, **__: object) -> None:
        raise ChannelLost("login", "it ended without a word")

    channel.call = lost  # type: ignore[method-assign]
    monkeypatch.setattr(login.cluster, "reopen", reopen)
    monkeypatch.setattr(login, "RETRY_S", 0.05)
    monkeypatch.setattr(runner.Slurm, "job", lambda *_: Job(state="COMPLETED"))
    said: list[str] = []
    again = login.LoginAgain(channel, restore(run.inventory), SshOptions(), said.append)  # type: ignore[arg-type]
    follow(run, channel, ViewModel(run.run_id, []), Keys(), again)
    assert said == [
        "login: it ended without a word; the job goes on, and kit logs in again when it can",
        "login: no route to host",
        "login: reached again",
    ]
    assert len(pressed) > 2, "a key is heard while the login node is away"


@pytest.mark.parametrize("option", ["--force", "--lost"])
@pytest.mark.parametrize("sweep", ["", "big-1"])
def test_what_slurm_decides_by_itself_is_not_taken_as_an_option(
    option: str, sweep: str, folder: tuple[Run, Folder], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = folder
    if sweep:
        run.run_id = f"{sweep}.0"
        run.slurm["sweep"] = sweep
        run.save()
    assert cli.main(["down", "big-1", option]) == 1
    assert f"kit: {option}: Slurm " in capsys.readouterr().err


@pytest.fixture
def queued_again(folder: tuple[Run, Folder], monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Folder]:
    """A run that was running when its leader was lost, so that it is no news any more what that has heard last."""
    run, channel = folder
    heard = {"n1": {"state": "running", "alive": True, "rank": 0, "world_size": 2}}
    heard["n2"] = {"state": "failed", "alive": False}
    channel.files["run.json"]["nodes"]["n2"] = channel.files["run.json"]["nodes"]["n1"]
    channel.files["absent.json"] = {}
    below = channel.call

    def call(op: str, **args: Any) -> Any:
        return heard if op == "current_status.statuses" else below(op, **args)

    monkeypatch.setattr(channel, "call", call)
    for name in ("LOOK_S", "LOOK_AT_JOB_S", "TICK_S"):
        monkeypatch.setattr(live, name, 0.0)
    return run, channel


def test_while_a_job_is_queued_again_its_view_shows_no_node_that_trains(
    follow: Any, queued_again: tuple[Run, Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, channel = queued_again
    states = iter(("RUNNING", "PENDING", "PENDING", "COMPLETED"))
    monkeypatch.setattr(runner.Slurm, "job", lambda *_: Job(state=next(states)))
    watched, shown = ViewModel(run.run_id, []), []

    class Seen(NoScreen):
        def see(self, statuses: Any) -> None:
            model = watched.model(0.0)
            shown.append((model.state, [(node.name, node.state) for node in model.nodes], sorted(statuses)))

    follow(run, channel, watched, Seen(), None)
    running = ("running", [("n1", "running"), ("n2", "failed")], ["n1", "n2"])
    assert shown[:2] == [running, running]
    title = "job 7 waits in the queue (no reason yet)"
    assert shown[2] == (title, [("n1", "queued"), ("n2", "failed")], ["n2"])


def test_while_a_job_is_queued_again_prometheus_sees_no_node_that_trains(
    queued_again: tuple[Run, Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, channel = queued_again
    closing, seen = threading.Event(), []
    states = iter(("RUNNING", "PENDING"))

    class Observer:
        def event(self, _: object) -> None:
            """Not told here."""

        def see(self, statuses: Any) -> None:
            seen.append(sorted(statuses))
            if len(seen) == 2:
                closing.set()

    monkeypatch.setattr(runner.Slurm, "job", lambda *_: Job(state=next(states)))
    for name in ("LOOK_S", "LOOK_AT_JOB_S"):
        monkeypatch.setattr(metrics, name, 0.0)
    metrics._feed(run, channel, [Observer()], closing)  # type: ignore[arg-type, list-item]
    assert seen == [["n1", "n2"], ["n2"]]
