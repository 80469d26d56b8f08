"""Parse the values of options: each function takes the text from the command line, for argparse."""

import argparse
import math
from collections.abc import Callable

from nodekit.training.group.initmethod import InitMethod


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """Parse a number above 0."""
    number = _float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def auto_or_positive(text: str) -> float | None:
    """Parse a number above 0; return None for auto."""
    try:
        return None if text == "auto" else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def fraction(text: str) -> float:
    """Parse a number from 0 and below 1."""
    number = _float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 and below 1")
    return number


def whole(least: int) -> Callable[[str], int]:
    """Return a function that parses a whole number, ``least`` or more."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return read


def gpus(text: str) -> tuple[int, ...]:
    """Parse numbers of GPUs, such as ``0,1``; each may occur once."""
    numbers = text.split(",")
    if not all(each.isascii() and each.isdigit() for each in numbers) or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: different numbers of GPUs were wanted, such as 0,1")
    return tuple(map(int, numbers))


def init_method(text: str) -> str:
    """Check a URL for ``InitMethod``, and return it unchanged."""
    try:
        InitMethod.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
