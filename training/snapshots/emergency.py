"""Keep or save the newest step on a rank that has lost another one, since no snapshot has that step yet."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_not
from typing import Any

import torch

from nodekit.training.group import nccl
from nodekit.training.group.agent_messages import stop_to_pause
from nodekit.training.group.collectives import broadcast_from_first, numbers_on, sent_buffers
from nodekit.training.group.connections import is_lost_rank
from nodekit.training.process.kept import AttemptOver, Kept
from nodekit.training.process.stages import KEEPING, PAUSING
from nodekit.training.snapshots.files.fence import Fenced
from nodekit.training.snapshots.hostcopy import HostCopy
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

_MOST_UNCOUNTED = 20  # calls of `stops` with an uncounted step until a warning; two counted in a row reset it
_MOST_PUT_OFF = 3  # how often a pause is put off to a later step before all ranks stop instead


def why_over(error: BaseException | None) -> str:
    """Return why an error ends only the attempt, so that the next one goes on with the step; "" for other errors."""
    if isinstance(error, Fenced):
        return "its generation is over"
    # After NCCL was aborted, any error counts: it may come from the invalid values that the abort left behind.
    return "another rank is lost" if error and (nccl.has_left() or is_lost_rank(error)) else ""


class BufferCopies:
    """Copies of a module's buffers, to undo a forward pass, even one that replaces, adds or enlarges buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Copy nothing yet."""
        self._owners = [*module.modules()]
        self._named: list[dict[str, torch.Tensor | None]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def take(self) -> None:
        """Copy the buffers, in place of the previous copies."""
        self._named = [dict(each._buffers) for each in self._owners]
        found = (each for named in self._named for each in named.values() if each is not None)
        buffers = [*{id(each): each for each in found}.values()]
        if len(buffers) != len(self._buffers) or any(map(is_not, buffers, self._buffers)):
            self._buffers, self._copies = buffers, [each.clone() for each in buffers]
        elif buffers:
            torch._foreach_copy_(self._copies, buffers)

    def restore(self) -> None:
        """Restore the module's buffers, and their values, as they were when copied."""
        for owner, named in zip(self._owners, self._named, strict=True):
            for name in owner._buffers.keys() - named.keys():
                del owner._buffers[name]
            for name, each in named.items():
                owner._buffers[name] = each
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)


class LastWholeStep:
    """Tracks which step the weights are of: known from one update to the next; a forward pass changes buffers only."""

    is_known_late = False
    """Whether a step counts as done as soon as its update is launched, before all ranks' sums are known."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Begin with no whole step."""
        self._buffers = BufferCopies(module)
        self._is_within_step = False
        self._step: int | None = None
        self.newest: int | None = None
        """The last step that was ever whole; for `EmergencySave`, also one whose update the script has yet to count."""
        self.values: Mapping[str, Any] = {}
        """Other values as they were after the step that `found` returns."""

    def next_begins(self) -> None:
        """Copy the buffers (batch norm's means): the next step's forward pass will change them."""
        self._is_within_step = True
        self._buffers.take()

    def update_begins(self) -> None:
        """Mark the weights as belonging to no whole step: an update is changing them."""
        self._step = None

    def is_done(self, step: int, values: Mapping[str, Any]) -> None:
        """Mark the weights as those after ``step``; ``values`` belong to it too."""
        self._is_within_step = False
        self._step = self.newest = step
        self.values = values

    def forget(self) -> None:
        """Forget the step: none is whole from now on."""
        self._step = None

    def found(self) -> int | None:
        """Return the step, and restore the buffers as they were after it; None while the weights are of no step."""
        if self._step is not None and self._is_within_step:
            self._buffers.restore()
        return self._step


def save_alone(
    snapshots: Snapshots, world: World, state: Callable[[], Any], *, step: int, attempt: str | None = None
) -> bool:
    """Save what ``state`` returns without the other ranks, while kit waits for it; return False if that failed.

    Any number of ranks may do so: the first rank to save in a folder does. Pass ``attempt`` if the state is of an
    earlier attempt.
    """
    world.stage(KEEPING, step=step)
    try:
        snapshots.save_if_newest(state(), step=step, world_size=world.world_size, attempt=attempt)
    except Exception as error:  # only logged: the caller raises the error that it is handling
        log.warning("step %d was not saved by this rank alone: %s", step, error)
        return False
    return not snapshots.num_failed


