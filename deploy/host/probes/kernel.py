"""What a host's kernel says of a process that it ended: its log's own lines, and its count of out-of-memory kills.

Read by the agent where a rank died. Standard library only; bounded in time and size. Who may not read the log (it
takes root, or group adm) is left with the count.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import List, Optional

READ_S = 2.0
MAX_LINES = 8
MAX_WIDTH = 300
_LOG_BYTES = 4 << 20  # a kernel's ring buffer is rarely more
# What ends processes, and says which: the two out-of-memory killers, faults, the GPU's driver, the disk's.
_WORTH = re.compile(
    r"Out of memory:|Killed process \d|Memory cgroup out of memory:|oom-kill:|oom_reaper: reaped|segfault at|traps: "
    r"|general protection|NVRM: Xid|Machine check|Hardware Error|I/O error|EXT4-fs error|XFS .*[Cc]orruption"
    r"|EDAC .* [UC]E"
)
_PID = re.compile(r"(?:[Kk]ill(?:ed)? process |pid=|reaped process |\[(?=\d+\]))(\d+)")
_OOM = re.compile(r"oom-kill:|out of memory|oom_reaper|killed process", re.IGNORECASE)


def oom_kills(cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """How many processes of our memory cgroup, and those below it, were killed for want of memory; None: not told."""
    found = _memory_cgroup(cgroups, root)
    if found is None:
        return None
    folder, is_v2 = found
    text = _read(folder / ("memory.events" if is_v2 else "memory.oom_control"))
    count = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(count[1]) if count else None


class Log:
    """The lines that are added to the kernel's log from now on."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        """Begin at its end: to read all of it takes 3 ms and more."""
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def new(self) -> Optional[List[str]]:
        """Return the messages that have come since the last call; None where the log may not be read."""
        return None if self._file < 0 else _read_on(self._file)

    def close(self) -> None:
        """Read no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Watch:
    """What the kernel says from now on of processes that it ends."""

    def __init__(
        self, log: str = "/dev/kmsg", cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
    ) -> None:
        """Begin.

        Args:
            log: where the kernel's is read.
            cgroups: where this process's cgroups are told.
            root: where the cgroups are mounted.
        """
        self._began = time.monotonic()
        self._cgroups, self._root = cgroups, root
        self._kills_before = oom_kills(cgroups, root)
        self._log = Log(log)
        self._lines: list[str] = []

    def said(self, pids: Iterable[int]) -> list[str]:
        """The kernel's lines about these processes, the telling one last; [] for none.

        Args:
            pids: of the process that ended, and of others it started.
        """
        new = self._log.new()
        self._lines = _dmesg(self._began - 1.0) if new is None else self._lines + new
        lines = chosen(self._lines, set(pids))
        now, before = oom_kills(self._cgroups, self._root), self._kills_before
        if now is not None and before is not None and now > before:
            limit = _limit(self._cgroups, self._root)
            of = f", whose limit is {limit / 2**30:.2f} GiB" if limit else ""
            name = _memory_cgroup(self._cgroups, self._root)
            lines.insert(0, f"cgroup {name[0] if name else '?'}{of}: oom_kill {before} -> {now}")
        return lines

    def close(self) -> None:
        """Nothing is asked any more."""
        self._log.close()


def chosen(lines: Sequence[str], pids: set[int]) -> list[str]:
    """Those of a kernel's log that tell why one of `pids` ended: its own lines, else what may be about it.

    In a container the kernel's numbers are others than ours: then an out-of-memory kill of somebody is better than
    silence. A fault of somebody else is not.
    """
    worth = [line for line in lines if _WORTH.search(line)]
    own = [line for line in worth if any(int(pid) in pids for pid in _PID.findall(line))]
    machine = [line for line in worth if not _PID.search(line) or "Xid" in line]
    if not own:
        own = [line for line in worth if _OOM.search(line)]
    picked = [line for line in worth if line in own or line in machine]
    return [line[:MAX_WIDTH] for line in picked[-MAX_LINES:]]


def messages(path: str = "/dev/kmsg") -> Optional[List[str]]:
    """All messages of the kernel's log; None where it may not be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read_on(file)
    finally:
        os.close(file)


def _read_on(file: int) -> List[str]:
    """The messages from where the log was read last; bounded in time and size."""
    deadline = time.monotonic() + READ_S
    found: List[str] = []
    size = 0
    while time.monotonic() < deadline and size < _LOG_BYTES:
        try:
            record = os.read(file, 8192)  # one record with each read
        except BrokenPipeError:
            continue  # the one to be read next has been overwritten meanwhile
        except OSError:  # EAGAIN: that was the last one
            break
        if not record:
            break
        size += len(record)
        found += parse(record.decode("utf-8", "replace"))
    return found


def parse(records: str) -> list[str]:
    """The message of each record, ``PRIORITY,NUMBER,MICROSECONDS,FLAGS;MESSAGE``."""
    found = []
    for line in records.splitlines():
        head, is_record, message = line.partition(";")
        fields = head.split(",")
        if is_record and len(fields) >= 3 and fields[2].isdigit():  # else a record's dictionary, indented
            found.append(message)
    return found


def _dmesg(since: float) -> list[str]:
    """The messages since then, in seconds since the start, from ``dmesg``, which some systems let users run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["dmesg"], capture_output=True, timeout=READ_S, check=False, stdin=subprocess.DEVNULL
        )
        found = re.findall(r"^\[ *(\d+\.\d+)\] (.*)$", done.stdout.decode("utf-8", "replace"), re.MULTILINE)
        return [text for when, text in found if float(when) >= since]
    return []


def _memory_cgroup(cgroups: str, root: str) -> tuple[Path, bool] | None:
    """The folder of our memory cgroup, and whether it is of version 2."""
    paths = {}
    for line in _read(Path(cgroups)).splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path.lstrip("/")
    for base, key, is_v2 in (("memory", "memory", False), ("", "", True), ("unified", "", True)):
        if key in paths:
            # In a container its path is the host's, and what is mounted is its own.
            for folder in (Path(root, base, paths[key]), Path(root, base)):
                if (folder / ("memory.events" if is_v2 else "memory.oom_control")).exists():
                    return folder, is_v2
    return None


def _limit(cgroups: str, root: str) -> int | None:
    """The least memory that our cgroup or one above it allows, in bytes; None: there is no limit."""
    found = _memory_cgroup(cgroups, root)
    if found is None:
        return None
    folder, is_v2 = found
    limits = []
    while folder != Path(root) and folder != folder.parent:
        text = _read(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).strip()
        if text.isdigit() and int(text) < 1 << 60:
            limits.append(int(text))
        folder = folder.parent
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
