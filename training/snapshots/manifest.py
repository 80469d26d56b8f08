"""What a committed snapshot is and consists of, as its manifest says and as it is loaded."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from nodekit.training.snapshots.commit import HashingFile

MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)
"""Names of manifests."""
PAYLOAD = re.compile(r"(?P<stem>g(?P<generation>\d{4,})-s\d{9,})-[0-9a-f]{16}\.(?:pt|dcp)", re.ASCII)
"""Names of payloads: one for each content, since saving a step again must not damage the first one on the way.

A whole one is a file, a sharded one a folder (see ``sharded``).
"""

_FILE = re.compile(rf"{PAYLOAD.pattern}(?:(?<=\.dcp)/(?:__\d+_\d+\.distcp|\.metadata|rest\.pt))?", re.ASCII)


class NewerKit(ValueError):
    """A snapshot that a newer nodekit wrote: it is neither loaded nor removed."""


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
    """File name, below a sharded one's folder with that before a slash → SHA-256, in hex."""
    size_bytes: dict[str, int]
    """File name → size."""
    saved_at: str
    """When, ISO 8601, UTC; for people, nothing is decided by it."""

    @classmethod
    def of(cls, text: str, name: str) -> "Manifest":
        """From what the file ``name`` holds.

        Raises:
            NewerKit: it has keys that this version does not know.
            ValueError, TypeError, AttributeError: it is damaged.
        """
        values = json.loads(text)
        if unknown := sorted(values.keys() - {each.name for each in fields(cls)}):
            raise NewerKit(f"a newer nodekit wrote it (unknown: {', '.join(unknown)})")
        manifest = cls(**values)
        manifest._check(name)
        return manifest

    def _check(self, name: str) -> None:
        if self.name != name or not all(map(_FILE.fullmatch, self.sha256)):
            raise ValueError(f"it is about {self.name} and {self.payload}")
        if self.sha256.keys() != self.size_bytes.keys():
            raise ValueError("some files have a size, and others a SHA-256")

    @property
    def age(self) -> tuple[int, int]:
        """(generation, step): the greater is the newer."""
        return self.generation, self.step

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"g{self.generation:04d}-s{self.step:09d}"

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.stem}.json"

    @property
    def payload(self) -> str:
        """The name of the file with the state, or of the folder with its parts."""
        (name,) = {name.partition("/")[0] for name in self.sha256}
        return name

    @property
    def is_sharded(self) -> bool:
        """Whether it is a folder."""
        return self.payload.endswith(".dcp")


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
    """The folder with what ``state`` lacks, where that was left to be read in parts."""


def save_payload(state: Any, file: BinaryIO) -> HashingFile:
    """Write what ``load_payload`` reads, by ``torch.save``; its hash and size.

    Raises:
        OSError: it cannot be written (torch.save by itself raises a RuntimeError of another matter).
    """
    payload = HashingFile(file)
    torch.save(state, cast(IO[bytes], payload))
    payload.finish()
    return payload


def load_payload(file: BinaryIO) -> Any:
    """What ``Snapshots.save`` was given; never runs what a pickle might hold."""
    return torch.load(file, map_location="cpu", weights_only=True)
