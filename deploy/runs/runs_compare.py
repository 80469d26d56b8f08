"""`kit runs --compare`: plots the curves of several runs together, and lists their differences."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.backend import backend_of
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.output import plot, terminal
from nodekit.deploy.output.plot import Curve
from nodekit.deploy.records import find_runs, runs
from nodekit.deploy.records.runs import Run
from nodekit.deploy.runs.runs_table import duration
from nodekit.deploy.story.history import History
from nodekit.deploy.story.summary import Summary
from nodekit.inventory.errors import KitError

MAX_RUNS = len(plot.MARKS)
HEIGHT = 12


@dataclass(frozen=True)
class Compared:
    """One of the runs, with its history."""

    run: Run
    history: History
    summary: Summary

    @property
    def argv(self) -> list[str]:
        """The command of each rank, as the user wrote it."""
        job = self.run.inventory.get("job", {})
        return list(self.run.command or job.get("command") or ["-m", "nodekit.training"])

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Return name → (step, value) points: the training loss, and each metric that was evaluated."""
        found: dict[str, list[tuple[float, float]]] = {}
        found["training loss"] = [(each.step, each.value) for each in self.history.losses()]
        for name in self.history.metrics:
            found[name] = [(each.step, each.value) for each in self.history.metric(name)]
        return {name: points for name, points in found.items() if points}


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """Split a command into its options and their values; words that are neither go into ``command``; pure."""
    options: dict[str, str] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-m" or _is_number(word):
            rest.append(word)
            continue
        name, given, value = word.partition("=")
        while not given and words and (not words[0].startswith("-") or _is_number(words[0])):
            value = f"{value} {words.pop(0)}".strip()
        options[name] = value or "yes"
    return {"command": shlex.join(rest), **options}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def differences(compared: Sequence[Compared]) -> dict[str, list[str]]:
    """Return name → its value in each run: settings that differ, and all results; pure."""
    asked = [options_of(each.argv) for each in compared]
    asked = [{**own, **_settings(each.run)} for own, each in zip(asked, compared, strict=True)]
    names = list(dict.fromkeys(name for own in asked for name in own))
    found = {name: [own.get(name, "–") for own in asked] for name in names}
    found = {name: values for name, values in found.items() if len(set(values)) > 1}
    metrics = dict.fromkeys(name for each in compared for name in each.summary.best)
    came: dict[str, list[str]] = {
        "state": [each.run.state for each in compared],
        "nodes": [str(len(each.run.nodes)) for each in compared],
        "world size": [_or_dash(each.summary.world_size) for each in compared],
        "steps": [_or_dash(each.summary.step) for each in compared],
        **{f"best {name}": [_best(each.summary, name) for each in compared] for name in metrics},
        "time": [duration(each.summary.seconds) if each.summary.seconds else "–" for each in compared],
        "goodput": [
            "–" if each.summary.goodput is None else f"{each.summary.goodput:.0%}" for each in compared
        ],
        "restarts": [_or_dash(each.summary.restarts) for each in compared],
    }
    return {**found, **came}


def _settings(run: Run) -> dict[str, str]:
    env = run.inventory.get("job", {}).get("env", {})
    return {
        "inventory": run.inventory_path,
        "code": run.code_digest[:8] or "–",
        **{f"${name}": str(value) for name, value in env.items()},
    }


def _best(summary: Summary, name: str) -> str:
    if name not in summary.best:
        return "–"
    value, step = summary.best[name]
    return f"{value:.4g}" + (f" (step {step:,})" if step is not None else "")


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def panels(compared: Sequence[Compared]) -> dict[str, list[Curve]]:
    """Return name → the curves of all runs: the training loss first, then accuracy, then the rest."""
    curves = [each.curves() for each in compared]
    names = list(dict.fromkeys(name for own in curves for name in own))
    names.sort(key=lambda name: (name != "training loss", name != "accuracy", name != "loss"))
    return {
        name: [Curve(each.run.run_id, own.get(name, [])) for each, own in zip(compared, curves, strict=True)]
        for name in names
    }


def show(compared: Sequence[Compared]) -> None:
    """Plot the first two panels, and print the differences, as wide as the terminal."""
    from rich.table import Table
    from rich.text import Text

    console = terminal.console(highlight=False, width=None if sys.stdout.isatty() else 100)
    colour = console.color_system is not None and not console.no_color
    drawn = list(panels(compared).items())[:2]
    styles = [plot.COLOURS[number % len(plot.COLOURS)] for number in range(len(compared))]
    for name, curves in drawn:
        console.print(Text(name, "bold"))
        width = min(console.width, 120)
        for line in plot.plot(curves, width=width, height=HEIGHT, colour=colour):
            console.print(
                Text.assemble(
                    *((cell.text, styles[cell.curve] if cell.curve is not None else "") for cell in line)
                ),
                soft_wrap=True,
            )
    if not drawn:
        console.print("no curve: none of these has told of a loss or a metric")
    for number, each in enumerate(compared) if drawn else ():
        mark = "⠶⠶" if colour else plot.MARKS[number]
        console.print(Text.assemble((f"  {mark} ", styles[number] if colour else ""), each.run.run_id))
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("")
    for each, style in zip(compared, styles, strict=True):
        table.add_column(Text(each.run.run_id, style if colour else ""), overflow="fold")
    for name, values in differences(compared).items():
        table.add_row(name, *(Text(value) for value in values))
    console.print(table)


def to_json(compared: Sequence[Compared]) -> str:
    """Return the comparison as JSON."""
    told = [
        {
            **runs.public(each.run),
            **vars(each.summary),
            "options": options_of(each.argv),
            "curves": each.curves(),
        }
        for each in compared
    ]
    values: Mapping[str, Any] = {
        name: dict(zip([each.run.run_id for each in compared], row, strict=True))
        for name, row in differences(compared).items()
    }
    return json.dumps({"runs": told, "differences": values}, indent=2)


def read(names: Sequence[str], options: SshOptions) -> list[Compared]:
    """Read the runs and their events; those of a Slurm run come from its login node.

    Raises:
        KitError: a run is not on record, or there are fewer than two runs, or too many.
    """
    found = list({run.run_id: run for run in map(find_runs.find, names)}.values())
    if not 2 <= len(found) <= MAX_RUNS:
        raise KitError(
            f"kit runs --compare: found {len(found)} run{'s' * (len(found) != 1)}", wanted=f"2 to {MAX_RUNS}"
        )
    compared = []
    for run in found:
        own, told = backend_of(run).history(run, options)
        history = History.of(told, now=own.end_or_now())
        compared.append(Compared(own, history, Summary.of(history)))
    return compared
