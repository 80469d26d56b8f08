"""Send the user's code and kit's own package to every host, and verify them there."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, RemoteError, all_or_raise, on_all
from nodekit.deploy.host.code import tree as host
from nodekit.deploy.sync.listing import Entry, Tree, list_code
from nodekit.deploy.sync.progress import Progress, progress_bars
from nodekit.deploy.sync.transfer import Delivery, HostChannel, SourceChanged, bring, seconds_left
from nodekit.inventory.errors import HostError, KitError

__all__ = [
    "Entry", "Package", "Progress", "SyncResult", "Target", "Tree", "begin_caching", "finish_caching", "list_code",
    "package", "progress_bars", "project_key", "send", "send_package",
]  # fmt: skip

_PACKAGES = ("nodekit.deploy", "nodekit.inventory", "nodekit.slurm", "nodekit.training")
_SUFFIXES = (".py", ".yaml", ".json", ".tsv")
_FULL = ("ENOSPC", "EDQUOT")
_ANSWER_S = 2.0  # for a host to report which other sync holds the lock, once it has waited for that
_ATTEMPTS = 2  # at sending the files; the second ignores partial files of the first


@dataclass(frozen=True)
class Target:
    """The destination of a tree on one host."""

    channel: HostChannel
    dest: str
    """The folder that the run uses; ``~`` allowed."""
    cache: str
    """The folder of kit's own copy, from which the next sync starts; one per project and host."""


@dataclass(frozen=True, kw_only=True)
class SyncResult:
    """The result of a sync on one host."""

    digest: str
    """The content hash computed on the host."""
    files_sent: int
    bytes_sent: int
    kept: tuple[str, ...]
    """New names of files that the job had created or changed in `dest` and that conflict with the new tree."""


def project_key(folder: Path) -> str:
    """Return the name of a project's cache: the folder's name, and a hash of location and user."""
    root = folder.expanduser().resolve()
    where = f"{_user()}@{socket.gethostname()}:{root}"
    name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in root.name)[:40]
    return f"{name}-{sha256(where.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user that has no name
        return str(os.getuid())


def code_target(channel: HostChannel, tree: Tree, *, workdir: str, dest: str) -> Target:
    """Return the destination of a run's code on a host, and the project's cache there."""
    return Target(channel, dest=dest, cache=f"{workdir}/code/{project_key(tree.root)}")


def send(
    tree: Tree,
    targets: Mapping[str, Target],
    *,
    timeout_s: float,
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, SyncResult | Exception]:
    """Sync the tree to `dest` on every host in parallel; one host's failure hides no other's.

    An existing `dest` (of a resumed run) is updated; files that the job created or changed in it are kept. If the
    user's files change meanwhile, the tree is listed again, once, and sent to all hosts.
    """
    deadline = time.monotonic() + timeout_s

    def attempt() -> dict[str, SyncResult | Exception]:
        return on_all(targets, lambda target: _send_one(tree, target, deadline, progress))

    results = attempt()
    if any(isinstance(result, SourceChanged) for result in results.values()):
        try:
            tree = list_code(tree.root)
        except KitError as error:
            return {
                name: error if isinstance(result, SourceChanged) else result
                for name, result in results.items()
            }
        results = attempt()
    return results


def _send_one(
    tree: Tree, target: Target, deadline: float, progress: Callable[[Progress], None]
) -> SyncResult | Exception:
    channel = target.channel
    sent: list[Entry] = []
    bytes_sent = 0

    def place(**more: Any) -> Any:
        left_s = seconds_left(channel.host, deadline)
        owner = f"{_user()} on {socket.gethostname()}, process {os.getpid()}"
        return channel.call(
            "tree.place",
            timeout_s=left_s,
            cache=target.cache,
            dest=target.dest,
            digest=tree.digest,
            owner=owner,
            wait_s=left_s - min(left_s / 2, _ANSWER_S),
            **more,
        )

    progress(Progress(host=channel.host, phase="checking"))
    answer: dict[str, Any] = {}
    try:
        answer = place()
        if answer["state"] == "unknown":
            answer = place(rows=tree.entries)
        for number in range(_ATTEMPTS):
            if answer["state"] != "send":
                break
            sent = [tree.entries[index] for index in answer["paths"]]
            if number > 0 and (changed := tree.changed(entry.path for entry in sent)):
                raise SourceChanged(changed)
            bytes_sent += _deliver(tree, channel, sent, answer, deadline, progress, whole=number > 0)
            answer = place()
        _verify(tree, channel.host, answer)
    except RemoteError as error:
        raise _told(error, target) from error
    finally:
        if answer.get("state") in ("send", "unknown"):
            _release(target)
    progress(Progress(host=channel.host, phase="done"))
    return SyncResult(
        digest=answer["digest"], files_sent=len(sent), bytes_sent=bytes_sent, kept=tuple(answer["kept"])
    )


