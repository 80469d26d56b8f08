"""One call at a time in a thread, whose exception is raised later in the caller's."""

import threading
from collections.abc import Callable


class Background:
    """A thread for each call; no daemon, so that the interpreter waits for it at exit."""

    def __init__(self, name: str) -> None:
        """``name`` is the thread's."""
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
        """Wait for the running call; False after ``timeout_s``. Raises what the call raised, once."""
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
        """Raise what an ended call raised, once; never waits."""
        self.wait(0)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # raised by `wait`
            self._error = error
