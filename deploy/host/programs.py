"""Tell whether the file that a command runs is Python or another program.

torchrun runs any file with its own Python: it ignores the name, the ``#!`` line and the mode of a script.
"""

from __future__ import annotations

import ast
import os
import re
import sys

_READ_BYTES = 1 << 20
_PYTHON_LINE = re.compile(rb"#![^\n]*(?:python|pypy)")


def kind(path: str) -> str:
    """Return ``python`` or ``program``; "" if there is nothing to run at this path."""
    if os.path.isdir(path):
        return "python" if os.path.isfile(os.path.join(path, "__main__.py")) else ""
    try:
        with open(path, "rb") as file:
            head = file.read(_READ_BYTES)
    except ValueError:  # a null byte in its name
        return ""
    except OSError:  # a program may be executable, but not readable
        return "program" if os.access(path, os.X_OK) else ""
    if path.endswith((".py", ".pyc")) or _PYTHON_LINE.match(head):
        return "python"
    if not head.startswith(b"#!"):
        return "program" if head.startswith(b"\x7fELF") else "python"
    return "python" if _imports(head) else "program"


def _imports(source: bytes) -> bool:
    """Whether this parses as Python with imports, even if its ``#!`` names a shell; no shell script does."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(each, (ast.Import, ast.ImportFrom)) for each in body)


def kind_here(name: str) -> str:
    """Return the `kind` of an absolute path, or of a program that a rank would find on its PATH."""
    if "/" in name:
        return kind(name)
    import shutil  # see `processes.output`

    return "program" if shutil.which(name, path=rank_path()) else ""


def rank_path() -> str:
    """Return the PATH of ranks: the folder of their Python comes first, as in an activated environment."""
    beside = os.path.dirname(sys.executable)
    path = os.environ.get("PATH", os.defpath)
    return path if path.split(os.pathsep)[0] == beside else beside + os.pathsep + path
