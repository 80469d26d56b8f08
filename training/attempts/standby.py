"""What a process does before its attempt is known: once it is, the others wait for this process."""

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
    """Import what is left, train one step with a model of its own, start NCCL, and forget all of it.

    The first of each takes long: imports, files from the disk, the start of the device, and the kernels, each of which
    is loaded when it is first used (all in all 1 s on an H200).
    """
    import_all(ENGINES[options.engine].libraries)
    if world.device.type != "cpu":
        devices.module_of(world.device.type).set_device(world.device)
    with _which_may_fail():
        _train_one_step(options, world, task)
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
    except Exception as error:  # it fails in the attempt as well, and is told there
        log.warning("while this rank got ready: %s: %s", type(error).__name__, error)


def _train_one_step(options: "Options", world: "World", task: "Task") -> None:
    """A whole step as of a world of one, with as many samples as a rank of the attempt will have, or so."""
    from nodekit.training.data.evaluate import to_device
    from nodekit.training.data.loading import load_training_data
    from nodekit.training.engines.load import begins_on_cpu, own_optimizer
    from nodekit.training.engines.single import Engine
    from nodekit.training.steps.optimizers import is_fused
    from nodekit.training.tasks import optimizer_of

    if begins_on_cpu(options):
        task.model()  # its device may have no room for the whole
        return
    module = task.model().to(world.device)
    fused = is_fused(options, world.device)
    optimizer = own_optimizer(options, module, fused=fused) or optimizer_of(
        task, module, options.peak_lr, fused=fused
    )
    engine = Engine(options, world, module, optimizer, None)
    of_all = replace(world, world_size=world.stands_by)
    _, loader = load_training_data(replace(options, num_workers=0), of_all, task)
    module.train()
    with engine.autocast():
        loss = task.loss(engine.model, to_device(next(iter(loader)), world.device))
    engine.backward(loss)
    engine.update(options.clip)
