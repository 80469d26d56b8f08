"""The results of a comparison as a table, as CSV and as a bar chart."""

from __future__ import annotations

import csv
import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nodekit.deploy.compare.compare_plan import BASE

if TYPE_CHECKING:
    from rich.table import Table

Outcome = Literal["trained", "failed", "not here"]

COLUMNS = ("engine", "ranks", "minutes", "samples/s", "speed-up", "memory", "accuracy", "")
CSV_COLUMNS = (
    "engine", "ranks", "outcome", "seconds", "samples_per_s", "speedup", "peak_memory_bytes", "accuracy", "loss",
    "first_step_s", "train_seconds", "steps", "problem",
)  # fmt: skip
NO_MATPLOTLIB = "no chart, since matplotlib is not installed here: pip install 'nodekit[compare]'"

_STYLES = {"trained": "green", "failed": "bold red", "not here": "yellow"}
# Okabe and Ito's palette, suitable for colour blindness.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY = "#555555"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one engine on a number of ranks."""

    engine: str
    """As it was asked for: ``deepspeed:3``."""
    num_ranks: int
    outcome: Outcome
    problem: str = ""
    """Why it failed, or cannot run here."""
    seconds: float | None = None
    """From the start of its first process to the end of its last."""
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    """Of the last evaluation, like the accuracy."""
    first_step_s: float | None = None
    train_seconds: float | None = None
    steps: int | None = None

    @classmethod
    def of_result(cls, engine: str, num_ranks: int, *, seconds: float, result: Mapping[str, Any]) -> Row:
        """From a run's ``result.json``."""
        names = (
            "samples_per_s",
            "peak_memory_bytes",
            "accuracy",
            "loss",
            "first_step_s",
            "train_seconds",
            "steps",
        )
        measured: dict[str, Any] = {name: result.get(name) for name in names}
        return cls(engine=engine, num_ranks=num_ranks, outcome="trained", seconds=seconds, **measured)


def base_of(rows: Sequence[Row]) -> float | None:
    """The throughput of `single`; None where that has not run."""
    return next((row.samples_per_s for row in rows if row.engine == BASE), None)


def speedup(row: Row, base: float | None) -> float | None:
    """Return the throughput relative to `single`'s."""
    return row.samples_per_s / base if row.samples_per_s and base else None


def cells(row: Row, base: float | None) -> tuple[str, ...]:
    """A row as the table shows it."""
    times = speedup(row, base)
    return (
        row.engine,
        str(row.num_ranks),
        "–" if row.seconds is None else f"{round(row.seconds) // 60}:{round(row.seconds) % 60:02}",
        "–" if row.samples_per_s is None else _rate(row.samples_per_s),
        "–" if times is None else f"{times:.2f} ×",
        "–" if row.peak_memory_bytes is None else _size(row.peak_memory_bytes),
        "–" if row.accuracy is None else f"{row.accuracy:.2%}",
        "" if row.outcome == "trained" else row.outcome,
    )


def table(rows: Sequence[Row]) -> Table:
    """All rows, in at most 80 columns."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in COLUMNS:
        found.add_column(column, justify="left" if column in ("engine", "") else "right", no_wrap=True)
    base = base_of(rows)
    for row in rows:
        *values, last = cells(row, base)
        found.add_row(*values, Text(last, style=_STYLES[row.outcome]))
    return found


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The numbers as they were measured; what is not known is empty."""
    base = base_of(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for row in rows:
            values = {"ranks": row.num_ranks, "speedup": speedup(row, base)}
            writer.writerow([values.get(name, getattr(row, name, None)) for name in CSV_COLUMNS])


def write_chart(rows: Sequence[Row], path: Path, *, title: str, subtitle: str) -> bool:
    """Write a bar chart of samples/s, grouped by number of ranks; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import, and is an extra
    from matplotlib.figure import Figure

    base = base_of(rows)
    groups: dict[int, list[Row]] = {}
    for row in rows:
        if row.samples_per_s:
            groups.setdefault(row.num_ranks, []).append(row)
    sizes = [len(group) + 0.2 for group in groups.values()]
    lines = textwrap.wrap(subtitle, 110)
    above = 0.4 + 0.13 * len(lines)  # in inches, like the height
    height = above + 0.5 + 0.3 * sum(sizes) + 0.3 * len(groups)
    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.set(rect=(0, 0, 1, 1 - above / height))  # type: ignore[call-arg]  # constrained's
    figure.text(0.015, 1 - 0.1 / height, title, fontsize=11, fontweight="bold", va="top")
    figure.text(0.015, 1 - 0.34 / height, "\n".join(lines), fontsize=7.5, color=_GREY, va="top")
    plots = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    greatest = max(row.samples_per_s or 0 for group in groups.values() for row in group)
    for number, (plot, (num_ranks, group)) in enumerate(zip(plots, groups.items(), strict=True)):
        rates = [row.samples_per_s or 0 for row in group]
        bars = plot.barh(
            range(len(group)), rates, height=0.72, color=_COLOURS[number % len(_COLOURS)], zorder=2
        )
        labels = [_rate(rate) + (f"  {rate / base:.2f} ×" if base else "") for rate in rates]
        clear = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        plot.bar_label(bars, labels, padding=4, fontsize=8, bbox=clear, zorder=4)
        plot.set_yticks(range(len(group)), [row.engine for row in group], fontsize=9)
        plot.set_ylim(len(group) - 0.4, -0.6)
        plot.set_xlim(0, greatest * 1.18)
        plot.set_title(
            "1 rank" if num_ranks == 1 else f"{num_ranks} ranks", loc="left", fontsize=9, fontweight="bold"
        )
        plot.spines[["top", "right", "left"]].set_visible(False)
        plot.tick_params(axis="y", length=0)
        is_last = number == len(groups) - 1
        plot.tick_params(axis="x", labelsize=8, bottom=is_last)
        plot.spines["bottom"].set_visible(is_last)
        if base:
            plot.axvline(base, color=_GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    plots[-1].set_xlabel(
        "samples per second" + (f"; the dashed line and × are {BASE}'s" if base else ""), fontsize=8
    )
    figure.savefig(path)
    return True


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 10 * 2**30 else f"{num_bytes / 2**30:.1f} GiB"
