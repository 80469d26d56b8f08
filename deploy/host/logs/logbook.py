"""Record when each line of the ranks' logs was written, and bound the logs' size; standard library, Python 3.8.

A rank writes directly into its file, since it must not stop when its agent does. So lines have no times of their own.
Instead, a thread of the agent records the length of each file over time (``rank0-attempt0.1.times``), which dates a
line to within half a second. If the logs of a node exceed their bound, those of earlier attempts are removed first,
then a hole is made in the middle of the present ones. A hole moves no byte: offsets in the file stay valid, and its
writer is not affected.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import ctypes
import errno
import os
import re
import struct
import sys
import threading
import time
from typing import Callable, List, Optional, Sequence, Tuple

from nodekit.deploy.host import files, processes
from nodekit.deploy.host.schema import Say

LOOK_S = 2.0  # between two looks of the thread; while ranks train, the agent calls `look` four times as often
CLOCK_SET_S = 5.0  # times of lines are not corrected if the clock was set back by less
CHECK_S = 5.0  # between two checks of the logs' size
HEAD_BYTES = 1 << 20  # the beginning of each log that is always kept: versions, settings, the first steps
MAX_MARKS = 1 << 16  # the most marks of one log: 1.5 MB
BLOCK_BYTES = 1 << 16  # a hole consists of whole blocks of the file system

_NAME = re.compile(r"rank(\d+)-attempt(\d+)\.(\d+)\.(log|times)")
_MARK = struct.Struct("<ddd")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def parse_name(name: str) -> Optional[Tuple[int, Tuple[int, int]]]:
    """Return rank and attempt from the name of a log; None for another file."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), (int(found[2]), int(found[3]))) if found and found[4] == "log" else None


def marks_of(log: str) -> str:
    """Return the path of a log's marks."""
    return os.path.splitext(log)[0] + ".times"


# --- marks --------------------------------------------------------------------------------------------------


