"""Being stopped: a signal sets a flag for the loop to act on at a step's edge; a deadline bounds the wait."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

EXIT_STOPPED = 128 + signal.SIGTERM
"""143, by which kit knows that a rank ended because it was told to."""

_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    # Slurm's, before it takes the nodes away; Windows has none.
    *([signal.SIGUSR2] if hasattr(signal, "SIGUSR2") else []),
)

_END = b"\0"  # no signal's number


class Stop:
    """Takes SIGTERM, SIGUSR2 and SIGINT: ``requested`` is then True, and ``grace_s`` later the process ends anyhow.

    The main thread may be deep in a collective with a peer that is gone, where no Python handler runs. So the
    interpreter's wake-up descriptor tells a thread, which needs nobody's help to end the process.
    """

    def __init__(self, grace_s: float = 20.0) -> None:
        self.grace_s = grace_s
        self.exit_code = EXIT_STOPPED
        self._requested = threading.Event()
        self._left = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether a signal has come (to this rank)."""
        return self._requested.is_set()

    def __enter__(self) -> "Stop":
        """Take the signals; only the main thread may."""
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in _SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="nodekit-stop", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back, and call the deadline off."""
        self._left.set()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        # Not by closing it: a data loader's workers, forked meanwhile, may hold it open.
        os.write(self._write_fd, _END)
        self._thread.join()
        os.close(self._write_fd)
        os.close(self._read_fd)

    def end_within_grace(self, exit_code: int) -> None:
        """End the process after the grace unless the ``with`` block is left by then."""
        threading.Thread(
            target=self._deadline, args=(exit_code,), name="nodekit-deadline", daemon=True
        ).start()

    def _watch(self) -> None:
        while (number := os.read(self._read_fd, 1)) != _END:
            if number[0] not in _SIGNALS:
                continue
            if number[0] == signal.SIGINT and self.requested:  # Ctrl-C again: at once
                os._exit(128 + signal.SIGINT)
            if not self.requested:
                self.exit_code = 128 + signal.SIGINT if number[0] == signal.SIGINT else EXIT_STOPPED
                self._requested.set()
                self.end_within_grace(self.exit_code)

    def _deadline(self, exit_code: int) -> None:
        if not self._left.wait(self.grace_s):
            sys.stderr.write(f"nodekit: still not at an end after {self.grace_s:g} s of grace: ending here\n")
            sys.stderr.flush()
            os._exit(exit_code)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Be there: without a handler there is nothing to wake anyone up."""
