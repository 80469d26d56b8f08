"""Build the command of a rank from the user's, and read the options of kit's training module in it."""

from __future__ import annotations

import contextlib
import itertools
import posixpath
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nodekit.deploy.host import programs
from nodekit.deploy.plan.check import Facts
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Inventory
from nodekit.training.engine_info import lacking, refused_on_gpus
from nodekit.training.options.arguments import OptionsError, read
from nodekit.training.options.options import Options
from nodekit.training.reporting import trackers
from nodekit.training.tasks import TaskError
from nodekit.training.tasks.rows import read_splits

TRAINING_MODULE = ("-m", "nodekit.training")
PYTHON = "python"  # argv[0] of a Python command: the node's own interpreter takes its place
_LAUNCHERS = {
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
    "accelerate-launch", "deepspeed", "fabric", "lightning", "horovodrun", "mpirun", "mpiexec", "srun",
}  # fmt: skip
# The word by which they start a program.
_START_BY = {"accelerate": "launch", "fabric": "run", "lightning": "run"}
SHELLS = {"sh", "bash", "dash", "ksh", "zsh"}
PYTHON_NAME = re.compile(r"(python|pypy)[\d.]*")
PYTHON_VALUED = re.compile(r"-[a-zA-Z]*[WX]|--check-hash-based-pycs")  # options whose value is the next word
SHELL_VALUED = re.compile(r"[-+][a-zA-Z]*[oO]|--rcfile|--init-file")
_PYTHON_ENDS = re.compile(r"-[a-zA-Z]*[cm]$")
_SHELL_ENDS = re.compile(r"-[a-zA-Z]*c$")
_SHELL_LINE = re.compile(r"#![^\n]*\b(ba|da|k|z)?sh\b")
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

# Neither double braces, which other tools use in templates, nor `${node}`, which is for a shell or Hydra.
_WORD = re.compile(r"(?<![{$])\{(snapshot_dir|run_id|node)\}(?!\})")


