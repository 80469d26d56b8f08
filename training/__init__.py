"""What every rank runs: the training module, and parts of it for a training loop of your own.

``from nodekit.training import ElasticSampler, Snapshots, World`` imports each name on first use, so that
``python -m nodekit.training --help`` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodekit.training.attempts.attempts import run_attempts
    from nodekit.training.data.sampler import ElasticSampler, Micro
    from nodekit.training.engines.ddp import lay_out_buckets
    from nodekit.training.process.kept import AttemptOver
    from nodekit.training.process.stop import Stop
    from nodekit.training.snapshots.emergency import EmergencySave
    from nodekit.training.snapshots.exchange import newest_of_all, writes_snapshots
    from nodekit.training.snapshots.files.fence import Fenced
    from nodekit.training.snapshots.files.found import NoneLoads
    from nodekit.training.snapshots.files.manifest import Loaded, Manifest, NewerKit
    from nodekit.training.snapshots.snapshot import Snapshots
    from nodekit.training.steps.not_finite import LossWatch, NotFinite
    from nodekit.training.tasks import Task
    from nodekit.training.world import World

__all__ = [
    "AttemptOver",
    "ElasticSampler",
    "EmergencySave",
    "Fenced",
    "Loaded",
    "LossWatch",
    "Manifest",
    "Micro",
    "NewerKit",
    "NoneLoads",
    "NotFinite",
    "Snapshots",
    "Stop",
    "Task",
    "World",
    "lay_out_buckets",
    "newest_of_all",
    "run_attempts",
    "writes_snapshots",
]

_MODULES = {
    "attempts.attempts": ("run_attempts",),
    "engines.ddp": ("lay_out_buckets",),
    "steps.not_finite": ("LossWatch", "NotFinite"),
    "data.sampler": ("ElasticSampler", "Micro"),
    "process.kept": ("AttemptOver",),
    "snapshots.emergency": ("EmergencySave",),
    "snapshots.exchange": ("newest_of_all", "writes_snapshots"),
    "snapshots.files.fence": ("Fenced",),
    "snapshots.files.found": ("NoneLoads",),
    "snapshots.files.manifest": ("Loaded", "Manifest", "NewerKit"),
    "snapshots.snapshot": ("Snapshots",),
    "process.stop": ("Stop",),
    "tasks": ("Task",),
    "world": ("World",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
