"""Generates a project to send, with a given number of files and bytes in realistic sizes; deterministic by seed."""

from __future__ import annotations

import random
from pathlib import Path

_SUFFIXES = (".py", ".py", ".py", ".md", ".yaml", ".json", ".txt")
_SMALL_BYTES = (6.0, 1.2)  # lognormal: half below 400 × e^2 bytes, a few of a hundred kB
_SMALL_SCALE = 7.4
_BIG_SHARE = 0.8  # share of all bytes: data and weights, which do not compress


def make(folder: Path, *, num_files: int, size_bytes: int, seed: int = 0) -> None:
    """Fill a folder: many small text files in nested packages, and one large binary file in 200."""
    rng = random.Random(seed)
    num_big = max(1, num_files // 200)
    num_small = num_files - num_big
    small = [max(1, int(rng.lognormvariate(*_SMALL_BYTES) * _SMALL_SCALE)) for _ in range(num_small)]
    scale = size_bytes * (1 - _BIG_SHARE) / sum(small)
    small = [max(1, int(size * scale)) for size in small]
    shares = [rng.paretovariate(1.2) for _ in range(num_big)]
    left = size_bytes - sum(small)
    big = [int(left * share / sum(shares)) for share in shares]
    big[0] += left - sum(big)
    words = [rng.randbytes(rng.randint(1, 5)).hex() for _ in range(2000)]
    text = " ".join(rng.choices(words, k=400_000)).replace(" 0", "\n    0").encode()
    for number, size in enumerate(small):
        start = rng.randrange(len(text) - 1)
        data = (text[start:] + text * (1 + size // len(text)))[:size]
        _write(folder / _place(rng) / f"part{number}{rng.choice(_SUFFIXES)}", data)
    for number, size in enumerate(big):
        _write(folder / "data" / f"shard{number:03}.bin", rng.randbytes(size))


def _place(rng: random.Random) -> str:
    return "/".join(f"package{rng.randrange(8)}" for _ in range(rng.randint(1, 3)))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
