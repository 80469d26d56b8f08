"""The inventory of a Slurm cluster that `kit init --slurm` writes; pure."""

from __future__ import annotations

from collections.abc import Mapping

from nodekit.deploy.init.template_text import CHOOSE, Draft, comment, gib, heading, keyed, scalar, shown
from nodekit.inventory.scontrol import NodeKind


def from_slurm(
    partitions: Mapping[str, tuple[NodeKind, ...]],
    *,
    default: str | None,
    name: str,
    file: str,
    command: str,
    date: str,
) -> Draft:
    """Return the inventory of a Slurm cluster; partition and GPUs are set only if there is one choice."""
    lines = [
        *heading(
            f"Written by `{command}` on {date}, from what scontrol shows.",
            f"kit up {shown(file)} --dry-run      what would be asked of Slurm; queues nothing",
            name=name,
        ),
        *comment(f"{CHOOSE} an interpreter on the nodes with torch, submitit and others (docs/slurm.md)."),
        "# python: ~/venv/bin/python",
        "",
        "slurm:",
        f"  nodes: 1   # {CHOOSE} how many, as 4, or as 2:4 for the fewest and most",
    ]
    if len(partitions) > 1:
        lines += comment(f"{CHOOSE} a partition; without one, Slurm takes its default.", indent="  ")
    for partition, kinds in partitions.items():
        hidden = "" if len(partitions) == 1 else "# "
        about = ("default; " if partition == default else "") + "; ".join(_kind(kind) for kind in kinds)
        lines += [f"  {line}" for line in keyed(f"{hidden}partition: {scalar(partition)}", about)]
    counts = {kind.gpus for kinds in partitions.values() for kind in kinds}
    if len(counts) == 1:
        if gpus := counts.pop():
            lines.append(f"  gpus_per_node: {gpus}")
    else:
        lines += comment(f"{CHOOSE} how many GPUs on each node; without, none are asked for.", indent="  ")
        lines += [f"  # gpus_per_node: {count}" for count in sorted(counts - {0}, reverse=True)]
    lines += [
        "  # time: 12:00:00           # [D-]HH:MM:SS; without, the partition's own limit",
        "  # account: vision          # without, your default one; yours: sacctmgr show assoc user=$USER",
        "",
        *comment(f"{CHOOSE}, if need be: a folder that all nodes and this machine share.", indent="  "),
        "  # shared_dir: ~/nodekit",
    ]
    return Draft.of(lines, f"{len(partitions)} partition{'s' * (len(partitions) != 1)}")


def _kind(kind: NodeKind) -> str:
    model = f"{kind.gpu_type} " if kind.gpu_type else ""
    gpus = f"{kind.gpus} {model}GPU{'s' * (kind.gpus != 1)}" if kind.gpus else "no GPU"
    usable = "" if kind.num_usable == kind.num_nodes else f" ({kind.num_usable} usable now)"
    nodes = f"{kind.num_nodes} node{'s' * (kind.num_nodes != 1)}{usable}"
    return f"{nodes} with {gpus}, {kind.cpus} CPUs, {gib(kind.memory_mib)}"
