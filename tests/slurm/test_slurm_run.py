"""A job being submitted, whatever happens meanwhile: by a Slurm that is made up, of commands in PATH."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agents import until

from nodekit.deploy.connect.channel import HostChannel, RemoteError, on_all, open_local
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host import current_status, processes
from nodekit.deploy.host.files import write_private
from nodekit.deploy.output.interrupts import NothingLeft
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.records import locks
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import HostError, KitError, NotWritten
from nodekit.inventory.load import dump, load_inventory
from nodekit.inventory.schema import Inventory
from nodekit.slurm import backend
from nodekit.slurm import run as runner
from nodekit.slurm.backend import SlurmBackend
from nodekit.slurm.cluster import shared_folder
from nodekit.slurm.cluster.jobs import Job, Slurm
from nodekit.slurm.cluster.login import settings_of
from nodekit.slurm.cluster.shared_folder import leader_folder, record_end, record_of
from nodekit.slurm.submission.prepare import Ready

COMMANDS = {
    "srun": "exit 1",
    "sbatch": """[ -z "$SBATCH_WAIT" ] || exit 1
. "$KIT_TEST/sbatch"
printf '%s %s\\n' 24 "$1" >"$KIT_TEST/queue"
echo Submitted batch job 24""",
    # Its job is in a hidden partition.
    "squeue": """case "$* $SQUEUE_STATES" in *" --all "*" ") cat "$KIT_TEST/queue" 2>/dev/null ;; esac; true""",
    "scancel": """rm "$KIT_TEST/queue" """,
    "scontrol": """[ -e "$KIT_TEST/queue" ] && state=RUNNING || state=CANCELLED