def argv_of(
    inventory: Inventory, command: Sequence[str] | None, kinds: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return the command of a rank: the command line's, the inventory's, or the training module.

    ``train.py`` and ``python train.py`` are the same, and so with ``-m``: the node's own interpreter runs them,
    unbuffered. As under torchrun, a Python script need not end in .py, have a ``#!`` line or be executable. Other
    programs are executed.

    Args:
        inventory: scripts are looked for in its `job.code`.
        command: the command line's, which replaces the inventory's.
        kinds: absolute path → its `programs.kind` on the hosts.

    Raises:
        KitError: the command is another launcher, such as torchrun.
    """
    argv = tuple(command or inventory.job.command or TRAINING_MODULE)
    begin = 2 if argv[:2] == (PYTHON, "-u") else 1 if argv[0] == PYTHON else 0
    target = argv[begin:] or argv  # `python` without arguments is like any other program
    code = Path(inventory.job.code).expanduser()
    _refuse_launcher(target, code)
    name = target[0]
    is_script = begin > 0 and len(argv) > begin and not name.startswith("-")
    if name == "-m" or name.endswith(".py") or is_script:
        return (PYTHON, "-u", *target)
    if begin or not name:
        return argv
    kind = kinds.get(name, "") if Path(name).is_absolute() else programs.kind(str(code / name))
    if kind == "python":
        return (PYTHON, "-u", *target)
    return (f"./{name}", *argv[1:]) if kind and "/" not in name else argv


def argv_on(
    inventory: Inventory, command: Sequence[str] | None, facts: Mapping[str, Facts]
) -> tuple[str, ...]:
    """Return `argv_of`, with the kinds of files that the facts of the hosts contain."""
    return argv_of(inventory, command, next((found.files for found in facts.values() if found.files), {}))


def filled(argv: Sequence[str], *, snapshot_dir: str, run_id: str, node: str) -> tuple[str, ...]:
    """Return a command with ``{snapshot_dir}``, ``{run_id}`` and ``{node}`` replaced.

    All else stays byte for byte, other braces too: ``{{node}}``, ``${node}``, ``{"a": 1}``.
    """
    values = {"snapshot_dir": snapshot_dir, "run_id": run_id, "node": node}
    return tuple(_WORD.sub(lambda found: values[found[1]], each) for each in argv)


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


def _refuse_launcher(target: tuple[str, ...], code: Path) -> None:
    """Refuse a launcher: each rank would silently train alone, in a world of its own."""
    script = _shell_script(target, code)
    if (found := _launcher_in(*script[1:]) if script else _launcher(target)) is None:
        return
    name, words = found
    from_script = tuple(itertools.dropwhile(lambda word: not word.endswith(".py"), words))
    instead = shlex.join(from_script) or "train.py …"
    front = target[: len(target) - len(words)]
    what, begins, cure = "the command", "runs", f"write python in its place: python {instead}"
    if script:  # its words are not as they were written: "$@" is '$@' here
        what, cure = script[0], f"write python in its place: python {(*from_script, 'train.py')[0]} …"
    elif target == words:
        begins, cure = "begins with", f"give the script alone: kit up … -- {instead}"
    elif target == (*front, *words):
        cure = f"write python in its place: kit up … -- {shlex.join(front)} python {instead}"
    raise KitError(f"{what} {begins} {name}; kit starts the ranks on all hosts in its place", cure=cure)


def _launcher(argv: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
    """Return the launcher that a command runs, and its own command; behind wrappers and in a shell's -c, too."""
    if more := wrapped(argv):
        return _launcher(more)
    name = Path(argv[0]).name
    if name in SHELLS:
        option, text = first_operand(argv[1:], valued=SHELL_VALUED, ends=_SHELL_ENDS)
        return _launcher_in(text or "") if option else None
    if name == "-m" or PYTHON_NAME.fullmatch(name):
        words = argv if name == "-m" else argv[1:]
        option, word = first_operand(words, valued=PYTHON_VALUED, ends=_PYTHON_ENDS)
        if option.endswith("c") or word is None:
            return None
        name = word if option else Path(word).name
    starts = name in _LAUNCHERS and (name not in _START_BY or _START_BY[name] in argv)
    return (name, argv) if starts else None


def _launcher_in(text: str) -> tuple[str, tuple[str, ...]] | None:
    """As `_launcher`, of the commands in a shell's text."""
    return next(filter(None, map(_launcher, _simple_commands(text))), None)


def _shell_script(argv: tuple[str, ...], code: Path) -> tuple[str, str] | None:
    """Return the shell script in the code that a command runs, and its text; behind wrappers, too."""
    if more := wrapped(argv):
        return _shell_script(more, code)
    is_by_shell = Path(argv[0]).name in SHELLS
    words = argv[1:] if is_by_shell else argv
    option, name = first_operand(words, valued=SHELL_VALUED, ends=_SHELL_ENDS)
    if option or name is None or Path(name).is_absolute():
        return None
    try:
        text = (code / name).read_text(encoding="utf-8", errors="replace") if (code / name).is_file() else ""
    except (OSError, ValueError):  # whoever sends it says so
        return None
    return (name, text) if is_by_shell or _SHELL_LINE.match(text) else None


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


def refuse_options(
    argv: Sequence[str],
    code: Path,
    *,
    world_size: int,
    env: Mapping[str, str],
    modules: Mapping[str, Collection[str]],
) -> None:
    """Check the options of the training module, if the command runs it.

    Args:
        argv: the command of a rank.
        code: the folder that is synced; the text task's data in it are read too.
        world_size: the number of ranks.
        env: the environment of the ranks.
        modules: host → which of engine_info.LIBRARIES and trackers.TRACKERS are installed there.

    Raises:
        KitError: the module would refuse the options or the data.
    """
    asked = training_options(argv, {**env, "WORLD_SIZE": str(world_size)}, code)
    if asked is None:
        return
    if int(env.get("NODEKIT_NUM_GPUS", "0")) and (problem := refused_on_gpus(asked.engine)):
        raise KitError(problem)
    problems = {
        host: lacking(asked.engine, found) or trackers.lacking(asked.track, found)
        for host, found in modules.items()
    }
    if without := [host for host, problem in problems.items() if problem]:
        raise KitError(f"{', '.join(without)}: {problems[without[0]]}")
    if asked.task != "text" or asked.data is None or Path(asked.data).is_absolute():
        return  # only the hosts have a folder outside of the code
    if (code / asked.data).is_dir():
        try:
            read_splits(code / asked.data)
        except TaskError as error:
            raise KitError(str(error)) from error


def training_options(argv: Sequence[str], env: Mapping[str, str], code: Path | None = None) -> Options | None:
    """Return the training module's options in a command; None for another command, or for its --help.

    With ``code``, the folder that is synced, also read the files in it that the options name.

    Raises:
        KitError: the module would refuse the options.
    """
    if tuple(argv[2:4]) != TRAINING_MODULE:
        return None
    arguments = argv[4:]
    if {"-h", "--help"} & set(arguments):
        return None
    try:
        return read(arguments, env, folder=code)
    except OptionsError as error:
        raise KitError(str(error)) from None


def weights_folders(node: Mapping[str, Any], weights: str) -> list[str]:
    """Return the folders where a node of a run may have its weights, from its recorded plan; pure."""
    asked = training_options(node["argv"], node["env"])
    if asked is None or asked.output is None:
        return [posixpath.join(node["env"]["NODEKIT_OUTPUT_DIR"], weights)]
    output = posixpath.join(node["code_dir"], str(asked.output))
    # The order of node ranks may differ from the inventory's, so it may be any of these folders.
    own = [output, *(posixpath.join(output, f"node{rank}") for rank in range(1, node["max_nodes"]))]
    return [posixpath.join(each, weights) for each in own]
