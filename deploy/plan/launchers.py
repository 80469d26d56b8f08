"""Find a launcher, such as torchrun, in a command: behind other programs, and in a shell's text."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nodekit.inventory.errors import KitError

_LAUNCHERS = {
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
    "accelerate-launch", "deepspeed", "fabric", "lightning", "horovodrun", "mpirun", "mpiexec", "srun",
}  # fmt: skip
# The word by which they start a program.
_START_BY = {"accelerate": "launch", "fabric": "run", "lightning": "run"}
SHELLS = {"sh", "bash", "dash", "ksh", "zsh"}
PYTHON_NAME = re.compile(r"(python|pypy)[\d.]*")
# Options whose value is the next word.
PYTHON_VALUED = re.compile(r"-[a-zA-Z]*[WX]|--check-hash-based-pycs")
SHELL_VALUED = re.compile(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file")
# Options behind which the interpreter's own end.
_PYTHON_ENDS = re.compile(r"-[a-zA-Z]*[cm]$")
_SHELL_ENDS = re.compile(r"-[a-zA-Z]*c$")
_SHELL_LINE = re.compile(r"#![^\n]*\b(ba|da|k|z)?sh\b")
# Words of a shell between which commands run under a condition, several times, or later.
_OPENS = {"if", "for", "while", "until", "case", "select", "function", "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_TESTS = {"[", "[[", "test"}
_COMMENT = re.compile(r"""(?m)^[ \t]*\#.*$ | [ \t]\#[^'"\n]*$""", re.VERBOSE)
_HERE_DOCUMENT = re.compile(r"(?ms)<<-?\s*(['\"]?)(\w+)\1(?P<rest>[^\n]*)\n.*?^\s*\2$")
# Programs that start the command behind them: their options whose value is the next word, and how many words precede
# the command.
_WRAPPERS = {
    "env": (r"-[a-zA-Z0]*[uC]|--unset|--chdir", 0),
    "nice": (r"-n|--adjustment", 0),
    "ionice": (r"-[cn]|--class|--classdata", 0),
    "numactl": (
        r"-[iwpPmNCc]|--(weighted-)?interleave|--preferred(-many)?|--membind|--(cpunode|physcpu|cpu)bind",
        0,
    ),
    "stdbuf": (r"-[ioe]|--input|--output|--error", 0),
    "time": (r"-[a-z]*[fo]|--format|--output", 0),
    "taskset": ("", 1),
    "timeout": (r"-[ks]|--kill-after|--signal", 1),
    **dict.fromkeys(("nohup", "setsid", "exec"), ("", 0)),
}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class _Launcher(NamedTuple):
    name: str
    argv: tuple[str, ...]
    """Its own command."""
    script: str = ""
    """The shell script that runs it, if one does."""


def refuse_launcher(target: tuple[str, ...], code: Path) -> None:
    """Refuse a command that runs a launcher: each rank would silently train alone, in a world of its own.

    Args:
        target: the command.
        code: the folder in which a shell script of the command may lie.

    Raises:
        KitError: says what to write in its place.
    """
    if (found := _launcher(target, code)) is None:
        return
    name, words, script = found
    from_script = tuple(itertools.dropwhile(lambda word: not word.endswith(".py"), words))
    instead = shlex.join(from_script) or "train.py …"
    front = target[: len(target) - len(words)]
    what, begins, cure = "the command", "runs", f"write python in its place: python {instead}"
    if script:  # its words are not as they were written: "$@" is '$@' here
        what, cure = script, f"write python in its place: python {(*from_script, 'train.py')[0]} …"
    elif target == words:
        begins, cure = "begins with", f"give the script alone: kit up … -- {instead}"
    elif target == (*front, *words):
        cure = f"write python in its place: kit up … -- {shlex.join(front)} python {instead}"
    raise KitError(f"{what} {begins} {name}; kit starts the ranks on all hosts in its place", cure=cure)


def wrapped(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that env, nohup, numactl or the like starts; () for another program, or without a command."""
    if (name := Path(argv[0]).name) not in _WRAPPERS:
        return ()
    valued, num_operands = _WRAPPERS[name]
    words = list(argv[1:])
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            del words[: 1 if re.fullmatch(valued, word) else 0]
        elif name == "env" and "=" in word:
            pass
        elif num_operands:
            num_operands -= 1
        else:
            return (word, *words)
    return ()


def first_operand(
    words: Sequence[str], *, valued: re.Pattern[str], ends: re.Pattern[str]
) -> tuple[str, str | None]:
    """Return what an interpreter runs: the option that says so, as -m or -c ("" for a file), and the word behind it.

    Args:
        words: its arguments.
        valued: options whose value is the next word.
        ends: options behind which the interpreter reads no more options of its own.
    """
    is_value = False
    for number, word in enumerate(words):
        following = next(iter(words[number + 1 :]), None)
        if is_value:
            is_value = False
        elif word == "--":
            return "", following
        elif not word.startswith(("-", "+")):
            return "", word
        elif ends.match(word):
            return word, following
        else:
            is_value = valued.fullmatch(word) is not None
    return "", None


def _launcher(argv: tuple[str, ...], code: Path | None = None) -> _Launcher | None:
    """Return the launcher that a command runs; behind wrappers, in a shell's -c, and in a shell script in `code`."""
    if more := wrapped(argv):
        return _launcher(more, code)
    if (of_shell := _shell_text(argv, code)) is not None:
        script, text = of_shell
        found = next(filter(None, map(_launcher, _simple_commands(text))), None)
        return found and found._replace(script=script)
    name = Path(argv[0]).name
    if name == "-m" or PYTHON_NAME.fullmatch(name):
        words = argv if name == "-m" else argv[1:]
        option, word = first_operand(words, valued=PYTHON_VALUED, ends=_PYTHON_ENDS)
        if option.endswith("c") or word is None:
            return None
        name = word if option else Path(word).name
    starts = name in _LAUNCHERS and (name not in _START_BY or _START_BY[name] in argv)
    return _Launcher(name, argv) if starts else None


def _shell_text(argv: tuple[str, ...], code: Path | None) -> tuple[str, str] | None:
    """Return what a shell runs: a script's name ("" for -c) and the text, "" if it cannot be read; None for others."""
    is_shell = Path(argv[0]).name in SHELLS
    words = argv[1:] if is_shell else argv
    option, name = first_operand(words, valued=SHELL_VALUED, ends=_SHELL_ENDS)
    if is_shell and option:
        return "", name or ""
    text = ""
    if code is not None and not option and name is not None and not Path(name).is_absolute():
        with contextlib.suppress(OSError, ValueError):  # whoever sends it says so
            path = code / name
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return (name or "", text) if is_shell or _SHELL_LINE.match(text) else None


def _simple_commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a shell's text that run in any case: not one behind ``||`` or a test, nor in an ``if``."""
    text = _HERE_DOCUMENT.sub(r"\g<rest>", _COMMENT.sub("", text))
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    depth, mark = 0, ""
    last: tuple[str, ...] = ("",)
    with contextlib.suppress(ValueError):  # a quote that is not closed: the shell says so
        for is_mark, group in itertools.groupby(lexer, lambda word: not word.strip("();<>|&")):
            if is_mark:
                mark = "".join(group)
                continue
            all_words = tuple(group)
            words = tuple(itertools.dropwhile(_ASSIGNMENT.match, all_words)) or ("",)
            depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
            is_tested = "||" in mark or ("&&" in mark and last[0] in _TESTS)
            if not depth and not is_tested and not last[-1].endswith("$") and words[0]:
                yield words
            last = all_words
