"""The errors of NVIDIA's driver (Xids) that mean a broken GPU, and a parser for their lines in the kernel's log."""

from __future__ import annotations

import re
from typing import Iterable, List, NamedTuple

OFF_THE_BUS = 79
# Xid → its meaning, for hardware errors only (NVIDIA's list of Xid errors).
HARDWARE_XIDS = {
    48: "an ECC error that could not be corrected",
    62: "its microcontroller halted",
    63: "a row of its memory is to be replaced",
    64: "a row of its memory could not be replaced",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many ECC errors",
    94: "an ECC error, contained",
    95: "an ECC error, not contained",
    110: "a security fault",
    119: "its system processor does not answer",
    120: "an error of its system processor",
    140: "an ECC error that could not be corrected",
    143: "it could not be initialized",
    144: "an NVLink error",
    145: "an NVLink error",
    146: "an NVLink error",
    147: "an NVLink error",
    148: "an NVLink error",
    149: "an NVLink error",
    150: "an NVLink error",
    154: "it wants a reset or a reboot",
    156: "a part of its memory is to be replaced",
    157: "a part of its memory could not be replaced",
    158: "it does not answer",
    171: "an ECC error of its memory that could not be corrected",
    172: "an ECC error of its caches that could not be corrected",
}
FATAL_XIDS = frozenset((62, 79, 95, 119, 120))
"""After these no process can use the GPU. Other errors affect the processes using it at that moment, or none."""
HARMLESS_XIDS = frozenset((92,))
"""Errors that were corrected: no reason why a process failed."""
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, (.*))?")


class Xid(NamedTuple):
    """An error that the driver has reported."""

    bus: str
    """The GPU's PCI address, as ``0000:3b:00``."""
    number: int
    text: str


def parse_xids(lines: Iterable[str]) -> List[Xid]:
    """Return the errors in lines of the kernel's log."""
    matches = (_XID.search(line) for line in lines)
    return [
        Xid(bus=short_bus(match.group(1)), number=int(match.group(2)), text=(match.group(3) or "").strip())
        for match in matches
        if match
    ]


def short_bus(bus: str) -> str:
    """Return a PCI address in the format of the kernel's log, ``0000:3b:00``: domain of four digits, no function."""
    return bus.lower().partition(".")[0][-len("0000:00:00") :]
