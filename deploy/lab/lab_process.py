"""The lab's own processes, recorded so that another terminal can end exactly these, and never by name.

A pid alone may be reused by another process; together with the start time and the boot id it identifies one.
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
    """One process, identified uniquely, even after a reboot."""

    pid: int
    start_ticks: int
    """Start time: field 22 of ``/proc/PID/stat``."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessRecord":
        """Return the record of a running process; ProcessLookupError if there is none."""
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid, start_ticks, processes.boot_id())

    @classmethod
    def read(cls, path: Path) -> "ProcessRecord | None":
        """Read the record in a file; None if there is none: then the process has done nothing yet (see `start`)."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        # An earlier version that was killed while writing has left it empty.
        return cls(**json.loads(text)) if text else None

    def write(self, path: Path) -> None:
        """Record the process in a file, atomically: `kit lab up` may be killed meanwhile."""
        files.write_private(str(path), json.dumps(asdict(self)).encode() + b"\n")

    @property
    def is_alive(self) -> bool:
        """Whether exactly this process still runs; a zombie counts as ended."""
        return self.boot_id == processes.boot_id() and _start_ticks(self.pid) == self.start_ticks


def kill(*records: ProcessRecord, timeout_s: float = 10) -> None:
    """Kill these processes with SIGKILL, and return when they have ended; some may have ended before."""
    deadline = time.monotonic() + timeout_s
    pidfds: dict[int, ProcessRecord] = {}
    try:
        for record in records:
            try:
                pidfd = os.pidfd_open(record.pid)
            except ProcessLookupError:
                continue
            pidfds[pidfd] = record
            if record.is_alive:  # after opening the pidfd: so it is the pidfd's process
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
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
    """Start a script that detaches itself, and record its process before it does anything.

    The script forks and prints the child's pid; the child waits for a line ``go`` on its stdin. If this process dies
    before the record is on disk, the child reads the end of the pipe instead, and exits.
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
    """Return the last lines of a log, with its name, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"the end of {log}:", *(f"  {line}" for line in lines[-15:])])


def _start_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
