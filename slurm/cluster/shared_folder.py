"""Read the leader's record, events, statuses and logs of a job from the shared folder, through the login node."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from nodekit.deploy.connect.channel import HostChannel, RemoteError
from nodekit.deploy.host.files import write_private
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.records import events, fetchlogs, record_files, runs
from nodekit.deploy.records.events import of_node
from nodekit.deploy.records.fetchlogs import Fetched
from nodekit.deploy.records.runs import Run
from nodekit.deploy.story.cause import Cause
from nodekit.deploy.story.causes import BY_SLURM_STATE
from nodekit.deploy.story.status import status_line
from nodekit.inventory.errors import HostError, JobFailed, KitError
from nodekit.slurm.cluster.accounts import usage
from nodekit.slurm.cluster.jobs import Job, Slurm, slurm_of
from nodekit.slurm.cluster.login import LOGIN_TIMEOUT_S, read, remove_private

T = TypeVar("T")
LOST = "lost"  # the status line of a node that the leader cannot reach
_QUEUED = "queued  Slurm is to start its job again"
_TAIL_BYTES = 65536
_LAST_LINES = 3
# srun prints it for each node.
_ENDED_TASK = re.compile(r"srun: error: \S+ tasks? \S+ Exited with exit code \d+")
_OF_A_RANK = re.compile(r"(\S+):(\d+) +\| (.*)")


def leader_folder(run: Run) -> str:
    """Return the folder of the leader's record of a run."""
    return f"{run.slurm['run_dir']}/state/nodekit/runs/{run.run_id}"


def record_of(run: Run, channel: HostChannel) -> Run | None:
    """Return the leader's record of a run; None before the leader has written one."""
    return _parsed(
        channel, f"{leader_folder(run)}/{record_files.FILE}", lambda text: runs.parse(text, run.run_id)
    )


def _parsed(
    channel: HostChannel, path: str, parse: Callable[[str], T], *, goes_on_when: str = "mended"
) -> T | None:
    """Return a file of the leader's, parsed; None before it exists."""
    text = read(channel, path)
    try:
        return parse(text) if text else None
    except ValueError as error:
        cure = f"see to that file system; kit goes on when the file is {goes_on_when}"
        raise HostError(channel.host, f"{path} cannot be read: {error}", cure=cure) from error


def _of_leader(run: Run, channel: HostChannel, name: str) -> dict[str, Any]:
    """Return a JSON file that the leader writes beside its logs; {} before it exists."""
    path = f"{run.slurm['run_dir']}/slurm/{name}"
    return _parsed(channel, path, json.loads, goes_on_when="mended, or removed") or {}


def events_of(run: Run, channel: HostChannel) -> list[str]:
    """Return the lines of the leader's event log."""
    parts = of_node(channel, leader_folder(run), timeout_s=LOGIN_TIMEOUT_S)
    return [line for found in parts for _, _, line in found]


def node_statuses(run: Run, channel: HostChannel) -> dict[str, NodeStatus]:
    """Return the status of each node, as it last reached the leader."""
    found: dict[str, NodeStatus] = channel.call(
        "current_status.statuses", timeout_s=LOGIN_TIMEOUT_S, folder=leader_folder(run)
    )
    return found


def of_job(statuses: Mapping[str, NodeStatus], job: Job) -> dict[str, NodeStatus]:
    """Return the statuses that still hold; while the job is queued again, only those of agents that have ended.

    The other agents were lost with the leader, so that their last statuses, such as "training", are stale.
    """
    return {
        name: each
        for name, each in statuses.items()
        if job.state != "PENDING" or each.get("state") in runs.ENDED
    }


def absent_nodes(run: Run, channel: HostChannel) -> list[str]:
    """Return the nodes that the leader of this run's present job cannot reach."""
    told = _of_leader(run, channel, "absent.json")
    return list(told.get("nodes", [])) if told.get("job") == run.slurm["job_id"] else []


def record_end(run: Run, channel: HostChannel, job: Job) -> tuple[int, bool]:
    """Record how a run ended, whose job is over; return kit's exit status, and whether the leader reported the end.

    Also remove its secrets: a job that was killed, or cancelled before it started, has not done so.

    Raises:
        NotWritten: the disk here is full, or missing; the next command that looks at the run records the end.
    """
    forget_secrets(run, channel)
    result = _of_leader(run, channel, "result.json")
    record = record_of(run, channel)
    _bring_events(run, channel)
    # If Slurm has forgotten the job (MinJobAge), its last attempt is unknown: trust the result.
    is_last = not job.state or result.get("attempt") == f"{job.job_id}.{job.restarts}"
    if record is not None and result and is_last and record.state in runs.ENDED:
        by = run.stopped_by or "scancel"
        is_cancelled = job.state == "CANCELLED" and record.state == "stopped"
        run.finish(record.state, f"stopped by {by}" if is_cancelled else record.verdict, record.cause)
        return int(result["exit"]), True
    used = usage(Slurm(channel), run.slurm["job_id"])
    state = job.state or (used.state if used else "")
    reason = job.reason
    # Without --requeue, slurmd has the job cancelled after a failed prolog.
    if state.startswith("CANCELLED") and not run.stopped_by and _has_prolog_failed(run, channel):
        state, reason = "FAILED", "JobLaunchFailure"
    if state.startswith("CANCELLED"):
        run.finish("stopped", f"stopped by {run.stopped_by or 'scancel'}")
        return runs.STOPPED_EXIT, True
    why = f" ({reason})" if reason else ""
    known = BY_SLURM_STATE.get(reason) or BY_SLURM_STATE.get(state)
    known = known or (_said_by_tasks(run, channel) if state == "FAILED" else None)
    text = f"Slurm ended the job: {state.lower() or 'it knows it no more'}{why}"
    if not run.slurm["job_id"]:
        text = "kit up ended before its job was in the queue"
    run.finish("failed", text, asdict(known) if known else None)
    return JobFailed.exit_code, False


