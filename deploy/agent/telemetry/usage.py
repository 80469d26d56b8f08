"""Measure what a node uses now: processor, memory, its interface, its GPUs. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

from nodekit.deploy.host import schema


class Usage:
    """Asked now and then; rates are those since the last time."""

    def __init__(self, interface: str, gpus: Sequence[int] | None = ()) -> None:
        """`gpus` by nvidia-smi's index, None for all; none where the driver's library does not say."""
        self._interface = interface
        self._nvml = _Nvml.load() if gpus is None or gpus else None
        self._gpus = tuple(gpus if gpus is not None else self._nvml.indices() if self._nvml else ())
        self._busy, self._all = _processor()
        self._traffic, self._asked = _traffic(interface), time.monotonic()

    def now(self) -> schema.Usage:
        """A sample, as docs/events.md has it; None for what is not known."""
        (busy, all_), now = _processor(), time.monotonic()
        traffic = _traffic(self._interface)
        cpu = (busy - self._busy) / (all_ - self._all) if all_ > self._all else None
        seconds = max(now - self._asked, 1e-6)
        rates: list[float | None] = [None, None]
        if traffic and self._traffic:
            rates = [
                max(0, new - old) / seconds for new, old in zip(traffic, self._traffic, strict=True)
            ]  # an interface that was made anew counts from 0
        self._busy, self._all, self._traffic, self._asked = busy, all_, traffic, now
        total, available = _memory()
        return {
            "cpu": None if cpu is None else round(cpu, 3),
            "memory": None if total is None or available is None else total - available,
            "memory_total": total,
            "interface": self._interface,
            "received": None if rates[0] is None else round(rates[0]),
            "sent": None if rates[1] is None else round(rates[1]),
            "gpus": self._nvml.ask(self._gpus) if self._nvml else [],
        }


def _processor() -> tuple[int, int]:
    """Ticks that all cores together were busy, and altogether."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle, sum(ticks)
    return 0, 0


def _memory() -> tuple[int | None, int | None]:
    """Bytes, altogether and to be had."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return found.get("MemTotal"), found.get("MemAvailable")
    return None, None


def _traffic(interface: str) -> tuple[int, int] | None:
    """Bytes received and sent so far; /proc, since /sys may be another network namespace's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, found, counts = line.partition(":")
            if found and name.strip() == interface:
                fields = counts.split()
                return int(fields[0]), int(fields[8])
    return None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """NVIDIA's management library, which every driver brings: a call costs microseconds, nvidia-smi half a second.

    Signatures: https://docs.nvidia.com/deploy/nvml-api.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._devices: dict[int, ctypes.c_void_p] = {}

    @classmethod
    def load(cls) -> _Nvml | None:
        """None without a driver."""
        try:
            library = ctypes.CDLL(os.environ.get("NODEKIT_NVML", "libnvidia-ml.so.1"))
            return cls(library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def indices(self) -> range:
        """Of all GPUs that the driver knows."""
        count = ctypes.c_uint()
        is_known = self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        return range(count.value if is_known else 0)

    def ask(self, gpus: Sequence[int]) -> list[schema.GpuUsage]:
        """Of each GPU; one that does not answer is left out."""
        found: list[schema.GpuUsage] = []
        for index in gpus:
            device = self._device(index)
            use, memory = _Utilization(), _Memory()
            if device is None:
                continue
            has_use = self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) == 0
            if self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                found.append(
                    {
                        "index": index,
                        "use": use.gpu / 100 if has_use else None,
                        "memory": memory.used,
                        "memory_total": memory.total,
                    }
                )
        return found

    def _device(self, index: int) -> ctypes.c_void_p | None:
        if index not in self._devices:
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                return None
            self._devices[index] = device
        return self._devices[index]
