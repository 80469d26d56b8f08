"""The types of options, for argparse: each reads a value, or raises ArgumentTypeError with what was wanted."""

import argparse
import math
from collections.abc import Callable

from nodekit.training.initmethod import InitMethod


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """A finite number above 0."""
    number = _float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def auto_or_positive(text: str) -> float | None:
    """A finite number above 0, or None for ``auto``."""
    try:
        return None if text == "auto" else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def fraction(text: str) -> float:
    """A number from 0 and below 1."""
    number = _float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 and below 1")
    return number


def whole(least: int) -> Callable[[str], int]:
    """A type for whole numbers from ``least``."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return read


def init_method_url(text: str) -> str:
    """The URL of an init method, as it is."""
    try:
        InitMethod.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
