"""An error on a host that says what to do, which the server sends along (`deploy/host/server.py`)."""

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def with_cure(error: E, cure: str) -> E:
    """Return the error, with what to do about it."""
    error.cure = cure  # type: ignore[attr-defined]  # any exception takes an attribute
    return error


def cure_of(error: BaseException) -> str:
    """Return what to do about an error; "" where it does not say."""
    return str(getattr(error, "cure", ""))
