"""Read what the ranks of this node do: their Python stacks and kernel states. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

_MAX_PROCESSES = 12  # of one rank, with its data loader's
_MAX_LOG_BYTES = 256 * 1024
_FAULT_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """One Python frame."""

    function: str
    file: str
    line: int
    code: str = ""
    """The text of the line; "" if the file could not be read."""


@dataclass(frozen=True)
class Stack:
    """What one rank does: its kernel state and Python stack."""

    rank: int
    pid: int
    state: str
    """The kernel's letter: R runs, S sleeps, D waits for a disk or NFS, T is stopped, Z or empty is gone."""
    how: str
    """How the stack was read: py-spy, faulthandler or none."""
    frames: tuple[Frame, ...] = ()
    """Of the main thread, innermost first."""
    text: str = ""
    """The stacks of all threads, also those of child processes; or why there are none."""

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Stack:
        """Build the stack from JSON of its `dataclasses.asdict`."""
        return cls(**{**fields, "frames": tuple(Frame(*frame) for frame in fields["frames"])})


def stacks(
    pids: Mapping[int, int], *, python: str, timeout_s: float, logs: Mapping[int, Path] | None = None
) -> dict[int, Stack]:
    """Read the stacks of this node's ranks, within `timeout_s`, whatever state they are in.

    py-spy reads them without harm. Where it is missing or not permitted, a rank that is in `logs` and has faulthandler
    enabled gets SIGABRT, which makes it write its stack to its log and **ends it**.
    """
    found = {rank: Stack(rank, pid, _state(pid), "none") for rank, pid in pids.items()}
    spy = find_spy(python)
    if spy is None:
        found = {rank: replace(stack, text="no stack: there is no py-spy") for rank, stack in found.items()}
    else:
        found = _of_each(found, lambda stack: _spy_on(stack, spy, timeout_s * 0.4), timeout_s / 2)
    missing = {rank: stack for rank, stack in found.items() if not stack.frames and rank in (logs or {})}
    if logs and missing:
        found |= _abort(missing, logs, timeout_s / 2)
    return found


def _of_each(
    stacks: Mapping[int, Stack], read: Callable[[Stack], Iterator[Stack]], timeout_s: float
) -> dict[int, Stack]:
    """Return, for each rank, the last stack that `read` yields within `timeout_s`."""
    results = dict(stacks)

    def run(stack: Stack) -> None:
        for known in read(stack):
            results[stack.rank] = known

    # Daemon threads: a hung file system must not block this process too.
    threads = [threading.Thread(target=run, args=(stack,), daemon=True) for stack in stacks.values()]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def find_spy(python: str) -> str | None:
    """Return the path of py-spy: beside the interpreter `python`, on PATH, or where pip --user puts it; else None."""
    folders = (
        Path(python).expanduser().parent,
        os.environ.get("PATH", ""),
        Path("~/.local/bin").expanduser(),
    )
    return shutil.which("py-spy", path=os.pathsep.join(map(str, folders)))


def can_answer(pid: int) -> bool:
    """Whether a process can react to a request: not if it is stopped, gone, or stuck in the kernel."""
    return _state(pid) not in ("", *"TtZXD")


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it vanished
        return ""


def _state(pid: int) -> str:
    return _proc(pid, "stat").rpartition(")")[2][1:2]


