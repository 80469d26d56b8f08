"""The results of `kit bench` as a heat map and tables in the terminal, as PNG, CSV and JSON."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.bench.netbench import Measured, Pair, Reduced, rate_text, size_text, slow_links

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

CSV_COLUMNS = ("source", "target", "bits_per_s", "round_trip_s", "problem")
NO_MATPLOTLIB = "no chart, since matplotlib is not installed here: pip install matplotlib"
CORNER = "from \\ to"
_RAMP = (53, 54, 60, 66, 72, 78, 114, 150, 186, 228)
"""Indices in ANSI's 256 colours, from dark violet (slow) to pale yellow (fast), like matplotlib's viridis."""
_DARK = 5  # number of dark colours in the ramp, which get white figures
_BROKEN = "bold white on red3"
_BAR_WIDTH = 24
_BLOCKS = " ▏▎▍▌▋▊▉█"
_ROOM = 100
"""Default width for a heat map with figures, in columns; without figures a pair takes two columns."""


def heat_map(measured: Measured, *, width: int = _ROOM, colours: bool = True) -> RenderableType:
    """Return the bandwidth matrix: a row per source, a column per target, with figures if they fit."""
    from rich.console import Group
    from rich.text import Text

    names = [node.name for node in measured.nodes]
    pairs = {(pair.source, pair.target): pair for pair in measured.pairs}
    rates = [pair.bytes_per_s for pair in measured.pairs if pair.bytes_per_s]
    unit, unit_name = unit_of(max(rates, default=0.0))
    first = max(len(name) for name in [*names, CORNER])
    cell = max(7, *(len(name) + 2 for name in names))
    has_figures = not colours or first + 1 + cell * len(names) <= width
    lines = [Text(f"bandwidth in {unit_name}, from each host (row) to each other (column)", style="bold")]
    labels, head = names, "".join(name.rjust(cell) for name in names)
    if not has_figures:
        cell = 3 if len(names) > 9 else 2
        head = "".join(str(number + 1).rjust(cell) for number in range(len(names)))
        labels = [f"{number + 1} {name}" for number, name in enumerate(names)]
        first = max(len(name) for name in [*labels, CORNER])
        if first + 1 + cell * len(names) > width:
            return Text(f"{len(names)} hosts are too many for a heat map here: see --png FILE or --csv FILE")
    lines.append(Text(f"{CORNER.ljust(first)} {head}", style="dim"))
    for source, label in zip(names, labels, strict=True):
        line = Text(f"{label.ljust(first)} ")
        for target in names:
            pair = pairs.get((source, target))
            line.append_text(_cell(pair, rates, unit, cell, figures=has_figures, colours=colours))
        lines.append(line)
    if rates and colours:
        legend = Text("slow ", style="dim")
        for colour in _RAMP:
            legend.append("  ", style=f"on color({colour})")
        legend.append(f" fast: 0 to {rate_text(max(rates))}", style="dim")
        if any(pair.problem for pair in measured.pairs):
            legend.append("   ")
            legend.append(" × ", style=_BROKEN)
            legend.append(" no connection", style="dim")
        lines.append(legend)
    return Group(*lines)


def unit_of(bytes_per_s: float) -> tuple[float, str]:
    """Return the unit for rates up to this one: bytes per second in one unit, and its name."""
    return (1e9 / 8, "Gb/s") if bytes_per_s * 8 >= 1e9 else (1e6 / 8, "Mb/s")


def _cell(
    pair: Pair | None, rates: Sequence[float], unit: float, width: int, *, figures: bool, colours: bool
) -> Text:
    from rich.text import Text

    if pair is None:
        return Text("·".rjust(width), style="dim")
    if pair.bytes_per_s is None:
        return Text("×".rjust(width) if figures else "×".center(width), style=_BROKEN if colours else "")
    text = figure(pair.bytes_per_s / unit).rjust(width - 1) + " " if figures else " " * width
    if not colours:
        return Text(text.rstrip().rjust(width))
    place = min(len(_RAMP) - 1, int(pair.bytes_per_s / max(rates) * len(_RAMP)))
    return Text(text, style=f"color({231 if place < _DARK else 16}) on color({_RAMP[place]})")


def figure(value: float) -> str:
    """Format a number with three significant digits: ``0.0021``, ``0.94``, ``9.41``, ``94.1``, ``941``."""
    if value < 0.1:
        return f"{value:.2g}" if value > 1e-4 else f"{value:.4f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def latency_line(measured: Measured) -> str:
    """Return a line with the median, the shortest and the longest round trip; "" if none was measured."""
    found = sorted(pair.rtt_s for pair in measured.pairs if pair.rtt_s)
    if not found:
        return ""
    middle = found[len(found) // 2]
    return f"round trip: {_ms(middle)} in the median, {_ms(found[0])} to {_ms(found[-1])}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def reduced_table(points: Sequence[Reduced]) -> Table:
    """Return a table of time, algorithm and bus bandwidth for each size, as in nccl-tests, but in bits."""
    from rich.table import Table

    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    ranks = points[0].num_ranks
    unit, unit_name = unit_of(max(point.busbw for point in points))
    for column in ("all-reduce", "size", "time", "algbw", "busbw"):
        found.add_column(column, justify="left" if column == "all-reduce" else "right", no_wrap=True)
    found.add_column(f"busbw, {unit_name}", no_wrap=True)
    most = max(point.busbw for point in points)
    for number, point in enumerate(points):
        found.add_row(
            f"{point.backend}, {ranks} ranks" if not number else "",
            size_text(point.size_bytes),
            seconds_text(point.seconds),
            figure(point.algbw / unit),
            figure(point.busbw / unit),
            _bar(point.busbw / most),
        )
    return found


def seconds_text(seconds: float) -> str:
    """Format seconds: ``140 µs``, ``3.1 ms``, ``2.4 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def to_json(measured: Measured) -> dict[str, Any]:
    """Return the measurement as JSON values."""
    return {
        "nodes": {
            node.name: {"interface": node.interface, "address": node.local_addr} for node in measured.nodes
        },
        "pairs": [dict(zip(CSV_COLUMNS, _row(pair), strict=True)) for pair in measured.pairs],
        "all_reduce": [
            {**asdict(point), "algbw_bytes_per_s": point.algbw, "busbw_bytes_per_s": point.busbw}
            for point in measured.reduced
        ],
        "gpu_pairs": [asdict(pair) for pair in measured.gpu_pairs],
        "slow": [
            {"node": slow.node or None, "links": slow.links, "text": slow.text}
            for slow in slow_links(measured.pairs)
        ],
        "notes": measured.notes,
        "problems": measured.problems,
    }


