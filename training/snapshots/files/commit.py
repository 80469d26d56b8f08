"""Write files atomically, even if the process is killed or the disk is full."""

import errno
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

log = logging.getLogger("nodekit.training")

T = TypeVar("T")

RETRY_S = 5.0
"""How many seconds a read is retried: while a file server restarts, or there are no file descriptors."""
_PAUSE_S = 0.25
NOT_FOUND = (FileNotFoundError, NotADirectoryError)
"""The errors for a file that does not exist. After any other OSError, it is unknown whether the file exists."""
TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)
"""Matches names of files that are being written, or that a kill has left."""
# Folder → lock held by the thread of this process that writes there.
_writers: dict[Path, threading.Lock] = {}


def retried(read: Callable[[], T], until_s: float | None = None) -> T:
    """Call ``read`` and return its result, retrying while it raises an OSError other than ``NOT_FOUND``.

    Args:
        read: a function that may be called again.
        until_s: give up at this ``time.monotonic()``; None: ``RETRY_S`` from now.
    """
    until_s = time.monotonic() + RETRY_S if until_s is None else until_s
    while True:
        try:
            return read()
        except NOT_FOUND:
            raise
        except OSError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(_PAUSE_S)


@contextmanager
def warned(text: str) -> Iterator[None]:
    """Log an OSError of the block, after ``text``, instead of raising it."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", text, error)


@contextmanager
def locked(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, so that one thread of one process at a time writes to it.

    There are several writers only if ranks save alone (``save_if_newest``), or an attempt's last save outlasts it.
    Where processes cannot lock files, on some file servers and on Windows, only threads of this process are kept apart.

    Args:
        folder: of snapshots.
        waits: wait for other threads of this process without a limit; otherwise, and for other processes, `RETRY_S`.

    Raises:
        BlockingIOError: another writer still holds the lock then.
    """
    own = _writers.setdefault(folder.resolve(), threading.Lock())
    if not own.acquire(timeout=-1 if waits else RETRY_S):
        raise _busy(folder)
    try:
        with _locked_for_others(folder):
            yield
    finally:
        own.release()


@contextmanager
def _locked_for_others(folder: Path) -> Iterator[None]:
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where a folder cannot be opened
        yield
        return
    import fcntl

    def take() -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(folder) from None
        except OSError:  # the file system has no locks, so do not try again
            pass

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        retried(take)
        yield
    finally:
        # Closing is not enough: a data loader's workers, forked meanwhile, have the file open too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _busy(folder: Path) -> BlockingIOError:
    return BlockingIOError(errno.EWOULDBLOCK, "another save is under way there", str(folder))


@contextmanager
def written_beside(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Give the block a new file in ``folder``, mode 0600; it is removed at the end unless `place` has renamed it."""
    temporary = folder / f".tmp-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield temporary, file
    finally:
        with suppress(OSError):  # the next save removes the file; do not hide another error
            temporary.unlink(missing_ok=True)


def place(
    temporary: Path,
    file: BinaryIO,
    name: str,
    *,
    syncs: bool = True,
    last_word: Callable[[], None] = lambda: None,
) -> None:
    """Rename a temporary file to ``name`` in the same folder, replacing a file of that name.

    Args:
        temporary: the file's path.
        file: the same file, open; it is closed.
        name: without a folder.
        syncs: sync the file before it is renamed, and the folder afterwards.
        last_word: called right before the renaming; may raise to prevent it.
    """
    file.flush()
    if syncs:
        os.fsync(file.fileno())
    file.close()  # Windows cannot rename an open file
    last_word()
    temporary.replace(temporary.with_name(name))
    if syncs:
        sync_folder(temporary.parent)


def sync(path: Path) -> None:
    """Sync a closed file to the disk."""
    file_fd = os.open(path, os.O_RDWR)  # Windows cannot sync a file that is open for reading only
    try:
        os.fsync(file_fd)
    finally:
        os.close(file_fd)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where a folder cannot be opened
        return
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


class HashingFile:
    """A file for ``torch.save`` that hashes and counts the bytes written to it.

    The first OSError is raised by ``finish``, since torch's C++ code would turn it into an error of its own.
    """

    def __init__(self, file: BinaryIO, error: OSError | None = None) -> None:
        """Wrap an open file; if ``error`` is given, write nothing, and raise it in ``finish``."""
        self._file = file
        self._digest = hashlib.sha256()
        self._error = error
        self.size_bytes = 0
        self.sha256 = ""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data``, unless there was an error; never raise an OSError."""
        view = memoryview(data)
        if self._error is None:
            try:
                self._file.write(view)
                self._digest.update(view)
            except OSError as error:
                self._error = error
        self.size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Flush the file; never raise an OSError."""
        with suppress(OSError):  # `finish` flushes again, and raises the error
            self._file.flush()

    def finish(self) -> None:
        """Flush the file and set ``sha256``.

        Raises:
            OSError: a write has failed.
        """
        if self._error is not None:
            raise self._error
        self._file.flush()
        self.sha256 = self._digest.hexdigest()
