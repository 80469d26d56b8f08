"""List the user's code: the files that git or a walk finds, each with its SHA-256, and a digest of the whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from nodekit.deploy.host.code import treefiles as host
from nodekit.deploy.host.files import make_private
from nodekit.deploy.records.state_folder import cache_folder, state_folder
from nodekit.deploy.sync.selection import IGNORE_FILE, above, select
from nodekit.inventory.errors import KitError

# A file that changes within one tick of the kernel's clock after it was hashed could keep its stat. So no hash is
# cached of a file that was modified so shortly before. (git calls this "racily clean".)
_RACY_NS = 100_000_000
_WORKDIR_FOLDERS = ("code/", "envs/", "kit/", "runs/")
_UNOPENED = "warning: could not open directory '"  # git's words


class Entry(NamedTuple):
    """One file or symbolic link; also a row of `deploy/host/code/treefiles.py`, which fixes the order of the fields."""

    path: str
    kind: str
    """``"f"`` or ``"l"``"""
    executable: bool
    size: int
    value: str
    """SHA-256 of a file's content, or a link's target."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A snapshot of the user's code."""

    root: Path
    entries: tuple[Entry, ...]
    """Sorted by path."""
    digest: str
    """The hash of the whole tree: equal if and only if all names, modes and contents are."""
    stats: dict[str, list[Any]] = field(repr=False)
    """path → the file's stat, to detect changes."""
    ignored: Mapping[str, str | None] = field(repr=False)
    """Paths excluded by .gitignore (`Selection.ignored`)."""

    @property
    def num_files(self) -> int:
        """The number of files and links."""
        return len(self.entries)

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(entry.size for entry in self.entries)

    def changed(self, paths: Iterable[str]) -> list[str]:
        """Return those of `paths` whose files have changed since the tree was listed."""
        return [path for path in paths if not _is_same(self.root / path, self.stats[path])]


def _is_same(file: Path, known: list[Any]) -> bool:
    try:
        return host.signature(file.lstat()) == known[:4]
    except OSError:
        return False


def list_code(folder: Path) -> Tree:
    """List and hash the code in `folder`, uncommitted and untracked files included.

    In a git work tree these are the files that git tracks or would add; elsewhere all files except those that a
    ``.gitignore`` excludes. A ``.kitignore`` (the same syntax, in any folder) excludes more, and includes with ``!``
    (deploy/sync/selection.py). What kit itself keeps on this machine is never sent: its cache and state, and the
    folders of nodes. As in git, empty folders are not kept. A link is kept if it points into the tree; an absolute one
    is made relative.

    Raises:
        KitError: with all problems in one message: links that would be broken on a host, special files, and files that
            cannot be read.
    """
    root = folder.expanduser().resolve()
    if not root.is_dir():
        raise KitError(
            f"the code folder {folder} is not a folder",
            cure="set job.code, or run kit from the code's folder",
        )
    problems: list[str] = []
    selection = select(root, problems)
    files: dict[str, os.stat_result] = {}
    links: list[str] = []
    # Below the root if that is the home folder. kit writes there during a sync, which would never finish; and its
    # records contain tokens.
    kits = tuple(
        f"{folder.relative_to(root)}/"
        for folder in (cache_folder().resolve(), state_folder().resolve())
        if folder.is_relative_to(root)
    ) + tuple(_workdirs(root, selection.paths))
    problems = [each for each in problems if not each.removeprefix(_UNOPENED).startswith(kits)]
    for path in selection.paths:
        if path.startswith(kits):
            continue
        try:
            found = os.lstat(f"{root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted, but still in git's index
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if stat.S_ISREG(found.st_mode):
            files[path] = found
        elif stat.S_ISLNK(found.st_mode):
            links.append(path)
        elif not stat.S_ISDIR(found.st_mode):
            problems.append(f"{path} is a {_kind(found.st_mode)}, which cannot be sent")
    # git may still list files below a folder that was replaced by a link: those paths lead out of this folder.
    if linked := set(links):
        files = {path: found for path, found in files.items() if linked.isdisjoint(above(path))}
        links = [path for path in links if linked.isdisjoint(above(path))]
    stats = _hashed(root, files, problems)
    entries = [
        Entry(path, "f", bool(files[path].st_mode & stat.S_IXUSR), known[0], known[4])
        for path, known in stats.items()
    ]
    entries += _links(root, links, stats, problems)
    if problems:
        shown = "\n  ".join(
            problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
        )
        raise KitError(
            f"the code in {root} cannot be sent:\n  {shown}\n"
            f"mend it, or leave it out by a line in {root / IGNORE_FILE}"
        )
    entries.sort()
    digest = host.digest_of([list(entry) for entry in entries])
    return Tree(root=root, entries=tuple(entries), digest=digest, stats=stats, ignored=selection.ignored)


def _workdirs(root: Path, paths: Iterable[str]) -> Iterator[str]:
    """Yield the beginnings of paths that are kit's own in workdirs below the root, of nodes on this machine.

    A workdir is known by the id that `hostfacts.folder_id` has written into it.
    """
    for path in paths:
        folder, slash, name = path.rpartition("/")
        if name == ".id" and (root / folder / "kit").is_dir():
            with contextlib.suppress(OSError):
                if re.fullmatch("[0-9a-f]{16}", (root / path).read_text(errors="replace")):
                    yield from (f"{folder}{slash}{own}" for own in (".id", "bench-", *_WORKDIR_FOLDERS))


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFSOCK: "socket",
        stat.S_IFIFO: "named pipe",
        stat.S_IFBLK: "device",
        stat.S_IFCHR: "device",
    }
    return kinds.get(stat.S_IFMT(mode), "special file")


