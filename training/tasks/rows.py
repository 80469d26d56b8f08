"""Read labelled texts from files with tabs (as cnews), JSON and CSV files; errors name the file and line."""

import csv
import io
import json
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodekit.training.tasks import TaskError

TEXT_NAMES = ("text", "sentence", "content")
"""Names for the text in JSON objects and in a CSV's header; the label's name is always ``label``."""
LABEL_NAMES = "labels.txt"
"""A file beside the data with a label's name on each line, for data whose labels are numbers from 0."""
HELD_OUT = 0.08
"""The share of train that becomes the dev split if there is no file for it, as in the tutorials' ``ratio = 0.92``."""

_SWAPPED = 5
"""If there are more than so many different labels for each different text, labels and texts seem to be swapped."""
_STEMS = {"train": ("train",), "dev": ("dev", "val", "valid", "validation"), "test": ("test",)}


@dataclass(frozen=True, slots=True)
class Row:
    """One sample; label and text are not empty, and are stripped of white space."""

    label: str
    text: str


def find_rows(folder: Path, split: str) -> Path:
    """Return the one file of a split in a folder: ``train.tsv``, or with a prefix, such as ``cnews.train.txt``.

    The split dev may also be called val, valid or validation.

    Raises:
        TaskError: there is no such file, or more than one.
    """
    if not folder.is_dir():
        raise TaskError(f"no folder {folder} for the data, from {Path.cwd()}")
    found = _files(folder, split)
    if len(found) != 1:
        has = " and ".join(path.name for path in found) or "none of them"
        names = ", ".join(f"{split}{suffix}" for suffix in _READERS)
        raise TaskError(f"{folder} has {has}: wanted one of {names} (or NAME.{split}.txt and so on)")
    return found[0]


def has_rows(folder: Path, split: str) -> bool:
    """Whether the folder has a file of this split."""
    return bool(_files(folder, split))


def read_rows(
    path: Path, labels: Collection[str] | None = None, *, names: Sequence[str] | None = None
) -> list[Row]:
    """Read the rows of a UTF-8 file, in its order; the suffix determines the format.

    ``.tsv``, ``.txt``: ``label<TAB>text``, no header. ``.json``: an array of ``[text, label]`` or of objects
    ``{"label": …, "text": …}``. ``.jsonl`` (and ``.json``): one of these per line. ``.csv``: a header with ``label``
    and ``text``, other columns are ignored. The text may also be called ``sentence`` or ``content``.

    Args:
        path: the file.
        labels: the only labels that may occur; None: any.
        names: of labels that are numbers, by number; None: keep the numbers.

    Raises:
        TaskError: a row is invalid; the message has the file, the line, what was found and what was wanted.
    """
    if path.suffix not in _READERS:
        raise TaskError(f"{path} ends in {path.suffix!r}: wanted one of {', '.join(_READERS)}")
    content = _read(path)
    rows = []
    try:
        for line, label, text in _READERS[path.suffix](content.rstrip("\r\n")):
            row = Row(_named(label.strip(), names), text.strip())
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
    """Read the rows of a folder's splits train and dev, and test if there is a file for it.

    Without a file for dev, a share of train, `HELD_OUT`, is moved to dev: the same rows every time.

    Args:
        folder: with a file for each split, as `find_rows` looks for them.
        labels: the only labels that may occur; None: those in ``labels.txt``, otherwise those of train.

    Raises:
        TaskError: train is missing, a split has two files, or a row is invalid.
    """
    path, names = find_rows(folder, "train"), None
    if labels is None and (folder / LABEL_NAMES).is_file():
        labels = names = [name.strip() for name in _read(folder / LABEL_NAMES).splitlines() if name.strip()]
    splits = {"train": read_rows(path, labels, names=names)}
    num_labels, num_texts = (
        len({getattr(row, name) for row in splits["train"]}) for name in ("label", "text")
    )
    if num_labels > _SWAPPED * num_texts:
        raise TaskError(
            f"{path} has {num_labels:,} labels and {num_texts} texts: they seem to be the other way round, wanted the "
            "label first where there are tabs, and the text first in an array of JSON"
        )
    known = labels or sorted({row.label for row in splits["train"]})
    for split in ("dev", "test"):
        if has_rows(folder, split):
            splits[split] = read_rows(find_rows(folder, split), known, names=names)
    if "dev" not in splits:
        rows = splits["train"]
        if len(rows) < 2:
            raise TaskError(
                f"{path} has one row, and {folder} no dev split: wanted more rows, or dev.tsv beside it"
            )
        held = set(held_out(len(rows)))
        splits["train"] = [row for number, row in enumerate(rows) if number not in held]
        splits["dev"] = [row for number, row in enumerate(rows) if number in held]
    return splits


