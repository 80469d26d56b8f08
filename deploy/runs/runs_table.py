"""`kit runs`: a table of the runs on record, made only from files on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.output import terminal
from nodekit.deploy.records import find_runs, locks, runs
from nodekit.deploy.screen.verdict_screen import resume_command
from nodekit.deploy.story.event_text import metric
from nodekit.inventory.errors import KitError

LEFT = "left"
"""The state of a run that is on record as running, but has no supervisor."""
_STYLES = {"succeeded": "green", "running": "cyan", "starting": "cyan", "failed": "red", LEFT: "yellow"}
_HEAD = ("run", "started", "took", "nodes", "step", "best", "goodput", "state", "verdict")
_NUMBERS = ("took", "nodes", "step", "goodput")
WANTED_VERDICT = 24
HOW_TO_TELL = (
    "~ is guessed from what rank 0 printed; what it writes to $NODEKIT_PROGRESS_FILE, as 37/100, is its step"
)
_GIVEN_UP = ("goodput", "took", "best", "nodes", "started")
"""Columns that a narrow terminal omits, in this order."""


@dataclass(frozen=True)
class Row:
    """One run's row in the table."""

    run: runs.Run
    state: str
    """The record's state, or `LEFT`."""
    numbers: dict[str, Any]
    """The fields of the run's summary."""
    headline: tuple[str, float] | None

    @property
    def verdict(self) -> str:
        """How the run ended, in a line; if its state is `LEFT`, what to do."""
        if self.state == LEFT:
            again = resume_command(self.run)
            return f"nobody looks after it: {again} does again, kit down {self.run.run_id} stops it"
        problem = self.numbers.get("problem", "")
        return "  ".join(filter(None, [self.run.sweep_values, self.run.verdict, problem]))

    def cells(self) -> dict[str, str]:
        """Return the text of each column."""
        run, step, total = self.run, self.numbers.get("step"), self.numbers.get("total_steps")
        goodput = self.numbers.get("goodput")
        guessed = guess.brief(self.numbers.get("guess"))
        return {
            "run": run.run_id,
            "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
            "took": duration(self.numbers["seconds"]) if self.numbers.get("seconds") else "–",
            "nodes": run.num_nodes,
            "step": guessed if step is None else f"{step}/{total}" if total else str(step),
            "best": f"{self.headline[0]} {metric(*self.headline)}" if self.headline else "–",
            "goodput": "–" if goodput is None else f"{goodput:.0%}",
            "state": self.state,
            "verdict": self.verdict,
        }


def row(run: runs.Run) -> Row:
    """Return a run's row, from its files on this machine."""
    from nodekit.deploy.story.summary import summary

    found = summary(run)
    state = LEFT if is_left(run) else run.state
    return Row(run, state, vars(found), found.headline)


def is_left(run: runs.Run) -> bool:
    """Whether a run is on record as running here, but no process starts or supervises it."""
    if run.state not in runs.LIVE or not run.is_led_here:
        return False
    return not (locks.is_supervised(run) or locks.is_held(locks.starting_lock(run)))


def chosen(found: Sequence[runs.Run], name: str | None, last: int | None) -> list[runs.Run]:
    """Return the runs of an inventory file, or whose id begins with `name`; of these the last `last`.

    Raises:
        KitError: no run on record matches.
    """
    find_runs.check_id(name)
    if name:
        here = [run for run in found if find_runs.is_same(run.inventory_path, Path(name))]
        here = here or [run for run in found if run.run_id.startswith(name)]
        if found and not here:
            names = ", ".join(dict.fromkeys(run.name for run in reversed(found)))
            raise KitError(
                f"no run of '{name}' on record: wanted an inventory file, or the beginning of an id; "
                f"there are runs of {names}"
            )
        found = here
    return list(found if last is None else found[-last:] if last else [])


def text(rows: Sequence[Row]) -> str:
    """Format the table as plain text, for files and pipes."""
    lines = [dict(zip(_HEAD, _HEAD, strict=True)), *(each.cells() for each in rows)]
    widths = {name: max(len(line[name]) for line in lines) for name in _HEAD}
    return "\n".join("  ".join(line[name].ljust(widths[name]) for name in _HEAD).rstrip() for line in lines)


def show(rows: Sequence[Row]) -> None:
    """Print the table in colour, fitted to the terminal's width."""
    if not rows:
        return
    from rich.table import Table
    from rich.text import Text

    console = terminal.console(highlight=False)
    lines = [each.cells() for each in rows]
    columns = list(_HEAD)
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in columns}
    for name in _GIVEN_UP:
        if (
            sum(widths[each] + 2 for each in columns[:-1]) + min(widths["verdict"], WANTED_VERDICT)
            <= console.width
        ):
            break
        columns.remove(name)
    left = console.width - sum(widths[each] + 2 for each in columns[:-1])
    widths["verdict"] = max(len("verdict"), min(widths["verdict"], left))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, width=widths[name], no_wrap=True, overflow="ellipsis", justify=justify)
    for line in lines:
        style = _STYLES.get(line["state"], "")
        table.add_row(*(Text(line[name], style if name == "state" else "") for name in columns))
    console.print(table)


def public(each: Row) -> dict[str, Any]:
    """Return a run's entry in the output of ``--json``."""
    return {**runs.public(each.run), "state": each.state, **each.numbers}


def duration(seconds: float) -> str:
    """Format seconds: ``31 s``, ``12 min``, ``3.4 h``, ``2.1 d``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
