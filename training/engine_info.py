"""The engines by name, with what each of them needs. Does not import torch, for ``--help`` and for `kit`."""

from collections.abc import Collection
from dataclasses import dataclass

from nodekit.training.errors import TrainingError
from nodekit.training.process.devices import UNPROVEN

BUILD_HOROVOD = "python -m nodekit.training.engines.build_horovod"
"""The command that builds Horovod: no release builds against a current torch, so nodekit has no extra for it."""


class EngineError(TrainingError):
    """The engine cannot run here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine that are needed before it is imported."""

    about: str
    """One line for ``--help``."""
    is_alone: bool = False
    """Whether the engine is a single process, whatever the number of GPUs."""
    libraries: tuple[str, ...] = ()
    """The packages that the engine imports beyond torch."""
    imports: tuple[str, ...] = ()
    """Modules that a process may import before it forks ranks: slow to import (0.1 s or more), and without a query to
    the GPU driver. DeepSpeed's modules make such a query."""
    reforms: bool = False
    """Whether ranks keep their processes and their step when another rank is lost (``--on-lost-rank reform``)."""
    is_cpu_only: bool = False
    """Whether the engine can only exchange tensors on the CPU."""
    fp16_on_cpu: str = ""
    """What the engine does with ``--amp fp16`` on a CPU instead of fp16, as a clause; "" if it uses fp16."""


ENGINES = {
    "ddp": EngineInfo(
        "a copy of the model on each rank, gradients averaged (DistributedDataParallel)", reforms=True
    ),
    "fsdp": EngineInfo("each rank keeps a part of the weights, gradients and optimizer (FSDP2)"),
    "single": EngineInfo("one process, one device", is_alone=True),
    "accelerate": EngineInfo(
        "Hugging Face Accelerate",
        libraries=("accelerate",),
        imports=("accelerate",),
        reforms=True,
        fp16_on_cpu="takes it for fp32",
    ),
    "fabric": EngineInfo(
        "Lightning Fabric",
        libraries=("lightning_fabric",),
        imports=("lightning_fabric",),
        reforms=True,
        fp16_on_cpu="takes it for bf16",
    ),
    "trainer": EngineInfo(
        "the transformers Trainer",
        libraries=("transformers", "accelerate"),
        imports=("transformers.trainer", "accelerate"),
        reforms=True,
        fp16_on_cpu="takes it for fp32",
    ),
    "deepspeed": EngineInfo(
        "DeepSpeed's ZeRO, --zero 0 to 3",
        libraries=("deepspeed",),
        fp16_on_cpu="refuses it",
    ),
    "horovod": EngineInfo(
        "Horovod, over gloo, on the CPU",
        libraries=("horovod",),
        reforms=True,
        is_cpu_only=True,
    ),
    "dp": EngineInfo(
        "one process, all its GPUs, a thread for each (DataParallel); ddp is faster with as many ranks",
        is_alone=True,
    ),
}
"""Name for ``--engine`` → the engine; the default is first."""

ALONE = tuple(name for name, info in ENGINES.items() if info.is_alone)
LIBRARIES = tuple(sorted({library for info in ENGINES.values() for library in info.libraries}))
"""All packages that engines need beyond torch."""
_PACKAGES = {"lightning_fabric": "lightning-fabric", "deepspeed": "'deepspeed>=0.19,<0.20'"}
"""Library → the requirement for pip, if it is not the library's name."""


def refused_on_gpus(name: str) -> str:
    """Return why an engine does not run on GPUs, and what to do; "" if it does."""
    if not ENGINES[name].is_cpu_only:
        return ""
    return (
        f"--engine {name}: it is built without GPU operations, and there are GPUs: take --engine ddp, or hide them "
        "(`gpus: 0` in the inventory; CUDA_VISIBLE_DEVICES= without kit)"
    )


def refused_on_unproven(name: str, device: str) -> str:
    """Return why an engine does not run on a type of device, and what to do; "" if it does."""
    if device not in UNPROVEN or not (ENGINES[name].libraries or name == "dp"):
        return ""
    return (
        f"--engine {name}: on {device} there are torch's own engines alone: take --engine ddp, fsdp or single"
    )


def lacking(name: str, found: Collection[str]) -> str:
    """Return a message that names the engine's libraries not in ``found``, and how to install them; "" if none."""
    absent = [library for library in ENGINES[name].libraries if library not in found]
    if not absent:
        return ""
    packages = " ".join(_PACKAGES.get(library, library) for library in absent)
    cure = BUILD_HOROVOD if name == "horovod" else f"pip install {packages}"
    return f"--engine {name} needs {' and '.join(absent)}: {cure} on every node"
