"""Runs one of kit's commands as a child process, shows its progress, and ends it if the user interrupts."""

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
"""Seconds that an interrupted command may take to clean up."""
_LAST_LINES, _ERROR_LINES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command of kit that has ended."""

    code: int
    out: str
    """Its stdout, if that is machine-readable."""
    said: Sequence[str]
    """Its output lines for people."""
    seconds: float
    is_late: bool = False
    """Whether it was ended because it took longer than `TIMEOUT_S`."""

    @property
    def json(self) -> Any:
        """Its stdout, parsed; None if that is not JSON, as after an error."""
        try:
            return json.loads(self.out)
        except ValueError:
            return None

    @property
    def last_words(self) -> str:
        """Why the command failed: its error, else the end of its output."""
        if self.is_late:
            return f"not at its end after {TIMEOUT_S:.0f} s"
        lines = [line.strip() for line in self.said if line.strip()]
        errors = [place for place, line in enumerate(lines) if line.startswith("kit: ")]
        last = lines[errors[-1] :][:_ERROR_LINES] if errors else lines[-_LAST_LINES:]
        return "\n".join(last) or f"exit status {self.code}"


def run(
    argv: Sequence[str], log: Path, show: Callable[[str], object] | None, *, for_people: bool = False
) -> Done:
    """Run ``kit argv…`` until it ends, is late, or this process is interrupted.

    Args:
        argv: the arguments, without ``kit``.
        log: file that all of the output is appended to.
        show: called with each line for people, as it is printed.
        for_people: stdout is for people, too, not only stderr.
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
            start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which then ends the command
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
    """If a command still runs, interrupt it, and wait until it has stopped what it started."""
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
    """Ignore Ctrl-C in this block: an unfinished clean-up would leave ranks running."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
