"""One piece of work at a time, behind the loop's back, whose errors are not lost."""

import threading
from collections.abc import Callable


class Background:
    """A thread for each call; not a daemon, so that the interpreter's end waits for it."""

    def __init__(self, name: str) -> None:
        """``name`` is the thread's."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, call: Callable[[], object]) -> None:
        """Begin ``call``; the one before must have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(call,), name=self._name)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the call under way; False if it takes longer than this. Raises what it raised, once."""
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
        """Raise what a call that has ended raised, once; never waits."""
        self.wait(0)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # whatever it is, it belongs to the loop
            self._error = error
