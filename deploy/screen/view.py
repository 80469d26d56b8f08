"""What a person sees of a run in lines, each with ``node:rank``, and states; and the last of one that is over."""

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

PLAIN_WIDTH = 100  # where there is no terminal to ask
PLAIN_STATUS_S = 15.0  # without a terminal, how often the nodes' status lines are repeated
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


class View:
    """Prints lines; in a terminal the nodes' status stays below them."""

    tick_s = 0.5  # each time takes a core half a millisecond: it has other things in its caches by then

    def __init__(self, nodes: list[str], *, logs: bool = True, repeats: bool = True) -> None:
        """Without a terminal, a node's status is printed when its state changes, and again now and then (`repeats`)."""
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
        """One line, or several; `is_event`: an event tells the same."""
        if self._live is not None:
            from nodekit.deploy.screen.screen_text import wrapped

            console = self._live.console
            console.print(wrapped(text, console.width), markup=False, highlight=False, soft_wrap=True)
        else:
            _print(text)

    def log(self, node: str, rank: str, lines: list[str]) -> None:
        """Lines of a rank's output."""
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
        """Each node's status line."""
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
        """Each reachable node's status, as its agent wrote it."""

    def event(self, event: Event) -> None:
        """One event of the run, in the order in which they come in."""

    def keys(self) -> None:
        """Do what the user has asked for by a key.

        Raises:
            Left: to leave the job running.
            StopAsked: to stop it.
        """

    def close(self) -> None:
        """What is said from now on goes below all that was shown."""

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
    """Print it, made harmless, for much of it is read through `tee`."""
    print(terminal.harmless(text), flush=True)


def _state_style(state: str) -> str:
    if state in ("running", "waiting", "succeeded"):
        return "green"
    return "bold red" if state in ("failed", "unreachable", "gone") else "yellow"


def show_last(run: Run, record: Run, events: Iterable[Event]) -> int:
    """Print the last that is known of a run that is over, by its leader's record, and how it ended; the exit status."""
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
