"""The connections of this process's process group, so that a collective can be ended that waits for a lost rank.

gloo has no call for that (torch 2.14), but each of its waiting threads ends with an error when its socket is shut.
"""

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

_OF_GLOO = re.compile(r"gloo|Connection (closed|reset) by peer|Broken pipe|Connection refused")
"""What an error of gloo's says, or Horovod's."""
_opened: set[tuple[int, int]] = set()


@contextmanager
def opened() -> Iterator[None]:
    """Remember the connections that are opened within the block, and forget those of an earlier one."""
    before = _sockets()
    try:
        yield
    finally:
        _opened.clear()
        _opened.update(_sockets() - before)


def shut_down() -> None:
    """Shut the connections that were opened, in both directions; does nothing for those that are closed by now.

    Not a socket that listens: gloo ends the process if that one fails.
    """
    for descriptor, inode in _opened & _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            is_same = os.fstat(connection.fileno()).st_ino == inode  # the number may be another's by now
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_same and not listens and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each socket of this process; none where there is no /proc."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a Path for each costs more
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def is_lost_rank(error: BaseException | None) -> bool:
    """Whether an error came of a connection to another rank, or one that it was raised from did."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _OF_GLOO.search(text)):
            return True
        error = error.__cause__ or error.__context__
    return False
