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

# The most of one file in one message: a flood of output must not delay the status.
LOG_CHUNK_BYTES = 256 * 1024
_POLL_S = 0.2
_BEAT_S = 1.0  # the longest time between two readings, and two messages, of the status
_SWEEP_S = 5.0  # the longest time between two readings of everything, whether it seems to have changed or not
# The longest wait while ranks train: usually the status, rewritten every second, ends it before.
_CALM_S = 1.25
_IN_ATTRIB, _IN_MOVED_TO = 0x04, 0x80  # of linux/inotify.h


def logs(
    node_dir: str,
    offsets: Optional[Mapping[str, int]] = None,
    tail_bytes: Optional[int] = None,
    final: bool = False,
) -> Tuple[Dict[str, int], List[Tuple[str, str]]]:
    """Return the new whole lines of each log file since `offsets`: ``(new offsets, [[file, text], ...])``.

    With `tail_bytes`, a file that has no offset yet is read from that far before its end. With `final` nothing more
    will be written, so a last line without a newline is returned too, with one.
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
                    start = 0  # the file was truncated, and its rank writes from the beginning
                if size == start:
                    new[name] = start
                    continue
                begin, data = read_data(file.fileno(), start, LOG_CHUNK_BYTES)
        except FileNotFoundError:
            continue  # a log of an earlier attempt, removed to stay within the bound
        whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if whole == 0 and len(data) == LOG_CHUNK_BYTES:
            whole = len(data)  # a line longer than a chunk
        new[name] = begin + whole
        is_cut = len(data) < LOG_CHUNK_BYTES and begin + len(data) < size  # a hole begins there
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
    """Return the offset of the next data of a file from `start` on, skipping holes, and at most `limit` bytes of it.

    If there is no more data, the offset is the end of the file.
    """
    while True:
        try:
            begin = os.lseek(handle, start, os.SEEK_DATA)
            data = os.pread(handle, limit, begin)
            # Ask again after reading: if a hole was made meanwhile, the bytes were not data.
            if os.lseek(handle, begin, os.SEEK_DATA) == begin:
                return begin, data[: os.lseek(handle, begin, os.SEEK_HOLE) - begin]
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: no data from there on
                raise
            return max(start, os.fstat(handle).st_size), b""


def left_out(num_bytes: int) -> str:
    """Return the line that replaces so many bytes of a log that were not kept."""
    amount = "%.0f MB" % (num_bytes / 1e6) if num_bytes >= 1e7 else "%.1f MB" % (num_bytes / 1e6)
    return "… %s left out …" % amount


def follow(
    node_dir: str,
    part: Callable[[Any], None],
    offsets: Optional[Mapping[str, int]] = None,
    tail_bytes: Optional[int] = None,
    events_at: Optional[Sequence[Any]] = None,
) -> NodeStatus:
    """Send status and new log lines as they appear, and a message at least about every second, until the agent ends.

    With `events_at`, also send new events since then. A message has the offsets of those logs that have grown, or None
    before the logs were first read. While ranks train, read about once a second: each reading takes CPU time from them.
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
            # Check this before reading the logs, so that the last lines are not missed.
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
                now["alive"] = alive = alive or bool(now["alive"])  # another agent may have started
                last_looked = begun
            elif "status" in changed:
                now = _said_now(node_dir, now, snapshots)
                last_looked = begun
            if lines or found or now != last_status or begun - last_sent >= _BEAT_S:
                part({"status": now, "logs": lines, "offsets": moved, "events": found, "time": time.time()})
                last_status, last_sent = now, begun
            if not alive and not lines and not found:
                return now
            # A reading of one file is limited to a chunk, and a full one may have only a quarter as many characters.
            size = sum(len(text) for _, text in lines) + sum(len(line) for _, _, line in found)
            is_more = not alive or size > LOG_CHUNK_BYTES // 8
            more = {"events", "logs"} if is_more else alarm.wait(agent, now)
    finally:
        alarm.close()


def _said_now(node_dir: str, before: NodeStatus, snapshots: str) -> NodeStatus:
    """Return the agent's present status; keep the host's fields, as no file of the folder was replaced since."""
    found = status.said(node_dir)
    found["snapshot"] = status.newest_snapshot(snapshots)
    for name in ("alive", "known", "fence", "granted", "agent"):
        found[name] = before[name]
    return found


class _Alarm:
    """A wait that ends when a node's status is written, a file of its folder is replaced, or its agent has ended.

    Less polling is needed with it: while ranks train, each reading takes CPU time from them.
    """

    def __init__(self, node_dir: str) -> None:
        self.hears = False
        """Whether inotify reported the changes during the last wait."""
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
        """Wait; return what has changed since the wait before, by the names of `_Changes`."""
        if not self._is_set:
            self._set()
            return {"folder"}  # changes from before inotify was set up
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
        """Close the inotify descriptor."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class _Changes:
    """Detects by a few calls of `stat` what has changed in a node's folder since the last look.

    Reading all files several times a second would take CPU time from the job. A file that is replaced changes its
    folder. A change within the same tick of the file system's clock may be missed.
    """

    def __init__(self, node_dir: str) -> None:
        self._node_dir = node_dir
        self._logs: List[str] = []
        self._last: Dict[str, Any] = {}

    def look(self) -> Set[str]:
        """Return which of ``folder`` (a file was replaced), ``status``, ``events`` and ``logs`` have changed."""
        folder = os.path.join(self._node_dir, "logs")
        listed = _changed(folder)
        if listed != self._last.get("listed"):
            self._logs = glob.glob(os.path.join(glob.escape(folder), "*.log"))
        events_file = _changed(os.path.join(self._node_dir, "events.jsonl"))
        now: Dict[str, Any] = {
            "listed": listed,
            "folder": _changed(self._node_dir),
            "status": events_file,  # its line in the file of events is rewritten
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
    """Return a node's events since `offset` of `file`: ``[[file, offset of the line's end, line]]``.

    A file is named by the time of its first event. If the name differs from `file`, as on a new disk, all events are
    returned. If a power loss has made the file shorter than `offset`, an empty line marks the place, and further events
    are those of ``FILE@BYTES``. If it has spoilt the first event, the file counts as the same.
    """
    found: List[List[Any]] = []
    try:
        with open(os.path.join(os.path.expanduser(node_dir), "events.jsonl"), "rb") as events_file:
            try:
                name = repr(json.loads(events_file.readline())["time"])
            except (ValueError, KeyError, TypeError):
                name = "?"
            is_same = bool(file) and name in ("?", file.partition("@")[0])
            name, place = (file, offset) if is_same else (name, 0)
            size = events_file.seek(0, os.SEEK_END)
            if place > size:
                name, place = "%s@%d" % (name, size), size
                found.append([name, place, ""])
            events_file.seek(place)
            # A line may be longer than a chunk.
            data = events_file.read(LOG_CHUNK_BYTES) + events_file.readline()
    except OSError:
        return found
    for line in data[: data.rfind(b"\n") + 1].splitlines(True):
        place += len(line)
        found.append([name, place, line.decode("utf-8", "replace")])
    return found
