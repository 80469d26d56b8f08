"""How data is loaded, for training and evaluation alike."""

from typing import Any

import torch

from nodekit.training.options import Options
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
