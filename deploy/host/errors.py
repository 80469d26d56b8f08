"""Attach to an error on a host what to do about it, which the server sends along (`deploy/host/server.py`)."""

import errno
from typing import TypeVar

E = TypeVar("E", bound=BaseException)

OF_THE_DISK = (errno.EROFS, errno.EIO, errno.ESTALE)
"""Errors of a file system that has failed, is read-only or gone: not of what is asked of it."""
SEE_TO_DISK = "see to that disk (`sudo dmesg` there tells more)"


def with_cure(error: E, cure: str) -> E:
    """Attach to an error what to do about it, and return it."""
    error.cure = cure  # type: ignore[attr-defined]  # any exception takes an attribute
    return error


def cure_of(error: BaseException) -> str:
    """Return what to do about an error; "" if unknown."""
    is_disk = isinstance(error, OSError) and error.errno in OF_THE_DISK
    return str(getattr(error, "cure", SEE_TO_DISK if is_disk else ""))
