"""Charts as inline SVG that are as wide as there is room, each with its words for a screen reader; pure.

What lies along the width is in percent and what lies along the height in pixels, so that letters keep their size on a
telephone; labels lie in the drawing's padding. All texts go through markupsafe: none can become a tag. Colours and line
styles are the page's style sheet's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from nodekit.deploy.story.history import Span
from nodekit.deploy.story.narrate import duration

MOST_POINTS = 800
MOST_READ = 240
"""So many of a series' points can be pointed at."""
MOST_ROWS = 24
MOST_LONG_MARKS = 12
"""Of more marks than this each is short: they would hide the curve."""
_HEIGHT = 220.0
_ROW = 24.0
_STEPS = (1, 2, 2.5, 5, 10)
_TIMES = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
    172800,
    604800,
)


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    """x, least and most, of what the line is the middle of."""


@dataclass(frozen=True)
class Mark:
    """A moment that all curves show."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A line chart and what it says."""

    id: str
    title: str
    summary: str
    """What one sees in it, in a sentence."""
    x_name: str
    series: Sequence[Series]
    x_text: Callable[[float], str] = field(default=lambda value: f"{value:,.0f}")
    y_text: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")
    y_tick: Callable[[float], str] | None = None
    """Of the axis, where less is enough; None: as `y_text`."""
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    most: float | None = None
    """The top of the scale, where it has one of its own."""
    is_time: bool = False

    @property
    def is_log(self) -> bool:
        """Whether the values span so much that only a logarithm shows it."""
        low, high = self._range()
        return not self.from_zero and low > 0 and high / low > 30

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return any(each.points for each in self.series)

    def _range(self) -> tuple[float, float]:
        values = [value for each in self.series for _, value in each.points]
        values += [value for each in self.series for low_high in each.band for value in low_high[1:]]
        return (min(values), max(values)) if values else (0.0, 1.0)

    def svg(self) -> Markup:
        """The drawing."""
        xs = [x for each in self.series for x, _ in each.points] or [0.0]
        left, right = min(xs), max(xs)
        if right <= left:
            right = left + 1
        low, high = self._range()
        if self.from_zero:
            low = min(0.0, low)
        high = self.most if self.most is not None and self.most >= high else high
        if self.is_log:
            ticks = log_ticks(low, high)
            low, high = min(low, ticks[0]), max(high, ticks[-1])
        else:
            ticks = linear_ticks(low, high)
            low, high = min(low, ticks[0]), max(high, ticks[-1])
        scale = _Scale(left, right, low, high, is_log=self.is_log)
        parts = [self._grid(scale, ticks)]
        marks_from = 0 if len(self.marks) <= MOST_LONG_MARKS else _HEIGHT - 12
        for mark in self.marks:
            if left <= mark.x <= right:
                parts.append(
                    Markup(
                        '<g class="mark"><line x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>'
                        "<title>{label}</title></g>"
                    ).format(x=scale.percent(mark.x), top=marks_from, bottom=_HEIGHT, label=mark.label)
                )
        parts += [self._line(number, each, scale) for number, each in enumerate(self.series) if each.points]
        return Markup(
            '<svg class="chart plot" role="img" aria-labelledby="{id}-t" aria-describedby="{id}-d" height="{height}" '
            'data-read="{read}">'
            '<title id="{id}-t">{title}</title><desc id="{id}-d">{summary}</desc>'
            '{parts}<g class="reading" aria-hidden="true"></g></svg>'
        ).format(
            id=self.id,
            height=f"{_HEIGHT:g}",
            title=self.title,
            summary=self.summary,
            parts=Markup("").join(parts),
            read=json.dumps(self._readings(scale), ensure_ascii=False),
        )

    def _grid(self, scale: _Scale, ticks: Sequence[float]) -> Markup:
        parts = []
        y_tick = self.y_tick or self.y_text
        for tick in ticks:
            parts.append(
                Markup(
                    '<line class="rule" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
                    '<text class="y" x="-8" y="{y}" dy="4">{text}</text>'
                ).format(y=scale.y(tick), text=y_tick(tick))
            )
        parts.append(
            Markup('<text class="y" x="-8" y="{y:g}">{name}</text>').format(y=_HEIGHT + 22, name=self.x_name)
        )
        choose = time_ticks if self.is_time else linear_ticks
        inside = [tick for tick in choose(scale.left, scale.right) if scale.left <= tick <= scale.right]
        for tick in inside:
            parts.append(
                Markup('<text class="x" x="{x}" y="{y}">{text}</text>').format(
                    x=scale.percent(tick), y=f"{_HEIGHT + 22:g}", text=self.x_text(tick)
                )
            )
        return Markup("").join(parts)

    def _line(self, number: int, series: Series, scale: _Scale) -> Markup:
        band = Markup("")
        if series.band:
            there = [f"{scale.x(x)},{scale.y(high)}" for x, _, high in series.band]
            back = [f"{scale.x(x)},{scale.y(low)}" for x, low, _ in reversed(series.band)]
            band = Markup('<polygon class="band s{number}" points="{points}"/>').format(
                number=number % 6, points=" ".join([*there, *back])
            )
        points = thinned(series.points, MOST_POINTS)
        line = Markup("")
        for piece in pieces(points):
            line += Markup('<polyline class="line s{number}" points="{points}"/>').format(
                number=number % 6, points=" ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in piece)
            )
        drawn = Markup(
            '<svg viewBox="0 0 1000 {height:g}" preserveAspectRatio="none" width="100%" height="{height:g}">'
            "{band}{line}</svg>"
        ).format(height=_HEIGHT, band=band, line=line)
        if len(points) <= 40:  # so few that each is worth a dot
            for x, y in points:
                drawn += Markup('<circle class="dot s{number}" cx="{x}" cy="{y}" r="2.5"/>').format(
                    number=number % 6, x=scale.percent(x), y=scale.y(y)
                )
        return drawn

    def _readings(self, scale: _Scale) -> list[list[object]]:
        """What to say where somebody points: share of the width, y in pixels, and the text."""
        found: list[list[object]] = []
        for each in self.series:
            own = f"{each.name}: " if len(self.series) > 1 else ""
            for x, y in thinned(each.points, MOST_READ):
                text = f"{self.x_name} {self.x_text(x)} · {own}{self.y_text(y)}"
                found.append([round(scale.share(x), 4), float(scale.y(y)), text])
        return found

    def rows(self) -> list[list[str]]:
        """The values as a table, at most so many of them."""
        if len(self.series) == 1:
            return [[self.x_text(x), self.y_text(y)] for x, y in evenly(self.series[0].points, MOST_ROWS)]
        names = [dict(each.points) for each in self.series]
        every = sorted({x for each in names for x in each})
        if len(every) > MOST_ROWS and not all(set(each) == set(names[0]) for each in names):
            # The series have points of their own: each row has of all of them the nearest.
            shown = evenly([(x, 0.0) for x in every], MOST_ROWS)
            return [
                [
                    self.x_text(x),
                    *(self.y_text(nearest(each.points, x)) if each.points else "" for each in self.series),
                ]
                for x, _ in shown
            ]
        shown = evenly([(x, 0.0) for x in every], MOST_ROWS)
        return [
            [self.x_text(x), *(self.y_text(each[x]) if x in each else "" for each in names)] for x, _ in shown
        ]


