"""The classes of known causes of failures, and cures that several causes share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A known cause of a failure, with its cure."""

    name: str
    """A short name for tables, like ``cuda-out-of-memory``."""
    what: str
    """What happened, in a sentence."""
    cure: str
    """What to do, in a sentence or two."""


@dataclass(frozen=True)
class Known:
    """A cause that is recognised by a pattern in an error's text."""

    name: str
    pattern: re.Pattern[str]
    what: str | Callable[[Mapping[str, str]], str]
    """What happened; may use the pattern's groups, as ``{group}``."""
    cure: str


def known(
    name: str, pattern: str, what: str | Callable[[Mapping[str, str]], str], cure: str, *, flags: int = 0
) -> Known:
    """Return a cause that is recognised by `pattern`, a regular expression; `what` may use its groups."""
    return Known(name, re.compile(pattern, re.DOTALL | flags), what, cure)


IN_ENV = "under job.env in the inventory"
FEWER_CURE = (
    "With nodes: MIN:MAX in the inventory the job goes on without it, and takes it back when it returns; meanwhile "
    "it has fewer ranks, and the batch of all of them together is smaller unless the script sees to it"
)
SOCKET_CURE = (
    "Have every node name the interface that reaches the others: interface (or network) in the inventory; "
    "kit check INVENTORY tries each pair of nodes, firewalls included"
)
FAULT_CURE = (
    f"Suspect C++ extensions, and libraries built for another version (torch, numpy, CUDA). Where no line of yours is "
    f"shown, PYTHONFAULTHANDLER: 1 {IN_ENV} shows it"
)
WORKER_CURE = (
    "Most often the node's memory is full: use fewer workers, keep less in each (they copy what a dataset holds), "
    "or ask for more memory. With num_workers=0 the error behind it shows itself"
)
SHM_CURE = (
    "Give /dev/shm more room (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir of medium Memory), "
    "remove stale files in it, or use fewer DataLoader workers"
)