# --- links and hashes ---------------------------------------------------------------------------------------


def _links(root: Path, links: list[str], files: dict[str, Any], problems: list[str]) -> list[Entry]:
    if not links:
        return []
    inside = {"", *files, *links}
    for path in (*files, *links):
        while path := path.rpartition("/")[0]:
            inside.add(path)
    entries = []
    for path in links:
        full = f"{root}/{path}"
        target = os.readlink(full)  # noqa: PTH115
        real = os.path.realpath(full)
        if not os.path.exists(real):  # noqa: PTH110
            problems.append(f"{path} is a broken link (to {target})")
            continue
        relative = os.path.relpath(real, root)
        if relative == ".." or relative.startswith("../"):
            problems.append(f"{path} is a link out of the tree (to {target}), to what no host has")
            continue
        if relative != "." and relative not in inside:
            problems.append(f"{path} is a link to {relative}, which is ignored and so not on the hosts")
            continue
        above = os.path.dirname(path)  # noqa: PTH120
        lexical = os.path.normpath(os.path.join(above, target))  # noqa: PTH118
        if os.path.isabs(target) or lexical == ".." or lexical.startswith("../"):  # noqa: PTH117
            target = os.path.relpath(real, f"{root}/{above}")
        entries.append(Entry(path, "l", False, 0, target))
    return entries


def _hashed(root: Path, files: dict[str, os.stat_result], problems: list[str]) -> dict[str, list[Any]]:
    """Return stat and hash of each file, from the cache if its stat is unchanged."""
    cache = _cache_file(root)
    try:
        known = json.loads(cache.read_text(encoding="ascii"))
    except (OSError, ValueError):
        known = {}
    stats = {
        path: entry
        for path, found in files.items()
        if (entry := known.get(path)) is not None and entry[:4] == host.signature(found)
    }
    unknown = [path for path in files if path not in stats]
    started_ns = time.time_ns()
    failed: dict[str, OSError] = {}
    for _ in range(2):  # again for files that changed while they were read
        hashed, unreadable = host.hash_files(str(root), unknown)
        stats.update(hashed)
        failed.update(unreadable)
        unknown = [path for path, entry in hashed.items() if entry[0] < 0]
    problems += [f"{path} changes while it is read" for path in unknown]
    for path, error in sorted(failed.items()):
        if error.errno != errno.ENOENT:
            problems.append(f"{path}: {error.strerror}")
    stats = {path: stats[path] for path in sorted(stats)}
    assert stats.keys() | failed.keys() == files.keys()
    settled = {path: entry for path, entry in stats.items() if started_ns - entry[2] > _RACY_NS}
    if settled != known:
        _remember(cache, settled)
    return stats


def _cache_file(root: Path) -> Path:
    return cache_folder() / "hashes" / f"{sha256(os.fsencode(root)).hexdigest()[:32]}.json"


def _remember(cache: Path, stats: dict[str, list[Any]]) -> None:
    draft = cache.with_suffix(f".{secrets.token_hex(8)}")
    try:
        make_private(cache.parent)
        draft.write_text(json.dumps(stats), encoding="ascii")
        draft.replace(cache)
    except OSError:  # without a cache, the next sync only takes longer
        with contextlib.suppress(OSError):  # raised again if, for example, the folder is another user's
            draft.unlink()
