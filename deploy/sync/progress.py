"""How far a sync, or a build, is on each host: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from nodekit.deploy.output import terminal

_LINE_EVERY_S = 3.0
_BUILD_LINE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One host's state in a sync."""

    host: str
    phase: str
    """checking, sending, placing or done"""
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


@contextmanager
def progress_bars(
    *, silent: bool = False, file: TextIO | None = None
) -> Iterator[Callable[[Progress], None]]:
    """What to hand to `send`: bars where `file` (stdout) is a terminal, else lines, or nothing."""
    file = file or sys.stdout
    if silent:
        yield lambda _: None
    elif file.isatty():
        with _Bars(file) as bars:
            yield bars
    else:
        yield _Lines(file)


class _Bars:
    def __init__(self, file: TextIO) -> None:
        from rich import progress as rich  # not needed where there is no terminal

        self._rich = rich.Progress(
            rich.TextColumn("  {task.description:>12}"),
            rich.BarColumn(bar_width=24),
            rich.TextColumn("{task.fields[files]}"),
            rich.DownloadColumn(),
            rich.TransferSpeedColumn(),
            rich.TextColumn("{task.fields[phase]}"),
            console=terminal.console(file),
            transient=True,
        )
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Bars:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def __call__(self, state: Progress) -> None:
        with self._lock:
            if state.host not in self._tasks:
                self._tasks[state.host] = self._rich.add_task(state.host, total=None, files="", phase="")
        total = state.bytes_total or None
        if state.phase == "done" and total is None:
            total = 1
        self._rich.update(
            self._tasks[state.host],
            total=total,
            completed=total if state.phase == "done" else state.bytes_done,
            phase=state.phase,
        )
        if state.files_total:
            files = f"{state.files_done}/{state.files_total} files"
            self._rich.update(self._tasks[state.host], files=files)


class _Lines:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def __call__(self, state: Progress) -> None:
        now = time.monotonic()
        with self._lock:
            if state.host not in self._last or state.phase != "sending":
                self._last[state.host] = (now, state.bytes_done)
                return
            at, bytes_then = self._last[state.host]
            if now - at < _LINE_EVERY_S:
                return
            self._last[state.host] = (now, state.bytes_done)
            rate = (state.bytes_done - bytes_then) / (now - at) / 1e6
            print(
                f"  {state.host}: {state.files_done}/{state.files_total} files, {state.bytes_done / 1e6:.1f} "
                f"of {state.bytes_total / 1e6:.1f} MB, {rate:.1f} MB/s",
                file=self._file,
                flush=True,
            )


def nothing(*_: object) -> None:
    """What to tell where nobody looks."""


@contextmanager
def build_lines(
    *, silent: bool = False, file: TextIO | None = None
) -> Iterator[Callable[[str, float, str], None]]:
    """What to tell of a build, with host, seconds and what it said last: a line each on a terminal, or now and then."""
    file = file or sys.stdout
    if silent:
        yield nothing
    elif file.isatty():
        with _LiveLines(file) as lines:
            yield lines
    else:
        last: dict[str, float] = {}

        def tell(host: str, seconds: float, said: str) -> None:
            if seconds - last.setdefault(host, 0.0) >= _BUILD_LINE_EVERY_S:
                last[host] = seconds
                print(f"  {host}: {seconds:.0f} s, {said[:120]}", file=file, flush=True)

        yield tell


class _LiveLines:
    def __init__(self, file: TextIO) -> None:
        from rich.live import Live

        self._live = Live(console=terminal.console(file), transient=True, auto_refresh=False)
        self._told: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _LiveLines:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, host: str, seconds: float, said: str) -> None:
        from rich.text import Text

        with self._lock:
            self._told[host] = (seconds, said)
            width = max(map(len, self._told))
            rows = [f"  {name:<{width}}  {at:4.0f} s  {text}" for name, (at, text) in self._told.items()]
            lines = [Text(row, no_wrap=True, overflow="ellipsis") for row in rows]
            self._live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
