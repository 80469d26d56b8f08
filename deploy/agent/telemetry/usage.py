"""Measure what a node uses now: CPU, memory, network interface, GPUs. Standard library only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from nodekit.deploy.host import schema


class Usage:
    """Samples of a node's usage; rates are averages since the last sample."""

    def __init__(self, interface: str, gpus: Callable[[], list[schema.GpuUsage]] = list) -> None:
        """Measure the network `interface`; `gpus` returns the last samples of the node's GPUs."""
        self._interface = interface
        self._gpus = gpus
        self._busy, self._all = _processor()
        self._traffic, self._asked = _traffic(interface), time.monotonic()

    def now(self) -> schema.Usage:
        """Return a sample, with the fields of docs/events.md; None for values that are unknown."""
        (busy, all_), now = _processor(), time.monotonic()
        traffic = _traffic(self._interface)
        cpu = (busy - self._busy) / (all_ - self._all) if all_ > self._all else None
        seconds = max(now - self._asked, 1e-6)
        rates: list[float | None] = [None, None]
        if traffic and self._traffic:
            # At least 0: the counters of an interface that was recreated start again.
            rates = [max(0, new - old) / seconds for new, old in zip(traffic, self._traffic, strict=True)]
        self._busy, self._all, self._traffic, self._asked = busy, all_, traffic, now
        total, available = _memory()
        return {
            "cpu": None if cpu is None else round(cpu, 3),
            "memory": None if total is None or available is None else total - available,
            "memory_total": total,
            "interface": self._interface,
            "received": None if rates[0] is None else round(rates[0]),
            "sent": None if rates[1] is None else round(rates[1]),
            "gpus": self._gpus(),
        }


def _processor() -> tuple[int, int]:
    """Return the ticks in which the cores were busy, and all ticks, summed over the cores."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle, sum(ticks)
    return 0, 0


def _memory() -> tuple[int | None, int | None]:
    """Return total and available memory in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return found.get("MemTotal"), found.get("MemAvailable")
    return None, None


def _traffic(interface: str) -> tuple[int, int] | None:
    """Return the bytes received and sent so far; from /proc, since /sys may show another network namespace."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, found, counts = line.partition(":")
            if found and name.strip() == interface:
                fields = counts.split()
                return int(fields[0]), int(fields[8])
    return None
