"""The view of a run as lines, each with ``node:rank``, and node states; and the final view of a run that is over."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.output import terminal
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.loglines import is_shown
from nodekit.deploy.records.runs import ENDED, Run

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PLAIN_WIDTH = 100  # columns, if stdout is no terminal
PLAIN_STATUS_S = 15.0  # without a terminal, the nodes' status lines are repeated this often
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


class View:
    """Prints a run as lines; in a terminal the nodes' status stays below the lines."""

    # Each tick takes half a millisecond of a core, most of it because the core's caches hold other data by then.
    tick_s = 0.5

    def __init__(self, nodes: list[str], *, logs: bool = True, repeats: bool = True) -> None:
        """Without a terminal, print a node's status when it changes, and (`repeats`) all every `PLAIN_STATUS_S`."""
        self._nodes = nodes
        self._logs = logs
        self._repeats = repeats
        self._width = max(map(len, nodes), default=0)
        self._status: dict[str, str] = {}
        self._live: Live | None = None
        self._printed: dict[str, str] = dict.fromkeys(nodes, "connecting")
        self._printed_at = time.monotonic()
        self._terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def __enter__(self) -> View:
        if self._terminal:
            from rich.live import Live  # only a terminal needs it

            self._live = Live(
                get_renderable=self._table,
                console=terminal.console(),
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str, *, is_event: bool = False) -> None:  # noqa: ARG002
        """Show a text of one or more lines; `is_event`: `event` is called with the same."""
        if self._live is not None:
            from nodekit.deploy.screen.screen_text import wrapped

            console = self._live.console
            console.print(wrapped(text, console.width), markup=False, highlight=False, soft_wrap=True)
        else:
            _print(text)

    def log(self, node: str, rank: str, lines: list[str]) -> None:
        """Show lines of a rank's output."""
        lines = [line for line in lines if is_shown(line)]
        if not self._logs or not lines:
            return
        prefix = f"{node}:{rank}".ljust(self._width + 2)
        lines = [terminal.harmless(line) for line in lines]
        if self._live is None:
            _print("\n".join(f"{prefix} | {line}" for line in lines))
            return
        from rich.text import Text

        colour = _COLOURS[self._nodes.index(node) % len(_COLOURS)]
        text = Text()
        for number, line in enumerate(lines):
            text.append("\n" if number else "").append(f"{prefix} │ ", style=colour).append_text(
                Text.from_ansi(line)
            )
        self._live.console.print(text, soft_wrap=True)

    def status(self, lines: Mapping[str, str]) -> None:
        """Show each node's status line."""
        self._status = dict(lines)
        if self._live is not None:
            return
        states = {node: line.partition("  ")[0] for node, line in lines.items()}
        changed = [node for node in lines if states[node] != self._printed.get(node)]
        if self._repeats and time.monotonic() - self._printed_at > PLAIN_STATUS_S:
            changed = list(lines)
        if changed:
            self._printed, self._printed_at = states, time.monotonic()
            _print("\n".join(f"{node.ljust(self._width)}  {lines[node]}" for node in changed))

    def see(self, statuses: Mapping[str, NodeStatus]) -> None:
        """Take each reachable node's status, as its agent wrote it; ignored here."""

    def event(self, event: Event) -> None:
        """Take one event of the run, in the order of arrival; ignored here."""

    def keys(self) -> None:
        """Handle the keys that the user has pressed; none here.

        Raises:
            Left: the user leaves, and the job goes on.
            StopAsked: the user stops the job.
        """

    def close(self) -> None:
        """Close the view: later texts go below all that was shown."""

    def _table(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for node in self._nodes:
            state, _, rest = self._status.get(node, "connecting").partition("  ")
            colour = _COLOURS[self._nodes.index(node) % len(_COLOURS)]
            table.add_row(
                Text(node, style=f"bold {colour}"), Text(state, style=_state_style(state)), Text(rest)
            )
        return table


def _print(text: str) -> None:
    """Print a text without control characters: much of this output is read through `tee`."""
    print(terminal.harmless(text), flush=True)


def _state_style(state: str) -> str:
    if state in ("running", "waiting", "succeeded"):
        return "green"
    return "bold red" if state in ("failed", "unreachable", "gone") else "yellow"


def show_last(run: Run, record: Run, events: Iterable[Event]) -> int:
    """Print the last known state of a run that is over, from its leader's record, and how it ended; return 0."""
    from nodekit.deploy.screen import screen
    from nodekit.deploy.screen.view_model import ViewModel

    watched = ViewModel(run.run_id, list(record.nodes), record.clock_offsets)
    for event in events:
        watched.event(event)
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else PLAIN_WIDTH
    terminal.console(highlight=False, width=width).print(
        screen.render(watched.model(run.ended or time.time()), width, None)
    )
    if run.state in ENDED:
        print(f"\n{run.run_id} {run.state}" + (f": {run.verdict}" if run.verdict != run.state else ""))
    return 0
