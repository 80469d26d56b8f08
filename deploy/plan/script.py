"""Find the job's script and its imports by parsing the code on this machine; runs nothing."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy.host import programs
from nodekit.deploy.plan.command import PYTHON, TRAINING_MODULE, argv_of
from nodekit.deploy.plan.launchers import (
    PYTHON_NAME,
    PYTHON_VALUED,
    SHELL_VALUED,
    SHELLS,
    first_operand,
    wrapped,
)
from nodekit.deploy.sync import selection
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Inventory

MAX_FILES = 500  # the most files of the project that are parsed
_MAX_ENTRIES = 20_000  # the most folders of the project that are searched for a module
# Options without a script.
_NO_SCRIPT = re.compile(r"-$|-(?![WX-])[a-zA-Z]*[cms]")
_PLACE = re.compile(r"f?['\"](tcp|file)://")
_ADDRESS = re.compile(r"(--?[\w-]+=)?tcp://\S+:\d+$")  # not file://, which may be anything
_ASKS = re.compile(r"environ|getenv|MASTER_PORT")
_NO_CODE = {".git", ".venv", "venv", "node_modules", "__pycache__"}
# Module → its package, if the names differ.
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
    """The Python script of a job."""

    name: str = ""
    """Name in the command; "" if there is no script to examine."""
    source: str = ""
    imports: tuple[str, ...] = ()
    """Top-level modules that the script and its own modules import, without those in the code."""
    arguments: tuple[str, ...] = ()
    """The job's command."""


def find(inventory: Inventory, command: Sequence[str] | None) -> Path | None:
    """Return the job's Python file in the code; None for a module, a program, or a file that only hosts have.

    Raises:
        KitError: the file, or another one that the command needs, would not be on the hosts.
    """
    argv = argv_of(inventory, command)
    code = Path(inventory.job.code).expanduser()
    with _told(code, "set job.code to the folder of your code, one that you may read"):
        os.scandir(code).close()
    for name in _needed(argv)[1]:
        if not Path(name).is_absolute():
            _refuse_absent(code, name, argv)
    # A leading dash means -m or an option of the interpreter.
    if argv[:2] != (PYTHON, "-u") or len(argv) < 3 or argv[2].startswith("-"):
        return None
    path = code / argv[2]
    if Path(argv[2]).is_absolute():
        return None
    path = path / "__main__.py" if path.is_dir() else path
    return None if b"\0" in path.read_bytes() else path  # None for a zip archive, or compiled code


