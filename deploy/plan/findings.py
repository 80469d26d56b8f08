"""A finding of `kit check`: one cell of its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    def text(self) -> str:
        """The finding in a line, without the host."""
        wanted = f", wanted: {self.wanted}" if self.wanted else ""
        return f"{self.found}{wanted}" + (f"; {self.cure}" if self.cure else "")

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (self.host,))
