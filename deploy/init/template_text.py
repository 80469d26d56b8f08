"""Formats an inventory's text, line by line; pure.

Every text from a file or a host goes through `scalar`, `key_of`, `comment` or `keyed`, so that it can neither add a
line nor be read as YAML syntax.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

CHOOSE = "CHOOSE"
"""Start of a comment that asks for a decision."""
WIDTH = 100
_COMMENT_COLUMN = 34
_PLAIN = re.compile(r"[A-Za-z_/~][A-Za-z0-9_./~-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", "~")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An inventory's text, and a summary of it."""

    text: str
    summary: str
    num_choices: int
    """Number of comments that ask for a decision."""

    @classmethod
    def of(cls, lines: Iterable[str], summary: str) -> Draft:
        """Return the draft with these lines."""
        text = "\n".join(line.rstrip() for line in lines) + "\n"
        num_choices = sum(f"# {CHOOSE}" in line for line in text.splitlines())
        return cls(text=text, summary=summary, num_choices=num_choices)


def gib(mib: int) -> str:
    """Format MiB as GiB: ``80 GiB``."""
    return f"{mib / 1024:.0f} GiB" if mib >= 10 * 1024 else f"{mib / 1024:.1f} GiB"


def scalar(value: object) -> str:
    """Return a value as YAML: plain if unambiguous, else in double quotes."""
    text = str(value)
    if isinstance(value, int) or re.fullmatch(r"[0-9a-fA-F.:]+/[0-9]+", text):
        return text
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def key_of(name: str) -> str:
    """Return a host's name as a YAML key."""
    is_plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name) and name.lower() not in _WORDS
    return name if is_plain else json.dumps(name)


def visible(text: str) -> str:
    """Return a text on one line, without control characters of a terminal or YAML."""
    return "".join(each for each in " ".join(text.split()) if each.isprintable())


def shown(text: str) -> str:
    """Quote a file name for a shell."""
    return visible(shlex.quote(text))


def comment(text: str, indent: str = "", bullet: str = "") -> list[str]:
    """Wrap a text into comment lines; with a bullet, later lines are indented below the first."""
    return textwrap.wrap(
        visible(text),
        WIDTH,
        initial_indent=f"{indent}# {bullet}",
        subsequent_indent=f"{indent}# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def heading(written: str, *tries: str, name: str) -> list[str]:
    """Return the top of an inventory: its origin, commands to try, and its name."""
    choose = f"Lines with {CHOOSE} want a decision of yours. `kit schema` has every key that can be set."
    hints = [f"#   {each}" for each in tries]
    return [*comment(written), "#", *hints, "#", *comment(choose), "", f"name: {scalar(name)}", ""]


def keyed(key: str, about: str) -> list[str]:
    """Return the line ``key: value   # comment``."""
    return [f"{key:<{_COMMENT_COLUMN}} # {visible(about)}"]
