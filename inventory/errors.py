"""Every error of ours that a user may meet.

KitError              exit 1: bad input, or a host that cannot do what was asked
├── InventoryError    the inventory file is not right (also a ValueError)
├── HostError         one host, named: unreachable, refused, or missing something
├── NotWritten        a run's record on this machine could not be written: its disk is full (also an OSError)
└── JobFailed         exit 3: the job ran and failed
"""


class KitError(Exception):
    """An expected error, told in full by its message: what was found, what was wanted, what to do."""

    exit_code = 1


class InventoryError(KitError, ValueError):
    """The inventory is not right; the message has one ``file:line`` per mistake."""


class HostError(KitError):
    """Something is wrong on, or on the way to, one host.

    Attributes:
        host: the host's name in the inventory.
        problem: what was found and what to do next, without the host's name.
    """

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"{host}: {problem}")
        self.host = host
        self.problem = problem


class NotWritten(KitError, OSError):
    """A run's record could not be written; it is as it was before."""


class JobFailed(KitError):
    """The job was started and did not train to its end."""

    exit_code = 3
