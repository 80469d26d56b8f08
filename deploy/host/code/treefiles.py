"""A tree, the list of a folder's files: hash it, compare it with a disk, copy it.

Runs on the control machine and, sent there (`deploy/connect/channel.py`), on the hosts: standard library only, Python
3.8 syntax, JSON in and out. Beside a folder that kit fills lies its list, ``<folder>.tree.json``: what was put there,
and each file's stat when its content was last hashed, so that what did not change since is not read again.

A row of a list is ``[path, kind, executable, size, value]``: kind is ``"f"`` with the content's SHA-256 as
value or ``"l"``, a symbolic link, with its target. The hash of all rows is the tree's digest.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import stat
import threading

TYPE_CHECKING = False  # not from typing: nothing but annotations needs it, and they are never evaluated
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Row = list[Any]
    Stats = dict[str, list[Any]]  # path -> [size, mtime_ns, ctime_ns, inode, sha256]

_BLOCK_BYTES = 1 << 20
_FICLONE = 0x40049409


def digest_of(rows: Iterable[Row]) -> str:
    """Return the content hash of a tree: SHA-256 over its rows in the order of their paths."""
    text = json.dumps(sorted(rows, key=lambda row: row[0]), separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def signature(found: os.stat_result) -> list[int]:
    """Return the fields of a file's stat of which at least one changes when its content does."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def hash_files(root: str, paths: Iterable[str]) -> tuple[Stats, dict[str, OSError]]:
    """Hash files below `root` in threads; return stats with hashes, and path -> error for unreadable files."""
    stats: Stats = {}
    problems: dict[str, OSError] = {}

    def one(path: str) -> None:
        try:
            handle = os.open(os.path.join(root, path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                sha = hashlib.sha256()
                before = signature(os.fstat(handle))
                block = os.read(handle, _BLOCK_BYTES)
                while block:
                    sha.update(block)
                    block = os.read(handle, _BLOCK_BYTES)
                after = signature(os.fstat(handle))
            finally:
                os.close(handle)
        except OSError as error:
            problems[path] = error
        else:  # a file written to meanwhile gets a stat that no later look will match
            stats[path] = [*(after if after == before else [-1, 0, 0, 0]), sha.hexdigest()]

    _parallel(one, paths)
    return stats, problems


def _parallel(function: Callable[[str], None], paths: Iterable[str]) -> None:
    todo = iter(list(paths))
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work() -> None:
        while not failed:
            with lock:
                batch = list(itertools.islice(todo, 64))
            if not batch:
                return
            try:
                for path in batch:
                    function(path)
            except BaseException as error:  # raised below, by the caller's thread
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(8, os.cpu_count() or 1) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def survey(folder: str, rows: list[Row], stats: Stats) -> tuple[list[int], Stats]:
    """Remove from `folder` what is not in `rows`, mend links and modes, and find files with another content.

    Returns the indexes of the rows of these, and the stats of all other files.
    """
    wanted = {row[0]: row for row in rows}
    folders = folders_of(wanted)
    found: dict[str, os.stat_result] = {}
    _walk(folder, "", folders, wanted, found)
    right: Stats = {}
    unsure: list[str] = []
    for path, kind, executable, size, value in rows:
        here = found.get(path)
        full = os.path.join(folder, path)
        if kind == "l":
            if here is None or os.readlink(full) != value:
                if here is not None:
                    os.unlink(full)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                os.symlink(value, full)
            continue
        if here is None or here.st_size != size:
            continue
        if stat.S_IMODE(here.st_mode) != mode(executable):
            os.chmod(full, mode(executable))
            unsure.append(path)
        elif path in stats and stats[path][:4] == signature(here):
            right[path] = stats[path]
        else:
            unsure.append(path)
    hashed, _ = hash_files(folder, unsure)  # one that cannot be read is sent again
    right.update(hashed)
    missing = [
        number
        for number, (path, kind, _, _, value) in enumerate(rows)
        if kind == "f" and (path not in right or right[path][4] != value)
    ]
    for number in missing:
        right.pop(rows[number][0], None)
    return missing, right


def _walk(
    root: str, below: str, folders: dict[str, None], wanted: dict[str, Row], found: dict[str, os.stat_result]
) -> None:
    with os.scandir(os.path.join(root, below)) as entries:
        for entry in entries:
            path = below + entry.name
            here = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(here.st_mode):
                if path not in folders:
                    shutil.rmtree(entry.path)
                    continue
                if stat.S_IMODE(here.st_mode) != 0o755:
                    os.chmod(entry.path, 0o755)  # noqa: S103  (the folder above all is 0700)
                _walk(root, path + "/", folders, wanted, found)
            elif path not in wanted or (wanted[path][1] == "l") != stat.S_ISLNK(here.st_mode):
                os.unlink(entry.path)
            else:
                found[path] = here


def folders_of(paths: Iterable[str]) -> dict[str, None]:
    """Return all folders above `paths`, parents first."""
    folders: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folders["/".join(parts[:depth])] = None
    return folders


def is_row(full: str, row: Row) -> bool:
    """Whether the file or link at `full` is as its row says."""
    if row[1] == "l":
        return os.path.islink(full) and os.readlink(full) == row[4]
    if os.path.islink(full) or not os.path.isfile(full) or os.path.getsize(full) != row[3]:
        return False
    hashed, _ = hash_files(os.path.dirname(full), [os.path.basename(full)])
    same = bool(hashed) and hashed[os.path.basename(full)][4] == row[4]
    return same and stat.S_IMODE(os.lstat(full).st_mode) == mode(row[2])


def copy_verified(source: str, target: str, rows: list[Row], parallel: bool = True) -> Stats:
    """Copy rows from one folder to another; return the stats of the copies whose content has the row's hash."""
    stats: Stats = {}
    by_path = {row[0]: row for row in rows}
    for folder in folders_of(by_path):
        os.makedirs(os.path.join(target, folder), exist_ok=True)

    def one(path: str) -> None:
        _, kind, executable, _, value = by_path[path]
        full = os.path.join(target, path)
        if os.path.lexists(full):
            os.unlink(full)
        if kind == "l":
            os.symlink(value, full)
            return
        try:
            sha, here = copy(os.path.join(source, path), full, executable)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return  # the job removed or replaced it: not there to be copied
        if sha == value:
            stats[path] = [*here, sha]
        else:
            os.unlink(full)

    if parallel:
        _parallel(one, by_path)
    else:
        for path in by_path:
            one(path)
    return stats


def copy(source: str, target: str, executable: bool) -> tuple[str, list[int]]:
    """Copy a file to a new one, by a clone if the file system can; return the copy's hash and stat."""
    sha = hashlib.sha256()
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            cloned = _clone(reading, writing)
            block = os.read(reading, _BLOCK_BYTES)
            while block:
                sha.update(block)
                while not cloned and block:
                    block = block[os.write(writing, block) :]
                block = os.read(reading, _BLOCK_BYTES)
            os.fchmod(writing, mode(executable))
            mtime = os.fstat(reading).st_mtime_ns
            os.utime(writing, ns=(mtime, mtime))
            return sha.hexdigest(), signature(os.fstat(writing))
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _clone(reading: int, writing: int) -> bool:
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError:
        return False  # most file systems cannot, and say so in half a dozen ways
    return True


def mode(executable: bool) -> int:
    """Return the permissions that a file gets."""
    return 0o755 if executable else 0o644


def read_list(folder: str) -> dict[str, Any]:
    """Return the list of a folder that kit filled, with each file's stat at that time; {} if there is none."""
    text = read_text(folder + ".tree.json")
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def write_list(folder: str, digest: str, rows: list[Row], stats: Stats) -> None:
    """Write the list of a folder that kit filled."""
    write_text(folder + ".tree.json", json.dumps({"digest": digest, "rows": rows, "stats": stats}))


def read_text(path: str) -> str:
    """Return the text of a file beside a folder; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def write_text(path: str, text: str) -> None:
    """Write a file beside a folder, atomically."""
    draft = f"{path}.{os.urandom(8).hex()}"  # a shared folder has several writers
    try:
        with open(draft, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:  # a full disk: it would stay for good
        if os.path.exists(draft):
            os.unlink(draft)
        raise
