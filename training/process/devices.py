"""The devices that this torch trains on: NVIDIA's and AMD's GPUs (cuda), Intel's (xpu), Ascend's NPUs, or the CPU.

What is quicker with CUDA alone (pinned memory, fused optimizers, sums that are read a step later) asks for CUDA where
it is done; the others go the way that all of torch's devices have. Imported without torch, for the names.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "cpu": "gloo"}
"""Device type → torch's backend for collectives between such devices, in the order in which they are looked for."""
UNPROVEN = ("xpu", "npu")
"""Those on which kit has not been run: there are torch's own engines alone."""


def module_of(kind: str) -> Any:
    """Return torch's module for a device type, as ``torch.cuda``: all of them have the functions that kit uses."""
    import torch

    return getattr(torch, kind)


def kind_here() -> str:
    """Return the device type of the accelerators that torch sees, or ``cpu``."""
    import torch

    # torch.npu is torch_npu's, which torch imports by itself where it is installed.
    there = (kind for kind in BACKENDS if hasattr(torch, kind))
    return next((kind for kind in there if module_of(kind).is_available()), "cpu")


def number_of(kind: str) -> int:
    """Return how many devices of a type this process sees; 0 for the CPU."""
    return 0 if kind == "cpu" else int(module_of(kind).device_count())


def sum_dtype(device: "torch.device") -> "torch.dtype":
    """Return the type in which losses are summed: Ascend's and some of Intel's devices have no float64."""
    import torch

    return torch.float32 if device.type in UNPROVEN else torch.float64
