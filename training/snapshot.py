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
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch.serialization import get_unsafe_globals_in_checkpoint

from nodekit.training.background import Background
from nodekit.training.commit import TEMPORARY, HashingFile, place, written_beside
from nodekit.training.fence import Fence
from nodekit.training.hostcopy import HostCopy
from nodekit.training.manifest import MANIFEST, PAYLOAD, Loaded, Manifest, load_payload, save_payload
from nodekit.training.shards import REST, SMALL, assemble, read_whole

log = logging.getLogger("nodekit.training")

_BLOCK_BYTES = 1 << 20


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
        """What is committed here, newest first, without a look at the payloads."""
        try:
            names = [entry.name for entry in self.folder.iterdir() if MANIFEST.fullmatch(entry.name)]
        except OSError:  # not there yet, or not readable: nothing to go on from
            return []
        found = []
        for name in names:
            try:
                manifest = Manifest(**json.loads((self.folder / name).read_text()))
                manifest.check(name)
                found.append(manifest)
            except (ValueError, TypeError, AttributeError) as error:
                self._reject(name, f"its manifest is damaged ({error})", for_good=True)
            except OSError as error:
                self._reject(name, str(error), for_good=False)
        return sorted(found, key=lambda manifest: manifest.age, reverse=True)

    def load(self, but: Collection[tuple[int, int]] = ()) -> Loaded | None:
        """The newest good one, its state on the CPU; None if there is none.

        Damaged ones are logged and passed over, and those whose age is in ``but``.
        """
        return next(
            filter(None, (self._read(each) for each in self.manifests() if each.age not in but)), None
        )

    def read_age(self, age: tuple[int, int]) -> Loaded | None:
        """The one of this (generation, step), if it is here and good.

        Of a sharded one whose tensors are left, only what is read is verified: ``load`` has seen to the others, on
        this node's first rank.
        """
        found = (self._read(each, in_part=True) for each in self.manifests() if each.age == age)
        return next(filter(None, found), None)

    def _read(self, manifest: Manifest, *, in_part: bool = False) -> Loaded | None:
        path = self.folder / manifest.payload
        try:
            if manifest.is_sharded:
                return self._read_shards(manifest, path, in_part=in_part and self.leave_shards)
            with path.open("rb") as file:
                if not self._is_good(manifest, manifest.payload, file):
                    return None
                file.seek(0)
                return Loaded(load_payload(file), manifest, str(path))
        except OSError as error:
            self._reject(manifest.name, str(error), for_good=isinstance(error, FileNotFoundError))
            return None

    def _read_shards(self, manifest: Manifest, path: Path, *, in_part: bool) -> Loaded | None:
        wanted: Iterable[str] = [f"{path.name}/{name}" for name in SMALL] if in_part else manifest.sha256

        def is_good(name: str) -> bool:
            with (self.folder / name).open("rb") as file:
                return self._is_good(manifest, name, file)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing takes a core each
            if not all(list(pool.map(is_good, wanted))):
                return None
        with (path / REST).open("rb") as file:
            rest = load_payload(file)
        if self.leave_shards:
            return Loaded(rest, manifest, str(path), path)
        return Loaded(assemble(rest, read_whole(path)), manifest, str(path))

    def _is_good(self, manifest: Manifest, name: str, file: BinaryIO) -> bool:
        what = name.partition("/")[2] or "its payload"
        wanted_bytes, size_bytes = manifest.size_bytes[name], os.fstat(file.fileno()).st_size
        if size_bytes != wanted_bytes:
            self._reject(manifest.name, f"{what} has {size_bytes} bytes of {wanted_bytes}", for_good=True)
            return False
        digest = hashlib.sha256()
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != manifest.sha256[name]:
            self._reject(manifest.name, f"{what}'s SHA-256 is another than its manifest's", for_good=True)
            return False
        return True

    def _reject(self, name: str, reason: str, *, for_good: bool) -> None:
        """Say why a snapshot is passed over; what is damaged for good is removed at the next save."""
        log.warning("snapshot %s is passed over: %s", self.folder / name, reason)
        if for_good:
            self._damaged.add(name)

    @contextmanager
    def _or_warn(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("no snapshot of %s in %s, and going on without: %s", what, self.folder, error)

    def _own_generation(self) -> int:
        if self.generation is None:
            found = [manifest.generation for manifest in self.manifests()]
            self.generation = max([self.fence.read(), *found])
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
        good = [manifest.name for manifest in self.manifests() if manifest.name not in self._damaged]
        for name in {*good[self.keep :], *self._damaged} - {committed.name}:
            (self.folder / name).unlink(missing_ok=True)
            self._damaged.discard(name)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what a killed save left: temporary files, and payloads that no manifest names.

        Not those of newer generations: between payload and manifest of their saves there is a moment too.
        """
        try:
            named = {manifest.payload for manifest in self.manifests()}
            for entry in list(self.folder.iterdir()):
                payload = PAYLOAD.fullmatch(entry.name)
                is_left = payload and entry.name not in named and int(payload[1]) <= self._own_generation()
                if is_left and entry.is_dir():
                    shutil.rmtree(entry)
                elif is_left or TEMPORARY.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot clear up %s: %s", self.folder, error)
