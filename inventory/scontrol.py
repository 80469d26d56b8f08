"""Parse the output of ``scontrol show nodes`` into partitions and their kinds of nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodekit.inventory.errors import KitError

_FIELDS = ("NodeName", "CPUTot", "RealMemory", "Gres", "State", "Partitions", "CfgTRES")
_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "FUTURE", "MAINT", "UNKNOWN", "POWERED_DOWN", "NOT_RESPONDING")


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes of one partition with the same hardware."""

    num_nodes: int
    num_usable: int
    """Number of nodes that are not down or drained."""
    gpus: int
    gpu_type: str
    """Slurm's name of the GPUs, such as ``a100``; "" if unknown."""
    cpus: int
    memory_mib: int


def partitions(text: str, default: str | None = None) -> Mapping[str, tuple[NodeKind, ...]]:
    """Return partition → its kinds of nodes, those with the most GPUs first; the default partition comes first.

    Raises:
        KitError: the text names no node.
    """
    found: dict[str, dict[tuple[int, str, int, int], list[bool]]] = {}
    for record in re.split(r"(?:^|\n)(?=\s*NodeName=)", text):
        fields: dict[str, str] = {}
        for name, value in re.findall(rf"(?<!\S)({'|'.join(_FIELDS)})=(\S*)", record):
            fields.setdefault(name, value)  # a later match may be in the text of a Reason
        if not fields.get("NodeName"):
            continue
        gpus, gpu_type = _gpus(fields.get("Gres", ""), fields.get("CfgTRES", ""))
        kind = (gpus, gpu_type, _number(fields.get("CPUTot")), _number(fields.get("RealMemory")))
        is_usable = not any(word in fields.get("State", "").upper() for word in _UNUSABLE)
        names = fields.get("Partitions", "")
        for partition in ("" if names == "(null)" else names).split(","):
            if partition:
                found.setdefault(partition, {}).setdefault(kind, []).append(is_usable)
    if not found:
        raise KitError(
            "scontrol show nodes: found no node in a partition", wanted="lines as `NodeName=gpu01 …`"
        )
    return {
        name: tuple(
            NodeKind(
                num_nodes=len(usable),
                num_usable=sum(usable),
                gpus=gpus,
                gpu_type=gpu_type,
                cpus=cpus,
                memory_mib=memory,
            )
            for (gpus, gpu_type, cpus, memory), usable in sorted(kinds.items(), reverse=True)
        )
        for name, kinds in sorted(found.items(), key=lambda item: (item[0] != default, item[0]))
    }


def _gpus(gres: str, tres: str) -> tuple[int, str]:
    """Parse ``gpu:a100:4(S:0-1)``, ``gpu:8`` or ``gpu:a100:2,gpu:v100:2``; else ``cpu=64,gres/gpu=8``."""
    total, types = 0, []
    for kind, count in re.findall(r"(?:^|,)gpu(?::([^:,()]+?))??(?::([0-9]{1,6}))?(?=$|[,(])", gres):
        total += int(count or 1)
        types.append(kind)
    if not total and (match := re.search(r"(?:^|,)gres/gpu=([0-9]{1,6})(?=,|$)", tres)):
        total = int(match.group(1))
    return total, "+".join(filter(None, types))


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"[0-9]{1,12}", text) else 0
