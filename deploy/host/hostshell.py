"""Run one command for `kit shell` and send its output.

The command is a child of this server, which also adopts orphaned descendants. So every descendant of the server belongs
to the command, and is ended with it.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from nodekit.deploy.host import processes

_CHUNK_BYTES = 32 * 1024
# The most chunks not acknowledged yet: a slow reader blocks the command, in place of filling memory.
_WINDOW = 16
_BEAT_S = 1.0
_LINGER_S = 0.3  # how long to read on after the command has ended, if a process it left behind holds the pipe
_POLL_S = 0.02
_KILL_S = 2.0
_CLOSE_S = 1.0

_window = threading.Semaphore(_WINDOW)
_starting = threading.Lock()
_is_running = threading.Event()
_is_ending = threading.Event()


def run(argv: List[str], part: Callable[[Any], None], limit_s: Optional[float] = None) -> Dict[str, Any]:
    """Run a command in the home folder, with an empty stdin; return ``{"status", "timed_out", "left"}``.

    The status is None if `end` was called before. Output is sent as parts ``[stream, text]``, with bytes that are not
    UTF-8 as surrogates; a part ``None`` is a heartbeat. ``left`` has the pids that could not be ended.

    Args:
        argv: the command, executed without a shell; ``python`` is this interpreter.
        part: sends a part.
        limit_s: end the command after so many seconds.
    """
    processes.adopt_orphans()
    limit = _Limit(part, limit_s)
    program = os.fsencode(sys.executable) if argv[0] == "python" else _bytes_of(argv[0])
    home = os.path.expanduser("~")
    with _starting:  # otherwise the command could start while `end` runs, and be missed by it
        if _is_ending.is_set():
            return {"status": None, "timed_out": False, "left": []}
        try:
            process = subprocess.Popen(
                [program, *map(_bytes_of, argv[1:])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=home if os.path.isdir(home) else "/",
                start_new_session=True,
            )
        except OSError as error:
            hint = "; with words in one pair of quotes, put before it: sh -c" if " " in argv[0] else ""
            part(["err", "kit: cannot run %s here: %s%s\n" % (argv[0], error.strerror, hint)])
            return {"status": 127 if error.errno == errno.ENOENT else 126, "timed_out": False, "left": []}
        _is_running.set()
    with process.stdout, process.stderr:  # type: ignore[union-attr]  # they are pipes
        _send_output(process, part, limit)
    _is_running.clear()  # processes that the command left behind on purpose, such as a daemon, stay
    return {"status": process.wait(), "timed_out": limit.is_late, "left": limit.left}


class _Limit:
    """The time limit of a command, checked by `tick`, which also sends a heartbeat every second."""

    def __init__(self, part: Callable[[Any], None], limit_s: Optional[float]) -> None:
        self.is_late = False
        self.left: List[int] = []
        self._part = part
        self._limit_s = limit_s
        self._begin = time.monotonic()
        self._beat = 0.0

    def tick(self) -> float:
        """Send a heartbeat, or end the command, if it is time to; return the time."""
        now = time.monotonic()
        if now - self._beat > _BEAT_S:
            self._part(None)
            self._beat = now
        if self._limit_s is not None and now - self._begin > self._limit_s and not self.is_late:
            self.is_late = True
            self.left = end(signal.SIGTERM, _KILL_S)
        return now


def _send_output(process: "subprocess.Popen[bytes]", part: Callable[[Any], None], limit: _Limit) -> None:
    """Send a command's output until the command has ended and all is read, or `_LINGER_S` after its last output."""
    selector = selectors.DefaultSelector()
    for name, pipe in (("out", process.stdout), ("err", process.stderr)):
        assert pipe is not None
        selector.register(pipe, selectors.EVENT_READ, name)
    ended = 0.0
    while selector.get_map() or process.poll() is None:
        now = limit.tick()
        if process.poll() is not None:
            ended = ended or now
            if now - ended > _LINGER_S:
                break
        if not selector.get_map():
            time.sleep(_POLL_S)
            continue
        for ready, _ in selector.select(0.1):
            data = os.read(ready.fd, _CHUNK_BYTES)
            if not data:
                selector.unregister(ready.fileobj)
                continue
            ended = ended and now  # there is still output: linger anew
            while not _window.acquire(timeout=0.1) and not _is_ending.is_set():
                limit.tick()
            part([ready.data, data.decode("utf-8", "surrogateescape")])


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def taken(number: int) -> None:
    """Acknowledge so many parts of output: as many more may be sent."""
    for _ in range(number):
        _window.release()


def close() -> None:
    """End the command if it still runs, as the reader is gone."""
    if _is_running.is_set():
        end(signal.SIGTERM, _CLOSE_S)


def end(number: int, grace_s: float) -> List[int]:
    """End all processes of the commands here with signal `number`, and SIGKILL after `grace_s`; return the pids left.

    These can only be processes that this user may not signal, such as those of sudo.
    """
    with _starting:
        _is_ending.set()
    own = os.getpid()
    for pid in processes.below(own):
        processes.ask_to_end(pid, number)
    asked = time.monotonic()
    while processes.below(own) and time.monotonic() - asked < grace_s:
        time.sleep(_POLL_S)
    # Repeat, as a process may have forked meanwhile. Count rounds, not seconds: a machine that stands still for a while
    # ends no process in that time.
    for _ in range(round(_KILL_S / _POLL_S)):
        found = processes.below(own)
        if not found:
            break
        for pid in found:
            processes.send(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return sorted(processes.below(own))
