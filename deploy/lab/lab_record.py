"""The record of a lab, in its folder: written by `kit lab up` before it creates anything there.

Operations on a lab run as root and trust its folder. So a folder is accepted as a lab only if nobody but root can have
written the record, and the record names this folder.
"""

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nodekit.inventory.errors import KitError

FILE = "lab.json"
DRAFT = "lab.json.draft"


def begin(folder: Path, made: dict[str, Any]) -> None:
    """Create a lab's folder, or use an empty one, and record what will be created in it.

    Args:
        folder: the lab's absolute path.
        made: the names of the hosts' folders as ``hosts``, and whether there is ``slurm``.

    Raises:
        KitError: the folder is not empty, or not root's.
    """
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise KitError(
            f"{folder} is not an empty folder and holds no lab", cure="choose a new one with --folder"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KitError(
            f"{folder}: cannot be made: {error.strerror}", cure="choose another --folder"
        ) from error
    if (owner := folder.stat().st_uid) != 0:
        raise KitError(
            f"{folder} belongs to user {owner}, not to root", cure="choose a new one with --folder"
        )
    folder.chmod(0o700)  # it will hold the hosts' disks and keys
    draft = folder / DRAFT
    draft.write_text(json.dumps({"made": {**made, "folder": os.path.realpath(folder)}}) + "\n")
    os.link(draft, folder / FILE)  # atomically, and without replacing another record
    draft.unlink()


def complete(folder: Path, lab: dict[str, Any]) -> None:
    """Add the description of the finished lab to the record."""
    draft = folder / DRAFT
    draft.write_text(json.dumps({**lab, "made": read(folder)["made"]}, indent=2) + "\n")
    draft.rename(folder / FILE)


def read(folder: Path) -> dict[str, Any]:
    """Return the record of the lab in a folder: what was ``made`` and, once finished, its description.

    Raises:
        FileNotFoundError: there is no lab.
        KitError: the record was not written by `kit lab up`.
    """
    with opened(folder) as (_, record):
        return record


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a path to a lab's folder that stays valid if the folder is renamed, and the record.

    Raises:
        FileNotFoundError: there is no lab.
        KitError: the record was not written by `kit lab up`.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        if not os.path.lexists(folder / FILE):
            raise FileNotFoundError(folder) from None
        raise KitError(f"{folder} is a link", cure="name the lab's folder itself") from None
    try:
        place = Path(f"/proc/self/fd/{handle}")
        found = os.stat(FILE, dir_fd=handle, follow_symlinks=False)
        if _is_open_to_others(os.fstat(handle)) or _is_open_to_others(found):
            raise _not_ours(folder, "it can be written by others than root")
        try:
            record = json.loads((place / FILE).read_text(encoding="utf-8"))
            made_in = record["made"]["folder"]
        except (ValueError, KeyError, TypeError):
            raise _not_ours(folder, f"its {FILE} is no record of one") from None
        if made_in != str(place.readlink()):
            raise _not_ours(folder, f"its {FILE} is that of a lab in {made_in}")
        yield place, record
    finally:
        os.close(handle)


def _is_open_to_others(found: os.stat_result) -> bool:
    return (
        stat.S_ISLNK(found.st_mode)
        or found.st_uid != 0
        or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    )


def _not_ours(folder: Path, why: str) -> KitError:
    return KitError(f"{folder} holds no lab that kit lab up made ({why}); nothing in it is used or removed")


def mounts_below(folder: Path) -> Iterable[str]:
    """Yield the mount points below a folder, relative to it."""
    prefix = f"{os.path.realpath(folder)}/"
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")[:-1]:
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])
        if point.startswith(prefix):
            yield point.removeprefix(prefix)
