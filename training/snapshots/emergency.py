"""The snapshot that a rank saves by itself when it has lost another: it alone still has the newest step."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from nodekit.training.connections import is_lost_rank
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import KEEPING, World

log = logging.getLogger("nodekit.training")


class LastWholeStep:
    """Which step the weights are of, between one update of them and the next; a forward pass changes buffers alone."""

    def __init__(self, module: torch.nn.Module) -> None:
        """No step is whole yet."""
        self._buffers = list(module.buffers())
        self._copies = [each.clone() for each in self._buffers]
        self._is_within_step = False
        self._step: int | None = None
        self.newest: int | None = None
        """The last step that was whole at any time."""

    def next_begins(self) -> None:
        """The next step's forward pass will change the buffers (batch norm's means): keep them."""
        self._is_within_step = True
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def update_begins(self) -> None:
        """From here on, the weights are of no step."""
        self._step = None

    def is_done(self, step: int) -> None:
        """The weights are those after ``step``."""
        self._is_within_step = False
        self._step = self.newest = step

    def found(self) -> int | None:
        """The step, with the buffers as they were then; None while the weights are of no step."""
        if self._step is not None and self._is_within_step and self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
        return self._step


def save_alone(snapshots: Snapshots, world: World, state: Callable[[], Any], *, step: int) -> bool:
    """Save what ``state`` returns without the other ranks, and have kit wait for it; False if it failed.

    Any number of ranks may do so: in each folder the first one saves.
    """
    world.stage(KEEPING, step=step)
    try:
        snapshots.save_if_newest(state(), step=step, world_size=world.world_size)
    except Exception as error:  # the one that has led here is the one to be raised
        log.warning("step %d was not saved by this rank alone: %s", step, error)
        return False
    return not snapshots.num_failed


@dataclass
class Kept:
    """The state of a step in the memory of a rank that has lost another, and goes on in the next attempt."""

    state: Any
    """What a snapshot of the step has."""
    age: tuple[int, int]
    """(generation, step)."""
    save: Callable[[], bool]
    """Saves it without the other ranks; False if that failed."""


class EmergencySave:
    """Saves the last step, in a training loop of your own, when a collective fails because another rank is lost.

    ::

        with EmergencySave(snapshots, world, state) as emergency:
            for step in ...:
                loss(...).backward()
                with emergency.update(step):
                    optimizer.step()

    For ranks that have all of the state, as with DistributedDataParallel, over gloo. Without it, all steps since the
    newest snapshot are done again. Every rank that is left saves, unless its folder has this step already. It has until
    the grace is over (``timings.grace``, and that of `Stop`).
    """

    def __init__(
        self,
        snapshots: Snapshots,
        world: World,
        state: Callable[[], Any],
        *,
        module: torch.nn.Module | None = None,
    ) -> None:
        """Nothing is saved yet.

        Args:
            snapshots: of this rank's node, whichever rank of it saves otherwise.
            world: its process group must exist.
            state: returns what ``snapshots.save`` is to get. It is called after an update, never during one.
            module: whose buffers (batch norm's means) are to be saved as they were after the update, and not as the
                next forward pass has left them.
        """
        self._snapshots, self._world, self._state = snapshots, world, state
        self._last = LastWholeStep(torch.nn.Module() if module is None else module)

    def __enter__(self) -> "EmergencySave":
        self._world.keeps_when_lost(lambda: self._last.newest)
        return self

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the optimizer's step, and all else that makes the state that of ``step``."""
        self._last.update_begins()
        yield
        self._last.is_done(step)
        self._last.next_begins()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_lost_rank(error) or self._world.backend != "gloo":
            return
        self._world.leave_others()
        if (step := self._last.found()) is not None:
            save_alone(self._snapshots, self._world, self._state, step=step)
