"""Errors that users can fix themselves, the check for a safe torch, and logging to stderr."""

import logging
import re

SAFE_TORCH = (2, 10)
"""The oldest torch whose ``weights_only`` keeps a file from running code (CVE-2025-32434, CVE-2026-24747)."""


class TrainingError(ValueError):
    """An error that the user can fix: a rank reports its message in one line, without a traceback."""


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: ``2.11.0+cu128`` → (2, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def is_safe(torch: str) -> bool:
    """Whether snapshots and weights may be loaded with this version of torch."""
    return release_of(torch) >= SAFE_TORCH


def refuse_unsafe(torch: str) -> None:
    """Raise a TrainingError if this version of torch is not `is_safe`."""
    if not is_safe(torch):
        raise TrainingError(
            f"torch {torch} can be made to run code by a file that it loads (CVE-2025-32434, CVE-2026-24747), so "
            "nodekit loads no snapshot or weights with it: found that, wanted "
            f"{'.'.join(map(str, SAFE_TORCH))} or newer. A script of your own runs with it, and keeps checkpoints "
            "of its own below $NODEKIT_SNAPSHOT_DIR (docs/releases.md)"
        )


def log_to_stderr() -> None:
    """Print the log messages of nodekit to stderr; the logging of other libraries is left as it is."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("nodekit: %(message)s"))
    logging.getLogger("nodekit").addHandler(handler)