echo "JobId=24 JobState=$state" """,
}


@pytest.fixture
def channel(slurm: object) -> Iterator[HostChannel]:
    channel = open_local("login", sys.executable)
    yield channel
    channel.close()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has what sbatch does before it queues a job; in the file ``queue`` is that job, with its script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("KIT_TEST", str(tmp_path))
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")  # the user's, for other jobs than kit's
    monkeypatch.setenv("SBATCH_WAIT", "1")
    return lambda text: (tmp_path / "sbatch").write_text(text) and None


@pytest.fixture
def submission(tmp_path: Path, channel: HostChannel) -> tuple[Run, Inventory, Ready]:
    """A run whose job can be submitted: its record is not written yet."""
    path = tmp_path / "big.yaml"
    path.write_text(json.dumps({"slurm": {"nodes": 1, "shared_dir": str(tmp_path)}}))
    inventory = load_inventory(path)
    run_dir = tmp_path / "runs" / 'kit\'s "folder" $HOME;-1'
    ready = Ready(
        channel=channel, python=sys.executable, shared_dir=str(tmp_path), kit_dir="/kit", run_dir=str(run_dir),
        parameters={}, settings=settings_of(inventory), private={"secrets-1.json": {"KEY": "s3cr3t"}},
    )  # fmt: skip
    ready.place(str(run_dir), inventory, ["train.py"])
    return runner.new_run(inventory, run_dir.name, ["train.py"]), inventory, ready


def submit(submission: tuple[Run, Inventory, Ready]) -> None:
    run, inventory, ready = submission
    runner.submit([(run, inventory, {"run_dir": ready.run_dir})], ready, Phases(silent=True))


def secrets(ready: Ready) -> list[str]:
    return [path.name for path in Path(ready.run_dir, "slurm").glob("*-*.json")]


def has_ended(pid: int) -> bool:
    found = processes.find(pid)
    return found is None or found.has_ended


def test_a_ctrl_c_while_a_job_is_submitted_waits_for_its_id_and_cancels_it(
    slurm: Callable[[str], None], submission: tuple[Run, Inventory, Ready], tmp_path: Path
) -> None:
    run, _, ready = submission
    slurm(
        f"cp {shlex.quote(str(run.folder))}/run.json $KIT_TEST/before; kill -INT {os.getpid()}; sleep 0.2\n"
    )
    with pytest.raises(NothingLeft):
        submit(submission)
    before = json.loads((tmp_path / "before").read_text())
    assert (before["state"], before["slurm"]["job_id"]) == ("starting", ""), "on record before it is queued"
    assert not (tmp_path / "queue").exists(), "cancelled"
    run.reload()
    assert (run.state, run.verdict, run.slurm["job_id"]) == ("stopped", "stopped by Ctrl-C", "24")
    assert not secrets(ready)


def test_a_job_that_cannot_be_put_on_record_is_cancelled_or_not_even_queued(
    slurm: Callable[[str], None],
    submission: tuple[Run, Inventory, Ready],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    slurm("touch $KIT_TEST/called\n")
    run, _, ready = submission
    write, writes = Run._write, []

    def full(run: Run) -> None:
        writes.append(run.state)
        if run.state in refused:
            raise NotWritten("run.json cannot be written: No space left on device")
        write(run)

    monkeypatch.setattr(Run, "_write", full)
    refused = ["starting"]
    with pytest.raises(NotWritten):
        submit(submission)
    assert not (tmp_path / "called").exists()
    refused = ["running"]
    with pytest.raises(NotWritten):
        submit(submission)
    assert (tmp_path / "called").exists()
    assert writes == ["starting", "starting", "running", "failed"]
    assert not (tmp_path / "queue").exists()
    run.reload()
    assert (run.state, run.verdict) == ("failed", "it was not queued")
    assert not secrets(ready)


def test_a_job_that_slurm_refuses_is_not_queued_and_leaves_no_secret(
    slurm: Callable[[str], None], submission: tuple[Run, Inventory, Ready]
) -> None:
    slurm("echo 'sbatch: error: Job violates accounting/QOS policy' >&2; exit 1\n")
    run, _, ready = submission
    with pytest.raises(KitError, match="Slurm does not take this job: Job violates accounting/QOS policy"):
        submit(submission)
    run.reload()
    assert (run.state, run.verdict) == ("failed", "it was not queued")
    assert not secrets(ready)


def test_a_job_that_slurm_may_have_taken_without_an_answer_is_not_on_record_as_failed(
    slurm: Callable[[str], None], submission: tuple[Run, Inventory, Ready]
) -> None:
    """As a controller does that waits for its database: it reads the question, and queues the job later."""
    slurm(
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1\n"
    )
    run, _, ready = submission
    with pytest.raises(
        KitError, match=r"is queued is not known: login: Slurm does not answer: .*; kit status "
    ):
        submit(submission)
    run.reload()
    assert (run.state, run.slurm["job_id"]) == ("starting", "")
    assert secrets(ready), "its job may start"
    with pytest.raises(HostError, match=r"^login: Slurm does not answer: .*; try again when it does"):
        ready.ask()


def test_what_a_command_has_started_ends_with_it_when_its_time_is_over(
    channel: HostChannel, tmp_path: Path
) -> None:
    """As sbatch does, of the python that calls it: it would queue a job that nobody waits for."""
    pid = tmp_path / "pid"
    command = ["sh", "-c", 'sleep 600 & echo $! >"$1"; wait', "sh", str(pid)]

    def is_begun() -> bool:
        with pytest.raises(RemoteError, match="timed out"):
            channel.call("execute", timeout_s=60, argv=command, limit_s=0.5)
        return pid.exists() and bool(pid.read_text())

    until(is_begun)  # on a busy machine the time may be over before
    until(lambda: has_ended(int(pid.read_text())), what="the end of what it has started")


def test_a_job_that_may_be_queued_though_its_submission_was_given_up_is_found_later(
    submission: tuple[Run, Inventory, Ready], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, inventory, ready = submission

    def given_up(*_: object) -> list[str]:
        write_private(f"{ready.run_dir}/slurm/secrets-1.json", b"{}")
        raise HostError("login", "it took too long")

    monkeypatch.setattr(Ready, "submit", given_up)
    with pytest.raises(
        KitError, match=r"whether the job of .* is queued is not known: login: it took too long"
    ):
        submit(submission)
    run.reload()
    assert (run.state, run.slurm["job_id"]) == ("starting", "")
    assert secrets(ready), "its job may start"

    # As while another kit up submits it.
    with locks.starting(inventory.path):
        said = SlurmBackend().status(run, None)  # type: ignore[arg-type]  # nobody is asked
        assert (said.state, said.lines) == ("starting", ["kit up is submitting its job"])
        with pytest.raises(KitError, match="is starting: kit up is submitting its job"):
            runner.down(run, None)  # type: ignore[arg-type]

    slurm_of = Slurm(ready.channel)
    (tmp_path / "queue").write_text(f"7 {ready.run_dir}0/slurm/a.sh\n24 {ready.run_dir}/slurm/b.sh\n")
    runner.find_job(run, slurm_of)
    run.reload()
    assert (run.state, run.slurm["job_id"]) == ("running", "24")


def test_sbatch_ends_with_the_connection_that_it_was_called_by(
    slurm: Callable[[str], None], submission: tuple[Run, Inventory, Ready], tmp_path: Path
) -> None:
    """As where kit is killed, or the login node is lost: it would queue a job that nobody waits for."""
    slurm("echo $$ >$KIT_TEST/pid; exec sleep 600\n")
    _, _, ready = submission
    pid = tmp_path / "pid"
    submitting = threading.Thread(target=on_all, args=({"": ready}, lambda it: it.submit([it.run_dir])))
    submitting.start()
    until(lambda: pid.exists() and pid.read_text(), timeout_s=30, what="sbatch")
    ready.channel.close()
    until(lambda: has_ended(int(pid.read_text())), what="the end of sbatch")
    submitting.join()


def test_of_a_job_without_an_id_slurm_is_not_asked_for_all_jobs(channel: HostChannel) -> None:
    assert Slurm(channel).jobs("") == {}
    assert Slurm(channel).job_below("/nowhere") == ""


def test_what_the_leader_has_left_is_read_to_its_end_and_a_damaged_file_is_named(
    submission: tuple[Run, Inventory, Ready], tmp_path: Path
) -> None:
    run, inventory, ready = submission
    run.inventory, run.slurm = dump(inventory), {"run_dir": ready.run_dir, "job_id": "24", "private": ""}
    node = {"node_rank": 0, "env": {"TEXT": "x" * 1000}}
    record = {**vars(run), "nodes": {f"node{number}": node for number in range(2000)}}
    file = Path(leader_folder(run), "run.json")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(record))
    found = record_of(run, ready.channel)
    assert found is not None
    assert len(found.nodes) == 2000

    result = Path(ready.run_dir, "slurm", "result.json")
    result.write_bytes(bytes(40))  # what a file system may leave after a power failure
    with pytest.raises(HostError, match=r"/slurm/result\.json cannot be read: .* is mended, or removed"):
        record_end(run, ready.channel, Job(state="COMPLETED", job_id="24"))


def test_an_end_whose_events_find_no_room_here_is_written_down_later(
    submission: tuple[Run, Inventory, Ready], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk had ended kit with a traceback; with the end on record, kit would look for the events here alone."""
    run, inventory, ready = submission
    run.inventory, run.slurm = dump(inventory), {"run_dir": ready.run_dir, "job_id": "24", "private": ""}
    run.save()
    events = Path(leader_folder(run), "events.jsonl")
    events.parent.mkdir(parents=True)
    events.write_text(
        json.dumps({"run": run.run_id, "time": 1.0, "node": None, "kind": "said", "text": "…"}) + "\n"
    )
    failed = Job(state="FAILED", job_id="24", reason="NonZeroExitCode")

    def full(path: str, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as disk:
        disk.setattr(shared_folder, "write_private", full)
        with pytest.raises(NotWritten, match=r"events\.jsonl cannot be written: No space left.*df "):
            record_end(run, ready.channel, failed)
    run.reload()
    assert run.state == "starting"
    assert record_end(run, ready.channel, failed) == (3, False)
    assert (run.folder / "events.jsonl").read_text().startswith(events.read_text())


def test_a_job_that_ends_before_its_leader_speaks_is_told_with_what_its_tasks_said(
    submission: tuple[Run, Inventory, Ready],
) -> None:
    run, inventory, ready = submission
    run.inventory, run.slurm = dump(inventory), {"run_dir": ready.run_dir, "job_id": "24", "private": ""}
    run.save()
    failed = Job(state="FAILED", job_id="24", reason="NonZeroExitCode")
    assert record_end(run, ready.channel, failed) == (3, False)
    assert not run.cause, "there is no file yet"
    log = Path(ready.run_dir, "slurm", "24_0_log.out")
    ended = "".join(f"srun: error: node{n}: task {n}: Exited with exit code 1\n" for n in range(9))
    log.write_text(f"Traceback (most recent call last):\n  File\nImportError: libcudart.so\n{ended}")
    record_end(run, ready.channel, failed)
    assert run.cause["what"].endswith(
        "said last: Traceback (most recent call last):; File; ImportError: libcudart.so"
    )
    assert run.cause["cure"] == f"see {log} on login"


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("FAILED", "JobLaunchFailure", "ImportError: of an earlier start\n"),
        ("CANCELLED", "", "Error running slurm prolog: 1\n"),  # with `requeue: false`
    ],
)
def test_a_job_that_a_node_could_not_start_has_failed_and_says_where_to_look(
    submission: tuple[Run, Inventory, Ready],
    capsys: pytest.CaptureFixture[str],
    state: str,
    reason: str,
    said: str,
) -> None:
    """It was told with what an earlier start had said last; after a failed prolog, as stopped by scancel."""
    run, inventory, ready = submission
    run.inventory, run.slurm = dump(inventory), {"run_dir": ready.run_dir, "job_id": "24", "private": ""}
    run.save()
    Path(ready.run_dir, "slurm", "24_0_log.out").write_text(said)
    assert runner.conclude(run, ready.channel, Job(state=state, job_id="24", reason=reason)) == 3
    assert (run.state, run.cause["name"]) == ("failed", "slurm-launch-failed")
    out = capsys.readouterr().out
    assert "sinfo -R says which nodes" in out
    assert "what its tasks said" not in out


