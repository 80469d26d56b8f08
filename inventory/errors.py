"""Every error of ours that a user may meet, and what each of them says.

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
    """What is wrong: from a check to the finding of `kit check`, or to the error that ends a command.

    Whoever needs a part of it takes the field. The text is for people; no code reads it.
    """

    found: str
    """The host or file, and what was found there."""
    wanted: str = ""
    """What was wanted in its place."""
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
        errors: itself, or the several that it stands for.
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
        # One that several hosts came upon, and that is none of theirs (the code here), is said once.
        several = tuple({str(each): each for error in errors for each in error.errors}.values())
        super().__init__("\n".join(map(str, several)))
        self.errors = several


class WrongUsage(KitError):
    """What the command line asks for is not possible, or does not go together."""

    exit_code = 2


class InventoryError(KitError, ValueError):
    """The inventory is not right; the message has one ``file:line`` per mistake."""


class HostError(KitError):
    """Something is wrong on, or on the way to, one host.

    Attributes:
        host: the host's name in the inventory; not in `problem`.
    """

    def __init__(self, host: str, found: str, wanted: str = "", cure: str = "") -> None:
        super().__init__(found, wanted, cure)
        self.host = host

    def __str__(self) -> str:
        return f"{self.host}: {self.problem}"


class LoginRefused(HostError):
    """The host answers, and takes no key of this user, or has another host key than is known: so it will again."""


class NotWritten(KitError, OSError):
    """A run's record could not be written; it is as it was before."""


class JobFailed(KitError):
    """The job was started and did not train to its end."""

    exit_code = 3
