"""Run this host's part of a program that runs on all hosts, for `kit check --deep`: start it, read it, end it."""

from __future__ import annotations

import collections
import os
import signal
import socket
import subprocess
import threading
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence

from nodekit.deploy.host import ports, processes

# session → the socket on which its job will listen; session → its job
_held: Dict[str, socket.socket] = {}
_jobs: Dict[str, "_Job"] = {}


class _Job:
    """A program that prints lines of JSON, and ends when its stdin does, which this process holds."""

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
        except OSError:  # the program ended at once; its stderr says why
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
    """Listen on a port of an address, 0 for a free one, on behalf of this host's job; return the port."""
    _held[session] = ports.listen(address, port)
    held: int = _held[session].getsockname()[1]
    return held


def start_job(
    session: str, argv: Sequence[str], program: str, settings: Dict[str, Any], env: Mapping[str, str]
) -> int:
    """Start a Python program, which BOOT (`deploy/connect/channel.py`) reads with its settings; return the pid."""
    held = _held.pop(session, None)
    if held is not None:
        settings = dict(settings, listen_fd=held.fileno())
    _jobs[session] = _Job(argv, "SETTINGS = %r\n%s" % (settings, program), env, held)
    if held is not None:
        held.close()  # only the job has it now, so once the job ends, connections are refused
    return _jobs[session].process.pid


def job_said(session: str, seen: int, wait_s: float) -> Dict[str, Any]:
    """Wait for lines after the first `seen`, or for the job's end; return ``lines``, ``status``, ``errors``."""
    job = _jobs[session]
    with job.changed:
        job.changed.wait_for(lambda: len(job.lines) > seen or job.ended, wait_s)
        return {
            "lines": job.lines[seen:],
            "status": job.process.returncode if job.ended else None,
            "errors": "\n".join(job.errors) if job.ended else "",
        }


def end_job(session: str) -> None:
    """Kill what `start_job` started, or close the socket that `hold` opened for it."""
    held, job = _held.pop(session, None), _jobs.pop(session, None)
    if held is not None:
        held.close()
    if job is not None:
        job.end()
