"""The curves of a report: loss and metrics by step, resource usage over time; pure."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nodekit.deploy.output.wording import count, duration, size_text
from nodekit.deploy.records.events import Event
from nodekit.deploy.report.charts import Chart, Clock, Mark, Series
from nodekit.deploy.story.event_text import metric
from nodekit.deploy.story.history import Attempt, History, Point

MOST_LINES = 5
"""If there are more nodes, draw their median and range."""

_Value = Callable[[Event], Any]


def curves(history: History, clock: Clock, losses: Sequence[Point]) -> dict[str, Any]:
    """Return the charts of loss, evaluations and throughput, for the page's template."""
    marks = [
        Mark(each.resumed_at, f"{_attempt(each)}, went on from step {each.resumed_at:,}")
        for each in history.attempts[1:]
        if each.resumed_at is not None
    ]
    found = [_loss(losses, marks)] if losses else []
    found += [
        _evaluations(history, name, number, marks)
        for number, name in enumerate(history.metrics[:6], len(found))
    ]
    if speeds := history.speeds():
        rate = statistics.median(point.value for point in speeds)
        points = [(clock.at(point.time), point.value) for point in speeds]
        found.append(
            Chart(
                id="speed",
                title="Throughput",
                summary=f"{rate:.3g} steps a second in the middle, over the time that the run was up.",
                x_name="time",
                x_text=_elapsed,
                series=[Series("steps/s", points)],
                y_text=lambda value: f"{value:.3g} steps/s",
                y_tick=lambda value: f"{value:.3g}",
                marks=_restarts(history, clock),
                from_zero=True,
                is_time=True,
            )
        )
    note = "Steps that were done again are shown as they were done last. "
    note += f"Red lines are restarts ({len(marks)})." if marks else "There was no restart."
    return {"curves": found, "curves_note": note}


def _loss(losses: Sequence[Point], marks: Sequence[Mark]) -> Chart:
    first, last = losses[0], losses[-1]
    return Chart(
        id="loss",
        title="Loss",
        summary=f"From {first.value:.4g} at step {first.step:,} to {last.value:.4g} at step {last.step:,}; "
        f"{min(point.value for point in losses):.4g} at the least.",
        x_name="step",
        series=[Series("loss", [(point.step, point.value) for point in losses])],
        marks=marks,
    )


def _evaluations(history: History, name: str, number: int, marks: Sequence[Mark]) -> Chart:
    points = history.metric(name)
    value, at = history.best.get(name, (points[-1].value, points[-1].step))
    is_share = all(0 <= point.value <= 1 for point in points) and "loss" not in name
    return Chart(
        id=f"metric-{number}",
        title=f"Evaluated: {name}",
        summary=f"{count(len(points), 'evaluation')}; the best is {metric(name, value)}, at step {at:,}.",
        x_name="step",
        series=[Series(name, [(point.step, point.value) for point in points])],
        y_text=lambda value: metric(name, value),
        y_tick=share_text if name.endswith("accuracy") else None,
        most=1.0 if is_share else None,
        marks=marks,
    )


def _attempt(attempt: Attempt) -> str:
    return f"attempt {attempt.attempt}, with {count(len(attempt.members), 'node')}"


def _restarts(history: History, clock: Clock) -> list[Mark]:
    return [Mark(clock.at(each.started), f"{_attempt(each)}, began") for each in history.attempts[1:]]


def usage(history: History, clock: Clock) -> dict[str, Any]:
    """Return the charts and table of GPUs, CPUs, memory and network, for the page's template."""
    samples = {name: own for name, own in history.samples.items() if own}
    marks = _restarts(history, clock)

    def chart(
        name: str,
        title: str,
        value_of: _Value,
        text: Callable[[float], str] = share_text,
        most: float | None = 1.0,
    ) -> Chart:
        return _usage_chart(name, title, _lines(samples, value_of, clock), text, most, marks)

    found = [
        chart("gpu", "GPU use", _gpu_use),
        chart("gpu-memory", "GPU memory", _gpu_memory),
        chart(
            "gpu-temperature", "Hottest GPU", _gpu_most("temperature"), lambda value: f"{value:.0f} °C", None
        ),
        chart(
            "gpu-clock", "Slowest GPU's clock", _gpu_least("clock"), lambda value: f"{value:.0f} MHz", None
        ),
        chart("cpu", "CPU use", _of("cpu")),
        chart("memory", "Host memory", _memory),
        chart("received", "Network, received", _of("received"), _rate, None),
        chart("sent", "Network, sent", _of("sent"), _rate, None),
    ]
    rows = [_usage_row(name, own) for name, own in samples.items()]
    return {"usage": [each for each in found if each.has_points], "usage_rows": rows}


