"""`kit drill`: runs a job once without a fault and then once per fault, and reports which it survived."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.drill import drill_report
from nodekit.deploy.drill.drill_lab import Lab
from nodekit.deploy.drill.drill_report import Result
from nodekit.deploy.drill.drill_run import Drill
from nodekit.deploy.drill.drill_site import Site
from nodekit.deploy.drill.faults import FAULTS, Fault, why_not
from nodekit.deploy.output import terminal
from nodekit.deploy.output.interrupts import sigterm_interrupts
from nodekit.deploy.output.wording import count
from nodekit.deploy.records import record_files
from nodekit.inventory.errors import WrongUsage
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory

if TYPE_CHECKING:
    from rich.table import Table

_NO_TERMINAL_WIDTH = 200
_NAME_WIDTH = max(map(len, FAULTS))
_STYLES = {"survived": "green", "not survived": "bold red", "not tried": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit drill`."""

    inventory: Path
    faults: tuple[str, ...] = ()
    """Names of faults; empty: all that the inventory allows."""
    command: tuple[str, ...] = ()
    json: bool = False
    load_lab: Callable[[Path], Lab]
    """Function that loads the lab in a folder."""
    ssh: SshOptions = field(default_factory=SshOptions)


def drill(options: Options) -> int:
    """Try the faults; return 0 if all were survived, else 1."""
    inventory = load_inventory(options.inventory)
    if not inventory.hosts:
        raise WrongUsage(f"{options.inventory}: a drill needs `hosts:`, not `slurm:`")
    site = Site(inventory, options.load_lab)
    faults = chosen(options.faults, inventory, site.lab)
    folder = record_files.folder().parent / "drills" / f"{inventory.name}-{time.strftime('%m%d-%H%M%S')}"
    voice = Voice(sys.stderr if options.json else sys.stdout)
    drilling = Drill(site, options.command, options.ssh, folder, voice.say)
    with sigterm_interrupts():
        try:
            drilling.unbroken()
            minutes = max(1, round(len(faults) * (drilling.run_s + 10) / 60))
            voice.line(f"{count(len(faults), 'fault')} to try: {minutes} min or more; Ctrl-C ends it early")
            for fault in faults:
                drilling.try_fault(fault)
        finally:
            if drilling.results:
                conclude(drilling.results, folder, as_json=options.json)
    return 0 if drill_report.are_survived(drilling.results, asked_for=bool(options.faults)) else 1


def list_faults(options: Options) -> int:
    """Print each fault and, if it cannot be tried on this inventory, the reason."""
    inventory = load_inventory(options.inventory)
    lab = Site(inventory, options.load_lab).lab
    for fault in FAULTS.values():
        reason = why_not(fault, num_nodes=len(inventory.hosts), lab=lab)
        print(f"{fault.name.ljust(_NAME_WIDTH)}  {fault.text}")
        if reason:
            print(f"{' ' * _NAME_WIDTH}  not here: {reason}")
    return 0


def chosen(names: Sequence[str], inventory: Inventory, lab: Lab | None) -> list[Fault]:
    """Return the faults with these names; without names, all that are possible.

    Raises:
        WrongUsage: a name is unknown, or its fault cannot be tried here.
    """
    reasons = {
        name: why_not(fault, num_nodes=len(inventory.hosts), lab=lab) for name, fault in FAULTS.items()
    }
    possible = [name for name, reason in reasons.items() if not reason]
    problems = []
    for name in names:
        if name not in FAULTS:
            near = get_close_matches(name, FAULTS, n=1)
            problems.append(f"{name}: no such fault" + (f"; did you mean {near[0]}?" if near else ""))
        elif reasons[name]:
            problems.append(f"{name}: not on {inventory.path}: {reasons[name]}")
    if problems:
        raise WrongUsage("\n".join([*problems, f"possible there: {', '.join(possible)}"]))
    return [FAULTS[name] for name in dict.fromkeys(names or possible)]


class Voice:
    """Prints the progress."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._last = ""

    def line(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._file, flush=True)

    def say(self, name: str, text: str) -> None:
        """Print lines about one run, its name before the first."""
        for line in text.splitlines():
            shown, self._last = "" if name == self._last else name, name
            self.line(f"{shown.ljust(_NAME_WIDTH)}  {line}".rstrip())


def conclude(results: Sequence[Result], folder: Path, *, as_json: bool) -> None:
    """Print the results, and write them to the folder.

    Raises:
        NotWritten: the file cannot be written; the results have been printed by then.
    """
    text = json.dumps([asdict(result) for result in results], indent=2, ensure_ascii=False)
    if as_json:
        print(text, flush=True)
    else:
        print()
        terminal.console(width=None if sys.stdout.isatty() else _NO_TERMINAL_WIDTH).print(table(results))
        print()
        for result in results:
            if result.problem:
                print(f"{result.fault}: {drill_report.sentence(result)}")
        print(drill_report.verdict(results), flush=True)
    path = folder / "results.json"
    with record_files.told(path):
        path.write_text(text + "\n", encoding="utf-8")
    if not as_json:
        print(f"each run's output, and results.json: {folder}", flush=True)


def table(results: Sequence[Result]) -> Table:
    """Return a table with a row per result."""
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in drill_report.COLUMNS:
        found.add_column(column, justify="right" if column in ("detected", "resumed", "lost") else "left")
    for result in results:
        *cells, last = drill_report.row(result)
        found.add_row(*cells, Text(last, style=_STYLES[result.outcome]))
    return found
