"""File descriptors of an agent: raise their limit, and wait while all are in use.

torch's store accepts and keeps a connection from anyone who reaches it, and each takes one of the agent's descriptors.
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
"""The highest soft limit to set: a hard limit may be a billion, and a loop that closes all would count up to it."""
NEEDED = 16
"""How many descriptors must be free for the agent to go on; a store takes about a dozen."""
_RETRY_S = 0.2


def raise_limit() -> int:
    """Raise the soft limit to the hard one, or to `MOST` if that is lower; return the soft limit before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft


def are_used_up(error: OSError) -> bool:
    """Whether an error means that this process, or this host, has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def check() -> None:
    """Check that `NEEDED` descriptors are free.

    Raises:
        OSError: fewer are.
    """
    found: list[int] = []
    try:
        while len(found) < NEEDED:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for each in found:
            os.close(each)


def when_there(function: Callable[[], _T], pause: Callable[[], object]) -> _T:
    """Call `function`, again and again while it fails for lack of descriptors, and return its result.

    `pause` is called between two tries; an exception that it raises ends this.
    """
    while True:
        try:
            return function()
        except OSError as error:
            if not are_used_up(error):
                raise
        pause()
        time.sleep(_RETRY_S)


def limit() -> int:
    """Return how many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def used_up(name: str, address: str) -> str:
    """Return the message to the user that the agent of the node `name` ran out of descriptors."""
    return (
        f"{name}: all {limit()} file descriptors of the agent were in use: does somebody else connect to its ports on "
        f"{address}?"
    )
