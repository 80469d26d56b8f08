"""The manifest of a committed snapshot, its verification, and the loading of its payload."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from nodekit.training.errors import refuse_unsafe
from nodekit.training.process.kept import Made
from nodekit.training.snapshots.files.commit import HashingFile
from nodekit.training.snapshots.hostcopy import is_in_one_piece, map_tensors

MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)
"""Matches names of manifests."""
PAYLOAD = re.compile(r"(?P<stem>g(?P<generation>\d{4,})-s\d{9,})-[0-9a-f]{16}\.(?:pt|dcp)", re.ASCII)
"""Matches names of payloads, which end in a hash, since saving a step again must not damage its first snapshot.

The payload of a whole snapshot is a file, that of a sharded one a folder (see ``sharded``).
"""

_FILE = re.compile(rf"{PAYLOAD.pattern}(?:(?<=\.dcp)/(?:__\d+_\d+\.distcp|\.metadata|rest\.pt))?", re.ASCII)

_SMALL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20


class Damaged(Exception):
    """A snapshot does not match its manifest, or the manifest is invalid: reading it again would not help."""


class Elsewhere(Exception):
    """A sharded snapshot is only partly in this folder: other nodes have the rest."""


class Unloadable(Exception):
    """This torch refuses to load an intact snapshot: the version that wrote it may load it."""


class NewerKit(ValueError):
    """A newer nodekit wrote the snapshot: it is neither loaded nor removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed snapshot and its files."""

    generation: int
    """How often the job had been started anew."""
    step: int
    """Optimizer steps done."""
    world_size: int
    """The number of ranks that trained the step."""
    sha256: dict[str, str]
    """File name → SHA-256, in hex; files of a sharded snapshot as ``folder/name``."""
    size_bytes: dict[str, int]
    """File name → size."""
    saved_at: str
    """The time of the save, ISO 8601, UTC; for people only."""
    kept_by: dict[str, list[str]] = field(default_factory=dict)
    """File name → the nodes that keep the file, as text for people; empty if every node's folder has all files."""
    attempt: str = ""
    """The number of the attempt that made the step (`Made`); "" if the ranks have not drawn a number."""

    @classmethod
    def read(cls, folder: Path, name: str) -> "Manifest":
        """Read the file ``name`` in ``folder``.

        Raises:
            OSError: the file cannot be read, and may be intact.
            NewerKit: see ``of``.
            Damaged: the content is invalid.
        """
        data = (folder / name).read_bytes()
        try:
            return cls.of(data.decode(), name)  # decode within the try: a flipped bit may be invalid UTF-8
        except NewerKit:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise Damaged(f"its manifest is damaged ({error})") from error

    @classmethod
    def of(cls, text: str, name: str) -> "Manifest":
        """Parse the content of the file ``name``.

        Raises:
            NewerKit: the content has keys that this version does not know.
            ValueError, TypeError, AttributeError: the content is damaged.
        """
        values = json.loads(text)
        unknown = sorted(values.keys() - {each.name for each in fields(cls)})
        # If a required key is missing, a flipped bit has turned its name into the unknown one.
        if unknown and values.keys() >= _REQUIRED:
            raise NewerKit(f"a newer nodekit wrote it (unknown: {', '.join(unknown)})")
        manifest = cls(**values)
        payloads = {each.partition("/")[0] for each in manifest.sha256}
        if manifest.name != name or len(payloads) != 1 or not all(map(_FILE.fullmatch, manifest.sha256)):
            raise ValueError(f"it is about {manifest.name} and {', '.join(sorted(payloads)) or 'no file'}")
        if manifest.sha256.keys() != manifest.size_bytes.keys():
            raise ValueError("some files have a size, and others a SHA-256")
        if not manifest.kept_by.keys() <= manifest.sha256.keys():
            raise ValueError("it names nodes for files that it lacks")
        return manifest

    def to_json(self) -> str:
        """Return the file's content; empty ``kept_by`` and ``attempt`` are left out, so that older versions read it."""
        values = asdict(self)
        for name in ("kept_by", "attempt"):
            if not values[name]:
                del values[name]
        return json.dumps(values, indent=1)

    @property
    def age(self) -> tuple[int, int]:
        """(generation, step); a greater one is newer."""
        return self.generation, self.step

    @property
    def made(self) -> Made:
        """The identity of the snapshot's state."""
        return Made(self.age, self.attempt)

    @property
    def stem(self) -> str:
        """The beginning of the names of the snapshot's files."""
        return stem_of(self.generation, self.step)

    @property
    def name(self) -> str:
        """The name of the manifest's file."""
        return f"{self.stem}.json"

    @property
    def payload(self) -> str:
        """The name of the file with the state, or of the folder with its shards."""
        (name,) = {name.partition("/")[0] for name in self.sha256}
        return name

    @property
    def parts(self) -> dict[str, tuple[str, int]]:
        """Names of the files in a sharded snapshot's folder → SHA-256 and size in bytes."""
        return {
            name.partition("/")[2]: (sha256, self.size_bytes[name]) for name, sha256 in self.sha256.items()
        }

    def tell(self, names: Iterable[str]) -> str:
        """Return, as text, these files of a sharded snapshot and the nodes that keep them."""

        def nodes(name: str) -> str:
            return f" (kept by {' and '.join(self.kept_by[name])})" if name in self.kept_by else ""

        return ", ".join(f"{name.partition('/')[2]}{nodes(name)}" for name in names)

    @property
    def is_sharded(self) -> bool:
        """Whether the payload is a folder of shards."""
        return self.payload.endswith(".dcp")


