"""The random number generators of one rank: python's, numpy's, torch's and the device's."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

from nodekit.training.process.devices import kind_here, module_of


def seed_all(seed: int, rank: int) -> None:
    """Seed this rank's generators; each rank gets other numbers."""
    words = np.random.SeedSequence([seed, rank]).generate_state(2, np.uint64)
    own = _seed_others(int(words[0]), int(words[1]))
    torch.default_generator.manual_seed(own)
    # Not torch.manual_seed: without a GPU, it records the caller's traceback, which takes 2 ms.
    if (kind := kind_here()) != "cpu":
        module_of(kind).manual_seed_all(own)


def seed_step(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Seed this rank's generators for a step, so that its random numbers do not depend on earlier steps.

    A rank that replaces a lost one then draws the same numbers. This takes 10 µs, or 60 between steps, which evict a
    CPU's caches; numpy's SeedSequence would take 80 µs more, torch.manual_seed 160 more.
    """
    words = hashlib.blake2b(b"%d %d %d" % (seed, rank, step), digest_size=16).digest()
    own = _seed_others(int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little"))
    torch.default_generator.manual_seed(own)
    if device.type != "cpu":
        module_of(device.type).manual_seed(own)


def _seed_others(own: int, for_torch: int) -> int:
    """Seed python's and numpy's generators, and return the seed for torch's; both arguments have 64 bits."""
    random.seed(own)
    np.random.seed(own % 2**32)
    return for_torch % 2**63


def capture(device: torch.device) -> dict[str, Any]:
    """Return the generators' state, of types that ``torch.load(weights_only=True)`` accepts."""
    version, words, gauss_next = random.getstate()  # 625 numbers: faster to copy as one tensor
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    keys, pos = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    has_gauss, gauss = numpy_state["has_gauss"], numpy_state["gauss"]
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss_next),
        "numpy": (torch.tensor(keys.tolist(), dtype=torch.int64), int(pos), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "device": module_of(device.type).get_rng_state(device) if device.type != "cpu" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to a state from ``capture``."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss_next))
    keys, pos, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), pos, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        module_of(device.type).set_rng_state(state["device"], device)
