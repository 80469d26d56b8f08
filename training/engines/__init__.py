"""The ways to train, ``--engine NAME``: one short file each, behind the small protocol `Engine`.

Each is given a plain module and a plain torch optimizer that have what a snapshot held already, and gives such plain
state back, so that a snapshot that one has saved is loaded by any other.
"""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # --help needs the names, and no torch
    import torch

    from nodekit.training.options import Options
    from nodekit.training.snapshots.manifest import Loaded
    from nodekit.training.world import World

ENGINES = {
    "ddp": "a copy of the model on each rank, gradients averaged (DistributedDataParallel)",
    "fsdp": "each rank keeps a part of the weights, gradients and optimizer (FSDP2)",
    "single": "one process, one device",
    "accelerate": "Hugging Face Accelerate",
    "fabric": "Lightning Fabric",
    "trainer": "the transformers Trainer",
    "deepspeed": "DeepSpeed's ZeRO, --zero 0 to 3",
    "horovod": "Horovod, over gloo",
    "dp": "one process, all its GPUs, a thread for each (DataParallel); ddp is faster with as many ranks",
}
"""Name → what it is, the default first."""

ALONE = ("single", "dp")
"""Those that are one process."""

_LIBRARIES = {
    "accelerate": ("accelerate",),
    "fabric": ("lightning_fabric",),
    "trainer": ("transformers", "accelerate"),
    "deepspeed": ("deepspeed",),
    "horovod": ("horovod",),
}
LIBRARIES = tuple(sorted({each for own in _LIBRARIES.values() for each in own}))
"""All that some engine needs beyond torch."""
_EXTRAS = {"lightning_fabric": "fabric", "transformers": "text"}
BUILD_HOROVOD = "python -m nodekit.training.engines.build_horovod"
"""No release of Horovod builds against a current torch, so there is no extra for it."""

NO_FP16_ON_CPU = {
    "accelerate": "takes it for fp32",
    "fabric": "takes it for bf16",
    "trainer": "takes it for fp32",
    "deepspeed": "refuses it",
}
"""What these do with fp16 where there is no GPU."""


class EngineError(ValueError):
    """An engine that cannot be had here; the message says what to do."""


State = Mapping[str, Any]
"""``model``, ``optimizer`` and ``scaler``: full state dicts, as the plain module and optimizer would give them."""


class Engine(Protocol):
    """What the loop needs of a way to train."""

    model: "torch.nn.Module"
    """What the task's loss is to call."""
    optimizer: "torch.optim.Optimizer"
    """Whose groups' ``lr`` the loop sets before each step."""
    forwards_together: bool
    """Whether a forward pass needs all ranks, so that each must make as many as the others."""

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are exchanged with the last one of a step."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass, for ``--amp``."""

    def backward(self, loss: "torch.Tensor") -> None:
        """Add the gradients of a loss that is weighted so that its mean over ranks is that of the whole batch."""

    def update(self, clip: float | None) -> None:
        """One step of the optimizer, with gradients clipped to a norm; afterwards there are none.

        An engine that has a loop of its own has ``drive`` in place of this: it calls ``compute``, steps, and calls
        ``edge``, so many times or until that is True; it gives False then.
        """

    def weights(self) -> Mapping[str, "torch.Tensor"]:
        """The plain module's state dict, whole, on the first rank of each node at least; all ranks call it."""

    def state(self) -> State:
        """Everything a snapshot needs; all ranks call it, and all get all of it."""


class ShardedEngine(Engine, Protocol):
    """One that can also save and load without that any rank has all of it."""

    def shards(self) -> State:
        """This rank's part of `state`: DTensors, and what is the same on all ranks."""

    def load_shards(self, found: "Loaded") -> None:
        """Read this rank's part of a sharded snapshot, from however many ranks.

        Raises:
            ValueError: it is of another model.
        """


def lacking(name: str, found: Collection[str]) -> str:
    """What an engine lacks where there are only these libraries, and how to get it; "" where there is all."""
    absent = [each for each in _LIBRARIES.get(name, ()) if each not in found]
    if not absent:
        return ""
    extras = ",".join(_EXTRAS.get(each, each) for each in absent)
    cure = BUILD_HOROVOD if name == "horovod" else f"pip install 'nodekit[{extras}]'"
    return f"--engine {name} needs {' and '.join(absent)}: {cure} on every node"


def check_engine(options: "Options", device: str) -> None:
    """Refuse what cannot run here, before any rank waits for another.

    Raises:
        EngineError: a library is not installed, or does without a GPU something else than it is asked for.
    """
    name = options.engine
    if problem := lacking(name, [each for each in LIBRARIES if importlib.util.find_spec(each) is not None]):
        raise EngineError(problem)
    if options.compile and device == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        raise EngineError(
            "--compile needs a C++ compiler on a CPU, and there is no g++: apt install g++, or set CXX"
        )
    if options.deepspeed_config:
        from nodekit.training.engines.deepspeed_config import read_config

        read_config(options)
    if options.amp == "fp16" and device != "cpu" and name == "deepspeed":
        raise EngineError(
            "--amp fp16: with --engine deepspeed there is bf16 alone; take that, or --engine fsdp"
        )
    if options.amp == "fp16" and device == "cpu" and name in NO_FP16_ON_CPU:
        raise EngineError(
            f"--amp fp16 without a GPU: {name} {NO_FP16_ON_CPU[name]}; take bf16, or --engine ddp"
        )


def load_engine(
    options: "Options",
    world: "World",
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    scaler: Mapping[str, Any] | None,
) -> Engine:
    """The engine that the options name, around a module on this rank's device.

    Args:
        options: the command line's.
        world: this rank's; its process group exists.
        module: with the weights to begin with, rank 0's where they differ.
        optimizer: of its parameters, with the state to begin with.
        scaler: the gradient scaler's state to begin with, if any.
    """
    engine = importlib.import_module(f"nodekit.training.engines.{options.engine}").Engine
    made: Engine = engine(options, world, module, optimizer, scaler)
    return made
