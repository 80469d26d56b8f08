"""What a terminal is sent of text that comes from hosts and ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodekit.deploy.commands import cli
from nodekit.deploy.commands.look_at_a_run import status
from nodekit.deploy.output import terminal
from nodekit.deploy.output.terminal import harmless
from nodekit.inventory.errors import KitError


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 3\tloss 0.1\nnext", "step 3\tloss 0.1\nnext"),
        ("\x1b[1;31mred\x1b[m", "\x1b[1;31mred\x1b[m"),
        (
            "a\x1b[2J\x1b[1;1Hb\x1b[?1049h\x1b[6nc",
            "abc",
        ),  # clears, moves, another screen, is asked for its place
        ("a\x9b2Jb\x9b31mc", "abc"),
        ("a\x1b]0;title\x07b\x1b]52;c;aGk=\x1b\\c\x9d0;t\x9cd", "abcd"),  # the title, the clipboard
        ("\x1b]8;;file:///etc/passwd\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x1bP+q544e\x1b\\b\x1b_x\x1b\\c\x1b^x\x1b\\d\x1bXx\x1b\\e", "abcde"),
        ("a\x1bcb\x1b(0c\x1b#8d\x1b7\x1b8", "abcd"),  # reset, another character set, a screen full of E
        ("a\x1b]0;no end", "a0;no end"),
        ("a\x1b[31", "a31"),
        ("a\x1b[>4;1mb\x1b[?4mc", "abc"),  # ends as a colour does, and is a mode of the keyboard
        ("50 %\r100 %\r\nend\r\n", "50 %\n100 %\nend\n"),
        ("a\x07\x08\x7f\x00b", "ab"),
        ("user\u202e\u2066txt.exe\u2069", "usertxt.exe"),
        ("half \ud83d of a pair, 进度 100 % 🙂", "half \ufffd of a pair, 进度 100 % 🙂"),
    ],
)
def test_what_a_terminal_would_act_on_is_left_out(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_colours_are_left_out_where_they_are_not_wanted() -> None:
    assert harmless("\x1b[1;31mred\x1b[m \x1b[2Jend", colours=False) == "red end"


@given(st.text(st.sampled_from("\x1b\x9b\x9d\x90\x9c[]P\\;?0123mJc\x07\r\n\t a\u202e\ud800é")))
def test_nothing_but_colours_is_left_of_any_text(text: str) -> None:
    shown = harmless(text)
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", rest)
    assert harmless(shown) == shown


@given(
    st.text(
        st.characters(
            exclude_categories=["Cc", "Cs"],
            exclude_characters="\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
        )
    )
)
def test_other_text_is_shown_as_it_is(text: str) -> None:
    assert harmless(f"{text}\t\n") == f"{text}\t\n"


@pytest.mark.parametrize("terminal_type", [Tty, io.StringIO])
def test_what_a_host_said_is_harmless_in_an_error_and_a_file_gets_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, terminal_type: type[io.StringIO]
) -> None:
    said = terminal_type()

    def fails(_: object) -> int:
        raise KitError("gpu1: its login says \x1b]0;mine\x07hello")

    monkeypatch.setattr(status, "run", fails)
    monkeypatch.setattr(sys, "stderr", said)
    assert cli.main(["status"]) == 1
    assert said.getvalue() == (
        "kit: gpu1: its login says hello\n"
        if terminal_type is Tty
        else "kit: gpu1: its login says \x1b]0;mine\x07hello\n"
    )
    assert sys.stderr is said


def test_a_console_draws_and_what_it_shows_is_harmless() -> None:
    from rich.live import Live
    from rich.text import Text

    out = Tty()
    wrapped = cast(io.StringIO, terminal.Harmless(out))
    console = terminal.console(wrapped, width=80, force_terminal=True)
    with Live(Text("one \x1b]0;mine\x07line"), console=console, auto_refresh=False):
        console.print("\x1b[6nsaid\x9b2J", markup=False)
    shown = out.getvalue()
    assert "line" in shown
    assert "said" in shown
    assert "\x1b[?25l" in shown, "the console's own: the cursor is hidden"
    assert not re.search("\x1b\\]|\x1b\\[6n|\x9b", shown)


def pipe_without_a_reader() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@contextlib.contextmanager
def file_without_room(path: Path) -> Iterator[io.TextIOWrapper]:
    """As on a full disk: no file of this process may grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("w") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield file
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_full", [False, True])
def test_what_acts_goes_on_where_its_output_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_full: bool
) -> None:
    with file_without_room(tmp_path / "out") if is_full else pipe_without_a_reader() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with terminal.screen(may_be_lost=True):
            for _ in range(3):
                print("stopping", flush=True)
            print("x" * 100_000)
        assert sys.stdout is stream
        stream.flush()  # as the interpreter does at its exit


def test_what_only_shows_ends_with_its_reader_and_says_that_a_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pipe_without_a_reader() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(BrokenPipeError), terminal.screen():
            print("a line", flush=True)
        stream.flush()
    with file_without_room(tmp_path / "out") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with (
            pytest.raises(KitError, match="what is printed cannot be written: File too large"),
            terminal.screen(),
        ):
            print("a line", flush=True)
        stream.flush()


@pytest.mark.parametrize(
    ("closed", "status"),
    [
        (">&-", 0),
        ("2>&-", 0),
        ("<&-", 0),
        ("<&- >&- 2>&-", 0),
        (">/dev/full", 1),
        (">/dev/full 2>/dev/full", 1),
    ],
)
def test_a_command_runs_without_stdin_stdout_or_stderr(closed: str, status: int, tmp_path: Path) -> None:
    """As from a daemon that has closed them."""
    kit = f"{sys.executable} -m nodekit.deploy.commands.cli schema"
    limit = "ulimit -f 0;" if "full" in closed else ""
    done = subprocess.run(
        ["sh", "-c", f"{limit} {kit} {closed}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if closed == ">full":
        assert "kit: what is printed cannot be written: File too large" in done.stderr


def test_a_working_folder_that_was_removed_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = f"cd gone; rmdir ../gone; {sys.executable} -m nodekit.deploy.commands.cli status"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        "kit: the working folder has been removed; cd to one that is there\n",
    )