def record_stopped(run: Run, channel: HostChannel) -> None:
    """Record that a run was stopped, whose job kit has cancelled.

    Raises:
        NotWritten: the disk here is full, or missing; the next command that looks at the run records the end.
    """
    forget_secrets(run, channel)
    _bring_events(run, channel)
    run.finish_stopped()


def _bring_events(run: Run, channel: HostChannel) -> None:
    """Copy the leader's events here, before the end is recorded: after that, they are read here."""
    if lines := events_of(run, channel):
        path = run.folder / events.FILE
        with record_files.told(path):
            write_private(str(path), "".join(lines).encode())


def _log_of(run: Run) -> str:
    """Return the log of the job's batch script, of srun and of the first task."""
    return f"{run.slurm['run_dir']}/slurm/{run.slurm['job_id']}_0_log.out"


def _lines(channel: HostChannel, path: str) -> list[str]:
    return [line.strip() for line in read(channel, path).splitlines() if line.strip()]


def _has_prolog_failed(run: Run, channel: HostChannel) -> bool:
    """Whether the last that slurmd wrote to the job's log is that its prolog failed."""
    with contextlib.suppress(RemoteError):
        return any(
            line.startswith("Error running slurm prolog") for line in _lines(channel, _log_of(run))[-1:]
        )
    return False


def _said_by_tasks(run: Run, channel: HostChannel) -> Cause | None:
    """Return a cause with the last output of the batch script, srun or a task; None if there is none.

    For a job that ended without a report of the leader. After `set -e`, a failed line of `slurm.setup` prints nothing.
    """
    path = _log_of(run)
    try:
        said = _lines(channel, path)
    except RemoteError:
        return None
    said = [line for line in said if not _ENDED_TASK.match(line)][-_LAST_LINES:]
    what = f"the job's script or its tasks said last: {'; '.join(said)}"
    if said:
        return Cause("slurm-tasks-failed", what, f"see {path} on {channel.host}")
    if not run.inventory["slurm"]["setup"]:
        return None
    what = "the job's script ended before kit's tasks, and nothing was said: a line of slurm.setup may have failed"
    return Cause(
        "slurm-setup-failed",
        what,
        f"set -x as its first line shows the last one that ran, in {path} on {channel.host}",
    )


def forget_secrets(run: Run, channel: HostChannel) -> None:
    """Remove the secrets that the ended job of a run may have left; print a warning if that fails."""
    try:
        remove_private(channel, [run.slurm["run_dir"]], run.slurm.get("private", "").split())
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr, flush=True)


def fetch_logs(run: Run, channel: HostChannel) -> Fetched:
    """Copy the logs of a run to this machine.

    Raises:
        KitError: the run has none yet, or they cannot be written here.
    """
    record = record_of(run, channel)
    if record is None:
        raise KitError(
            f"{run.run_id} has not started: {slurm_of(run, channel).job(run.slurm['job_id']).line()}"
        )
    return fetchlogs.fetch_run(run, dict.fromkeys(record.nodes, channel), record=record)


class SharedFolder:
    """A reader of the shared folder, which returns the events and log lines since its last call."""

    def __init__(self, run: Run, channel: HostChannel) -> None:
        self._run = run
        self._channel = channel
        self._folder = leader_folder(run)
        self._events_at: Sequence[Any] = ("", 0)
        self._offsets: dict[str, int] | None = None
        self._nodes: list[str] = []
        self.said: list[str] = []
        """The leader's own lines among those that the last `logs()` read."""

    def events(self) -> list[events.Event]:
        """Return the events of the leader's record since the last call."""
        found = self._channel.call(
            "hostfollow.events",
            timeout_s=LOGIN_TIMEOUT_S,
            node_dir=self._folder,
            file=self._events_at[0],
            offset=self._events_at[1],
        )
        if found:
            self._events_at = found[-1][:2]
        return events.parse_all(line for _, _, line in found)

    def logs(self) -> list[tuple[str, str, str]]:
        """Return the ranks' lines in the leader's output since the last call: node, rank, line."""
        self._offsets, found = self._channel.call(
            "hostfollow.logs",
            timeout_s=LOGIN_TIMEOUT_S,
            node_dir=f"{self._run.slurm['run_dir']}/slurm",
            offsets=self._offsets,
            tail_bytes=_TAIL_BYTES if self._offsets is None else None,
        )
        lines = [line for _, text in found for line in text.splitlines()]
        self.said = [line for line in lines if not _OF_A_RANK.fullmatch(line)]
        return [(told[1], told[2], told[3]) for line in lines if (told := _OF_A_RANK.fullmatch(line))]

    def statuses(self, job: Job) -> tuple[dict[str, NodeStatus], dict[str, str]]:
        """Return node → status, as `of_job`, and node → line; both empty before the leader has a record."""
        if not self._nodes:
            record = record_of(self._run, self._channel)
            self._nodes = list(record.nodes) if record else []
            if not self._nodes:
                return {}, {}
        absent = absent_nodes(self._run, self._channel)
        heard = node_statuses(self._run, self._channel)
        told = {name: heard[name] for name in self._nodes if name in heard}
        found = of_job(told, job)
        lines = {name: status_line(found.get(name, {}), now=time.time()) for name in self._nodes}
        queued = dict.fromkeys(told.keys() - found.keys(), _QUEUED)
        return found, {**lines, **queued, **dict.fromkeys(absent, LOST)}
