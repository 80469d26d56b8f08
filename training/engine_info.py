"""The engines by name: what each is and what it needs. Imported without torch, for ``--help`` and for `kit`."""

from collections.abc import Collection
from dataclasses import dataclass

from nodekit.training.errors import TrainingError
from nodekit.training.process.devices import UNPROVEN

BUILD_HOROVOD = "python -m nodekit.training.engines.build_horovod"
"""No release of Horovod builds against a current torch, so there is no extra for it."""


class EngineError(TrainingError):
    """The engine cannot run here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known of an engine before it is imported."""

    about: str
    """One line for ``--help``."""
    is_alone: bool = False
    """Whether it is a single process, whatever the number of GPUs."""
    libraries: tuple[str, ...] = ()
    """The packages that it imports beyond torch."""
    imports: tuple[str, ...] = ()
    """Modules whose import takes a tenth of a second or more, and asks no driver for GPUs: so whoever forks ranks may
    have them already. DeepSpeed's asks."""
    reforms: bool = False
    """Whether its ranks keep their processes and their step when another one is lost (``reform``)."""
    is_cpu_only: bool = False
    """Whether it exchanges tensors on the CPU alone."""
    fp16_on_cpu: str = ""
    """What it does with ``--amp fp16`` on a CPU, if that is something else than fp16."""


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
"""By the name for ``--engine``, the default first."""

ALONE = tuple(name for name, info in ENGINES.items() if info.is_alone)
LIBRARIES = tuple(sorted({library for info in ENGINES.values() for library in info.libraries}))
"""Every package that some engine needs beyond torch."""
_PACKAGES = {"lightning_fabric": "lightning-fabric", "deepspeed": "'deepspeed>=0.19,<0.20'"}
"""Library → what pip is to install, where that is not its name alone."""


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
    """Return which libraries an engine lacks, given those that were found, and how to install them; "" if none."""
    absent = [library for library in ENGINES[name].libraries if library not in found]
    if not absent:
        return ""
    packages = " ".join(_PACKAGES.get(library, library) for library in absent)
    cure = BUILD_HOROVOD if name == "horovod" else f"pip install {packages}"
    return f"--engine {name} needs {' and '.join(absent)}: {cure} on every node"
