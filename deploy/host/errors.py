"""Attach to an error on a host what to do about it, which the server sends along (`deploy/host/server.py`)."""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def with_cure(error: E, cure: str) -> E:
    """Attach to an error what to do about it, and return it."""
    error.cure = cure  # type: ignore[attr-defined]  # any exception takes an attribute
    return error


def cure_of(error: BaseException) -> str:
    """Return what to do about an error; "" if unknown."""
    return str(getattr(error, "cure", ""))
