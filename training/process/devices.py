"""The devices that torch trains on: NVIDIA's and AMD's GPUs (cuda), Intel's (xpu), Ascend's NPUs, or the CPU.

Code that helps with CUDA only (pinned memory, fused optimizers, sums that are read a step later) checks for CUDA
itself; other devices use what all of torch's devices support. This module can be imported without torch, for the names.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "cpu": "gloo"}
"""Device type → torch's backend for collectives between such devices; types are tried in this order."""
UNPROVEN = ("xpu", "npu")
"""Device types on which kit has not been tested: only torch's own engines are allowed there."""


def module_of(kind: str) -> Any:
    """Return torch's module for a device type, such as ``torch.cuda``; all have the functions that kit uses."""
    import torch

    return getattr(torch, kind)


def kind_here() -> str:
    """Return the device type of the accelerators that torch sees, or ``cpu``."""
    import torch

    # torch.npu comes from torch_npu, which torch imports by itself if it is installed.
    there = (kind for kind in BACKENDS if hasattr(torch, kind))
    return next((kind for kind in there if module_of(kind).is_available()), "cpu")


def number_of(kind: str) -> int:
    """Return how many devices of a type this process sees; 0 for the CPU."""
    return 0 if kind == "cpu" else int(module_of(kind).device_count())


def sum_dtype(device: "torch.device") -> "torch.dtype":
    """Return the dtype in which losses are summed: Ascend's and some of Intel's devices have no float64."""
    import torch

    return torch.float32 if device.type in UNPROVEN else torch.float64
