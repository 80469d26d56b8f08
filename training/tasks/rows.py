"""Labelled text from TSV (as in cnews), JSON lines and CSV files; errors name the file and line."""

import csv
import io
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodekit.training.tasks import TaskError

TEXT_NAMES = ("text", "sentence", "content")
"""Names for the text in JSON lines and in a CSV's header; the label is always ``label``."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample; label and text are not empty, and without white space around them."""

    label: str
    text: str


def find_rows(folder: Path, split: str) -> Path:
    """The one file of a split in a folder: ``train.tsv``, ``train.jsonl``, ``train.json`` or ``train.csv``.

    Raises:
        TaskError: there is none, or more than one.
    """
    if not folder.is_dir():
        raise TaskError(f"no folder {folder} for the data, from {Path.cwd()}")
    names = [f"{split}{suffix}" for suffix in _READERS]
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) != 1:
        has = " and ".join(path.name for path in found) or "none of them"
        raise TaskError(f"{folder} has {has}: wanted one of {', '.join(names)}")
    return found[0]


def read_rows(path: Path, labels: Collection[str] | None = None) -> list[Row]:
    """The rows of a UTF-8 file, in its order; the suffix says in which format.

    ``.tsv``: ``label<TAB>text``, no header. ``.jsonl``, ``.json``: one object per line, ``{"label": …, "text": …}``.
    ``.csv``: a header with ``label`` and ``text``, other columns are ignored. The text may also be called
    ``sentence`` or ``content``. With ``labels``, no other label may occur.

    Raises:
        TaskError: a row is invalid; it says the file, the line, what was found and what was wanted.
    """
    if path.suffix not in _READERS:
        raise TaskError(f"{path} ends in {path.suffix!r}: wanted one of {', '.join(_READERS)}")
    raw = path.read_bytes()
    try:
        content = raw.decode("utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"{path}:{line}: found the byte 0x{raw[error.start]:02x}, wanted UTF-8: convert it first, "
            "say with `iconv -f gb18030 -t utf-8`"
        ) from error
    rows = []
    try:
        for line, label, text in _READERS[path.suffix](content.rstrip("\r\n")):
            row = Row(label.strip(), text.strip())
            for name, value in (("label", row.label), ("text", row.text)):
                if not value:
                    raise _BadRow(line, f"an empty {name}", f"a {name}")
            if labels is not None and row.label not in labels:
                raise _BadRow(line, f"the label {row.label!r}", f"one of {', '.join(labels)}")
            rows.append(row)
    except _BadRow as error:
        raise TaskError(f"{path}:{error}") from error
    if not rows:
        raise TaskError(f"{path}:1: found no rows, wanted one or more of label and text")
    return rows


def read_splits(folder: Path, labels: Collection[str] | None = None) -> dict[str, list[Row]]:
    """The rows of a folder's train, dev and, if it is there, test.

    Args:
        folder: with a file for each, as `find_rows` wants them.
        labels: the only ones that may occur; None: those of train.

    Raises:
        TaskError: a split is missing, or a row is invalid.
    """
    train = read_rows(find_rows(folder, "train"), labels)
    known = labels or sorted({row.label for row in train})
    others = ("dev", "test") if any(folder.glob("test.*")) else ("dev",)
    return {"train": train, **{split: read_rows(find_rows(folder, split), known) for split in others}}


class _BadRow(ValueError):
    """An invalid row; the message lacks the file's name."""

    def __init__(self, line: int, found: str, wanted: str) -> None:
        super().__init__(f"{line}: found {found}, wanted {wanted}")


def _tsv(content: str) -> Iterator[tuple[int, str, str]]:
    # Not splitlines(), which also splits at characters that may occur in a text, such as U+2028.
    for line, row in enumerate(content.split("\n") if content else (), 1):
        columns = row.split("\t")
        if len(columns) != 2:
            found = f"{len(columns) - 1 or 'no'} tabs in {_short(row)}" if row.strip() else "an empty line"
            raise _BadRow(line, found, "label<TAB>text")
        if line == 1 and columns[0] == "label" and columns[1].strip() in TEXT_NAMES:
            raise _BadRow(line, "a header", "label<TAB>text from the first line on (a .csv has a header)")
        yield line, columns[0], columns[1]


def _json_lines(content: str) -> Iterator[tuple[int, str, str]]:
    for line, row in enumerate(content.split("\n") if content else (), 1):
        wanted = 'one object per line, {"label": …, "text": …}'
        try:
            value = json.loads(row)
        except ValueError as error:
            raise _BadRow(line, f"{_short(row)}, which is not JSON ({error})", wanted) from error
        if not isinstance(value, dict):
            raise _BadRow(line, _short(row), wanted)
        text: Any = next((value[name] for name in TEXT_NAMES if name in value), None)
        label: Any = value.get("label")
        if isinstance(label, int) and not isinstance(label, bool):
            label = str(label)
        for name, each in (("label", label), (" or ".join(TEXT_NAMES), text)):
            if not isinstance(each, str):
                found = "none" if each is None else f"{_short(json.dumps(each))}, which is no string"
                raise _BadRow(line, f"as {name} {found}, in {_short(row)}", wanted)
        yield line, label, text


def _csv(content: str) -> Iterator[tuple[int, str, str]]:
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    line = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        text_name = next((name for name in TEXT_NAMES if name in header), None)
        if "label" not in header or text_name is None:
            raise _BadRow(1, f"the header {_short(','.join(header))}", "a header with label and text")
        label_column, text_column = header.index("label"), header.index(text_name)
        line = reader.line_num + 1  # of the next row: one in quotes may span several lines
        for columns in reader:
            if len(columns) != len(header):
                found = f"{len(columns)} column(s)" if columns else "an empty line"
                raise _BadRow(line, found, f"{len(header)} columns, as in the header")
            yield line, columns[label_column], columns[text_column]
            line = reader.line_num + 1
    except csv.Error as error:
        raise _BadRow(
            line, f"no CSV ({error})", "columns with commas between, in quotes where needed"
        ) from error


def _short(text: str) -> str:
    """The text for an error message, shortened."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


_READERS: dict[str, Callable[[str], Iterator[tuple[int, str, str]]]] = {
    ".tsv": _tsv,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
}