class Marks:
    """When a log was written: the bytes up to `offsets[i]`, between the times `begins[i]` and `ends[i]`."""

    def __init__(self, data: bytes = b"") -> None:
        """Parse a file's bytes; a last mark that a crash has torn is ignored."""
        values = array.array("d", data[: len(data) // _MARK.size * _MARK.size])
        if sys.byteorder == "big":
            values.byteswap()
        self.offsets, self.begins, self.ends = values[0::3], values[1::3], values[2::3]

    def __len__(self) -> int:
        return len(self.offsets)

    def time_of(self, end: int, otherwise: float) -> float:
        """Return when the line that ends at byte `end` was written; `otherwise` if no mark covers it yet."""
        place = bisect.bisect_left(self.offsets, end)
        if place == len(self):
            return max([otherwise, *self.ends[-1:]])
        begin, last = self.begins[place], self.ends[place]
        if begin == last:
            return last
        before = self.offsets[place - 1] if place else 0.0
        return begin + (last - begin) * (end - before) / (self.offsets[place] - before)

    def before(self, when: float) -> int:
        """Return an offset up to which everything was written before `when`."""
        place = bisect.bisect_left(self.ends, when)
        return int(self.offsets[place - 1]) if place else 0

    def merged(self, most: int) -> "Marks":
        """Return at most `most` marks: keep the newest `most // 4`, and merge older ones into spans of equal time."""
        if len(self) <= most:
            return self
        keep = most // 4
        old = len(self) - keep
        span = (self.ends[old - 1] - self.begins[0]) / (most // 2) or 1.0
        found: List[Tuple[float, float, float]] = []
        for place in range(old):
            offset, begin, end = self.offsets[place], self.begins[place], self.ends[place]
            if found and end - found[-1][1] < span:
                found[-1] = (offset, found[-1][1], end)
            else:
                found.append((offset, begin, end))
        result = Marks(b"".join(_MARK.pack(*each) for each in found))
        result.offsets += self.offsets[old:]
        result.begins += self.begins[old:]
        result.ends += self.ends[old:]
        return result

    def to_bytes(self) -> bytes:
        """Return the marks as bytes, in the format of the file."""
        return b"".join(map(_MARK.pack, self.offsets, self.begins, self.ends))


def read_marks(log: str, since: int = 0) -> Marks:
    """Read the marks of a log, at least those after byte `since`; none if there is no such file."""
    try:
        with open(marks_of(log), "rb") as file:
            size = os.fstat(file.fileno()).st_size // _MARK.size * _MARK.size
            begin = max(0, size - 200 * _MARK.size)
            file.seek(begin)
            last = Marks(file.read(size - begin))
            if begin == 0 or (len(last) and last.offsets[0] <= since):
                return last
            file.seek(0)
            return Marks(file.read(size))
    except OSError:
        return Marks()


def first_time(log: str) -> Optional[float]:
    """Return when the first bytes of a log were written; None if unknown."""
    try:
        with open(marks_of(log), "rb") as file:
            found = Marks(file.read(_MARK.size))
    except OSError:
        return None
    return found.begins[0] if len(found) else None


# --- the agent's side ---------------------------------------------------------------------------------------


class _Log:
    """One log of the present attempt."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self.when = 0.0
        self.num_marks = 0
        self.was_cut = False
        marks = read_marks(path)
        if len(marks):
            self.size, self.when = int(marks.offsets[-1]), marks.ends[-1]
            self.num_marks = os.path.getsize(marks_of(path)) // _MARK.size

    def mark(self, size: int, when: float) -> None:
        """Record that the log had `size` bytes at the time `when`."""
        handle = os.open(marks_of(self.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:  # not by appending, so that the next mark overwrites one that a full disk or a crash has torn
            if os.pwrite(handle, _MARK.pack(size, when, when), self.num_marks * _MARK.size) < _MARK.size:
                raise OSError(errno.ENOSPC, "the disk is full")
        finally:
            os.close(handle)
        self.size, self.when = size, when
        self.num_marks += 1


class Logbook:
    """Dates the logs of one node, and keeps their size within a bound."""

    def __init__(self, folder: str, keep_bytes: int, say: Say) -> None:
        """Do nothing before `begin`.

        Args:
            folder: the node's logs.
            keep_bytes: the bound of all logs together.
            say: writes an event.
        """
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._say = say
        self._logs: List[_Log] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._looked = 0.0
        self._clock_ahead_s = processes.clock_ahead_s()
        self._checked = 0.0
        self._grown = 0
        self._can_punch = True
        self._thread: Optional[threading.Thread] = None

    def begin(self, paths: Sequence[str]) -> None:
        """Watch these logs from now on, those of a new attempt."""
        self.look()
        with self._lock:
            self._logs = [_Log(path) for path in paths]
            self._looked = 0.0
        self._safely(self.bound)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="logbook", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look a last time, and end the thread."""
        self._closing.set()
        self.look()

    def look(self) -> None:
        """Record the length of each log that has changed."""
        self._safely(self._look)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.look()
            if time.monotonic() - self._checked > CHECK_S or self._grown > self._keep_bytes // 16:
                self._safely(self.bound)

    def _safely(self, function: Callable[[], None]) -> None:
        try:
            with self._lock:
                function()
        except OSError:
            pass  # a full disk, or a removed folder: the job goes on without this

    def _look(self) -> None:
        now, ahead_s = time.time(), processes.clock_ahead_s()
        if ahead_s < self._clock_ahead_s - CLOCK_SET_S:
            self._move(ahead_s - self._clock_ahead_s)
        self._clock_ahead_s = ahead_s
        for log in self._logs:
            try:
                found = os.stat(log.path)
            except FileNotFoundError:
                continue  # its rank has not started
            if found.st_size < log.size:  # the log was truncated: its marks are of lines that are gone
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(marks_of(log.path))
                log.size, log.num_marks = 0, 0
            if found.st_size == log.size:
                continue
            # The last bytes were written since the last look, whatever the clock of a file server says.
            when = max(log.when, min(max(found.st_mtime, self._looked), now))
            self._grown += found.st_size - log.size
            log.mark(found.st_size, when)
            if log.num_marks > MAX_MARKS:
                with open(marks_of(log.path), "rb") as file:
                    merged = Marks(file.read()).merged(MAX_MARKS * 3 // 4)
                files.write_private(marks_of(log.path), merged.to_bytes())
                log.num_marks = len(merged)
        self._looked = now

    def _move(self, seconds: float) -> None:
        """Give the marks of this node the times that its clock, which was set back, would have shown then.

        Else all that is written until the clock is where it was would have the time of that one moment.
        """
        for path in [os.path.join(self._folder, name) for name in files.names(self._folder)]:
            if not path.endswith(".times"):
                continue
            with contextlib.suppress(OSError):
                marks = Marks(files.read(path))
                for times in (marks.begins, marks.ends):
                    times[:] = array.array("d", [each + seconds for each in times])
                files.write_private(path, marks.to_bytes())
        self._looked += seconds
        for log in self._logs:
            log.when += seconds

    # --- bounds ---

    def bound(self) -> None:
        """Reduce the logs to the bound: remove earlier attempts first, then the middle of the present logs."""
        self._checked, self._grown = time.monotonic(), 0
        sizes = {entry.name: entry.stat().st_blocks * 512 for entry in os.scandir(self._folder)}
        total = sum(sizes.values())
        if total <= self._keep_bytes:
            return
        present = {os.path.basename(log.path) for log in self._logs}
        earlier = sorted((found[1], found[0], name) for name in sizes if (found := parse_name(name)))
        removed = []
        for _, _, name in earlier:
            if total <= self._keep_bytes or name in present:
                continue
            for each in (name, os.path.basename(marks_of(name))):
                if each in sizes:
                    os.unlink(os.path.join(self._folder, each))
                    total -= sizes[each]
            removed.append(name)
        if removed:
            self._say("logs-removed", files=removed[-100:], bound=self._keep_bytes)
        share = self._keep_bytes // max(1, len(self._logs))
        for log in self._logs:
            if total > self._keep_bytes and sizes.get(os.path.basename(log.path), 0) > share:
                total -= self._cut(log, share)

    def _cut(self, log: _Log, share: int) -> int:
        """Make a hole in the middle of a log; return the bytes that this freed."""
        if not self._can_punch:
            return 0
        head = min(HEAD_BYTES, share // 8)
        handle = os.open(log.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.fstat(handle)
            # Keep three quarters of its share only, or a small hole would be needed at every check.
            end = before.st_size - (share * 3 // 4 - head)
            if not punch(handle, head, end):
                return 0
            freed = (before.st_blocks - os.fstat(handle).st_blocks) * 512
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM):
                raise
            self._can_punch = False
            why = "%s: its file system cannot leave out the middle of a file" % (error.strerror or error)
            self._say("logs-not-bounded", file=os.path.basename(log.path), bound=self._keep_bytes, why=why)
            return 0
        finally:
            os.close(handle)
        if not log.was_cut:
            log.was_cut = True
            self._say("logs-cut", file=os.path.basename(log.path), bound=self._keep_bytes)
        return freed


def punch(handle: int, begin: int, end: int) -> bool:
    """Make a hole in a file, of the whole blocks between `begin` and `end`; False if there are none.

    Raises:
        OSError: EOPNOTSUPP and others if the file system does not support holes.
    """
    block = max(BLOCK_BYTES, os.fstat(handle).st_blksize)
    begin, end = -(-begin // block) * block, end // block * block
    if end <= begin:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if fallocate is None:
        raise OSError(errno.ENOSYS, "no fallocate")
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, begin, end - begin) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True
