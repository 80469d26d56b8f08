"""Files of the code folder that are not sent because .gitignore names them: when to warn, and how a failure shows it.

Data is often ignored by git. A script whose data is missing on the nodes may fail, or train a different model.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nodekit.deploy.agent.ranks.failures import message_of
from nodekit.deploy.output.wording import size_text
from nodekit.deploy.story.cause import Cause
from nodekit.deploy.story.verdict import Verdict
from nodekit.deploy.sync.listing import Tree
from nodekit.deploy.sync.selection import IGNORE_FILE, Why, above, reasons

LARGE_BYTES = 10_000_000  # from this size on, ignored files are always reported
MAX_ENTRIES, MAX_S = 20_000, 1.0  # the most files, and seconds, for looking into ignored folders
MAX_NAMED = 500  # the most paths on record
_MAX_LINES = 4
# Files that tools create again wherever they run, and hidden files, which are settings and often secrets.
_BY_PRODUCT = re.compile(r"\..*|__pycache__|node_modules|.*\.(pyc|pyo|egg-info|swp)|.*~")
_MISSING = re.compile(
    r"No such file|[Nn]ot found|[Uu]nable to (?:find|open|load)|(?:does not|doesn't) exist|[Cc]annot (?:find|open)"
    r"|[Cc]ould(?: not|n't) (?:find|open|load)|[Cc]an't (?:find|open|load)|no data|is missing"
)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The ignored files that are not sent."""

    why: Mapping[str, Why]
    """Path → why it is ignored; a folder ends with a slash, and stands for all files in it."""
    num_files: int = 0
    size_bytes: int = 0
    is_all: bool = True
    """Whether all files were counted; False if there may be more."""
    matters: bool = False
    """Whether to warn: the files are large, or some are where the command looks."""
    lines: tuple[str, ...] = ()
    """The lines for .kitignore that send them, the most important first."""

    def said(self) -> list[str]:
        """Return a warning for the user; [] if it does not matter."""
        if not self.matters:
            return []
        least = "" if self.is_all else "at least "
        sources = ", ".join(sorted({each.source for each in self.why.values()})[:_MAX_LINES])
        files = f"{self.num_files} file{'' if self.num_files == 1 else 's'}"
        shown = ", ".join(f"`{line}`" for line in self.lines[:_MAX_LINES])
        shown += " …" if len(self.lines) > _MAX_LINES else ""
        verb = f"send{'s' if len(self.lines) == 1 else ''} {'it' if self.num_files == 1 else 'them'}"
        return [
            f"left out: {least}{files}, {size_text(self.size_bytes)}, ignored by {sources}: "
            f"{shown} in {IGNORE_FILE} {verb}"
        ]

    def to_dict(self) -> dict[str, list[str]]:
        """Return the form in a run's record: path → [the file that ignores it, the line that sends it]."""
        return {path: list(why) for path, why in self.why.items()}


def find(tree: Tree, argv: Sequence[str]) -> LeftOut:
    """Return which files of a folder are ignored, and whether that matters to the command.

    Args:
        tree: the files that are sent.
        argv: the command of a rank; it is expected to look in the files and folders that it names.
    """
    root = str(tree.root)
    named = _named(root, argv)
    near = [path if os.path.isdir(f"{root}/{path}") else os.path.dirname(path) for path in named]  # noqa: PTH112, PTH120
    told = {
        path: repository
        for path, repository in tree.ignored.items()
        if path not in tree.stats and (not _is_by_product(path) or _is_named(path, named))
    }
    is_all = len(told) <= MAX_ENTRIES
    why = reasons(tree.root, dict(itertools.islice(told.items(), MAX_ENTRIES)))
    found: list[tuple[bool, bool, int, str]] = []
    deadline, left, num_files = time.monotonic() + MAX_S, MAX_ENTRIES, 0
    for path in why:
        if any(f"{folder}/" in why for folder in above(path)):
            continue  # its folder is listed
        before, size = num_files, 0
        for size_bytes in _sizes(root, path, tree):
            size, num_files, left = size + size_bytes, num_files + 1, left - 1
            if left < 0 or time.monotonic() > deadline:
                is_all = False
                break
        if num_files > before:
            is_near = any(_is_below(path, each) for each in near)
            found.append((_is_named(path, named), is_near, size, path))
    found.sort(key=lambda each: (not each[0], not each[1], -each[2], each[3]))
    size_bytes = sum(size for _, _, size, _ in found)
    return LeftOut(
        why={path: why[path] for *_, path in found[:MAX_NAMED]},
        num_files=num_files,
        size_bytes=size_bytes,
        is_all=is_all,
        matters=size_bytes >= LARGE_BYTES or any(is_named or is_near for is_named, is_near, _, _ in found),
        lines=tuple(dict.fromkeys(why[path].line for *_, path in found)),
    )


