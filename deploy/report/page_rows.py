"""Formats the rows of the report's tables, and the times, shares and folders in them; pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nodekit.deploy.output.wording import duration, names, size_text
from nodekit.deploy.records.events import Event
from nodekit.deploy.report.report_curves import as_float, as_int
from nodekit.deploy.story.history import Attempt, Goodput


def attempt_row(attempt: Attempt) -> list[str]:
    """Return the row of an attempt."""
    rate = attempt.steps_per_s
    first = attempt.resumed_at
    why = attempt.why or ("" if attempt.ended else "it is running")
    return [
        attempt.attempt,
        time_of_day(attempt.started),
        names(attempt.members),
        str(attempt.world_size or "–"),
        "–" if first is None else f"{first:,}",
        "–" if attempt.last_step is None else f"{attempt.last_step:,}",
        duration(attempt.trained_s) if attempt.first_step_time is not None else "–",
        f"{rate:.3g}" if rate else "–",
        f"{attempt.redone_steps:,}",
        "trained to its end" if why == "done" else why,
    ]


def snapshot_row(key: tuple[int, int], notes: Sequence[Event]) -> list[str]:
    """Return the row of a snapshot: `key` is (step, generation), `notes` are the nodes' events about it."""
    size = max(as_int(each.get("bytes")) for each in notes)
    return [
        f"{key[0]:,}",
        str(key[1]),
        size_text(size) if size else "–",
        names(sorted({str(each.node) for each in notes})),
        f"{max(as_float(each.get('pause_s')) for each in notes):.3f} s",
        f"{max(as_int(each.get('count')) or 1 for each in notes)}",
    ]


def event_row(event: Event) -> dict[str, str]:
    """Return the row of an event, with the text that is shown when the row is opened."""
    hidden = ("run", "at", "about", "about_start")
    fields = [
        (key, value) for key, value in event.fields.items() if key not in hidden and value not in (None, "")
    ]
    text = " · ".join(f"{key} {_flat(value)}" for key, value in fields)
    more = ""
    if len(text) > 220 or "\n" in text:
        more = "\n".join(f"{key}: {_flat(value)}" for key, value in fields)
        text = " ".join(text.split())[:200] + " …"
    return {
        "time": time_text(event.time),
        "node": str(event.about or "supervisor"),
        "kind": event.kind,
        "text": text,
        "more": more,
    }


def _flat(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_flat(each) for each in value)
    return str(value)


def without_empty(value: Any) -> Any:
    """Return an inventory without its empty values."""
    if isinstance(value, Mapping):
        return {key: without_empty(each) for key, each in value.items() if each not in (None, {}, [], ())}
    if isinstance(value, list | tuple):
        return [without_empty(each) for each in value]
    return value


def time_text(seconds: float) -> str:
    """Format a time with its date and time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def time_of_day(seconds: float) -> str:
    """Format a time without year and time zone."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def common(folders: Iterable[str]) -> str:
    """Join the different folders, but no more than three."""
    return ", ".join(list(dict.fromkeys(each for each in folders if each))[:3]) or "–"


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def share_text(goodput: Goodput) -> str:
    """Format the goodput in per cent."""
    return "–" if goodput.share is None else f"{goodput.share:.1%}"
