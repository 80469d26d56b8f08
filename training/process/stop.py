"""Stopping: a signal sets a flag that the loop checks at the end of a step; a deadline bounds the wait."""

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

EXIT_STOPPED = 128 + signal.SIGTERM
"""143: the exit status of a rank that ended because it was stopped."""

_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    # SIGUSR2 comes from Slurm before the job's end or preemption; Windows does not have it.
    *([signal.SIGUSR2] if hasattr(signal, "SIGUSR2") else []),
)

_AGAIN_S = 0.5
"""A second Ctrl-C within so many seconds is ignored: a dying parent may signal its children twice."""

_END = b"\0"  # not the number of a signal


class Stop:
    """Handles SIGTERM, SIGUSR2 and SIGINT: sets ``requested``, and ends the process ``grace_s`` later in any case.

    The main thread may be in a collective with a lost rank, where no Python signal handler runs. So a thread reads the
    interpreter's wake-up descriptor, and can end the process by itself.
    """

    _signals: tuple[signal.Signals, ...] = _SIGNALS

    def __init__(self, grace_s: float = 20.0) -> None:
        """Install nothing yet: entering the ``with`` block does."""
        self.grace_s = grace_s
        self.exit_code = EXIT_STOPPED
        self._interrupted_s: float | None = None
        self._requested = threading.Event()
        self._call: Callable[[], None] | None = None
        self._left = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether a stop has been requested on this rank, by a signal or by ``request``."""
        return self._requested.is_set()

    def when_requested(self, call: Callable[[], None] | None) -> None:
        """Set a function to call, from any thread, when a stop is requested, or now if it was; None removes it."""
        self._call = call
        if call is not None and self.requested:
            call()

    def __enter__(self) -> "Stop":
        """Install the handlers; only the main thread may."""
        # On Windows, the wake-up descriptor cannot be a pipe.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in self._signals}
        self._thread = threading.Thread(target=self._watch, name="nodekit-stop", daemon=True)
        self._thread.start()
        if signal.SIGTERM in self._signals:
            _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the handlers, and cancel the deadline."""
        self._left.set()
        if self in _entered:
            _entered.remove(self)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        # To close the writer would not end the thread: a data loader's forked workers may hold it open.
        self._writer.send(_END)
        self._thread.join()
        self._writer.close()
        self._reader.close()

    def request(self) -> None:
        """Act as if SIGTERM had come; any thread may call it."""
        if not self.requested:
            self._requested.set()
            self.end_within_grace(self.exit_code)
            if (call := self._call) is not None:
                call()

    def end_within_grace(self, exit_code: int) -> None:
        """End the process by ``exit_code`` after the grace, unless the ``with`` block is left before."""
        threading.Thread(
            target=self._deadline, args=(exit_code,), name="nodekit-deadline", daemon=True
        ).start()

    def _watch(self) -> None:
        while (number := self._reader.recv(1)) != _END:
            if number[0] not in self._signals:
                continue
            if number[0] == signal.SIGINT:
                if self._interrupted_s is None:
                    self._interrupted_s = time.monotonic()
                # A second Ctrl-C ends the process at once.
                elif time.monotonic() - self._interrupted_s > _AGAIN_S:
                    os._exit(128 + signal.SIGINT)
                if not self.requested:
                    self.exit_code = 128 + signal.SIGINT
            self.request()

    def _deadline(self, exit_code: int) -> None:
        if not self._left.wait(self.grace_s):
            sys.stderr.write(f"nodekit: still not at an end after {self.grace_s:g} s of grace: ending here\n")
            sys.stderr.flush()
            os._exit(exit_code)


_entered: list[Stop] = []
"""The Stops whose ``with`` blocks are active, the outermost first."""


def _hold_sigterm() -> None:
    """Block SIGTERM before a fork, so that one that reaches the child early waits for `_leave_alone`."""
    if _entered:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _release_sigterm() -> None:
    if _entered:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _leave_alone() -> None:
    """Detach a forked child from its parent's Stop: SIGTERM ends the child, as a pool ends its workers.

    SIGINT and SIGUSR2 come to all processes at once, from a terminal or Slurm, and do not end the child: a step may
    still need its data loader's workers.
    """
    if _entered:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, _entered[0]._old_handlers[signal.SIGTERM])
        _release_sigterm()
        _entered.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_leave_alone)


@contextmanager
def signals_put_off(grace_s: float) -> Iterator[None]:
    """Put off SIGTERM, SIGINT and SIGUSR2 to the block's end, at most for the grace; only in the main thread."""
    stop = Stop(grace_s)
    try:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("only the main thread hears of signals")
        stop.__enter__()
    except OSError:  # not the main thread, or no file descriptors are left
        yield
        return
    try:
        yield
    finally:
        stop.__exit__(None, None, None)
        if stop.requested:
            signal.raise_signal(stop.exit_code - 128)


class Interruptible(Stop):
    """Ends the process at once by Ctrl-C, with a line: while it waits for other ranks, there is nothing to save."""

    _signals = (signal.SIGINT,)

    def __init__(self, waits: str) -> None:
        """``waits`` says what the process was doing, for the line."""
        super().__init__()
        self._waits = waits

    def request(self) -> None:
        """Print the line and end the process."""
        sys.stderr.write(f"nodekit: interrupted while {self._waits}\n")
        sys.stderr.flush()
        os._exit(self.exit_code)


def leave(exit_code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    At shutdown, a thread of gloo may still hold a python object of the last collective, and releasing the object aborts
    the process (torch 2.13, in 1 run of 10).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; Python writes to the wake-up descriptor only for signals that have a handler."""
