"""Ask Slurm from inside a job: for the job's state, to requeue it, and to exclude lost nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ClusterShell.NodeSet import NodeSet

from nodekit.deploy.agent.hang.hang import read_progress
from nodekit.deploy.agent.ranks.budget import LONG_ATTEMPT_S
from nodekit.deploy.host.files import NOT_FOUND, write_private
from nodekit.deploy.records import runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.load import restore
from nodekit.inventory.schema import SlurmSettings
from nodekit.slurm.cluster.jobs import ENDED
from nodekit.training.snapshots.files.fence import FILE as FENCE

ASK_S = 20.0  # the longest wait for a command of Slurm
_ROWS = (("cause", "what"), ("cure", "cure"))


def node_name() -> str:
    """Return Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def num_restarts() -> int:
    """Return how often Slurm has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def attempt() -> str:
    """Return the name of this start of the job: its id, and how often it was requeued."""
    return f"{os.environ['SLURM_JOB_ID']}.{num_restarts()}"


def what_to_run(run_dir: Path) -> dict[str, Any]:
    """Return the run's job.json, as `Ready.place` wrote it before the submission."""
    found: dict[str, Any] = json.loads((run_dir / "slurm" / "job.json").read_text(encoding="utf-8"))
    return found


def snapshots_of(job: dict[str, Any]) -> Path:
    """Return the folder with the snapshots of this job's run and of others."""
    return Path(restore(job["inventory"]).snapshots.shared or f"{job['shared_dir']}/snapshots")


def settings_of(run_dir: Path) -> SlurmSettings:
    """Return the inventory's `slurm:` section for the run."""
    settings = restore(what_to_run(run_dir)["inventory"]).slurm
    assert settings is not None
    return settings


def job_now() -> dict[str, str]:
    """Return Slurm's fields of this job: JobState, NodeList, PreemptTime…; {} if Slurm does not answer."""
    names = "JobState|Reason|Restarts|NodeList|PreemptTime|ExcNodeList|Partition"
    said = _slurm("scontrol", "show", "job", "--oneliner", os.environ["SLURM_JOB_ID"])
    return dict(re.findall(rf"(?:^|\s)({names})=(\S*)", said))


def is_taken_away(job: Mapping[str, str]) -> bool:
    """Whether Slurm has ended this start of the job, by the fields of `job_now`, and runs another one, or none.

    So it is where slurmd, which ends the processes of a job, has died, or cannot be reached: Slurm takes its node for
    lost. While a job's processes are ended as usual, its state is COMPLETING.
    """
    state = job.get("JobState", "")
    return state in ENDED or (state == "RUNNING" and int(job.get("Restarts", 0)) > num_restarts())


def place_of_log(place: Path) -> dict[str, Any]:
    """Return the log of srun and the tasks, and the offset of this start of the job in it.

    The leader writes this into the file `place` when it starts.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]
    log = Path(os.environ.get("SUBMITIT_FOLDER", place.parent)) / f"{job}_0_log.out"
    size_bytes = 0
    with contextlib.suppress(OSError):
        size_bytes = log.stat().st_size  # written by earlier starts: Slurm appends
    return {"log": str(log), "log_from": size_bytes}


def _errors(place: Path) -> tuple[str, list[str]]:
    """Return the log of srun, and srun's errors in it since this start of the job."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        told = json.loads(place.read_text(encoding="utf-8"))
        with Path(told["log"]).open("rb") as log:
            log.seek(told["log_from"])
            lines = log.read().decode(errors="replace").splitlines()
        return told["log"], [line for line in lines if re.match(r"(srun|slurmstepd\S*): error: ", line)]
    return str(place.parent), []


def is_missing_step(place: Path) -> bool:
    """Whether srun ended the tasks because a node had rebooted before Slurm noticed its loss."""
    return any("missing step" in line for line in _errors(place)[1])


def srun_cause(place: Path) -> dict[str, str]:
    """Return why srun ended, with its own messages, as the fields of a `Cause`."""
    log, errors = _errors(place)
    said = [line for line in errors if "missing step" in line] or errors[-2:]
    of_node = "; a node was started anew before Slurm had missed it" if is_missing_step(place) else ""
    return {
        "name": "srun-ended",
        "what": f"srun ended kit's tasks on all nodes{of_node}" + (f": {'; '.join(said)}" if said else ""),
        "cure": f"kit up goes on from the newest snapshot. What srun and the tasks said is in {log}",
    }


def fail_without_leader(run_dir: Path, why: str, cause: dict[str, str]) -> None:
    """Record the run as failed, and write the reason to the log that `kit up` shows."""
    told = [
        f"\n{run_dir.name} failed: {why}",
        *(f"  {label:<10}{cause[key]}" for label, key in _ROWS if cause),
    ]
    _say(run_dir, "\n".join(told))
    finish(run_dir, JobFailed.exit_code, "failed", why, cause)


def _say(run_dir: Path, text: str) -> None:
    """Append a text to the log that `kit up` shows; ignore a full disk, so that the caller goes on."""
    with (
        contextlib.suppress(OSError),
        (run_dir / "slurm" / "logs" / "kit.log").open("a", encoding="utf-8") as log,
    ):
        log.write(f"{text}\n")


