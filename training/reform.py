"""A process that goes on in the next attempt of its run, with the state that it has, when another rank is lost.

It leaves the process group, waits for what the agents' rendezvous decides, and joins the next group, beside the
abandoned one. The newest state that any rank has kept is sent to those that lack it (`snapshots.exchange`).
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.training.agent_messages import NextAttempt

if TYPE_CHECKING:
    from nodekit.training.options import Options
    from nodekit.training.snapshots.emergency import Kept
    from nodekit.training.stop import Stop
    from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

ENGINES = ("ddp",)
MOST_ATTEMPTS = 50
"""In so many a process takes part: each leaves some threads behind, since gloo's groups cannot be freed safely."""
SAVE_AFTER_S = 1.0
"""After so long a wait the state is saved too: this host may be lost as well."""
_LOOK_S = 0.2
_abandoned: list[Any] = []


def can_go_on(options: "Options", world: "World") -> bool:
    """Whether this process may go on in another attempt."""
    return (
        options.on_lost_rank == "reform"
        and options.engine in ENGINES
        and world.backend == "gloo"
        and world.init_method.scheme == "env"
        and world.messages is not None
        and len(_abandoned) < MOST_ATTEMPTS
    )


def leave(world: "World") -> None:
    """Leave the process group for good."""
    import torch.distributed as dist

    if dist.is_initialized():
        _abandoned.append(list(dist.distributed_c10d._world.pg_map))  # see rank._KEPT_ALIVE
    world.close()


def next_world(kept: "Kept", world: "World", stop: "Stop", make: Callable[[], "World"]) -> "World | None":
    """Wait until kit says where this process goes on: its rank then, made by ``make``; None if it is to end."""
    from nodekit.training.world import WAITING

    assert world.messages is not None
    world.stage(WAITING)
    world.messages.say_waiting()
    found = world.messages.next_attempt(SAVE_AFTER_S)
    if found is None and not stop.requested:
        kept.save()
        world.stage(WAITING)
    while found is None:
        if stop.requested:
            return None
        found = world.messages.next_attempt(_LOOK_S)
    _take_on(found)
    return make()


def _take_on(attempt: NextAttempt) -> None:
    """Have the environment and the log of the next attempt."""
    os.environ.update(attempt.env)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        log_file = os.open(attempt.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        log.warning("%s cannot be opened, and the log goes on here: %s", Path(attempt.log), error)
        return
    for stream in (1, 2):
        os.dup2(log_file, stream)
    os.close(log_file)
