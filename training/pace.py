"""``python -m nodekit.training.pace WORLD_SIZE OPTIONS…``: how large a job's model is, and how long a rank's step is.

A few steps of the task by the engine single, with a rank's share of the batch; nothing is written. For `kit bench
--plan job`, which reads the line of JSON at the end.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

_WARM_UP_STEPS = 3
_LEAST_STEPS = 5
_MOST_STEPS = 50
_ENOUGH_S = 6.0
_NAME = "python -m nodekit.training.pace"


def main() -> int:
    """Print what was found; the exit status, 1 with a line for users where the task cannot be had."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    from nodekit.training.engines import check_engine, load_engine
    from nodekit.training.options import parse
    from nodekit.training.reporting.evaluate import to_device
    from nodekit.training.tasks import load_task
    from nodekit.training.world import World

    num_ranks = int(sys.argv[1])
    asked = parse(sys.argv[2:], {**os.environ, "WORLD_SIZE": str(num_ranks)})
    options = replace(asked, engine="single", compress="off", zero=None, deepspeed_config=None)
    try:
        world = World.from_env({})
        check_engine(options, world.device.type)
        in_part = options.ignore_mismatched_sizes and options.model is not None
        task = load_task(
            options.task, data=options.data, model=options.model, ignore_mismatched_sizes=in_part
        )
        module = task.model().to(world.device)
    except (ValueError, FileNotFoundError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    trained = [each for each in module.parameters() if each.requires_grad]
    make = getattr(task, "optimizer", lambda module, lr: torch.optim.AdamW(module.parameters(), lr=lr))
    engine = load_engine(options, world, module, make(module, options.peak_lr), None)
    if options.compile:
        module.compile()
    share = -(-options.batch_size // num_ranks)
    micro = min(share, options.largest_micro_batch(num_ranks) or share)
    parts = -(-share // micro)
    data = task.train_data()
    loader = DataLoader(
        data,
        batch_size=micro,
        sampler=RandomSampler(data, replacement=True, num_samples=max(micro * parts, len(data))),
        drop_last=True,
        num_workers=options.num_workers,
        collate_fn=getattr(task, "collate", None),
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()

    def step() -> float:
        begin = time.monotonic()
        for _ in range(parts):
            batch = next(batches)
            with engine.autocast():
                loss = task.loss(engine.model, to_device(batch, world.device))
            engine.backward(loss / parts)
        engine.update(options.clip)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - begin

    module.train()
    for _ in range(_WARM_UP_STEPS):
        step()
    times: list[float] = []
    while len(times) < _LEAST_STEPS or (len(times) < _MOST_STEPS and sum(times) < _ENOUGH_S):
        times.append(step())
    told = {
        "num_parameters": sum(each.numel() for each in trained),
        "gradient_bytes": max((each.element_size() for each in trained), default=4),
        # Of a matrix PowerSGD sends, by rank 1, a number for each row and each column; the rest as it is.
        "powersgd_numbers": sum(
            each.numel() if each.ndim < 2 else each.shape[0] + each.numel() // each.shape[0]
            for each in trained
        ),
        "batch": share,
        "step_s": statistics.median(times),
        "device": str(world.device),
    }
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
