"""`kit runs --compare --html`: a self-contained page with curves as SVG, in light and dark, for screen and paper."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nodekit.deploy.output.plot import Curve, range_of

if TYPE_CHECKING:
    from nodekit.deploy.runs.runs_compare import Compared

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 300, 64, 32, 12
MAX_POINTS = 2000
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 6")
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #63707c; --line: #d5dae0; --paper: #fff;
  --c0: #0b6fb8; --c1: #b3410e; --c2: #157a3c; --c3: #8a2f9c; --c4: #946200; --c5: #b0194b }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa6b2; --line: #39424b; --paper: #14181c;
  --c0: #5cb3f2; --c1: #f59463; --c2: #67cf8b; --c3: #d693e6; --c4: #e3b341; --c5: #f57fa5 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
svg { width: 100%; height: auto } svg text { fill: var(--soft); font-size: 12px }
.grid { stroke: var(--line) } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
figure { margin: 0; overflow-x: auto } figure svg { min-width: 30rem }
ul { list-style: none; padding: 0 } li svg { width: 40px; height: 10px; margin-right: .5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
@media print { body { margin: 0; max-width: none } figure, tr { break-inside: avoid } }
"""


def page(compared: Sequence[Compared]) -> str:
    """Return the comparison as an HTML page."""
    from nodekit.deploy.runs.runs_compare import differences, panels

    names = [each.run.run_id for each in compared]
    title = f"{len(names)} runs compared"
    legend = "".join(
        f'<li><svg viewBox="0 0 40 10" aria-hidden="true">{_stroke("M0 5H40", number)}</svg>{html.escape(name)}</li>'
        for number, name in enumerate(names)
    )
    figures = "".join(_figure(name, curves) for name, curves in panels(compared).items())
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, values in differences(compared).items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        f"<p>{time.strftime('%Y-%m-%d %H:%M')}, by kit runs --compare</p>\n<ul>{legend}</ul>\n"
        f"{figures or '<p>None of these has told of a loss or a metric.</p>'}\n"
        f'<h2>What differs</h2>\n<div class="scroll" tabindex="0" role="region" aria-label="What differs"><table>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n</main>\n</body>\n</html>\n"
    )


def _figure(name: str, curves: Sequence[Curve]) -> str:
    points = [point for curve in curves for point in curve.points]
    (left, right), (low, high) = (range_of(values) for values in zip(*points, strict=True))
    wide, tall = WIDTH - LEFT - 12, HEIGHT - BOTTOM - TOP

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - left) / (right - left) * wide, TOP + (high - y) / (high - low) * tall

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = LEFT + share * wide, TOP + (1 - share) * tall
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - 12}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{low + share * (high - low):.3g}</text>'
        )
        step = f"{left + share * (right - left):,.0f}"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{step}</text>')
    for number, curve in enumerate(curves):
        every = len(curve.points) // MAX_POINTS + 1
        places = [place(*point) for point in [*curve.points[:-1:every], *curve.points[-1:]]]
        if len(places) == 1:
            x, y = places[0]
            places.append((x + 0.1, y))  # a dot
        if places:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(_stroke(path, number, curve.label))
    last = "; ".join(f"{curve.label} ends at {curve.points[-1][1]:.4g}" for curve in curves if curve.points)
    about = html.escape(f"{name} by step: {last}")
    return (
        f'<figure><h2>{html.escape(name)}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">'
        f"{''.join(parts)}</svg></figure>\n"
    )


def _stroke(path: str, number: int, title: str = "") -> str:
    dash = f' stroke-dasharray="{_DASHES[number % len(_DASHES)]}"' if number % len(_DASHES) else ""
    about = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<path class="curve" stroke="var(--c{number % 6})"{dash} d="{path}">{about}</path>'