def test_a_setup_that_ends_the_job_without_a_word_is_told_with_where_to_look(
    submission: tuple[Run, Inventory, Ready],
) -> None:
    """As `set -e` and a line that fails: `kit why` said no more than that Slurm ended the job."""
    run, inventory, ready = submission
    assert inventory.slurm is not None
    failing = inventory.slurm.model_copy(update={"setup": ("set -e", "false")})
    run.inventory = dump(inventory.model_copy(update={"slurm": failing}))
    run.slurm = {"run_dir": ready.run_dir, "job_id": "24", "private": ""}
    run.save()
    log = Path(ready.run_dir, "slurm", "24_0_log.out")
    log.write_text("")
    record_end(run, ready.channel, Job(state="FAILED", job_id="24", reason="NonZeroExitCode"))
    assert run.cause["what"].endswith("nothing was said: a line of slurm.setup may have failed")
    assert run.cause["cure"] == f"set -x as its first line shows the last one that ran, in {log} on login"


def running(submission: tuple[Run, Inventory, Ready], tmp_path: Path) -> Path:
    """Have the run's job be one that Slurm runs, by the record; the folder in which its leader writes."""
    run, inventory, ready = submission
    run.inventory, run.slurm = dump(inventory), {"run_dir": ready.run_dir, "job_id": "24", "private": ""}
    run.state = "running"
    run.save()
    (tmp_path / "queue").touch()
    folder = Path(leader_folder(run))
    folder.mkdir(parents=True)
    return folder


