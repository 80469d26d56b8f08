"""The user's files in one node's folder, their versions, and listings of these versions.

Every version of a file, a deletion included, carries the attempt (generation, round) it was written in. Names, versions
and listings come over the network and from disks, so each is validated before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nodekit.deploy.agent.agent_wire import CHUNK_BYTES
from nodekit.deploy.host import processes
from nodekit.training.snapshots.files import commit

MAX_NAME = 200
"""The most characters of a node's name, as in an inventory (`inventory/hostlists.py`)."""
Attempt = tuple[int, int]
NEVER: Attempt = (-1, -1)
# The snapshots of nodekit.training, which replicates them itself.
_OURS = re.compile(r"g\d{4,}-s\d{9,}.*|fence", re.ASCII | re.DOTALL)
_OUR_FOLDERS = re.compile(r"g\d{4,}-s\d{9,}-[0-9a-f]{16}\.dcp", re.ASCII)
_UNFINISHED = (".tmp", ".part", ".partial", "~")
# torch.distributed.checkpoint renames this file into place last; no checkpoint can be read without it.
_DOTTED_BUT_FINISHED = ".metadata"
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Unlike the names of a snapshot's temporary files: a save of ranks that stay, which may be going on, removes those.
_DRAFT = re.compile(r"\.replica-[0-9a-f]{16}", re.ASCII)


def is_ours(name: str) -> bool:
    """Whether this file is one of nodekit.training's, which replicates it itself."""
    first, slash, _ = name.partition("/")
    return (_OUR_FOLDERS if slash else _OURS).fullmatch(first) is not None


def is_unfinished(part: str) -> bool:
    """Whether this part of a path looks like a file or folder that is still being written."""
    return (part.startswith(".") and part != _DOTTED_BUT_FINISHED) or part.endswith(_UNFINISHED)


def is_allowed(name: str) -> bool:
    """Whether `name` is allowed for a user's finished file: a plain path that stays in the folder."""
    parts = name.split("/")
    is_plain = not any(part in ("", ".", "..") or is_unfinished(part) for part in parts)
    return is_plain and b"\0" not in os.fsencode(name) and not is_ours(name)


def leads_inside(name: str, target: str) -> bool:
    """Whether a symlink `name` that points to `target` stays in the folder."""
    end = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return "\0" not in target and not target.startswith("/") and end.split("/")[0] != ".."


class Version(NamedTuple):
    """One version of one user file, symlink or deletion; the greater is the newer."""

    written: Attempt
    """The attempt in which the version appeared; compared before any clock's time."""
    mtime_ns: int
    """For a deletion, the time when it was noticed."""
    sha256: str = ""
    """Of the content; empty for a symlink and for a deletion."""
    link: str = ""
    """The target of a symlink, relative to the symlink's folder."""
    size_bytes: int = 0

    @property
    def content(self) -> tuple[str, str]:
        """A key that is equal for versions of equal content."""
        return self.sha256, self.link

    @property
    def is_gone(self) -> bool:
        """Whether this version is a deletion."""
        return not self.sha256 and not self.link

    @classmethod
    def of(cls, name: str, values: Any) -> Version:
        """Build the version of the file `name` from JSON.

        Raises:
            ValueError, TypeError: the values are no valid version of such a file.
        """
        written, mtime_ns, sha256, link, size_bytes = values
        for number in (mtime_ns, size_bytes):
            if type(number) is not int or abs(number) >= 1 << 62 or size_bytes < 0:
                raise ValueError(f"{name!r}: not a number, or out of range")
        if not isinstance(sha256, str) or (sha256 and not SHA256.fullmatch(sha256)):
            raise ValueError(f"{name!r}: not a SHA-256: {sha256!r}")
        if not isinstance(link, str) or (link and (sha256 or not leads_inside(name, link))):
            raise ValueError(f"{name!r}: a link out of the folder: {link!r}")
        return cls(attempt_of(written), mtime_ns, sha256, link, size_bytes)


def attempt_of(values: Any) -> Attempt:
    """Build an attempt from JSON; raise ValueError or TypeError if it is none."""
    generation, round_ = values
    if type(generation) is not int or type(round_) is not int:
        raise ValueError(f"not an attempt: {values!r}")
    return generation, round_


@dataclass(frozen=True, slots=True)
class Listing:
    """The files in one node's folder, as sent by that node itself, or by another that keeps copies for it."""

    node: str
    attempt: Attempt
    """The last attempt at whose start the node agreed with a majority on the files."""
    files: Mapping[str, Version]
    """Name → version, including deletions."""
    told_ns: int
    """When the listing was made, to find the newest of several that others keep of this node."""

    @property
    def content(self) -> set[str]:
        """The SHA-256 of all files that are listed."""
        return {version.sha256 for version in self.files.values()} - {""}

    @classmethod
    def of(cls, fields: Any) -> Listing:
        """Build the listing from JSON.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is damaged, or has a name that must not be written.
        """
        node, told_ns, files = fields["node"], fields["told_ns"], fields["files"]
        if type(told_ns) is not int or not isinstance(node, str) or not 0 < len(node) <= MAX_NAME:
            raise ValueError("not a listing")
        if refused := [name for name in files if not is_allowed(name)]:
            raise ValueError(f"not a user's finished file: {refused[0]!r}")
        versions = {name: Version.of(name, values) for name, values in files.items()}
        return cls(node, attempt_of(fields["attempt"]), versions, told_ns)


