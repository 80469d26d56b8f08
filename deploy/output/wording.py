"""Formats numbers, names, times and sizes for people."""

from __future__ import annotations

from collections.abc import Collection

_NAMED = 6  # more names than this are only counted


def count(number: int, noun: str) -> str:
    """Format a count with its noun: `1 node`, `1,200 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def names(nodes: Collection[str]) -> str:
    """Join node names; of many, only the first few."""
    first = ", ".join(list(nodes)[:_NAMED])
    return first if len(nodes) <= _NAMED else f"{first} and {len(nodes) - _NAMED} more"


def duration(seconds: float) -> str:
    """Format seconds: `5.9 s`, `42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            large, small = divmod(whole, size)
            return f"{large} {unit} {small // smaller} {name}" if small // smaller else f"{large} {unit}"
    return f"{whole} s"


def size_text(num_bytes: float) -> str:
    """Format bytes: `1.2 GB`, `412 MB`, `5.6 kB`, `78 bytes`."""
    for unit_bytes, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit_bytes * 0.9995:
            size = num_bytes / unit_bytes
            return f"{size:.{0 if size >= 99.95 else 1}f} {unit}"
    return f"{num_bytes:.0f} bytes"
