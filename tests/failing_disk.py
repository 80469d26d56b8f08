"""A disk that fails: what is done below one folder fails, is torn, or is the last thing that its process did.

The functions of ``os`` and ``io`` that pathlib and kit call are replaced while a `Disk` is in use. Nothing is synced
in truth; what was is remembered, so that a power failure can take away the rest.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ERRORS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOSPC, errno.EINTR)
KILL = -1
TORN = -2


class Killed(BaseException):
    """``kill -9``: nothing is caught, nothing is cleaned up."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    at: int
    """Before which call."""
    what: int
    """An errno, `KILL`, or `TORN`: half of it is written, then there is no room."""
    times: int = 1
    """For how many calls in a row."""
    folder: str = ""
    """Only calls whose path has this in it count."""


class _File(io.FileIO):
    """A file whose writing may fail."""

    disk: Disk
    is_full = False

    def write(self, data: Any) -> int:
        if self.disk.is_dead:
            return len(data)
        try:
            self.disk.touch(str(self.disk.names.get(self.fileno(), self.disk.root)), is_write=True)
        except _Torn:
            self.is_full = True
            return super().write(bytes(data)[: max(1, len(data) // 2)])
        if self.is_full:
            self.is_full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


class _Torn(Exception):
    """Half of it is written."""


class Disk:
    """All that is below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.fault: Fault | None = None
        self.is_dead = False
        self.has_killed = False
        self.num_calls = 0
        self.num_fired = 0
        self.names: dict[int, str] = {}  # descriptor → path
        self.synced: dict[int, bytes] = {}  # inode → what is on the disk
        self.durable: dict[str, dict[str, int]] = {}  # folder → name → inode, as on the disk

    @contextmanager
    def failing(self, fault: Fault | None) -> Iterator[None]:
        """One process's doings; `Killed` ends it."""
        self.fault, self.num_calls, self.is_dead = fault, 0, False
        try:
            with suppress(Killed):
                yield
        finally:
            self.has_killed, self.fault, self.is_dead = self.is_dead, None, False

    def touch(self, path: str, *, is_write: bool = False) -> None:
        """Whatever is done with a path: it may fail."""
        if self.is_dead:
            raise Killed
        if self.fault is None or not path.startswith(self.root) or self.fault.folder not in path:
            return
        at, self.num_calls = self.num_calls, self.num_calls + 1
        if not self.fault.at <= at < self.fault.at + self.fault.times:
            return
        self.num_fired += 1
        if self.fault.what == KILL:
            self.is_dead = True
            raise Killed
        if self.fault.what == TORN:
            if is_write:
                raise _Torn
            return
        raise OSError(self.fault.what, os.strerror(self.fault.what), path)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of the real one."""
        with mock.patch.multiple(os, **self._calls()), mock.patch.object(io, "open", self._open(io.open)):
            yield

    def _calls(self) -> dict[str, Callable[..., Any]]:
        def checked(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(path, (str, Path)):
                    self.touch(str(path))
                return real(path, *args, **kwargs)

            return call

        names = ("listdir", "scandir", "unlink", "mkdir", "replace", "stat", "link", "rmdir")
        os_open, close = os.open, os.close

        def opened(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
            self.touch(str(path))
            descriptor = os_open(path, flags, mode, **more)
            self.names[descriptor] = str(path)
            if flags & os.O_CREAT:
                self.synced.pop(os.fstat(descriptor).st_ino, None)  # the number is used again
            return descriptor

        def closed(descriptor: int) -> None:
            self.names.pop(descriptor, None)
            close(descriptor)

        def fsync(descriptor: int) -> None:
            path = self.names.get(descriptor, "")
            self.touch(path)
            if not path.startswith(self.root):
                return
            if os.path.isdir(path):  # noqa: PTH112
                self.durable[path] = {entry.name: entry.inode() for entry in SCANDIR(path)}
            else:
                size = os.fstat(descriptor).st_size
                with OPEN(path, "rb") as file:
                    self.synced[os.fstat(descriptor).st_ino] = file.read(size)

        def fdopen(descriptor: int, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
            if mode != "wb" or not self.names.get(descriptor, "").startswith(self.root):
                return FDOPEN(descriptor, mode, buffering, **more)
            raw = _File(descriptor, "wb")
            raw.disk = self
            return io.BufferedWriter(raw)

        return {
            **{name: checked(getattr(os, name)) for name in names},
            "open": opened,
            "close": closed,
            "fsync": fsync,
            "fdopen": fdopen,
        }

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, (str, Path)):
                self.touch(str(file))
            return real(file, *args, **kwargs)

        return call

    def lose_power(self, folder: Path, *, keeps: Callable[[], bool]) -> None:
        """What was not synced is gone, or is not, name by name; and so is what files hold."""
        if not folder.is_dir():
            return
        now = {entry.name: entry.inode() for entry in SCANDIR(folder)}
        before = self.durable.get(str(folder), {})
        held = {inode: self.synced.get(inode) for inode in {*now.values(), *before.values()}}
        for name in sorted({*now, *before}):
            inode = now.get(name) if now.get(name) == before.get(name) or keeps() else before.get(name)
            (folder / name).unlink(missing_ok=True)
            if inode is not None:
                data = held[inode]
                (folder / name).write_bytes(b"" if data is None else data)
                if data is not None:
                    self.synced[(folder / name).stat().st_ino] = data
        self.durable[str(folder)] = {entry.name: entry.inode() for entry in SCANDIR(folder)}


OPEN, SCANDIR, FDOPEN = io.open, os.scandir, os.fdopen
