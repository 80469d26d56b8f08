"""The manifest of a committed snapshot, and the snapshot as it is loaded."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from nodekit.training.errors import refuse_unsafe
from nodekit.training.snapshots.commit import HashingFile
from nodekit.training.snapshots.hostcopy import map_tensors

MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)
"""Names of manifests."""
PAYLOAD = re.compile(r"(?P<stem>g(?P<generation>\d{4,})-s\d{9,})-[0-9a-f]{16}\.(?:pt|dcp)", re.ASCII)
"""Names of payloads: with a hash, since saving a step again must not damage the first one meanwhile.

A whole one is a file, a sharded one a folder (see ``sharded``).
"""

_FILE = re.compile(rf"{PAYLOAD.pattern}(?:(?<=\.dcp)/(?:__\d+_\d+\.distcp|\.metadata|rest\.pt))?", re.ASCII)

_SMALL_BYTES = 1 << 20


class NewerKit(ValueError):
    """A snapshot that a newer nodekit wrote: it is neither loaded nor removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed snapshot and its files."""

    generation: int
    """How often the job had been started again."""
    step: int
    """Optimizer steps done."""
    world_size: int
    """How many ranks there were."""
    sha256: dict[str, str]
    """File name → SHA-256, in hex; files of a sharded one as ``folder/name``."""
    size_bytes: dict[str, int]
    """File name → size."""
    saved_at: str
    """When, ISO 8601, UTC; for people only."""

    @classmethod
    def of(cls, text: str, name: str) -> "Manifest":
        """Parse the content of the file ``name``.

        Raises:
            NewerKit: it has keys that this version does not know.
            ValueError, TypeError, AttributeError: it is damaged.
        """
        values = json.loads(text)
        if unknown := sorted(values.keys() - {each.name for each in fields(cls)}):
            raise NewerKit(f"a newer nodekit wrote it (unknown: {', '.join(unknown)})")
        manifest = cls(**values)
        if manifest.name != name or not all(map(_FILE.fullmatch, manifest.sha256)):
            raise ValueError(f"it is about {manifest.name} and {manifest.payload}")
        if manifest.sha256.keys() != manifest.size_bytes.keys():
            raise ValueError("some files have a size, and others a SHA-256")
        return manifest

    @property
    def age(self) -> tuple[int, int]:
        """(generation, step): the greater is the newer."""
        return self.generation, self.step

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return stem_of(self.generation, self.step)

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.stem}.json"

    @property
    def payload(self) -> str:
        """The name of the file with the state, or of the folder with its shards."""
        (name,) = {name.partition("/")[0] for name in self.sha256}
        return name

    @property
    def is_sharded(self) -> bool:
        """Whether it is a folder."""
        return self.payload.endswith(".dcp")


def stem_of(generation: int, step: int) -> str:
    """What the names of a snapshot's files begin with."""
    return f"g{generation:04d}-s{step:09d}"


def age_of(name: str) -> tuple[int, int]:
    """(generation, step), from the name of a manifest."""
    generation, step = name.removesuffix(".json").split("-")
    return int(generation[1:]), int(step[1:])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A snapshot's state, and where it is from."""

    state: Any
    manifest: Manifest
    source: str
    """For people: the file, or which rank sent it."""
    shards: Path | None = None
    """The folder with the tensors that ``state`` lacks, with ``leave_shards``."""


def save_payload(state: Any, file: BinaryIO) -> HashingFile:
    """Write what ``load_payload`` reads, by ``torch.save``; its hash and size.

    Raises:
        OSError: it cannot be written (torch.save would raise a RuntimeError about something else).
    """
    payload = HashingFile(file)
    torch.save(state, cast(IO[bytes], payload))
    payload.finish()
    return payload


def load_payload(file: BinaryIO) -> Any:
    """Load a payload; never runs code from a pickle."""
    refuse_unsafe(torch.__version__)
    return torch.load(file, map_location="cpu", weights_only=True)


def map_payload(path: Path) -> Any:
    """As ``load_payload``, but large tensors stay in the file, and in memory that the processes of a node share.

    The disk gets the room of a removed file back when no such tensor is left.
    """
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # Small ones may be kept for long: an optimizer keeps its count of steps as it is loaded.
    return map_tensors(lambda each: each.clone() if each.nbytes < _SMALL_BYTES else each, state)
