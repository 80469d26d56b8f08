"""Finds the run that the user means: by its id or a prefix of it, its inventory or its sweep; else the latest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from nodekit.deploy.records.record_files import Unreadable, folder
from nodekit.deploy.records.runs import LIVE, Run, on_record
from nodekit.inventory.errors import KitError

MOST_NAMED = 8
"""The most runs that an error lists."""


def check_id(run_id: str | None) -> None:
    """Refuse an empty id, which is a prefix of every id.

    Raises:
        KitError: the id is empty.
    """
    if run_id is not None and not run_id.strip():
        raise KitError("RUN: found an empty id, wanted that of a run", cure="kit runs lists them")


def find(run_id: str | None) -> Run:
    """Return the run with this id or unambiguous prefix of one; for None the latest, as `latest_of` has it.

    A run of a drill or a selftest is the latest only if there are no others.

    Raises:
        KitError: no run matches, several do, or the run's record cannot be read.
    """
    check_id(run_id)
    runs, unreadable = on_record()
    if run_id is None:
        for each in unreadable:
            found, wanted, cure = each.problem
            raise KitError(
                f"which run is the latest is not known: {found}", wanted, f"name the run; else {cure}"
            )
    if not runs and not unreadable:
        raise KitError(f"no run on record in {folder()}", cure="start one: kit up INVENTORY")
    if run_id is None:
        last = _last(runs)
        return last if last.sweep else _latest(runs, Path(last.inventory_path)) or last
    both: list[Run | Unreadable] = [*runs, *unreadable]
    meant = [each for each in both if each.run_id == run_id] or [
        each for each in both if each.run_id.startswith(run_id)
    ]
    if len(meant) == 1:
        if isinstance(meant[0], Unreadable):
            raise meant[0].error()
        return meant[0]
    named = meant or both
    ids = ("…, " if len(named) > MOST_NAMED else "") + ", ".join(each.run_id for each in named[-MOST_NAMED:])
    if meant:
        raise KitError(f"'{run_id}' begins the ids of {len(meant)} runs: {ids}")
    raise KitError(f"no run '{run_id}' on record; the latest are {ids}")


def _last(runs: Sequence[Run]) -> Run:
    """Return the last run; one of a drill or a selftest only if there are no others."""
    return ([run for run in runs if not run.is_tried] or runs)[-1]


def latest_of(inventory_path: Path) -> Run | None:
    """Return the latest run of an inventory file, preferably one that has not ended; runs of a sweep do not count.

    Raises:
        KitError: as `all_of` does.
    """
    return _latest(all_of(inventory_path), inventory_path)


def all_of(inventory_path: Path) -> list[Run]:
    """Return the runs of an inventory file, oldest first.

    Raises:
        KitError: an unreadable record may be that of another run of the inventory, which may be running.
    """
    runs, unreadable = on_record()
    for each in unreadable:
        if each.inventory_path is None or is_same(each.inventory_path, inventory_path):
            raise each.error()
    return [run for run in runs if is_same(run.inventory_path, inventory_path)]


def _latest(runs: Sequence[Run], inventory_path: Path) -> Run | None:
    own = [run for run in runs if not run.sweep and is_same(run.inventory_path, inventory_path)]
    return max(own, key=lambda run: (run.state in LIVE, run.order), default=None)


def is_same(recorded: str, inventory_path: Path) -> bool:
    """Whether a recorded path is that of this file; both are as the user wrote them, maybe with ``..`` or a symlink."""
    return os.path.realpath(recorded) == os.path.realpath(inventory_path)


def sweep(run_id: str | None) -> list[Run]:
    """Return the runs of the sweep with this id or unambiguous prefix of one; for None those of the latest run's sweep.

    Return [] if that is not a sweep.

    Raises:
        KitError: the record of a run of the sweep cannot be read.
    """
    check_id(run_id)
    runs, unreadable = on_record()
    if run_id is None:
        ids = {_last(runs).sweep} if runs and not unreadable else set()
    else:
        ids = {run.sweep or run.run_id for run in runs if run.run_id.startswith(run_id)}
        ids = ids & {run_id} or ids
    if len(ids) != 1 or (run_id and not all(each.startswith(run_id) for each in ids)):
        return []
    found = [run for run in runs if run.sweep and run.sweep in ids]
    for each in unreadable:
        if found and each.is_of(found[0].sweep):
            raise each.error()
    return sorted(found, key=lambda run: int(run.run_id.rpartition(".")[2]))


def current(inventory_path: Path, command: Sequence[str] | None, *, is_new: bool) -> Run | None:
    """Return the run that a `kit up` attaches to or resumes: the inventory's latest, if it has the same command.

    Args:
        inventory_path: of the inventory.
        command: the command to run, the inventory's or the command line's.
        is_new: whether to start a new run in any case.

    Raises:
        KitError: the latest run has not ended, and `is_new` is set or it runs another command.
    """
    run = latest_of(inventory_path)
    if run is None:
        return None
    same = (run.command or run.inventory.get("job", {}).get("command")) == (
        list(command) if command else None
    )
    if run.state in LIVE and is_new:
        raise KitError(f"{run.run_id} of this inventory is not over", cure=f"kit down {run.run_id} stops it")
    if run.state in LIVE and not same:
        raise KitError(
            f"{run.run_id} of this inventory is running another command",
            cure=f"kit down {run.run_id} stops it; to run both, copy the inventory file",
        )
    return run if same and not is_new else None