def held_out(num: int) -> list[int]:
    """Return the indices of ``num`` training samples that become the dev split, a share of `HELD_OUT`; always equal."""
    return sorted(random.Random(0).sample(range(num), max(1, round(num * HELD_OUT))))  # noqa: S311  # no secret


def _files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split; files with a prefix before the split's name only if there are none without."""
    stems, suffixes = "|".join(_STEMS[split]), "|".join(map(re.escape, _READERS))
    for pattern in (rf"({stems})({suffixes})", rf"[^.].*[._-]({stems})({suffixes})"):
        found = sorted(
            path for path in folder.iterdir() if re.fullmatch(pattern, path.name) and path.is_file()
        )
        if found:
            return found
    return []


def _read(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"{path}:{line}: found the byte 0x{raw[error.start]:02x}, wanted UTF-8: convert it first, "
            "say with `iconv -f gb18030 -t utf-8`"
        ) from error


def _named(label: str, names: Sequence[str] | None) -> str:
    is_number = names is not None and label not in names and label.isascii() and label.isdigit()
    return names[int(label)] if names is not None and is_number and int(label) < len(names) else label


class _BadRow(ValueError):
    """An invalid row; the message lacks the file's name."""

    def __init__(self, line: "int | str", found: str, wanted: str) -> None:
        super().__init__(f"{line}: found {found}, wanted {wanted}")


_Rows = Iterator[tuple["int | str", str, str]]
"""Yields line number (or item), label and text."""


def _tsv(content: str) -> _Rows:
    # Not splitlines(), which also splits at characters that may occur in a text, such as U+2028.
    for line, row in enumerate(content.split("\n") if content else (), 1):
        columns = row.split("\t")
        if len(columns) != 2:
            found = f"{len(columns) - 1 or 'no'} tabs in {_short(row)}" if row.strip() else "an empty line"
            raise _BadRow(line, found, "label<TAB>text")
        if line == 1 and columns[0] == "label" and columns[1].strip() in TEXT_NAMES:
            raise _BadRow(line, "a header", "label<TAB>text from the first line on (a .csv has a header)")
        yield line, columns[0], columns[1]


def _json(content: str) -> _Rows:
    """Read an array, or a value on each line."""
    if not content.lstrip().startswith("["):
        return _json_lines(content)
    try:
        items = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # after the first line's [text, label]
            return _json_lines(content)
        raise _BadRow(
            error.lineno, f"no JSON ({error})", "an array of [text, label] or of objects"
        ) from error
    return ((f"item {number}", *_labelled(item, f"item {number}")) for number, item in enumerate(items, 1))


def _json_lines(content: str) -> _Rows:
    for line, row in enumerate(content.split("\n") if content else (), 1):
        try:
            value = json.loads(row)
        except ValueError as error:
            raise _BadRow(line, f"{_short(row)}, which is not JSON ({error})", _JSON_ROW) from error
        yield line, *_labelled(value, line)


_JSON_ROW = '{"label": …, "text": …} or [text, label]'


def _labelled(value: Any, line: "int | str") -> tuple[str, str]:
    """Return label and text of a JSON value."""

    def shown() -> str:
        return _short(json.dumps(value, ensure_ascii=False))

    if isinstance(value, dict):
        text: Any = next((value[name] for name in TEXT_NAMES if name in value), None)
        label: Any = value.get("label")
    elif isinstance(value, list) and len(value) == 2:
        text, label = value
    else:
        raise _BadRow(line, shown(), _JSON_ROW)
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    for name, each in (("label", label), (" or ".join(TEXT_NAMES), text)):
        if not isinstance(each, str):
            found = "none" if each is None else f"{_short(json.dumps(each))}, which is no string"
            raise _BadRow(line, f"as {name} {found}, in {shown()}", _JSON_ROW)
    return label, text


def _csv(content: str) -> _Rows:
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    line = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        text_name = next((name for name in TEXT_NAMES if name in header), None)
        if "label" not in header or text_name is None:
            raise _BadRow(1, f"the header {_short(','.join(header))}", "a header with label and text")
        label_column, text_column = header.index("label"), header.index(text_name)
        line = reader.line_num + 1  # where the next row begins: a row with quotes may span several lines
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
    """Return a text for an error message, shortened to 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


_READERS: dict[str, Callable[[str], _Rows]] = {
    ".tsv": _tsv,
    ".txt": _tsv,
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
}
