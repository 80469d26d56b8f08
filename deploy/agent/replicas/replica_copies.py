"""The copies of user files that a node keeps for other nodes, and the listings that name them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.agent.replicas.replica_files import (
    BROKEN,
    Attempt,
    Known,
    Listing,
    Version,
    open_file,
    write_synced,
)
from nodekit.training.snapshots.files import commit

_NUM_SET_ASIDE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Copies:
    """The copies that this node keeps for other nodes, as blobs by SHA-256, and the listings that name them."""

    def __init__(self, folder: Path) -> None:
        self._blobs, self._listings, self._set_aside = (
            folder / name for name in ("blobs", "listings", "set-aside")
        )
        for each in (folder, self._blobs, self._listings):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self.listings: Mapping[str, Listing] = {}
        """Node → the newest listing it sent to this node."""
        self._read: set[Path] = set()
        self._is_whole = False  # whether all listings were read; until then no blob may be removed as unnamed
        with contextlib.suppress(OSError):  # `read` is called again before the result matters
            self.read()

    def read(self) -> None:
        """Read the listings that have not been read yet.

        Raises:
            OSError: a listing cannot be read, or has an unknown format; no copy is removed until it can be read.
        """
        self._is_whole = False
        for path in self._listings.iterdir():
            if path in self._read or path.suffix != ".json":
                continue
            data = path.read_bytes()
            try:
                fields = json.loads(data)
            except ValueError:  # incomplete, after a power failure: it counts as one copy less
                continue
            try:
                listing = Listing.of(fields)
            except BROKEN as error:
                raise OSError(
                    f"{path} is no listing of copies that this version of kit knows ({error}): go on with the one that "
                    "wrote it, or move it to another folder"
                ) from error
            self.listings = {**self.listings, listing.node: listing}
            self._read.add(path)
        self._is_whole = True

    @property
    def are_none(self) -> bool:
        """Whether all listings have been read, and none of them names a file."""
        return self._is_whole and not any(each.files for each in self.listings.values())

    def path_of(self, sha256: str) -> Path | None:
        """Return the path of the copy with this content; None if there is none."""
        path = self._blobs / sha256
        return path if path.exists() else None

    def discard(self, sha256: str) -> None:
        """Remove one copy."""
        (self._blobs / sha256).unlink(missing_ok=True)

    def lacking(self, listing: Listing, here: Mapping[str, Known]) -> dict[str, Version]:
        """Return SHA-256 → version of the contents to receive before `keep`.

        A file that this node's own folder has, in the same version under the same name, needs no copy.
        """
        return {
            version.sha256: version
            for name, version in listing.files.items()
            if version.sha256 and not self.path_of(version.sha256)
            if name not in here or here[name].mark is None or here[name].version != version
        }

    def receive(self, wire: Wire, version: Version) -> None:
        """Fetch a copy from the other side, and keep it if its SHA-256 is right.

        Raises:
            OSError: the disk is full or not writable, or the connection is lost.
        """
        draft = self._blobs / f".{secrets.token_hex(8)}"
        try:
            if self.fetch(wire, version, draft) == version.sha256:
                with open_file(draft) as file:
                    os.fsync(file.fileno())
                draft.replace(self._blobs / version.sha256)
        finally:
            draft.unlink(missing_ok=True)

    def fetch(self, wire: Wire, version: Version, draft: Path) -> str:
        """Have the other side send this content into a new file; return the SHA-256 of what came, "" if it has none.

        Raises:
            OSError: the disk is full or not writable, or the connection is lost.
        """
        with self.room_for(draft, version.size_bytes) as file:
            size_bytes = wire.ask({"op": "fetch", "sha256": version.sha256}).get("size_bytes")
            if size_bytes is None:
                return ""
            if size_bytes != version.size_bytes:
                raise ConnectionError("it sends that file in another size")
            return wire.receive_bytes(size_bytes, file)

    @contextlib.contextmanager
    def room_for(self, draft: Path, size_bytes: int) -> Iterator[BinaryIO]:
        """Create a file with its blocks allocated; if the disk is full, first delete the files that were set aside.

        Raises:
            OSError: the disk is full or not writable.
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

    def keep(self, listing: Listing) -> None:
        """Replace a node's listing, then delete the copies that only its previous listing named."""
        with self._lock:
            old = self.listings.get(listing.node)
            path = self._listings / f"{quote(listing.node, safe='')}.json"
            commit.sync_folder(self._blobs)  # else a power failure could leave a listing of missing copies
            was_whole, self._is_whole = self._is_whole, False
            self._read.discard(path)
            # If this raises, the file may be the old or the new one: it is read again before anything is removed.
            write_synced(path, asdict(listing))
            self.listings = {**self.listings, listing.node: listing}
            self._read.add(path)
            self._is_whole = was_whole
            for sha256 in (old.content if old and self._is_whole else set()) - self._named():
                self.discard(sha256)

    def clean(self, *, all_have_all: bool) -> None:
        """Remove copies that no listing names, or, if all members have all files, every copy; for use in a gather only.

        A copy that was hard-linked into the user's folder is removed too, since a script may write to it.

        Raises:
            OSError: not all listings can be read, and nothing was removed; or a copy cannot be removed.
        """
        with self._lock:
            if not self._is_whole:
                self.read()
            if all_have_all:
                for path in self._listings.iterdir():
                    path.unlink()
                self.listings, self._read = {}, set()
            named = self._named()
            for path in self._blobs.iterdir():
                if path.name not in named or path.stat().st_nlink > 1:
                    path.unlink(missing_ok=True)

    def _named(self) -> set[str]:
        return {sha256 for listing in self.listings.values() for sha256 in listing.content}

    def aside(self, attempt: Attempt) -> Path:
        """Return a folder for the files set aside at the start of this attempt; keep only the last few such folders."""
        here = self._set_aside / f"{attempt[0]:04d}.{attempt[1]:04d}"
        here.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(path for path in self._set_aside.iterdir() if path != here)
        for old in others[: len(others) - _NUM_SET_ASIDE + 1]:
            shutil.rmtree(old, ignore_errors=True)
        return here