def test_a_job_that_has_completed_before_it_could_be_cancelled_has_succeeded(
    slurm: Callable[[str], None],
    submission: tuple[Run, Inventory, Ready],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, _, ready = submission
    folder = running(submission, tmp_path)
    file = folder / "run.json"
    file.write_text(json.dumps({**vars(run), "state": "succeeded", "verdict": "trained to the end"}))
    Path(ready.run_dir, "slurm", "result.json").write_text('{"exit": 0, "attempt": "24.0"}')
    control = tmp_path / "bin" / "scontrol"
    control.write_text(control.read_text().replace("CANCELLED", "COMPLETED"))
    monkeypatch.setattr(runner, "login", lambda *_: contextlib.nullcontext(ready.channel))

    assert runner.down(run, SshOptions()) == 0
    assert (run.state, run.verdict) == ("succeeded", "trained to the end")
    assert f"{run.run_id} is not running (succeeded)" in capsys.readouterr().out


def test_a_run_that_has_ended_stays_as_it_ended_though_slurm_does_not_answer(
    slurm: Callable[[str], None],
    submission: tuple[Run, Inventory, Ready],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kit status` said that its job went on; `kit down` waited for Slurm, and recorded a failed run as stopped."""
    run, _, ready = submission
    running(submission, tmp_path)
    run.finish("failed", "rank 0 on node1 failed first")
    monkeypatch.setattr(runner, "login", lambda *_: contextlib.nullcontext(ready.channel))
    monkeypatch.setattr(backend, "login", lambda *_: contextlib.nullcontext(ready.channel))
    control = tmp_path / "bin" / "scontrol"
    control.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1\n"
    )

    assert SlurmBackend().status(run, SshOptions()).lines == ["job 24 is over; Slurm does not answer"]
    assert runner.down(run, SshOptions()) == 0
    run.reload()
    assert (run.state, run.verdict) == ("failed", "rank 0 on node1 failed first")


def test_what_the_leader_of_a_cancelled_job_has_recorded_is_brought_here(
    slurm: Callable[[str], None],
    submission: tuple[Run, Inventory, Ready],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kit runs` showed no step of a run that kit down had ended, or an earlier one's, and `kit report` was empty."""
    run, _, ready = submission
    folder = running(submission, tmp_path)
    told = folder / "events.jsonl"
    told.write_text(
        json.dumps({"run": run.run_id, "time": 1.0, "node": None, "kind": "said", "text": "…"}) + "\n"
    )
    monkeypatch.setattr(runner, "login", lambda *_: contextlib.nullcontext(ready.channel))

    assert runner.down(run, SshOptions()) == 0
    assert (run.state, run.verdict) == ("stopped", "stopped by kit down")
    assert (run.folder / "events.jsonl").read_text().startswith(told.read_text())


def test_nodes_that_were_lost_with_their_leader_do_not_train_while_the_job_waits(
    slurm: Callable[[str], None],
    submission: tuple[Run, Inventory, Ready],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kit status` called them running, with their steps, for as long as the job was queued again."""
    run, _, ready = submission
    folder = running(submission, tmp_path)
    file = folder / "run.json"
    nodes = {"node1": {"node_rank": 0}, "node2": {"node_rank": 1}}
    file.write_text(json.dumps({**vars(run), "nodes": nodes}))
    events = file.with_name("events.jsonl")
    events.write_text('{"time": 1.0, "node": null, "kind": "run-started"}\n')
    told = current_status.StatusFile(str(events))
    for name, state in (("node1", "running"), ("node2", "stopped")):
        told.write({"run": run.run_id, "time": 1.0, "node": name, "state": state})
    monkeypatch.setattr(backend, "login", lambda *_: contextlib.nullcontext(ready.channel))

    assert SlurmBackend().status(run, SshOptions()).nodes == {"node1": "running", "node2": "stopped"}
    control = tmp_path / "bin" / "scontrol"
    control.write_text(control.read_text().replace("RUNNING", "PENDING"))
    assert SlurmBackend().status(run, SshOptions()).nodes == {"node2": "stopped"}
