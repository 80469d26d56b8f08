"""Prints the phases of a command, and how long each took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

SILENT_S = 1.0
"""Seconds after which a phase prints what it waits for."""


class Phases:
    """Prints how long each phase took, and records it."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self.began = time.time()
        self.done: list[tuple[str, float, float]] = []
        """Name, seconds, and end time of each phase."""

    @contextlib.contextmanager
    def phase(self, name: str, *, waits_for: str = "") -> Iterator[list[str]]:
        """Time a phase; at its end print what the caller has put into the list; print `waits_for` if it takes long."""
        said: list[str] = []
        start = time.monotonic()
        waiting = threading.Timer(SILENT_S, self.say, [f"{name:<8} waiting for {waits_for}"])
        if waits_for:
            waiting.start()
        try:
            yield said
        finally:
            waiting.cancel()
        seconds = time.monotonic() - start
        self.done.append((name, seconds, time.time()))
        self.say(f"{name:<8} {'; '.join(said)}  ({seconds:.1f} s)")

    def say(self, text: str) -> None:
        """Print one line, unless silent."""
        if not self._silent:
            print(text, flush=True)
