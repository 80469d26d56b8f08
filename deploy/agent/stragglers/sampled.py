"""Measure what a rank does with its time, by py-spy's samples of its main thread's stack. Standard library only.

For scripts on GPUs that report nothing: while NCCL waits, the thread spins, which the kernel counts as work. A rank
counts as waiting where the hang diagnosis says so: in torch.distributed, or for its GPU (``.item()``), which waits for
others.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nodekit.deploy.agent.hang import stacks
from nodekit.deploy.agent.hang.culprit import waiting

_RATE = 5
_LEAST_SAMPLES = 4
_START_S, _LATE_S = 2, 30.0
"""How long before the end of the window py-spy must be done; and how long after its time it is killed."""
_FRAME = re.compile(r"(.*?) \((.*?):(\d+)\)(?:;|$)")
_THREAD = re.compile(r"thread \((?:(\d+)|\w+)\)(?:: ([^;]*))?;")
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")


class Sampled(NamedTuple):
    """Shares (0 to 1) of a rank's samples in one window."""

    own: float
    """Samples in which the rank did not wait for others."""
    loading: float
    """Samples in which the rank waited for its data."""


class Sampler:
    """Samples this node's ranks, one window at a time; in a thread, since a script may lie on a hung file system."""

    def __init__(self, pids: Mapping[int, int], *, python: str) -> None:
        """Sample nothing yet; and never, if py-spy is neither beside ``python`` nor on PATH."""
        self._pids, self._spy = dict(pids), stacks.find_spy(python)
        self._thread: threading.Thread | None = None
        self._found: dict[int, Sampled] = {}

    def begin(self, window_s: float) -> None:
        """Begin a window, and drop the results of the last one; do nothing while that is still being sampled."""
        if self._spy is None or (self._thread and self._thread.is_alive()):
            return
        self._found = {}
        seconds = max(1, int(window_s) - _START_S)
        self._thread = threading.Thread(
            target=self._sample, args=(self._spy, seconds, self._found), name="samples", daemon=True
        )
        self._thread.start()

    def shares(self) -> Mapping[int, Sampled]:
        """Return rank → shares of the present window so far, without ranks that cannot be sampled."""
        return dict(self._found)

    def _sample(self, spy: str, seconds: int, found: dict[int, Sampled]) -> None:
        with contextlib.ExitStack() as files:
            running = {}
            for rank, pid in self._pids.items():
                with contextlib.suppress(OSError):  # no descriptor, or no space
                    output = files.enter_context(
                        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
                    )
                    running[rank] = output, _record(spy, pid, seconds, output.fileno())
            for rank, (output, process) in running.items():
                try:
                    process.wait(seconds + _LATE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                output.seek(0)
                if (share := shares_of(output, self._pids[rank])) is not None:
                    found[rank] = share


def _record(spy: str, pid: int, seconds: int, output: int) -> subprocess.Popen[bytes]:
    """Start py-spy, which writes its samples to the descriptor `output`; its stdout has other messages too."""
    what = ["--pid", str(pid), "--rate", str(_RATE), "--duration", str(seconds)]
    how = ["--nonblocking", "--idle", "--threads", "--full-filenames", "--format", "raw"]
    return subprocess.Popen(
        [spy, "record", *what, *how, "--output", f"/proc/self/fd/{output}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(output,),
    )


def shares_of(lines: Iterable[str], pid: int) -> Sampled | None:
    """Compute the shares of a process's main thread from py-spy's raw format; None if there are too few samples.

    A line is ``thread (PID): MainThread;outermost (file:line);...;innermost (file:line) NUMBER``; before Python 3.11
    with ``(0x7f...)`` in place of the pid.
    """
    total = own = loading = 0
    for line in lines:
        stack, _, number = line.strip().rpartition(" ")
        thread = _THREAD.match(stack)
        if not thread or not number.isdigit():
            continue
        if not stacks.is_main(int(thread[1]) if thread[1] else None, thread[2], pid):
            continue
        frames = [stacks.Frame(m[1], m[2], int(m[3])) for m in _FRAME.finditer(stack, thread.end())]
        known = stacks.with_code(reversed(frames), pid)
        wait = waiting(known)
        total += int(number)
        if wait is None or not (wait.is_sure or wait.is_for_gpu):
            own += int(number)
            if any(_LOADER.search(frame.file) for frame in known):
                loading += int(number)
    if total < _LEAST_SAMPLES:
        return None
    return Sampled(round(own / total, 3), round(loading / total, 3))
