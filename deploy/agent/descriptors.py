"""File descriptors of an agent: as many as it may have, and patience when all are in use.

torch's store takes a connection from anyone who reaches it and keeps it, each with a descriptor of the agent's.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
MOST = 65536
"""A hard limit may be a billion, and whoever closes all descriptors of a child counts up to the limit."""
NEEDED = 16
"""A store takes about a dozen."""
_RETRY_S = 0.2


def raise_limit() -> int:
    """Let this process have as many as its hard limit allows, at most `MOST`; returns the soft limit it had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft


def are_used_up(error: OSError) -> bool:
    """Whether an error says that this process, or this host, has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def check() -> None:
    """See whether there are `NEEDED` to be had.

    Raises:
        OSError: there are not.
    """
    found: list[int] = []
    try:
        while len(found) < NEEDED:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for each in found:
            os.close(each)


def when_there(function: Callable[[], _T], pause: Callable[[], object]) -> _T:
    """Call `function` until there are descriptors for what it does; what `pause` raises ends that."""
    while True:
        try:
            return function()
        except OSError as error:
            if not are_used_up(error):
                raise
        pause()
        time.sleep(_RETRY_S)


def limit() -> int:
    """How many this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def used_up(name: str, address: str) -> str:
    """For people: that a node's agent had none left."""
    return (
        f"{name}: all {limit()} file descriptors of the agent were in use: does somebody else connect to its ports on "
        f"{address}?"
    )
