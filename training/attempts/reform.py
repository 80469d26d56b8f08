"""A process that goes on in the next attempt of its run, with the state that it has, when another rank is lost.

It leaves the process group, waits for what the agents' rendezvous decides, and joins the next group, beside the
abandoned one. The newest state that any rank has kept is sent to those that lack it (`snapshots.exchange`).
"""

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nodekit.training.engine_info import ENGINES
from nodekit.training.group.agent_messages import NextAttempt

if TYPE_CHECKING:
    from nodekit.training.options.options import Options
    from nodekit.training.process.kept import Kept
    from nodekit.training.process.stop import Stop
    from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

MOST_ATTEMPTS = 50
"""The most groups that a process leaves: each has three threads, five descriptors and 1 MB (see `reconfigure`)."""
JOINING_S = 1.0
"""How long the main thread of a rank that joins the others may be idle before it is taken for stuck in the join."""
SAVE_AFTER_S = 1.0
"""How long a rank waits for the next attempt before it also saves its step: this host may be lost as well."""
_MAKING_S = 15.0  # how long a rank that makes its model may take to notice a loss; kit ends it after 30 s
_UNSAVED_S = 20.0  # how long a rank that could not save its step may still take to join the others
_LOOK_S = 0.2
_STANDING_S = 60.0
_abandoned: list[Any] = []

T = TypeVar("T")


def can_go_on(options: "Options", world: "World") -> bool:
    """Whether this process may go on in another attempt."""
    return not why_ends(options, world)


def why_ends(options: "Options", world: "World") -> str:
    """Why this process ends when another rank is lost, and is started again; "" if it may go on."""
    if options.on_lost_rank != "reform":
        return f"--on-lost-rank {options.on_lost_rank}"
    if options.local_steps:
        return "with local SGD each rank has weights of its own"
    if not ENGINES[options.engine].reforms:
        return f"--engine {options.engine} does not go on without a lost rank"
    return why_not(world)


def why_not(world: "World") -> str:
    """Why this process cannot go on in another attempt, whatever it trains; "" if it can."""
    from nodekit.training.group import nccl, reconfigure

    if world.backend not in ("gloo", "nccl"):
        return f"the ranks are joined by {world.backend}, and not by gloo or nccl"
    if world.backend == "nccl" and not nccl.can_abort():
        return "this torch cannot abort NCCL's collectives, which 2.6 can"
    if world.messages is None or world.init_method.scheme != "env":
        return "there is no agent of kit's that would have it go on"
    if len(_abandoned) + reconfigure.num_left() >= MOST_ATTEMPTS:
        return f"it has left {MOST_ATTEMPTS} process groups behind"
    return ""


def run(
    world: "World",
    stop: "Stop",
    make: Callable[[], "World"],
    attempt: "Callable[[World], T | Kept]",
    may_stay: Callable[["World"], bool],
) -> "T | int":
    """Call ``attempt`` once for each attempt of the run, as long as it returns a `Kept`; return its other result.

    Call ``gc.freeze`` before, so that the garbage collection after an attempt looks at that attempt's objects only;
    with all objects of the libraries it takes 0.4 s.

    Args:
        world: of the first attempt.
        stop: if it is requested during the wait for the next attempt, save the `Kept` and return the exit status.
        make: returns the next attempt's world, from the environment.
        attempt: joins the group of ``world``, unless it is the first one, and trains.
        may_stay: whether this process may go on in the attempt after this one.
    """
    from nodekit.training.process.kept import Kept

    ended = attempt(replace(world, may_stay=may_stay(world)))
    while isinstance(ended, Kept):
        kept = ended
        leave(world)
        if world.device.type != "cpu":
            gc.collect()  # the next model needs the GPU's memory, and the last one may be in a cycle
        if (following := next_world(kept, world, stop, make)) is None:
            kept.save()
            world.close()
            return stop.exit_code
        world = following
        if world.messages is not None and world.messages.is_over:
            # That attempt has lost a rank already, so the others will not come. Wait for the next one, and say so in
            # the progress file of that attempt, which the agent reads now.
            ended = kept
            continue
        ended = attempt(replace(world, may_stay=may_stay(world), kept=kept))
    return ended


