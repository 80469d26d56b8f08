"""What a terminal is sent of text that comes from hosts and ranks."""

from __future__ import annotations

import io
import re
import sys
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodekit.deploy.commands import cli, status
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
