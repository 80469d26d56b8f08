"""Plots several curves in a terminal: braille dots in colours, or without colours a different mark for each curve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COLOURS = ("cyan", "magenta", "yellow", "green", "red", "blue")
MARKS = "ox+*#@"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Row → column → the bit of that dot in a braille character."""


@dataclass(frozen=True)
class Curve:
    """One curve and its label."""

    label: str
    points: Sequence[tuple[float, float]]
    """(x, y), ordered by x."""


@dataclass(frozen=True)
class Cell:
    """One character, and the index of its curve (None: of no curve)."""

    text: str
    curve: int | None = None


def plot(curves: Sequence[Curve], *, width: int, height: int, colour: bool) -> list[list[Cell]]:
    """Return the lines of a plot, axes included; pure.

    Args:
        curves: at least one with points.
        width: characters per line, at most.
        height: lines above the x axis.
        colour: draw braille, to be coloured by each cell's `curve`; else marks.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return []
    (left, right), (low, high) = (range_of(values) for values in zip(*points, strict=True))
    labels = [_number(value) for value in (high, (high + low) / 2, low)]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 3)
    across, down = (2, 4) if colour else (1, 1)
    num_x, num_y = columns * across, height * down
    dots: dict[tuple[int, int], list[int]] = {}
    for number, curve in enumerate(curves):
        places = [
            (
                round((x - left) / (right - left) * (num_x - 1)),
                round((high - y) / (high - low) * (num_y - 1)),
            )
            for x, y in curve.points
        ]
        for place in _line(places):
            owners = dots.setdefault(place, [])
            if number not in owners:
                owners.append(number)
    lines = []
    at_row = {0: labels[0], height // 2: labels[1], height - 1: labels[2]}
    for row in range(height):
        edge = "┤" if row in at_row else "│"
        cells = [Cell(f"{at_row.get(row, '').rjust(margin)} {edge}")]
        for column in range(columns):
            cells.append(_braille(dots, row, column) if colour else _mark(dots, row, column))
        lines.append(cells)
    lines.append([Cell(f"{' ' * margin} └{'─' * columns}")])
    first, last = _number(left), _number(right)
    lines.append([Cell(f"{' ' * margin}  {first}{last.rjust(columns - len(first))}")])
    return lines


def range_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis for these values; never an empty range."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _line(places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return all cells on the straight lines between consecutive points."""
    yield from places[:1]
    for (x, y), (to_x, to_y) in itertools.pairwise(places):
        steps = max(abs(to_x - x), abs(to_y - y))
        for step in range(1, steps + 1):
            yield x + round((to_x - x) * step / steps), y + round((to_y - y) * step / steps)


def _braille(dots: dict[tuple[int, int], list[int]], row: int, column: int) -> Cell:
    bits, owners = 0, []
    for y, x in itertools.product(range(4), range(2)):
        if own := dots.get((column * 2 + x, row * 4 + y)):
            bits |= _DOTS[y][x]
            owners += own
    # Where curves overlap, alternate between their colours by column.
    return Cell(chr(0x2800 + bits), _turn(owners, column)) if bits else Cell(" ")


def _mark(dots: dict[tuple[int, int], list[int]], row: int, column: int) -> Cell:
    owner = _turn(dots.get((column, row), []), column)
    return Cell(" ") if owner is None else Cell(MARKS[owner % len(MARKS)], owner)


def _turn(owners: Sequence[int], column: int) -> int | None:
    known = sorted(set(owners))
    return known[column % len(known)] if known else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.3g}"
