"""The snapshot that a rank saves by itself when it has lost another: it alone still has the newest step."""

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

_MOST_UNCOUNTED = 20  # calls of `stops`, with no two between them that were counted
_MOST_PUT_OFF = 3


def why_over(error: BaseException | None) -> str:
    """Why an error ends no more than the attempt: the next one goes on with the step; "" for every other error."""
    if isinstance(error, Fenced):
        return "its generation is over"
    # Where NCCL was aborted, whatever came of the garbage that it left.
    return "another rank is lost" if error and (nccl.has_left() or is_lost_rank(error)) else ""


class BufferCopies:
    """What a module's buffers are at one time: also of those that a forward pass replaces, adds, or has grow."""

    def __init__(self, module: torch.nn.Module) -> None:
        """None yet."""
        self._owners = [*module.modules()]
        self._named: list[dict[str, torch.Tensor | None]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def take(self) -> None:
        """Copy them, in place of what was copied before."""
        self._named = [dict(each._buffers) for each in self._owners]
        found = (each for named in self._named for each in named.values() if each is not None)
        buffers = [*{id(each): each for each in found}.values()]
        if len(buffers) != len(self._buffers) or any(map(is_not, buffers, self._buffers)):
            self._buffers, self._copies = buffers, [each.clone() for each in buffers]
        elif buffers:
            torch._foreach_copy_(self._copies, buffers)

    def restore(self) -> None:
        """Have the module's buffers be those that were copied."""
        for owner, named in zip(self._owners, self._named, strict=True):
            for name in owner._buffers.keys() - named.keys():
                del owner._buffers[name]
            for name, each in named.items():
                owner._buffers[name] = each
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)


class LastWholeStep:
    """Which step the weights are of, between one update of them and the next; a forward pass changes buffers alone."""

    is_known_late = False
    """Whether a step is done when its update is launched, and not when all ranks' sums are known too."""

    def __init__(self, module: torch.nn.Module) -> None:
        """No step is whole yet."""
        self._buffers = BufferCopies(module)
        self._is_within_step = False
        self._step: int | None = None
        self.newest: int | None = None
        """The last step that was whole at any time, or will be as soon as it is counted."""
        self.values: Mapping[str, Any] = {}
        """What else has to be as it was after the step that `found` returns."""

    def next_begins(self) -> None:
        """The next step's forward pass will change the buffers (batch norm's means): keep them."""
        self._is_within_step = True
        self._buffers.take()

    def update_begins(self) -> None:
        """From here on, the weights are of no step."""
        self._step = None

    def is_done(self, step: int, values: Mapping[str, Any]) -> None:
        """The weights are those after ``step``."""
        self._is_within_step = False
        self._step = self.newest = step
        self.values = values

    def forget(self) -> None:
        """From now on, no step is known."""
        self._step = None

    def found(self) -> int | None:
        """The step, with the buffers as they were then; None while the weights are of no step."""
        if self._step is not None and self._is_within_step:
            self._buffers.restore()
        return self._step