def _named(root: str, argv: Sequence[str]) -> list[str]:
    """Return the paths in the folder that a command names, as arguments or as the values of options."""
    words = [
        part for word in argv[1:] for part in (word, word.partition("=")[2]) if part and "\0" not in part
    ]
    if argv[1:3] and "-m" in argv[1:3]:  # python -u -m package.module
        module = argv[argv.index("-m") + 1 :][:1]
        words += [f"{each.replace('.', '/')}{end}" for each in module for end in ("", ".py")]
    found = (os.path.relpath(os.path.join(root, word), root) for word in words)  # noqa: PTH118
    return [
        each
        for each in dict.fromkeys(found)
        if not each.startswith(os.pardir) and os.path.lexists(f"{root}/{each}")
    ]


def _is_named(path: str, named: Sequence[str]) -> bool:
    return any(_touches(path, each) for each in named)


def _touches(path: str, named: str) -> bool:
    """Whether an ignored path is the named one, or inside of it, or contains it."""
    return (named != "." and _is_below(path, named)) or f"{named}/".startswith(path)


def _is_below(path: str, folder: str) -> bool:
    return folder in ("", ".", path.rstrip("/")) or path.startswith(f"{folder}/")


def _is_by_product(path: str) -> bool:
    return any(_BY_PRODUCT.fullmatch(name) for name in path.rstrip("/").split("/"))


def _sizes(root: str, path: str, tree: Tree) -> Iterator[int]:
    """Yield the size of each unsent file at a path, without by-products, virtual environments and vanished files."""
    if not path.endswith("/"):
        try:
            yield os.lstat(f"{root}/{path}").st_size
        except OSError:
            return
        return
    try:
        entries = list(os.scandir(f"{root}/{path}"))
    except OSError:
        return
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return  # a virtual environment
    for entry in entries:
        inside = path + entry.name
        if _is_by_product(entry.name) or inside in tree.stats:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        yield from _sizes(root, f"{inside}/" if is_folder else inside, tree)


def explained(found: Verdict, left_out: Mapping[str, Sequence[str]], code_dirs: Mapping[str, str]) -> Verdict:
    """Return the verdict, with an ignored file as its cause if the first failure says that this file is missing.

    Args:
        found: the verdict on a run.
        left_out: the ignored files, as `LeftOut.to_dict` returns them.
        code_dirs: node → the folder of the code there.
    """
    if found.first is None:
        return found
    cause = missed(found.first.error, left_out, code_dirs.get(found.first.node, ""))
    return replace(found, cause=cause) if cause else found


def missed(error: str, left_out: Mapping[str, Sequence[str]], code_dir: str) -> Cause | None:
    """Return the cause of a failure whose message says that an ignored file is missing; None for other failures.

    Args:
        error: the error of a rank.
        left_out: the ignored files, as `LeftOut.to_dict` returns them.
        code_dir: the folder of the code on the rank's node.
    """
    for line in message_of(error).splitlines():
        if not _MISSING.search(line):
            continue
        quoted = [each for pair in re.findall(r"'([^']+)'|\"([^\"]+)\"", line) for each in pair if each]
        for word in (*quoted, *re.findall(r"[^\s'\"`,;:()\[\]<>=]+", line)):
            within = os.path.normpath(word.removeprefix(f"{code_dir}/"))
            if os.path.isabs(within) or within == ".":  # noqa: PTH117
                continue
            for path, (source, to_write) in left_out.items():
                if _touches(path, within):
                    return Cause(
                        "ignored-file",
                        f"{within} was not sent to the nodes: {source} ignores {'it' if path == within else path}",
                        f"{to_write} in {IGNORE_FILE} sends it with the code; what is too large for that belongs at "
                        "the same place on each node, or on a disk that all share",
                    )
    return None
