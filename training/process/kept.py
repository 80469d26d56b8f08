"""The step that a process keeps from one attempt for the next one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Made(NamedTuple):
    """Identifies a state: ranks with equal values have equal tensors."""

    age: tuple[int, int]
    """(generation, step)."""
    attempt: str
    """The attempt's random number: a step that is done again in another attempt differs by rounding."""


def _nothing_to_tell(_: int) -> None:
    pass


@dataclass
class Kept:
    """The state of a step, which a rank that has lost another keeps in memory to go on in the next attempt."""

    state: Any
    """The state, as a snapshot of the step would hold it."""
    age: tuple[int, int]
    """(generation, step)."""
    save: Callable[[], bool]
    """Saves the state without the other ranks; returns False if that failed."""
    attempt: str = ""
    """As in `Made`."""
    enters: Callable[[int], None] = _nothing_to_tell
    """Makes ``save`` commit as the given newer generation: the rank's former one cannot commit any more."""
    has_paused: bool = False
    """Whether all ranks agreed to wait for a node that joins, so that no rank is lost."""

    @property
    def made(self) -> Made:
        """The identity of the state."""
        return Made(self.age, self.attempt)

    @property
    def is_held(self) -> bool:
        """Whether the state has not been released yet."""
        return self.state is not None

    def release(self) -> None:
        """Free the state, once it has been loaded into the model and optimizer."""
        self.state = None
        # These refer to the state as well, and to objects of its attempt.
        self.save, self.enters = _is_released, _nothing_to_tell


def _is_released() -> bool:
    return False


class HasLastStep(Protocol):
    """Keeps the last step of a user's training loop, for the case that another rank is lost."""

    def keep(self, error: BaseException) -> Kept | None:
        """Leave the process group and return the last step, if the error is that a rank is lost; otherwise None."""

    def close(self) -> None:
        """Keep no step from now on."""


class AttemptOver(Exception):
    """Ends an attempt since another node joins; do not catch it: `run_attempts` does, and calls the function again."""

    def __init__(self, kept: Kept) -> None:
        """``kept`` is handed to the next attempt."""
        super().__init__(f"another node comes in: waiting with step {kept.age[1]} for the next attempt")
        self.kept = kept
