"""What the job's script imports, read from the code as it lies here; nothing is run."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy import plan
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Inventory

MAX_FILES = 500  # of the project's own, that the script imports
_MAX_ENTRIES = 20_000  # of the project's folder, that are looked through for a name
_NO_CODE = {".git", ".venv", "venv", "node_modules", "__pycache__"}
# Those whose packages have other names than what is imported.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "sentence_transformers": "sentence-transformers",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the job runs, if that is Python of its own."""

    name: str = ""
    """As in the command; "" where there is none to look at."""
    source: str = ""
    imports: tuple[str, ...] = ()
    """Top-level names that it needs to start, its own modules' too, without those that are in the code."""


def find(inventory: Inventory, command: Sequence[str] | None) -> Path | None:
    """The file that a job's Python runs, in the code as it lies here; None for a module, a program, or the hosts' own.

    Raises:
        KitError: it is not there.
    """
    argv = plan.argv_of(inventory, command)
    # What begins with a dash is -m, or an option of the interpreter.
    if argv[:2] != (plan.PYTHON, "-u") or len(argv) < 3 or argv[2].startswith("-"):
        return None
    code, name = Path(inventory.job.code).expanduser(), argv[2]
    if Path(name).is_absolute():
        return None
    if not (code / name).is_file():
        raise KitError(
            f"no {name} in {code.resolve()}, the folder that is synced; run kit from your code's folder, "
            "or set job.code"
        )
    return code / name


def read(inventory: Inventory, command: Sequence[str] | None) -> Script:
    """The script of a job.

    Raises:
        KitError: it is not there.
    """
    code = Path(inventory.job.code).expanduser()
    argv = plan.argv_of(inventory, command)
    roots = [code]
    if (path := find(inventory, command)) is not None:
        roots = [path.parent, code]
    elif argv[:3] != (plan.PYTHON, "-u", "-m") or argv[2:4] == plan.TRAINING_MODULE or len(argv) < 4:
        return Script()  # what the shared module needs besides torch, `plan.refuse_options` knows
    else:
        module = argv[3]
        path = _file_of([code], module.split("."))
        if path is not None and path.name == "__init__.py":
            path = path.with_name("__main__.py")
        if path is None or not path.is_file():
            return Script(name=module, imports=(module.partition(".")[0],))
    source = path.read_text(encoding="utf-8", errors="replace")
    imports = tuple(sorted(_outside(path, roots)))
    return Script(name=str(path.relative_to(code)), source=source, imports=imports)


def without_own(script: Script, missing: Sequence[str], code: Path) -> list[str]:
    """Of names that a host lacks, those that the project has nowhere: some scripts change their sys.path."""
    left = set(missing) if script.source else set()
    for number, (_, folders, files) in enumerate(os.walk(code)):
        if not left or number > _MAX_ENTRIES:
            break
        folders[:] = [each for each in folders if each not in _NO_CODE]
        left -= {*folders, *(each.partition(".")[0] for each in files)}
    return [name for name in missing if name in left or not script.source]


def _outside(script: Path, roots: list[Path]) -> set[str]:
    """Follow imports through the project's own files, to those that leave it."""
    outside: set[str] = set()
    waiting, seen = [script], {script}
    while waiting and len(seen) <= MAX_FILES:
        path = waiting.pop()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are the job's, which will say them itself
                tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError, RecursionError):  # the hosts' interpreters say that of the script
            continue
        for level, parts in _imports(tree.body):
            where = roots if level == 0 else [path.parents[level - 1]]
            files = [_file_of(where, parts[:length]) for length in range(1, len(parts) + 1)]
            if level == 0 and files[0] is None and not any((root / parts[0]).is_dir() for root in roots):
                outside.add(parts[0])
            for file in files:
                if file is not None and file not in seen:
                    seen.add(file)
                    waiting.append(file)
    return outside - {"nodekit", "__future__", "__main__"}


def _file_of(roots: Sequence[Path], parts: Sequence[str]) -> Path | None:
    for root in roots:
        place = root.joinpath(*parts)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None


def _imports(body: Sequence[ast.stmt]) -> Iterator[tuple[int, list[str]]]:
    """Each import that is done whenever the module is: (level, parts of the name).

    Not those in functions, in an `if` (a version, TYPE_CHECKING), or in a `try` that is ready to do without.
    """
    for statement in body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield 0, alias.name.split(".")
        elif isinstance(statement, ast.ImportFrom):
            parts = statement.module.split(".") if statement.module else []
            for alias in statement.names:
                if parts or alias.name != "*":
                    yield statement.level, [*parts, alias.name]
        elif isinstance(statement, ast.If):
            if "__name__" in ast.dump(statement.test):  # if __name__ == "__main__":
                yield from _imports(statement.body)
        elif isinstance(statement, ast.Try):
            if not any(_catches_import_error(handler) for handler in statement.handlers):
                yield from _imports(statement.body)
        elif isinstance(statement, ast.With):
            yield from _imports(statement.body)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
