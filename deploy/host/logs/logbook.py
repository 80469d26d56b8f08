"""When each line of the ranks' logs was written, and how much of the logs is kept; standard library, Python 3.8.

A rank writes straight into its file and nothing stands between: it must not stop because its agent has. So lines
have no times of their own. A thread of the agent looks at the files instead, and writes beside each how long it was
when (``rank0-attempt0.1.times``): a line is dated to within half a second. What the logs of a node may take is
bounded: those of earlier attempts go first, then a hole is made in the middle of the present ones. A hole moves no
byte: who follows the file by its length finds his place again, and whoever writes to it does not notice.
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

from nodekit.deploy.host import files
from nodekit.deploy.host.schema import Say

LOOK_S = 2.0  # while ranks train, the agent asks four times as often
CHECK_S = 5.0  # how often the room that the logs take is looked at
HEAD_BYTES = 1 << 20  # of each log stays whatever happens: versions, settings, the first steps
MAX_MARKS = 1 << 16  # of one log: 1.5 MB
BLOCK_BYTES = 1 << 16  # a hole has whole blocks of the file system only

_NAME = re.compile(r"rank(\d+)-attempt(\d+)\.(\d+)\.(log|times)")
_MARK = struct.Struct("<ddd")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def parse_name(name: str) -> Optional[Tuple[int, Tuple[int, int]]]:
    """Rank and attempt of a log by its file's name; None for another file."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), (int(found[2]), int(found[3]))) if found and found[4] == "log" else None


def marks_of(log: str) -> str:
    """Where the marks of a log are."""
    return os.path.splitext(log)[0] + ".times"


# --- marks --------------------------------------------------------------------------------------------------


class Marks:
    """What is known of when a log was written: up to `offsets[i]`, from `begins[i]` to `ends[i]`."""

    def __init__(self, data: bytes = b"") -> None:
        """From a file's bytes; what a crash has torn off the last mark is no mark."""
        values = array.array("d", data[: len(data) // _MARK.size * _MARK.size])
        if sys.byteorder == "big":
            values.byteswap()
        self.offsets, self.begins, self.ends = values[0::3], values[1::3], values[2::3]

    def __len__(self) -> int:
        return len(self.offsets)

    def time_of(self, end: int, otherwise: float) -> float:
        """When the line that ends at byte `end` was written; `otherwise` is for what no mark covers yet."""
        place = bisect.bisect_left(self.offsets, end)
        if place == len(self):
            return max([otherwise, *self.ends[-1:]])
        begin, last = self.begins[place], self.ends[place]
        if begin == last:
            return last
        before = self.offsets[place - 1] if place else 0.0
        return begin + (last - begin) * (end - before) / (self.offsets[place] - before)

    def before(self, when: float) -> int:
        """Up to which byte all was written before `when`."""
        place = bisect.bisect_left(self.ends, when)
        return int(self.offsets[place - 1]) if place else 0

    def merged(self, most: int) -> "Marks":
        """At most so many: the newest quarter as it is, what is older in spans of equal time."""
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
        """As they lie in the file."""
        return b"".join(map(_MARK.pack, self.offsets, self.begins, self.ends))


def read_marks(log: str, since: int = 0) -> Marks:
    """The marks of a log, those for what comes after byte `since` at least; none where there is no such file."""
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
    """When the first of it was written."""
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
        """Write down that it was so long then."""
        handle = os.open(marks_of(self.path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:  # at its place: one that a full disk or a crash has torn is written over by the next
            if os.pwrite(handle, _MARK.pack(size, when, when), self.num_marks * _MARK.size) < _MARK.size:
                raise OSError(errno.ENOSPC, "the disk is full")
        finally:
            os.close(handle)
        self.size, self.when = size, when
        self.num_marks += 1


class Logbook:
    """Looks at the logs of one node: dates what is written, and keeps it within bounds."""

    def __init__(self, folder: str, keep_bytes: int, say: Say) -> None:
        """Nothing happens before `begin`.

        Args:
            folder: the node's logs.
            keep_bytes: what they may take together.
            say: takes an event: its kind, and its fields by name.
        """
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._say = say
        self._logs: List[_Log] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._looked = 0.0
        self._checked = 0.0
        self._grown = 0
        self._can_punch = True
        self._thread: Optional[threading.Thread] = None

    def begin(self, paths: Sequence[str]) -> None:
        """From now on these are the logs of the present attempt."""
        self.look()
        with self._lock:
            self._logs = [_Log(path) for path in paths]
            self._looked = 0.0
        self._safely(self.bound)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="logbook", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look once more, and no longer."""
        self._closing.set()
        self.look()

    def look(self) -> None:
        """Write down how long each log is, where that has changed."""
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
            pass  # a full disk, or a folder that somebody has removed: the job does not need us

    def _look(self) -> None:
        now = time.time()
        for log in self._logs:
            try:
                found = os.stat(log.path)
            except FileNotFoundError:
                continue  # its rank has not begun
            if found.st_size < log.size:  # somebody has emptied it: its marks are of lines that are gone
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(marks_of(log.path))
                log.size, log.num_marks = 0, 0
            if found.st_size == log.size:
                continue
            # The last of it was written since we last looked, whatever a file server's clock says, or ours did.
            when = max(log.when, min(max(found.st_mtime, self._looked), now))
            self._grown += found.st_size - log.size
            log.mark(found.st_size, when)
            if log.num_marks > MAX_MARKS:
                with open(marks_of(log.path), "rb") as file:
                    merged = Marks(file.read()).merged(MAX_MARKS * 3 // 4)
                files.write_private(marks_of(log.path), merged.to_bytes())
                log.num_marks = len(merged)
        self._looked = now

    # --- bounds ---

    def bound(self) -> None:
        """Bring what the logs take below the bound: earlier attempts go first, then the middle of the present logs."""
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
        """Leave out the old middle of a log; how many bytes that gave back."""
        if not self._can_punch:
            return 0
        head = min(HEAD_BYTES, share // 8)
        handle = os.open(log.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.fstat(handle)
            # Three quarters of its share stay: a hole at every look would be a lot of work for little.
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
    """Make a hole in a file, of the whole blocks from `begin` to `end`; False where there are none.

    Raises:
        OSError: EOPNOTSUPP and others where the file system cannot.
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
