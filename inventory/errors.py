"""Every error of kit's own that a user may see.

KitError              exit 1: bad input, or a host that cannot do what was asked
├── KitErrors         several of them at once
├── InventoryError    the inventory file is not right (also a ValueError)
├── HostError         one host, named: unreachable, refused, or missing something
├── NotWritten        a run's record on this machine could not be written: its disk is full (also an OSError)
└── JobFailed         exit 3: the job ran and failed
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Problem(NamedTuple):
    """What is wrong, as found by a check; shown as a finding of `kit check`, or as the error that ends a command.

    The texts are for users; no code depends on their words.
    """

    found: str
    """The host or file, and what was found there."""
    wanted: str = ""
    """What was wanted instead."""
    cure: str = ""
    """What to do next: a command to run, or the line of the inventory to change."""

    def __str__(self) -> str:
        text = f"{self.found}, wanted {self.wanted}" if self.wanted else self.found
        if not self.cure:
            return text
        return f"{text}\n{self.cure}" if "\n" in text else f"{text}; {self.cure}"


class KitError(Exception):
    """An expected error.

    Attributes:
        problem: what was found, what was wanted, and what to do.
        errors: this error alone, or those of a `KitErrors`.
    """

    exit_code = 1

    def __init__(self, found: str, wanted: str = "", cure: str = "") -> None:
        super().__init__(found)
        self.problem = Problem(found, wanted, cure)
        self.errors: tuple[KitError, ...] = (self,)

    def __str__(self) -> str:
        return str(self.problem)


class KitErrors(KitError):
    """Several errors, a line for each, so that none hides another."""

    def __init__(self, errors: Iterable[KitError]) -> None:
        # An error that all hosts report, as it is in the code on this machine, is shown once.
        several = tuple({str(each): each for error in errors for each in error.errors}.values())
        super().__init__("\n".join(map(str, several)))
        self.errors = several


class WrongUsage(KitError):
    """The command line is invalid, or has options that exclude each other."""

    exit_code = 2


class InventoryError(KitError, ValueError):
    """The inventory is invalid; the message has a line with ``file:line`` for each mistake."""


class HostError(KitError):
    """Something is wrong on one host, or on the connection to it.

    Attributes:
        host: the host's name in the inventory; not in `problem`.
    """

    def __init__(self, host: str, found: str, wanted: str = "", cure: str = "") -> None:
        super().__init__(found, wanted, cure)
        self.host = host

    def __str__(self) -> str:
        return f"{self.host}: {self.problem}"


class LoginRefused(HostError):
    """The host answers, but refuses this user's keys, or has an unknown host key; another try would fail as well."""


class NotWritten(KitError, OSError):
    """A run's record could not be written, and is unchanged."""


class JobFailed(KitError):
    """The job was started, but failed before its end."""

    exit_code = 3
