"""Lines of the ranks' output: selects, orders and formats them. Pure, except for `Source`."""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from nodekit.deploy.connect.channel import CALL_TIMEOUT_S
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.connect.channel import HostChannel

WINDOW_S = 0.4  # how long a new line is held back for older lines of other nodes
_COLOURS = (36, 35, 32, 33, 34, 91, 96, 95)  # the same as in deploy/screen/view.py
# From faulthandler: the frames below the user's script, and the list of all C extensions. From torch's NCCL watchdog on
# each rank that loses another: its own C++ stack, and that of where the collective began.
_NO_USE = re.compile(
    r'  File "(?:[^"]*/deploy/agent/ranks/(?:forkserver|worker)\.py|<frozen runpy>)", line \d+ in |Extension modules: '
    r"|frame #\d+: |#\d+ \S+ from \S+:\d+$"
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_WHEN = "10m, 2h, 12:03, 2026-11-22 or 2026-11-22T12:03"


class Line(NamedTuple):
    """One line of a rank's output."""

    time: float
    """Seconds since 1970, by our clock."""
    node: str
    rank: int
    attempt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The selection of lines to show; an empty or None field selects all."""

    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    attempt: str = ""
    """``0.1``, a generation as ``1``, or ``last``."""
    since: float | None = None
    until: float | None = None
    grep: str | None = None

    def on_host(self, attempts: Sequence[str] | None, clock_offset: float) -> dict[str, Any]:
        """Return the arguments for deploy/host/logs/logread.py, with times by the host's clock."""
        return {
            "ranks": list(self.ranks) or None,
            "attempts": None if attempts is None else list(attempts),
            "since": None if self.since is None else self.since + clock_offset,
            "until": None if self.until is None else self.until + clock_offset,
            "grep": self.grep,
        }


@dataclass(frozen=True, kw_only=True)
class Source:
    """The logs of one node: those on the node, or a fetched copy."""

    node: str
    folder: str
    clock_offset: float
    """The clock of the node that wrote them minus ours, in seconds."""
    channel: HostChannel | None = None
    """The channel to the host with the files; None if they are on this machine."""

    def call(self, function: str, **args: Any) -> Any:
        """Call a function of deploy/host/logs/logread.py on the logs."""
        if self.channel is not None:
            return self.channel.call(
                f"logread.{function}", timeout_s=CALL_TIMEOUT_S, folder=self.folder, **args
            )
        from nodekit.deploy.host.logs import logread

        return getattr(logread, function)(self.folder, **args)


def parse_when(text: str, *, now: float, option: str = "--since") -> float:
    """Parse a time, ``10m`` (ago), ``12:03`` or ``2026-11-22T12:03`` (local time), into seconds since 1970.

    Raises:
        KitError: the text has none of these forms.
    """
    text = text.strip()
    if span := _SPAN.fullmatch(text):
        return now - float(span[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[span[2]]
    for form in ("%H:%M", "%H:%M:%S"):
        try:
            clock = time.strptime(text, form)
        except ValueError:
            continue
        today = time.localtime(now)
        # A time of day that is later than now is yesterday's.
        day = today.tm_mday - (
            (clock.tm_hour, clock.tm_min, clock.tm_sec) > (today.tm_hour, today.tm_min, today.tm_sec)
        )
        return time.mktime(
            (today.tm_year, today.tm_mon, day, clock.tm_hour, clock.tm_min, clock.tm_sec, 0, 0, -1)
        )
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"):
        try:
            return time.mktime((*time.strptime(text.replace(" ", "T", 1), form)[:8], -1))
        except ValueError:
            continue
    raise KitError(f"{option}: found '{text}'", wanted=f"a time, as {_WHEN}")


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse a list of ranks: ``3``, ``0-3`` or ``0,2``.

    Raises:
        KitError: the text has none of these forms.
    """
    found: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if span is None or int(span[1]) > int(span[2] or span[1]):
            raise KitError(f"--rank: found '{text}'", wanted="ranks, as 3, 0-3 or 0,2")
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    return tuple(found)


def pick_attempts(wanted: str, there: Iterable[str]) -> list[str]:
    """Return the attempts that ``0.1``, ``1`` (all of a generation) or ``last`` selects from those that exist.

    Raises:
        KitError: there is no such attempt.
    """
    known = sorted(set(there), key=lambda each: tuple(map(int, each.split("."))))
    if wanted == "last":
        return known[-1:]
    found = [each for each in known if each == wanted or each.split(".")[0] == wanted]
    if not found:
        listed = ", ".join(known) or "none yet"
        raise KitError(f"--attempt: found '{wanted}'", wanted=f"one of those there are: {listed}; or last")
    return found


def is_shown(line: str) -> bool:
    """Whether to show a line in a terminal: some lines of tracebacks help no reader. The log has all lines."""
    return not _NO_USE.match(line)


class Window:
    """A buffer that holds lines from several nodes back for `WINDOW_S`, to put them in the order of time."""

    def __init__(self, order: Sequence[str]) -> None:
        self._order = {node: place for place, node in enumerate(order)}
        self._heap: list[tuple[float, int, int, Line]] = []
        self._come: list[tuple[float, float]] = []
        self._count = 0

    def add(self, lines: Iterable[Line], now: float) -> None:
        """Add lines that arrived at `now` (time.monotonic())."""
        for line in lines:
            self._count += 1
            place = self._order.get(line.node, len(self._order))
            heapq.heappush(self._heap, (line.time, place, self._count, line))
            self._come.append((now, line.time))

    def ready(self, now: float) -> list[Line]:
        """Remove and return, in order, all lines up to the latest that arrived at least `WINDOW_S` ago."""
        late = 0
        while late < len(self._come) and self._come[late][0] <= now - WINDOW_S:
            late += 1
        until = max((when for _, when in self._come[:late]), default=float("-inf"))
        del self._come[:late]
        found = []
        while self._heap and self._heap[0][0] <= until:
            found.append(heapq.heappop(self._heap)[3])
        return found


class Style:
    """How lines look: plain in a pipe, with time and colours in a terminal."""

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        terminal: bool,
        colour: bool,
        times: bool = False,
        as_json: bool = False,
    ) -> None:
        """Set how lines are formatted.

        Args:
            nodes: all nodes that may have lines, in their order.
            terminal: whether to format for people: times, columns, and a line where an attempt or a day begins.
            colour: whether to colour each node's lines.
            times: whether to put date and time, to the millisecond, before each line.
            as_json: whether to format each line as a JSON object.
        """
        self._places = {node: place for place, node in enumerate(nodes)}
        self._width = max(map(len, nodes), default=0) + 2
        self._terminal, self._colour, self._times, self._json = terminal, colour, times, as_json
        self._attempt = (0, 0)
        self._day = time.strftime("%Y-%m-%d")

    def shown(self, line: Line) -> list[str]:
        """Return the text lines to print for a line, with a separator before it if an attempt or a day begins."""
        if self._json:
            return [json.dumps(line._asdict(), ensure_ascii=False)]
        local = time.localtime(line.time)
        if self._terminal and not is_shown(line.text):
            return []
        if not self._terminal:
            when = f"{_exact(line.time)} " if self._times else ""
            return [f"{when}{line.node}:{line.rank} | {line.text}"]
        found = []
        if not self._times and (day := time.strftime("%Y-%m-%d", local)) != self._day:
            self._day = day
            found.append(self._paint(f"── {day} ──", 2))
        generation, _, number = line.attempt.partition(".")
        if (attempt := (int(generation), int(number))) > self._attempt:
            # A node may be a little late: no separator for its last lines of the previous attempt.
            self._attempt = attempt
            found.append(self._paint(f"── attempt {line.attempt} ──", 2))
        when = _exact(line.time) if self._times else time.strftime("%H:%M:%S", local)
        prefix = f"{line.node}:{line.rank}".ljust(self._width)
        place = self._places.setdefault(line.node, len(self._places))
        # Reset a colour that the rank left on.
        end = "\x1b[0m" if "\x1b" in line.text else ""
        found.append(
            f"{self._paint(when, 2)} {self._paint(f'{prefix} │', _COLOURS[place % len(_COLOURS)])} {line.text}{end}"
        )
        return found

    def _paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def _exact(when: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))}.{int(when % 1 * 1000):03d}"


def style_of(nodes: Sequence[str], out: TextIO, *, times: bool, as_json: bool) -> Style:
    """Return the style for an output stream: for people if it is a terminal."""
    terminal = out.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Style(nodes, terminal=terminal, colour=colour, times=times, as_json=as_json)


def lines_of(source: Source, found: Iterable[Sequence[Any]]) -> list[Line]:
    """Convert a node's answer, tuples of (time, rank, attempt, text), to lines with times by our clock."""
    return [
        Line(when - source.clock_offset, source.node, rank, attempt, text)
        for when, rank, attempt, text in found
    ]