BROKEN = (OSError, ValueError, TypeError, KeyError, AttributeError)
"""The exceptions that an exchange with another agent, or data read from the disk, may raise."""


class Mark(NamedTuple):
    """Identifies a file's state cheaply, to tell whether it is still the one that was hashed."""

    size_bytes: int
    mtime_ns: int
    inode: int


def mark_of(found: os.stat_result) -> Mark:
    """Build the mark from a stat result."""
    return Mark(found.st_size, found.st_mtime_ns, found.st_ino)


class Seen(NamedTuple):
    """A user's file, as found by a scan of the folder."""

    mark: Mark
    is_renamed: bool
    """Whether it was renamed (or its inode changed otherwise) after its last byte was written, so it is finished."""
    link: str = ""


@dataclass(slots=True)
class Scan:
    """The result of a scan of the user's folder."""

    files: dict[str, Seen] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    """Name → why it will not be copied."""
    is_whole: bool = True
    """Whether every folder could be listed; if not, a file that is missing here may still exist."""
    unread: OSError | None = None
    """The error of a folder that could not be listed, unless it is one of missing permissions: a retry may succeed."""


def scan(folder: Path) -> Scan:
    """List all of the user's files in `folder`, without reading them."""
    found, pending = Scan(), [""]
    while pending:
        below = pending.pop()
        try:
            for entry in list(os.scandir(folder / below)):
                name = f"{below}/{entry.name}" if below else entry.name
                if is_unfinished(entry.name):
                    found.unfinished.add(name)
                elif entry.is_dir(follow_symlinks=False):
                    if below or not _OUR_FOLDERS.fullmatch(name):
                        pending.append(name)
                elif not is_ours(name):
                    with contextlib.suppress(FileNotFoundError):
                        _see(found, folder, name, entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            pass  # the folder was renamed or removed meanwhile
        except OSError as error:
            found.refused[below or "."] = error.strerror or str(error)
            found.is_whole = False
            if not isinstance(error, PermissionError):
                found.unread = OSError(error.errno, f"{folder / below}: {error.strerror or error}")
    return found


def _see(found: Scan, folder: Path, name: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        found.files[name] = Seen(mark_of(status), status.st_ctime_ns > status.st_mtime_ns)
    elif not stat.S_ISLNK(status.st_mode):
        found.refused[name] = "not a file, folder or symlink"
    else:
        target = str((folder / name).readlink())
        if target.startswith(f"{folder}/"):  # make it relative: the folder has another path on other nodes
            target = posixpath.relpath(target, (folder / name).parent)
        if leads_inside(name, target):
            found.files[name] = Seen(mark_of(status), True, target)
        else:
            found.refused[name] = "a symlink out of the folder"


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for unbuffered reading; follow no symlink, and never block on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


def sha256_of(path: Path, is_called_off: Callable[[], bool] = lambda: False) -> tuple[str, Mark]:
    """Read a file, and return its SHA-256 and mark.

    Raises:
        InterruptedError: the file changed meanwhile, or `is_called_off` returned True.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        mark = mark_of(os.fstat(file.fileno()))
        chunk = memoryview(bytearray(CHUNK_BYTES))
        while size := file.readinto(chunk):  # type: ignore[attr-defined]
            digest.update(chunk[:size])
            if is_called_off():
                raise InterruptedError(f"{path}: called off")
        if mark != mark_of(os.fstat(file.fileno())):
            raise InterruptedError(f"{path}: changed")
    return digest.hexdigest(), mark


def write_synced(path: Path, fields: object) -> None:
    """Write a 0600 JSON file atomically, and sync it to the disk."""
    with commit.written_beside(path.parent) as (draft, file):
        file.write(json.dumps(fields).encode())
        commit.place(draft, file, path.name)


class Known(NamedTuple):
    """The known version of one file name."""

    version: Version
    mark: Mark | None
    """Of the file with this version; None if there is none here: deleted, damaged, or not writable."""


class UserFiles:
    """The user's files in one folder, with their versions, which a state file keeps across restarts."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder = folder
        self._state = state
        self.attempt = self.entered = NEVER
        """The last attempt at whose start this node agreed with the others; and the last that it entered."""
        self.known: Mapping[str, Known] = {}
        """By name; replaced as a whole, never modified, so that other threads may read it at any time."""
        self.unread: OSError | None = None
        """The error if the last `update` could not read a new file."""
        self._told_ns = 0
        try:
            data = commit.retried(state.read_bytes)
        except commit.NOT_FOUND:
            return  # no state file yet
        boot_id = commit.retried(processes.boot_id)
        try:
            fields = json.loads(data)
            is_same_boot = fields["boot_id"] == boot_id
            # After a reboot hash all files again: in a power failure their content may not have reached the disk.
            known = {
                name: Known(Version.of(name, values), Mark(*mark) if mark and is_same_boot else None)
                for name, (values, mark) in fields["files"].items()
            }
            self.attempt, self.entered = attempt_of(fields["attempt"]), attempt_of(fields["entered"])
            self.known = known
        except BROKEN:
            pass  # damaged: this node counts as a new one

    def save(self, *, is_changing: bool = False) -> None:
        """Write the state file; with `is_changing`, before the folder is changed, without marks.

        After a kill during the change, a file without a mark that is missing is then not taken for deleted by the user.
        """
        known = {name: each._replace(mark=None) if is_changing else each for name, each in self.known.items()}
        fields = {"attempt": self.attempt, "entered": self.entered, "files": known}
        write_synced(self._state, {"boot_id": processes.boot_id(), **fields})

    def update(
        self,
        found: Scan,
        names: Iterable[str] | None = None,
        is_called_off: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Update `known` from a scan, for all names or only for `names`; return whether anything changed.

        A file that changes while it is read, or that cannot be read, keeps its old version.
        """
        now = dict(self.known)
        self.unread = None
        for name in found.files.keys() | now.keys() if names is None else names:
            seen, old = found.files.get(name), now.get(name)
            if seen is None:
                if old is not None and old.mark is not None and found.is_whole:
                    now[name] = Known(Version(self.entered, time.time_ns()), None)
                continue
            if old is not None and old.mark == seen.mark:
                continue
            try:
                path = self.folder / name
                sha256, mark = ("", seen.mark) if seen.link else sha256_of(path, is_called_off)
            except (*commit.NOT_FOUND, PermissionError, InterruptedError):
                continue
            except OSError as error:
                self.unread = OSError(error.errno, f"{path}: {error.strerror or error}")
                continue
            if mark != seen.mark:
                continue
            version = Version(self.entered, seen.mark.mtime_ns, sha256, seen.link, seen.mark.size_bytes)
            if old is not None and old.version.content == version.content:
                version = version._replace(written=old.version.written)
            elif old is not None and old.mark is None and old.version.mtime_ns == version.mtime_ns:
                continue  # the same mtime with another content: damaged
            now[name] = Known(version, seen.mark)
        is_new = now != self.known
        self.known = now
        return is_new

    def listing(self, node: str, files: Mapping[str, Version] | None = None) -> Listing:
        """Return a listing for other nodes of all files and deletions, or of `files` alone."""
        if files is None:
            files = {name: known.version for name, known in self.known.items()}
        self._told_ns = max(time.time_ns(), 1 + self._told_ns)  # the clock may be set back
        return Listing(node, self.attempt, files, self._told_ns)

    def path_of(self, sha256: str) -> Path | None:
        """Return the path of an unchanged file with this content; None if there is none."""
        for name, known in self.known.items():
            if known.version.sha256 == sha256 and known.mark is not None:
                with contextlib.suppress(OSError):
                    if mark_of((self.folder / name).lstat()) == known.mark:
                        return self.folder / name
        return None

    def draft(self) -> Path:
        """Return a new temporary name in the folder, for a file that `place` puts under its own."""
        return self.folder / f".replica-{secrets.token_hex(8)}"

    def remove_drafts(self) -> None:
        """Remove the drafts that a killed agent left."""
        for path in self.folder.iterdir():
            if _DRAFT.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def place(self, name: str, version: Version, draft: Path | None) -> None:
        """Put a finished draft, or a symlink, under its name."""
        path = above = self.folder / name
        for folder in reversed(path.relative_to(self.folder).parents[:-1]):
            above = self.folder / folder
            if above.is_symlink() or not above.is_dir():  # a file that was not agreed on is in the way
                above.unlink(missing_ok=True)
                above.mkdir(mode=0o700)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # it has only files left that are obsolete or never copied
        if draft is None:
            draft = self.draft()
            draft.symlink_to(version.link)
        os.utime(draft, ns=(version.mtime_ns, version.mtime_ns), follow_symlinks=False)
        draft.replace(path)

    def remove(self, name: str, into: Path | None) -> None:
        """Move a file to the same name below `into`, or delete it if None; then remove folders that became empty."""
        path = self.folder / name
        if into is not None:
            (into / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(path, into / name)
        else:
            with contextlib.suppress(NotADirectoryError, IsADirectoryError):  # something took its place
                path.unlink(missing_ok=True)
        for above in Path(name).parents[:-1]:
            with contextlib.suppress(OSError):  # not empty
                (self.folder / above).rmdir()