def _deliver(
    tree: Tree,
    channel: HostChannel,
    entries: Sequence[Entry],
    answer: Mapping[str, Any],
    deadline: float,
    progress: Callable[[Progress], None],
    *,
    whole: bool,
) -> int:
    """Send files to a host's cache; return their size in bytes."""
    num_bytes = sum(entry.size for entry in entries)

    def report(files: int, bytes_done: int, phase: str = "sending") -> None:
        progress(
            Progress(
                host=channel.host,
                phase=phase,
                files_done=files,
                files_total=len(entries),
                bytes_done=bytes_done,
                bytes_total=num_bytes,
            )
        )

    report(0, 0)
    if num_bytes > answer["free_bytes"]:
        raise HostError(
            channel.host,
            f"its disk is full: the code needs {num_bytes / 1e6:.1f} MB in {answer['cache']} and "
            f"{answer['free_bytes'] / 1e6:.1f} MB are free",
            cure="make room there, or leave big files out by a line in .kitignore",
        )
    bring(
        Delivery(
            channel=channel,
            tree=tree,
            entries=entries,
            cache=answer["cache"],
            host_has_rsync=answer["rsync"],
            deadline=deadline,
            report=report,
            whole=whole,
        )
    )
    report(0, 0, "placing")
    return num_bytes


def _verify(tree: Tree, host: str, answer: Mapping[str, Any]) -> None:
    """Raise an error if a host does not have the tree although it was sent.

    Raises:
        SourceChanged: the user's files have changed meanwhile.
        HostError: the files on the host have another content.
    """
    if answer["state"] != "placed":
        wrong = [tree.entries[index].path for index in answer.get("paths", [])] or ["?"]
        if changed := tree.changed(path for path in wrong if path in tree.stats):
            raise SourceChanged(changed)
        raise HostError(
            host,
            f"{wrong[0]} has another content there than here, after being sent {_ATTEMPTS} times; its "
            "disk or memory may be failing",
        )
    if answer["digest"] != tree.digest:
        raise HostError(host, f"the code there hashes to {answer['digest']}, here to {tree.digest}")


def _release(target: Target) -> None:
    """Release the lock of the cache after a failure; a lost channel has released it already."""
    with contextlib.suppress(HostError):
        target.channel.call("tree.release", timeout_s=2.0, cache=target.cache)


def _told(error: RemoteError, target: Target) -> HostError:
    if error.errno in _FULL:
        return HostError(
            error.host, f"its disk is full ({error.message})", cure=f"make room below {target.cache}"
        )
    if error.errno in ("EACCES", "EPERM", "EROFS"):
        return HostError(
            error.host, f"kit may not write there ({error.message})", cure="set `workdir` to a folder it may"
        )
    if error.type == "TimeoutError":
        return HostError(error.host, *error.problem)
    return error


def begin_caching(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Have each host start to complete its cache in the background, which `send` has postponed.

    Without this call, the next sync does it first.
    """
    return on_all(
        targets,
        lambda target: target.channel.call(
            "tree.begin_caching", timeout_s=CALL_TIMEOUT_S, cache=target.cache
        ),
    )


def finish_caching(targets: Mapping[str, Target], *, timeout_s: float) -> dict[str, Any]:
    """Have each host complete its cache, and wait until it has."""
    return on_all(
        targets,
        lambda target: target.channel.call("tree.finish_caching", timeout_s=timeout_s, cache=target.cache),
    )


# --- kit's own package --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Package:
    """The source of kit, as it is installed on this machine."""

    digest: str
    files: Mapping[str, str]
    """``nodekit/deploy/…`` -> content"""


def package() -> Package:
    """Return kit's own package in its import layout, however it is installed."""
    files: dict[str, bytes] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)  # importing them would load torch
        assert spec is not None
        for place in spec.submodule_search_locations or ():
            for folder, folders, names in os.walk(place):
                folders[:] = [inner for inner in folders if inner != "__pycache__"]
                for file in names:
                    if file.endswith(_SUFFIXES) or file == "py.typed":
                        path = Path(folder, file)
                        inside = Path(*name.split("."), path.relative_to(place))
                        files.setdefault(inside.as_posix(), path.read_bytes())
    digest = host.package_digest({path: sha256(data).hexdigest() for path, data in files.items()})
    return Package(digest=digest, files={path: data.decode("utf-8") for path, data in files.items()})


def send_package(
    package: Package, channels: Mapping[str, HostChannel], workdirs: Mapping[str, str], *, timeout_s: float
) -> None:
    """Place kit's package at ``<workdir>/kit/<digest>`` on every host; one round trip if it is there already.

    Raises:
        KitError: with a line for each host on which that failed.
    """

    def one(name: str) -> None:
        folder = f"{workdirs[name]}/kit/{package.digest}"
        args = {"folder": folder, "digest": package.digest}
        if not channels[name].call("tree.keep_package", timeout_s=timeout_s, **args):
            channels[name].call("tree.keep_package", timeout_s=timeout_s, files=dict(package.files), **args)

    # Of local nodes with the same workdir, one places the package first, and the others then find it there.
    places = {
        (workdirs[name], name if channel.connection else ""): name for name, channel in channels.items()
    }
    results = on_all({name: name for name in places.values()}, one)
    results |= on_all({name: name for name in channels if name not in results}, one)
    results = {name: results[name] for name in channels}
    for name, result in results.items():
        if isinstance(result, RemoteError) and result.errno in _FULL:
            results[name] = HostError(name, "its disk is full", cure=f"make room below {workdirs[name]}")
    all_or_raise(results)
