"""Find out why the kernel ended a process, from its log and from its count of out-of-memory kills.

The agent uses it when a rank died. Standard library only; bounded in time and size. Reading the log requires root or
group adm; without that, only the count is available.
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
_LOG_BYTES = 4 << 20  # the most that is read at once; a kernel's ring buffer is rarely larger
# Messages about ended processes and broken hardware: both out-of-memory killers, faults, drivers of GPUs and disks.
_WORTH = re.compile(
    r"Out of memory:|Killed process \d|Memory cgroup out of memory:|oom-kill:|oom_reaper: reaped|segfault at|traps: "
    r"|general protection|NVRM: Xid|Machine check|Hardware Error|I/O error|EXT4-fs error|XFS .*[Cc]orruption"
    r"|EDAC .* [UC]E"
)
_PID = re.compile(r"(?:[Kk]ill(?:ed)? process |pid=|reaped process |\[(?=\d+\]))(\d+)")
_OOM = re.compile(r"oom-kill:|out of memory|oom_reaper|killed process", re.IGNORECASE)


def oom_kills(cgroups: str, root: str) -> int | None:
    """Return the number of out-of-memory kills in this process's memory cgroup and those below it; None if unknown."""
    found = _memory_cgroup(cgroups, root)
    if found is None:
        return None
    folder, is_v2 = found
    text = _read(folder / ("memory.events" if is_v2 else "memory.oom_control"))
    count = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(count[1]) if count else None


class Log:
    """A reader of the lines that are added to the kernel's log from now on."""

    def __init__(self, path: str) -> None:
        """Begin at the end of the log: reading all of it takes 3 ms and more."""
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def new(self) -> Optional[List[str]]:
        """Return the messages since the last call; None if this user may not read the log."""
        return None if self._file < 0 else _read_on(self._file)

    def close(self) -> None:
        """Close the log."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Watch:
    """Watches for the kernel's messages about processes that it ends from now on."""

    def __init__(
        self, log: str = "/dev/kmsg", cgroups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
    ) -> None:
        """Begin to watch.

        Args:
            log: path of the kernel's log.
            cgroups: path of the file that lists this process's cgroups.
            root: where the cgroups are mounted.
        """
        self._began = time.monotonic()
        self._cgroups, self._root = cgroups, root
        self._kills_before = oom_kills(cgroups, root)
        self._log = Log(log)
        self._lines: list[str] = []

    def said(self, pids: Iterable[int]) -> list[str]:
        """Return the kernel's lines about these processes, the most telling one last; [] if there are none.

        Args:
            pids: of the process that ended, and of its children.
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
        """Stop watching."""
        self._log.close()


def chosen(lines: Sequence[str], pids: set[int]) -> list[str]:
    """Return the lines of a kernel's log that tell why one of `pids` ended, or may do so.

    The kernel's pids differ from those in a container. So if no line has one of `pids`, lines about any out-of-memory
    kill are returned, but none about another process's fault.
    """
    worth = [line for line in lines if _WORTH.search(line)]
    own = [line for line in worth if any(int(pid) in pids for pid in _PID.findall(line))]
    machine = [line for line in worth if not _PID.search(line) or "Xid" in line]
    if not own:
        own = [line for line in worth if _OOM.search(line)]
    picked = [line for line in worth if line in own or line in machine]
    return [line[:MAX_WIDTH] for line in picked[-MAX_LINES:]]


def messages(path: str = "/dev/kmsg") -> Optional[List[str]]:
    """Return all messages of the kernel's log; None if this user may not read it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read_on(file)
    finally:
        os.close(file)


def _read_on(file: int) -> List[str]:
    """Return the messages since the log was last read; bounded in time and size."""
    deadline = time.monotonic() + READ_S
    found: List[str] = []
    size = 0
    while time.monotonic() < deadline and size < _LOG_BYTES:
        try:
            record = os.read(file, 8192)  # each read returns one record
        except BrokenPipeError:
            continue  # the next record was overwritten meanwhile
        except OSError:  # EAGAIN: no more records
            break
        if not record:
            break
        size += len(record)
        found += parse(record.decode("utf-8", "replace"))
    return found


def parse(records: str) -> list[str]:
    """Return the message of each record, ``PRIORITY,NUMBER,MICROSECONDS,FLAGS;MESSAGE``."""
    found = []
    for line in records.splitlines():
        head, is_record, message = line.partition(";")
        fields = head.split(",")
        # Other lines are a record's indented dictionary.
        if is_record and len(fields) >= 3 and fields[2].isdigit():
            found.append(message)
    return found


def _dmesg(since: float) -> list[str]:
    """Return the messages of ``dmesg``, which some systems allow all users, from `since` on, in seconds since boot."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["dmesg"], capture_output=True, timeout=READ_S, check=False, stdin=subprocess.DEVNULL
        )
        found = re.findall(r"^\[ *(\d+\.\d+)\] (.*)$", done.stdout.decode("utf-8", "replace"), re.MULTILINE)
        return [text for when, text in found if float(when) >= since]
    return []


def _memory_cgroup(cgroups: str, root: str) -> tuple[Path, bool] | None:
    """Return the folder of this process's memory cgroup, and whether it is version 2; None if there is none."""
    paths = {}
    for line in _read(Path(cgroups)).splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path.lstrip("/")
    for base, key, is_v2 in (("memory", "memory", False), ("", "", True), ("unified", "", True)):
        if key in paths:
            # In a container the path may be the host's, but the container's own cgroup is mounted.
            for folder in (Path(root, base, paths[key]), Path(root, base)):
                if (folder / ("memory.events" if is_v2 else "memory.oom_control")).exists():
                    return folder, is_v2
    return None


def _limit(cgroups: str, root: str) -> int | None:
    """Return the lowest memory limit of this process's cgroup and those above it, in bytes; None if there is none."""
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
