"""Look up the GPUs of this host, and which of them CUDA_VISIBLE_DEVICES, or a similar variable, leaves to a job."""

from __future__ import annotations

import glob
import os
import re
import sys
from typing import Any, Dict, List, Optional, Sequence

from nodekit.deploy.host import files, processes
from nodekit.deploy.host.probes.gpu import accelerators

# Without persistence mode, nvidia-smi takes a second or more per GPU; one that takes longer than this is a finding.
SMI_TIMEOUT_S = 6.0
SMI_BAD_INFOROM = 14
"""nvidia-smi's exit status if a GPU's infoROM is corrupt: the GPU works, and the rest of the output is valid."""
_QUERY = ("index", "uuid", "driver_version", "memory.total", "name")
_MIG = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")
_ON_GPU = re.compile(r"^GPU (\d+): ")
# Run in a process of its own: the call may hang in the driver, and the library would stay loaded.
_ASK_LIBCUDA = """
import ctypes
version = ctypes.c_int()
if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
    print(version.value)
"""


def look_up(timeout_s: float = SMI_TIMEOUT_S, torch_build: str = "") -> Dict[str, Any]:
    """Return the facts about this host's GPUs that `deploy/plan/gpus.py` needs.

    Args:
        timeout_s: for each program that is run.
        torch_build: as `hostfacts.torch_build`; decides which kind of accelerator is looked for.

    Returns:
        ``kind``: a key of `accelerators.ACCELERATORS`;
        ``usable``: the GPUs that a job may use, ``[{"index", "token", "name", "memory_mib"}]``, with nvidia-smi's index
        and the entry for CUDA_VISIBLE_DEVICES; ``driver``: its version, or ""; ``cuda``: as `cuda_version`, if torch is
        built for CUDA, else None; ``preset``: CUDA_VISIBLE_DEVICES as it is set here, or None; ``problem``: why the
        host's GPUs could not be listed, or "".
    """
    kind = accelerators.of_build(torch_build)
    _, preset = accelerators.preset(kind)
    found: Dict[str, Any] = {
        "kind": kind,
        "usable": [],
        "driver": "",
        "cuda": None,
        "preset": preset,
        "problem": "",
    }
    if kind != accelerators.NVIDIA:
        those, found["driver"], found["problem"] = accelerators.listed(kind, timeout_s)
        first = os.environ.get(accelerators.ACCELERATORS[kind].first)
        if first is not None:
            shown = {gpu["index"]: gpu for gpu in those}
            left = [shown[gpu["index"]] for gpu in visible(first, those, {})]
            those = [{**gpu, "index": number} for number, gpu in enumerate(left)]
        found["usable"] = visible(preset, those, {})
        return found
    query = ["nvidia-smi", "--query-gpu=" + ",".join(_QUERY), "--format=csv,noheader,nounits"]
    text, problem = processes.output(query, timeout_s, also_good=[SMI_BAD_INFOROM])
    listed = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", len(_QUERY) - 1)]
        if len(cells) == len(_QUERY) and cells[0].isdigit():
            index, uuid, found["driver"], memory, name = cells
            memory_mib = int(memory) if memory.isdigit() else 0
            listed.append({"index": int(index), "uuid": uuid, "name": name, "memory_mib": memory_mib})
    if not listed and not problem:
        problem = "it answered %r" % text.strip()[:100]
    if problem:
        # Without a GPU, nvidia-smi is only a leftover of a driver, and its failure is no problem.
        if problem != processes.NOT_INSTALLED and has_cards():
            found["problem"] = problem
        return found
    if torch_build.startswith("cuda"):
        found["cuda"] = cuda_version(timeout_s)
    instances = _mig_instances(timeout_s) if "MIG-" in (preset or "") else {}
    found["usable"] = visible(preset, listed, instances)
    return found


def cuda_version(timeout_s: float) -> Optional[str]:
    """Return the CUDA version of the libcuda that a process here loads, such as ``12.8``; None if none answers.

    It is the driver's version, unless a newer libcuda for forward compatibility (cuda-compat, as in containers) is
    found first.
    """
    text, _ = processes.output([sys.executable, "-I", "-S", "-c", _ASK_LIBCUDA], timeout_s)
    if not text.strip().isdigit():
        return None
    return "%d.%d" % (int(text) // 1000, int(text) % 1000 // 10)


def visible(
    preset: Optional[str], listed: Sequence[Dict[str, Any]], instances: Dict[str, int]
) -> List[Dict[str, Any]]:
    """Return the GPUs that a process sees with a value of CUDA_VISIBLE_DEVICES, in CUDA's order; pure.

    CUDA and torch end the list at the first entry that names no GPU, and show none at all if one is named twice.

    Args:
        preset: the value of the variable; None if it is not set.
        listed: all GPUs, with ``index`` and ``uuid``.
        instances: UUID of a MIG instance → index of its GPU.
    """
    tokens = [str(gpu["index"]) for gpu in listed] if preset is None else preset.split(",")
    found = []  # type: List[Dict[str, Any]]
    for token in (each.strip() for each in tokens):
        gpu = _named(token, listed, instances)
        if gpu is None:
            break
        found.append({**{key: gpu[key] for key in ("index", "name", "memory_mib")}, "token": token})
    # A MIG instance, or a tile of an Intel GPU ("0.1"), is a part of a GPU, so several of one GPU may be named.
    names = [
        each["token"] if "MIG-" in each["token"] or "." in each["token"] else each["index"] for each in found
    ]
    return found if len(set(names)) == len(names) else []


def _named(
    token: str, listed: Sequence[Dict[str, Any]], instances: Dict[str, int]
) -> Optional[Dict[str, Any]]:
    if token.startswith("GPU-"):
        named = [gpu for gpu in listed if gpu["uuid"].startswith(token)]
    elif token.startswith("MIG-"):
        indices = {index for uuid, index in instances.items() if uuid.startswith(token)}
        named = [gpu for gpu in listed if gpu["index"] in indices]
    else:
        number = re.match(r"\+?(\d+)", token)
        named = [gpu for gpu in listed if number and gpu["index"] == int(number.group(1))]
    return named[0] if len(named) == 1 else None


def _mig_instances(timeout_s: float) -> Dict[str, int]:
    """Return UUID → index of the GPU, for each MIG instance."""
    found, index = {}, -1  # type: Dict[str, int], int
    text, _ = processes.output(["nvidia-smi", "-L"], timeout_s, also_good=[SMI_BAD_INFOROM])
    for line in text.splitlines():
        gpu, instance = _ON_GPU.match(line), _MIG.match(line)
        if gpu:
            index = int(gpu.group(1))
        if instance:
            found[instance.group(1)] = index
    return found


def has_cards() -> bool:
    """Whether this host has an NVIDIA GPU, with a working driver or without."""
    return bool(num_cards() or glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg"))  # dxg: under WSL


def num_cards() -> int:
    """Return the number of NVIDIA GPUs on the PCI bus."""
    found = 0
    for device in glob.glob("/sys/bus/pci/devices/*"):
        kind = files.read_text(device + "/vendor").strip(), files.read_text(device + "/class")[:4]
        found += kind == ("0x10de", "0x03")
    return found
