"""Parses the output of nvidia-smi, of drivers 418 to 595; pure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Reasons for reduced clocks that are not caused by the job.
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")
_XML = re.compile(r"<\?xml.*</nvidia_smi_log>", re.DOTALL)  # nvidia-smi may print warnings around it


class SmiError(Exception):
    """The text is not the output of any known nvidia-smi."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    kind: str
    """C (compute), G (graphics), C+G."""
    name: str
    memory_mib: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; a field is None if the GPU, or its driver, does not report it."""

    index: int
    name: str
    bus: str
    """The PCI address as in the kernel's log: ``0000:3b:00``."""
    memory_mib: int | None
    persistence: bool | None
    uncorrectable: int | None
    """ECC errors that could not be corrected, since the driver was loaded."""
    needs_reset: bool
    """Whether a page or row is to be replaced, or the driver asks for a reset."""
    is_broken: bool
    """Whether a row could not be replaced."""
    slowdowns: tuple[str, ...]
    """Those of SLOWDOWNS that are active."""
    processes: tuple[GpuProcess, ...]
    mig: bool = False
    """Whether the GPU is divided by MIG."""
    compute_mode: str = "Default"
    """``Exclusive_Process``: one process at a time; ``Prohibited``: none."""
    fabric: str = ""
    """What keeps the GPU from its NVSwitches, in nvidia-smi's words; "" if nothing does, or it has none."""


@dataclass(frozen=True, kw_only=True)
class Smi:
    """A host's GPUs, in nvidia-smi's order."""

    driver: str
    gpus: tuple[Gpu, ...]


def parse(xml: str) -> Smi:
    """Parse the output of ``nvidia-smi -q -x``.

    Raises:
        SmiError: the text is something else.
    """
    found = _XML.search(xml)
    try:
        root = ET.fromstring(found[0] if found else xml.strip())  # noqa: S314  # of the user's own hosts
    except ET.ParseError as error:
        raise SmiError(f"nvidia-smi -q -x wrote no XML ({error})") from error
    if root.tag != "nvidia_smi_log":
        raise SmiError(f"nvidia-smi -q -x wrote a <{root.tag}>, not a <nvidia_smi_log>")
    gpus = tuple(_gpu(index, each) for index, each in enumerate(root.findall("gpu")))
    return Smi(driver=_text(root, "driver_version"), gpus=gpus)


def bus_of(address: str) -> str:
    """Return a PCI address as the kernel's log has it: ``00000000:3B:00.0`` → ``0000:3b:00``."""
    return address.lower().rpartition(".")[0][-len("0000:00:00") :]


def _gpu(index: int, gpu: ET.Element) -> Gpu:
    reasons = next(
        (each for each in gpu if re.fullmatch(r"clocks_\w+_reasons", each.tag)), ET.Element("none")
    )
    slowdowns = tuple(
        name for name in SLOWDOWNS for each in reasons if each.tag.endswith("_" + name) and _yes(each.text)
    )
    ecc = gpu.find("ecc_errors/volatile")
    counts = [
        _number(each.text) for each in (ecc.iter() if ecc is not None else ()) if "uncorrectable" in each.tag
    ]
    # Counter on GPUs older than Turing.
    counts.append(_number(_text(gpu, "ecc_errors/volatile/double_bit/total")))
    known = [count for count in counts if count is not None]
    pending = (
        "retired_pages/pending_retirement",
        "remapped_rows/remapped_row_pending",
        "ecc_errors/channel_repair_pending",
        "ecc_errors/tpc_repair_pending",
    )
    persistence = _text(gpu, "persistence_mode")
    return Gpu(
        index=index,
        name=_text(gpu, "product_name"),
        bus=bus_of(gpu.get("id", "")),
        memory_mib=_number(_text(gpu, "fb_memory_usage/total")),
        persistence=persistence == "Enabled" if persistence in ("Enabled", "Disabled") else None,
        uncorrectable=sum(known) if known else None,
        needs_reset=any(_yes(_text(gpu, path)) for path in pending)
        or _text(gpu, "gpu_recovery_action") not in ("", "None", "N/A"),
        is_broken=_yes(_text(gpu, "remapped_rows/remapped_row_failure")),
        slowdowns=slowdowns,
        processes=tuple(
            GpuProcess(
                pid=pid,
                kind=_text(each, "type"),
                name=_text(each, "process_name"),
                memory_mib=_number(_text(each, "used_memory")),
            )
            for each in gpu.findall("processes/process_info")
            if (pid := _number(_text(each, "pid"))) is not None
        ),
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        compute_mode=_text(gpu, "compute_mode") or "Default",
        fabric=_fabric(_text(gpu, "fabric/state"), _text(gpu, "fabric/status")),
    )


def _fabric(state: str, status: str) -> str:
    if state in ("", "N/A") or (state, status) in (("Completed", "Success"), ("Completed", "N/A")):
        return ""
    return f"{state}, {status}" if status not in ("", "N/A") else state


def _text(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(text: str | None) -> int | None:
    match = re.match(r"\d+", (text or "").strip())
    return int(match[0]) if match else None


def _yes(text: str | None) -> bool:
    return (text or "").strip() in ("Yes", "Active", "Pending")


def gpu_of(xml: str) -> dict[int, int]:
    """Return pid → the GPU that it uses; nothing if the output cannot be parsed."""
    try:
        gpus = parse(xml).gpus
    except SmiError:
        return {}
    return {process.pid: gpu.index for gpu in gpus for process in gpu.processes}


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """Parse ``nvidia-smi topo -m`` or ``-p2p r``: (GPU, other GPU) → their link (NV12, SYS), or OK, CNS, GNS."""
    found: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in _ANSI.sub("", text).splitlines():
        words = line.split()
        if not words or not (first := _GPU.fullmatch(words[0])):
            continue
        if not columns:  # the header: columns of GPUs come first, those of network cards after them
            columns = [int(each[1]) for word in words if (each := _GPU.fullmatch(word))]
            continue
        row = int(first[1])
        for column, cell in zip(columns, words[1:], strict=False):
            if column != row:
                found[row, column] = cell
    return found


def links(matrix: Mapping[tuple[int, int], str], gpus: Iterable[int]) -> str:
    """Return the kinds of links between GPUs: ``NV18``, ``NV12 SYS``; "" for a single GPU."""
    used = set(gpus)
    kinds = {cell for (one, other), cell in matrix.items() if one in used and other in used}
    return " ".join(sorted(kinds))
