"""Runs one of kit's commands in a process of its own, shows its progress, and ends it when it is interrupted."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TIMEOUT_S = 600.0
ENDING_S = 180.0
"""So long a command may take to clear up after it was interrupted."""
_LAST_LINES, _ERROR_LINES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command of kit that has ended."""

    code: int
    out: str
    """Its stdout, where that is for programs."""
    said: Sequence[str]
    """The lines for people."""
    seconds: float
    is_late: bool = False
    """Whether it was ended because it took longer than `TIMEOUT_S`."""

    @property
    def json(self) -> Any:
        """Its stdout; None where that is no JSON, as after an error."""
        try:
            return json.loads(self.out)
        except ValueError:
            return None

    @property
    def last_words(self) -> str:
        """Why it failed: its error, or else the end of what it said."""
        if self.is_late:
            return f"not at its end after {TIMEOUT_S:.0f} s"
        lines = [line.strip() for line in self.said if line.strip()]
        errors = [place for place, line in enumerate(lines) if line.startswith("kit: ")]
        last = lines[errors[-1] :][:_ERROR_LINES] if errors else lines[-_LAST_LINES:]
        return "\n".join(last) or f"exit status {self.code}"


def run(
    argv: Sequence[str], log: Path, show: Callable[[str], object] | None, *, for_people: bool = False
) -> Done:
    """Run ``kit argv…`` to its end, or to ours.

    Args:
        argv: without ``kit``.
        log: everything that it says is added to this file.
        show: takes each line for people, as it comes.
        for_people: its stdout, too, is for people.
    """
    since = time.monotonic()
    said: list[str] = []
    with log.open("a", encoding="utf-8") as file, tempfile.TemporaryFile("w+", errors="replace") as out:
        log.chmod(0o600)
        process = subprocess.Popen(
            [sys.executable, "-m", "nodekit.deploy.commands.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if for_people else out,
            stderr=subprocess.STDOUT if for_people else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal is for this process, which then ends that one
        )
        stream = process.stdout if for_people else process.stderr
        assert stream is not None
        reader = threading.Thread(target=_follow, args=(stream, file, said, show), daemon=True)
        is_late = False
        try:
            reader.start()
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
            reader.join()
            out.seek(0)
            text = out.read()
            file.write(text)
    seconds = time.monotonic() - since
    return Done(code=process.returncode, out=text, said=said, seconds=seconds, is_late=is_late)


def _follow(stream: IO[str], log: IO[str], said: list[str], show: Callable[[str], object] | None) -> None:
    for line in stream:
        said.append(line.rstrip())
        log.write(line)
        if show is not None:
            show(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """Have a command that still runs stop what it has started: it gets a Ctrl-C, and is waited for."""
    if process.poll() is not None:
        return
    with _no_interrupts():
        print("\nending what runs; a moment", flush=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C meanwhile: an unfinished clean-up would leave ranks running."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
