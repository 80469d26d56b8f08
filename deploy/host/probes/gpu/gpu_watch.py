"""Sample NVIDIA GPUs every second, and write each sample to stdout as a line of JSON.

A program of its own (``python -m nodekit.deploy.host.probes.gpu.gpu_watch INDEX…``): once a GPU is lost, a call of the
driver may never return, and a process that waits in it cannot be killed. Then this process hangs, and not the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from nodekit.deploy.host.probes import kernel
from nodekit.deploy.host.probes.gpu.xids import HARDWARE_XIDS, parse_xids, short_bus
from nodekit.deploy.host.schema import GpuUsage

INTERVAL_S = 1.0
SLOW = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Bit of NVML's clocks event reasons → its name in nvidia-smi: the power cap, and reasons not due to the load."""
_INVALID_ARGUMENT, _NOT_SUPPORTED, _TIMEOUT, _GPU_IS_LOST = 2, 3, 10, 15
_REASONS = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)  # the first since NVML 12.2, the second before
_SM, _GPU_SENSOR, _UNCORRECTED, _VOLATILE = 1, 0, 1, 0
_XID_EVENT = ctypes.c_ulonglong(8)


class Lost(Exception):
    """The driver reports that the GPU is lost."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (("legacy", ctypes.c_char * 16), ("numbers", ctypes.c_uint * 5), ("bus", ctypes.c_char * 32))


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("instances", ctypes.c_uint * 2),
    )


class Nvml:
    """NVIDIA's management library, part of every driver: a call takes microseconds, nvidia-smi half a second.

    Signatures: https://docs.nvidia.com/deploy/nvml-api.
    """

    def __init__(self, library: Any) -> None:
        """Take a library that is loaded and initialized."""
        self._library = library
        self._devices: Dict[int, ctypes.c_void_p] = {}
        self._events: Optional[ctypes.c_void_p] = None

    @classmethod
    def load(cls) -> Optional[Nvml]:
        """Return the library; None without a driver."""
        try:
            library = ctypes.CDLL(os.environ.get("NODEKIT_NVML", "libnvidia-ml.so.1"))
            return cls(library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def find(self, index: int) -> bool:
        """Look up a GPU by its index; return whether the driver lists it. If access is denied, it is not `usable`.

        Raises:
            Lost: the driver lists the GPU as lost.
        """
        device = ctypes.c_void_p()
        status = self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        if status == 0:
            self._devices[index] = device
        return status != _INVALID_ARGUMENT

    @property
    def usable(self) -> List[int]:
        """The GPUs that were found, and can be queried."""
        return list(self._devices)

    def bus(self, index: int) -> str:
        """Return a GPU's PCI address in the format of the kernel's log; "" if the driver does not report it."""
        pci = _Pci()
        if self._call("nvmlDeviceGetPciInfo_v3", self._devices[index], ctypes.byref(pci)):
            return ""
        return short_bus(pci.bus.decode("ascii", "replace"))

    def sample(self, index: int) -> GpuUsage:
        """Return the load and health of a GPU, with those fields that it and its driver report.

        Raises:
            Lost: the GPU is lost.
        """
        device = self._devices[index]
        use, memory = _Utilization(), _Memory()
        has_use = not self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(use))
        if self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
            memory = _Memory()
        found: GpuUsage = {
            "index": index,
            "use": use.gpu / 100 if has_use else None,
            "memory": memory.used,
            "memory_total": memory.total,
        }
        reasons = None
        for name in _REASONS:
            if reasons is None:
                reasons = self._number(name, device, kind=ctypes.c_ulonglong)
        power, limit = (
            self._number(name, device)
            for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit")
        )
        told = {
            "temperature": self._number("nvmlDeviceGetTemperature", device, _GPU_SENSOR),
            "clock": self._number("nvmlDeviceGetClockInfo", device, _SM),
            "clock_max": self._number("nvmlDeviceGetMaxClockInfo", device, _SM),
            "slow": None if reasons is None else [name for bit, name in SLOW.items() if reasons & bit],
            "power": None if power is None else round(power / 1000),
            "power_limit": None if limit is None else round(limit / 1000),
            "uncorrectable": self._number(
                "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _VOLATILE, kind=ctypes.c_ulonglong
            ),
        }
        found.update({name: value for name, value in told.items() if value is not None})  # type: ignore[typeddict-item]
        return found

    def watch_for_xids(self) -> None:
        """Have the driver report Xids of the GPUs found so far, as only root may be able to read the kernel's log."""
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)):
            return
        told = [
            self._call("nvmlDeviceRegisterEvents", each, _XID_EVENT, events)
            for each in self._devices.values()
        ]
        self._events = events if 0 in told else None

    def next_xid(self, wait_s: float) -> Optional[Tuple[Optional[int], int]]:
        """Wait up to `wait_s` for an Xid; return the GPU's index (None if unknown) and the number, or None."""
        if self._events is None:
            time.sleep(wait_s)
            return None
        event, events, self._events = _Event(), self._events, None
        status = self._call(
            "nvmlEventSetWait_v2", events, ctypes.byref(event), ctypes.c_uint(int(wait_s * 1000))
        )
        if status not in (0, _TIMEOUT):
            return None  # an error: do not wait for events again
        self._events = events
        if status:
            return None
        return self._number("nvmlDeviceGetIndex", ctypes.c_void_p(event.device)), int(event.data)

    def _number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> Optional[int]:
        """Return the number that a function writes to its last argument; None if the call fails."""
        value = kind()
        return None if self._call(name, *arguments, ctypes.byref(value)) else int(value.value)

    def _call(self, name: str, *arguments: Any) -> int:
        """Return the status of a call, 0 for success; not 0 if the driver does not have this function."""
        function = getattr(self._library, name, None)
        status = _NOT_SUPPORTED if function is None else int(function(*arguments))
        if status == _GPU_IS_LOST:
            raise Lost
        return status


