"""Who holds a run: its supervisor, or the `kit up` that is just starting it; and locks on files in general."""

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
    """A file of ours (0600, made if it is not there), locked until it is closed; None while another has it."""
    try:
        path.touch(mode=0o600)
        file = path.open("r+", encoding="utf-8")
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # Who only looks, or stops a run, needs it on a read-only disk, too.
        file = path.open(encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_held(path: Path) -> bool:
    """Whether a process has this file locked."""
    try:
        with path.open() as file:
            # Shared, and let go at once: it must not keep a supervisor from taking over.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except NOT_FOUND:
        return False
    except OSError:  # another has it, or nobody can know
        return True
    return False


def _sign(file: IO[str]) -> None:
    with contextlib.suppress(OSError):  # a full disk: it is locked all the same
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)


def _signature(path: Path) -> str:
    """The pid of the process that has a file locked, or had it last; "?" where nobody knows."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip() or "?"
    return "?"


class SupervisorLock:
    """Only one supervisor acts for a run; others watch, and one of them takes over when it ends."""

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
        """Whether this process holds it."""
        return self._file is not None

    def owner(self) -> str:
        """The pid of the process that holds it, or held it last."""
        return _signature(self._path)

    def release(self) -> None:
        """Let another supervisor act."""
        if self._file is not None:
            self._file.close()
            self._file = None


def supervisor_lock(run: Run) -> Path:
    """What whoever supervises a run holds."""
    return run.folder / "supervisor.lock"


def is_supervised(run: Run) -> bool:
    """Whether somebody acts for a run."""
    lock = SupervisorLock(run)
    taken = lock.acquire()
    lock.release()
    return not taken


@contextlib.contextmanager
def starting(inventory_path: Path) -> Iterator[None]:
    """Held while a run of this inventory is being started: two `kit up` at once must not start two.

    Raises:
        KitError: another `kit up` holds it.
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
    """What a `kit up` holds that is just starting a run of the same inventory."""
    return _starting_path(str(Path(run.inventory_path).resolve()))


def is_starting(run: Run) -> bool:
    """Whether a `kit up` is just starting a run."""
    return run.state == "starting" and is_held(starting_lock(run))


def _starting_path(inventory_path: str) -> Path:
    name = hashlib.sha256(inventory_path.encode()).hexdigest()[:16]
    return folder().parent / f"starting-{name}.lock"
