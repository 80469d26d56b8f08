"""Ctrl-C, and what means the same."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


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
