"""Charts as inline SVG of full width, each with a description for screen readers; pure.

Horizontal positions are in percent and vertical ones in pixels, so that text keeps its size on a telephone; labels are
in the drawing's padding. All texts go through markupsafe, so none can become a tag. The page's style sheet has the
colours and line styles.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from nodekit.deploy.output.wording import duration
from nodekit.deploy.story.history import Span

MOST_POINTS = 800
MOST_READ = 240
"""Points of a series that get a tooltip, at most."""
MOST_ROWS = 24
MOST_LONG_MARKS = 12
"""If there are more marks, draw them short, as they would hide the curve."""
_HEIGHT = 220.0
_ROW = 24.0
_STEPS = (1, 2, 2.5, 5, 10)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIMES = (
    *(1, 2, 5, 10, 15, 30),
    *(number * _MINUTE for number in (1, 2, 5, 10, 15, 30)),
    *(number * _HOUR for number in (1, 2, 3, 6, 12)),
    *(number * _DAY for number in (1, 2, 7)),
)


def tag(name: str, *inside: Markup | str, **attributes: object) -> Markup:
    """Return an element. In names of attributes, a trailing ``_`` is removed and others become ``-``."""
    opening = Markup("<") + name
    for key, value in attributes.items():
        shown = f"{value:g}" if isinstance(value, float) else value
        opening += Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), shown)
    if not inside:
        return opening + Markup("/>")
    return Markup("{0}>{1}</{2}>").format(opening, Markup("").join(inside), name)


def _drawing(key: str, title: str, summary: str, parts: Sequence[Markup], **attributes: object) -> Markup:
    """Return a drawing with a title and a summary for screen readers."""
    words = tag("title", title, id=f"{key}-t"), tag("desc", summary, id=f"{key}-d")
    labels = {"role": "img", "aria_labelledby": f"{key}-t", "aria_describedby": f"{key}-d"}
    return tag("svg", *words, *parts, **attributes, **labels)


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """(x, minimum, maximum) around the line."""


@dataclass(frozen=True)
class Mark:
    """A vertical mark with a label."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A line chart, and its description in words."""

    id: str
    title: str
    summary: str
    """The description, in a sentence."""
    x_name: str
    series: Sequence[Series]
    x_text: Callable[[float], str] = field(default=lambda value: f"{value:,.0f}")
    y_text: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")
    y_tick: Callable[[float], str] | None = None
    """Shorter format for the axis; None: `y_text`."""
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    most: float | None = None
    """Fixed upper end of the scale; None: the largest value."""
    is_time: bool = False

    @property
    def is_log(self) -> bool:
        """Whether the range of the values needs a logarithmic scale."""
        low, high = self._range()
        return not self.from_zero and low > 0 and high / low > 30

    @property
    def has_points(self) -> bool:
        """Whether the chart has any points."""
        return any(each.points for each in self.series)

    def _range(self) -> tuple[float, float]:
        values = [value for each in self.series for _, value in each.points]
        values += [value for each in self.series for low_high in each.band for value in low_high[1:]]
        return (min(values), max(values)) if values else (0.0, 1.0)

    def svg(self) -> Markup:
        """Return the chart as SVG."""
        xs = [x for each in self.series for x, _ in each.points] or [0.0]
        left, right = min(xs), max(xs)
        if right <= left:
            right = left + 1
        low, high = self._range()
        if self.from_zero:
            low = min(0.0, low)
        high = self.most if self.most is not None and self.most >= high else high
        ticks = (log_ticks if self.is_log else linear_ticks)(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        scale = _Scale(left, right, low, high, is_log=self.is_log)
        parts = [self._grid(scale, ticks)]
        marks_from = 0 if len(self.marks) <= MOST_LONG_MARKS else _HEIGHT - 12
        for mark in self.marks:
            if left <= mark.x <= right:
                x = scale.percent(mark.x)
                line = tag("line", x1=x, x2=x, y1=marks_from, y2=_HEIGHT)
                parts.append(tag("g", line, tag("title", mark.label), class_="mark"))
        parts += [self._line(number, each, scale) for number, each in enumerate(self.series) if each.points]
        parts.append(tag("g", "", class_="reading", aria_hidden="true"))
        read = json.dumps(self._readings(scale), ensure_ascii=False)
        return _drawing(
            self.id, self.title, self.summary, parts, class_="chart plot", height=_HEIGHT, data_read=read
        )

    def _grid(self, scale: _Scale, ticks: Sequence[float]) -> Markup:
        parts = []
        y_tick = self.y_tick or self.y_text
        for tick in ticks:
            y = scale.y(tick)
            parts.append(tag("line", class_="rule", x1=0, x2="100%", y1=y, y2=y))
            parts.append(tag("text", y_tick(tick), class_="y", x=-8, y=y, dy=4))
        parts.append(tag("text", self.x_name, class_="y", x=-8, y=_HEIGHT + 22))
        choose = time_ticks if self.is_time else linear_ticks
        inside = [tick for tick in choose(scale.left, scale.right) if scale.left <= tick <= scale.right]
        for tick in inside:
            parts.append(tag("text", self.x_text(tick), class_="x", x=scale.percent(tick), y=_HEIGHT + 22))
        return Markup("").join(parts)

    def _line(self, number: int, series: Series, scale: _Scale) -> Markup:
        colour = f"s{number % 6}"

        def points_of(places: Iterable[tuple[float, float]]) -> str:
            return " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in places)

        parts = []
        if series.band:
            around = [(x, high) for x, _, high in series.band] + [
                (x, low) for x, low, _ in reversed(series.band)
            ]
            parts.append(tag("polygon", class_=f"band {colour}", points=points_of(around)))
        points = thinned(series.points, MOST_POINTS)
        parts += [
            tag("polyline", class_=f"line {colour}", points=points_of(piece)) for piece in pieces(points)
        ]
        box = {"viewBox": f"0 0 1000 {_HEIGHT:g}", "preserveAspectRatio": "none"}
        drawn = tag("svg", *parts, **box, width="100%", height=_HEIGHT)
        if len(points) <= 40:  # if there are few points, draw each as a dot
            for x, y in points:
                drawn += tag("circle", class_=f"dot {colour}", cx=scale.percent(x), cy=scale.y(y), r=2.5)
        return drawn

    def _readings(self, scale: _Scale) -> list[list[object]]:
        """Return the tooltips: share of the width, y in pixels, and text."""
        found: list[list[object]] = []
        for each in self.series:
            own = f"{each.name}: " if len(self.series) > 1 else ""
            for x, y in thinned(each.points, MOST_READ):
                text = f"{self.x_name} {self.x_text(x)} · {own}{self.y_text(y)}"
                found.append([round(scale.share(x), 4), float(scale.y(y)), text])
        return found

    def rows(self) -> list[list[str]]:
        """Return the values as a table of at most `MOST_ROWS` rows."""
        if len(self.series) == 1:
            return [[self.x_text(x), self.y_text(y)] for x, y in evenly(self.series[0].points, MOST_ROWS)]
        names = [dict(each.points) for each in self.series]
        every = sorted({x for each in names for x in each})
        # If the series have different points, each row has every series' nearest point.
        has_nearest = len(every) > MOST_ROWS and not all(set(each) == set(names[0]) for each in names)
        rows = []
        for x, _ in evenly([(x, 0.0) for x in every], MOST_ROWS):
            cells = [self.x_text(x)]
            for each, values in zip(self.series, names, strict=True):
                value = nearest(each.points, x) if has_nearest and values else values.get(x)
                cells.append("" if value is None else self.y_text(value))
            rows.append(cells)
        return rows


class _Scale:
    """Maps values to positions in the drawing."""

    def __init__(self, left: float, right: float, low: float, high: float, *, is_log: bool) -> None:
        self.left, self.right = left, right
        self._is_log = is_log
        self._low, self._high = self._of(low), self._of(high)
        if self._high <= self._low:
            self._high = self._low + 1

    def _of(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def share(self, value: float) -> float:
        return min(max((value - self.left) / (self.right - self.left), 0.0), 1.0)

    def percent(self, value: float) -> str:
        return f"{100 * self.share(value):.2f}%"

    def x(self, value: float) -> str:
        return f"{1000 * self.share(value):.1f}"

    def y(self, value: float) -> str:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return f"{_HEIGHT * (1 - min(max(share, 0.0), 1.0)):.1f}"


def linear_ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten; if they are few, also 2 and 5 times these."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**number for number in range(first, last + 1)]
    if len(powers) > 4:
        return powers[:: math.ceil(len(powers) / 5)]
    finer = [factor * power for power in powers for factor in (1, 2, 5)]
    inside = [each for each in finer if low / 2.5 <= each <= high * 2.5]
    return inside or powers


def time_ticks(low: float, high: float) -> list[float]:
    """Return round durations in seconds."""
    step = next((each for each in _TIMES if (high - low) / each <= 6), _TIMES[-1])
    return [float(step * number) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return about `most` points at most, with the extremes of each interval, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    found: list[tuple[float, float]] = []
    count = max(1, most // 2)
    for number in range(count):
        part = points[len(points) * number // count : len(points) * (number + 1) // count]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        found += sorted({low, high})
    return found


def pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Split the points at long gaps, across which no line is drawn."""
    gaps = sorted(right[0] - left[0] for left, right in itertools.pairwise(points))
    if not gaps:
        return [list(points)]
    longest = max(5 * gaps[len(gaps) // 2], 0.05 * (points[-1][0] - points[0][0]))
    found = [[points[0]]]
    for left, right in itertools.pairwise(points):
        if right[0] - left[0] > longest:
            found.append([])
        found[-1].append(right)
    return found


def evenly(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return `most` evenly spaced points, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def nearest(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value of the point nearest to `x`."""
    return min(points, key=lambda point: abs(point[0] - x))[1]


class Clock:
    """Maps times to a run's uptime, which leaves out the breaks between sessions."""

    def __init__(self, sessions: Sequence[tuple[float, float]]) -> None:
        self._sessions = sessions
        self.total_s = sum(end - start for start, end in sessions) or 1.0

    def at(self, time: float) -> float:
        """Return the uptime in seconds at a time."""
        up = 0.0
        for start, end in self._sessions:
            up += min(max(time - start, 0.0), end - start)
        return up

    @property
    def breaks(self) -> list[tuple[float, float]]:
        """The breaks: the uptime at each, and its length, in seconds."""
        return [
            (self.at(end), following - end) for (_, end), (following, _) in itertools.pairwise(self._sessions)
        ]


STATES = {
    "training": "training",
    "running": "running: the script tells no steps",
    "starting": "starting or restarting",
    "waiting": "waiting",
    "away": "away",
    "ended": "ended",
}
_PATTERNS = Markup(
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="6" height="6"/>'
    '<line class="hatch-line" x1="0" x2="0" y1="0" y2="6"/></pattern>'
    '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect class="dots-ground" width="6" '
    'height="6"/><circle class="dots-dot" cx="3" cy="3" r="1.3"/></pattern></defs>'
)


def timeline(
    spans: Mapping[str, Sequence[Span]],
    attempts: Sequence[tuple[str, float, float, str]],
    clock: Clock,
    *,
    summary: str,
) -> Markup:
    """Return the timeline: one row for the attempts, and one per node.

    Args:
        spans: node → what it did, and when.
        attempts: (name, start, end, description); times in seconds since 1970.
        clock: of the run.
        summary: description in a sentence.
    """
    total = clock.total_s
    height = (1 + len(spans)) * _ROW
    parts = []
    for tick in time_ticks(0.0, total):
        x = _percent(tick / total)
        parts.append(tag("line", class_="rule", x1=x, x2=x, y1=0, y2=height))
        parts.append(tag("text", duration(tick) if tick else "0", class_="x", x=x, y=height + 18))
    parts.append(tag("text", "attempt", class_="row", x=-8, y=_ROW / 2 + 4))
    parts += [
        _attempt(name, clock.at(start) / total, clock.at(end) / total, told)
        for name, start, end, told in attempts
    ]
    for number, (node, own) in enumerate(spans.items(), start=1):
        parts += _row(number * _ROW, node, own, clock)
    for at, gap in clock.breaks:
        x, told = _percent(at / total), tag("title", f"the run was not up for {duration(gap)}")
        parts.append(tag("g", tag("line", x1=x, x2=x, y1=0, y2=height), told, class_="break"))
    title = "Timeline of nodes and attempts"
    return _drawing(
        "timeline", title, summary, [_PATTERNS, *parts], class_="chart plot timeline", height=height
    )


def _attempt(name: str, left: float, right: float, told: str) -> Markup:
    """Return the bar of an attempt; `left` and `right` are shares of the run's uptime."""
    bar = tag("rect", class_="attempt", x=0, y=4, width="100%", height=_ROW - 8, rx=3)
    shown = tag("text", name if right - left > 0.035 else "", class_="inside", x=6, y=_ROW / 2 + 4)
    group = tag("g", tag("title", told), bar, shown)
    return tag(
        "svg",
        group,
        x=_percent(left),
        y=0,
        width=_percent(max(right - left, 0.003)),
        height=_ROW,
        class_="clip",
    )


def _row(top: float, node: str, spans: Sequence[Span], clock: Clock) -> list[Markup]:
    """Return a node's name, and a bar per span."""
    name = node if len(node) <= 13 else f"{node[:12]}…"
    parts = [tag("text", name, tag("title", node), class_="row", x=-8, y=top + _ROW / 2 + 4)]
    for span in spans:
        left, right = clock.at(span.start) / clock.total_s, clock.at(span.end) / clock.total_s
        if right <= left or span.state == "ended":
            continue
        told = f"{node} {STATES.get(span.state, span.state)} for {duration(span.end - span.start)}"
        title = tag("title", told + (f": {span.why}" if span.why else ""))
        width = _percent(max(right - left, 0.0015))
        style = f"span {span.state}"
        parts.append(
            tag("rect", title, class_=style, x=_percent(left), y=top + 4, width=width, height=_ROW - 8)
        )
    return parts


def bar(parts: Sequence[tuple[str, float, str]], *, title: str, summary: str) -> Markup:
    """Return a stacked bar of (class, share, label); shares should add up to 1."""
    drawn, at = [], 0.0
    for name, share, label in parts:
        if share <= 0:
            continue
        rect = tag("rect", class_=f"cause {name}", width="100%", height=44)
        text = tag("text", f"{share:.0%}" if share > 0.09 else "", class_="inside", x=8, y=27)
        place = {"x": _percent(at), "width": _percent(share), "height": 44}
        drawn.append(tag("svg", rect, text, tag("title", label), **place, class_="clip"))
        at += share
    return _drawing("bar", title, summary, drawn, class_="chart bar", height=44)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
