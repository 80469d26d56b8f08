"""What kit's agent on this node tells a rank while it runs, each time a line of JSON in a FIFO.

``{"kind": "lost"}``: another rank is lost. ``{"kind": "pause"}``: another node comes in; SIGTERM for a rank that cannot
pause. ``{"kind": "stalled"}``: this rank has not stopped yet, and may be waiting for another.
``{"kind": "next", ...}``: the environment of the next attempt, for a rank that waits for it.
deploy/agent/ranks/messages.py is the other end.
"""

import functools
import json
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger("nodekit.training")

Kind = Literal["lost", "pause", "stalled"]


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
        self._told: set[str] = set()  # of the newest attempt that is known
        self._is_ignored = False
        self.has_left = threading.Event()
        """Set by `ignore`; there is another one for each attempt."""
        self._next: queue.SimpleQueue[NextAttempt] = queue.SimpleQueue()
        # For writing too, or it would end whenever the agent closes its own end.
        self._file = os.fdopen(os.open(pipe, os.O_RDWR | os.O_CLOEXEC), "rb")
        threading.Thread(target=self._read, name="nodekit-agent", daemon=True).start()

    def when(self, kind: Kind, call: Callable[[], None], *, is_default: bool = False) -> None:
        """Set what the thread calls for a message of this kind; a default replaces nothing.

        If such a message of the present attempt has come already, ``call`` is called here.
        """
        with self._lock:
            if self._is_ignored:
                self._is_ignored, self.has_left = False, threading.Event()
            if is_default and kind in self._calls:
                return
            self._calls[kind] = call
            if kind in self._told:
                call()

    def ignore(self) -> None:
        """Forget what is to be called; once this has returned, nothing is, until `when`."""
        with self._lock:
            self._calls.clear()
            self._is_ignored = True
            self.has_left.set()

    def say_waiting(self, *, has_paused: bool) -> None:
        """Tell the agent, without waiting for its next look, that this rank waits for the next attempt.

        Args:
            has_paused: whether all ranks agreed to pause, and none is lost.
        """
        with suppress(OSError):
            handle = os.open(self._pipe.with_name("agent"), os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(handle, b"p" if has_paused else b"l")
            finally:
                os.close(handle)

    def next_attempt(self, timeout_s: float) -> NextAttempt | None:
        """Wait for the next attempt, at most that long; the newest, if there have been several."""
        found = None
        with suppress(queue.Empty):
            found = self._next.get(timeout=timeout_s)
            while True:
                found = self._next.get_nowait()
        return found

    @property
    def is_over(self) -> bool:
        """Whether the attempt that `next_attempt` returned last has lost a rank since, or has a successor."""
        return "lost" in self._told or not self._next.empty()

    def _read(self) -> None:
        for line in self._file:
            try:
                message = json.loads(line)
            except ValueError:  # it had no room in the FIFO; then kit ends this process
                continue
            with self._lock:
                self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "next":
            self._told.clear()
            self._next.put(NextAttempt(message["env"], message["log"]))
            kind = "lost"  # for a loop that is still in an attempt: that one is over
        else:
            self._told.add(kind)
        if call := self._calls.get(kind):
            try:
                call()
            except Exception:  # no thread can be started, say; what comes next is to be heard all the same
                log.exception("what kit has told this rank (%s) could not be followed", kind)
        elif kind == "pause" and not self._is_ignored:
            stop_to_pause()


def stop_to_pause() -> None:
    """Send SIGTERM to this rank, which cannot pause, and to its whole process group."""
    os.kill(0, signal.SIGTERM)


@functools.cache
def messages_from(pipe: Path) -> AgentMessages | None:
    """Return the messages of this FIFO; None if it cannot be opened."""
    try:
        return AgentMessages(pipe)
    except OSError:
        return None
