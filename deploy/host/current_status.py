"""Keep the current status of each node in a file of events: one line of kind ``status``, rewritten in place.

All other lines are only appended, so readers that go by offset are not disturbed: a status line has room to grow, and
where that is too little another line further on takes its place. A torn read fails the line's CRC and is retried.
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
MOVED = "status-moved"  # what is left where a line had too little room
_BEGIN = b'{"kind": "%s", ' % KIND.encode()
_SUM = b', "sum": '
_ROOM_BYTES = 1024
_BEGIN_BYTES = 200  # so much of its first event tells a file from another
_READS = 5
_REST_S = 0.001


def encode(fields: Mapping[str, object], kind: str = KIND) -> bytes:
    """The line of a status, without its newline: its kind comes first, and last the CRC-32 of all before."""
    told = {name: value for name, value in fields.items() if name not in ("kind", "sum")}
    body = json.dumps(dict(kind=kind, **told)).encode()[:-1]
    return body + _SUM + b"%d}" % binascii.crc32(body)


def decode(line: bytes) -> Optional[NodeStatus]:
    """A status from its line; None for any other line, and for one that is torn."""
    body, _, told = line.rstrip().rpartition(_SUM)
    if not body.startswith(_BEGIN) or told != b"%d}" % binascii.crc32(body):
        return None
    try:
        return cast(NodeStatus, json.loads(body + b"}"))
    except (ValueError, RecursionError):
        return None  # nobody has torn it, and kit has not written it


class StatusFile:
    """The statuses in one file: read by anyone, written by one at a time. It may be used by several threads."""

    def __init__(self, path: str) -> None:
        """Nothing is read yet, and the file need not be there."""
        self._path = path
        self._lock = threading.Lock()
        self._begin = b""  # of the first event
        self._end = 0  # how far it was looked through for lines
        self._lines: List[_Line] = []

    def read(self) -> Dict[str, NodeStatus]:
        """Each node's; none without a file.

        Raises:
            OSError: it cannot be read.
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
        """Have a status stand for its node: of ``run``, ``time``, ``node`` and whatever else.

        Raises:
            OSError: no event is there yet, or no room for it.
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
                os.utime(handle)  # by which hostfollow is woken: once a second, not by each event as well
            finally:
                os.close(handle)

    def _add(self, data: bytes) -> None:
        room = _ROOM_BYTES
        while room < len(data) * 1.25:
            room *= 2
        handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if not size:  # a file is known by its first event, which is not to change
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), self._path)
            end = b"" if os.pread(handle, 1, size - 1) == b"\n" else b"\n"  # of a line that a crash has torn
            files.append_whole(handle, end + data.ljust(room - 1) + b"\n", self._path)
        finally:
            os.close(handle)

    def _look_through(self, handle: int) -> None:
        """Find the lines of what was added since."""
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
    """Where one is, and what it said when it was read last."""

    def __init__(self, place: int, data: bytes) -> None:
        self.length = len(data)
        self.said = decode(data)
        self._place = place

    def is_read(self, handle: int) -> bool:
        """Read it again; False: it has moved."""
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
    """That of the file of events in a folder; what was found out about the file is kept as long as this process is."""
    return _files.setdefault(folder, StatusFile(os.path.join(folder, "events.jsonl")))


def statuses(folder: str) -> Dict[str, NodeStatus]:
    """Each node's status, of the file of events in a folder; none without one."""
    return of(os.path.expanduser(folder)).read()
