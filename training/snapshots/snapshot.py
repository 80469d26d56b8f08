"""Snapshots on this node's disk: committed so that no kill can lose one, and verified before they are used.

A snapshot is a payload (``torch.save``, or a folder of shards, see ``sharded``) and a manifest (JSON) with the name and
SHA-256 of the payload. The payload is written to a temporary file, synced and renamed, and the folder synced; only then
is the manifest written in the same way. A payload without a manifest does not count. (``sharded`` syncs later if each
shard is on two hosts.)
"""

import io
import logging
import operator
import os
import pickle
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nodekit.training.errors import refuse_unsafe
from nodekit.training.snapshots.background import Background
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.fence import Fence
from nodekit.training.snapshots.files.found import Found, check_loss
from nodekit.training.snapshots.files.manifest import (
    MANIFEST,
    PAYLOAD,
    Damaged,
    Elsewhere,
    Loaded,
    Manifest,
    NewerKit,
    Unloadable,
    age_of,
    load_payload,
    map_payload,
    save_payload,
    stem_of,
    verify,
    verify_parts,
)
from nodekit.training.snapshots.files.shards import REST, assemble, read_whole
from nodekit.training.snapshots.hostcopy import HostCopy, nan_in
from nodekit.training.snapshots.peers import Peers

log = logging.getLogger("nodekit.training")


