"""Follow one node: send its status, its events and the new lines of its ranks' logs as they are written."""

from __future__ import annotations

import errno
import glob
import importlib
import json
import os
import select
import struct
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from nodekit.deploy.host.node import status
from nodekit.deploy.host.schema import AgentRecord, NodeStatus

LOG_CHUNK_BYTES = 256 * 1024  # of one file in one message: a flood of output must not delay the status
_POLL_S = 0.2
_BEAT_S = 1.0  # the status is looked at, and sent, at least so often
_SWEEP_S = 5.0  # all is looked at, whether it seems to have changed or not
# While ranks train their node's status is rewritten every second, and that ends a rest: this is for when it is not.
_CALM_S = 1.25
_IN_ATTRIB, _IN_MOVED_TO = 0x04, 0x80  # of linux/inotify.h


def logs(
    node_dir: str,
    offsets: Optional[Mapping[str, int]] = None,
    tail_bytes: Optional[int] = None,
    final: bool = False,
) -> Tuple[Dict[str, int], List[Tuple[str, str]]]:
    """New whole lines of each log file since `offsets`: ``(new offsets, [[file, text], ...])``.

    With `tail_bytes`, a file seen for the first time starts that far before its end. `final`: nothing more will
    be written, so a last line without its newline is given one.
    """
    new = dict(offsets or {})
    found: List[Tuple[str, str]] = []
    folder = os.path.join(os.path.expanduser(node_dir), "logs")
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.log"))):
        name = os.path.basename(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = new.get(name)
                if start is None:
                    start = max(0, size - tail_bytes) if tail_bytes is not None else 0
                if size < start:
                    start = 0  # somebody has emptied it, and its rank has begun anew
                if size == start:
                    new[name] = start
                    continue
                begin, data = read_data(file.fileno(), start, LOG_CHUNK_BYTES)
        except FileNotFoundError:
            continue  # of an earlier attempt, and removed for want of room
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if whole == 0 and len(data) == LOG_CHUNK_BYTES:
            whole = len(data)  # one endless line
        new[name] = begin + whole
        is_cut = len(data) < LOG_CHUNK_BYTES and begin + len(data) < size  # by a hole that begins there
        if whole < len(data) and (is_cut or (final and begin + len(data) == size)):
            new[name] = begin + len(data)
            data += b"\n"
            whole = len(data)
        if whole or begin > start:
            text = data[:whole].decode("utf-8", "replace")
            if begin > start:
                text = left_out(begin - start) + "\n" + text.partition("\n")[2]
            found.append((name, text))
    return new, found


def read_data(handle: int, start: int, limit: int) -> Tuple[int, bytes]:
    """Where the next data of a file is, from `start` on, and at most `limit` bytes of it: holes are passed over.

    Without data it is where the file ends.
    """
    while True:
        try:
            begin = os.lseek(handle, start, os.SEEK_DATA)
            data = os.pread(handle, limit, begin)
            # Asked again now that it is read: what has become a hole meanwhile was no data.
            if os.lseek(handle, begin, os.SEEK_DATA) == begin:
                return begin, data[: os.lseek(handle, begin, os.SEEK_HOLE) - begin]
        except OSError as error:
            if error.errno != errno.ENXIO:  # there is none
                raise
            return max(start, os.fstat(handle).st_size), b""


def left_out(num_bytes: int) -> str:
    """What stands for so much of a log that is not kept."""
    amount = "%.0f MB" % (num_bytes / 1e6) if num_bytes >= 1e7 else "%.1f MB" % (num_bytes / 1e6)
    return "… %s left out …" % amount


def follow(
    node_dir: str,
    part: Callable[[Any], None],
    offsets: Optional[Mapping[str, int]] = None,
    tail_bytes: Optional[int] = None,
    events_at: Optional[Sequence[Any]] = None,
) -> NodeStatus:
    """Send status and new log lines as they come, a message every second or so at least, until the agent is gone.

    And new events since `events_at`, where it is given. Of the logs' offsets a message has those that have changed,
    None before the logs were read. While ranks train it looks about once a second: each look takes its share of a core
    from them.
    """
    node_dir = os.path.expanduser(node_dir)
    now: NodeStatus = {}
    last_status: Optional[NodeStatus] = None
    snapshots, agent = "", None
    last_sent, last_looked, last_swept = 0.0, 0.0, 0.0
    changes, alarm = _Changes(node_dir), _Alarm(node_dir)
    more: Set[str] = set()
    try:
        while True:
            changed = changes.look() | more
            if "folder" in changed:
                agent = status.agent_record(node_dir)
            # Asked before the logs are read: what was written last is not missed.
            alive = status.pid_if_alive(agent) is not None or status.agent_alive(node_dir) is not None
            begun = time.monotonic()
            if not alive or begun - last_swept >= _SWEEP_S:
                changed = {"folder", "events", "logs"}
                last_swept = begun
            elif begun - last_looked >= _BEAT_S:
                changed.add("status" if alarm.hears else "folder")
            if not changed:
                more = alarm.wait(agent, now)
                continue
            lines: List[Tuple[str, str]] = []
            moved: Optional[Dict[str, int]] = None if offsets is None else {}
            if "logs" in changed:
                before = offsets or {}
                offsets, lines = logs(node_dir, before, tail_bytes, final=not alive)
                moved = {name: at for name, at in offsets.items() if before.get(name) != at}
            found: List[List[Any]] = []
            if "events" in changed and events_at is not None:
                found = events(node_dir, *events_at)
                events_at = found[-1][:2] if found else events_at
            if "folder" in changed:
                now, snapshots = status.status(node_dir), status.snapshot_folder(node_dir)
                now["alive"] = alive = alive or bool(now["alive"])  # by now there may be another agent
                last_looked = begun
            elif "status" in changed:
                now = _said_now(node_dir, now, snapshots)
                last_looked = begun
            if lines or found or now != last_status or begun - last_sent >= _BEAT_S:
                part({"status": now, "logs": lines, "offsets": moved, "events": found, "time": time.time()})
                last_status, last_sent = now, begun
            if not alive and not lines and not found:
                return now
            # Of one file only so much is read at a time; a full reading may be a quarter as many characters.
            size = sum(len(text) for _, text in lines) + sum(len(line) for _, _, line in found)
            is_more = not alive or size > LOG_CHUNK_BYTES // 8
            more = {"events", "logs"} if is_more else alarm.wait(agent, now)
    finally:
        alarm.close()


def _said_now(node_dir: str, before: NodeStatus, snapshots: str) -> NodeStatus:
    """What its agent says now, with what the host said before: no file of the folder was replaced since."""
    found = status.said(node_dir)
    found["snapshot"] = status.newest_snapshot(snapshots)
    for name in ("alive", "known", "fence", "granted", "agent"):
        found[name] = before[name]
    return found


class _Alarm:
    """Ends a rest as soon as a node's status is written, a file of its folder is replaced, or its agent has ended.

    So there is little to look at in between: while ranks train each look takes its share of a core from them.
    """

    def __init__(self, node_dir: str) -> None:
        self.hears = False
        """Whether it was told of what changed there, in the last rest."""
        self._node_dir = node_dir
        self._is_set = False
        self._handle: Optional[int] = None

    def _set(self) -> None:
        self._is_set = True
        try:
            libc = importlib.import_module("ctypes").CDLL(None)
            handle: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if handle >= 0:
                self._handle = handle
                if libc.inotify_add_watch(handle, os.fsencode(self._node_dir), _IN_ATTRIB | _IN_MOVED_TO) < 0:
                    self.close()
        except (ImportError, OSError, AttributeError):  # no ctypes in this python, or no inotify
            pass

    def wait(self, agent: Optional[AgentRecord], now: NodeStatus) -> Set[str]:
        """Rest; what has changed there, as of `_Changes`, since the rest before if there was one."""
        if not self._is_set:
            self._set()
            return {"folder"}  # what has changed before it was set
        self.hears = False
        try:
            end: int = os.pidfd_open(agent["pid"])  # type: ignore[attr-defined, index, unused-ignore]
        except (AttributeError, TypeError, OSError):  # Python 3.8, no agent, a kernel older than 5.3
            time.sleep(_POLL_S)
            return set()
        try:
            ends = select.poll()
            for handle in (end, self._handle):
                if handle is not None:
                    ends.register(handle, select.POLLIN)
            is_calm = self._handle is not None and now.get("state") == "running"
            fired = dict(ends.poll((_CALM_S if is_calm else _POLL_S) * 1000))
        finally:
            os.close(end)
        self.hears = self._handle is not None
        if self._handle is None or self._handle not in fired:
            return set()
        heard, is_moved, at = os.read(self._handle, 1 << 16), False, 0
        while at < len(heard):  # struct inotify_event
            _, mask, _, length = struct.unpack_from("iIII", heard, at)
            is_moved |= not mask & _IN_ATTRIB
            at += 16 + length
        return {"folder"} if is_moved else {"status"}

    def close(self) -> None:
        """Hear no more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _Changes:
    """What of a node's folder has changed since it was looked at last, told by a few calls of `stat`.

    Reading all of it several times a second would take a core's share from the job. A file that is replaced shows as
    a change of its folder. A change within the same tick of the file system's clock may be missed.
    """

    def __init__(self, node_dir: str) -> None:
        self._node_dir = node_dir
        self._logs: List[str] = []
        self._last: Dict[str, Any] = {}

    def look(self) -> Set[str]:
        """Of ``folder`` (a file there was replaced), ``status``, ``events`` and ``logs`` those that have changed."""
        folder = os.path.join(self._node_dir, "logs")
        listed = _changed(folder)
        if listed != self._last.get("listed"):
            self._logs = glob.glob(os.path.join(glob.escape(folder), "*.log"))
        events_file = _changed(os.path.join(self._node_dir, "events.jsonl"))
        now: Dict[str, Any] = {
            "listed": listed,
            "folder": _changed(self._node_dir),
            "status": events_file,  # it is rewritten among the events
            "events": events_file and events_file[1],
            "logs": [listed, *map(_changed, self._logs)],
        }
        found = {name for name in ("folder", "status", "events", "logs") if now[name] != self._last.get(name)}
        self._last = now
        return found


def _changed(path: str) -> Optional[Tuple[int, int]]:
    try:
        found = os.stat(path)
    except OSError:  # not there yet, or just removed
        return None
    return found.st_mtime_ns, found.st_size


def events(node_dir: str, file: str = "", offset: int = 0) -> List[List[Any]]:
    """A node's events since `offset` of its `file`, all where that is another: ``[[file, where it ends, line]]``.

    A file is known by the time of its first event: a node whose disk is new begins another. So does one that a power
    loss has left shorter than it was read: an empty line says where, and what comes then is of ``FILE@BYTES``.
    """
    found: List[List[Any]] = []
    try:
        with open(os.path.join(os.path.expanduser(node_dir), "events.jsonl"), "rb") as events_file:
            try:
                name = repr(json.loads(events_file.readline())["time"])
            except (ValueError, KeyError, TypeError):
                name = "?"
            is_same = file.partition("@")[0] == name
            name, place = (file, offset) if is_same else (name, 0)
            size = events_file.seek(0, os.SEEK_END)
            if place > size:
                name, place = "%s@%d" % (name, size), size
                found.append([name, place, ""])
            events_file.seek(place)
            # A line may be longer than that.
            data = events_file.read(LOG_CHUNK_BYTES) + events_file.readline()
    except OSError:
        return found
    for line in data[: data.rfind(b"\n") + 1].splitlines(True):
        place += len(line)
        found.append([name, place, line.decode("utf-8", "replace")])
    return found
