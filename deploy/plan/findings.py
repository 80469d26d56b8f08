"""Findings of `kit check`: the cells of its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nodekit.inventory.errors import HostError, KitError, Problem

Level = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """One check of one host, or of one ordered pair of hosts."""

    check: str
    """The column: access, workdir, software, gpus, clock, network, leftovers, deep."""
    host: str
    """The row; "a → b" for an ordered pair."""
    level: Level
    found: str = ""
    """What was found. If ok: a few words, or nothing."""
    wanted: str = ""
    """What was wanted instead."""
    cure: str = ""
    """The command to run, or the line of the inventory to change."""
    hosts: tuple[str, ...] = ()
    """The rows to which the finding applies; default: `host`."""

    @property
    def problem(self) -> Problem:
        """The finding without the host; `str` formats it as a line."""
        return Problem(self.found, self.wanted, self.cure)

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (self.host,))


def failures(
    check: str, host: str, error: KitError, wanted: str, hosts: tuple[str, ...] = ()
) -> list[Finding]:
    """Convert an error to findings.

    Args:
        check: the column.
        host: the row, for an error that names no host.
        error: a single error, or a `KitErrors`.
        wanted: what was wanted, for an error that does not say so.
        hosts: the rows to which the finding applies, for an error that names no host.
    """
    return [
        Finding(
            check,
            each.host if isinstance(each, HostError) else host,
            "failure",
            *each.problem._replace(wanted=each.problem.wanted or wanted),
            hosts=() if isinstance(each, HostError) else hosts,
        )
        for each in error.errors
    ]