def _family(pid: int) -> list[int]:
    """Return a process and its descendants: the interpreter may be a shell's child, and have data loaders."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, _proc(each, f"task/{task.name}/children").split())
    return found[:_MAX_PROCESSES]


def _spy_on(stack: Stack, spy: str, timeout_s: float) -> Iterator[Stack]:
    """Yield the stack again and again as more of it becomes known: process by process, then the lines of code."""
    deadline = time.monotonic() + timeout_s
    text = []
    for pid in _family(stack.pid):
        state, wchan = _state(pid), _proc(pid, "wchan").strip("0")
        threads, error = _dump(spy, pid, state, deadline)
        text += [f"process {pid} ({', '.join(filter(None, (state or 'gone', wchan)))}) {error}".rstrip()]
        for thread in threads:
            frames = tuple(Frame(each["name"], each["filename"], each["line"]) for each in thread["frames"])
            text += [f"  thread {thread['thread_name'] or thread['os_thread_id']}"]
            text += [f"    {each.function} ({each.file}:{each.line})" for each in frames]
            if stack.how == "none" and is_main(thread["os_thread_id"], thread["thread_name"], pid):
                stack = replace(stack, how="py-spy", state=state, frames=frames)
        stack = replace(stack, text="\n".join(text))
        yield stack
    yield replace(stack, frames=with_code(stack.frames, stack.pid))


def is_main(thread: int | None, name: str | None, pid: int) -> bool:
    """Whether a thread is the main thread of process `pid`, whose thread id is the pid.

    With ``--nonblocking`` and a Python before 3.11, py-spy reports no ids: `thread` is None, and the name decides.
    """
    return thread == pid if thread is not None else name in ("MainThread", None)


def _dump(spy: str, pid: int, state: str, deadline: float) -> tuple[list[dict[str, Any]], str]:
    """Return the threads of one process, and the error if they could not be read.

    py-spy pauses a process by ptrace to read it. That fails if the process is stopped already, and blocks without a
    limit if it is in state D. Such a process does not run anyway, nor does a sleeping one: pause only a running one.
    """
    error = ""
    for flags in ([], ["--nonblocking"]) if state == "R" else (["--nonblocking"],):
        try:
            done = subprocess.run(
                [spy, "dump", "--json", *flags, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(0.1, deadline - time.monotonic()),
                check=False,
            )
            if done.returncode == 0:
                return json.loads(done.stdout), ""
            said = done.stderr.decode(errors="replace").partition("Stack backtrace:")[0].split()
            error = "py-spy: " + " ".join(said).removeprefix("Error: ")[:300]
        except (OSError, ValueError, subprocess.TimeoutExpired) as failed:
            error = f"py-spy: {failed}"
    return [], error


def with_code(frames: Iterable[Frame], pid: int) -> tuple[Frame, ...]:
    """Return the frames with their lines of code; call it last, since the files may lie on the disk that hangs."""
    cwd, found = "", []
    with contextlib.suppress(OSError):
        cwd = str(Path(f"/proc/{pid}/cwd").readlink())
    for frame in frames:
        file = str(Path(cwd, frame.file))
        linecache.checkcache(file)
        found.append(frame._replace(code=linecache.getline(file, frame.line).strip()))
    return tuple(found)


def _abort(stacks: Mapping[int, Stack], logs: Mapping[int, Path], timeout_s: float) -> dict[int, Stack]:
    """Make faulthandler write the stacks to the logs, by SIGABRT, and read them there."""
    targets, starts = {}, {}
    for rank, stack in stacks.items():
        for pid in filter(_catches_abort, reversed(_family(stack.pid))):
            with contextlib.suppress(OSError):
                starts[rank] = logs[rank].stat().st_size
                targets[rank] = pid
    for pid in targets.values():
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))  # no core dump of gigabytes
    # Stop all first: the end of one rank wakes the others with an error, and SIGABRT must reach them before that.
    for number in (signal.SIGSTOP, signal.SIGABRT, signal.SIGCONT):
        for pid in targets.values():
            with contextlib.suppress(OSError):
                _kill_main_thread(pid) if number == signal.SIGABRT else os.kill(pid, number)
    deadline = time.monotonic() + timeout_s * 0.8
    while any(_state(pid) not in ("", "Z", "X") for pid in targets.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return _of_each(
        {rank: stacks[rank] for rank in targets},
        lambda stack: _from_log(stack, logs[stack.rank], starts[stack.rank]),
        timeout_s * 0.2,
    )


def _kill_main_thread(pid: int) -> None:
    """Send SIGABRT to the main thread itself: if another thread took the signal, the main one could run on."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc has it since 2.30
        libc.tgkill(pid, pid, signal.SIGABRT)
    else:
        os.kill(pid, signal.SIGABRT)


def _catches_abort(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _proc(pid, "status"), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (signal.SIGABRT - 1) & 1)


def _from_log(stack: Stack, log: Path, start: int) -> Iterator[Stack]:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(start)
        text = file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
        if frames := parse_faulthandler(text):
            shown = text.partition("\nExtension modules")[0].strip()
            stack = replace(stack, how="faulthandler", frames=frames, text=shown)
            yield stack
            yield replace(stack, frames=with_code(stack.frames, stack.pid))


def parse_faulthandler(text: str) -> tuple[Frame, ...]:
    """Return the frames of the main thread, which faulthandler prints last: it lists the newest thread first."""
    dump = text.partition("Fatal Python error: Aborted\n")[2].partition("\nFatal Python error: ")[0]
    threads = re.findall(r"^(?:Current thread|Thread) 0x.*\n((?:  .*\n?)*)", dump, re.MULTILINE)
    found = _FAULT_FRAME.findall(threads[-1]) if threads else []
    return tuple(Frame(function, file, int(line)) for file, line, function in found)
