"""Read files with retries, as file servers may be slow, and write them atomically and private (0600)."""

from __future__ import annotations

import errno
import json
import os
import pwd
import stat
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar, Union

from nodekit.deploy.host.errors import OF_THE_DISK

T = TypeVar("T")
# Folder → the thread that tries to write there, and why it could not.
_trying: Dict[str, Tuple[threading.Thread, List[str]]] = {}

PATIENCE_S = 1.0  # how long a failing read is retried by default
NOT_FOUND = (FileNotFoundError, NotADirectoryError)
"""The errors for a file that does not exist. After any other OSError that is unknown."""


def retried(
    function: Callable[[], T], for_s: Optional[float] = None, pause: Optional[Callable[[], object]] = None
) -> T:
    """Return what `function` returns; call it again while it raises an OSError other than `NOT_FOUND`.

    Args:
        function: reads something; called once or more.
        for_s: how long to retry; None: `PATIENCE_S`.
        pause: called between two tries, in place of a short sleep.
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
    """Create a folder and its missing parents with mode 0700, whatever the umask; it may exist already.

    `os.makedirs` would apply the mode to the last folder only.

    Raises:
        OSError: the folder cannot be created.
    """
    if str(folder).startswith("~"):  # `expanduser` leaves the ~ of an unknown user
        raise FileNotFoundError(errno.ENOENT, "there is no such user", str(folder))
    missing = [os.path.abspath(folder)]
    while not os.path.lexists(os.path.dirname(missing[-1])):
        missing.append(os.path.dirname(missing[-1]))
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except OSError:  # may also be raised for an existing folder, on a read-only file system
            if not os.path.isdir(each):
                raise


def owner(path: str) -> str:
    """Return the user that a file or folder is of, or the nearest folder above it that can be seen."""
    while True:
        try:
            uid = os.stat(path).st_uid
            break
        except OSError:
            path = os.path.dirname(os.path.abspath(path))
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def check_regular(path: str) -> None:
    """Refuse anything but a regular file: opening a FIFO, for example, may block for ever.

    Raises:
        OSError: it is another kind of file. A missing or unreadable file raises nothing here, but when it is opened.
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
    """Read a small regular file with fewer system calls than `open`, as some are read several times a second."""
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while part := os.read(handle, 1 << 16):
            found += part
        return found
    except OSError as error:
        error.filename = path  # os.read does not set it
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
    """Return the names in a folder, sorted; none if it is missing or cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def load(path: str) -> Any:
    """Return the value in a JSON file; None if the file is missing, torn or nested too deeply.

    Raises:
        OSError: the file cannot be read, so its content is unknown.
    """
    try:
        return json.loads(retried(lambda: read(path)))
    except (*NOT_FOUND, ValueError, RecursionError):
        return None


def tail(path: str, size: int = 4096, since: int = 0) -> str:
    """Return the last `size` bytes of a file as text, but nothing before byte `since`; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def write_private(path: str, data: bytes, durable: bool = False) -> None:
    """Write a 0600 file atomically: readers see the old or the new content; `durable`: also after a power loss."""
    # Not named by pid: a shared folder has several writers, which may have the same pid in containers.
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
    """Append to a 0600 file in one write, so that lines of several writers do not mix; on OSError nothing is added."""
    check_regular(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        append_whole(handle, data, path)
    finally:
        os.close(handle)


def append_whole(handle: int, data: bytes, path: str) -> None:
    """Append to a file that is open with O_APPEND, in one write: all of `data` or, on OSError, nothing."""
    written = os.write(handle, data)
    if written < len(data):  # the disk is full: half a line would spoil the next line, too
        end = os.lseek(handle, 0, os.SEEK_CUR)
        if os.fstat(handle).st_size == end:
            os.ftruncate(handle, end - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def unwritable(folder: str) -> str:
    """Return why nothing can be written to a folder, with its path; "" if it can be, or is full, or is not known.

    A file system that the kernel has made read-only after an error does not say so (ext4 since Linux 6.14): a file
    without a name is tried, which nobody who watches the folder sees.
    """
    if (trying := _trying.get(folder)) is None:  # an earlier try may still wait for the disk
        why: List[str] = []
        thread = threading.Thread(target=_try_to_write, args=(folder, why), daemon=True)
        thread.start()
        trying = _trying[folder] = thread, why
    thread, why = trying
    thread.join(PATIENCE_S)
    if thread.is_alive():
        why = ["its disk does not answer"]
    else:
        _trying.pop(folder, None)
    return "nothing can be written to %s: %s" % (folder, why[0]) if why else ""


def _try_to_write(folder: str, why: List[str]) -> None:
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in OF_THE_DISK:
            why.append(os.strerror(error.errno))


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