class EmergencySave:
    """Saves the last step, in a training loop of your own, when a collective fails because another rank is lost.

    ::

        emergency = EmergencySave(snapshots, world, state, lambda: step, optimizer)
        while step < total:
            loss(...).backward()
            optimizer.step()
            step += 1
            if emergency.stops(stop.requested):
                break

    The step is saved when the error leaves the block of ``with world``, or a function that `run_attempts` calls; with
    `run_attempts`, it is kept in memory instead if this process may stay.

    Use it where each rank has the whole state, as with DistributedDataParallel: over gloo, or over NCCL with
    `run_attempts`. Without it, all steps since the newest snapshot are done again. Every remaining rank saves, unless
    its folder has this step already. kit and torchrun give it 30 s for that.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        world: World,
        state: Callable[[], Any],
        step: Callable[[], int],
        optimizer: torch.optim.Optimizer,
        *others: torch.optim.Optimizer,
        module: torch.nn.Module | None = None,
    ) -> None:
        """Begin to track the steps: the present state is that of a whole step. An earlier EmergencySave is closed.

        Args:
            snapshots: of this rank's node, also on ranks that do not save otherwise.
            world: its process group must exist.
            state: returns the state for ``snapshots.save``. It is called between one update and the next.
            step: returns how many updates are done; not the number of the update being made, as the variable of a
                ``for`` that begins with 1. Count an update when all else that belongs to it is done (the sampler, the
                scheduler). After an update, nothing is saved until the number is one more than it was during it.
            optimizer: updates the state.
            others: further optimizers that update it.
            module: save its buffers (batch norm's means) as the update has left them, not as the next forward pass has.
                All ranks get rank 0's buffers as an update begins, so all ranks have to make every update.
        """
        world.settle()  # DistributedDataParallel may have sent rank 0's weights just now
        self._snapshots, self._world, self._state, self._step = snapshots, world, state, step
        self._module = torch.nn.Module() if module is None else module
        self._last = LastWholeStep(self._module)
        self._is_closed = False
        self._listens = self._is_asked_to_pause = False
        self._num_uncounted = self._num_put_off = 0
        self._was_counted = False
        self._is_done(step())
        # Accelerate's wrapper has no hooks of its own: use those of the optimizer inside.
        plain = [getattr(each, "optimizer", each) for each in (optimizer, *others)]
        for each in plain:
            if not hasattr(each, "register_step_pre_hook"):
                raise TypeError(
                    f"EmergencySave cannot know when {type(each).__name__} updates the weights: it has no "
                    "register_step_pre_hook, as each torch.optim.Optimizer has. Give the optimizer of torch's that it "
                    "wraps, derive it from torch.optim.Optimizer, or leave EmergencySave out: a lost rank then costs "
                    "the steps since the newest snapshot"
                )
        self._hooks = [each.register_step_pre_hook(self._update_begins) for each in plain]
        self._hooks += [each.register_step_post_hook(self._update_ends) for each in plain]
        for each in world.emergency:
            each.close()
        world.emergency[:] = [self]
        world.keeps_when_lost(self._newest, self._save)
        if world.kept is not None:
            world.kept.release()  # the state has been loaded

    def stops(self, requested: bool) -> bool:
        """Whether a stop is requested on any rank; all ranks call it after each counted step, or every few steps.

        Raises:
            AttemptOver: on all ranks, if another node joins, and no stop is requested.
        """
        if self._world.may_stay and self._world.messages and not self._listens:
            self._listens = True
            self._world.messages.when("pause", self._ask_to_pause)
        own = [requested, self._is_asked_to_pause, self._is_counted]
        sums = self._world.start_sum(numbers_on(self._world.device, own))
        stops, pauses, counted = sums()
        self._warn_if_uncounted()
        if stops or not pauses:
            return bool(stops)
        if counted < self._world.world_size:
            # A gradient scaler may have skipped this update. If the next ones cannot be kept either, all ranks stop.
            self._num_put_off += 1
            return self._num_put_off > _MOST_PUT_OFF
        step = self._found()
        assert step is not None, "the weights are of the step that is counted"
        kept = self._kept(step)
        kept.has_paused = True
        raise AttemptOver(kept)

    def close(self) -> None:
        """Save nothing from now on: for a script that goes on to something else, as an evaluation of other weights."""
        self._is_closed = True
        for each in self._hooks:  # the optimizer may be of the next attempt as well
            each.remove()

    def keep(self, error: BaseException) -> Kept | None:
        """Leave the process group and return the last step, if the error ends only the attempt; for `World`."""
        if not why_over(error) or not self._world.keeps_steps:
            return None
        if isinstance(error, Fenced) and not self._world.may_stay:
            return None  # ranks that may stay keep the step for the next generation
        self._world.leave_others()
        try:
            step = self._found()
            return None if step is None else self._kept(step)
        except Exception as unmade:  # only logged: the caller raises the error that it is handling
            log.warning("the last step is not kept: %s", unmade)
            return None

    def _update_begins(self, *_: object) -> None:
        if self._world.world_size > 1:
            # All ranks need equal buffers now: rank 0, whose buffers the next forward pass would send, may be lost
            # before it.
            broadcast_from_first(sent_buffers(self._module), self._world.device)
        self._world.settle()  # the gradients are whole
        self._last.update_begins()

    def _update_ends(self, *_: object) -> None:
        self._is_done(self._step() + 1)  # `_is_counted` is true once the script has counted this step

    def _is_done(self, step: int) -> None:
        self._last.is_done(step, {})
        self._last.next_begins()

    @property
    def _is_counted(self) -> bool:
        return not self._is_closed and self._last.newest == self._step()

    def _found(self) -> int | None:
        """Return the last step, and restore its buffers; None while the state is of no whole, counted step."""
        return self._last.found() if self._is_counted else None

    def _newest(self) -> int | None:
        return None if self._is_closed else self._step()

    def _kept(self, step: int) -> Kept:
        state, attempt = self._state(), self._snapshots.attempt
        # Copy on a CPU too if this process stays: if the model is made once, outside of `train`, it gets rank 0's
        # weights when DistributedDataParallel is made again, before the step is loaded.
        if self._world.may_stay or self._world.device.type != "cpu":
            state = HostCopy(pins=False).take(state)
        self.close()
        return Kept(
            state,
            (self._world.generation or 0, step),
            partial(save_alone, self._snapshots, self._world, lambda: state, step=step, attempt=attempt),
            attempt,
            partial(setattr, self._snapshots, "entered"),
        )

    def _save(self) -> None:
        """Save the last step from another thread, while this rank waits for others."""
        try:
            if (step := self._found()) is not None:
                save_alone(self._snapshots, self._world, self._state, step=step)
        except Exception as error:  # only logged: the calling thread ends the process now
            log.warning("the last step is not saved: %s", error)

    def _ask_to_pause(self) -> None:
        if self._is_closed:
            stop_to_pause()
            return
        self._is_asked_to_pause = True
        self._world.stage(PAUSING, step=self._step())

    def _warn_if_uncounted(self) -> None:
        """Warn once if few steps or none can be kept, but not because of updates that a gradient scaler has skipped."""
        is_counted = self._is_counted or self._is_closed
        # A script that counts micro-batches never has two counted calls in a row.
        if is_counted and self._was_counted:
            self._num_uncounted = 0
        self._num_uncounted += not is_counted
        self._was_counted = is_counted
        if not is_counted and self._num_uncounted == _MOST_UNCOUNTED:
            log.warning(
                "steps are not kept if another rank is lost: EmergencySave's `step` is %d, and after the last update "
                "it should be %s. Count an update after it, by one, and before `stops`",
                self._step(),
                self._last.newest,
            )
