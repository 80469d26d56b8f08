"""``python -m nodekit.training.pace WORLD_SIZE OPTIONS…``: measure the size of a job's model and the time of a step.

It runs a few steps of the task with the engine single and a rank's share of the batch, and writes no files. At the end
it prints a line of JSON, for `kit bench --plan job`.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nodekit.training.options.arguments import parse
from nodekit.training.options.options import Options

if TYPE_CHECKING:
    import torch

    from nodekit.training.tasks import Task
    from nodekit.training.world import World

_WARM_UP_STEPS = 3
_LEAST_STEPS = 5
_MOST_STEPS = 50
_ENOUGH_S = 6.0
_NAME = "python -m nodekit.training.pace"


def main() -> int:
    """Print the result as JSON; the exit status is 1, with a line for users, if the task cannot be loaded."""
    num_ranks = int(sys.argv[1])
    given = parse(sys.argv[2:], {**os.environ, "WORLD_SIZE": str(num_ranks)})
    options = replace(
        given, engine="single", compress="off", zero=None, deepspeed_config=None, training_args=None
    )

    from nodekit.training.engines.load import check_engine
    from nodekit.training.tasks import task_of
    from nodekit.training.world import World

    try:
        world = World.from_env({})
        check_engine(options, world.device.type)
        task = task_of(options)
        module = task.model().to(world.device)
    except (ValueError, FileNotFoundError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    share = -(-options.batch_size // num_ranks)
    micro_batch = min(share, options.largest_micro_batch(num_ranks) or share)
    step_s = _step_s(_step(options, world, task, module, micro_batch, num_parts=-(-share // micro_batch)))
    trained = [each for each in module.parameters() if each.requires_grad]
    result = {
        "num_parameters": sum(each.numel() for each in trained),
        "gradient_bytes": max((each.element_size() for each in trained), default=4),
        # PowerSGD of rank 1 sends a number for each row and each column of a matrix, and other tensors as they are.
        "powersgd_numbers": sum(
            each.numel() if each.ndim < 2 else each.shape[0] + each.numel() // each.shape[0]
            for each in trained
        ),
        "batch": share,
        "step_s": step_s,
        "device": str(world.device),
    }
    print(json.dumps(result), flush=True)
    return 0


def _step(
    options: Options,
    world: "World",
    task: "Task",
    module: "torch.nn.Module",
    micro_batch: int,
    *,
    num_parts: int,
) -> Callable[[], None]:
    """Return a function that trains for one step of ``num_parts`` micro-batches."""
    from torch.utils.data import DataLoader, RandomSampler

    from nodekit.training.data.evaluate import to_device
    from nodekit.training.engines.load import load_engine
    from nodekit.training.process.devices import module_of
    from nodekit.training.steps.optimizers import is_fused
    from nodekit.training.tasks import optimizer_of

    optimizer = optimizer_of(task, module, options.peak_lr, fused=is_fused(options, world.device))
    engine = load_engine(options, world, module, optimizer, None)
    if options.compile:
        module.compile()
    module.train()
    data = task.train_data()
    num_samples = max(micro_batch * num_parts, len(data))
    loader = DataLoader(
        data,
        batch_size=micro_batch,
        sampler=RandomSampler(data, replacement=True, num_samples=num_samples),
        drop_last=True,
        num_workers=options.num_workers,
        collate_fn=getattr(task, "collate", None),
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()

    def step() -> None:
        for _ in range(num_parts):
            batch = next(batches)
            with engine.autocast():
                loss = task.loss(engine.model, to_device(batch, world.device))
            engine.backward(loss / num_parts)
        engine.update(options.clip)
        if world.device.type != "cpu":
            module_of(world.device.type).synchronize()

    return step


def _step_s(step: Callable[[], None]) -> float:
    """Return the median time of a step in seconds, after some steps to warm up."""
    for _ in range(_WARM_UP_STEPS):
        step()
    times: list[float] = []
    while len(times) < _LEAST_STEPS or (len(times) < _MOST_STEPS and sum(times) < _ENOUGH_S):
        begin = time.monotonic()
        step()
        times.append(time.monotonic() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