def _row(pair: Pair) -> tuple[object, ...]:
    bits = None if pair.bytes_per_s is None else round(pair.bytes_per_s * 8)
    return pair.source, pair.target, bits, pair.rtt_s, pair.problem


def write_csv(measured: Measured, path: Path) -> None:
    """Write a line for each ordered pair; values that are unknown are empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        writer.writerows(_row(pair) for pair in measured.pairs)


def write_png(measured: Measured, path: Path) -> str:
    """Draw the heat map, and the bus bandwidth by size; return why nothing is written, or "" if the file is written."""
    has_map, has_curve = len(measured.nodes) > 1, bool(measured.reduced)
    if not (has_map or has_curve):
        return f"{path} is not written: one host has no pairs, and there was no all-reduce"
    if importlib.util.find_spec("matplotlib") is None:
        return NO_MATPLOTLIB
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import, and is an extra
    from matplotlib.figure import Figure

    side = 2.2 + 0.45 * max(4, len(measured.nodes))
    widths = [*([side + 1] if has_map else []), *([5] if has_curve else [])]
    drawing = Figure(figsize=(sum(widths), side), dpi=150, layout="constrained")
    FigureCanvasAgg(drawing)
    plots = drawing.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    if has_map:
        _map(drawing, plots[0], measured)
    if has_curve:
        _curve(plots[-1], measured.reduced)
    drawing.savefig(path)
    return ""


def _map(drawing: Any, plot: Any, measured: Measured) -> None:
    names = [node.name for node in measured.nodes]
    place = {name: number for number, name in enumerate(names)}
    unit, unit_name = unit_of(max((pair.bytes_per_s or 0.0 for pair in measured.pairs), default=0.0))
    matrix = [[math.nan] * len(names) for _ in names]
    for pair in measured.pairs:
        if pair.bytes_per_s is not None:
            matrix[place[pair.source]][place[pair.target]] = pair.bytes_per_s / unit
    image = plot.imshow(matrix, cmap="viridis", vmin=0)
    plot.set_facecolor("#DDDDDD")  # shown where there is no rate
    drawing.colorbar(image, ax=plot, label=unit_name, shrink=0.8)
    plot.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    plot.set_yticks(range(len(names)), names, fontsize=8)
    plot.set_xlabel("to", fontsize=9)
    plot.set_ylabel("from", fontsize=9)
    plot.set_title("Bandwidth of each pair", loc="left", fontsize=10, fontweight="bold")
    most = max((value for row in matrix for value in row if not math.isnan(value)), default=0.0)
    for pair in measured.pairs if len(names) <= 16 else ():
        value = matrix[place[pair.source]][place[pair.target]]
        text = "×" if math.isnan(value) else figure(value)
        colour = "#B00020" if math.isnan(value) else "white" if value < 0.6 * most else "black"
        plot.text(
            place[pair.target], place[pair.source], text, ha="center", va="center", fontsize=8, color=colour
        )


def _curve(plot: Any, points: Sequence[Reduced]) -> None:
    unit, unit_name = unit_of(max(point.busbw for point in points))
    for backend, own in by_backend(points).items():
        sizes = [point.size_bytes for point in own]
        label = f"{backend}, {own[0].num_ranks} ranks"
        plot.plot(sizes, [point.busbw / unit for point in own], marker="o", markersize=4, label=label)
    ticks = sorted({point.size_bytes for point in points})
    plot.set_xscale("log", base=4)
    plot.set_xticks(ticks, [size_text(size) for size in ticks], rotation=45, ha="right", fontsize=8)
    plot.set_ylim(0)
    plot.set_ylabel(f"bus bandwidth, {unit_name}", fontsize=9)
    plot.set_title("All-reduce", loc="left", fontsize=10, fontweight="bold")
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(fontsize=8, frameon=False)


def by_backend(points: Sequence[Reduced]) -> Mapping[str, list[Reduced]]:
    """Group the points by backend."""
    found: dict[str, list[Reduced]] = {}
    for point in points:
        found.setdefault(point.backend, []).append(point)
    return found
