"""Check that the modules which a script imports exist, before the job waits a night in the queue.

Runs on the login node: ``python -m nodekit.slurm.submission.imports CODE``, with the command as a JSON list on stdin,
prints a JSON list of problems. Nothing is imported: the files are parsed, and the modules located. Imports of the
user's own modules are followed. Only unconditional imports count, not those in a function, an ``if`` or a ``try``.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

MAX_FILES = 500


def problems(command: Sequence[str], folder: Path) -> list[str]:
    """Return what is wrong with a command that starts in `folder`, as text with file and line; changes `sys.path`."""
    is_python = list(command[:2]) == ["python", "-u"]  # as `argv_of` returns a Python command
    command = list(itertools.dropwhile(lambda word: word in ("python", "-u"), command)) or ["python"]
    first, is_module = command[0], command[0] == "-m" and len(command) > 1
    if not is_module and not first.endswith(".py") and (not is_python or first.startswith("-")):
        return []  # not Python: the files that it reads are unknown
    root = folder
    file: Path | None
    if is_module:
        sys.path.insert(0, str(root))
        if not _is_found(command[1], root):
            return [f"no module {command[1]}"]
        file = _own_module(command[1], root)
        if file is not None and file.name == "__init__.py":
            file = _existing(file.with_name("__main__.py"))
    else:
        file = folder / first / "__main__.py" if (folder / first).is_dir() else folder / first
        root = file.parent
        if not file.is_file():
            return [f"no file {file}"]
        if b"\0" in file.read_bytes():
            return []  # a zip archive, or compiled
        sys.path.insert(0, str(root))  # where python itself looks first
    task = _task(command).partition(":")[0]
    absent = [f"no file {folder / task}"] if task.endswith(".py") and not (folder / task).is_file() else []
    files = [file] if file is not None else []
    if task.endswith(".py") and not absent:
        files.append(folder / task)
    return [*absent, *_follow(files, root, folder)]


def _task(command: Sequence[str]) -> str:
    """Return the value of --task if the command runs kit's training module, else ""."""
    if "nodekit.training" in command[:2]:
        for word, after in zip(command, [*command[1:], ""], strict=True):
            if word == "--task" or word.startswith("--task="):
                return word.partition("=")[2] or after
    return ""


def _follow(files: Sequence[Path], root: Path, folder: Path) -> Iterator[str]:
    seen, waiting = set(files), list(files)
    while waiting and len(seen) <= MAX_FILES:
        file = waiting.pop(0)
        shown = file.relative_to(folder) if file.is_relative_to(folder) else file
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except SyntaxError as error:
            yield f"{shown}:{error.lineno}: {error.msg}"
            continue
        for statement in tree.body:
            if _changes_path(statement):
                return  # from here on only Python itself can find modules
            for name, is_certain in _imported(statement):
                own = _own_module(name, root)
                if own is not None and own not in seen:
                    seen.add(own)
                    waiting.append(own)
                elif own is None and is_certain and not _is_found(name, root):
                    yield f"{shown}:{statement.lineno}: no module {name}"


def _changes_path(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "path" and getattr(node.value, "id", "") == "sys"
        for node in ast.walk(statement)
    )


def _imported(statement: ast.stmt) -> Iterator[tuple[str, bool]]:
    """Yield the names that a statement imports; True if it must be a module, unlike b in ``from a import b``."""
    if isinstance(statement, ast.Import):
        yield from ((alias.name, True) for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
        yield statement.module, True
        yield from ((f"{statement.module}.{alias.name}", False) for alias in statement.names)


def _own_module(name: str, root: Path) -> Path | None:
    """Return the file of a module if it is below `root`."""
    path = root.joinpath(*name.split("."))
    return _existing(path / "__init__.py") or _existing(path.with_suffix(".py"))


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def _is_found(name: str, root: Path) -> bool:
    """Whether there is a module of this name; submodules are looked for in the user's own packages only.

    Another package may create its modules at import.
    """
    top, *rest = name.split(".")
    try:
        found = importlib.util.find_spec(top)
        is_own = found is not None and any(Path(each).parent == root for each in _places(found))
        for number in range(len(rest) if is_own else 0):
            assert found is not None
            found = PathFinder.find_spec(".".join([top, *rest[: number + 1]]), _places(found))
            if found is None:
                break
    except (ImportError, ValueError):
        return True  # unknown: report nothing
    return found is not None


def _places(spec: ModuleSpec) -> list[str]:
    return list(spec.submodule_search_locations or ())


if __name__ == "__main__":
    del sys.path[0]  # the folder in which this was started
    print(json.dumps(problems(json.load(sys.stdin), Path(sys.argv[1]))))
