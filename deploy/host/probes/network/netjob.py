"""Run one program on all hosts together, for `kit check --deep`: start it with its settings, follow it, end it."""

from __future__ import annotations

import collections
import os
import signal
import socket
import subprocess
import threading
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence

from nodekit.deploy.host import ports, processes

# session → the socket that its job is to listen on; session → its job
_held: Dict[str, socket.socket] = {}
_jobs: Dict[str, "_Job"] = {}


class _Job:
    """A program that says lines of JSON, and lives no longer than its stdin, which is ours."""

    def __init__(
        self, argv: Sequence[str], program: str, env: Mapping[str, str], held: Optional[socket.socket]
    ) -> None:
        self.lines: List[str] = []
        self.errors: Deque[str] = collections.deque(maxlen=40)
        self.changed = threading.Condition()
        self.ended = False
        self.process = subprocess.Popen(
            [os.path.expanduser(argv[0]), *argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
            pass_fds=[held.fileno()] if held is not None else [],
        )
        threading.Thread(target=self._read_errors, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()
        data = program.encode()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(b"%d\n" % len(data) + data)
            self.process.stdin.flush()
        except OSError:  # it ended at once: its last words tell
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self.changed.notify_all()
        self.process.wait()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.decode("utf-8", "replace").rstrip("\n"))

    def end(self) -> None:
        processes.send(-self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass


def hold(session: str, address: str, port: int) -> int:
    """Listen on a port of an address, 0 for a free one, for the job of this host."""
    _held[session] = ports.listen(address, port)
    held: int = _held[session].getsockname()[1]
    return held


def start_job(
    session: str, argv: Sequence[str], program: str, settings: Dict[str, Any], env: Mapping[str, str]
) -> int:
    """Start a python program, which comes with its settings on stdin (read by BOOT, `deploy/connect/channel.py`)."""
    held = _held.pop(session, None)
    if held is not None:
        settings = dict(settings, listen_fd=held.fileno())
    _jobs[session] = _Job(argv, "SETTINGS = %r\n%s" % (settings, program), env, held)
    if held is not None:
        held.close()  # with the job's end the others are refused
    return _jobs[session].process.pid


def job_said(session: str, seen: int, wait_s: float) -> Dict[str, Any]:
    """The lines after the first `seen`, once there are any or it has ended: ``lines``, ``status``, ``errors``."""
    job = _jobs[session]
    with job.changed:
        job.changed.wait_for(lambda: len(job.lines) > seen or job.ended, wait_s)
        return {
            "lines": job.lines[seen:],
            "status": job.process.returncode if job.ended else None,
            "errors": "\n".join(job.errors) if job.ended else "",
        }


def end_job(session: str) -> None:
    """End what `start_job` started, or let go of what `hold` holds for it."""
    held, job = _held.pop(session, None), _jobs.pop(session, None)
    if held is not None:
        held.close()
    if job is not None:
        job.end()
