"""Data loaders for training, and their settings, which the evaluation shares."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from nodekit.training.data.sampler import ElasticSampler
from nodekit.training.errors import TrainingError
from nodekit.training.options.options import Options
from nodekit.training.tasks import Task
from nodekit.training.world import World


def loading(options: Options, world: World, task: Task) -> dict[str, Any]:
    """Return the keywords of a DataLoader that follow from the options and the task."""
    return {
        "num_workers": options.num_workers,
        "pin_memory": world.device.type == "cuda" and not options.no_pin_memory,
        "collate_fn": getattr(task, "collate", None),
        # Use a separate generator: if starting a loader advanced the global one, a resume would differ.
        "generator": torch.Generator().manual_seed(options.seed + world.rank),
    }


def num_in(data: Any, method: str) -> int:
    """Return the number of samples in ``data``, which a method of the task has returned.

    Raises:
        TrainingError: the data has no length, as an ``IterableDataset``, so that the ranks could not share it.
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
    """Return this rank's sampler, at the beginning of epoch 0, and the DataLoader that uses it.

    Raises:
        TrainingError: the task has no training samples, or data without a length.
    """
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
