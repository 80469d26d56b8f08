"""What a process keeps of one attempt for the next one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Made(NamedTuple):
    """Which state it is: ranks whose states are made alike have equal ones."""

    age: tuple[int, int]
    """(generation, step)."""
    attempt: str
    """By a number that the ranks drew together: a step that is done again in another attempt has another rounding."""


def _nothing_to_tell(_: int) -> None:
    pass


@dataclass
class Kept:
    """The state of a step in the memory of a rank that has lost another, and goes on in the next attempt."""

    state: Any
    """What a snapshot of the step has."""
    age: tuple[int, int]
    """(generation, step)."""
    save: Callable[[], bool]
    """Saves it without the other ranks; False if that failed."""
    attempt: str = ""
    """As in `Made`."""
    enters: Callable[[int], None] = _nothing_to_tell
    """Has what is saved be of a later generation, which this rank was told of: its own can commit nothing any more."""
    has_paused: bool = False
    """Whether all ranks agreed to wait for a node that comes in, and none is lost."""

    @property
    def made(self) -> Made:
        """Which state it is."""
        return Made(self.age, self.attempt)

    @property
    def is_held(self) -> bool:
        """Whether the state is still here."""
        return self.state is not None

    def release(self) -> None:
        """Let go of the state: what it was loaded into has it now."""
        self.state = None
        # These refer to the state as well, and to the attempt that it is of.
        self.save, self.enters = _is_released, _nothing_to_tell


def _is_released() -> bool:
    return False


class HasLastStep(Protocol):
    """What a training loop of the user's has for the case that another rank is lost."""

    def keep(self, error: BaseException) -> Kept | None:
        """Leave the others and return the last step, if the error is that another rank is lost; else None."""

    def close(self) -> None:
        """From now on there is none."""


class AttemptOver(Exception):
    """Another node comes in: ends the attempt of a function that `run_attempts` calls again; let it through."""

    def __init__(self, kept: Kept) -> None:
        """``kept`` is for the next attempt."""
        super().__init__(f"another node comes in: waiting with step {kept.age[1]} for the next attempt")
        self.kept = kept
