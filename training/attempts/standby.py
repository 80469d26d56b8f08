"""Prepare a process before its attempt is known; once it is known, other ranks wait for this process."""

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from nodekit.training.engine_info import ENGINES
from nodekit.training.imports import import_all
from nodekit.training.process import devices

if TYPE_CHECKING:
    from nodekit.training.options.options import Options
    from nodekit.training.tasks import Task
    from nodekit.training.world import World

log = logging.getLogger("nodekit.training")


def get_ready(options: "Options", world: "World", task: "Task") -> None:
    """Import the engine's libraries, compute one step with a throw-away model, and start NCCL.

    All of these take long only the first time: imports, files from the disk, the start of the device, and kernels, each
    of which is loaded on its first use (1 s in total on an H200). If other ranks wait already, only import.
    """
    import_all(ENGINES[options.engine].libraries)
    if world.device.type != "cpu":
        devices.module_of(world.device.type).set_device(world.device)
    if not world.standby_world_size:
        return
    with _which_may_fail():
        _compute_one_step(options, replace(world, world_size=world.standby_world_size), task)
    if world.backend == "nccl":
        from nodekit.training.group import nccl

        with _which_may_fail():
            nccl.warm_up(world.device)
    gc.collect()  # a model may be in a cycle
    if world.device.type != "cpu":
        devices.module_of(world.device.type).empty_cache()


@contextmanager
def _which_may_fail() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # only logged: it will fail in the attempt as well, and be reported there
        log.warning("while this rank got ready: %s: %s", type(error).__name__, error)


def _compute_one_step(options: "Options", world: "World", task: "Task") -> None:
    """Compute a forward and a backward pass, with as many samples as a rank of this world has.

    The task is not changed: a copy of it computes the loss, and a model that the task may keep is not updated.
    """
    from nodekit.training.data.evaluate import to_device
    from nodekit.training.data.loading import load_training_data
    from nodekit.training.engines.load import begins_on_cpu
    from nodekit.training.engines.single import autocast
    from nodekit.training.process import rng

    # Seed as in the attempt: a task may split its data at random when they are first asked for.
    rng.seed_all(options.seed, rank=0)
    module = task.model()
    if begins_on_cpu(options):
        return  # the device may have no room for the whole model
    module = module.to(world.device)
    _, loader = load_training_data(replace(options, num_workers=0), world, task)
    module.train()
    with autocast(options, world.device):
        loss = copy.copy(task).loss(module, to_device(next(iter(loader)), world.device))
    loss.backward()  # type: ignore[no-untyped-call]
    module.zero_grad()
