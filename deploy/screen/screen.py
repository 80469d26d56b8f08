"""The layout of a run's live view, for a terminal of any size; pure: a model in, lines out."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nodekit.deploy.output.wording import count, duration
from nodekit.deploy.records.runs import ENDED
from nodekit.deploy.screen.screen_text import (
    BLOCKS,
    cut,
    num_digits,
    number_text,
    rate_text,
    rule,
    spark,
    spread,
    styled,
    wrapped,
)
from nodekit.deploy.story.event_text import metric

GOOD = ("running", "waiting", "succeeded")
BAD = ("failed", "unreachable", "gone")
GIB = 2**30
QUIET_S = 10.0  # a running node that reports nothing for longer is marked

_MOST_EVENTS = 12
_MOST_CHART = 5
_CLOCK_WIDTH = 10  # width of the time, and two spaces, before an event
_WIDE = 140  # in wider terminals tables get no wider: their columns would only move apart


@dataclass(frozen=True, kw_only=True)
class Node:
    """One row of the table of nodes."""

    name: str
    state: str = "connecting"
    why: str = ""
    """What the node waits for, or why it is unreachable."""
    generation: int | None = None
    restarts: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    """The newest sample of the node's resource usage (docs/events.md)."""
    step: int | None = None
    rate: float | None = None
    """Steps per second, over the last seconds."""
    quiet_s: float | None = None
    """Seconds since the node last reported progress."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Everything that the screen shows at one moment."""

    run_id: str
    state: str
    """The run's state, as one word."""
    now: float
    nodes: Sequence[Node] = ()
    started: float | None = None
    generation: int | None = None
    restarts: int = 0
    step: int | None = None
    total_steps: int | None = None
    rate: float | None = None
    said: str = ""
    """What the ranks report besides their step."""
    losses: Sequence[tuple[int, float]] = ()
    """(step, loss), in the order of steps."""
    best: Mapping[str, float] = field(default_factory=dict)
    """Metric → its best value in the evaluations so far."""
    snapshot: tuple[int, float] | None = None
    """The newest snapshot: its step, and when it was committed."""
    events: Sequence[tuple[float, str]] = ()
    """(when, sentence), oldest first."""
    chosen: str | None = None
    """The node whose row is marked."""
    log: Sequence[str] | None = None
    """The last lines of the chosen node's ranks; None: the log is not shown."""
    keys: Sequence[tuple[str, str]] = ()
    """(key, what it does), the most important first."""
    asks: str = ""
    """A question, shown in place of the keys."""
    help: Sequence[tuple[str, str]] | None = None
    """(key, sentence) of the help page, shown in place of everything else."""

    @property
    def is_unknown(self) -> bool:
        """Whether no host has answered yet, so that the state of the nodes is unknown."""
        return bool(self.nodes) and all(node.state == "connecting" for node in self.nodes)


def render(model: Model, width: int, height: int | None) -> RenderableType:
    """Return the whole screen: at most `height` lines (None: no limit) of at most `width` columns."""
    return Group(*lines(model, width, height))


def lines(model: Model, width: int, height: int | None) -> list[Text]:
    """Return the screen that `render` draws, as lines."""
    width = max(width, 20)
    if height is not None:
        height = max(height, 3)
    foot = [] if height is None else [_foot(model, width)]
    if model.help is not None:
        body = [_title(model, width), Text(), *_help(model.help, width)]
    elif model.log is not None:
        room = 1000 if height is None else height - 3
        body = [_title(model, width), rule(f"log of {model.chosen}", width), *_log(model.log, width, room)]
    else:
        body = _overview(model, width, None if height is None else height - len(foot))
    if height is not None:
        body = body[: height - len(foot)]
        body += [Text()] * (height - len(foot) - len(body))
    for line in (*body, *foot):
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return [*body, *foot]


def closing(model: Model, num_events: int, width: int) -> RenderableType:
    """Return what stays on the terminal when the screen is closed: the run's state, and its last events.

    Args:
        model: the run's.
        num_events: how many events to show, at most.
        width: of the terminal, in columns; longer sentences are wrapped.
    """
    events = []
    for line in _events(model, 1000, min(num_events, len(model.events))):
        first, *more = wrapped(line.plain, width, indent=_CLOCK_WIDTH).split("\n")
        events.append(Text().append(first[:_CLOCK_WIDTH], "dim").append(first[_CLOCK_WIDTH:]))
        events += map(Text, more)
    if model.state in ENDED:
        return Group(*events)  # the caller prints how the run ended
    step = "" if model.step is None else f", step {model.step:,}"
    total = f" of {model.total_steps:,}" if step and model.total_steps else ""
    here = "" if model.is_unknown or not model.nodes else f", {_here(model)}"
    return Group(*events, Text(f"{model.run_id}: {model.state}{here}{step}{total}"))


