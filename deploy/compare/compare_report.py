"""The results of a comparison, as a table and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nodekit.deploy.compare.compare_plan import BASE

if TYPE_CHECKING:
    from rich.table import Table

Outcome = Literal["trained", "failed", "not here"]

COLUMNS = ("engine", "ranks", "time", "training", "samples/s", "speed-up", "memory", "accuracy", "F1")
CSV_COLUMNS = (
    "engine", "ranks", "outcome", "seconds", "samples_per_s", "speedup", "peak_memory_bytes", "accuracy", "f1", "loss",
    "first_step_s", "train_seconds", "steps", "problem",
)  # fmt: skip

_STYLES = {"failed": "bold red", "not here": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one engine on a number of ranks."""

    engine: str
    """The engine with its variants, as asked for: ``deepspeed:3``."""
    num_ranks: int
    outcome: Outcome
    problem: str = ""
    """Why it failed, or cannot run here."""
    seconds: float | None = None
    """Seconds from the start of the first process to the end of the last."""
    samples_per_s: float | None = None
    peak_memory_bytes: int | None = None
    accuracy: float | None = None
    f1: float | None = None
    """Macro F1; like accuracy and loss, of the last evaluation."""
    loss: float | None = None
    first_step_s: float | None = None
    train_seconds: float | None = None
    """Seconds of training, without imports and other preparation before the first step."""
    steps: int | None = None

    @classmethod
    def of_result(cls, engine: str, num_ranks: int, *, seconds: float, result: Mapping[str, Any]) -> Row:
        """Return the row of a run that has succeeded, from its ``result.json``."""
        names = (
            "samples_per_s",
            "peak_memory_bytes",
            "accuracy",
            "f1",
            "loss",
            "first_step_s",
            "train_seconds",
            "steps",
        )
        measured: dict[str, Any] = {name: result.get(name) for name in names}
        return cls(engine=engine, num_ranks=num_ranks, outcome="trained", seconds=seconds, **measured)


def base_of(rows: Sequence[Row]) -> float | None:
    """Return the throughput of `single`; None if it has not trained."""
    return next((row.samples_per_s for row in rows if row.engine == BASE), None)


def speedup(row: Row, base: float | None) -> float | None:
    """Return the throughput relative to `single`'s; None if either is unknown."""
    return row.samples_per_s / base if row.samples_per_s and base else None


def cells(row: Row, base: float | None) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    times = speedup(row, base)
    rate = row.outcome if row.samples_per_s is None else shown_rate(row.samples_per_s)
    return (
        row.engine,
        str(row.num_ranks),
        minutes(row.seconds),
        minutes(row.train_seconds),
        "–" if rate == "trained" else rate,
        "–" if times is None else f"{times:.2f} ×",
        "–" if row.peak_memory_bytes is None else _size(row.peak_memory_bytes),
        "–" if row.accuracy is None else f"{row.accuracy:.2%}",
        "–" if row.f1 is None else f"{row.f1:.4f}",
    )


def table(rows: Sequence[Row]) -> Table:
    """Return the table of all rows, at most 80 columns wide."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    base = base_of(rows)
    for row in rows:
        style = _STYLES.get(row.outcome, "")
        found.add_row(*(Text(cell, style if cell == row.outcome else "") for cell in cells(row, base)))
    return found


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write the measured numbers; unknown ones are empty."""
    base = base_of(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for row in rows:
            values = {"ranks": row.num_ranks, "speedup": speedup(row, base)}
            writer.writerow([values.get(name, getattr(row, name, None)) for name in CSV_COLUMNS])


def minutes(seconds: float | None) -> str:
    """Return a time as ``m:ss``."""
    return "–" if seconds is None else f"{round(seconds) // 60}:{round(seconds) % 60:02}"


def shown_rate(value: float) -> str:
    """Format samples per second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 10 * 2**30 else f"{num_bytes / 2**30:.1f} GiB"