def _usage_row(name: str, own: Sequence[Event]) -> list[str]:
    memory = [as_float(each.get("memory")) for each in own if each.get("memory")]
    whole = max((as_float(each.get("memory_total")) for each in own), default=0.0)
    gpu, gpu_memory = _known(map(_gpu_use, own)), _known(map(_gpu_memory, own))
    interfaces = dict.fromkeys(str(each.get("interface")) for each in own if each.get("interface"))
    return [
        name,
        _mean(map(_of("cpu"), own), share_text),
        f"{size_text(max(memory))} of {size_text(whole)}" if memory else "–",
        _mean(gpu, share_text) + (f" of {len(_gpus(own[-1]))}" if gpu else ""),
        share_text(max(gpu_memory)) if gpu_memory else "–",
        ", ".join(interfaces) or "–",
        _mean(map(_of("received"), own), _rate),
        _mean(map(_of("sent"), own), _rate),
    ]


def _lines(
    samples: Mapping[str, Sequence[Event]], value_of: _Value, clock: Clock
) -> dict[str, list[tuple[float, float]]]:
    """Return node → a value over the uptime, for nodes that report the value."""
    lines = {}
    for node, own in samples.items():
        points = [(clock.at(each.time), value_of(each)) for each in own]
        if known := [(x, float(y)) for x, y in points if isinstance(y, int | float)]:
            lines[node] = known
    return lines


def _usage_chart(
    name: str,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    text: Callable[[float], str],
    most: float | None,
    marks: Sequence[Mark],
) -> Chart:
    values = [y for points in lines.values() for _, y in points]
    summary = f"{_mean(values, text)} on average, {text(max(values)) if values else '–'} at the most."
    series = [Series(node, points) for node, points in lines.items()]
    if len(series) > MOST_LINES:
        series = [_middle(lines)]
        summary += f" The line is the middle of {len(lines)} nodes, the area all of them."
    return Chart(
        id=f"use-{name}",
        title=title,
        summary=summary,
        x_name="time",
        x_text=_elapsed,
        series=series,
        y_text=text,
        marks=marks,
        from_zero=True,
        most=most,
        is_time=True,
    )


def _middle(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Series:
    """Return a series for many nodes: their median, with minimum and maximum as the band."""
    begin = min(points[0][0] for points in lines.values())
    end = max(points[-1][0] for points in lines.values())
    middle, band = [], []
    for number in range(121):
        at = begin + (end - begin) * number / 120
        values = []
        for points in lines.values():
            place = bisect.bisect_right(points, (at, float("inf"))) - 1
            if place >= 0 and (place + 1 < len(points) or at - points[place][0] <= (end - begin) / 60):
                values.append(points[place][1])
        if values:
            middle.append((at, statistics.median(values)))
            band.append((at, min(values), max(values)))
    return Series(f"middle of {len(lines)} nodes", middle, band)


def _gpus(sample: Event) -> list[Mapping[str, Any]]:
    gpus = sample.get("gpus")
    return [each for each in gpus if isinstance(each, Mapping)] if isinstance(gpus, list | tuple) else []


def _gpu_use(sample: Event) -> float | None:
    known = _known(each.get("use") for each in _gpus(sample))
    return statistics.fmean(known) if known else None


def _gpu_memory(sample: Event) -> float | None:
    used = [(as_float(each.get("memory")), as_float(each.get("memory_total"))) for each in _gpus(sample)]
    shares = [part / whole for part, whole in used if whole]
    return max(shares) if shares else None


def _gpu_most(field: str) -> _Value:
    return lambda sample: max(_known(each.get(field) for each in _gpus(sample)), default=None)


def _gpu_least(field: str) -> _Value:
    return lambda sample: min(_known(each.get(field) for each in _gpus(sample)), default=None)


def _memory(sample: Event) -> float | None:
    whole = as_float(sample.get("memory_total"))
    return as_float(sample.get("memory")) / whole if whole and sample.get("memory") else None


def _known(values: Iterable[Any]) -> list[float]:
    return [float(each) for each in values if isinstance(each, int | float)]


def _mean(values: Iterable[Any], text: Any) -> str:
    known = _known(values)
    return str(text(statistics.fmean(known))) if known else "–"


def _of(field: str) -> _Value:
    return lambda sample: sample.get(field)


def share_text(value: float) -> str:
    """Format a share: `12.3 %`."""
    return f"{100 * value:.3g} %"


def _rate(value: float) -> str:
    return f"{size_text(value)}/s"


def _elapsed(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def as_int(value: Any) -> int:
    """Return a recorded number as an int; 0 if it is none."""
    return int(value) if isinstance(value, int | float) else 0


def as_float(value: Any) -> float:
    """Return a recorded number as a float; 0.0 if it is none."""
    return float(value) if isinstance(value, int | float) else 0.0