def queue_again_without_leader(
    run_dir: Path, why: str, lost: list[str], cause: dict[str, str] | None = None
) -> None:
    """Requeue the job in place of its leader, or cancel it after `slurm.max_requeues`; note that in the leader's log.

    Args:
        run_dir: the run's folder.
        why: what happened to the leader.
        lost: the nodes that are lost.
        cause: the known cause, as the fields of a `Cause`.

    Raises:
        RuntimeError: the job was requeued too often.
    """
    limit = settings_of(run_dir).max_requeues
    is_over = num_restarts() >= limit
    then = (
        f"and it was queued again {limit} times (slurm.max_requeues)" if is_over else "Slurm queues it again"
    )
    if is_over:
        fail_without_leader(run_dir, f"{why}, {then}", cause or {})
    else:
        _say(run_dir, f"{why}; {then}")
    # The command below has Slurm send SIGTERM to this process, which would not get to `exclude`.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _slurm(*(["scancel"] if is_over else ["scontrol", "requeue"]), os.environ["SLURM_JOB_ID"])
    if is_over:
        raise RuntimeError(f"{why}; {then}")
    exclude(run_dir, lost)


def keep_records_in(run_dir: Path) -> None:
    """Have this process read and write its run records in the run's folder only."""
    os.environ["XDG_STATE_HOME"] = str(run_dir / "state")


def record_of(run_dir: Path) -> Run | None:
    """Return the leader's record of the run; None before there is one. Call `keep_records_in` first.

    Raises:
        KitError: the record cannot be read.
    """
    found, unreadable = runs.on_record()
    for each in unreadable:
        raise each.error()
    return next((run for run in found if run.run_id == run_dir.name), None)


def readable_record_of(run_dir: Path) -> Run | None:
    """As `record_of`, but None also if the record cannot be read."""
    with contextlib.suppress(KitError):
        return record_of(run_dir)
    return None


def finish(
    run_dir: Path, status: int, state: str = "", verdict: str = "", cause: dict[str, str] | None = None
) -> None:
    """Write how the job ended, for `kit up` and `kit status`, and remove the secrets.

    Args:
        run_dir: the run's folder.
        status: kit's exit status.
        state: the final state of the run; "" if its record has one already.
        verdict: why the run ended.
        cause: the known cause, as the fields of a `Cause`.
    """
    if state and (run := readable_record_of(run_dir)) is not None:
        run.finish(state, verdict, cause)
    # Remove the secrets before writing: that makes room, and they are gone even if the write fails. The next submission
    # writes its own.
    for name in what_to_run(run_dir)["private"]:
        (run_dir / "slurm" / name).unlink(missing_ok=True)
    result = {"exit": status, "attempt": attempt()}
    write_private(str(run_dir / "slurm" / "result.json"), json.dumps(result).encode())


def exclude(run_dir: Path, lost: list[str]) -> None:
    """Exclude the lost nodes from this job, which has just been requeued.

    Slurm might choose them again: a node without a network may still look healthy to it, or come back for a moment. If
    too few other nodes are left for the job, exclude none.
    """
    job = job_now()
    if not (lost and job):
        return
    excluded = NodeSet(",".join(lost))
    if (before := job.get("ExcNodeList", "(null)")) != "(null)":
        excluded |= NodeSet(before)
    states = "--states=idle,allocated,mixed,completing,planned,reserved"
    there = _slurm("sinfo", "--noheader", f"--partition={job['Partition']}", states, "--format=%N")
    others = NodeSet(",".join(there.split())) - excluded
    if len(others) >= settings_of(run_dir).nodes.max:
        _slurm("scontrol", "update", f"JobId={os.environ['SLURM_JOB_ID']}", f"ExcNodeList={excluded}")


def _slurm(*argv: str) -> str:
    """Run a command of Slurm; return its output, "" if it fails or takes too long."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=ASK_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def has_made_progress(run_dir: Path) -> bool:
    """Whether the job of a run ever got past its first step.

    A script that does not report its steps counts as having done so once it has saved a file, or has run for
    `LONG_ATTEMPT_S`.
    """
    try:
        if any(
            b'"first-progress"' in file.read_bytes() for file in (run_dir / "state").rglob("events.jsonl")
        ):
            return True
        # The leader may not have read the ranks' latest progress yet.
        said = [each for folder in run_dir.glob("*/progress") for each in read_progress(folder).values()]
        if any(not each.is_start for each in said):
            return True
        if any(each.text.strip() for each in said):
            return False
        return _has_saved(run_dir) or _worked_s(run_dir) > LONG_ATTEMPT_S
    except OSError:  # unknown; slurm.max_requeues limits the requeues in any case
        return True


def _has_saved(run_dir: Path) -> bool:
    with contextlib.suppress(*NOT_FOUND):
        there = (snapshots_of(what_to_run(run_dir)) / run_dir.name).iterdir()
        return any(each.name != FENCE and not each.name.startswith(".") for each in there)
    return False


def _worked_s(run_dir: Path) -> float:
    """Return the seconds since the ranks were last started; 0 if they never were."""
    started = 0.0
    for file in run_dir.glob("*/events.jsonl"):
        with contextlib.suppress(ValueError):
            for line in file.read_bytes().splitlines():
                if b'"workers-started"' in line:
                    started = max(started, json.loads(line)["time"])
    return time.time() - started if started else 0.0