def hosts_own(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the files that a command needs and only the hosts have: absolute paths, programs on the PATH.

    Args:
        argv: the command of a rank (`argv_of`).
    """
    programs, files = _needed(argv)
    return (*programs, *(each for each in files if Path(each).is_absolute()))


def _needed(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the programs on the PATH, and the files, that a command needs to start, as far as known."""
    program, *words = argv
    found: tuple[list[str], list[str]] = ([], [program]) if "/" in program else ([program], [])
    if program == PYTHON:
        found = [], []  # it stands for the node's own interpreter
    name = Path(program).name
    if rest := wrapped(argv):
        more = _needed(rest)
        return found[0] + more[0], found[1] + more[1]
    valued = SHELL_VALUED if name in SHELLS else PYTHON_VALUED if PYTHON_NAME.fullmatch(name) else None
    option, script = first_operand(words, valued=valued, ends=_NO_SCRIPT) if valued else ("", None)
    return found[0], found[1] + ([] if option or script is None else [script])


@contextlib.contextmanager
def _told(path: Path, cure: str) -> Iterator[None]:
    """Raise an OSError in the context as a KitError: the path cannot be read."""
    try:
        yield
    except OSError as error:
        raise KitError(f"{path.resolve()} cannot be read: {error.strerror}", cure=cure) from error


def _refuse_absent(code: Path, name: str, argv: Sequence[str]) -> None:
    root = code.resolve()
    path, within = code / name, os.path.normpath(name)
    if within == os.pardir or within.startswith(os.pardir + os.sep):
        real = path.resolve()
        if real.is_relative_to(root):
            raise KitError(f"{name} would be another file on the hosts", cure=f"say {real.relative_to(root)}")
        both = os.path.commonpath([root, real])
        raise KitError(
            f"{name} lies outside of {root}, the folder that is synced, and so would not be on the hosts",
            cure=f"copy it into that folder, or set job.code to one that holds both ({both})",
        )
    with _told(path, "see to its permissions, and those of its folder"):
        is_there = path.exists()
        if path.is_file():
            path.open("rb").close()
    if not is_there:
        raise KitError(
            f"no {name} in {root}, the folder that is synced",
            cure="run kit from your code's folder, or set job.code",
        )
    if (why := selection.why_left_out(root, within)) is not None:
        raise KitError(
            f"{name} is not sent to the hosts: {why.source} ignores it",
            cure=f"write {why.line} into {root / selection.IGNORE_FILE}",
        )
    kind = programs.kind(str(path))
    if not kind:
        raise KitError(
            f"{name} is a folder without a __main__.py, so python cannot run it", cure="name a file in it"
        )
    if name == argv[0] and kind == "program" and not os.access(path, os.X_OK):
        raise KitError(f"{name} is not executable", cure=f"chmod +x {shlex.quote(name)}")


def read(inventory: Inventory, command: Sequence[str] | None) -> Script:
    """Read the script of a job.

    Raises:
        KitError: it does not exist.
    """
    code = Path(inventory.job.code).expanduser()
    argv = argv_of(inventory, command)
    roots = [code]
    if (path := find(inventory, command)) is not None:
        roots = [path.parent, code]
    elif argv[:3] != (PYTHON, "-u", "-m") or argv[2:4] == TRAINING_MODULE or len(argv) < 4:
        return Script()  # `refuse_options` checks what the training module needs besides torch
    else:
        module = argv[3]
        path = _file_of([code], module.split("."))
        if path is not None and path.name == "__init__.py":
            path = path.with_name("__main__.py")
        if path is None or not path.is_file():
            return Script(name=module, imports=(module.partition(".")[0],))
    source = path.read_text(encoding="utf-8", errors="replace")
    imports = tuple(sorted(_outside(path, roots)))
    return Script(name=str(path.relative_to(code)), source=source, imports=imports, arguments=tuple(argv))


def spawns(source: str) -> bool:
    """Whether a script calls ``torch.multiprocessing.spawn``, by a usual name, and so starts its ranks itself."""
    calls = [each.func for each in _nodes(source) if isinstance(each, ast.Call)]
    return any(re.search(r"\b(mp|multiprocessing)\.spawn$", ast.unparse(each)) for each in calls)


def own_rendezvous(script: Script) -> str:
    """Return in words the rendezvous that a script sets itself, in its source or its arguments; "" if it sets none.

    One within an `if` that looks at the environment does not count: such scripts run without a launcher, too.
    """
    for word in script.arguments:
        if _ADDRESS.match(word):
            return f"is given {word}"
    nodes = _nodes(script.source)
    asks = [each for each in nodes if isinstance(each, ast.If) and _ASKS.search(ast.unparse(each.test))]
    guarded = {id(each) for outer in asks for each in ast.walk(outer)}
    for each in nodes:
        if id(each) in guarded:
            continue
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        match each:
            case ast.Call():
                pairs = [(ast.Constant(word.arg), word.value) for word in each.keywords]
                if len(each.args) > 1 and ast.unparse(each.func).endswith("init_process_group"):
                    pairs.append((ast.Constant("init_method"), each.args[1]))
            case ast.Dict():
                pairs = list(zip(each.keys, each.values, strict=True))
            case ast.Assign():
                pairs = [(target, each.value) for target in each.targets]
        for name, value in pairs:
            match name:
                case ast.Constant("init_method") | ast.Name("init_method"):
                    if _PLACE.match(text := ast.unparse(value)):
                        return f"line {value.lineno} sets init_method={text}"
                case ast.Subscript(slice=ast.Constant("MASTER_PORT")) if isinstance(value, ast.Constant):
                    return f"line {value.lineno} sets MASTER_PORT={value.value!r}"
    return ""


def _nodes(source: str) -> list[ast.AST]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):  # reported by the hosts' interpreters
        return []


def without_own(script: Script, missing: Sequence[str], code: Path) -> list[str]:
    """Return the missing modules that are not anywhere in the project; a script may add such a folder to sys.path."""
    left = set(missing) if script.source else set()
    for number, (_, folders, files) in enumerate(os.walk(code)):
        if not left or number > _MAX_ENTRIES:
            break
        folders[:] = [each for each in folders if each not in _NO_CODE]
        left -= {*folders, *(each.partition(".")[0] for each in files)}
    return [name for name in missing if name in left or not script.source]


def _outside(script: Path, roots: list[Path]) -> set[str]:
    """Follow imports through the project's own files; return the top-level modules that are outside of it."""
    outside: set[str] = set()
    waiting, seen = [script], {script}
    while waiting and len(seen) <= MAX_FILES:
        path = waiting.pop()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the job will print its warnings itself
                tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError, RecursionError):  # reported by the hosts' interpreters
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
    """Yield the unconditional imports of a module: (level, parts of the name).

    Leave out those in functions, in an `if` (a version, TYPE_CHECKING), or in a `try` that catches their failure.
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
