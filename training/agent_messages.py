"""What kit's agent on this node tells a rank while it runs, each time a line of JSON in a FIFO.

``{"kind": "lost"}``: another rank is lost. ``{"kind": "pause"}``: another node comes in; SIGTERM for a rank that cannot
pause. ``{"kind": "next", ...}``: the environment of the next attempt, for a rank that waits for it.
deploy/agent/ranks/messages.py is the other end.
"""

import functools
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["lost", "pause"]


@dataclass(frozen=True)
class NextAttempt:
    """An attempt in which this process goes on."""

    env: Mapping[str, str]
    """What differs from the environment that the process was started with."""
    log: str
    """The file for stdout and stderr."""


class AgentMessages:
    """Reads the messages, in a thread, to the end of the process."""

    def __init__(self, pipe: Path) -> None:
        """Open the FIFO; from now on the agent knows that this rank listens."""
        self._pipe = pipe
        self._lock = threading.Lock()
        self._calls: dict[str, Callable[[], None]] = {}
        self._is_ignored = False
        self._next: queue.SimpleQueue[NextAttempt] = queue.SimpleQueue()
        # For writing too, or it would end whenever the agent closes its own end.
        self._file = os.fdopen(os.open(pipe, os.O_RDWR | os.O_CLOEXEC), "rb")
        threading.Thread(target=self._read, name="nodekit-agent", daemon=True).start()

    def when(self, kind: Kind, call: Callable[[], None], *, is_default: bool = False) -> None:
        """Have the thread call this, in place of what was given before, unless it is but the default."""
        with self._lock:
            self._calls[kind] = self._calls.get(kind, call) if is_default else call
            self._is_ignored = False

    def ignore(self) -> None:
        """From now on, when this returns, nothing is called."""
        with self._lock:
            self._calls.clear()
            self._is_ignored = True

    def say_waiting(self) -> None:
        """Have the agent look at once at what this rank does: it waits for the next attempt."""
        with suppress(OSError):
            handle = os.open(self._pipe.with_name("agent"), os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(handle, b"\n")
            finally:
                os.close(handle)

    def next_attempt(self, timeout_s: float) -> NextAttempt | None:
        """Wait for the next attempt, at most that long."""
        with suppress(queue.Empty):
            return self._next.get(timeout=timeout_s)
        return None

    def _read(self) -> None:
        for line in self._file:
            try:
                message = json.loads(line)
            except ValueError:  # it had no room in the FIFO; then kit ends this process
                continue
            if message["kind"] == "next":
                self._next.put(NextAttempt(message["env"], message["log"]))
                continue
            with self._lock:
                if call := self._calls.get(message["kind"]):
                    call()
                elif message["kind"] == "pause" and not self._is_ignored:  # who cannot pause stops
                    os.kill(0, signal.SIGTERM)


@functools.cache
def messages_from(pipe: Path) -> AgentMessages | None:
    """Those of this FIFO; None where there is none."""
    try:
        return AgentMessages(pipe)
    except OSError:
        return None
