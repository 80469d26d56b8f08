"""The times of a comparison as a bar chart in SVG, for a browser; pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from nodekit.deploy.compare.compare_plan import BASE
from nodekit.deploy.compare.compare_report import Row, base_of, minutes, shown_rate, speedup
from nodekit.deploy.output.wording import count

_WIDTH, _LEFT, _RIGHT = 960, 150, 360
"""Widths in pixels: of the drawing, of the names, and of the labels to the right of the bars."""
_ROW = 24
_LINE_WIDTH = 140
"""Characters per line of small text."""
# Okabe and Ito's blue, and a paler one.
_TRAINING, _REST = "#0072B2", "#9CCBE5"
_STYLE = (
    "text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-size: 16px; "
    "font-weight: bold } .small { font-size: 12px; fill: #555 } .group { font-weight: bold } .name { text-anchor: end }"
)


def svg(rows: Sequence[Row], *, title: str, subtitle: str) -> str:
    """Return a bar for each row, grouped by number of ranks: dark the training, pale imports, start and end."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.num_ranks, []).append(row)
    most = max((row.seconds or 0 for row in rows), default=0) or 1
    base = base_of(rows)
    parts = [_text(20, 30, title, "title")]
    y = 50
    for line in [line for each in subtitle.splitlines() for line in textwrap.wrap(each, _LINE_WIDTH)]:
        parts.append(_text(20, y, line, "small"))
        y += 16
    y += 8
    parts += [
        _bar(20, y, 14, _TRAINING), _text(40, y + 12, "training, in brackets", "small"),
        _bar(190, y, 14, _REST), _text(210, y + 12, "imports, start and end; shorter is better", "small"),
    ]  # fmt: skip
    y += 40
    for num_ranks, group in groups.items():
        parts.append(_text(20, y, count(num_ranks, "rank"), "group"))
        y += 10
        for row in group:
            parts += _row(row, y, most, base)
            y += _ROW
        y += 26
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
            '<title>{title}</title><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{parts}</svg>\n'
        ).format(width=_WIDTH, height=y, title=title, style=_STYLE, parts=Markup("\n").join(parts))
    )


def _row(row: Row, y: int, most: float, base: float | None) -> Iterator[Markup]:
    yield _text(_LEFT, y + 17, row.engine, "name")
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    whole = round((row.seconds or 0) * scale)
    yield _bar(_LEFT + 10, y + 3, whole, _REST)
    yield _bar(_LEFT + 10, y + 3, round((row.train_seconds or 0) * scale), _TRAINING)
    yield _text(_LEFT + 16 + whole, y + 17, _label(row, base), "" if row.outcome == "trained" else "small")


def _label(row: Row, base: float | None) -> str:
    if row.outcome != "trained":
        return row.outcome
    told = [f"{minutes(row.seconds)} ({minutes(row.train_seconds)})"]
    if row.samples_per_s:
        told.append(f"{shown_rate(row.samples_per_s)} samples/s")
    times = speedup(row, base)
    if times and row.engine != BASE:
        told.append(f"{times:.2f} × {BASE}")
    return " · ".join(told)


def _text(x: int, y: int, text: str, style: str) -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(x, y, style, text)


def _bar(x: int, y: int, width: int, colour: str) -> Markup:
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}"/>').format(
        x, y, width, _ROW - 8, colour
    )
