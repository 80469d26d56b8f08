"""Handling of Ctrl-C, and of the signals that are treated like it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any


class NothingLeft(KeyboardInterrupt):
    """A Ctrl-C after which nothing that kit had started is still running."""


class Terminated(KeyboardInterrupt):
    """SIGTERM in place of Ctrl-C: a machine that shuts down sends it too, so it may not be meant for the job."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM too, so that both signals get the same cleanup."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_terminal() -> None:
    """Redirect stdio of a closed terminal to /dev/null: nobody reads it any more, and writing must not fail."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


class Interrupts:
    """Decides which Ctrl-C and SIGTERM interrupt within its `with` block: each one, only the next one, or none.

    SIGHUP, from a closed terminal, interrupts as these do, but never counts as a second Ctrl-C: both the shell and the
    kernel may send it. If it does not interrupt, the program goes on without a terminal.

    Shutdown of a job must not be interrupted: the job would go on. The `with` block must be in the main thread. Signals
    that are ignored, as SIGINT is in a background process, stay ignored.
    """

    def __init__(self) -> None:
        self.again = False
        """Whether a signal has come that did not interrupt. A bool: interrupted code may hold an Event's lock."""
        self._next = self._later = True
        """Whether the next signal interrupts, and those after it."""
        self._interrupt = KeyboardInterrupt()
        """The exception for the last signal."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before is signal.SIG_DFL or (number != signal.SIGHUP and before is not signal.SIG_IGN):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def each(self) -> None:
        """Let each signal interrupt: nothing has been started yet, or nothing is left running."""
        self._next = self._later = True
        self.again = False

    def once(self) -> None:
        """Let the next signal interrupt, and none after it; raise at once if one has come since `hold`."""
        self._next, self._later = True, False
        if self.again:
            self._next = self.again = False
            raise self._interrupt

    def hold(self) -> None:
        """Let no signal interrupt."""
        self._next = self._later = False

    def _hear(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            if self._next:
                self._next = self._later
                raise KeyboardInterrupt("SIGHUP (its terminal was closed)")
            return
        self._interrupt = Terminated("SIGTERM") if number == signal.SIGTERM else KeyboardInterrupt()
        if not self._next:
            self.again = True
            return
        self._next = self._later
        raise self._interrupt
