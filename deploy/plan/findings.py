"""A finding of `kit check`: one cell of its table."""

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
    """The rows that it applies to; default: `host`."""

    @property
    def problem(self) -> Problem:
        """The finding without the host; its `str` is a line."""
        return Problem(self.found, self.wanted, self.cure)

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (self.host,))


def failures(
    check: str, host: str, error: KitError, wanted: str, hosts: tuple[str, ...] = ()
) -> list[Finding]:
    """Return the findings that an error makes.

    Args:
        check: the column.
        host: the row, for an error that names none itself.
        error: one, or several in one.
        wanted: for an error that does not say it.
        hosts: the rows that it applies to, for an error that names none.
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
