"""The files of the runs' records: their folder, how to parse one, and the error for one that cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from nodekit.deploy.records.state_folder import runs_folder
from nodekit.inventory.errors import KitError, NotWritten

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILE = "run.json"
MAX_NUMBER = 1e11  # the largest plausible number in a record; as a time it is in the year 5138
OF_A_SWEEP = re.compile(r"(.+)\.(\d+)")
"""Matches the id of a run in a sweep: the sweep's id, and the run's number there."""


def folder() -> Path:
    """Return the folder of all runs' records, ``$XDG_STATE_HOME/nodekit/runs``."""
    return runs_folder()


def see_to(folder: Path, error: OSError) -> str:
    """Return what the user can do about a file in a folder that cannot be read or written."""
    if isinstance(error, PermissionError):
        return f"see whose it is (ls -ld {folder}), or set XDG_STATE_HOME to a folder of yours"
    return f"see to the disk (df {folder})"


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn an OSError in the body, which writes `path`, into NotWritten."""
    try:
        yield
    except OSError as error:
        raise NotWritten(
            f"{path} cannot be written: {error.strerror}", cure=see_to(path.parent, error)
        ) from error


@contextlib.contextmanager
def waited_for(path: Path) -> Iterator[IO[str]]:
    """Open a file (created with mode 0600 if missing) and hold a lock on it; wait while another process does."""
    path.touch(mode=0o600)
    with path.open("r+", encoding="utf-8", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def fields_of(data: bytes | str, record: type[DataclassInstance]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a record's file; return its known fields, and the others, which only another version of kit knows.

    Raises:
        ValueError: the data is not such a record; the message says why.
    """
    try:
        fields = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is damaged ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError("it is damaged (it holds no fields)")
    kinds = _kinds(record)
    for name in kinds.keys() & fields.keys():
        if not _is_of(fields[name], kinds[name]):
            raise ValueError(f"its {name} is not what kit writes there")
    if lacking := _needed(record) - fields.keys():
        raise ValueError(f"it has no {', '.join(sorted(lacking))}")
    known = {name: value for name, value in fields.items() if name in kinds}
    return known, {name: value for name, value in fields.items() if name not in kinds}


@functools.cache
def _kinds(record: type) -> dict[str, Any]:
    """Return field → type of a record's class."""
    return typing.get_type_hints(record)


def _needed(record: type[DataclassInstance]) -> set[str]:
    """Return the fields that have no default."""
    none = dataclasses.MISSING
    return {each.name for each in dataclasses.fields(record) if each.default is each.default_factory is none}


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a field's type."""
    if kind is Any:
        return True
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_is_of(value, each) for each in parts)
    if isinstance(value, dict):
        return typing.get_origin(kind) is dict and all(_is_of(each, parts[1]) for each in value.values())
    if isinstance(value, list):
        return typing.get_origin(kind) is list and all(_is_of(each, parts[0]) for each in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) < MAX_NUMBER  # refuses nan, too
    return type(value) is kind


class Unreadable(NamedTuple):
    """A record that exists and cannot be read; its run may still be running, and may have snapshots."""

    run_id: str
    """The name of its folder."""
    why: str
    inventory_path: str | None = None
    """None if unknown."""

    @property
    def problem(self) -> tuple[str, str, str]:
        """The arguments of a `KitError`: what was found, what was wanted, what to do."""
        place = folder() / self.run_id
        cure = f"mend it; or, where you know that {self.run_id} is over and its snapshots are not wanted, move {place} "
        return f"{place / FILE} cannot be read: {self.why}", "", f"{cure}to another place"

    def error(self) -> KitError:
        """Return `problem` as an error, to be raised where this run matters."""
        return KitError(*self.problem)

    def is_of(self, sweep_id: str) -> bool:
        """Whether the run belongs to the sweep with this id."""
        found = OF_A_SWEEP.fullmatch(self.run_id)
        return found is not None and found[1] == sweep_id


def unreadable_record(run_id: str, error: OSError | ValueError, data: bytes = b"") -> Unreadable:
    """Describe a record that failed with `error`; `data` is the content of its file, if it could be read."""
    why = str(error.strerror) if isinstance(error, OSError) else str(error)
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        fields = json.loads(data)
        if fields["run_id"] == run_id and isinstance(fields["inventory_path"], str):
            return Unreadable(run_id, why, fields["inventory_path"])
    return Unreadable(run_id, why)