def _here(model: Model) -> str:
    good = sum(node.state in GOOD for node in model.nodes)
    return f"{good} of {count(len(model.nodes), 'node')}"


def _overview(model: Model, width: int, height: int | None) -> list[Text]:
    """Lay out title, progress, nodes, loss and events: each gets its minimum first, then more in that order."""
    head = [_title(model, width), _progress(model, width)]
    num_events = min(len(model.events), _MOST_EVENTS)
    has_chart = len(model.losses) > 1
    if height is None:
        rows, chart, events, gaps = len(model.nodes), _MOST_CHART * has_chart, num_events, 3
    else:
        left = height - len(head) - 1  # the table's head
        rows = min(len(model.nodes), max(1, left - min(2, num_events)))
        rows = min(rows, max(3, left * 2 // 3)) if num_events else rows
        left -= rows
        events = min(num_events, max(left, 0), 3)
        left -= events
        chart = min(int(has_chart), max(left, 0))
        left -= chart
        gaps = min(left, 1 + (events > 0) + (chart > 0))
        left -= gaps
        more = min(len(model.nodes) - rows, max(left, 0))
        rows, left = rows + more, left - more
        if chart and left > 1:
            more = min(_MOST_CHART - 1, left)
            chart, left = chart + more, left - more
        events += min(num_events - events, max(left, 0))
    body = head
    if gaps > 0:
        body = [*body, Text()]
    body = [*body, *_table(model, width, rows)]
    if chart:
        body = [*body, *([Text()] if gaps > 2 else []), *_chart(model, width, chart)]
    if events:
        body = [*body, *([Text()] if gaps > 1 else []), *_events(model, width, events)]
    return body


# --- the parts ------------------------------------------------------------------------------------------------


def _title(model: Model, width: int) -> Text:
    here = sum(node.state in GOOD for node in model.nodes)
    parts = (
        [f"{here} of {count(len(model.nodes), 'node')}"]
        if model.nodes and model.state not in ("succeeded", "stopped") and not model.is_unknown
        else []
    )
    parts += [f"generation {model.generation}"] if model.generation else []
    parts += [count(model.restarts, "restart")] if model.restarts else []
    if model.started is not None:
        parts.append(f"for {duration(model.now - model.started)}")
    left = Text.assemble((model.run_id, "bold"), "  ", (model.state, _style(model.state)))
    clock = time.strftime("%H:%M:%S", time.localtime(model.now))
    for part in parts:
        if left.cell_len + len(part) + 3 + len(clock) + 2 > width:
            break
        left.append(" · ", "dim").append(part)
    return spread(left, Text(clock, "dim"), width)


def _progress(model: Model, width: int) -> Text:
    """Return the progress bar, share, steps, time left and rate; a narrow window gets fewer of them."""
    if model.step is None:
        no_step = "no step" if model.state in ENDED else "no step yet"
        return Text(model.said or ("not known yet" if model.is_unknown else no_step), "dim")
    rate = f"{model.rate:,.{1 if model.rate < 100 else 0}f} steps/s" if model.rate else ""
    if not model.total_steps:
        said = f"  {model.said}" if model.said else ""
        return Text.assemble(f"step {model.step:,}", (f"  {rate}{said}", "dim"))
    share = min(model.step / model.total_steps, 1.0)
    parts = [f"{share:4.0%}".replace("%", " %"), f"{model.step:,} of {model.total_steps:,} steps"]
    if rate and model.rate and model.state not in ENDED:
        left_s = (model.total_steps - model.step) / model.rate
        parts += [f"{duration(left_s) if left_s >= 10 else f'{left_s:.0f} s'} left", rate]
    while len(parts) > 1 and sum(map(len, parts)) + 3 * len(parts) + 10 > width:
        del parts[-1 if len(parts) != 3 else 1]
    text = " · ".join(parts)
    size = min(max(width - len(text) - 2, 5), 60)
    full, part = divmod(round(share * size * 2), 2)
    bar = Text().append("━" * full, "green").append("╸" * part, "green")
    return bar.append("─" * (size - full - part), "dim").append(f"  {text}")


@dataclass(frozen=True)
class _Column:
    title: str
    keep: int
    """Priority: where there is no room, the columns with the lowest value are dropped first."""
    cell: Callable[[Node], tuple[str, str]]
    """Node → its text and style."""
    left: bool = False


def _table(model: Model, width: int, rows: int) -> list[Text]:
    """Return the table's head and `rows` lines of nodes; if nodes do not fit, the last line counts them."""
    first, shown = _window(model, rows)
    hidden = [*model.nodes[:first], *model.nodes[first + len(shown) :]]
    cells = {column: [column.cell(node) for node in shown] for column in _columns(shown)}
    widths = {
        column: max(len(column.title), *(len(text) for text, _ in found))
        for column, found in cells.items()
        if shown
    }
    chosen = sorted(widths, key=lambda column: -column.keep)
    while len(chosen) > 2 and 2 + sum(widths[each] + 2 for each in chosen) - 2 > width:
        chosen.pop()
    columns = [column for column in widths if column in chosen]
    used = 2 + sum(widths[each] for each in columns)
    gap = min(4, max(2, (min(width, _WIDE) - used) // max(len(columns) - 1, 1)))
    result = [
        Text("  ").append((" " * gap).join(_pad(each.title, widths[each], each) for each in columns), "dim")
    ]
    for row, node in enumerate(shown):
        is_chosen = node.name == model.chosen
        parts = [("▸ " if is_chosen else "  ", "bold cyan")]
        for number, column in enumerate(columns):
            text, style = cells[column][row]
            if is_chosen and not number:
                style = "bold cyan"
            parts += [(" " * gap if number else "", ""), (_pad(text, widths[column], column), style)]
        if node.why and (room := width - sum(len(text) for text, _ in parts) - gap) > 8:
            parts += [(" " * gap, ""), (cut(node.why, room), "yellow")]
        result.append(styled(parts))
    if hidden:
        states: dict[str, int] = {}
        for node in hidden:
            states[node.state] = states.get(node.state, 0) + 1
        rest = Text().append(f"  + {len(hidden)} more: ", "dim")
        for number, (state, how_many) in enumerate(sorted(states.items(), key=lambda each: each[0] in GOOD)):
            rest.append(", " if number else "", "dim").append(
                f"{how_many} {state}", _style(state) if state in BAD else "dim"
            )
        result.append(rest)
    return result


def _window(model: Model, rows: int) -> tuple[int, list[Node]]:
    """Return the index of the first node to show, and the nodes to show, among them the chosen one."""
    if len(model.nodes) <= rows:
        return 0, list(model.nodes)
    size = max(rows - 1, 1)
    at = next((number for number, node in enumerate(model.nodes) if node.name == model.chosen), 0)
    first = min(max(0, at - size + 1), len(model.nodes) - size)
    return first, list(model.nodes[first : first + size])


def _columns(nodes: Sequence[Node]) -> list[_Column]:
    most = max((len(node.usage.get("gpus") or ()) for node in nodes), default=0)
    device = "GPU" if most else "CPU"
    return [
        _Column("NODE", 100, lambda node: (node.name, "bold"), left=True),
        _Column("STATE", 99, lambda node: (node.state, _style(node.state)), left=True),
        _Column("GEN", 20, lambda node: (number_text(node.generation), "")),
        _Column(
            "RESTARTS", 30, lambda node: (number_text(node.restarts), "yellow" if node.restarts else "dim")
        ),
        _Column(device, 80, _use),
        _Column("MEMORY", 60, _memory),
        *([_Column("TEMP", 65, _temperature)] if any(map(_temperatures, nodes)) else []),
        _Column("IN", 50, lambda node: (rate_text(node.usage.get("received")), "")),
        _Column("OUT", 50, lambda node: (rate_text(node.usage.get("sent")), "")),
        _Column("STEP", 90, lambda node: (number_text(node.step), "")),
        _Column(
            "STEPS/S",
            70,
            lambda node: ("–" if node.rate is None else f"{node.rate:,.{num_digits(node.rate)}f}", ""),
        ),
        _Column("QUIET", 75, _quiet),
    ]


def _use(node: Node) -> tuple[str, str]:
    """Show a bar for each GPU and their mean utilization; the CPU's if there are no GPUs."""
    shares = [gpu.get("use") for gpu in node.usage.get("gpus") or () if gpu.get("use") is not None]
    if not shares:
        share = node.usage.get("cpu")
        return ("–", "dim") if share is None else (f"{share:.0%}".replace("%", " %"), "")
    bars = (
        "".join(BLOCKS[1 + round(min(max(share, 0.0), 1.0) * 6)] for share in shares)
        if len(shares) > 1
        else ""
    )
    return f"{bars} {sum(shares) / len(shares):4.0%}".replace("%", " %").strip(), "cyan" if bars else ""


def _memory(node: Node) -> tuple[str, str]:
    """Show the memory of the fullest GPU; the host's if there are no GPUs."""
    found = [
        gpu
        for gpu in node.usage.get("gpus") or ()
        if gpu.get("memory") is not None and gpu.get("memory_total")
    ]
    if found:
        fullest = max(found, key=lambda gpu: gpu["memory"] / gpu["memory_total"])
        used, total = fullest["memory"], fullest["memory_total"]
    else:
        used, total = node.usage.get("memory"), node.usage.get("memory_total")
    if used is None or not total:
        return "–", "dim"
    style = "bold red" if used / total > 0.97 else "yellow" if used / total > 0.9 else ""
    return f"{used / GIB:.{0 if used >= 10 * GIB else 1}f}/{total / GIB:.0f} GiB", style


def _temperatures(node: Node) -> list[float]:
    return [gpu["temperature"] for gpu in node.usage.get("gpus") or () if gpu.get("temperature") is not None]


def _temperature(node: Node) -> tuple[str, str]:
    """Show the hottest GPU's temperature, and whether a GPU is throttled by more than its power limit."""
    reasons = {reason for gpu in node.usage.get("gpus") or () for reason in gpu.get("slow") or ()}
    is_slow = bool(reasons - {"sw_power_cap"})
    found = _temperatures(node)
    if not found:
        return "–", "dim"
    return f"{max(found):.0f} °C" + " slow" * is_slow, "bold red" if is_slow else ""


def _quiet(node: Node) -> tuple[str, str]:
    if node.quiet_s is None:
        return "–", "dim"
    is_late = node.quiet_s > QUIET_S and node.state == "running"
    return duration(node.quiet_s), "bold red" if is_late else ""


def _chart(model: Model, width: int, height: int) -> list[Text]:
    """Draw the loss over the steps: a sparkline if there is one line of room, else a chart."""
    values = [value for _, value in model.losses]
    now = f"loss {metric('loss', values[-1])}"
    best = ", ".join(f"best {name} {metric(name, value)}" for name, value in model.best.items())
    if height == 1:
        size = max(min(width - len(now) - 2, 60), 1)
        (curve,) = spark(model.losses, size, 1)
        line = Text(now + "  ").append(curve, "cyan")
        if best and width - line.cell_len > len(best) + 3:
            line.append(f"   {best}", "dim")
        return [line]
    high, low = metric("loss", max(values)), metric("loss", min(values))
    label = max(len(high), len(low))
    left = Text().append(now, "bold").append(f"   {best}" if best else "", "dim")
    steps = f"steps {model.losses[0][0]:,} – {model.losses[-1][0]:,}"
    curves = spark(model.losses, max(min(width, _WIDE) - label - 3, 5), height - 1)
    result = [spread(left, Text(steps, "dim"), min(width, _WIDE))]
    for number, curve in enumerate(curves):
        mark = high if number == 0 else low if number == len(curves) - 1 else ""
        result.append(
            Text().append(f"{mark.rjust(label)} {'┤' if mark else '│'}", "dim").append(curve, "cyan")
        )
    return result


def _events(model: Model, width: int, rows: int) -> list[Text]:
    result = []
    for when, sentence in list(model.events)[-rows:]:
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        result.append(Text().append(f"{clock}  ", "dim").append(cut(sentence, width - _CLOCK_WIDTH)))
    return result


def _log(log: Sequence[str], width: int, room: int) -> list[Text]:
    """Return as many of the last lines as fit; long ones are wrapped."""
    result: list[Text] = []
    for line in reversed(log):
        text = Text.from_ansi(line.expandtabs())
        parts = [text[at : at + width] for at in range(0, max(len(text), 1), width)]
        result = [*parts, *result]
        if len(result) >= room:
            return result[-room:]
    return result or [Text("nothing is written yet", "dim")]


def _help(found: Sequence[tuple[str, str]], width: int) -> list[Text]:
    label = max(len(key) for key, _ in found)
    return [
        Text("  ").append(("" if n else key).ljust(label), "bold cyan").append(f"   {line}")
        for key, text in found
        for n, line in enumerate(textwrap.wrap(text, max(width - label - 5, 20)))
    ]


def _foot(model: Model, width: int) -> Text:
    if model.asks:
        return Text(cut(model.asks, width), "bold yellow")
    line = Text()
    for key, text in model.keys:
        if line.cell_len + len(key) + len(text) + 4 > width:
            break
        line.append("   " if line.cell_len else "").append(key, "bold").append(f" {text}", "dim")
    return line


# --- words ------------------------------------------------------------------------------------------------------


def _style(state: str) -> str:
    if state in GOOD:
        return "green"
    return "bold red" if state in BAD else "yellow"


def _pad(text: str, width: int, column: _Column) -> str:
    return text.ljust(width) if column.left else text.rjust(width)
