"""Read and write the files of a host: retried where a file server is slow, whole or not at all, private (0600)."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from typing import Any, Callable, List, Optional, TypeVar, Union

T = TypeVar("T")

PATIENCE_S = 1.0
NOT_FOUND = (FileNotFoundError, NotADirectoryError)
"""What says that a file is not there. Every other OSError says that nobody knows."""


def retried(
    function: Callable[[], T], for_s: Optional[float] = None, pause: Optional[Callable[[], object]] = None
) -> T:
    """Return what `function` returns; call it again while it raises an OSError other than `NOT_FOUND`.

    Args:
        function: reads something, and may be called again.
        for_s: how long; None: `PATIENCE_S`.
        pause: called in between, in place of a short sleep.
    """
    until = time.monotonic() + (PATIENCE_S if for_s is None else for_s)
    while True:
        try:
            return function()
        except NOT_FOUND:
            raise
        except OSError:
            if time.monotonic() >= until:
                raise
        pause() if pause else time.sleep(0.1)


def make_private(folder: Union[str, "os.PathLike[str]"]) -> None:
    """Make a folder and what is missing above it, for this user alone whatever the umask; it may be there.

    `os.makedirs` gives its mode to the last of them only.

    Raises:
        OSError: it cannot be made.
    """
    if str(folder).startswith("~"):  # what `expanduser` has left is of nobody, and no folder's name here
        raise FileNotFoundError(errno.ENOENT, "there is no such user", str(folder))
    missing = [os.path.abspath(folder)]
    while not os.path.lexists(os.path.dirname(missing[-1])):
        missing.append(os.path.dirname(missing[-1]))
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except OSError:  # as of one that is there, on a disk that is read-only
            if not os.path.isdir(each):
                raise


def check_regular(path: str) -> None:
    """Refuse what is no regular file: of a FIFO, say, who opens it may wait forever.

    Raises:
        OSError: it is none. Whether it is there, and can be read, who opens it hears.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", path)


def read(path: str) -> bytes:
    """Read a small regular file, in fewer system calls than `open` makes: some are read several times a second."""
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while part := os.read(handle, 1 << 16):
            found += part
        return found
    except OSError as error:
        error.filename = path  # os.read knows none
        raise
    finally:
        os.close(handle)


def read_text(path: str) -> str:
    """Return the text of a file; "" for one that is missing or cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def names(folder: str) -> List[str]:
    """Return the names in a folder, sorted; none where it is missing or cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def load(path: str) -> Any:
    """Return what a JSON file holds; None for one that is missing, torn or nested too deeply.

    Raises:
        OSError: it cannot be read, so it may hold anything.
    """
    try:
        return json.loads(retried(lambda: read(path)))
    except (*NOT_FOUND, ValueError, RecursionError):
        return None


def tail(path: str, size: int = 4096, since: int = 0) -> str:
    """Return the end of a file, of what is behind its byte `since`; "" without one."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def write_private(path: str, data: bytes, durable: bool = False) -> None:
    """Write a 0600 file in one step: a reader sees all of it or the one before; `durable`: also after a power loss."""
    # A shared folder has several writers, which in containers may well have the same pid.
    draft = "%s.%s" % (path, os.urandom(8).hex())
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            while data:
                data = data[os.write(handle, data) :]
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    if durable:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_private(path: str, data: bytes) -> None:
    """Append to a 0600 file in one write: lines of several writers do not mix. All is added, or (OSError) nothing."""
    check_regular(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        append_whole(handle, data, path)
    finally:
        os.close(handle)


def append_whole(handle: int, data: bytes, path: str) -> None:
    """Append to a file that is open with O_APPEND, in one write: all, or (OSError) nothing."""
    written = os.write(handle, data)
    if written < len(data):  # the disk is full: half a line would spoil the next one, too
        end = os.lseek(handle, 0, os.SEEK_CUR)
        if os.fstat(handle).st_size == end:
            os.ftruncate(handle, end - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def end_torn_line(path: str) -> None:
    """End a last line that a crash has torn, so that the next one is not glued to it."""
    try:
        with open(path, "rb+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
    except OSError:
        pass
