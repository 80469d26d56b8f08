"""What the code, CONTRIBUTING.md and docs/code.md say of where things are is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT

FOLDERS = ("deploy", "inventory", "slurm", "training", "docs", "tests", "bench")
FILE = re.compile(rf"(?<![\w/.~$}}-])(?:{'|'.join(FOLDERS)})/[\w/.-]+?\.(?:py|md|toml)\b")
MADE_UP = ("training/trainer.py", "deploy/target.py")  # of a user's project, in a test


def pages() -> list[Path]:
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [*code, *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]


def defines(file: Path, name: str) -> bool:
    """Whether a file has a class, function, method or variable of that name."""
    pattern = rf"^\s*(?:async )?(?:class|def) {name}\b|^\s*(?:self\.)?{name}(?:: [^=\n]+)?(?: = |$)"
    return re.search(pattern, file.read_text(), re.MULTILINE) is not None


def test_every_file_of_the_code_that_is_named_is_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in pages()
        for name in FILE.findall(path.read_text())
        if not (ROOT / name).exists() and "NAME" not in name and name not in MADE_UP
    ]
    assert not wrong


def test_what_is_said_to_be_in_a_file_is_in_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name} in {file}"
        for path in pages()
        for name, file in re.findall(rf"`(\w+)`(?:,)? in\s+`?({FILE.pattern})", path.read_text())
        if not defines(ROOT / file, name)
    ]
    assert not wrong


ROWS = re.findall(r"^\| (.+?) \| (`.+?`) \| (`.+?`) \|$", (ROOT / "docs/code.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("what", "files", "names"), ROWS, ids=lambda each: each[:40])
def test_what_the_page_says_to_look_for_is_defined_there(what: str, files: str, names: str) -> None:
    parts = names.split("; ")
    each_its_own = files.split("; ")
    assert len(parts) == len(each_its_own), what
    for file, looked_for in zip(each_its_own, parts, strict=True):
        for name in re.findall(r"`(\w+)`", looked_for):
            assert defines(ROOT / file.strip("`"), name), (file, name)


def test_the_table_of_where_to_change_is_read() -> None:
    assert len(ROWS) > 15
