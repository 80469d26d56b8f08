"""Record a node's promises: to refuse old generations (its fence), and which nodes are voters."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from typing import Any, Dict, Iterator, Mapping

from nodekit.deploy.host import errors, files
from nodekit.deploy.host.node.status import fence_in, load_spec, snapshot_folder, status
from nodekit.deploy.host.schema import NodeStatus


def fence(node_dir: str, generation: int) -> NodeStatus:
    """Refuse every generation below `generation` on this node, for good; return the node's status.

    Ranks of such a generation notice the fence, and end within a moment.
    """
    node_dir = os.path.expanduser(node_dir)
    files.make_private(node_dir)
    with locked(node_dir):
        if fence_in(node_dir) < generation:
            _set_fence(node_dir, load_spec(node_dir), generation, only_raises=True)
    return status(node_dir)


@contextlib.contextmanager
def locked(node_dir: str) -> Iterator[None]:
    """Hold the node's lock while its promises are read and written, so that an older request cannot overwrite a newer.

    Each request runs in a thread of its own, and one from a lost channel may still be running.
    """
    handle = os.open(node_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # the file server does not support locks of folders
        yield
    finally:
        os.close(handle)


def enter(node_dir: str, own: Mapping[str, Any], spec: Mapping[str, Any], called_off: int) -> None:
    """Admit the generation of `spec` to this node, and fence off all earlier ones.

    Args:
        node_dir: the node's folder, which the caller has locked.
        own: the node's present spec.
        spec: the spec that will replace it.
        called_off: ignore fences up to this generation, which never started.

    Raises:
        RuntimeError: a later generation has been here.
    """
    there, generation = fence_in(node_dir), spec["generation"]
    if own["generation"] > generation or (there > generation and there > called_off):
        raise RuntimeError(
            "generation %d is over: this node is in %d" % (generation, max(there, own["generation"]))
        )
    # The node may have been fenced before it had a spec, and so without knowing its snapshot folder.
    if there != generation or fence_in(snapshot_folder(node_dir, spec)) != generation:
        _set_fence(node_dir, spec, generation)


def _set_fence(node_dir: str, spec: Mapping[str, Any], generation: int, only_raises: bool = False) -> None:
    saved = snapshot_folder(node_dir, spec)
    is_shared = spec.get("env", {}).get("NODEKIT_SNAPSHOT_SHARED", "") not in ("", "0")
    files.make_private(node_dir)
    make_snapshot_folder(saved, is_shared=is_shared)
    # nodekit.training reads the fence in the folder that it saves to, which may be a shared one.
    for folder in (saved, node_dir):
        if only_raises and _is_fenced(folder, generation):
            continue  # by now another node has set a later fence in the shared folder
        files.write_private(os.path.join(folder, "fence"), b"%d\n" % generation, durable=True)


def _is_fenced(folder: str, generation: int) -> bool:
    try:
        return fence_in(folder) >= generation
    except OSError:  # the file is damaged: write it again
        return False


def make_snapshot_folder(folder: str, is_shared: bool) -> None:
    """Create the folder that ranks save to, with mode 0700.

    The parent of a shared folder is not created: it may be a mount point whose file system is not mounted.

    Raises:
        OSError: the folder cannot be created; the message says what to do.
    """
    try:
        if is_shared and not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
        elif not is_shared:
            files.make_private(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise OSError(
                errno.EEXIST, "the snapshot folder cannot be made: a file is in its place", folder
            ) from None
    except OSError as error:
        why = "the snapshot folder cannot be made on %s: %s" % (socket.gethostname(), error.strerror)
        if is_shared and isinstance(error, FileNotFoundError):
            why += "; %s (snapshots.shared) is not there" % os.path.dirname(folder)
            cure = "mount it, or make it (mkdir -p), on every host"
            raise errors.with_cure(OSError(error.errno, why, folder), cure) from error
        raise OSError(error.errno, why, folder) from error


def set_voters(node_dir: str, voters: Dict[str, Any]) -> None:
    """Record which nodes are voters (deploy/agent/quorum.py), unless a newer list or another generation is here."""
    node_dir = os.path.expanduser(node_dir)
    path = os.path.join(node_dir, "electorate.json")
    if not os.path.isdir(node_dir):
        return
    with locked(node_dir):
        old = files.load(path)
        if load_spec(node_dir).get("generation") != voters["generation"]:
            return
        order = ("generation", "version")
        if not old or [old[key] for key in order] < [voters[key] for key in order]:
            files.write_private(path, json.dumps(voters).encode(), durable=True)
