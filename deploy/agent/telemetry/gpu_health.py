"""Watch the GPUs of this node's ranks while they train: samples, slowdowns, and faults with which no rank can go on.

The driver is asked by a process of its own (`deploy/host/probes/gpu/gpu_watch.py`), which a thread listens to.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from nodekit.deploy.host.probes.gpu.xids import FATAL_XIDS, HARDWARE_XIDS, HARMLESS_XIDS, parse_xids
from nodekit.deploy.host.schema import GpuUsage, Say, WorkerFailure

SILENT_S = 30.0  # the driver is asked every second
STALE_S = 5.0  # what was seen longer ago is not told as of now
SLOW_S = 5.0  # clocks that are low for a moment say nothing
SLOW_AGAIN_S = 60.0
SAME_S = 5.0  # an Xid comes from the driver and from the kernel's log
BEFORE_S = 60.0  # how long before a rank failed what its GPU did may be the reason
LAST_LOOK_S = 2.5  # how long the driver's word is waited for, of a rank that CUDA has failed
FORGIVE = "when it is mended, kit clean --forgive lets kit up use it again"
CURE = f"see `sudo dmesg | grep -i nvrm` there, reset the GPU or reboot the host; {FORGIVE}"
_POWER_CAP = "sw_power_cap"  # of a GPU under full load
_CUDA = re.compile(r"CUDA|NCCL|cuBLAS|cuDNN|nvml|GPU", re.IGNORECASE)
_USERS_OWN = re.compile(r"out of memory|device-side assert|illegal memory access")
_BROKEN = re.compile(r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus")


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a GPU."""

    gpu: int | None
    """By nvidia-smi's index; None where that is not known."""
    kind: str
    """xid, ecc, lost, missing, silent."""
    text: str
    is_fatal: bool
    """Whether no rank can go on; else only those may not that were using it."""
    when: float
    """By `time.monotonic`."""
    number: int | None = None
    """Of the Xid."""

    def __str__(self) -> str:
        return f"GPU {'?' if self.gpu is None else self.gpu}: {self.text}"


