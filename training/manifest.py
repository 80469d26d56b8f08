"""What a committed snapshot is and consists of, as its manifest says and as it is loaded."""

import re
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)
"""Names of manifests."""
PAYLOAD = re.compile(r"g(\d{4,})-s\d{9,}-[0-9a-f]{16}\.pt", re.ASCII)
"""Names of payloads: one for each content, since saving a step again must not damage the first one on the way."""


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
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"g{self.generation:04d}-s{self.step:09d}"

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.stem}.json"

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


def load_payload(file: BinaryIO) -> Any:
    """What ``Snapshots.save`` was given; never runs what a pickle might hold."""
    return torch.load(file, map_location="cpu", weights_only=True)
