"""The host's side of sync: place a tree of files from a cache, complete the cache again, receive files.

Its source travels to the hosts (`deploy/connect/channel.py`), where the public functions are called by name: standard
library only, Python 3.8 syntax, JSON in and out. `treefiles` defines a tree.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
import time

from nodekit.deploy.host import errors
from nodekit.deploy.host.code import treefiles
from nodekit.deploy.host.files import make_private

TYPE_CHECKING = False  # not from typing: nothing but annotations needs it, and they are never evaluated
if TYPE_CHECKING:
    from typing import Any

    from nodekit.deploy.host.code.treefiles import Row, Stats

_SPOILT = "what was copied from the cache is not what was in it"
_held: dict[str, int] = {}  # cache -> descriptor of its lock file; the process serves a single channel
_begin: dict[str, threading.Event] = {}  # cache -> the event that its thread in `_keeping` waits for
_keeping: dict[str, threading.Thread] = {}  # cache -> the thread that fills it again after `place`


# --- the lock -----------------------------------------------------------------------------------------------


def lock(cache: str, owner: str, wait_s: float) -> bool:
    """Lock `cache` for this process until `release` or its end; False if this process has locked it already.

    Raises:
        TimeoutError: another process, which is named, held it for all of `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    thread = _keeping.get(cache)
    if thread is not None:
        begin_caching(cache)
        thread.join(wait_s)
        if thread.is_alive():
            raise TimeoutError(f"{cache} is still being copied by the sync before this one")
        del _keeping[cache]
    if cache in _held:
        return False
    make_private(os.path.dirname(cache))
    handle = os.open(cache + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(handle):
            if time.monotonic() >= deadline:
                holder = os.pread(handle, 1000, 0).decode("utf-8", "replace") or "unknown"
                why = (
                    f"another kit is syncing into {cache} and did not finish within {wait_s:.0f} s ({holder})"
                )
                raise errors.with_cure(TimeoutError(why), "wait for it or stop it")
            os.close(os.open(cache + ".wanted", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            time.sleep(0.02)
        if os.path.lexists(cache + ".wanted"):
            os.unlink(cache + ".wanted")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{owner}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    _held[cache] = handle
    return True


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise  # those three: a file system without locks; what is sent is verified all the same
    return True


def release(cache: str) -> None:
    """Unlock `cache`; if it is still being filled, that unlocks it when it is done."""
    cache = _absolute(cache)
    if cache not in _keeping:
        _unlock(cache)


def _unlock(cache: str) -> None:
    handle = _held.pop(cache, None)
    if handle is not None:
        os.close(handle)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def begin_caching(cache: str) -> None:
    """Start the copying that `place` left for later, once it does not slow down the start of the job any more."""
    event = _begin.get(_absolute(cache))
    if event is not None:
        event.set()


def finish_caching(cache: str) -> None:
    """Wait until the copying that `place` left for later is done."""
    begin_caching(cache)
    thread = _keeping.get(_absolute(cache))
    if thread is not None:
        thread.join()


# --- place --------------------------------------------------------------------------------------------------


def place(
    cache: str, dest: str, digest: str, rows: list[Row] | None = None, owner: str = "", wait_s: float = 30.0
) -> dict[str, Any]:
    """Make `dest` the tree with `digest`, from `cache`, if all of its files are there; place it whole or not at all.

    Returns ``{"state": ...}``, one of
        ``"unknown"``: this host has no list with that digest; call again with `rows`;
        ``"send"``: ``"paths"`` (indexes into the sorted rows) are missing in ``"cache"`` or have another
        content; send them and call again. ``"free_bytes"`` and ``"rsync"`` (whether it is installed) are for that;
        ``"placed"``: done, with the ``"digest"`` of the contents found, the number of files ``"written"``, and
        ``"kept"``: files of the job's own that were in the tree's way, by the names that they were renamed to.

    After the first two, `cache` stays locked for this process until ``"placed"``, an error or `release`.
    """
    cache, dest = _absolute(cache), _absolute(dest)
    fresh = lock(cache, owner, wait_s)
    try:
        answer = _place(cache, dest, digest, rows, fresh)
    except BaseException:
        _unlock(cache)
        raise
    if answer["state"] == "placed" and cache not in _keeping:
        _unlock(cache)
    return answer


def _place(cache: str, dest: str, digest: str, rows: list[Row] | None, fresh: bool) -> dict[str, Any]:
    if fresh:
        _sweep(cache)
    donor = treefiles.read_text(cache + ".donor")
    known = [treefiles.read_list(cache), treefiles.read_list(donor) if donor else {}]
    if rows is not None:
        if treefiles.digest_of(rows) != digest:
            raise ValueError("the list of files was damaged on its way")
    else:
        rows = next((found["rows"] for found in known if found.get("digest") == digest), None)
        if rows is None:
            return {"state": "unknown"}
    rows = sorted(rows, key=lambda row: row[0])
    stats: Stats = known[0].get("stats", {})
    make_private(cache)
    missing, stats = treefiles.survey(cache, rows, stats)
    if missing and donor and os.path.isdir(donor):
        stats.update(treefiles.copy_verified(donor, cache, [rows[i] for i in missing]))
        missing = [i for i in missing if rows[i][0] not in stats]
    if known[0].get("rows") != rows or known[0].get("stats") != stats:
        treefiles.write_list(cache, digest, rows, stats)
    if missing:
        disk = os.statvfs(cache)
        free = disk.f_bavail * disk.f_frsize + sum(_size(os.path.join(cache, rows[i][0])) for i in missing)
        rsync = shutil.which("rsync") is not None
        return {"state": "send", "paths": missing, "free_bytes": free, "rsync": rsync, "cache": cache}
    found = [[p, k, x, size, stats[p][4] if k == "f" else value] for p, k, x, size, value in rows]
    placed = {"state": "placed", "digest": treefiles.digest_of(found), "kept": [], "written": len(rows)}
    if os.path.lexists(dest):
        placed.update(_update(cache, dest, digest, rows))
    else:
        _create(cache, dest, digest, rows, stats)
    return placed


def digest_at(dest: str) -> str:
    """Return the digest of the tree that `place` put into `dest` last; "" without one, or if it is incomplete."""
    dest = _absolute(dest)
    digest: str = treefiles.read_list(dest).get("digest", "") if os.path.isdir(dest) else ""
    return digest


def _size(path: str) -> int:
    """Return the bytes that overwriting a file frees."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _create(cache: str, dest: str, digest: str, rows: list[Row], stats: Stats) -> None:
    """Rename the cache itself to `dest`; `_keep` copies it back in the background, after `begin_caching`.

    Copying first would double what is written before the job can start: 5,000 files of 200 MB take 0.3 to
    0.9 s to copy, and 0 to rename. The copy is private all the same: each is verified by its hash, and what
    the job changed before its turn came is left out and sent again by the next sync.
    """
    make_private(os.path.dirname(dest))
    try:
        treefiles.write_text(cache + ".donor", dest)
        os.rename(cache, dest)
        os.rename(cache + ".tree.json", dest + ".tree.json")
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    else:
        _begin[cache] = threading.Event()
        thread = threading.Thread(target=_keep, args=(cache, dest, digest, rows), daemon=True)
        _keeping[cache] = thread
        thread.start()
        return
    partial = _new_partial(cache, dest)  # another file system
    try:
        placed = treefiles.copy_verified(cache, partial, rows)
        if len(placed) != len(stats):
            raise OSError(errno.EIO, _SPOILT, partial)
        treefiles.write_list(dest, digest, rows, placed)
        os.rename(partial, dest)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _keep(cache: str, dest: str, digest: str, rows: list[Row]) -> None:
    # Another sync's turn: two on the same hosts, each first on one of them, would else wait for each other.
    while not _begin[cache].wait(0.05) and not os.path.lexists(cache + ".wanted"):
        pass
    try:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # Linux: of this thread alone
        make_private(cache)
        treefiles.write_list(cache, digest, rows, treefiles.copy_verified(dest, cache, rows, parallel=False))
    except OSError:
        pass  # a full disk: the next sync sends what is missing, or says so
    finally:
        _unlock(cache)


def _update(cache: str, dest: str, digest: str, rows: list[Row]) -> dict[str, Any]:
    """Update a run's folder from the tree placed before to `rows`; files that the job made or changed stay."""
    before = treefiles.read_list(dest)
    old = {row[0]: row for row in before.get("rows", [])}
    stats: Stats = before.get("stats", {})
    new = {row[0]: row for row in rows}
    gone, change, aside = _changes(dest, old, new, stats)
    if before.get("digest") == digest and not change:
        return {"written": 0}
    partial = _new_partial(cache, dest)
    try:  # whatever wants space happens here, before the first change
        placed = treefiles.copy_verified(cache, partial, change)
        if len(placed) != sum(row[1] == "f" for row in change):
            raise OSError(errno.EIO, _SPOILT, partial)
        # If this is interrupted, the next update must recognize both the old files and the new ones as placed by kit.
        known = [*old.values(), *(row for row in change if row[0] not in old)]
        treefiles.write_list(dest, "", known, stats)
        for path in gone:
            os.unlink(os.path.join(dest, path))
        for folder in reversed(list(treefiles.folders_of(gone))):
            try:
                os.rmdir(os.path.join(dest, folder))
            except OSError:
                continue  # not empty, or gone already
        stamp = time.strftime(".kept-%Y%m%d-%H%M%S")
        for path in aside:
            os.rename(os.path.join(dest, path), os.path.join(dest, path) + stamp)
        for row in change:
            os.makedirs(os.path.dirname(os.path.join(dest, row[0])), exist_ok=True)
            os.rename(os.path.join(partial, row[0]), os.path.join(dest, row[0]))
            if row[1] == "f":  # renaming it changed its ctime
                stats[row[0]] = [*treefiles.signature(os.lstat(os.path.join(dest, row[0]))), row[4]]
        treefiles.write_list(dest, digest, rows, {path: stats[path] for path in new if path in stats})
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"kept": [path + stamp for path in aside], "written": len(change)}


def _changes(
    dest: str, old: dict[str, Row], new: dict[str, Row], stats: Stats
) -> tuple[list[str], list[Row], list[str]]:
    """Return what turns the old tree into the new one: paths to remove, rows to write, paths to rename first."""

    def is_ours(path: str) -> bool:  # kit placed it and nobody changed it: no work is lost with it
        full = os.path.join(dest, path)
        if path not in old or not os.path.lexists(full):
            return False
        if old[path][1] == "l":
            return os.path.islink(full) and os.readlink(full) == old[path][4]
        return path in stats and treefiles.signature(os.lstat(full)) == stats[path][:4]

    gone = [path for path in old if path not in new and is_ours(path)]
    leaving = set(gone)
    aside = [
        folder
        for folder in treefiles.folders_of(new)
        if folder not in leaving and os.path.lexists(full := os.path.join(dest, folder))
        if os.path.islink(full) or not os.path.isdir(full)
    ]
    aside = [each for each in aside if not any(each.startswith(folder + "/") for folder in aside)]
    change = []
    for path, row in new.items():
        full = os.path.join(dest, path)
        if not os.path.lexists(full) or any(path.startswith(folder + "/") for folder in aside):
            change.append(row)
        elif old.get(path) != row and not treefiles.is_row(full, row):
            change.append(row)
            emptied = not os.path.islink(full) and os.path.isdir(full) and _all_leave(dest, path, leaving)
            if not is_ours(path) and not emptied:
                aside.append(path)
    return gone, change, aside


def _all_leave(dest: str, folder: str, leaving: set[str]) -> bool:
    """Whether all files in a folder of the run are about to be removed."""
    for top, _, files in os.walk(os.path.join(dest, folder)):
        if any(os.path.relpath(os.path.join(top, name), dest) not in leaving for name in files):
            return False
    return True


# --- bringing files -----------------------------------------------------------------------------------------


def fetch(cache: str, source: str, rows: list[Row]) -> None:
    """Copy files from a folder on this machine into `cache`."""
    for row in rows:
        treefiles.copy(os.path.join(source, row[0]), _clear(cache, row[0]), row[2])


def unpack(cache: str, name: str, row: Row | None = None, mtime_ns: int = 0) -> None:
    """Move a received file, ``<cache>.incoming/<name>``, into `cache`; without `row` it is a pack of many files.

    A pack has 8 bytes of length, so many bytes of JSON ``[[path, executable, mtime_ns, size], ...]``, the contents.
    """
    pack = os.path.join(cache + ".incoming", name)
    if row is not None:
        full = _clear(cache, row[0])
        os.utime(pack, ns=(mtime_ns, mtime_ns))
        os.chmod(pack, treefiles.mode(row[2]))
        os.rename(pack, full)
        return
    with open(pack, "rb") as file:
        for path, executable, mtime, size in json.loads(file.read(int.from_bytes(file.read(8), "big"))):
            full = _clear(cache, path)
            with open(full, "xb") as out:
                out.write(file.read(size))
                os.fchmod(out.fileno(), treefiles.mode(executable))
            os.utime(full, ns=(mtime, mtime))
    os.unlink(pack)


def _clear(cache: str, path: str) -> str:
    """Return the full path of a file of `cache`; make its folder, and remove the file."""
    if os.path.isabs(path) or ".." in path.split("/"):
        raise ValueError(f"not a path below a tree: {path!r}")
    full = os.path.join(cache, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    if os.path.lexists(full):
        os.unlink(full)
    return full


def _sweep(cache: str) -> None:
    """Remove what an interrupted sync has left behind."""
    shutil.rmtree(cache + ".incoming", ignore_errors=True)
    partial = treefiles.read_text(cache + ".partial")
    if partial and ".partial-" in os.path.basename(partial):
        shutil.rmtree(partial, ignore_errors=True)
    if partial:
        os.unlink(cache + ".partial")


def _new_partial(cache: str, dest: str) -> str:
    partial = f"{dest}.partial-{os.getpid()}-{time.time_ns()}"
    treefiles.write_text(cache + ".partial", partial)
    os.makedirs(partial, mode=0o700)
    return partial


# --- kit's own package --------------------------------------------------------------------------------------


# Every node imports these. To compile the rest takes three times as long, and most nodes never import it.
_RUN_BY_NODES = ("nodekit/deploy/agent", "nodekit/deploy/host", "nodekit/training")


def keep_package(folder: str, files: dict[str, str] | None = None, digest: str = "") -> bool:
    """Whether `folder` holds kit's package with `digest`; with `files` (path -> text), write it there if not."""
    folder = _absolute(folder)
    if _package_digest(folder) == digest:
        return True
    if files is None:
        return False
    partial = f"{folder}.partial-{os.getpid()}-{time.time_ns()}"
    make_private(partial)  # its modules run as this user: whatever the umask, nobody else may write there
    try:
        for path, text in files.items():
            full = _clear(partial, path)
            with open(full, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        if sys.version_info >= (3, 10):  # with an older python than kit needs, another one will run it
            import compileall  # only the first sync of a version needs it

            for part in _RUN_BY_NODES:
                here = os.path.join(partial, part)
                compileall.compile_dir(here, quiet=2, stripdir=partial, prependdir=folder)  # novermin
        if _package_digest(partial) != digest:
            raise OSError(errno.EIO, "kit's package was damaged on its way", partial)
        try:
            if os.path.isdir(folder):
                os.rename(folder, partial + ".old")
            os.rename(partial, folder)
        except OSError:
            if _package_digest(folder) != digest:  # else another kit has placed the same one meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial + ".old", ignore_errors=True)
    return True


def _package_digest(folder: str) -> str:
    files = {}
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(top, name)
            with open(path, "rb") as file:
                files[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    return package_digest(files)


def package_digest(hashes: dict[str, str]) -> str:
    """Return the digest of a package: a hash over the names and hashes of its files."""
    text = json.dumps(hashes, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:20]
