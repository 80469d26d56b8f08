"""What a person sees while a run goes: phases, log lines with ``node:rank``, one status line per node."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PLAIN_STATUS_S = 15.0  # without a terminal, how often the nodes' status lines are repeated
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")


class View:
    """Prints lines; in a terminal the nodes' status stays below them."""

    def __init__(self, nodes: list[str], *, logs: bool = True) -> None:
        self._nodes = nodes
        self._logs = logs
        self._width = max(map(len, nodes), default=0)
        self._status: dict[str, str] = {}
        self._live: Live | None = None
        self._printed: dict[str, str] = dict.fromkeys(nodes, "connecting")
        self._printed_at = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> View:
        if self._terminal:
            from rich.live import Live  # only a terminal needs it

            self._live = Live(get_renderable=self._table, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str, *, style: str | None = None) -> None:
        """One line, or several."""
        if self._live is not None:
            self._live.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def log(self, node: str, rank: str, lines: list[str]) -> None:
        """Lines of a rank's output."""
        if not self._logs or not lines:
            return
        prefix = f"{node}:{rank}".ljust(self._width + 2)
        if self._live is None:
            print("\n".join(f"{prefix} | {line}" for line in lines), flush=True)
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
        if time.monotonic() - self._printed_at > PLAIN_STATUS_S:
            changed = list(lines)
        if changed:
            self._printed, self._printed_at = states, time.monotonic()
            print("\n".join(f"{node.ljust(self._width)}  {lines[node]}" for node in changed), flush=True)

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


def _state_style(state: str) -> str:
    if state in ("running", "waiting", "succeeded"):
        return "green"
    return "bold red" if state in ("failed", "unreachable", "gone") else "yellow"


def status_line(seen: Mapping[str, Any], *, now: float) -> str:
    """A node's status for people: state, then rank, attempt, progress, and how long ago that was."""
    parts = [str(seen.get("state", "starting"))]
    if seen.get("rank") is not None:
        last = seen["rank"] + max(0, len(seen.get("workers", ())) - 1)
        ranks = str(seen["rank"]) if last == seen["rank"] else f"{seen['rank']}-{last}"
        parts.append(f"rank {ranks} of {seen['world_size']}")
    if seen.get("attempt") and not str(seen["attempt"]).endswith(".0"):
        parts.append(f"attempt {seen['attempt']}")
    if seen.get("progress"):
        parts.append(f"step {seen['progress']}")
        quiet = now - float(seen["progress_time"])
        if quiet > 5 and seen.get("state") == "running":
            parts.append(f"(no progress for {quiet:.0f} s)")
    if seen.get("blocked"):
        parts.append(str(seen["blocked"]))
    if seen.get("message"):
        parts.append(str(seen["message"]))
    return "  ".join(parts)