class GpuHealth:
    """What the driver tells of some GPUs. Used from any thread."""

    def __init__(self, gpus: Sequence[int], say: Say) -> None:
        """Watch these, by nvidia-smi's index; without any, or without a driver, there is nothing to tell."""
        self._gpus = tuple(gpus)
        self._say = say
        self._changed = threading.Condition()
        self._latest: list[GpuUsage] = []
        self._num_looks = 0
        self._heard = time.monotonic()
        self._is_over = not gpus
        self._faults: list[Fault] = []
        self._uncorrectable: dict[int, int] = {}
        self._slow: dict[int, tuple[float, float | None]] = {}
        """GPU → since when its clock is low, and when that was told."""
        self._slow_told: dict[int, float] = {}
        self._process: subprocess.Popen[str] | None = None
        if gpus:
            argv = [sys.executable, "-m", "nodekit.deploy.host.probes.gpu.gpu_watch", *map(str, gpus)]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
        if self._process is not None:
            assert self._process.stdout is not None
            threading.Thread(
                target=self._read, args=(self._process.stdout,), name="gpus", daemon=True
            ).start()

    def close(self) -> None:
        """Look no more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits in the driver
                process.wait(1)

    def usage(self) -> list[GpuUsage]:
        """The last samples; none where the driver does not tell."""
        self._note_silence()
        with self._changed:
            return list(self._latest) if time.monotonic() - self._heard < STALE_S else []

    @property
    def fatal(self) -> Fault | None:
        """The first fault with which no rank can go on."""
        with self._changed:
            return next((each for each in self._faults if each.is_fatal), None)

    def recent(self, before_s: float = BEFORE_S) -> Fault | None:
        """The gravest, then the newest fault of that time, those included that a rank may survive."""
        since = time.monotonic() - before_s
        with self._changed:
            known = [each for each in self._faults if each.kind != "silent"]
        found = [each for each in known if each.is_fatal or each.when >= since]
        return max(found, key=lambda each: (each.is_fatal, each.when), default=None)

    def blamed_for(self, failures: Sequence[WorkerFailure]) -> Fault | None:
        """The fault that ranks have failed of; None where it was something else, or nobody knows.

        As their ``error``, give what they said without the lines of code.
        """
        if not self._gpus:
            return None
        if any(
            _CUDA.search(each["error"]) and not _USERS_OWN.search(each["error"])
            for each in failures
            if each["exitcode"] != -signal.SIGKILL  # whatever it has said, this is not what ended it
        ):
            self._wait_for_look()  # the driver's word may come a moment later than CUDA's
        if (fault := self.recent()) is not None:
            return fault
        now = time.monotonic()
        for each in failures:  # of a driver that tells nothing any more
            for xid in parse_xids(each["kernel"]):
                if xid.number in HARDWARE_XIDS and xid.number not in HARMLESS_XIDS:
                    return Fault(None, "xid", _of_xid(xid.number, xid.text), True, now, xid.number)
            if (found := _BROKEN.search(each["error"])) is not None:
                return Fault(None, "ecc", f"rank {each['rank']} failed with: {found[0]}", True, now)
        return None

    def _wait_for_look(self) -> None:
        with self._changed:
            wanted = self._num_looks + 1
            self._changed.wait_for(lambda: self._num_looks >= wanted or self._is_over, LAST_LOOK_S)

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._take(json.loads(line))
        with self._changed:
            self._latest, self._is_over = [], True
            self._changed.notify_all()

    def _take(self, found: Mapping[str, Any]) -> None:
        now = time.monotonic()
        news = [*self._new_faults(found, now)]
        with self._changed:
            self._latest, self._heard = found["gpus"], now
            self._faults = [*self._faults[-100:], *news]
            self._num_looks += 1
            self._changed.notify_all()
        for fault in news:
            self._tell(fault)
        for each in self._latest:
            self._look_at_clock(each, now)

    def _new_faults(self, found: Mapping[str, Any], now: float) -> list[Fault]:
        known = {(each.gpu, each.kind) for each in self._faults}
        faults = [
            Fault(gpu, "lost", "it has fallen off the bus", True, now)
            for gpu in found["lost"]
            if (gpu, "lost") not in known
        ]
        faults += [
            Fault(gpu, "missing", "it was planned for this node, and the driver does not list it", True, now)
            for gpu in found["missing"]
            if (gpu, "missing") not in known
        ]
        for gpu, number, text in found["xids"]:
            recent = {
                (each.gpu, each.number) for each in (*self._faults, *faults) if now - each.when < SAME_S
            }
            if number not in HARMLESS_XIDS and not recent & {(gpu, number), (None, number)}:
                is_fatal = number in FATAL_XIDS
                faults.append(Fault(gpu, "xid", _of_xid(number, text), is_fatal, now, number))
        for each in found["gpus"]:
            index, errors = each["index"], each.get("uncorrectable", 0)
            more = errors - self._uncorrectable.setdefault(index, errors)  # what was there before is no news
            self._uncorrectable[index] = errors
            if more > 0:
                text = f"{more} ECC error{'s' * (more > 1)} could not be corrected"
                faults.append(Fault(index, "ecc", text, False, now))
        return faults

    def _tell(self, fault: Fault) -> None:
        number = {} if fault.number is None else {"number": fault.number}
        self._say(
            "gpu-error", gpu=fault.gpu, what=fault.kind, text=fault.text, fatal=fault.is_fatal, **number
        )

    def _look_at_clock(self, gpu: GpuUsage, now: float) -> None:
        """Tell of a clock that is low, for another reason than the load, for a while; and when that is over."""
        index, reasons = gpu["index"], [each for each in gpu.get("slow", ()) if each != _POWER_CAP]
        since, told = self._slow.get(index, (now, None))
        if not reasons:
            if told is not None:
                self._say("gpu-slow", gpu=index, over=True, seconds=round(now - since, 1))
            self._slow.pop(index, None)
            return
        self._slow[index] = since, told
        if (
            told is None
            and now - since >= SLOW_S
            and now - self._slow_told.get(index, -SLOW_AGAIN_S) >= SLOW_AGAIN_S
        ):
            self._slow[index] = since, now
            self._slow_told[index] = now
            names = ("temperature", "clock", "clock_max", "power")
            self._say("gpu-slow", gpu=index, reasons=reasons, **{name: gpu.get(name) for name in names})

    def _note_silence(self) -> None:
        """Tell, once, of a driver that does not answer any more."""
        now = time.monotonic()
        with self._changed:
            is_known = any(each.kind == "silent" and each.when > self._heard for each in self._faults)
            if self._is_over or is_known or now - self._heard < SILENT_S:
                return
            fault = Fault(None, "silent", f"the driver does not answer since {SILENT_S:.0f} s", False, now)
            self._faults.append(fault)
        self._tell(fault)


def _of_xid(number: int, text: str) -> str:
    more = f": {text}" if text else ""
    return f"Xid {number} ({HARDWARE_XIDS[number]}){more}"
