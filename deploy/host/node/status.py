"""Read a node's folder: its agent's last status, whether the agent is alive, the newest snapshot."""

from __future__ import annotations

import errno
import os
import re
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from nodekit.deploy.host import current_status, files, processes
from nodekit.deploy.host.schema import AgentRecord, NodeStatus, Worker

HELD_S = 30.0  # how long a node's last known snapshot stands in for a folder that cannot be listed
# After so long without a new status, see whether the agent can write one. It does so every two seconds.
SILENT_S = 5.0
# As nodekit.training.snapshots.files.manifest names a committed one.
_SNAPSHOT = re.compile(r"g(\d{4,})-s(\d{9,})\.json")
# Folder → its newest snapshot, and when that was read.
_last_snapshots: Dict[str, Tuple[List[int], float]] = {}


def agent_record(node_dir: str) -> Optional[AgentRecord]:
    """Return which process the node's agent is, or was; None before the first agent."""
    found: Optional[AgentRecord] = files.load(os.path.join(os.path.expanduser(node_dir), "agent.json"))
    return found or None


def agent_alive(node_dir: str) -> Optional[int]:
    """Return the pid of this node's agent if exactly the recorded process is running, else None."""
    return pid_if_alive(agent_record(node_dir))


def pid_if_alive(record: Optional[AgentRecord]) -> Optional[int]:
    """Return the recorded pid if exactly that process is running, else None."""
    if record and record["boot_id"] == processes.boot_id():
        if processes.is_running(record["pid"], record["start_time"]):
            return record["pid"]
    return None


def load_spec(node_dir: str) -> Dict[str, Any]:
    """Return the newest spec of the node's agent; {} before the first."""
    return files.load(os.path.join(node_dir, "spec.json")) or {}


def fence_in(folder: str) -> int:
    """Return the generation in a folder's fence file; -1 if there is none.

    Raises:
        OSError: the file cannot be read, or is damaged.
    """
    path = os.path.join(folder, "fence")
    try:
        text = files.retried(lambda: files.read(path))
    except files.NOT_FOUND:
        return -1
    try:
        return int(text)
    except ValueError:
        raise OSError(errno.EIO, "it holds %r, and a whole number was wanted" % text[:40], path) from None


def status(node_dir: str) -> NodeStatus:
    """Return the node's last status, completed by its host; the end of the agent's log too if the agent has ended."""
    node_dir = os.path.expanduser(node_dir)
    record = agent_record(node_dir)
    alive = pid_if_alive(record)
    found = said(node_dir)
    found["alive"] = alive is not None
    found["known"] = os.path.isdir(node_dir)
    found["fence"] = fence_in(node_dir)
    found["granted"] = files.load(os.path.join(node_dir, "electorate.json"))
    found["snapshot"] = newest_snapshot(snapshot_folder(node_dir))
    found["agent"] = "%s.%s" % (record["pid"], record["start_time"]) if record else ""
    if time.time() - found.get("time", 0.0) > SILENT_S and (why := files.unwritable(node_dir)):
        found["unwritable"] = why
    if not alive:
        found["generation"] = max(found.get("generation", -1), load_spec(node_dir).get("generation", -1))
        log_from = record.get("log_from", 0) if record else 0  # an earlier kit's record has none
        found["agent_log"] = files.tail(os.path.join(node_dir, "agent.log"), since=log_from)
    return found


def said(node_dir: str) -> NodeStatus:
    """Return the last status that this node's agent wrote; {} before the first."""
    nothing: NodeStatus = {}
    return max(current_status.statuses(node_dir).values(), key=lambda each: each["time"], default=nothing)


def running_workers(node_dir: str) -> List[Worker]:
    """Return the recorded workers that are still the recorded processes.

    A status has no boot id, but belongs to the agent in ``agent.json``: `agents.start` clears it before it records
    another agent. After a reboot, or on another host, the same pid and start time may be those of a foreign process.
    """
    record = agent_record(node_dir)
    if record is None or record["boot_id"] != processes.boot_id():
        return []
    workers = said(node_dir).get("workers", [])
    return [each for each in workers if processes.is_running(each["pid"], each["start_time"])]


def snapshot_folder(node_dir: str, spec: Optional[Mapping[str, Any]] = None) -> str:
    """Return the snapshot folder of the workers of a spec, by default of the node's present one."""
    spec = load_spec(node_dir) if spec is None else spec
    folder: str = spec.get("env", {}).get("NODEKIT_SNAPSHOT_DIR", os.path.join(node_dir, "snapshots"))
    return folder


def newest_snapshot(folder: str) -> List[int]:
    """Return (generation, step) of the newest committed snapshot in a folder; (-1, 0) without one.

    For up to `HELD_S` after the last good answer, return that one if the folder cannot be listed.

    Raises:
        OSError: the newest snapshot is unknown; the node counts as unreachable.
    """
    try:
        names = files.retried(lambda: os.listdir(folder))
    except files.NOT_FOUND:
        names = []
    except OSError as error:
        last, at = _last_snapshots.get(folder, ([], 0.0))
        if last and time.monotonic() - at < HELD_S:
            return last
        why = "%s; which snapshot is the newest there is not known" % error.strerror
        raise OSError(error.errno, why, folder) from error
    found = (_SNAPSHOT.fullmatch(name) for name in names)
    newest = list(max(((int(each[1]), int(each[2])) for each in found if each), default=(-1, 0)))
    _last_snapshots[folder] = newest, time.monotonic()
    return newest
