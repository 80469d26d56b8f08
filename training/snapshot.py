"""Snapshots on this node's disk: committed so that no kill can lose one, verified before they are used.

A snapshot is a payload (``torch.save``) and a manifest (JSON) that names it with its SHA-256. The payload is
written beside, synced, renamed, the folder synced; only then, the same way, the manifest. What no manifest
names does not exist.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from nodekit.training.commit import TEMPORARY, HashingFile, place, written_beside

log = logging.getLogger("nodekit.training")

_MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)
_PAYLOAD = re.compile(r"g\d{4,}-s\d{9,}-[0-9a-f]{16}\.pt", re.ASCII)
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a committed snapshot is and consists of."""

    generation: int
    """How often the job had been started anew."""
    step: int
    """Optimizer steps done."""
    world_size: int
    """How many ranks there were."""
    sha256: dict[str, str]
    """File name → SHA-256, in hex."""
    size_bytes: dict[str, int]
    """File name → size."""
    saved_at: str
    """When, ISO 8601, UTC; for people, nothing is decided by it."""

    @property
    def age(self) -> tuple[int, int]:
        """(generation, step): the greater is the newer."""
        return self.generation, self.step

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"g{self.generation:04d}-s{self.step:09d}.json"

    @property
    def payload(self) -> str:
        """The name of the file with the state."""
        (name,) = self.sha256
        return name


@dataclass(frozen=True, slots=True)
class Loaded:
    """A snapshot's state, and where it is from."""

    state: Any
    manifest: Manifest
    source: str
    """For people: the file, or which rank sent it."""


class Snapshots:
    """The snapshots in one folder, which belongs to one node: only its first local rank may save there.

    ::

        snapshots = Snapshots(world.snapshot_dir, generation=world.generation)
        if found := newest_of_all(snapshots, world):
            model.load_state_dict(found.state["model"])
        ...
        if world.is_first_on_node:
            snapshots.save({"model": model.state_dict()}, step=step, world_size=world.world_size)
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, generation: int | None = None
    ) -> None:
        """Nothing is read or written yet.

        Args:
            folder: made when first saved to.
            keep: how many to keep, 2 or more: the last one may turn out damaged.
            generation: how often the job was started anew; None: that of the newest snapshot here, or 0.
        """
        if keep < 2:
            raise ValueError(
                f"keep is {keep}: at least 2 was wanted, since the last one may turn out damaged"
            )
        self.folder = Path(folder)
        self.keep = keep
        self.generation = generation
        self._damaged: set[str] = set()  # names of manifests that do not hold what they say
        self._is_known_loadable = False

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """Commit ``state`` (tensors and plain python values), and remove all but the newest ``keep``.

        None if the folder cannot be written (full, read-only): that is logged as a warning, and what was
        there is kept.

        Raises:
            ValueError: ``state`` holds what could not be loaded safely.
        """
        if self.generation is None:
            self.generation = max((manifest.generation for manifest in self.manifests()), default=0)
        generation = self.generation
        with self._or_warn(f"step {step}"):
            return self._commit(
                lambda file: torch.save(state, cast(IO[bytes], file)),
                generation=generation,
                step=step,
                world_size=world_size,
            )
        return None

    def adopt(self, manifest: Manifest, data: bytes | bytearray) -> bool:
        """Commit another node's snapshot, whose payload is ``data``; False, with a warning, if that fails."""
        with self._or_warn(f"step {manifest.step}, sent by another node"):
            step, world_size = manifest.step, manifest.world_size
            self._commit(
                lambda file: file.write(data),
                generation=manifest.generation,
                step=step,
                world_size=world_size,
            )
            return True
        return False

    def manifests(self) -> list[Manifest]:
        """What is committed here, newest first, without a look at the payloads."""
        try:
            names = [entry.name for entry in self.folder.iterdir() if _MANIFEST.fullmatch(entry.name)]
        except OSError:  # not there yet, or not readable: nothing to go on from
            return []
        found = []
        for name in names:
            try:
                manifest = Manifest(**json.loads((self.folder / name).read_text()))
                if manifest.name != name or not _PAYLOAD.fullmatch(manifest.payload):
                    raise ValueError(f"it is about {manifest.name} and {manifest.payload}")
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
        """The one of this (generation, step), if it is here and good."""
        return next(filter(None, (self._read(each) for each in self.manifests() if each.age == age)), None)

    def _read(self, manifest: Manifest) -> Loaded | None:
        path = self.folder / manifest.payload
        try:
            with path.open("rb") as file:
                if not self._is_good(manifest, file):
                    return None
                file.seek(0)
                return Loaded(load_payload(file), manifest, str(path))
        except OSError as error:
            self._reject(manifest.name, str(error), for_good=isinstance(error, FileNotFoundError))
            return None

    def _is_good(self, manifest: Manifest, file: BinaryIO) -> bool:
        wanted_bytes, size_bytes = manifest.size_bytes[manifest.payload], os.fstat(file.fileno()).st_size
        if size_bytes != wanted_bytes:
            self._reject(
                manifest.name, f"its payload has {size_bytes} bytes of {wanted_bytes}", for_good=True
            )
            return False
        digest = hashlib.sha256()
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != manifest.sha256[manifest.payload]:
            self._reject(manifest.name, "its payload's SHA-256 is another than its manifest's", for_good=True)
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

    def _commit(
        self, write: Callable[[HashingFile], object], *, generation: int, step: int, world_size: int
    ) -> Manifest:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_leftovers()
        stem = f"g{generation:04d}-s{step:09d}"
        with written_beside(self.folder) as (temporary, file):
            payload = HashingFile(file)
            write(payload)
            payload.finish()
            self._refuse_what_cannot_be_loaded(temporary)
            # A name for each content: saving a step again must not damage the first one on the way.
            name = f"{stem}-{payload.sha256[:16]}.pt"
            place(temporary, file, name)
        manifest = Manifest(
            generation=generation,
            step=step,
            world_size=world_size,
            sha256={name: payload.sha256},
            size_bytes={name: payload.size_bytes},
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        )
        with written_beside(self.folder) as (temporary, file):
            file.write(json.dumps(asdict(manifest), indent=1).encode())
            place(temporary, file, manifest.name)
        self._damaged.discard(manifest.name)
        self._prune(manifest)
        return manifest

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
        """Remove what a killed save left: temporary files, and payloads that no manifest names."""
        try:
            named = {manifest.payload for manifest in self.manifests()}
            for entry in list(self.folder.iterdir()):
                payload_of_none = _PAYLOAD.fullmatch(entry.name) and entry.name not in named
                if payload_of_none or TEMPORARY.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot clear up %s: %s", self.folder, error)


def load_payload(file: BinaryIO) -> Any:
    """What ``Snapshots.save`` was given; never runs what a pickle might hold."""
    return torch.load(file, map_location="cpu", weights_only=True)
