"""A run with one node on this machine, whose steps are all alike, and whose processes can be paused."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rounds import BenchError

START_S = 180.0  # the first steps may take a second each
# All steps must be alike: an evaluation or a snapshot in one window only would be most of the noise.
EVEN = ("--epochs", "1000000", "--eval-every", "1000000", "--best", "off", "--snapshot-seconds", "3600")
INVENTORY = """\
name: overhead
connection: local
hosts:
  node: {gpus: 0}
job:
  env: {OMP_NUM_THREADS: "1"}
"""


class Job:
    """A run with one node on this machine, and the processes of kit in it."""

    def __init__(
        self, folder: Path, *argv: str, inventory: str = INVENTORY, files: Sequence[Path] = ()
    ) -> None:
        """Start the run, and wait for 100 steps.

        Args:
            folder: for all files that the run writes.
            argv: further options of the training module.
            inventory: the text of an inventory with one host.
            files: files of the job's code.
        """
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("NODEKIT_")},
            "HOME": str(folder / "home"),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self._code = folder / "code"
        for each in (folder / "home", self._code):
            each.mkdir()
        (self._code / "one.yaml").write_text(inventory)
        for file in files:
            shutil.copy(file, self._code)
        try:
            self._start(folder, *argv)
        except BaseException:  # Ctrl-C too
            with contextlib.suppress(BenchError):  # the run may not have begun
                self._kit("down")
            raise

    def _start(self, folder: Path, *argv: str) -> None:
        self._kit("up", "-d", "one.yaml", "--", "-m", "nodekit.training", *EVEN, *argv)
        (self._record,) = (folder / "state/nodekit/runs").glob("*/run.json")
        run = json.loads(self._record.read_text())
        self.node_dirs = {name: Path(node["node_dir"]) for name, node in run["nodes"].items()}
        deadline = time.monotonic() + START_S
        while self.num_steps < 100:
            if time.monotonic() > deadline:
                raise BenchError(f"no 100 steps within {START_S:.0f} s: see {self._record.parent}")
            time.sleep(0.5)
        self.supervisor = int((self._record.parent / "supervisor.lock").read_text())
        self.channels = _children(self.supervisor)
        self.agents = {
            name: json.loads((path / "agent.json").read_text())["pid"]
            for name, path in self.node_dirs.items()
        }
        self.servers = {name: _server_of(pid) for name, pid in self.agents.items()}

    def pin(self) -> None:
        """Pin the node to this machine's last core, and its supervisor to the first."""
        away, core = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        for pid in (*self.channels, *self.agents.values()):
            for each in (pid, *descendants(pid)):
                pin(each, core)
        for each in (os.getpid(), self.supervisor):
            pin(each, away)

    @property
    def all(self) -> list[int]:
        """Return all processes of kit."""
        return [self.supervisor, *self.channels, *self.agents.values(), *self.servers.values()]

    @property
    def num_steps(self) -> int:
        """Return the number of steps so far."""
        with contextlib.suppress(OSError, StopIteration):
            return len(self.steps())
        return 0

    def steps(self) -> list[tuple[float, int]]:
        """Return when each step was done, and its epoch."""
        path = next(iter(self.node_dirs.values())) / "output/metrics.jsonl"
        found = (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
        return [(each["time"], each["epoch"]) for each in found if "loss" in each]

    def stop(self) -> None:
        """Stop the run."""
        signalled(self.all, signal.SIGCONT)
        self._kit("down")

    def _kit(self, *argv: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "nodekit.deploy.commands.cli", *argv],
            env=self._env,
            cwd=self._code,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise BenchError(f"kit {argv[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _children(pid: int) -> list[int]:
    return [
        int(each)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for each in (task / "children").read_text().split()
    ]


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    for child in _children(pid):
        yield child
        yield from descendants(child)


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process to one core; threads that it starts later inherit that."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {core})


def signalled(pids: Sequence[int], number: int) -> None:
    """Send a signal to those of these processes that still run: some of an agent's are short-lived."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def stopped(pids: Sequence[int], threads: Sequence[int] = ()) -> Iterator[None]:
    """Pause processes by SIGSTOP, and single threads by ptrace(2), within the block."""
    signalled(pids, signal.SIGSTOP)
    for thread in threads:
        _ptrace(_SEIZE, thread)
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)
    try:
        yield
    finally:
        for thread in threads:
            _ptrace(_DETACH, thread)
        signalled(pids, signal.SIGCONT)


_SEIZE, _INTERRUPT, _DETACH, _WALL = 0x4206, 0x4207, 17, 0x40000000  # from linux/ptrace.h and linux/wait.h


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, thread, None, None) != 0:
        number = ctypes.get_errno()
        raise BenchError(f"a thread of the agent cannot be stopped: {os.strerror(number)}; as root it can")


def threads_of(pid: int, names: Sequence[str] = ()) -> list[int]:
    """Return the threads of a process, or only those with these names."""
    return [
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if not names or (task / "comm").read_text().strip() in names
    ]


def _server_of(agent: int) -> int:
    """Return the agent's fork server: its child that is a python, with the ranks as children."""
    return next(pid for pid in _children(agent) if _children(pid))


def cpu_s(pids: Sequence[int], names: Sequence[str] = ()) -> float:
    """Return the processor seconds of these processes. Not from `stat`: its ticks miss threads that a timer wakes.

    With `names`, count only threads with these names.
    """
    threads = (Path(f"/proc/{pid}/task/{thread}") for pid in pids for thread in threads_of(pid, names))
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