def leave(world: "World") -> None:
    """Leave the process group for good."""
    import torch.distributed as dist

    from nodekit.training.group import reconfigure

    if dist.is_initialized():
        groups = list(dist.distributed_c10d._world.pg_map)
        if not reconfigure.keep() or len(groups) > 1:  # a script has groups of its own
            _abandoned.append(groups)  # see rank._KEPT_ALIVE
            reconfigure.never_free(groups)  # the interpreter's shutdown would wait for their threads
    world.close(goes_on=True)
    # By this number the ranks name their groups. Only a group that was formed takes it back when it is destroyed.
    dist.distributed_c10d._world.group_count = 0


def pause_later(world: "World") -> None:
    """Put a request to pause off until the training loop takes it; a rank that ended in the join would block others."""
    if world.messages is not None:
        world.messages.when("pause", lambda: None, is_default=True)


@contextmanager
def guarded(world: "World", stop: "Stop") -> Iterator[None]:
    """While this rank joins the others: if one is lost, or a stop is requested, save what was kept and end.

    The rank may be blocked in gloo, which waits for another rank to connect, and has no call that ends this wait.
    """
    from nodekit.training.group import connections
    from nodekit.training.process.stages import KEEPING

    kept = world.kept
    if kept is None or world.messages is None:
        yield
        return
    has_joined = threading.Event()
    if world.generation is not None:
        kept.enters(world.generation)

    def end(why: str, exit_code: int, most_s: float) -> None:
        connections.is_idle(has_joined, JOINING_S, most_s)
        save = kept.save  # read it before `is_held`: the main thread may release it at any moment
        if not has_joined.is_set() and kept.is_held:
            log.warning("%s, and this one still joins the others: saving step %d alone", why, kept.age[1])
            if not save():
                has_joined.wait(_UNSAVED_S)  # the step is in this process's memory alone
            if not has_joined.is_set():
                os._exit(exit_code)

    def ends_soon(why: str, exit_code: int, most_s: float) -> None:
        if not kept.is_held:  # it trains
            return
        world.stage(KEEPING, step=kept.age[1])
        threading.Thread(target=end, args=(why, exit_code, most_s), name="nodekit-guard", daemon=True).start()

    def when_lost() -> None:
        world.leave_others()
        ends_soon("another rank is lost", 1, _MAKING_S)

    world.messages.when("lost", when_lost)
    pause_later(world)
    stop.when_requested(lambda: ends_soon("this rank is to stop", stop.exit_code, JOINING_S))
    try:
        yield
    finally:
        has_joined.set()
        stop.when_requested(None)


def next_world(kept: "Kept", world: "World", stop: "Stop", make: Callable[[], "World"]) -> "World | None":
    """Wait until kit says where this process goes on: its rank then, made by ``make``; None if it is to end."""
    from nodekit.training.process.stages import WAITING

    assert world.messages is not None
    world.stage(WAITING, step=kept.age[1])
    world.messages.say_waiting(has_paused=kept.has_paused)
    kept.has_paused = False  # should it wait once more
    found = world.messages.next_attempt(SAVE_AFTER_S)
    if found is None and not stop.requested:
        kept.save()
        world.stage(WAITING, step=kept.age[1])
    while found is None:
        if stop.requested:
            return None
        found = world.messages.next_attempt(_LOOK_S)
    _take_on(found)
    return make()


def attempt_of(world: "World", make: Callable[[], "World"]) -> "World":
    """Wait, with the data read, until kit says in which attempt this process takes part: its rank then, by ``make``."""
    from nodekit.training.process.stages import WAITING

    if world.messages is None:
        raise RuntimeError("kit's messages cannot be read, so the attempt to take part in is not known")
    del os.environ["NODEKIT_STANDBY"]
    while True:
        world.stage(WAITING)
        while (found := world.messages.next_attempt(_STANDING_S)) is None:
            pass
        _take_on(found)
        of_attempt = make()
        if not world.messages.is_over:  # else nobody would come to meet it
            return of_attempt
        world = of_attempt


def _take_on(attempt: NextAttempt) -> None:
    """Take over the environment of the next attempt, and write stdout and stderr to its log."""
    os.environ.update(attempt.env)
    for stream in (sys.stdout, sys.stderr):
        # It may be closed, None, or of a class of the script's own: no reason to lose the step.
        with suppress(Exception):
            stream.flush()
    try:
        log_file = os.open(attempt.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        log.warning("%s cannot be opened, and the log goes on here: %s", Path(attempt.log), error)
        return
    for stream in (1, 2):
        os.dup2(log_file, stream)
    os.close(log_file)