class Snapshots:
    """The snapshots in one folder, to which one rank saves (see ``writes_snapshots``).

    ::

        snapshots = Snapshots(world.snapshot_dir, generation=world.generation)
        writes = writes_snapshots(snapshots, world)
        if found := newest_of_all(snapshots, world, writes=writes):
            model.load_state_dict(found.state["model"])
        ...
        if writes:
            snapshots.save_async({"model": model.state_dict()}, step=step, world_size=world.world_size)
        ...
        snapshots.wait()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        generation: int | None = None,
        leave_shards: bool = False,
        allow_nan: bool = False,
    ) -> None:
        """Check the arguments; nothing is read or written yet.

        Args:
            folder: created by the first save.
            keep: how many snapshots to keep, 2 or more: the last one may turn out damaged.
            generation: how often the job was started anew; None: that of the newest snapshot or fence here, or 0.
            leave_shards: do not load the tensors of a sharded snapshot: the loaded state lacks them, and
                ``Loaded.shards`` is their folder.
            allow_nan: also save a state in which a tensor holds nan. By default such a state is skipped with a warning,
                so that the snapshots from before the nan are kept.
        """
        refuse_unsafe(torch.__version__)
        if keep < 2:
            raise ValueError(
                f"keep is {keep}: at least 2 was wanted, since the last one may turn out damaged"
            )
        # A script may change its working folder, and a restart begins in this one.
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.generation = generation
        self.entered: int | None = None
        """The newer generation that kit named to this rank; `save_if_newest` saves as that one. None: no newer one."""
        self.leave_shards = leave_shards
        self.allow_nan = allow_nan
        self.fence = Fence(self.folder)
        self.attempt = ""
        """The attempt's number, written to each manifest (see ``Made``); ``newest_of_all`` sets it."""
        self.num_failed = 0
        """How many saves have failed in a row."""
        self.saved_s = time.monotonic()
        """When the last save was committed, by ``time.monotonic()``; initially, when this object was made."""
        self.peers: Peers | None = None
        """The group that sends files of sharded snapshots, once needed; it must outlive all of its collectives."""
        self.last_save_s: float | None = None
        """How many seconds the last save took, without the copy to host memory."""
        self._damaged: set[str] = set()  # names of manifests whose snapshots are damaged
        # Names of all manifests that could not be used: damaged, unreadable, or written by a newer nodekit.
        self._rejected: set[str] = set()
        self._unsynced: set[str] = set()  # names of manifests whose files may not be on the disk yet
        self._host_copy = HostCopy()
        self._writer = Background("nodekit-snapshot")
        self._is_late = False

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """Commit ``state`` (tensors and plain python values), and remove all but the newest ``keep``.

        Return None if the folder cannot be written (full, read-only): that is logged as a warning and counted in
        ``num_failed``, and the snapshots in the folder are kept. Also return None, with a warning, for a state that
        holds nan.

        Raises:
            ValueError: ``state`` holds objects that could not be loaded safely.
            Fenced: a newer generation has taken over; nothing was changed.
        """
        self.wait()
        return self._save(state, step=step, world_size=world_size, attempt=self.attempt)

    def save_if_newest(
        self, state: Any, *, step: int, world_size: int = 1, attempt: str | None = None
    ) -> Manifest | None:
        """As ``save``, but on a rank that has lost others and does not know which ranks save to this folder too.

        Pass ``attempt`` if the state is of an earlier attempt than the present one.

        Return None also if there is a snapshot of this step or a later one, and, whatever ``allow_nan`` says, for a
        state that holds nan.

        A fence does not prevent this save: the step was done before, and may be in this process's memory alone until
        enough nodes are there for the next generation. Snapshots of that generation take precedence.
        """
        self.wait()
        if self.entered is not None:
            self.generation = self.entered
        attempt = self.attempt if attempt is None else attempt
        self._is_late = True
        try:
            return self._save(state, step=step, world_size=world_size, attempt=attempt, if_newest=True)
        finally:
            self._is_late = False

    def prepare(self, state: Any) -> None:
        """Allocate host memory for copies of ``state`` in a thread, so that the first ``save_async`` waits less."""
        self._host_copy.prepare(state)

    def save_async(self, state: Any, *, step: int, world_size: int = 1) -> None:
        """Copy ``state`` to host memory now, and do the rest of ``save`` in a thread.

        ``state`` may be changed as soon as this returns. Only one save runs at a time: this call waits for the previous
        one (see ``is_saving``). An exception of the thread is raised by the next call of ``check``, ``wait``, ``save``
        or ``save_async``.
        """
        self.wait()
        save = partial(self._save, step=step, world_size=world_size, attempt=self.attempt)
        self._writer.start(partial(save, self._staged(state)))

    @property
    def is_saving(self) -> bool:
        """Whether a ``save_async`` is running."""
        return self._writer.is_busy

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the current save, if any, and raise its exception; return False after ``timeout_s``."""
        return self._writer.wait(timeout_s)

    def check(self) -> None:
        """Raise the exception of a ``save_async`` that has ended; never wait."""
        self._writer.check()

    @contextmanager
    def receiving(self, manifest: Manifest) -> Iterator[commit.HashingFile]:
        """Give the block a file for another node's payload, and commit it afterwards if its SHA-256 is the manifest's.

        Otherwise log a warning. Writing to the file never raises, so that a node with a full disk still takes part in
        the broadcast.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locked_folder())
                temporary, file = stack.enter_context(commit.written_beside(self.folder))
                payload = commit.HashingFile(file)
            except OSError as error:
                payload = commit.HashingFile(io.BytesIO(), error)
            yield payload
            with commit.warned(
                f"no snapshot of step {manifest.step}, sent by another node, in {self.folder}, and going on without"
            ):
                payload.finish()
                if payload.sha256 != manifest.sha256[manifest.payload]:
                    raise OSError("what was sent has another SHA-256 than its manifest says")
                self._place(manifest, temporary, file)

    def manifests(self, since: tuple[int, int] = (0, 0)) -> list[Manifest]:
        """Return the manifests of committed snapshots, newest first; payloads are not verified.

        Manifests that are damaged, or written by a newer nodekit, are left out, and so are those older than ``since``
        as (generation, step).

        Raises:
            OSError: the folder or a manifest cannot be read, so that it is unknown which snapshots are here.
        """
        found = []
        for name in self._listed():
            if age_of(name) < since:
                break
            try:
                found.append(Manifest.read(self.folder, name))
            except FileNotFoundError:  # another process has removed it since
                pass
            except (NewerKit, Damaged) as error:
                self.reject(name, error)
        return found

    def newest_age(self) -> tuple[int, int] | None:
        """Return (generation, step) of the newest snapshot, from its file's name; None if there is none.

        Raises:
            OSError: the folder cannot be read.
        """
        return max(map(age_of, self._listed()), default=None)

    def load(self) -> Loaded | None:
        """Load the newest intact snapshot, onto the CPU; return None if there has never been one.

        Damaged snapshots are logged and skipped. Read errors are retried for some seconds.

        Raises:
            NoneLoads: there are snapshots, or may be, and none can be loaded.
            NewerKit: the newest was written by a newer nodekit.
        """
        found = self.look()
        check_loss([found], found.loaded.manifest.age if found.loaded else None)
        return found.loaded

    def look(
        self,
        but: Collection[str] = (),
        *,
        expected: str = "",
        is_mapped: bool = False,
        leave_parts: bool = False,
    ) -> Found:
        """Load the newest intact snapshot, and report why newer ones were skipped.

        Args:
            but: names of payloads to skip.
            expected: describes a snapshot that is known to be committed here; if given, an empty folder is an error.
            is_mapped: see ``read_age``.
            leave_parts: return a sharded snapshot without its state and unverified: it may be on several nodes.
        """
        until_s = time.monotonic() + commit.RETRY_S
        problems: list[str] = []
        newer_kit = None
        try:
            names = commit.retried(partial(self._listed, expected), until_s)
        except OSError as error:
            return Found(problems=(f"{self.folder}: {error}",))
        for name in names:
            try:
                manifest = commit.retried(partial(Manifest.read, self.folder, name), until_s)
                if manifest.payload in but:
                    continue
                if manifest.is_sharded and leave_parts:
                    loaded = Loaded(None, manifest, str(self.folder / manifest.payload))
                else:
                    loaded = commit.retried(partial(self._load, manifest, is_mapped=is_mapped), until_s)
                return Found(loaded, tuple(problems), newer_kit)
            except FileNotFoundError:  # another process has removed it since
                pass
            except NewerKit as error:
                newer_kit = newer_kit or (age_of(name), f"{self.folder / name}: {error}")
                self.reject(name, error)
            except (Damaged, Elsewhere, Unloadable, OSError) as error:
                problems.append(f"{self.folder / name}: {error}")
                self.reject(name, error)
        return Found(None, tuple(problems), newer_kit)

    def read_age(
        self, age: tuple[int, int], *, is_verified: bool = False, is_mapped: bool = False
    ) -> Loaded | None:
        """Load the snapshot of this (generation, step); return None if it is not here or not intact.

        Args:
            age: (generation, step).
            is_verified: another rank of this node has verified the files, so do not hash them again.
            is_mapped: leave large tensors in the file (see ``map_payload``); no effect if the snapshot is sharded.
        """
        name = f"{stem_of(*age)}.json"
        try:
            manifest = commit.retried(partial(Manifest.read, self.folder, name))
            return commit.retried(partial(self._load, manifest, is_verified=is_verified, is_mapped=is_mapped))
        except FileNotFoundError:
            return None
        except (NewerKit, Damaged, Elsewhere, Unloadable, OSError) as error:
            self.reject(name, error)
            return None

    def _names(self) -> list[str]:
        """Return the names in the folder; none if there is no folder.

        Raises:
            OSError: the folder cannot be listed.
        """
        try:
            return [entry.name for entry in self.folder.iterdir()]
        except commit.NOT_FOUND:
            return []

    def _listed(self, expected: str = "") -> list[str]:
        """Return the names of the manifests, newest first; raise an OSError if there are none, though ``expected``."""
        names = sorted(filter(MANIFEST.fullmatch, self._names()), key=age_of, reverse=True)
        if expected and not names:
            raise OSError(f"no snapshot is here, though {expected}: is a file system not mounted?")
        return names

    def _load(self, manifest: Manifest, *, is_verified: bool = False, is_mapped: bool = False) -> Loaded:
        path = self.folder / manifest.payload
        try:
            if manifest.is_sharded:
                if not is_verified:
                    verify_parts(self.folder, manifest)
                return self.read_parts(manifest)
            if not is_verified:
                verify(self.folder, manifest, manifest.payload)
            if is_mapped and os.name == "posix":  # Windows does not remove mapped files
                return Loaded(map_payload(path), manifest, str(path))
            with path.open("rb") as file:
                return Loaded(load_payload(file), manifest, str(path))
        except commit.NOT_FOUND as error:
            raise Damaged(str(error)) from error
        except pickle.UnpicklingError as error:
            # torch wraps the reason in the advice to load the file without restriction, which must not be followed.
            why = str(error.__context__ or error).partition("\n")[0].partition(" Please")[0]
            raise Unloadable(f"torch {torch.__version__} does not load it: {why}") from error

    def read_parts(self, manifest: Manifest) -> Loaded:
        """Load a sharded snapshot whose files were verified; with ``leave_shards``, not all of them need be here."""
        path = self.folder / manifest.payload
        with (path / REST).open("rb") as file:
            rest = load_payload(file)
        if self.leave_shards:
            return Loaded(rest, manifest, str(path), path)
        return Loaded(assemble(rest, read_whole(path)), manifest, str(path))

    def adopt(self, manifest: Manifest) -> None:
        """Commit a sharded snapshot whose files other nodes have sent, unless it is committed here already."""
        with commit.warned(f"{manifest.name}, sent by other nodes, is not committed in {self.folder}"):
            if manifest not in self.manifests():
                with commit.locked(self.folder):
                    payload = self.folder / manifest.payload
                    for path in filter(Path.is_file, payload.iterdir()):
                        commit.sync(path)  # it may be left from a save that was cut off before its sync
                    commit.sync_folder(payload)
                    commit.sync_folder(self.folder)
                    self._announce(manifest)
                    self._prune(manifest)

    def reject(self, name: str, error: Exception) -> None:
        """Log why a snapshot is skipped; the next save removes it if it is damaged."""
        log.warning("snapshot %s is passed over: %s", self.folder / name, error)
        self._rejected.add(name)
        if isinstance(error, Damaged):
            self._damaged.add(name)

    def _own_generation(self) -> int:
        if self.generation is None:
            self.generation = max([self.fence.read(), *(age_of(name)[0] for name in self._listed())])
        return self.generation

    def _check_fence(self) -> None:
        if not self._is_late:
            self.fence.check(self._own_generation())

    def _staged(self, state: Any) -> Any:
        return self._host_copy.take(state)

    def _save(
        self, state: Any, *, step: int, world_size: int, attempt: str, if_newest: bool = False
    ) -> Manifest | None:
        step = _whole(step)
        if (if_newest or not self.allow_nan) and (name := nan_in(state)):
            log.warning(
                "no snapshot of step %d in %s, and going on without: %s holds nan; the snapshots before it are kept",
                step,
                self.folder,
                name,
            )
            return None
        with commit.warned(f"no snapshot of step {step} in {self.folder}, and going on without"):
            self.num_failed += 1
            started_s = time.monotonic()
            write = self._commit_if_newest if if_newest else self._commit
            manifest = write(state, step=step, world_size=world_size, attempt=attempt)
            self.last_save_s = time.monotonic() - started_s
            if self.num_failed > 1:
                log.warning(
                    "snapshots are saved in %s again: step %d, after %d that failed",
                    self.folder,
                    step,
                    self.num_failed - 1,
                )
            self.num_failed, self.saved_s = 0, time.monotonic()
            return manifest
        return None

    def _commit_if_newest(self, state: Any, *, step: int, world_size: int, attempt: str) -> Manifest | None:
        with self._locked_folder():
            since = self._own_generation(), step
            if any(each.name not in self._rejected for each in self.manifests(since)):
                return None
            return self._write_whole(state, step=step, world_size=world_size, attempt=attempt)

    def _commit(self, state: Any, *, step: int, world_size: int, attempt: str) -> Manifest:
        with self._locked_folder(waits=True):  # another thread of this process may still be saving
            return self._write_whole(state, step=step, world_size=world_size, attempt=attempt)

    @contextmanager
    def _locked_folder(self, *, waits: bool = False) -> Iterator[None]:
        """Lock the folder, so that no file in it is being written by another save, and remove leftovers.

        Raises:
            BlockingIOError: another writer has locked it (see ``commit.locked``).
            Fenced: a newer generation has taken over.
        """
        self._check_fence()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with commit.locked(self.folder, waits=waits):
            self._remove_leftovers()
            yield

    def _write_whole(self, state: Any, *, step: int, world_size: int, attempt: str) -> Manifest:
        with commit.written_beside(self.folder) as (temporary, file):
            payload = self._write(state, file, temporary)
            name = f"{stem_of(self._own_generation(), step)}-{payload.sha256[:16]}.pt"
            files = {name: (payload.sha256, payload.size_bytes)}
            manifest = self._manifest(files, step=step, world_size=world_size, attempt=attempt)
            self._place(manifest, temporary, file)
        return manifest

    def _write(self, state: Any, file: BinaryIO, path: Path) -> commit.HashingFile:
        payload = save_payload(state, file)
        self._refuse_what_cannot_be_loaded(path)
        return payload

    def _manifest(
        self, files: Mapping[str, tuple[str, int]], *, step: int, world_size: int, attempt: str
    ) -> Manifest:
        return Manifest(
            generation=self._own_generation(),
            step=step,
            world_size=world_size,
            sha256={name: sha256 for name, (sha256, _) in files.items()},
            size_bytes={name: size_bytes for name, (_, size_bytes) in files.items()},
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            attempt=attempt,
        )

    def _place(self, manifest: Manifest, payload: Path, file: BinaryIO) -> None:
        """Rename a written payload to its name, write its manifest, and remove old snapshots."""
        commit.place(payload, file, manifest.payload)
        self._announce(manifest)
        self._prune(manifest)

    def _announce(self, manifest: Manifest, *, syncs: bool = True) -> None:
        """Write the manifest of a payload, if this generation still may: from here on the snapshot counts.

        The caller has locked the folder.
        """
        self.fence.raise_to(self._own_generation())
        with commit.written_beside(self.folder) as (temporary, beside):
            beside.write(manifest.to_json().encode())
            commit.place(temporary, beside, manifest.name, syncs=syncs, last_word=self._check_fence)
        self._damaged.discard(manifest.name)
        self._rejected.discard(manifest.name)
        if syncs:
            self._unsynced.discard(manifest.name)
        else:
            self._unsynced.add(manifest.name)

    def _refuse_what_cannot_be_loaded(self, payload: Path) -> None:
        """Check that the payload loads with ``weights_only``: saving must fail now rather than loading later.

        Every save is checked: a value that was None at first (the best loss so far) may be a numpy number later.
        """
        # Imported here: torch 2.4 lacks it, and there `Snapshots` raises a message of its own.
        from torch.serialization import get_unsafe_globals_in_checkpoint

        try:
            unsafe = get_unsafe_globals_in_checkpoint(payload)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"a snapshot holds what torch.load reads with weights_only, and that does not read this one ({error}): "
                "an integer of more than 255 bytes, for one, is to be converted to text before it is saved"
            ) from error
        if unsafe:
            raise ValueError(
                f"a snapshot holds tensors and plain python values, not {', '.join(unsafe)}: convert these before "
                "they are saved (of numpy's, a number by .item() and an array by torch.from_numpy)"
            )

    def _prune(self, committed: Manifest) -> None:
        """Remove damaged snapshots, and those older than the newest ``keep`` that are on the disk and can be read.

        If the snapshot just committed is not synced yet, it replaces other unsynced ones only.
        """
        with commit.warned(f"cannot clear up {self.folder}, which is put off to the next save"):
            doubtful = self._damaged | self._unsynced
            found = self.manifests()
            good = [each.age for each in found if each.name not in doubtful | self._rejected]
            last = good[: self.keep][-1] if len(good) >= self.keep else (0, 0)
            old = [] if committed.name in self._unsynced else [each.name for each in found if each.age < last]
            for name in {*old, *doubtful} - {committed.name}:
                (self.folder / name).unlink(missing_ok=True)
                self._damaged.discard(name)
                self._rejected.discard(name)
                self._unsynced.discard(name)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove temporary files and payloads without a manifest, which a killed save left; the folder is locked.

        Payloads of newer generations stay: their manifests may be about to be written. Payloads whose manifest cannot
        be read stay too.
        """
        with commit.warned(f"cannot clear up {self.folder}, which is put off to the next save"):
            if self.fence.read() > self._own_generation():
                return  # the files may be of a newer generation, which is saving
            names = self._names()
            read = {manifest.stem: manifest.payload for manifest in self.manifests()}
            unread = {name.removesuffix(".json") for name in names if MANIFEST.fullmatch(name)} - read.keys()
            for name in names:
                payload, path = PAYLOAD.fullmatch(name), self.folder / name
                is_left = (
                    payload is not None
                    and read.get(payload["stem"]) != name
                    and payload["stem"] not in unread
                    and int(payload["generation"]) <= self._own_generation()
                )
                with commit.warned(f"cannot remove {path}, which is put off to the next save"):
                    if is_left and path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif is_left or commit.TEMPORARY.fullmatch(name):
                        path.unlink(missing_ok=True)


def _whole(step: Any) -> int:
    """Return a step, which may be numpy's or a tensor, as an int; a ValueError unless it is a whole number from 0."""
    with suppress(TypeError):
        if (number := operator.index(step)) >= 0:
            return number
    raise ValueError(f"a snapshot's step is {step!r}: a whole number from 0 was wanted")
