"""Text helpers of the screens: wrap, truncate, align, style; format numbers; draw curves with block characters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Span, Text

BLOCKS = " ▁▂▃▄▅▆▇█"


def wrapped(text: str, width: int, *, indent: int = 2) -> str:
    """Wrap lines between words to `width` columns; a word that is longer, such as a path, is not broken."""
    return "\n".join(
        part
        for line in text.split("\n")
        for part in textwrap.wrap(
            line,
            max(width, 20),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        or [""]
    )


def spark(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """Draw a curve of (step, value) as `height` lines of `width` blocks; a column shows the mean of its steps."""
    first, last = points[0][0], points[-1][0]
    span = max(last - first, 1)
    sums: list[list[float]] = [[] for _ in range(width + 1)]
    for step, value in points:
        sums[(step - first) * width // span].append(value)
    last_of_all = sums.pop()
    sums[-1] += last_of_all
    low, high = min(value for _, value in points), max(value for _, value in points)
    means = [(column, sum(values) / len(values)) for column, values in enumerate(sums) if values]
    levels = []
    for column in range(width):
        while len(means) > 1 and means[1][0] <= column:
            del means[0]
        (left, value), (right, following) = means[0], means[min(1, len(means) - 1)]
        if right > left:  # interpolate columns without a point
            value += (following - value) * (column - left) / (right - left)
        share = (value - low) / (high - low) if high > low else 0.0
        levels.append(1 + round(share * (8 * height - 1)))
    return [
        "".join(BLOCKS[min(max(each - 8 * (height - 1 - row), 0), 8)] for each in levels)
        for row in range(height)
    ]


def number_text(value: int | None) -> str:
    """Format a number with commas; a dash if it is None."""
    return "–" if value is None else f"{value:,}"


def num_digits(value: float) -> int:
    """Return how many digits to print after the decimal point."""
    return 0 if value >= 100 else 1 if value >= 10 else 2


def rate_text(value: object) -> str:
    """Format bytes per second: `1.2 GB/s`; a dash if `value` is not a number."""
    if not isinstance(value, int | float):
        return "–"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size * 0.9995:
            return f"{value / size:.{1 if value < size * 99.95 else 0}f} {unit}/s"
    return f"{value:.0f} B/s"


def styled(parts: Sequence[tuple[str, str]]) -> Text:
    """Join parts, each with its style, into one text; in one step, since a screen has hundreds of them."""
    spans, at = [], 0
    for text, style in parts:
        if style:
            spans.append(Span(at, at + len(text), style))
        at += len(text)
    return Text("".join(text for text, _ in parts), spans=spans)


def cut(text: str, width: int) -> str:
    """Truncate a text to `width` characters, with an ellipsis."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def rule(text: str, width: int) -> Text:
    """Return a horizontal line with a title."""
    return Text(f"── {text} " + "─" * max(width - len(text) - 4, 0), "dim")


def spread(left: Text, right: Text, width: int) -> Text:
    """Align one text to each end of the line; the right one is left out if there is no room."""
    gap = width - left.cell_len - right.cell_len
    return left.append(" " * gap).append_text(right) if gap >= 2 else left
