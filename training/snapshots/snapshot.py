"""Snapshots on this node's disk: committed so that no kill can lose one, verified before they are used.

A snapshot is a payload (``torch.save``, or a folder of parts, see ``sharded``) and a manifest (JSON) that names it with
its SHA-256. The payload is written beside, synced, renamed, the folder synced; only then, the same way, the manifest.
What no manifest names does not exist.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch.serialization import get_unsafe_globals_in_checkpoint

from nodekit.training.snapshots import commit
from nodekit.training.snapshots.background import Background
from nodekit.training.snapshots.commit import TEMPORARY, HashingFile, place, retried, written_beside
from nodekit.training.snapshots.fence import Fence
from nodekit.training.snapshots.hostcopy import HostCopy
from nodekit.training.snapshots.manifest import (
    MANIFEST,
    PAYLOAD,
    Loaded,
    Manifest,
    NewerKit,
    age_of,
    load_payload,
    save_payload,
)
from nodekit.training.snapshots.shards import REST, SMALL, assemble, read_whole

log = logging.getLogger("nodekit.training")

_BLOCK_BYTES = 1 << 20


class NoneLoads(OSError):
    """There are snapshots, or may be, and none can be loaded: training may not begin at step 0 instead."""


class _Damaged(Exception):
    """A snapshot does not hold what its manifest says, or its manifest is none: reading it again is no use."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one look into a snapshot folder found."""

    loaded: Loaded | None = None
    """The newest good one."""
    problems: tuple[str, ...] = ()
    """Why newer ones were passed over, and if there is none, all of them."""
    newer_kit: tuple[tuple[int, int], str] | None = None
    """Age and words for the newest one that a newer nodekit wrote."""


