"""Snapshots on this node's disk: committed so that no kill can lose one, and verified before they are used.

A snapshot is a payload (``torch.save``, or a folder of shards, see ``sharded``) and a manifest (JSON) with its name and
SHA-256. The payload is written to a temporary file, synced and renamed, and the folder synced; only then, in the
same way, the manifest. A payload without a manifest does not count. (Of shards that are on two hosts, ``sharded`` syncs
later.)
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
    """The snapshots in one folder, which one rank may save to (see ``writes_snapshots``).

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
        """Nothing is read or written yet.

        Args:
            folder: made when first saved to.
            keep: how many to keep, 2 or more: the last one may turn out damaged.
            generation: how often the job was started anew; None: that of the newest snapshot or fence here, or 0.
            leave_shards: do not load the tensors of a sharded one: the loaded state lacks them, and ``Loaded.shards``
                is their folder.
            allow_nan: save a state in which a tensor holds nan. Else it is passed over with a warning, so that the
                snapshots before it, of a training that was still whole, are kept.
        """
        refuse_unsafe(torch.__version__)
        if keep < 2:
            raise ValueError(
                f"keep is {keep}: at least 2 was wanted, since the last one may turn out damaged"
            )
        self.folder = Path(folder).absolute()  # a script may change its own, and is started anew in this
        self.keep = keep
        self.generation = generation
        self.entered: int | None = None
        """The generation that this rank was told of since; what is being saved meanwhile is of its own."""
        self.leave_shards = leave_shards
        self.allow_nan = allow_nan
        self.fence = Fence(self.folder)
        self.attempt = ""
        """Goes into the manifests of what is saved from then on: see ``Made``; ``newest_of_all`` sets it."""
        self.num_failed = 0
        """How many saves have failed in a row."""
        self.saved_s = time.monotonic()
        """When the last save was committed, by ``time.monotonic()``; before any, when this object was made."""
        self.peers: Peers | None = None
        """The ranks that a sharded one is sent between, once there is any; it must outlive all of their collectives."""
        self.last_save_s: float | None = None
        """How long the last save took, without the copy to host memory."""
        self._damaged: set[str] = set()  # manifests whose snapshots are damaged
        # And all that were of no use here, also those that could not be read.
        self._rejected: set[str] = set()
        self._unsynced: set[str] = set()  # and those whose files may not be on the disk
        self._host_copy = HostCopy()
        self._writer = Background("nodekit-snapshot")
        self._is_late = False

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """Commit ``state`` (tensors and plain python values), and remove all but the newest ``keep``.

        None if the folder cannot be written (full, read-only): that is logged as a warning and counted in
        ``num_failed``, and the snapshots that are there are kept. None, with a warning, for a state with nan in it,
        too.

        Raises:
            ValueError: ``state`` holds what could not be loaded safely.
            Fenced: a newer generation has taken over; nothing was changed.
        """
        self.wait()
        return self._save(state, step=step, world_size=world_size, attempt=self.attempt)

    def save_if_newest(
        self, state: Any, *, step: int, world_size: int = 1, attempt: str | None = None
    ) -> Manifest | None:
        """As ``save``, by a rank that has lost others and does not know who else saves here.

        ``attempt`` is for a state of an earlier one than the present.

        None also where there is a snapshot of this step or a later one, and, whatever ``allow_nan`` says, for a state
        with nan in it.

        A fence does not keep it out: the step was made before, and may be in this memory alone until enough nodes are
        there for the next generation. Whatever that one saves counts for more.
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
        """Make the memory for copies of such a state, in a thread: the first ``save_async`` then waits less."""
        self._host_copy.prepare(state)

    def save_async(self, state: Any, *, step: int, world_size: int = 1) -> None:
        """Copy ``state`` to host memory now, and do the rest of ``save`` in a thread.

        ``state`` may be changed as soon as this returns. There is one save at a time: this waits for the previous one
        (see ``is_saving``). What a save raises is raised by the next call of ``check``, ``wait``, ``save`` or this.
        """
        self.wait()
        save = partial(self._save, step=step, world_size=world_size, attempt=self.attempt)
        self._writer.start(partial(save, self._staged(state)))

    @property
    def is_saving(self) -> bool:
        """Whether a ``save_async`` is running."""
        return self._writer.is_busy

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the current save, if any; False after ``timeout_s``. Raises what the save raised."""
        return self._writer.wait(timeout_s)

    def check(self) -> None:
        """Raise what a ``save_async`` that has ended raised; never waits."""
        self._writer.check()

    @contextmanager
    def receiving(self, manifest: Manifest) -> Iterator[commit.HashingFile]:
        """A file for another node's payload, committed at the block's end if its SHA-256 is the manifest's.

        Else a warning is logged. Writing to the file never raises, so that a node with a full disk still takes part in
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
        """The committed ones, newest first, without verifying the payloads; not those of a newer nodekit.

        Those that are older than ``since`` are not read.

        Raises:
            OSError: the folder or a manifest cannot be read, so that it is unknown what is here.
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
        """(generation, step) of the newest, by its name alone.

        Raises:
            OSError: the folder cannot be read.
        """
        return max(map(age_of, self._listed()), default=None)

    def load(self) -> Loaded | None:
        """Load the newest intact one, on the CPU; None if there has never been one.

        Damaged ones are logged and skipped. Read errors are retried for some seconds.

        Raises:
            NoneLoads: there are some, or may be, and none can be loaded.
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
        """Load the newest intact one, and tell why newer ones were skipped.

        Args:
            but: payloads to skip.
            expected: what is known to have been committed here, as text: then an empty folder is an error.
            is_mapped: see ``read_age``.
            leave_parts: if the newest is sharded, return it without its state, unverified: it may be on several nodes.
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
        """Load the one of this (generation, step), if it is here and intact.

        Args:
            age: which one.
            is_verified: another rank of this node has verified it: reading all of it once is enough.
            is_mapped: leave large tensors in the file (see ``map_payload``), unless it is sharded.
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
        """The names in the folder; none if there is no folder.

        Raises:
            OSError: it cannot be listed.
        """
        try:
            return [entry.name for entry in self.folder.iterdir()]
        except commit.NOT_FOUND:
            return []

    def _listed(self, expected: str = "") -> list[str]:
        """The names of the manifests, newest first."""
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
            # Around its own reason, torch advises to load it without restriction.
            why = str(error.__context__ or error).partition("\n")[0].partition(" Please")[0]
            raise Unloadable(f"torch {torch.__version__} does not load it: {why}") from error

    def read_parts(self, manifest: Manifest) -> Loaded:
        """Load a sharded one whose files have been verified; with ``leave_shards``, they need not all be here."""
        path = self.folder / manifest.payload
        with (path / REST).open("rb") as file:
            rest = load_payload(file)
        if self.leave_shards:
            return Loaded(rest, manifest, str(path), path)
        return Loaded(assemble(rest, read_whole(path)), manifest, str(path))

    def adopt(self, manifest: Manifest) -> None:
        """Commit a sharded one whose files other nodes have sent, unless it is committed here."""
        with commit.warned(f"{manifest.name}, sent by other nodes, is not committed in {self.folder}"):
            if manifest not in self.manifests():
                with commit.locked(self.folder):
                    payload = self.folder / manifest.payload
                    for path in filter(Path.is_file, payload.iterdir()):
                        commit.sync(path)  # it may be of a save that was cut off before
                    commit.sync_folder(payload)
                    commit.sync_folder(self.folder)
                    self._announce(manifest)
                    self._prune(manifest)

    def reject(self, name: str, error: Exception) -> None:
        """Log why a snapshot is skipped; a damaged one is removed at the next save."""
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
        with self._locked_folder(waits=True):  # as for the last save of this object's own
            return self._write_whole(state, step=step, world_size=world_size, attempt=attempt)

    @contextmanager
    def _locked_folder(self, *, waits: bool = False) -> Iterator[None]:
        """Let nobody else write there, whose half-written files would be taken for leftovers.

        Raises:
            BlockingIOError: somebody does (see ``commit.locked``).
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
        """Commit a payload."""
        commit.place(payload, file, manifest.payload)
        self._announce(manifest)
        self._prune(manifest)

    def _announce(self, manifest: Manifest, *, syncs: bool = True) -> None:
        """Write the manifest of a payload, if this generation still may: from here on the snapshot counts.

        The folder is locked, so that nothing in it is of another save.
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
        """Check that the payload loads with ``weights_only``: else saving must fail now, not loading later.

        Each time: what was None at the first save (the best loss so far) may be a number of numpy's at a later one.
        """
        # torch 2.4, with which `Snapshots` are refused by a message of ours, lacks it.
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
        """Remove damaged snapshots, and what is older than the newest ``keep`` that are on the disk and can be read.

        If the one just committed may not be there, it replaces others of which that is so, and none that is.
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
        """Remove what a killed save left, in a locked folder: temporary files, and payloads without a manifest.

        Payloads of newer generations stay: their manifests may be about to be written. So do payloads whose manifest
        cannot be read.
        """
        with commit.warned(f"cannot clear up {self.folder}, which is put off to the next save"):
            if self.fence.read() > self._own_generation():
                return  # they may be of the next one, that is saving
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
    """A number that may be numpy's or a tensor, as a manifest has it; its file's name has room for no other."""
    with suppress(TypeError):
        if (number := operator.index(step)) >= 0:
            return number
    raise ValueError(f"a snapshot's step is {step!r}: a whole number from 0 was wanted")
