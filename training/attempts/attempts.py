"""Run a user's own training function, once for each attempt, in the same process."""

import gc
import logging
from collections.abc import Callable

from nodekit.training.attempts import reform
from nodekit.training.process.kept import AttemptOver, Kept
from nodekit.training.process.stages import KEEPING
from nodekit.training.process.stop import Stop
from nodekit.training.snapshots.emergency import why_over
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")


def run_attempts(
    train: Callable[[World, Stop], int], *, grace_s: float = 20.0, timeout_s: float = 600.0
) -> int:
    """Call ``train(world, stop)`` in the process group of all ranks, and return the exit status that it returns.

    If another rank is lost, or another node joins, this process stays: ``train`` is called again with the world of the
    next attempt, and ``newest_of_all`` returns the newest step that any rank has in memory::

        def train(world, stop):
            ...  # model, DistributedDataParallel, optimizer, sampler, loader
            if found := newest_of_all(snapshots, world):
                ...
            emergency = EmergencySave(snapshots, world, state, lambda: step, optimizer)
            ...

        sys.exit(run_attempts(train))

    This requires kit's agents, gloo or NCCL, and an `EmergencySave` in ``train``. Without kit's agents, the
    `EmergencySave` saves the step, and the error is raised, so that the launcher starts this process again.

    Args:
        train: creates everything that depends on the process group, and does not catch `AttemptOver`.
        grace_s: see `Stop`.
        timeout_s: how long a collective may wait for the slowest rank.
    """

    def make() -> World:
        return World.from_env(timeout_s=timeout_s)

    def attempt(world: World) -> int | Kept:
        try:
            with reform.guarded(world, stop):
                world.__enter__()
                code = train(world, stop)
        except AttemptOver as over:
            return over.kept
        except BaseException as error:
            if why := why_over(error):
                kept = _last_step(world, error)
                if kept is not None and world.may_stay:
                    # From here on, this rank does not listen to its agent until it waits for the next attempt.
                    world.stage(KEEPING, step=kept.age[1])
                    log.warning("%s: waiting with step %d for the next attempt (%s)", why, kept.age[1], error)
                    return kept
                saved = ""
                # If this fails, the step is lost unless another rank has it.
                if kept is not None and kept.save():
                    saved = f"; step {kept.age[1]} is saved"
                log.warning("%s, and this rank ends: %s%s", why, _why_it_ends(world, stop), saved)
            stop.end_within_grace(1)  # a lost rank may keep the process group from closing
            world.close()
            raise
        world.close()
        return code

    world = make()
    # This process was started before its attempt was known, so that no rank has to wait for its imports and data.
    if world.standby_world_size is not None:
        world = reform.attempt_of(world, make)
        reform.pause_later(world)
    # A process forked by kit has its libraries frozen. Unfrozen, they would be searched for garbage at its end, which
    # takes seconds.
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    try:
        with Stop(grace_s) as stop:
            return reform.run(world, stop, make, attempt, lambda world: not reform.why_not(world))
    finally:
        if not is_frozen:
            gc.unfreeze()  # so that the end of the script finds objects that are to be closed or finalized


def _last_step(world: World, error: BaseException) -> Kept | None:
    """Leave the process group, since another rank is lost, and return the newest whole step in memory, if any."""
    world.leave_others()
    return world.kept_on(error) or world.held_step  # the latter where this attempt has made no step yet


def _why_it_ends(world: World, stop: Stop) -> str:
    if stop.requested:
        return "it is to stop"
    return "it has no step" if world.may_stay else reform.why_not(world)
