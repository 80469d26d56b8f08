"""The user's files in one node's folder: what is there, and which version of which file it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nodekit.deploy import hostfacts
from nodekit.deploy.replica_merge import (
    NEVER,
    Source,
    Version,
    attempt_from,
    inside,
    is_ours,
    refuses,
)
from nodekit.deploy.replica_wire import CHUNK_BYTES
from nodekit.training.commit import TEMPORARY


class Changed(Exception):
    """A file became another while it was read, or its reading was called off."""


class Mark(NamedTuple):
    """Tells whether a file is still the one that was hashed."""

    size_bytes: int
    mtime_ns: int
    inode: int


def mark_of(found: os.stat_result) -> Mark:
    """From a stat."""
    return Mark(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True, slots=True)
class Seen:
    """A user's file as a look at the folder finds it."""

    mark: Mark
    is_renamed: bool
    """Whether it was renamed (or touched otherwise) after its last byte was written, so that it is finished."""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What is in the folder now."""

    files: Mapping[str, Seen]
    unfinished: frozenset[str]
    refused: Mapping[str, str]
    """Name → why it is not copied."""


def look(folder: Path) -> Look:
    """All of the user's files in `folder`, without reading them."""
    files: dict[str, Seen] = {}
    unfinished: set[str] = set()
    refused: dict[str, str] = {}
    root = str(folder)
    pending = [""]
    while pending:
        below = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, below)))  # noqa: PTH118  # twice as fast in a loop
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was renamed or removed just now
        except OSError as error:
            refused[below or "."] = str(error)
            continue
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if is_ours(name):
                continue
            if problem := refuses(name):
                (unfinished.add(name) if "finished" in problem else refused.update({name: problem}))
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(name)
                elif stat.S_ISREG(found.st_mode):
                    files[name] = Seen(mark_of(found), found.st_ctime_ns > found.st_mtime_ns)
                elif stat.S_ISLNK(found.st_mode):
                    if link := _link_inside(root, name, entry.path):
                        files[name] = Seen(mark_of(found), True, link)
                    else:
                        refused[name] = "a symlink out of the folder"
                else:
                    refused[name] = "not a file, folder or symlink"
    return Look(files, frozenset(unfinished), refused)


def _link_inside(root: str, name: str, path: str) -> str | None:
    """The target, relative, since the folder is elsewhere on other nodes; None if it points out of the folder."""
    target = str(Path(path).readlink())
    if target.startswith(root + "/"):
        target = os.path.relpath(target, os.path.dirname(f"{root}/{name}"))  # noqa: PTH120  # names, not files
    return target if inside(name, target) is not None else None


def sha256_of(path: Path, mark: Mark | None, is_called_off: Callable[[], bool] = lambda: False) -> str:
    """Read and hash a file.

    Raises:
        Changed: it is not, or no longer, the file of this mark; or the reading was called off.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        before = mark_of(os.fstat(file.fileno()))
        chunk = memoryview(bytearray(CHUNK_BYTES))
        while (mark is None or before == mark) and (size := file.readinto(chunk)):  # type: ignore[attr-defined]
            digest.update(chunk[:size])
            if is_called_off():
                raise Changed(path)
        if mark is not None and not before == mark == mark_of(os.fstat(file.fileno())):
            raise Changed(path)
    return digest.hexdigest()


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """A regular file for reading, unbuffered; never follows a symlink or waits for a pipe's other end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


