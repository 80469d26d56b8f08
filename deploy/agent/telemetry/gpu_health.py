"""Watch the GPUs of this node's ranks: samples, slowdowns, and faults with which no rank can go on.

A process of its own (`deploy/host/probes/gpu/gpu_watch.py`) queries the driver, and a thread here reads its output.
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

SILENT_S = 30.0  # without an answer until the driver counts as silent; it is queried every second
STALE_S = 5.0  # how old a sample may be to be reported as the present one
SLOW_S = 5.0  # how long a clock must be low until it is reported
SLOW_AGAIN_S = 60.0  # how long until a low clock of the same GPU is reported again
SAME_S = 5.0  # how far apart the driver and the kernel's log may report the same Xid
BEFORE_S = 60.0  # how long before a rank's failure a fault of its GPU may be the cause
LAST_LOOK_S = 2.5  # how long to wait for the driver's next sample after a rank failed with a CUDA error
FORGIVE = "when it is mended, kit clean --forgive lets kit up use it again"
CURE = f"see `sudo dmesg | grep -i nvrm` there, reset the GPU or reboot the host; {FORGIVE}"
_POWER_CAP = "sw_power_cap"  # normal for a GPU under full load
_CUDA = re.compile(r"CUDA|NCCL|cuBLAS|cuDNN|nvml|GPU", re.IGNORECASE)
_USERS_OWN = re.compile(r"out of memory|device-side assert|illegal memory access")
_BROKEN = re.compile(r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus")


@dataclass(frozen=True)
class Fault:
    """A fault of a GPU."""

    gpu: int | None
    """nvidia-smi's index; None if it is unknown."""
    kind: str
    """xid, ecc, lost, missing or silent."""
    text: str
    is_fatal: bool
    """Whether no rank can go on; if not, only ranks that were using this GPU may fail."""
    when: float
    """By `time.monotonic`."""
    number: int | None = None
    """The number of the Xid, if it is one."""

    def __str__(self) -> str:
        return f"GPU {'?' if self.gpu is None else self.gpu}: {self.text}"


class GpuHealth:
    """The health of some GPUs, as reported by the driver; may be used from any thread."""

    def __init__(self, gpus: Sequence[int], say: Say) -> None:
        """Watch GPUs, given by nvidia-smi's index, and report events to `say`; without GPUs or a driver, do nothing."""
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
        """GPU → since when its clock is low, and when that was reported."""
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
        """Stop watching."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in the driver
                process.wait(1)

    def usage(self) -> list[GpuUsage]:
        """Return the last samples; none if the driver has not answered for `STALE_S`."""
        self._note_silence()
        with self._changed:
            return list(self._latest) if time.monotonic() - self._heard < STALE_S else []

    @property
    def fatal(self) -> Fault | None:
        """The first fault with which no rank can go on."""
        with self._changed:
            return next((each for each in self._faults if each.is_fatal), None)

    def recent(self, before_s: float = BEFORE_S) -> Fault | None:
        """Return the newest fatal fault; without one, the newest fault of the last `before_s` seconds, or None."""
        since = time.monotonic() - before_s
        with self._changed:
            known = [each for each in self._faults if each.kind != "silent"]
        found = [each for each in known if each.is_fatal or each.when >= since]
        return max(found, key=lambda each: (each.is_fatal, each.when), default=None)

    def blamed_for(self, failures: Sequence[WorkerFailure]) -> Fault | None:
        """Return the GPU fault that made ranks fail; None if the cause is another one or unknown.

        The failures' ``error`` must be a message without lines of code (`failures.message_of`).
        """
        if not self._gpus:
            return None
        if any(
            _CUDA.search(each["error"]) and not _USERS_OWN.search(each["error"])
            for each in failures
            if each["exitcode"] != -signal.SIGKILL  # no error that it printed ended it
        ):
            self._wait_for_look()  # the driver may report a fault a moment after CUDA does
        if (fault := self.recent()) is not None:
            return fault
        now = time.monotonic()
        for each in failures:  # in case the driver reports nothing any more
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
            # Errors from before the agent's start are not new.
            more = errors - self._uncorrectable.setdefault(index, errors)
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
        """Report a clock that is low for `SLOW_S` for another reason than full load, and report when it recovers."""
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
        """Report, once, that the driver does not answer any more."""
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
