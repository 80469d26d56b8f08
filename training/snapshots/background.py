"""Run one call at a time in a thread, and raise its exception later in the caller's thread."""

import threading
from collections.abc import Callable


class Background:
    """Runs each call in a thread of its own, which is no daemon, so that the interpreter waits for it at exit."""

    def __init__(self, name: str) -> None:
        """``name`` is that of each thread."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, call: Callable[[], object]) -> None:
        """Start ``call``; ``wait`` must have been called for the previous one."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(call,), name=self._name)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the running call, and raise its exception, once; return False after ``timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def check(self) -> None:
        """Raise the exception of a call that has ended, once; never wait."""
        self.wait(0)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # raised by `wait`
            self._error = error
