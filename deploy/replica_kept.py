"""The copies that one node keeps for others, by content, and the listings that say what they are copies of."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from nodekit.deploy.replica_files import write_synced
from nodekit.deploy.replica_merge import Attempt, Source
from nodekit.deploy.replica_wire import Wire

NUM_SET_ASIDE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Kept:
    """The copies kept for other nodes, by content, and the listings that say what they are copies of."""

    def __init__(self, folder: Path) -> None:
        self._blobs, self._listings = folder / "blobs", folder / "listings"
        self._incoming, self._set_aside = folder / "incoming", folder / "set-aside"
        for each in (folder, self._blobs, self._listings, self._incoming):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._incoming.iterdir():
            left.unlink()
        self._lock = threading.Lock()
        self.sources: Mapping[str, Source] = {}
        """Node → the newest listing it gave us."""
        for path in self._listings.iterdir():
            with contextlib.suppress(OSError, ValueError):  # damaged: then it is one copy less
                source = Source.from_dict(json.loads(path.read_bytes()))
                self.sources = {**self.sources, source.node: source}

    def path_of(self, sha256: str) -> Path | None:
        """Where this content lies."""
        path = self._blobs / sha256
        return path if path.exists() else None

    def _is_safe(self, sha256: str) -> bool:
        """Whether it is here and can be promised: under a second name, in the user's folder, it may be written to."""
        with contextlib.suppress(OSError):
            return (self._blobs / sha256).lstat().st_nlink == 1
        return False

    def held(self) -> set[str]:
        """The content that is here."""
        return {entry.name for entry in os.scandir(self._blobs)}

    def receive(self, wire: Wire, sha256: str, size_bytes: int, go: Callable[[], None]) -> str:
        """Take the bytes that come after `go`; returns their SHA-256, and keeps them if it is the one wanted.

        Raises:
            OSError: no room, or not writable (before `go`), or the connection is lost.
        """
        draft = self._incoming / secrets.token_hex(8)
        try:
            with self.room_for(draft, size_bytes) as file:
                go()
                found = wire.receive_bytes(size_bytes, file)
                file.flush()
                os.fsync(file.fileno())
            if found == sha256:
                draft.replace(self._blobs / sha256)
            return found
        finally:
            draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def room_for(self, draft: Path, size_bytes: int) -> Iterator[BinaryIO]:
        """A new file with its blocks taken already; what was set aside is given up for it.

        Raises:
            OSError: there is no room, or nothing can be written.
        """
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if size_bytes:
                try:
                    os.posix_fallocate(descriptor, 0, size_bytes)
                except OSError as error:
                    if error.errno not in _NO_ROOM or not self._set_aside.is_dir():
                        raise
                    shutil.rmtree(self._set_aside, ignore_errors=True)
                    os.posix_fallocate(descriptor, 0, size_bytes)
            yield file

    def keep(self, source: Source, elsewhere: Set[str]) -> list[str]:
        """Take over a node's listing, then drop what only the one before named; or return the content it lacks.

        `elsewhere` is content that lies in this node's own folder and needs no copy.
        """
        with self._lock:
            wanted = _content(source)
            if lacking := sorted(sha256 for sha256 in wanted - elsewhere if not self._is_safe(sha256)):
                return lacking
            old = self.sources.get(source.node)
            data = json.dumps(source.to_dict()).encode()
            write_synced(self._listing_of(source.node), data)
            self.sources = {**self.sources, source.node: source}
            if old is not None:
                self._drop(old)
            return []

    def drop_before(self, attempt: Attempt) -> None:
        """Drop what belongs to older attempts: it is in everyone's folder by now."""
        with self._lock:
            for source in [each for each in self.sources.values() if each.attempt < attempt]:
                self._listing_of(source.node).unlink(missing_ok=True)
                self.sources = {name: each for name, each in self.sources.items() if name != source.node}
                self._drop(source)

    def drop_shared(self) -> None:
        """Drop what has a second name in the user's folder, through which a script may write to it."""
        with self._lock:
            for sha256 in self.held():
                if not self._is_safe(sha256):
                    self.discard(sha256)

    def collect(self) -> None:
        """Remove what no listing names, left by a kill; only while nobody sends."""
        with self._lock:
            for sha256 in self.held() - self._named():
                self.discard(sha256)

    def discard(self, sha256: str) -> None:
        """Remove one copy."""
        (self._blobs / sha256).unlink(missing_ok=True)

    def _drop(self, source: Source) -> None:
        for sha256 in _content(source) - self._named():
            self.discard(sha256)

    def _named(self) -> set[str]:
        return {sha256 for source in self.sources.values() for sha256 in _content(source)}

    def _listing_of(self, node: str) -> Path:
        return self._listings / f"{quote(node, safe='')}.json"

    def aside(self, attempt: Attempt) -> Path:
        """Where files go that lost, at the start of this attempt; of these folders only the last few are left."""
        here = self._set_aside / f"{attempt[0]:04d}.{attempt[1]:04d}"
        here.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(path for path in self._set_aside.iterdir() if path != here)
        for old in others[: len(others) - NUM_SET_ASIDE + 1]:
            shutil.rmtree(old, ignore_errors=True)
        return here


def _content(source: Source) -> set[str]:
    return {version.sha256 for version in source.files.values()} - {""}