class _Scale:
    """From values to places."""

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
    """Round numbers from at most `low` to at least `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and their doubles and fives where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    powers = [10.0**number for number in range(first, last + 1)]
    if len(powers) > 4:
        return powers[:: math.ceil(len(powers) / 5)]
    finer = [factor * power for power in powers for factor in (1, 2, 5)]
    inside = [each for each in finer if low / 2.5 <= each <= high * 2.5]
    return inside or powers


def time_ticks(low: float, high: float) -> list[float]:
    """Round durations in seconds."""
    step = next((each for each in _TIMES if (high - low) / each <= 6), _TIMES[-1])
    return [float(step * number) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about so many points, the extremes of each stretch among them: a spike is not lost."""
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
    """The points without the long gaps between them: what was not there has no line."""
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
    """So many of them, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def nearest(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value of the point that is nearest."""
    return min(points, key=lambda point: abs(point[0] - x))[1]


class Clock:
    """The time that a run was up, as a scale: what lies between a stop and going on is left out."""

    def __init__(self, sessions: Sequence[tuple[float, float]]) -> None:
        self._sessions = sessions
        self.total_s = sum(end - start for start, end in sessions) or 1.0

    def at(self, time: float) -> float:
        """Seconds of being up until then."""
        up = 0.0
        for start, end in self._sessions:
            up += min(max(time - start, 0.0), end - start)
        return up

    @property
    def breaks(self) -> list[tuple[float, float]]:
        """Where something is left out: at which second of being up, and how much."""
        found = []
        for (start, end), (following, _) in itertools.pairwise(self._sessions):
            found.append((self.at(end), following - end))
            del start
        return found


STATES = {
    "training": "training",
    "starting": "starting or restarting",
    "waiting": "waiting",
    "away": "away",
    "ended": "ended",
}


