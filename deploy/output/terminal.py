"""Takes from text of hosts and ranks what a terminal would act on, once for all that kit shows: see `screen`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# C0 but for tab and newline, DEL, C1, what turns the direction of writing, and halves of surrogates, which no terminal
# can be sent. Every escape sequence begins with one of them.
_UNSAFE = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_ANY = re.compile(f"[{_UNSAFE}]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_SEQUENCE = re.compile(
    rf"{_COLOUR.pattern}"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: the cursor, the screen, modes
    # OSC, DCS, SOS, PM and APC with all they carry: titles, links, the clipboard. One without an end is no sequence.
    rf"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^{_UNSAFE}\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
    r"|\r\n?"
    rf"|[{_UNSAFE}]"
)


def harmless(text: str, *, colours: bool = True) -> str:
    """The text without escape sequences and control characters; tabs, newlines and (`colours`) plain colours stay.

    A carriage return begins a line. What is left of a sequence that is cut off is shown as the text that it then is.
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
    """A terminal that is written to by `print`, and gets nothing but harmless text."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        """The terminal itself, for who draws on it."""

    def write(self, text: str) -> int:
        """Write it, made harmless."""
        self.stream.write(harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """Whatever is printed here to a terminal is harmless; a file or a pipe gets it as it is.

    A letter that their encoding lacks is printed as an escape.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    with contextlib.ExitStack() as stack:
        if sys.stdout.isatty():
            stack.enter_context(contextlib.redirect_stdout(cast(TextIO, Harmless(sys.stdout))))
        if sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(cast(TextIO, Harmless(sys.stderr))))
        yield


def console(file: TextIO | None = None, **options: Any) -> Console:
    """A console of rich on `file` (stdout): its own control sequences pass, and what it shows is made harmless."""
    from rich.console import Console  # it takes long, and few commands need it
    from rich.segment import Segment

    class Screen(Console):
        def render(self, *args: Any, **options: Any) -> Any:
            for part in super().render(*args, **options):
                if part.control or _ANY.search(part.text) is None:
                    yield part
                else:
                    yield Segment(harmless(part.text), part.style)

    file = file or sys.stdout
    return Screen(file=file.stream if isinstance(file, Harmless) else file, **options)


def shown_path(path: str) -> str:
    """A path as a person writes it here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