def check_loss(found: Iterable[Found], newest: tuple[int, int] | None) -> None:
    """Do nothing if going on from ``newest``, or from nothing, leaves nothing behind that can still be had.

    Raises:
        NewerKit: a newer nodekit wrote a newer one.
        NoneLoads: nothing can be loaded, though something is there, or may be.
    """
    found = list(found)
    if unknown := [each.newer_kit for each in found if each.newer_kit]:
        age, words = max(unknown)
        if newest is None or age > newest:
            raise NewerKit(
                f"{words}: go on with that nodekit, or a newer one; to go on from an older snapshot, or anew, move "
                "this one to another folder"
            )
    if newest is None and (problems := [text for each in found for text in each.problems]):
        raise NoneLoads(
            f"no snapshot can be loaded, and training does not begin at step 0 instead: {'; '.join(problems)}. "
            "Mend the disk or the file server and start again: nothing was removed. To train anew, start a new run "
            "(kit up --new), or move what is in the folder elsewhere"
        )


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
    ) -> None:
        """Nothing is read or written yet.

        Args:
            folder: made when first saved to.
            keep: how many to keep, 2 or more: the last one may turn out damaged.
            generation: how often the job was started anew; None: that of the newest snapshot or fence here, or 0.
            leave_shards: do not put the tensors of a sharded one together: the state that is loaded lacks them, and
                ``Loaded.shards`` says where they are.
        """
        if keep < 2:
            raise ValueError(
                f"keep is {keep}: at least 2 was wanted, since the last one may turn out damaged"
            )
        self.folder = Path(folder)
        self.keep = keep
        self.generation = generation
        self.leave_shards = leave_shards
        self.fence = Fence(self.folder)
        self.num_failed = 0
        """How many saves have failed since the last one that did not."""
        self.saved_s = time.monotonic()
        """When the last save was committed, by ``time.monotonic()``; before any, when this object was made."""
        self._damaged: set[str] = set()  # names of manifests that do not hold what they say
        self._is_known_loadable = False
        self._host_copy = HostCopy()
        self._writer = Background("nodekit-snapshot")

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """Commit ``state`` (tensors and plain python values), and remove all but the newest ``keep``.

        None if the folder cannot be written (full, read-only): that is logged as a warning, counted in
        ``num_failed``, and what was there is kept.

        Raises:
            ValueError: ``state`` holds what could not be loaded safely.
            Fenced: a newer generation has taken over; nothing was changed.
        """
        self.wait()
        return self._save(state, step=step, world_size=world_size)

    def save_async(self, state: Any, *, step: int, world_size: int = 1) -> None:
        """Copy ``state`` to host memory now, and do the rest of ``save`` in a thread.

        ``state`` may be changed as soon as this returns. One save is under way at a time: this waits for the
        one before (see ``is_saving``). What a save raises is raised by the next call of ``check``, ``wait``,
        ``save`` or this, in that thread's stead.
        """
        self.wait()
        self._writer.start(partial(self._save, self._staged(state), step=step, world_size=world_size))

    @property
    def is_saving(self) -> bool:
        """Whether a ``save_async`` is under way."""
        return self._writer.is_busy

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save under way, if any; False if that takes longer. Raises what it raised, as ``save``."""
        return self._writer.wait(timeout_s)

    def check(self) -> None:
        """Raise what a ``save_async`` that has ended raised, without waiting for one that has not."""
        self._writer.check()

    @contextmanager
    def receiving(self, manifest: Manifest) -> Iterator[HashingFile]:
        """A file to write another node's payload to, committed at the block's end if it is what it should be.

        Else that is logged as a warning. Writing to it never raises, so that a disk that is full on one node
        does not keep it from what all nodes do together.
        """
        with ExitStack() as stack:
            try:
                self.fence.check(self._own_generation())
                self._make_folder()
                temporary, file = stack.enter_context(written_beside(self.folder))
                payload = HashingFile(file)
            except OSError as error:
                payload = HashingFile(io.BytesIO(), error)
            yield payload
            with self._or_warn(f"step {manifest.step}, sent by another node"):
                payload.finish()
                if payload.sha256 != manifest.sha256[manifest.payload]:
                    raise OSError("what was sent has another SHA-256 than its manifest says")
                self._place(manifest, temporary, file)

    def manifests(self) -> list[Manifest]:
        """What is committed here, newest first, without a look at the payloads; not what a newer nodekit wrote.

        Raises:
            OSError: the folder or a manifest cannot be read, so that nobody knows what is here.
        """
        found = []
        for name in self._listed():
            try:
                found.append(self._manifest_in(name))
            except FileNotFoundError:  # another process has removed it since
                pass
            except (NewerKit, _Damaged) as error:
                self._reject(name, error)
        return found

    def load(self, but: Collection[tuple[int, int]] = ()) -> Loaded | None:
        """The newest good one, its state on the CPU; None if there is none, and no trace of any.

        Damaged ones are logged and passed over, and those whose age is in ``but``. What cannot be read is tried again
        for some seconds.

        Raises:
            NoneLoads: there are some, or nobody can tell, and none can be loaded.
            NewerKit: the newest was written by a newer nodekit.
        """
        found = self.look(but)
        check_loss([found], found.loaded.manifest.age if found.loaded else None)
        return found.loaded

    def look(self, but: Collection[tuple[int, int]] = (), *, expected: str = "") -> Found:
        """The newest good one, and what stood in the way of newer ones.

        Args:
            but: ages that are passed over.
            expected: what is known to have been committed here, in words: an empty folder is then no answer.
        """
        until_s = time.monotonic() + commit.RETRY_S
        problems: list[str] = []
        newer_kit = None
        try:
            names = retried(partial(self._listed, expected), until_s)
        except OSError as error:
            return Found(problems=(f"{self.folder}: {error}",))
        for name in names:
            if age_of(name) in but:
                continue
            try:
                return Found(retried(partial(self._load, name), until_s), tuple(problems), newer_kit)
            except FileNotFoundError:  # another process has removed it since
                pass
            except NewerKit as error:
                newer_kit = newer_kit or (age_of(name), f"{self.folder / name}: {error}")
                self._reject(name, error)
            except (_Damaged, OSError) as error:
                problems.append(f"{self.folder / name}: {error}")
                self._reject(name, error)
        return Found(None, tuple(problems), newer_kit)

    def read_age(self, age: tuple[int, int]) -> Loaded | None:
        """The one of this (generation, step), if it is here and good.

        Of a sharded one whose tensors are left, only what is read is verified: ``load`` has seen to the others, on
        this node's first rank.
        """
        name = "g{:04d}-s{:09d}.json".format(*age)
        try:
            return retried(partial(self._load, name, in_part=True))
        except FileNotFoundError:
            return None
        except (NewerKit, _Damaged, OSError) as error:
            self._reject(name, error)
            return None

    def _names(self) -> list[str]:
        """What is in the folder; nothing if there is no folder.

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

    def _manifest_in(self, name: str) -> Manifest:
        text = (self.folder / name).read_text()
        try:
            return Manifest.of(text, name)
        except NewerKit:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise _Damaged(f"its manifest is damaged ({error})") from error

    def _load(self, name: str, *, in_part: bool = False) -> Loaded:
        manifest = self._manifest_in(name)
        path = self.folder / manifest.payload
        try:
            if manifest.is_sharded:
                return self._read_shards(manifest, path, in_part=in_part and self.leave_shards)
            with path.open("rb") as file:
                self._verify(manifest, manifest.payload, file)
                file.seek(0)
                return Loaded(load_payload(file), manifest, str(path))
        except commit.NOT_FOUND as error:
            raise _Damaged(str(error)) from error

    def _read_shards(self, manifest: Manifest, path: Path, *, in_part: bool) -> Loaded:
        wanted: Iterable[str] = [f"{path.name}/{name}" for name in SMALL] if in_part else manifest.sha256

        def verify(name: str) -> None:
            with (self.folder / name).open("rb") as file:
                self._verify(manifest, name, file)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing takes a core each
            list(pool.map(verify, wanted))
        with (path / REST).open("rb") as file:
            rest = load_payload(file)
        if self.leave_shards:
            return Loaded(rest, manifest, str(path), path)
        return Loaded(assemble(rest, read_whole(path)), manifest, str(path))

    def _verify(self, manifest: Manifest, name: str, file: BinaryIO) -> None:
        what = name.partition("/")[2] or "its payload"
        wanted_bytes, size_bytes = manifest.size_bytes[name], os.fstat(file.fileno()).st_size
        if size_bytes != wanted_bytes:
            raise _Damaged(f"{what} has {size_bytes} bytes of {wanted_bytes}")
        digest = hashlib.sha256()
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != manifest.sha256[name]:
            raise _Damaged(f"{what}'s SHA-256 is another than its manifest's")

    def _reject(self, name: str, error: Exception) -> None:
        """Say why a snapshot is passed over; what is damaged is removed at the next save."""
        log.warning("snapshot %s is passed over: %s", self.folder / name, error)
        if isinstance(error, _Damaged):
            self._damaged.add(name)

    @contextmanager
    def _or_warn(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("no snapshot of %s in %s, and going on without: %s", what, self.folder, error)

    def _own_generation(self) -> int:
        if self.generation is None:
            self.generation = max([self.fence.read(), *(age_of(name)[0] for name in self._listed())])
        return self.generation

    def _staged(self, state: Any) -> Any:
        return self._host_copy.take(state)

    def _save(self, state: Any, *, step: int, world_size: int) -> Manifest | None:
        with self._or_warn(f"step {step}"):
            self.num_failed += 1
            manifest = self._commit(state, step=step, world_size=world_size)
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

    def _commit(self, state: Any, *, step: int, world_size: int) -> Manifest:
        generation = self._own_generation()
        self.fence.check(generation)
        self._make_folder()
        with written_beside(self.folder) as (temporary, file):
            payload = self._write(state, file, temporary)
            name = f"g{generation:04d}-s{step:09d}-{payload.sha256[:16]}.pt"
            files = {name: (payload.sha256, payload.size_bytes)}
            manifest = self._manifest(files, step=step, world_size=world_size)
            self._place(manifest, temporary, file)
        return manifest

    def _write(self, state: Any, file: BinaryIO, path: Path) -> HashingFile:
        payload = save_payload(state, file)
        self._refuse_what_cannot_be_loaded(path)
        return payload

    def _manifest(self, files: Mapping[str, tuple[str, int]], *, step: int, world_size: int) -> Manifest:
        return Manifest(
            generation=self._own_generation(),
            step=step,
            world_size=world_size,
            sha256={name: sha256 for name, (sha256, _) in files.items()},
            size_bytes={name: size_bytes for name, (_, size_bytes) in files.items()},
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        )

    def _place(self, manifest: Manifest, payload: Path, file: BinaryIO) -> None:
        """Make a whole payload a snapshot."""
        place(payload, file, manifest.payload)
        self._announce(manifest)

    def _announce(self, manifest: Manifest) -> None:
        """Commit what is on the disk, if this generation still may, and remove what is too old."""
        generation = self._own_generation()
        self.fence.raise_to(generation)
        with written_beside(self.folder) as (temporary, beside):
            beside.write(json.dumps(asdict(manifest), indent=1).encode())
            place(temporary, beside, manifest.name, last_word=partial(self.fence.check, generation))
        self._damaged.discard(manifest.name)
        self._prune(manifest)

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_leftovers()

    def _refuse_what_cannot_be_loaded(self, payload: Path) -> None:
        """Once: what only an unsafe pickle could bring back must fail now, not when it is needed."""
        if not self._is_known_loadable and (unsafe := get_unsafe_globals_in_checkpoint(payload)):
            raise ValueError(f"a snapshot holds tensors and plain python values, not {', '.join(unsafe)}")
        self._is_known_loadable = True

    def _prune(self, committed: Manifest) -> None:
        """Remove what is damaged and all but the newest ``keep``; never what was just committed."""
        with self._clearing():
            good = [manifest.name for manifest in self.manifests() if manifest.name not in self._damaged]
            for name in {*good[self.keep :], *self._damaged} - {committed.name}:
                (self.folder / name).unlink(missing_ok=True)
                self._damaged.discard(name)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what a killed save left: temporary files, and payloads that no manifest names.

        Not those of newer generations: between payload and manifest of their saves there is a moment too. And
        nothing where not every manifest could be read, nor what a manifest belongs to that says nothing.
        """
        with self._clearing():
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
                if is_left and path.is_dir():
                    shutil.rmtree(path)
                elif is_left or TEMPORARY.fullmatch(name):
                    path.unlink(missing_ok=True)

    @contextmanager
    def _clearing(self) -> Iterator[None]:
        """Around removing: what is committed is so whether or not that can be done now."""
        try:
            yield
        except OSError as error:
            log.warning("cannot clear up %s, which is put off to the next save: %s", self.folder, error)
