"""Show the progress of a sync or build on each host: bars on a terminal, otherwise a line every few seconds."""

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
    """The state of a sync on one host."""

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
    """Yield the `progress` argument of `send`: bars if `file` (stdout) is a terminal, else lines, or nothing."""
    file = file or sys.stdout
    if silent:
        yield nothing
        return
    if not file.isatty():
        yield _lines(file)
        return
    from rich import progress as rich  # needed on a terminal only

    tasks: dict[str, Any] = {}
    lock = threading.Lock()
    with rich.Progress(
        rich.TextColumn("  {task.description:>12}"),
        rich.BarColumn(bar_width=24),
        rich.TextColumn("{task.fields[files]}"),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TextColumn("{task.fields[phase]}"),
        console=terminal.console(file),
        transient=True,
    ) as bars:

        def show(state: Progress) -> None:
            with lock:
                if state.host not in tasks:
                    tasks[state.host] = bars.add_task(state.host, total=None, files="", phase="")
            is_done = state.phase == "done"
            total = state.bytes_total or (1 if is_done else None)
            done = total if is_done else state.bytes_done
            bars.update(tasks[state.host], total=total, completed=done, phase=state.phase)
            if state.files_total:
                bars.update(tasks[state.host], files=f"{state.files_done}/{state.files_total} files")

        yield show


def _lines(file: TextIO) -> Callable[[Progress], None]:
    """Return a function that prints a line per host every few seconds."""
    lock = threading.Lock()
    last: dict[str, tuple[float, int]] = {}

    def show(state: Progress) -> None:
        now = time.monotonic()
        with lock:
            if state.host not in last or state.phase != "sending":
                last[state.host] = (now, state.bytes_done)
                return
            at, bytes_then = last[state.host]
            if now - at < _LINE_EVERY_S:
                return
            last[state.host] = (now, state.bytes_done)
            rate = (state.bytes_done - bytes_then) / (now - at) / 1e6
            print(
                f"  {state.host}: {state.files_done}/{state.files_total} files, {state.bytes_done / 1e6:.1f} "
                f"of {state.bytes_total / 1e6:.1f} MB, {rate:.1f} MB/s",
                file=file,
                flush=True,
            )

    return show


def nothing(*_: object) -> None:
    """Ignore the progress."""


@contextmanager
def build_lines(*, silent: bool) -> Iterator[Callable[[str, float, str], None]]:
    """Yield a function for the progress of builds, called with host, seconds and the last line of output."""
    if silent:
        yield nothing
    elif sys.stdout.isatty():
        from rich.live import Live
        from rich.text import Text

        told: dict[str, tuple[float, str]] = {}
        lock = threading.Lock()
        with Live(console=terminal.console(sys.stdout), transient=True, auto_refresh=False) as live:

            def show(host: str, seconds: float, said: str) -> None:
                with lock:
                    told[host] = (seconds, said)
                    width = max(map(len, told))
                    rows = [f"  {name:<{width}}  {at:4.0f} s  {text}" for name, (at, text) in told.items()]
                    lines = [Text(row, no_wrap=True, overflow="ellipsis") for row in rows]
                    live.update(Text("\n", no_wrap=True).join(lines), refresh=True)

            yield show
    else:
        last: dict[str, float] = {}

        def tell(host: str, seconds: float, said: str) -> None:
            if seconds - last.setdefault(host, 0.0) >= _BUILD_LINE_EVERY_S:
                last[host] = seconds
                print(f"  {host}: {seconds:.0f} s, {said[:120]}", flush=True)

        yield tell
