"""What every rank runs: the shared training module and the pieces a user's own loop can take from it.

``from nodekit.training import ElasticSampler, Snapshots, World`` imports what is named when it is named,
so that ``python -m nodekit.training --help`` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodekit.training.sampler import ElasticSampler, Micro
    from nodekit.training.snapshots.exchange import newest_of_all, writes_snapshots
    from nodekit.training.snapshots.fence import Fenced
    from nodekit.training.snapshots.manifest import Loaded, Manifest
    from nodekit.training.snapshots.snapshot import Snapshots
    from nodekit.training.stop import Stop
    from nodekit.training.tasks import Task
    from nodekit.training.world import World

__all__ = [
    "ElasticSampler",
    "Fenced",
    "Loaded",
    "Manifest",
    "Micro",
    "Snapshots",
    "Stop",
    "Task",
    "World",
    "newest_of_all",
    "writes_snapshots",
]

_HOMES = {
    "ElasticSampler": "sampler",
    "Fenced": "snapshots.fence",
    "Loaded": "snapshots.manifest",
    "Manifest": "snapshots.manifest",
    "Micro": "sampler",
    "Snapshots": "snapshots.snapshot",
    "Stop": "stop",
    "Task": "tasks",
    "World": "world",
    "newest_of_all": "snapshots.exchange",
    "writes_snapshots": "snapshots.exchange",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
