"""Find and end processes and shared memory that runs have left on this host, for `kit check`, `kit clean`, `kit rm`."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, TypedDict

from nodekit.deploy.host import current_status, errors, files, processes
from nodekit.deploy.host.probes.network import netstate
from nodekit.deploy.host.processes import Process
from nodekit.deploy.host.schema import Worker


class LeftProcess(TypedDict):
    """A recorded worker, or another process of its group."""

    pid: int
    start_time: Optional[int]
    rank: Optional[int]
    rss_bytes: int
    ports: List[int]
    """TCP ports on which the process listens."""


class Segment(TypedDict):
    """Shared memory that a recorded worker created, and no process has open."""

    path: str
    inode: int
    size_bytes: int


class Remains(TypedDict):
    """The processes and shared memory of one run's node on this host."""

    run: str
    node: str
    node_dir: str
    state: str
    agent: Optional[int]
    """The agent's pid, if exactly the recorded process runs."""
    processes: List[LeftProcess]
    shm: List[Segment]
    quiet_s: float
    """Seconds since its ranks last wrote anything."""


def runs(workdir: str, run_id: Optional[str] = None) -> List[Remains]:
    """Return the runs in `workdir` that have processes or shared memory on this host; with `run_id` only that one.

    Raises:
        OSError: for one of them this is unknown.
    """
    found = []
    there: Optional[Dict[int, Process]] = None
    folder = os.path.join(os.path.expanduser(workdir), "runs")
    with contextlib.suppress(*files.NOT_FOUND):  # glob finds nothing in a folder that it may not read
        os.listdir(folder if run_id is None else os.path.join(folder, run_id))
    which = "*" if run_id is None else glob.escape(run_id)
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), which, "*", "agent.json"))):
        node_dir = os.path.dirname(path)
        record = files.load(path)
        if not isinstance(record, dict):
            continue  # torn, for example by a full disk; `removal` checks for this itself
        if record.get("boot_id") != processes.boot_id():
            continue  # of another host that shares the folder, or from before the last boot
        if there is None:
            there = _running()
        run = _run(node_dir, record, there)
        if run["agent"] or run["processes"] or run["shm"]:
            found.append(run)
    return found


def _running() -> Dict[int, Process]:
    """Return all processes that have not ended, by pid."""
    return {pid: each for pid, each in processes.all_of_them().items() if not each.has_ended}


def _run(node_dir: str, record: Mapping[str, Any], there: Mapping[int, Process]) -> Remains:
    node, run_id = os.path.basename(node_dir), os.path.basename(os.path.dirname(node_dir))
    status = current_status.statuses(node_dir).get(node, {})
    agent = _same(record, there)
    workers = {each["pid"]: each for each in status.get("workers", [])}
    own = [
        each
        for each in there.values()
        if each.group in workers and _belongs(each, workers[each.group], there, run_id)
    ]
    ports = {} if agent else _listening([each.pid for each in own])
    return {
        "run": run_id,
        "node": node,
        "node_dir": node_dir,
        "state": status.get("state", ""),
        "agent": record["pid"] if agent else None,
        "processes": [
            {
                "pid": each.pid,
                "start_time": each.start_time,
                "rank": workers[each.group].get("rank"),
                "rss_bytes": each.rss_bytes,
                "ports": ports.get(each.pid, []),
            }
            for each in own
        ],
        "shm": [] if agent else _shared_memory(node_dir, there),
        "quiet_s": time.time() - _last_sign(node_dir),
    }


def _same(record: Mapping[str, Any], there: Mapping[int, Process]) -> bool:
    """Whether exactly the recorded process runs: its pid alone may be another process's by now."""
    process = there.get(record.get("pid", 0))
    return process is not None and process.start_time == record.get("start_time")


def _belongs(process: Process, worker: Worker, there: Mapping[int, Process], run_id: str) -> bool:
    """Whether a process whose group has a recorded worker's pid as its id belongs to that worker.

    A group keeps its id while any process is in it. If the worker itself has ended, the id may have been reused since;
    then the process belongs to the run if NODEKIT_RUN_ID in its environment says so.
    """
    if worker["pid"] in there:
        return _same(worker, there)
    try:
        environment = files.read("/proc/%d/environ" % process.pid)
    except OSError:
        return False
    return b"NODEKIT_RUN_ID=" + run_id.encode() in environment.split(b"\0")


