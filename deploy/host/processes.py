"""Find the processes of a host in /proc, send them signals, and run programs for their output."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from nodekit.deploy.host import files

NOT_INSTALLED = "not installed"
_PAGE_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # linux/sched.h
_boot_ids: List[str] = []  # a cache: the boot id is needed several times a second


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Process(NamedTuple):
    """One process; pid and start time together identify it, as a later process may get the same pid."""

    pid: int
    parent: int
    group: int
    start_time: int
    """In clock ticks since the host's boot."""
    rss_bytes: int
    has_ended: bool
    """Whether the process is a zombie: its parent has not read its exit status yet."""


def find(pid: int) -> Optional[Process]:
    """Return a process by its pid; None if there is none."""
    try:
        fields = files.read("/proc/%d/stat" % pid).rpartition(b")")[2].split()
        state, parent, group, start_time, pages = (fields[number] for number in (0, 1, 2, 19, 21))
    except (OSError, IndexError):
        return None
    rss_bytes = int(pages) * _PAGE_BYTES
    return Process(pid, int(parent), int(group), int(start_time), rss_bytes, state in (b"Z", b"X"))


def clock_ahead_s() -> float:
    """Return how far the wall clock is ahead of the time since boot; it changes only when the clock is set."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return the id of the host's present boot; pids from before a reboot are meaningless."""
    if not _boot_ids:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                _boot_ids.append(file.read().strip())
        except FileNotFoundError:  # not Linux
            _boot_ids.append("")
    return _boot_ids[0]


def start_time(pid: int) -> Optional[int]:
    """Return when the kernel started `pid`, in clock ticks since boot; with the pid, this identifies a process."""
    process = find(pid)
    return process and process.start_time


def is_running(pid: int, started: Optional[int]) -> bool:
    """Whether exactly that process runs; a zombie does not."""
    process = find(pid)
    return process is not None and process.start_time == started and not process.has_ended


def all_of_them() -> Dict[int, Process]:
    """Return all processes by pid, including zombies."""
    found = (find(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def below(pid: int) -> Set[int]:
    """Return the pids of all descendants of a process that have not ended."""
    processes = all_of_them()
    children: Dict[int, List[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    found: Set[int] = set()
    new = [pid]
    while new:
        new = [child for each in new for child in children.get(each, ())]
        found.update(new)
    return {each for each in found if not processes[each].has_ended}


def activity(pid: int) -> str:
    """Return a text that changes as long as a process makes progress, from its CPU time, page faults and memory."""
    try:
        fields = files.read("/proc/%d/stat" % pid).rpartition(b")")[2].split()
    except OSError:
        return ""
    return b" ".join(fields[number] for number in (0, 7, 9, 11, 12, 20, 21)).decode("ascii", "replace")


def code_if_ending(pid: int) -> Optional[int]:
    """Return the exit code, negative for a signal, of a process that is ending or has ended; None if it goes on.

    The kernel frees the memory of a process before it reports the end, which can take long. For a process of another
    user the code is always 0.
    """
    try:
        fields = files.read("/proc/%d/stat" % pid).rpartition(b")")[2].split()
        flags, status = int(fields[6]), int(fields[49])
    except (OSError, IndexError, ValueError):
        return None
    if not flags & _PF_EXITING:
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8


def where_it_waits(pid: int) -> Tuple[str, str]:
    """Return a process's state, such as D, and the kernel function in which it waits; "" if that is unknown."""
    for task in sorted(files.names("/proc/%d/task" % pid), key=lambda task: task != str(pid)):
        about = "/proc/%d/task/%s/" % (pid, task)
        state = files.read_text(about + "stat").rpartition(")")[2].split()[:1]
        if state and state[0] not in "ZX":  # the first thread may have ended before others
            place = files.read_text(about + "wchan").strip("\0\n ")
            return state[0], "" if place == "0" else place
    return "Z", ""


def unkillable(pid: int) -> str:
    """Return the message that SIGKILL does not end a process, with its state and the function in which it waits."""
    state, place = where_it_waits(pid)
    return "SIGKILL does not end pid %d (state %s%s)" % (pid, state, " in " + place if place else "")


def send(pid: int, number: int) -> None:
    """Send a signal to a process, or to the group ``-pid``; ignore one that has ended, or is another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def ask_to_end(pid: int, number: int) -> None:
    """Send a signal that ends a process, and SIGCONT: a stopped process does not handle the signal before that."""
    send(pid, number)
    send(pid, signal.SIGCONT)


def output(argv: List[str], timeout_s: float, *, also_good: Sequence[int] = ()) -> Tuple[str, str]:
    """Return a program's output, and why there is none; a program that hangs in the kernel is left alone.

    Args:
        argv: the program, looked up on the PATH, and its arguments.
        timeout_s: how long the program may take.
        also_good: exit statuses besides 0 for which the output is valid.
    """
    import shutil  # takes a tenth of the server's start, and most calls do not need it

    if shutil.which(argv[0]) is None:
        return "", NOT_INSTALLED
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, LC_ALL="C"),
        )
        text = process.communicate(timeout=timeout_s)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            pass
        return "", "no answer within %.0f s" % timeout_s
    except OSError as error:
        return "", str(error.strerror)
    if process.returncode not in (0, *also_good):
        return "", " ".join(text.split())[:300] or "exit status %d" % process.returncode
    return text, ""
