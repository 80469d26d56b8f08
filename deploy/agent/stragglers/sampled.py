"""What a rank does with its time, by samples of its main thread's stack that py-spy takes. Standard library only.

For scripts on GPUs that tell nothing: where NCCL waits, the thread spins, and the kernel cannot tell that from work. A
rank waits where a hang's diagnosis says so: in torch.distributed, or for its GPU (``.item()``), which waits for others.
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
"""py-spy has taken its samples so long before the window is over; and by so much later it is given up."""
_FRAME = re.compile(r"(.*?) \((.*?):(\d+)\)(?:;|$)")
_THREAD = re.compile(r"thread \((?:(\d+)|\w+)\)(?:: ([^;]*))?;")
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")


class Sampled(NamedTuple):
    """Shares of the samples of one window."""

    own: float
    """In which the rank did not wait for others."""
    loading: float
    """In which it waited for its data."""


class Sampler:
    """Samples this node's ranks, a window at a time, in a thread: a script may lie on a hung file system."""

    def __init__(self, pids: Mapping[int, int], *, python: str) -> None:
        """Nothing is sampled yet; without py-spy beside ``python`` or on PATH, nothing ever is."""
        self._pids, self._spy = dict(pids), stacks.find_spy(python)
        self._thread: threading.Thread | None = None
        self._found: dict[int, Sampled] = {}

    def begin(self, window_s: float) -> None:
        """Begin a window; what the last one has found is gone."""
        if self._spy is None or (self._thread and self._thread.is_alive()):
            return
        self._found = {}
        seconds = max(1, int(window_s) - _START_S)
        self._thread = threading.Thread(
            target=self._sample, args=(self._spy, seconds, self._found), name="samples", daemon=True
        )
        self._thread.start()

    def shares(self) -> Mapping[int, Sampled]:
        """Rank → what the window has found so far; ranks that cannot be sampled are missing."""
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
    """Have py-spy write its samples to a descriptor; not to its stdout, where it also says what it does."""
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
    """The shares of a process's main thread, by py-spy's raw format; None of too few samples.

    A line is ``thread (PID): MainThread;outermost (file:line);...;innermost (file:line) NUMBER``; before Python 3.11
    ``(0x7f...)`` in place of the pid.
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
