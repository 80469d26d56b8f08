"""All output of kit: control sequences are kept from terminals, and output that cannot be written ends no job."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from rich.console import Console

# C0 except tab and newline, DEL, C1, characters that change the writing direction, and lone surrogates, which no
# encoding can send. Every escape sequence begins with one of these.
_UNSAFE = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_ANY = re.compile(f"[{_UNSAFE}]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_SEQUENCE = re.compile(
    rf"{_COLOUR.pattern}"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: the cursor, the screen, modes
    # OSC, DCS, SOS, PM and APC with their contents: titles, links, the clipboard. Without a terminator it is none.
    rf"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^{_UNSAFE}\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
    r"|\r\n?"
    rf"|[{_UNSAFE}]"
)


def harmless(text: str, *, colours: bool = True) -> str:
    """Remove escape sequences and control characters; tabs, newlines and (`colours`) plain colours stay.

    A carriage return becomes a newline. The rest of a sequence that is cut off is shown as plain text.
    """
    if _ANY.search(text) is None:
        return text

    def shown(found: re.Match[str]) -> str:
        part = found[0]
        if part[0] == "\r":
            return "\n"
        if "\ud800" <= part <= "\udfff":
            return "\ufffd"
        return part if colours and _COLOUR.fullmatch(part) else ""

    return _SEQUENCE.sub(shown, text)


class Harmless:
    """A terminal for `print` that receives only harmless text."""

    def __init__(self, stream: TextIO | Output) -> None:
        self.stream = stream
        """The terminal itself, for code that draws on it."""

    def write(self, text: str) -> int:
        """Write a text, made harmless."""
        self.stream.write(harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Output:
    """stdout or stderr, whose reader may end (``| head``), whose terminal may close, and whose disk may fill up."""

    def __init__(self, stream: TextIO, *, may_be_lost: bool) -> None:
        """Wrap a stream; ``may_be_lost``: go on if the output cannot be written; else the next write raises."""
        self.stream = stream
        self._may_be_lost = may_be_lost

    def write(self, text: str) -> int:
        """Write a text.

        Raises:
            BrokenPipeError: the reader of a pipe has ended.
            KitError: the text cannot be written.
        """
        with self._told():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer; raises as `write` does."""
        with self._told():
            self.stream.flush()

    def close_quietly(self) -> None:
        """Flush, or discard what cannot be written, so that the interpreter does not fail at its exit."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self._to_nothing()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_gone = error.errno in (errno.EPIPE, errno.EIO)
            if is_gone or not self._may_be_lost:
                self._to_nothing()
            if self._may_be_lost:
                return
            if isinstance(error, BrokenPipeError):
                raise
            raise KitError(
                f"what is printed cannot be written: {error.strerror}", cure="print it to somewhere else"
            ) from error

    def _to_nothing(self) -> None:
        """Redirect this output to /dev/null, also for child processes: writing without a reader must not fail."""
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def screen(*, may_be_lost: bool = False) -> Iterator[None]:
    """Make all output to a terminal harmless within this block; a file or a pipe gets it unchanged.

    A character that the encoding lacks is printed as an escape. ``may_be_lost``: see `Output`.
    """
    _open_what_is_closed()
    with contextlib.ExitStack() as stack:
        for stream, put in (
            (sys.stdout, contextlib.redirect_stdout),
            (sys.stderr, contextlib.redirect_stderr),
        ):
            if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
                stream.reconfigure(errors="backslashreplace")
            output = Output(stream, may_be_lost=may_be_lost)
            stack.callback(output.close_quietly)
            stack.enter_context(put(cast(TextIO, Harmless(output) if stream.isatty() else output)))
        yield


def _open_what_is_closed() -> None:
    """Open closed stdio on /dev/null: a daemon may have closed it, and the next opened file would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number, inheritable=True)
                os.close(handle)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def console(file: TextIO | None = None, **options: Any) -> Console:
    """Return a rich console on `file` (stdout): its own control sequences pass, and its content is made harmless."""
    from rich.console import Console  # imported here: it takes long, and few commands need it
    from rich.segment import Segment

    class Screen(Console):
        def render(self, *args: Any, **options: Any) -> Any:
            for part in super().render(*args, **options):
                if part.control or _ANY.search(part.text) is None:
                    yield part
                else:
                    yield Segment(harmless(part.text), part.style)

    file = file or sys.stdout
    return Screen(file=cast(TextIO, file.stream if isinstance(file, Harmless) else file), **options)


def shown_path(path: str) -> str:
    """Return a path as a user would type it here: relative, if it is below the working directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
