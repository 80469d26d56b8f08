"""Snapshots on this node's disk: committed so that no kill can lose the newest one, verified before they are used.

A snapshot is a payload (``torch.save``) and a manifest (JSON) that names it with its SHA-256. The payload is
written beside, synced, renamed, the folder synced; only then, the same way, the manifest. What no manifest names
does not exist.
"""

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import torch

log = logging.getLogger("nodekit.training")

_MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)
_PAYLOAD = re.compile(r"g\d{4,}-s\d{9,}-[0-9a-f]{16}\.pt", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)
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

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2, generation: int | None = None) -> None:
        """Nothing is read or written yet.

        Args:
            folder: made when first saved to.
            keep: how many to keep, 2 or more: the last one may turn out damaged.
            generation: how often the job was started anew; None: that of the newest snapshot here, or 0.
        """
        if keep < 2:
            raise ValueError(f"keep is {keep}: at least 2 was wanted, since the last one may turn out damaged")
        self.folder = Path(folder)
        self.keep = keep
        self.generation = generation
        self._damaged: set[str] = set()  # names of manifests that do not hold what they say

    def save(self, state: Any, *, step: int, world_size: int = 1) -> Manifest | None:
        """Commit ``state`` (tensors and plain python values) and remove what is older than the newest ``keep``.

        None if the folder cannot be written (full, read-only): that is logged as a warning, and what was there
        is kept.
        """
        if self.generation is None:
            self.generation = max((manifest.generation for manifest in self.manifests()), default=0)
        generation = self.generation
        with self._or_warn(f"step {step}"):
            return self._commit(
                lambda file: torch.save(state, file), generation=generation, step=step, world_size=world_size
            )
        return None

    def adopt(self, manifest: Manifest, data: memoryview) -> bool:
        """Commit another node's snapshot, ``data`` being its payload; False, with a warning, if that fails."""
        with self._or_warn(f"step {manifest.step}, sent by another node"):
            step, world_size = manifest.step, manifest.world_size
            self._commit(
                lambda file: file.write(data), generation=manifest.generation, step=step, world_size=world_size
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

    def newest(self) -> Manifest | None:
        """The newest one whose payload is what its manifest says; damaged ones are logged and passed over."""
        return next((manifest for manifest in self.manifests() if self.verify(manifest)), None)

    def load(self) -> Loaded | None:
        """The newest good one's state, on the CPU; None if there is none."""
        for manifest in self.manifests():
            if loaded := self.read(manifest):
                return loaded
        return None

    def read(self, manifest: Manifest) -> Loaded | None:
        """This one's state if it is here and good, else None."""
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

    def verify(self, manifest: Manifest) -> bool:
        """Whether the payload is here and is what the manifest says."""
        try:
            with (self.folder / manifest.payload).open("rb") as file:
                return self._is_good(manifest, file)
        except OSError as error:
            self._reject(manifest.name, str(error), for_good=isinstance(error, FileNotFoundError))
            return False

    def _is_good(self, manifest: Manifest, file: BinaryIO) -> bool:
        wanted_bytes, size_bytes = manifest.size_bytes[manifest.payload], os.fstat(file.fileno()).st_size
        if size_bytes != wanted_bytes:
            self._reject(manifest.name, f"its payload has {size_bytes} bytes of {wanted_bytes}", for_good=True)
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
        self, write: Callable[[BinaryIO], object], *, generation: int, step: int, world_size: int
    ) -> Manifest:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_leftovers()
        stem = f"g{generation:04d}-s{step:09d}"
        with self._written_beside() as (temporary, file):
            payload = _HashingFile(file)
            write(payload)  # type: ignore[arg-type]  # torch.save and we only write to it
            payload.finish()
            # A name of its own for each content: saving a step again must not damage the first one on the way.
            name = f"{stem}-{payload.sha256[:16]}.pt"
            self._place(temporary, file, name)
        manifest = Manifest(
            generation=generation,
            step=step,
            world_size=world_size,
            sha256={name: payload.sha256},
            size_bytes={name: payload.size_bytes},
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        )
        with self._written_beside() as (temporary, file):
            file.write(json.dumps(asdict(manifest), indent=1).encode())
            self._place(temporary, file, manifest.name)
        self._damaged.discard(manifest.name)
        self._prune(manifest)
        return manifest

    @contextmanager
    def _written_beside(self) -> Iterator[tuple[Path, BinaryIO]]:
        """A new file, mode 0600, that is removed unless it was placed."""
        temporary = self.folder / f".tmp-{secrets.token_hex(8)}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                yield temporary, file
        finally:
            temporary.unlink(missing_ok=True)

    def _place(self, temporary: Path, file: BinaryIO, name: str) -> None:
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(self.folder / name)
        folder_fd = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)

    def _prune(self, committed: Manifest) -> None:
        """Remove what is damaged and what is older than the newest ``keep``; never what was just committed."""
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
                if payload_of_none or _TEMPORARY.fullmatch(entry.name):
                    entry.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot clear up %s: %s", self.folder, error)


class _HashingFile:
    """Hashes and counts what is written; keeps the first OSError until ``finish``, since torch.save's C++ side
    would replace it by an error of its own.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        self.size_bytes = 0
        self.sha256 = ""

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        if self._error is None:
            try:
                self._file.write(view)
                self._digest.update(view)
            except OSError as error:
                self._error = error
        self.size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        with suppress(OSError):  # comes again in finish
            self._file.flush()

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        self._file.flush()
        self.sha256 = self._digest.hexdigest()


def load_payload(file: BinaryIO) -> Any:
    """What ``Snapshots.save`` was given; never runs what a pickle might hold."""
    return torch.load(file, map_location="cpu", weights_only=True)
