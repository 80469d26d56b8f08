"""The output folder of a run without kit: a name that is the same for the same training, and a lock."""

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

from nodekit.training.errors import TrainingError
from nodekit.training.options.deepspeed_config import read_settings
from nodekit.training.options.options import Options

log = logging.getLogger("nodekit.training")

LOCK = ".lock"
"""The name of a file in the folder, which the run that writes there locks; its text names the process."""
_LOCKED_BYTE = 1 << 20  # beyond the text: Windows lets no other process read a locked byte


class InUse(TrainingError):
    """Another process holds the lock of the folder."""


def default_folder(options: Options, world_size: int) -> Path:
    """Return the folder of a run without ``--output``: below ``runs``, named after the task, the engine and a hash.

    Two commands get the same folder only if each can go on from the other's snapshot, that is, if they differ only in
    options such as the number of epochs or ranks, or what is kept and shown (``may_change`` in `Options`).
    """
    given = {
        option.name: _absolute(option.name, value)
        for option in fields(options)
        if not option.metadata["may_change"] and (value := getattr(options, option.name)) != option.default
    }
    if options.deepspeed_config:
        per_rank = read_settings(options.deepspeed_config).batch_size
        if per_rank and options.batch_size == per_rank * world_size:
            given["batch_size"] = f"{per_rank} per rank"
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    where, _, name = options.task.rpartition(":")
    task = re.sub(r"\W+", "-", f"{Path(where).stem}-{name}" if where else name)
    return Path("runs", f"{task}-{options.engine}-{digest[:10]}")


def _absolute(name: str, value: object) -> object:
    """Return an option's value for the hash, with absolute paths, since one file has several relative names."""
    if name == "task":
        where, colon, attribute = str(value).rpartition(":")
        return (
            f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else f"{where}{colon}{attribute}"
        )
    is_path = isinstance(value, Path) or name == "data" or (name == "model" and Path(str(value)).exists())
    return str(Path(str(value)).expanduser().resolve()) if is_path else value


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it until the block or this process ends.

    If the file system cannot be written to, or has no locks, log a warning and go on.

    Raises:
        InUse: another process holds the lock.
    """
    file = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+b")
        if not _lock(file):
            file.seek(0)
            holder = file.read(200).decode(errors="replace").strip()
            file.close()
            raise InUse(
                f"{folder} is in use by {holder or 'another process'}: the same training is running already. Wait for "
                "its end, end it (its snapshot stays), or give this one another folder with --output; if its host is "
                f"gone, remove {folder / LOCK}"
            )
        with suppress(OSError):  # on a full disk, the folder is locked all the same
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
    except OSError as error:
        log.warning("%s is not locked (%s): do not start the same training twice at once", folder, error)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _lock(file: BinaryIO) -> bool:
    """Lock the file without waiting, until this process ends; return False if another process has locked it.

    This does not use flock: a data loader's forked workers would hold such a lock until they notice that the rank died.
    """
    try:
        import fcntl
    except ImportError:
        return _lock_on_windows(file)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKED_BYTE)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _lock_on_windows(file: BinaryIO) -> bool:
    import msvcrt

    file.seek(_LOCKED_BYTE)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # mypy looks as on Linux
    except PermissionError:
        return False
    return True
