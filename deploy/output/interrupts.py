"""Ctrl-C, and what means the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any


class NothingLeft(KeyboardInterrupt):
    """A Ctrl-C by which all that kit had started is ended, for sure."""


class Terminated(KeyboardInterrupt):
    """SIGTERM in place of Ctrl-C: a machine that shuts down sends it, too, and nobody may have meant the job."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM is a Ctrl-C too: what that ends or mends is ended or mended in either case."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_terminal() -> None:
    """Let go of a terminal that is closed: nobody reads what is said from here on, and saying it must not fail."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


class Interrupts:
    """What Ctrl-C and SIGTERM do meanwhile: each one interrupts, or the next one alone, or none.

    SIGHUP, of a terminal that is closed, interrupts like these where one would; elsewhere it is no second Ctrl-C: shell
    and kernel may both send it, and what goes on goes on without a terminal.

    What ends a job must not be interrupted itself: the job would go on. It does nothing before its `with`, which is for
    the main thread, and nothing to a signal that is ignored, as that of a background process is.
    """

    def __init__(self) -> None:
        self.again = False
        """One has come that did not interrupt. No threading.Event: its lock could be held by who is interrupted."""
        self._next = self._later = True
        """Whether the next one interrupts, and those after it."""
        self._interrupt = KeyboardInterrupt()
        """What the last one raises."""
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
        """Each one interrupts: there is nothing yet, or nothing any more, that it could leave running."""
        self._next = self._later = True
        self.again = False

    def once(self) -> None:
        """The next one interrupts, and none after it; one that has come since `hold` does so at once."""
        self._next, self._later = True, False
        if self.again:
            self._next = self.again = False
            raise self._interrupt

    def hold(self) -> None:
        """None interrupts."""
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
