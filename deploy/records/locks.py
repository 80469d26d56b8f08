"""File locks: of a run's supervisor, and of a `kit up` that is starting a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nodekit.deploy.host.files import NOT_FOUND, make_private
from nodekit.deploy.records.record_files import folder, told
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError


def locked(path: Path) -> IO[str] | None:
    """Open a file (created with mode 0600 if missing), locked until it is closed; None if another process holds it."""
    try:
        path.touch(mode=0o600)
        file = path.open("r+", encoding="utf-8")
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # On a read-only disk kit can still show or stop a run.
        file = path.open(encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on this file; True if that cannot be found out."""
    try:
        with path.open() as file:
            # Take a shared lock, and release it at once: it must not keep a supervisor from taking over.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except NOT_FOUND:
        return False
    except OSError:  # another process holds it, or the file cannot be read
        return True
    return False


def _sign(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # the disk may be full; the file is locked anyway
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)


def _signature(path: Path) -> str:
    """Return the pid of the process that holds a lock, or held it last, as text; "?" if unknown."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "?"
    return "?"


class SupervisorLock:
    """The lock that lets only one supervisor act for a run; others watch, and one takes over when it is released."""

    def __init__(self, run: Run) -> None:
        self._path = supervisor_lock(run)
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Acquire the lock without blocking; False if another process holds it."""
        if self._file is not None:
            return True
        with told(self._path):
            self._file = locked(self._path)
        if self._file is None:
            return False
        _sign(self._file)
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._file is not None

    def owner(self) -> str:
        """Return the pid of the process that holds the lock, or held it last; "?" if unknown."""
        return _signature(self._path)

    def release(self) -> None:
        """Release the lock, so that another supervisor can act."""
        if self._file is not None:
            self._file.close()
            self._file = None


def supervisor_lock(run: Run) -> Path:
    """Return the path of the lock file of a run's supervisor."""
    return run.folder / "supervisor.lock"


def is_supervised(run: Run) -> bool:
    """Whether a supervisor acts for a run."""
    return is_held(supervisor_lock(run))


@contextlib.contextmanager
def starting(inventory_path: Path) -> Iterator[None]:
    """Hold the lock on starting a run of this inventory, so that two `kit up` at once do not start two runs.

    Raises:
        KitError: another `kit up` holds the lock.
    """
    path = _starting_path(str(inventory_path.resolve()))
    with told(path):
        make_private(folder())
        file = locked(path)
    if file is None:
        raise KitError(
            f"another kit up (pid {_signature(path)}) is just starting {inventory_path}",
            cure="wait for it, then kit up attaches to its run",
        )
    with file:
        _sign(file)
        yield


def starting_lock(run: Run) -> Path:
    """Return the path of the lock file that a `kit up` holds while it starts a run of the same inventory."""
    return _starting_path(str(Path(run.inventory_path).resolve()))


def is_starting(run: Run) -> bool:
    """Whether a `kit up` is starting a run right now."""
    return run.state == "starting" and is_held(starting_lock(run))


def _starting_path(inventory_path: str) -> Path:
    name = hashlib.sha256(inventory_path.encode()).hexdigest()[:16]
    return folder().parent / f"starting-{name}.lock"