def looks(nvml: Nvml, indices: Sequence[int], log: kernel.Log) -> Iterator[Dict[str, Any]]:
    """Yield every second ``gpus`` (samples), ``xids`` (GPU or None, number, text), ``lost`` and ``missing`` (GPUs)."""
    lost: List[int] = []
    missing: List[int] = []
    buses: Dict[str, int] = {}
    for index in indices:
        try:
            if not nvml.find(index):
                missing.append(index)
            elif index in nvml.usable:
                buses[nvml.bus(index)] = index
        except Lost:
            lost.append(index)
    buses.pop("", None)
    there = [index for index in nvml.usable if index not in lost]
    with contextlib.suppress(Lost):
        nvml.watch_for_xids()
    xids: List[Tuple[Optional[int], int, str]] = []
    while True:
        due = time.monotonic() + INTERVAL_S
        gpus: List[GpuUsage] = []
        for index in there:
            try:
                gpus.append(nvml.sample(index))
            except Lost:
                lost.append(index)
        there = [index for index in there if index not in lost]
        for xid in parse_xids(log.new() or []):
            # An Xid of another GPU concerns another job; but if no GPU's address is known, it may be one of these.
            if xid.number in HARDWARE_XIDS and (xid.bus in buses or not buses):
                xids.append((buses.get(xid.bus), xid.number, xid.text))
        yield {"gpus": gpus, "xids": xids, "lost": lost, "missing": missing}
        xids = []
        while (wait_s := due - time.monotonic()) > 0:
            event = None
            with contextlib.suppress(Lost):  # the next sample reports it
                event = nvml.next_xid(wait_s)
            if event is not None and event[0] in indices and event[1] in HARDWARE_XIDS:
                xids.append((event[0], event[1], ""))
                break  # sample again at once


def main() -> None:
    """Watch the GPUs given as arguments until the reader of stdout is gone."""
    indices = [int(each) for each in sys.argv[1:]]
    nvml = Nvml.load()
    if nvml is None:
        return
    log = kernel.Log(os.environ.get("NODEKIT_KMSG", "/dev/kmsg"))
    try:
        for found in looks(nvml, indices, log):
            print(json.dumps(found), flush=True)
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
