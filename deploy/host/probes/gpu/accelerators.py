"""The table of accelerators: how each kind is counted, hidden from a process, and used by torch.

Other code looks up here whatever differs between kinds. A host's kind follows from the platform of its torch build.
"""

from __future__ import annotations

import glob
import json
import os
import re
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from nodekit.deploy.host import files, processes

_KFD = "/sys/class/kfd/kfd/topology/nodes"
_DAVINCI = "/dev/davinci"

Listed = Tuple[List[Dict[str, Any]], str, str]
"""``[{"index", "uuid", "name", "memory_mib"}]``, the driver's version, and why the list failed, or ""."""


class Accelerator(NamedTuple):
    """A kind of accelerator."""

    name: str
    torch_build: str
    """The first word of `hostfacts.torch_build`."""
    backend: str
    """torch's backend for collectives between such devices."""
    variable: str
    """The environment variable that lists the devices visible to a process; "" if there is none."""
    also: Tuple[str, ...]
    """Further variables with this effect, used if `variable` is not set."""
    first: str
    """A variable that is applied before: `variable` then numbers the devices that remain; "" if there is none."""
    order: Dict[str, str]
    """Variables to set with `variable`, so that it numbers the devices as the probe does."""
    counted_by: str
    is_proven: bool
    """Whether kit's own tests, or users' reports, cover such hardware."""


NVIDIA, CPU = "nvidia", "cpu"
ACCELERATORS = {
    NVIDIA: Accelerator(
        "NVIDIA",
        "cuda",
        "nccl",
        "CUDA_VISIBLE_DEVICES",
        (),
        "",
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        "nvidia-smi",
        True,
    ),
    "amd": Accelerator(
        "AMD",
        "hip",
        "nccl",
        "HIP_VISIBLE_DEVICES",
        ("CUDA_VISIBLE_DEVICES",),
        "ROCR_VISIBLE_DEVICES",
        {},
        "the kernel's amdkfd",
        False,
    ),
    "intel": Accelerator("Intel", "xpu", "xccl", "ZE_AFFINITY_MASK", (), "", {}, "xpu-smi", False),
    "ascend": Accelerator(
        "Ascend", "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", (), "", {}, "/dev/davinci*", False
    ),
    CPU: Accelerator("CPU", "cpu", "gloo", "", (), "", {}, "", True),
}
"""The kind, as named in answers → its properties."""


def of_build(torch_build: str) -> str:
    """Return the kind that a torch build uses; NVIDIA for an unknown or a CPU build, to find GPUs it cannot use."""
    word = torch_build.partition(" ")[0]
    found = [kind for kind, each in ACCELERATORS.items() if each.torch_build == word and kind != CPU]
    return found[0] if found else NVIDIA


def listed(kind: str, timeout_s: float) -> Listed:
    """List the devices of a kind other than NVIDIA (see `gpus.py`), in the order in which torch numbers them."""
    how: Dict[str, Callable[[float], Listed]] = {"amd": _amd, "intel": _intel, "ascend": _ascend}
    return how[kind](timeout_s)


def preset(kind: str) -> Tuple[str, Any]:
    """Return the variable that lists the visible devices on this host, and its value, None if it is not set."""
    row = ACCELERATORS[kind]
    name = next((each for each in (row.variable, *row.also) if each in os.environ), row.variable)
    return name, os.environ.get(name)


def _amd(_timeout_s: float) -> Listed:
    """List AMD's GPUs from the kernel's topology: its nodes with SIMD units, which ROCm numbers in this order."""
    found: List[Dict[str, Any]] = []
    for path in sorted(glob.glob(_KFD + "/*/properties"), key=lambda path: int(path.split("/")[-2])):
        words = dict(line.split()[:2] for line in files.read_text(path).splitlines() if len(line.split()) > 1)
        if int(words.get("simd_count", "0")) == 0:
            continue
        node = os.path.dirname(path)
        banks = [files.read_text(each) for each in glob.glob(node + "/mem_banks/*/properties")]
        sizes = [
            int(size) for text in banks for size in re.findall(r"^size_in_bytes (\d+)", text, re.MULTILINE)
        ]
        target = int(words.get("gfx_target_version", "0"))
        name = "AMD gfx%d%d%x" % (target // 10000, target // 100 % 100, target % 100)
        uuid = "GPU-%016x" % int(words.get("unique_id", "0"))
        found.append({"index": len(found), "uuid": uuid, "name": name, "memory_mib": sum(sizes) >> 20})
    return found, files.read_text("/sys/module/amdgpu/version").strip(), ""


def _intel(timeout_s: float) -> Listed:
    text, problem = processes.output(["xpu-smi", "discovery", "-j"], timeout_s)
    if problem:
        return [], "", "" if problem == processes.NOT_INSTALLED else problem
    try:
        devices = [
            each for each in json.loads(text)["device_list"] if each.get("device_type", "GPU") == "GPU"
        ]
        found = [
            {
                "index": int(each["device_id"]),
                "uuid": str(each.get("uuid", "")),
                "name": str(each["device_name"]),
            }
            for each in devices
        ]
    except (ValueError, KeyError, TypeError):
        return [], "", "it answered %r" % text.strip()[:100]
    return [{**each, "memory_mib": 0} for each in found], "", ""


def _ascend(_timeout_s: float) -> Listed:
    numbers = sorted(int(path[len(_DAVINCI) :]) for path in glob.glob(_DAVINCI + "[0-9]*"))
    found = [{"index": each, "uuid": "", "name": "Ascend NPU", "memory_mib": 0} for each in numbers]
    return found, "", ""
