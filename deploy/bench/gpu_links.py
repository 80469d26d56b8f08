"""Measures the links between the GPUs of each host, pair by pair, and finds slow ones."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodekit.deploy.connect.channel import HostChannel, on_all, source
from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.preflight import nvidia_smi
from nodekit.inventory.errors import HostError

if TYPE_CHECKING:
    from rich.table import Table

SIZE_BYTES = 256 << 20
SLOW = 0.5
"""Report a pair below this share of the median of pairs with the same kind of link."""
_LIMIT_S = 180.0
_LAST_WORDS = 600


@dataclass(frozen=True, kw_only=True)
class GpuPair:
    """A copy from one GPU of a host to another."""

    node: str
    source: int
    """Number in nvidia-smi."""
    target: int
    bytes_per_s: float
    link: str = ""
    """The link in `nvidia-smi topo -m`: NV18 is NVLink, PIX to SYS are PCIe; "" if unknown."""
    is_peer: bool = True
    """Whether the GPUs access each other's memory directly; else copies go through the host's memory."""

    @property
    def name(self) -> str:
        """The pair as text: ``gpu1: GPU 0 → 3``."""
        return f"{self.node}: GPU {self.source} → {self.target}"


def measure_gpus(
    nodes: Sequence[NodePlan],
    channels: Mapping[str, HostChannel],
    progress: Callable[[str, int, int], None],
    *,
    one_at_a_time: bool,
) -> tuple[list[GpuPair], list[str]]:
    """Measure all ordered pairs of GPUs in every node that has several; return the pairs, and the errors of nodes.

    Args:
        nodes: of the plan, with their GPUs.
        channels: to the nodes.
        progress: called with the number of nodes that are done.
        one_at_a_time: whether to measure node by node, since several of them are one machine.
    """
    own = [node for node in nodes if len(node.gpus) > 1]
    groups = [[node] for node in own] if one_at_a_time else [own]
    found: list[GpuPair] = []
    problems: list[str] = []
    program = source("nodekit.deploy.bench.gpu_copies")

    def one(node: NodePlan) -> list[GpuPair]:
        end = channels[node.name].stream(
            "attend",
            lambda _passed: None,
            argv=[node.python, "-u", "-", json.dumps({"size_bytes": SIZE_BYTES})],
            cwd="/",
            kit_dir="",
            env=dict(node.env),
            limit_s=_LIMIT_S,
            text=program,
        )
        return told(node, end)

    done = 0
    for group in filter(None, groups):
        progress("GPU pairs", done, len(own))
        for each in on_all({node.name: node for node in group}, one).values():
            if isinstance(each, HostError):
                problems.append(str(each))
            elif isinstance(each, Exception):
                raise each
            else:
                found += each
        done += len(group)
    return found, problems


def told(node: NodePlan, end: Mapping[str, object]) -> list[GpuPair]:
    """Parse the output of gpu_copies.py into pairs.

    Raises:
        HostError: the program has failed.
    """
    lines = [line for line in str(end["out"]).splitlines() if line.startswith("{")]
    if end["status"] != 0 or not lines:
        words = [line for line in str(end["err"])[-_LAST_WORDS:].splitlines() if line.strip()]
        why = words[-1] if words else f"status {end['status']}"
        raise HostError(node.name, f"the pairs of its GPUs were not measured: {why}")
    answer = json.loads(lines[-1])
    matrix = nvidia_smi.parse_matrix(answer["topo"])
    return [
        GpuPair(
            node=node.name,
            source=node.gpus[one],
            target=node.gpus[other],
            bytes_per_s=rate,
            link=matrix.get((node.gpus[one], node.gpus[other]), ""),
            is_peer=is_peer,
        )
        for one, other, rate, is_peer in answer["pairs"]
    ]


def slow_pairs(pairs: Sequence[GpuPair]) -> list[str]:
    """Return a sentence for each pair that is much slower than pairs with the same kind of link; pure."""
    found = []
    for kind in sorted({pair.link for pair in pairs}):
        own = [pair for pair in pairs if pair.link == kind]
        middle = statistics.median(pair.bytes_per_s for pair in own)
        found += [
            f"{pair.name}{f' ({kind})' if kind else ''}: {gigabytes(pair.bytes_per_s)} GB/s; the median of "
            f"{'those joined alike' if kind else 'all'} is {gigabytes(middle)} GB/s"
            for pair in own
            if pair.bytes_per_s < SLOW * middle
        ]
    return found


def without_peers(pairs: Sequence[GpuPair]) -> list[str]:
    """Return a sentence for each host with GPUs that cannot access each other's memory; pure."""
    found = []
    for node in dict.fromkeys(pair.node for pair in pairs):
        lacking = [pair for pair in pairs if pair.node == node and not pair.is_peer]
        own = sorted({(min(pair.source, pair.target), max(pair.source, pair.target)) for pair in lacking})
        if own:
            names = ", ".join(f"{one}-{other}" for one, other in own)
            found.append(
                f"{node}: no P2P between GPUs {names}: copies go through the host's memory (is IOMMU or ACS on?)"
            )
    return found


def gigabytes(bytes_per_s: float) -> str:
    """Format a rate in GB/s, the unit of nccl-tests: ``372``, ``21.4``."""
    return f"{bytes_per_s / 1e9:.3g}"


def table(node: str, pairs: Sequence[GpuPair]) -> Table:
    """Return a table of a node's pairs: a row per source, a column per target; rate and link in each cell."""
    from rich.table import Table

    own = {(pair.source, pair.target): pair for pair in pairs if pair.node == node}
    gpus = sorted({source for source, _ in own})
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    found.add_column(f"{node}, GB/s from \\ to", no_wrap=True)
    for gpu in gpus:
        found.add_column(f"GPU {gpu}", justify="right", no_wrap=True)
    for source_ in gpus:
        cells = [own.get((source_, target)) for target in gpus]
        found.add_row(
            f"GPU {source_}",
            *(f"{gigabytes(cell.bytes_per_s)} {cell.link}".strip() if cell else "·" for cell in cells),
        )
    return found
