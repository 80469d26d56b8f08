"""The lab's own processes, recorded so that another terminal ends exactly these and never by name.

A pid alone may belong to someone else by the time it is used; with its start time and the boot it cannot.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nodekit.deploy.host import files, processes
from nodekit.inventory.errors import KitError


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process, identified for as long as the machine's disk lasts."""

    pid: int
    start_ticks: int
    """Field 22 of ``/proc/PID/stat``."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessRecord":
        """Identify a process that runs now; ProcessLookupError if there is none."""
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid, start_ticks, processes.boot_id())

    @classmethod
    def read(cls, path: Path) -> "ProcessRecord | None":
        """The process recorded in a file; None if nothing was, and then it did not begin (see `start`)."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        # An earlier kit that was killed while it wrote has left it empty.
        return cls(**json.loads(text)) if text else None

    def write(self, path: Path) -> None:
        """Record the process in a file, which is there whole or not at all: `kit lab up` may be killed meanwhile."""
        files.write_private(str(path), json.dumps(asdict(self)).encode() + b"\n")

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return self.boot_id == processes.boot_id() and _start_ticks(self.pid) == self.start_ticks


def kill(*records: ProcessRecord, timeout_s: float = 10) -> None:
    """SIGKILL these processes together and return when they are gone; some may be gone already."""
    deadline = time.monotonic() + timeout_s
    pidfds: dict[int, ProcessRecord] = {}
    try:
        for record in records:
            try:
                pidfd = os.pidfd_open(record.pid)
            except ProcessLookupError:
                continue
            pidfds[pidfd] = record
            if record.is_alive:  # asked after the pidfd was taken, so it is about the process that we hold
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd, record in pidfds.items():
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if record.is_alive and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise KitError(f"process {record.pid} is still there {timeout_s:.0f} s after SIGKILL")
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def start(argv: list[str], *, record: Path, log: Path, cwd: Path, env: dict[str, str]) -> None:
    """Start a script that detaches itself, and record it before it does anything.

    The script forks and prints the child's pid as this process sees it, and the child waits for a line ``go``
    on its stdin: if we die before the record is on disk, it reads the end of the pipe instead and leaves.
    """
    with (
        log.open("ab") as output,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, cwd=cwd, env=env, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise KitError(f"did not start\n{tail(log)}")
        ProcessRecord.of(int(answer)).write(record)
        process.stdin.write("go\n")


def tail(log: Path) -> str:
    """The end of a log, with its name, for an error's message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"the end of {log}:", *(f"  {line}" for line in lines[-15:])])


def _start_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