class UserFiles:
    """The user's files in one folder: which versions they are, remembered in a state file across restarts.

    The maps are replaced, never changed, so that other threads may read them at any time.
    """

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self._state = state
        self.attempt = self.base = NEVER
        self.versions: Mapping[str, Version] = {}
        """Name → version, deletions since `base` among them."""
        self.marks: Mapping[str, Mark] = {}
        """Name → the mark of the file that holds it; missing for a deletion and for a file found damaged."""
        self._distrusted: set[str] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._load()

    def _load(self) -> None:
        try:
            fields = json.loads(self._state.read_bytes())
            versions = {
                name: Version.from_list(name, values) for name, (values, _) in fields["files"].items()
            }
            marks = {name: Mark(*mark) for name, (_, mark) in fields["files"].items() if mark}
            self.attempt, self.base = attempt_from(fields["attempt"]), attempt_from(fields["base"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return  # none yet, or damaged: then this node is one that comes new
        self.versions, self.marks = versions, marks
        if fields["boot_id"] != hostfacts.boot_id():
            self._distrusted = set(marks)  # the power may have failed before the content was on the disk

    def save(self) -> None:
        """Write the state file."""
        fields = {
            "boot_id": hostfacts.boot_id(),
            "attempt": self.attempt,
            "base": self.base,
            "files": {
                name: (version.to_list(), self.marks.get(name)) for name, version in self.versions.items()
            },
        }
        write_synced(self._state, json.dumps(fields).encode())

    def update(
        self,
        found: Look,
        names: Iterable[str] | None = None,
        is_called_off: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Take over what a look found (or did not), of these names alone if given; True if a version is new.

        A file that keeps changing while it is read stays what it was.
        """
        versions, marks = dict(self.versions), dict(self.marks)
        for name in found.files.keys() | marks.keys() if names is None else names:
            seen = found.files.get(name)
            if seen is None:
                if not self._is_gone(name):
                    continue
                versions[name] = Version("", 0, time.time_ns(), self.attempt)
                del marks[name]
                continue
            if marks.get(name) == seen.mark and name not in self._distrusted:
                continue
            old = versions.get(name)
            try:
                sha256 = "" if seen.link else sha256_of(self.folder / name, seen.mark, is_called_off)
            except (OSError, Changed):
                continue
            if old is not None and old.content == (sha256, seen.link):
                version = Version(sha256, old.size_bytes, seen.mark.mtime_ns, old.written, seen.link)
            elif name in self._distrusted and old is not None and old.mtime_ns == seen.mark.mtime_ns:
                marks.pop(name, None)  # not written anew, and yet not what it was: damaged
                continue
            else:
                version = Version(sha256, seen.mark.size_bytes, seen.mark.mtime_ns, self.attempt, seen.link)
            versions[name], marks[name] = version, seen.mark
            self._distrusted.discard(name)
        is_new = versions != self.versions
        if is_new or marks != self.marks:
            self.versions, self.marks = versions, marks
        return is_new

    def _is_gone(self, name: str) -> bool:
        """Whether it was deleted, rather than out of reach: a folder that cannot be read deletes nothing."""
        try:
            (self.folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False

    def set_version(self, name: str, version: Version | None) -> None:
        """Record what was placed (or, None, removed) here."""
        versions, marks = dict(self.versions), dict(self.marks)
        versions.pop(name, None)
        marks.pop(name, None)
        if version is not None:
            versions[name] = version
            marks[name] = mark_of((self.folder / name).lstat())
        self.versions, self.marks = versions, marks

    def set_absent(self, name: str, version: Version) -> None:
        """Record what should be here and could not be written: it was not deleted."""
        if self._is_gone(name):
            self.versions = {**self.versions, name: version}

    def forget(self, names: Set[str]) -> None:
        """Know nothing of these any more."""
        self.versions = {name: version for name, version in self.versions.items() if name not in names}
        self.marks = {name: mark for name, mark in self.marks.items() if name not in names}

    def forget_deletions(self) -> None:
        """Once all agree on what there is."""
        self.versions = {name: version for name, version in self.versions.items() if not version.is_gone}

    def source(self, node: str, number: int) -> Source:
        """What there is, for others."""
        return Source(node, self.attempt, self.base, number, self.versions)

    def path_of(self, sha256: str) -> Path | None:
        """An unchanged file with this content."""
        names = (name for name, version in self.versions.items() if version.sha256 == sha256)
        return next((self.folder / name for name in names if self._is_unchanged(name)), None)

    def unchanged(self) -> set[str]:
        """All content that is here, after a look at every file's mark."""
        return {version.sha256 for name, version in self.versions.items() if self._is_unchanged(name)}

    def _is_unchanged(self, name: str) -> bool:
        with contextlib.suppress(OSError, KeyError):
            return mark_of((self.folder / name).lstat()) == self.marks[name]
        return False

    def held(self) -> set[str]:
        """The content that is here, as far as is known without a look."""
        return {self.versions[name].sha256 for name in self.marks} - {""}

    def draft(self) -> Path:
        """A new name for a file on its way into the folder."""
        return self.folder / f".tmp-{secrets.token_hex(8)}"

    def place(self, name: str, version: Version, draft: Path | None) -> None:
        """Put a finished draft, or a symlink, under its name."""
        path = self.folder / name
        above = self.folder
        for part in Path(name).parent.parts:
            above = above / part
            if above.is_symlink() or not above.is_dir():  # what is in the way lost against this one
                above.unlink(missing_ok=True)
                above.mkdir(mode=0o700)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # only folders, and what is not copied, are left in it
        if draft is None:
            draft = self.draft()
            draft.symlink_to(version.link)
        os.utime(draft, ns=(version.mtime_ns, version.mtime_ns), follow_symlinks=False)
        draft.replace(path)
        self.set_version(name, version)

    def remove(self, name: str, into: Path | None) -> None:
        """Take a file away: moved to the same name below `into`, or for good; then folders that are empty."""
        path = self.folder / name
        if into is not None:
            (into / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(path, into / name)
        else:
            path.unlink(missing_ok=True)
        self.set_version(name, None)
        for above in Path(name).parents[:-1]:
            with contextlib.suppress(OSError):  # not empty
                (self.folder / above).rmdir()

    def remove_drafts(self) -> None:
        """Remove what a kill left; only while no worker runs."""
        for path in self.folder.iterdir():
            if TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a 0600 file in one step, and onto the disk."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