def timeline(
    spans: Mapping[str, Sequence[Span]],
    attempts: Sequence[tuple[str, float, float, str]],
    clock: Clock,
    *,
    summary: str,
) -> Markup:
    """Who was in, when; a row for each node below one with the attempts.

    Args:
        spans: node → what it did.
        attempts: (name, from, to, what to say of it), in seconds since 1970.
        clock: the run's time.
        summary: what one sees in it.
    """
    total = clock.total_s
    rows = 1 + len(spans)
    height = rows * _ROW
    parts = []
    for tick in time_ticks(0.0, total):
        parts.append(
            Markup(
                '<line class="rule" x1="{x}" x2="{x}" y1="0" y2="{bottom:g}"/>'
                '<text class="x" x="{x}" y="{y:g}">{text}</text>'
            ).format(
                x=_percent(tick / total), bottom=height, y=height + 18, text=duration(tick) if tick else "0"
            )
        )
    parts.append(Markup('<text class="row" x="-8" y="{y:g}">attempt</text>').format(y=_ROW / 2 + 4))
    for name, start, end, told in attempts:
        left, right = clock.at(start) / total, clock.at(end) / total
        parts.append(
            Markup(
                '<svg x="{x}" y="0" width="{width}" height="{height:g}" class="clip"><g><title>{told}</title>'
                '<rect class="attempt" x="0" y="4" width="100%" height="{bar:g}" rx="3"/>'
                '<text class="inside" x="6" y="{y:g}">{name}</text></g></svg>'
            ).format(
                x=_percent(left),
                width=_percent(max(right - left, 0.003)),
                height=_ROW,
                bar=_ROW - 8,
                y=_ROW / 2 + 4,
                name=name if right - left > 0.035 else "",
                told=told,
            )
        )
    for number, (node, own) in enumerate(spans.items(), start=1):
        top = number * _ROW
        parts.append(
            Markup('<text class="row" x="-8" y="{y:g}">{shown}<title>{node}</title></text>').format(
                y=top + _ROW / 2 + 4, shown=node if len(node) <= 13 else f"{node[:12]}…", node=node
            )
        )
        for span in own:
            left, right = clock.at(span.start) / total, clock.at(span.end) / total
            if right <= left or span.state == "ended":
                continue
            told = f"{node} {STATES.get(span.state, span.state)} for {duration(span.end - span.start)}"
            parts.append(
                Markup(
                    '<rect class="span {state}" x="{x}" y="{y:g}" width="{width}" height="{height:g}">'
                    "<title>{told}</title></rect>"
                ).format(
                    state=span.state,
                    x=_percent(left),
                    y=top + 4,
                    width=_percent(max(right - left, 0.0015)),
                    height=_ROW - 8,
                    told=told + (f": {span.why}" if span.why else ""),
                )
            )
    for at, gap in clock.breaks:
        parts.append(
            Markup(
                '<g class="break"><line x1="{x}" x2="{x}" y1="0" y2="{bottom:g}"/>'
                "<title>the run was not up for {gap}</title></g>"
            ).format(x=_percent(at / total), bottom=height, gap=duration(gap))
        )
    return Markup(
        '<svg class="chart plot timeline" role="img" aria-labelledby="timeline-t" aria-describedby="timeline-d" '
        'height="{height:g}">'
        '<title id="timeline-t">Timeline of nodes and attempts</title><desc id="timeline-d">{summary}</desc>'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="hatch-ground" width="6" height="6"/>'
        '<line class="hatch-line" x1="0" x2="0" y1="0" y2="6"/></pattern>'
        '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse"><rect class="dots-ground" width="6" '
        'height="6"/><circle class="dots-dot" cx="3" cy="3" r="1.3"/></pattern></defs>'
        "{parts}</svg>"
    ).format(height=height, summary=summary, parts=Markup("").join(parts))


def bar(parts: Sequence[tuple[str, float, str]], *, title: str, summary: str) -> Markup:
    """A bar of (class, share, label) that add up to 1."""
    drawn, at = [], 0.0
    for name, share, label in parts:
        if share <= 0:
            continue
        drawn.append(
            Markup(
                '<svg x="{x}" width="{width}" height="44" class="clip">'
                '<rect class="cause {name}" width="100%" height="44"/>'
                '<text class="inside" x="8" y="27">{text}</text><title>{label}</title></svg>'
            ).format(
                x=_percent(at),
                width=_percent(share),
                name=name,
                text=f"{share:.0%}" if share > 0.09 else "",
                label=label,
            )
        )
        at += share
    return Markup(
        '<svg class="chart bar" role="img" aria-labelledby="bar-t" aria-describedby="bar-d" height="44">'
        '<title id="bar-t">{title}</title><desc id="bar-d">{summary}</desc>{drawn}</svg>'
    ).format(title=title, summary=summary, drawn=Markup("").join(drawn))


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