def save_alone(
    snapshots: Snapshots, world: World, state: Callable[[], Any], *, step: int, attempt: str | None = None
) -> bool:
    """Save what ``state`` returns without the other ranks, and have kit wait for it; False if it failed.

    Any number of ranks may do so: in each folder the first one saves. ``attempt`` is for a state of an earlier one.
    """
    world.stage(KEEPING, step=step)
    try:
        snapshots.save_if_newest(state(), step=step, world_size=world.world_size, attempt=attempt)
    except Exception as error:  # the one that has led here is the one to be raised
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

    It does so where the error leaves the block of ``with world``, or a function that `run_attempts` calls: there it
    keeps the step in memory instead, if this process may stay.

    For ranks that have all of the state, as with DistributedDataParallel: over gloo, and over NCCL by `run_attempts`.
    Without it, all steps since the newest snapshot are done again. Every rank that is left saves, unless its folder has
    this step already. kit and torchrun give it 30 s for that.
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
        """From here on, the state is that of a step, until an optimizer updates it; this ends an earlier one.

        Args:
            snapshots: of this rank's node, whichever rank of it saves otherwise.
            world: its process group must exist.
            state: returns what ``snapshots.save`` is to get. It is called between one update and the next.
            step: returns how many updates are done; not the number of the one that is being made, as of a ``for`` that
                begins with 1. Each is counted when all else that belongs to it is done (the sampler, the scheduler).
                From an update on, nothing is saved until the number is one more than it was during the update.
            optimizer: updates the state.
            others: likewise.
            module: whose buffers (batch norm's means) are to be saved as the update has left them, and not as the next
                forward pass has. All ranks get rank 0's as an update begins, so all ranks have to make it.
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
        # Accelerate's has no hooks of its own.
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
        """Whether a stop is requested on any rank; all ranks call it, after a step is counted, or after every few.

        Raises:
            AttemptOver: on all ranks, if another node comes in, and none of them is to stop.
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
            # A gradient scaler may have left this update out. If no later one can be kept either, all stop.
            self._num_put_off += 1
            return self._num_put_off > _MOST_PUT_OFF
        step = self._found()
        assert step is not None, "the weights are of the step that is counted"
        kept = self._kept(step)
        kept.has_paused = True
        raise AttemptOver(kept)

    def close(self) -> None:
        """Save no more: for a script that goes on to something else, as an evaluation of other weights."""
        self._is_closed = True
        for each in self._hooks:  # the optimizer may be of the next attempt as well
            each.remove()

    def keep(self, error: BaseException) -> Kept | None:
        """Leave the others and return the last step, if the error is that another rank is lost; for `World`."""
        if not why_over(error) or not self._world.keeps_steps:
            return None
        if isinstance(error, Fenced) and not self._world.may_stay:
            return None  # who can stay keeps it for the next generation
        self._world.leave_others()
        try:
            step = self._found()
            return None if step is None else self._kept(step)
        except Exception as unmade:  # the one that has led here is the one to be raised
            log.warning("the last step is not kept: %s", unmade)
            return None

    def _update_begins(self, *_: object) -> None:
        if self._world.world_size > 1:
            # A rank that has made the update goes on with these, if rank 0 is lost before it sends its own by the next
            # forward pass.
            broadcast_from_first(sent_buffers(self._module), self._world.device)
        self._world.settle()  # the gradients are whole
        self._last.update_begins()

    def _update_ends(self, *_: object) -> None:
        self._is_done(self._step() + 1)  # once the script has counted it

    def _is_done(self, step: int) -> None:
        self._last.is_done(step, {})
        self._last.next_begins()

    @property
    def _is_counted(self) -> bool:
        return not self._is_closed and self._last.newest == self._step()

    def _found(self) -> int | None:
        """The last step, with the buffers as they were then; None while the state is of no step."""
        return self._last.found() if self._is_counted else None

    def _newest(self) -> int | None:
        return None if self._is_closed else self._step()

    def _kept(self, step: int) -> Kept:
        state, attempt = self._state(), self._snapshots.attempt
        # Where this process stays, a copy on the CPU as well: a model may be made once, outside of `train`, and then
        # gets rank 0's weights as DistributedDataParallel is made again, before the step is loaded.
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
        except Exception as error:  # that thread has the process end now
            log.warning("the last step is not saved: %s", error)

    def _ask_to_pause(self) -> None:
        if self._is_closed:
            stop_to_pause()
            return
        self._is_asked_to_pause = True
        self._world.stage(PAUSING, step=self._step())

    def _warn_if_uncounted(self) -> None:
        """Say so where no step or few are ever kept, but not of updates that a gradient scaler has left out."""
        is_counted = self._is_counted or self._is_closed
        if is_counted and self._was_counted:  # who counts micro-batches never has two such in a row
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