def _listening(pids: List[int]) -> Dict[int, List[int]]:
    """Return pid → the TCP ports on which the process listens."""
    ports = {each.inode: each.port for each in netstate.sockets() if each.listens} if pids else {}
    found: Dict[int, Set[int]] = {}
    for pid in pids:
        for link in glob.glob("/proc/%d/fd/*" % pid):
            inode = _target(link)[len("socket:[") : -1]
            if inode in ports:
                found.setdefault(pid, set()).add(ports[inode])
    return {pid: sorted(own) for pid, own in found.items()}


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the process has ended, or is another user's
        return ""


def _shared_memory(node_dir: str, there: Mapping[int, Process]) -> List[Segment]:
    """Return the segments of recorded workers that have ended; torch names a segment by its creator's pid."""
    segments = glob.glob("/dev/shm/torch_*_*")  # noqa: S108  # where shared memory is, not a temporary file
    if not segments:
        return []
    booted = time.time() - float((files.read_text("/proc/uptime") or "0").split()[0])
    started: Dict[int, float] = {}
    for line in files.read_text(os.path.join(node_dir, "events.jsonl")).splitlines():
        if '"workers-started"' in line:
            try:
                event = json.loads(line)
                if event["time"] > booted:  # from an earlier boot, the pid was another process's
                    for each in event["workers"]:
                        started.setdefault(each["pid"], event["time"])
            except (ValueError, KeyError):
                pass  # a line that a full disk has torn
    ended = _last_sign(node_dir)
    found: List[Segment] = []
    for path in segments:
        match = re.match(r"torch_(\d+)_", os.path.basename(path))
        pid = int(match.group(1)) if match else 0
        if pid not in started or pid in there:
            continue
        try:
            about = os.stat(path)
        except OSError:
            continue
        # Last changed while the run was at work, so by its worker, and not by another process with the same pid.
        in_time = started[pid] - 5 <= about.st_mtime <= ended + 5
        if about.st_uid == os.getuid() and in_time and not _is_open(path):
            found.append({"path": path, "inode": about.st_ino, "size_bytes": about.st_size})
    return found


def _is_open(path: str) -> bool:
    """Whether a process of this user has a file open or mapped; other users cannot, as its mode is 0600."""
    return any(path in files.read_text(maps) for maps in glob.glob("/proc/[0-9]*/maps")) or any(
        _target(link) == path for link in glob.glob("/proc/[0-9]*/fd/*")
    )


def _last_sign(node_dir: str) -> float:
    """Return when the node's ranks last wrote to a log or reported progress; 0 if they never did."""
    last = 0.0
    for name in ("progress", "logs"):
        for path in glob.glob(os.path.join(glob.escape(node_dir), name, "*")):
            try:
                last = max(last, os.stat(path).st_mtime)
            except OSError:
                pass
    return last


def clean(workdir: str, names: Sequence[Sequence[str]], grace_s: float) -> List[Remains]:
    """End what is left of runs whose agent has ended, each named by run and node; return what was ended, as `runs`.

    Send SIGTERM, and SIGKILL after `grace_s`. Each process is identified again by its record, so that none is ended
    that has got a reused pid.

    Raises:
        RuntimeError: SIGKILL does not end a process.
    """
    asked = {tuple(each) for each in names}
    ended = [run for run in runs(workdir) if (run["run"], run["node"]) in asked and run["agent"] is None]
    left = {each["pid"]: each for run in ended for each in run["processes"]}
    deadline = time.monotonic() + grace_s
    send: Callable[[int, int], None] = processes.ask_to_end
    number = int(signal.SIGTERM)
    while left:
        for pid in left:
            send(pid, number)
        send, number = processes.send, 0 if time.monotonic() < deadline else int(signal.SIGKILL)
        time.sleep(0.05)
        there = _running()
        left = {pid: each for pid, each in left.items() if _same(each, there)}
        if number == signal.SIGKILL and time.monotonic() > deadline + 5:
            found = "; ".join(processes.unkillable(pid) for pid in left)
            raise errors.with_cure(RuntimeError(found), "reboot the host")
    for run in ended:
        for segment in run["shm"]:
            try:
                if os.stat(segment["path"]).st_ino == segment["inode"]:
                    os.unlink(segment["path"])
            except FileNotFoundError:
                pass
    return ended