_REQUIRED = {each.name for each in fields(Manifest) if each.default is each.default_factory is MISSING}


def verify(folder: Path, manifest: Manifest, name: str) -> None:
    """Check that the file ``name`` in ``folder`` has the manifest's size and SHA-256.

    Raises:
        Damaged: the file has another size or SHA-256.
        OSError: the file cannot be read.
    """
    what = name.partition("/")[2] or "its payload"
    with (folder / name).open("rb") as file:
        wanted_bytes, size_bytes = manifest.size_bytes[name], os.fstat(file.fileno()).st_size
        if size_bytes != wanted_bytes:
            raise Damaged(f"{what} has {size_bytes} bytes of {wanted_bytes}")
        digest = hashlib.sha256()
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != manifest.sha256[name]:
        raise Damaged(f"{what}'s SHA-256 is another than its manifest's")


def verify_parts(folder: Path, manifest: Manifest) -> None:
    """As ``verify``, for all files of a sharded snapshot.

    Raises:
        Elsewhere: some files are not in this folder, and other nodes keep them.
    """
    names = {path.name for path in (folder / manifest.payload).iterdir()} if manifest.kept_by else set()
    if missing := [name for name in manifest.kept_by if name.partition("/")[2] not in names]:
        raise Elsewhere(
            f"this folder has only a part of it, and not {manifest.tell(missing)}: copy the others' "
            f"{manifest.payload} into this one"
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing takes a core each
        list(pool.map(partial(verify, folder, manifest), manifest.sha256))


def stem_of(generation: int, step: int) -> str:
    """Return the beginning of the names of a snapshot's files."""
    return f"g{generation:04d}-s{step:09d}"


def age_of(name: str) -> tuple[int, int]:
    """Return (generation, step) from the name of a manifest."""
    generation, step = name.removesuffix(".json").split("-")
    return int(generation[1:]), int(step[1:])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A snapshot's state, and where it was loaded from."""

    state: Any
    manifest: Manifest
    source: str
    """The file, or the rank that sent the state, as text for people."""
    shards: Path | None = None
    """The folder with the tensors that ``state`` lacks, with ``leave_shards``; otherwise None."""
    fetch: Callable[[Collection[str]], None] | None = None
    """Copies files of these names from other nodes to ``shards``; every rank calls it."""


def save_payload(state: Any, file: BinaryIO) -> HashingFile:
    """Write a state for ``load_payload``, by ``torch.save``, and return the finished file with its hash and size.

    Raises:
        OSError: the file cannot be written (torch.save alone would raise a misleading RuntimeError).
    """
    payload = HashingFile(file)
    torch.save(state, cast(IO[bytes], payload))
    payload.finish()
    return payload


def load_payload(file: BinaryIO) -> Any:
    """Load a payload onto the CPU; code in its pickle is never run.

    Raises:
        TrainingError: this torch is too old for that (see ``refuse_unsafe``).
    """
    refuse_unsafe(torch.__version__)
    return torch.load(file, map_location="cpu", weights_only=True)


def map_payload(path: Path) -> Any:
    """As ``load_payload``, but map large tensors from the file, into memory that the processes of a node share.

    The disk space of a removed file is freed only when no such tensor is left.
    """
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    # Copy small tensors, which may be kept for long: an optimizer keeps its loaded step counters themselves.
    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if is_in_one_piece(tensor) and tensor.nbytes < _SMALL_BYTES else tensor

    return map_tensors(own, state)
