"""How data is loaded, for training and evaluation alike."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from nodekit.training.data.sampler import ElasticSampler
from nodekit.training.errors import TrainingError
from nodekit.training.options.options import Options
from nodekit.training.tasks import Task
from nodekit.training.world import World


def loading(options: Options, world: World, task: Task) -> dict[str, Any]:
    """Settings of a DataLoader that follow from the options and the task."""
    return {
        "num_workers": options.num_workers,
        "pin_memory": world.device.type == "cuda" and not options.no_pin_memory,
        "collate_fn": getattr(task, "collate", None),
        # Its own generator: starting a loader must not move the global one, or a resume would differ.
        "generator": torch.Generator().manual_seed(options.seed + world.rank),
    }


def num_in(data: Any, method: str) -> int:
    """The number of samples that a method of the task has given.

    Raises:
        TrainingError: it has no length, as an ``IterableDataset``: the ranks could not share it out.
    """
    try:
        return len(data)
    except TypeError as error:
        raise TrainingError(
            f"the task's {method}() gives a {type(data).__name__}, which has no length ({error}): wanted samples with "
            "len(data) and data[i], the same on every rank, so that each takes its part"
        ) from error


def load_training_data(
    options: Options, world: World, task: Task
) -> tuple[ElasticSampler, "DataLoader[Any]"]:
    """Which samples this rank takes, from the first one on, and what loads them."""
    data = task.train_data()
    if not num_in(data, "train_data"):
        raise TrainingError("the task's train_data() has no samples: wanted one or more")
    sampler = ElasticSampler(
        len(data),
        batch_size=options.batch_size,
        micro_batch=options.largest_micro_batch(world.world_size),
        seed=options.seed,
        rank=world.rank,
        world_size=world.world_size,
    )
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=sampler,
        persistent_workers=options.num_workers > 0,
        **loading(options, world, task),
    )
    return sampler, loader
