"""Keep the current status of each node in a file of events: one line of kind ``status``, rewritten in place.

All other lines are only appended, so that offsets stay valid: a status line is padded with room to grow, and if that is
too little, another line at the end of the file replaces it. A torn read fails the line's CRC and is retried.
"""

from __future__ import annotations

import binascii
import errno
import json
import os
import threading
import time
from typing import Dict, List, Mapping, Optional, cast

from nodekit.deploy.host import files
from nodekit.deploy.host.schema import NodeStatus

KIND = "status"
MOVED = "status-moved"  # the kind of a line that was replaced by another, for lack of room
_BEGIN = b'{"kind": "%s", ' % KIND.encode()
_SUM = b', "sum": '
_ROOM_BYTES = 1024
_BEGIN_BYTES = 200  # how much of its first event identifies a file
_READS = 5
_REST_S = 0.001


def encode(fields: Mapping[str, object], kind: str = KIND) -> bytes:
    """Return the line of a status without a newline: the kind first, and last the CRC-32 of everything before."""
    told = {name: value for name, value in fields.items() if name not in ("kind", "sum")}
    body = json.dumps(dict(kind=kind, **told)).encode()[:-1]
    return body + _SUM + b"%d}" % binascii.crc32(body)


def decode(line: bytes) -> Optional[NodeStatus]:
    """Parse the line of a status; None for any other line, and for a torn one."""
    body, _, told = line.rstrip().rpartition(_SUM)
    if not body.startswith(_BEGIN) or told != b"%d}" % binascii.crc32(body):
        return None
    try:
        return cast(NodeStatus, json.loads(body + b"}"))
    except (ValueError, RecursionError):
        return None  # its CRC is right, but kit has not written it


class StatusFile:
    """The statuses in one file, for any number of readers and one writer at a time; safe for threads."""

    def __init__(self, path: str) -> None:
        """Read nothing yet; the file need not exist."""
        self._path = path
        self._lock = threading.Lock()
        self._begin = b""  # the beginning of the first event
        self._end = 0  # how far the file was searched for lines
        self._lines: List[_Line] = []

    def read(self) -> Dict[str, NodeStatus]:
        """Return node → status; {} without a file.

        Raises:
            OSError: the file cannot be read.
        """
        with self._lock:
            try:
                files.check_regular(self._path)
                handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except files.NOT_FOUND:
                return {}
            try:
                self._look_through(handle)
                self._lines = [line for line in self._lines if line.is_read(handle)]
                return {line.said["node"]: line.said.copy() for line in self._lines if line.said}
            finally:
                os.close(handle)

    def write(self, fields: Mapping[str, object]) -> None:
        """Write the status of a node; `fields` must have ``run``, ``time`` and ``node``.

        Raises:
            OSError: the file has no event yet, or the disk is full.
        """
        data = encode(fields)
        with self._lock:
            handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._look_through(handle)
                own = [line for line in self._lines if line.said and line.said["node"] == fields["node"]]
                if own and len(data) < own[-1].length:
                    own[-1].write(handle, data)
                else:
                    self._add(data)
                    if own:
                        which = {name: fields.get(name) for name in ("run", "time", "node")}
                        own[-1].write(handle, encode(which, MOVED))
                        self._lines.remove(own[-1])
                os.utime(handle)  # wakes hostfollow, which watches for this, and so not for every event
            finally:
                os.close(handle)

    def _add(self, data: bytes) -> None:
        room = _ROOM_BYTES
        while room < len(data) * 1.25:
            room *= 2
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if not size:  # the first line identifies the file, so it must be an event, which never changes
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), self._path)
            # Ends a line that a crash has torn.
            end = b"" if os.pread(handle, 1, size - 1) == b"\n" else b"\n"
            files.append_whole(handle, end + data.ljust(room - 1) + b"\n", self._path)
        finally:
            os.close(handle)

    def _look_through(self, handle: int) -> None:
        """Find the status lines that were added since the last call."""
        size = os.fstat(handle).st_size
        begin = os.pread(handle, _BEGIN_BYTES, 0).partition(b"\n")[0]
        if begin != self._begin or size < self._end:  # another file
            self._begin, self._end, self._lines = begin, 0, []
        if size == self._end:
            return
        with open(handle, "rb", closefd=False) as file:
            file.seek(self._end)
            for data in file:
                if not data.endswith(b"\n"):
                    break  # it is being written
                if data.startswith(_BEGIN):
                    self._lines.append(_Line(self._end, data))
                self._end += len(data)


class _Line:
    """The place of one status line in the file, and its last known status."""

    def __init__(self, place: int, data: bytes) -> None:
        self.length = len(data)
        self.said = decode(data)
        self._place = place

    def is_read(self, handle: int) -> bool:
        """Read the line again; False if another line has replaced it."""
        for _ in range(_READS):
            data = os.pread(handle, self.length, self._place)
            if not data.startswith(_BEGIN):
                return False
            self.said = decode(data) or self.said
            if self.said is not None:
                break
            time.sleep(_REST_S)
        return True

    def write(self, handle: int, data: bytes) -> None:
        os.pwrite(handle, data.ljust(self.length - 1), self._place)


_files: Dict[str, StatusFile] = {}


def of(folder: str) -> StatusFile:
    """Return the `StatusFile` of a folder's file of events, the same object for the life of this process."""
    return _files.setdefault(folder, StatusFile(os.path.join(folder, "events.jsonl")))


def statuses(folder: str) -> Dict[str, NodeStatus]:
    """Return node → status from a folder's file of events; {} without one."""
    return of(os.path.expanduser(folder)).read()
