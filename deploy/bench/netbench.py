"""Measures the network between the hosts, per pair and for an all-reduce, and finds slow links."""

from __future__ import annotations

import json
import math
import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodekit.deploy.bench.gpu_links import GpuPair, measure_gpus
from nodekit.deploy.connect.channel import HostChannel, RemoteError, all_or_raise, on_all, source
from nodekit.deploy.plan import check, plan
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.plan import NodePlan
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Inventory

SMALLEST_BYTES = 1 << 10
LARGEST_BYTES = 1 << 30
PAIR_S = 1.0
REDUCE_S = 30.0
STREAMS = 4
"""Parallel connections: single-threaded programs need this many to saturate a fast link."""
SLOW = 0.5
"""Report a link below this share of the others' median; healthy links of one network differ by less."""
FAR = 4.0
"""Report a round trip longer than this many times the others' median, if it also exceeds that by `FAR_S`."""
FAR_S = 0.001
_CALL_S = 10.0
_ANSWER_S = 40.0
_END_S = 20.0
_LAST_WORDS = 600

Progress = Callable[[str, int, int], None]
"""Called with the name of what is measured, how many of these are done, and how many there are (0: unknown)."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The measurement of one host sending to another."""

    source: str
    target: str
    bytes_per_s: float | None = None
    rtt_s: float | None = None
    """Seconds of a round trip on the idle link."""
    problem: str = ""
    """Why it could not be measured."""

    @property
    def name(self) -> str:
        """The pair as text: ``gpu3 → gpu1``."""
        return f"{self.source} → {self.target}"


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The time of an all-reduce of one size."""

    backend: str
    num_ranks: int
    size_bytes: int
    seconds: float

    @property
    def algbw(self) -> float:
        """Bytes per second: the size divided by the time."""
        return self.size_bytes / self.seconds

    @property
    def busbw(self) -> float:
        """The bandwidth that the slowest link carries if the algorithm is optimal.

        It is comparable with that link's speed, whatever the number of ranks (nccl-tests, doc/PERFORMANCE.md).
        """
        return self.algbw * 2 * (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that was measured."""

    nodes: tuple[NodePlan, ...]
    """Each with the interface and address that were used."""
    pairs: tuple[Pair, ...]
    reduced: tuple[Reduced, ...] = ()
    gpu_pairs: tuple[GpuPair, ...] = ()
    """Pairs of GPUs within each host."""
    notes: tuple[str, ...] = ()
    """What was not measured, and why."""
    problems: tuple[str, ...] = ()
    """Measurements that failed, and why."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A link, or all links of a node, that are much slower than the others."""

    links: tuple[tuple[str, str], ...]
    node: str = ""
    """The node, if all of its links are slow, or all in one direction; empty: a single link is."""
    text: str


# --- measuring ----------------------------------------------------------------------------------------------


def measure(
    inventory: Inventory,
    channels: Mapping[str, HostChannel],
    peers: Mapping[str, tuple[str, ...]],
    *,
    pair_s: float = PAIR_S,
    reduce_s: float = REDUCE_S,
    max_bytes: int = LARGEST_BYTES,
    kit_digest: str = "",
    progress: Progress = lambda _what, _done, _of: None,
) -> Measured:
    """Measure every ordered pair of hosts, and then the all-reduce over all of them.

    Args:
        inventory: of these hosts.
        channels: to all of its hosts.
        peers: host → addresses of the others.
        pair_s: seconds for each pair.
        reduce_s: seconds for all sizes of the all-reduce, by each backend; 0: none.
        max_bytes: the largest size of the all-reduce.
        kit_digest: of kit's package, if the caller will run it on the nodes.
        progress: called as it goes on.

    Raises:
        KitError: a host has no unambiguous interface to measure over, or was lost.
    """
    facts = check.gather(channels, inventory, peers=peers)
    nodes = plan.build(
        inventory, facts, run_id="bench", peers=peers, master_port=0, kit_digest=kit_digest, command=("true",)
    ).nodes
    pairs = _measure_pairs(nodes, channels, facts, pair_s, progress)
    broken = [f"{pair.name}: {pair.problem}" for pair in pairs if pair.problem]
    notes: list[str] = []
    reduced: list[Reduced] = []
    without = [name for name, found in facts.items() if found.torch is None]
    has_nccl = all(node.gpus and facts[node.name].gpus.row.backend == "nccl" for node in nodes)
    num_gpus = sum(len(node.gpus) for node in nodes) if has_nccl else 0
    backends = [*(["gloo"] if len(nodes) > 1 else []), *(["nccl"] if num_gpus > 1 else [])]
    gpu_pairs: list[GpuPair] = []
    if num_gpus and not without:
        is_shared = len({found.boot_id for found in facts.values()}) < len(nodes)
        gpu_pairs, problems = measure_gpus(nodes, channels, progress, one_at_a_time=is_shared)
        broken += problems
    if reduce_s and (why_not := _why_no_reduce(nodes, pairs, backends, without, num_gpus)):
        notes.append(f"no all-reduce: {why_not}")
    for backend in backends if reduce_s and not notes else ():
        try:
            found, note = _reduce(backend, nodes, channels, facts, reduce_s, max_bytes, progress)
            reduced += found
            notes += [note] if note else []
        except KitError as error:
            broken.append(str(error))
    return Measured(
        nodes=nodes,
        pairs=tuple(pairs),
        reduced=tuple(reduced),
        gpu_pairs=tuple(gpu_pairs),
        notes=tuple(notes),
        problems=tuple(broken),
    )


def _why_no_reduce(
    nodes: Sequence[NodePlan],
    pairs: Sequence[Pair],
    backends: Sequence[str],
    without: Sequence[str],
    num_gpus: int,
) -> str:
    """Return why no all-reduce can be measured; "" if one can."""
    if not backends:
        return f"{nodes[0].name} is one host, with {num_gpus or 'no'} GPU"
    if any(pair.problem for pair in pairs):
        return "it would wait for the pairs that have no connection"
    return f"there is no torch in {', '.join(without)}'s python" if without else ""


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return all ordered pairs in rounds; in a round each host is in one pair at most (circle method)."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found: list[list[tuple[str, str]]] = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        meeting = [
            (one, other)
            for one, other in zip(circle[:half], reversed(circle[half:]), strict=True)
            if one is not None and other is not None
        ]
        found += [meeting, [(other, one) for one, other in meeting]]
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _measure_pairs(
    nodes: Sequence[NodePlan],
    channels: Mapping[str, HostChannel],
    facts: Mapping[str, Facts],
    seconds: float,
    progress: Progress,
) -> list[Pair]:
    by_name = {node.name: node for node in nodes}
    token = secrets.token_hex(16)
    num_pairs = len(nodes) * (len(nodes) - 1)
    limit_s = 60 + 2 * num_pairs * (seconds + 3)

    def listen(node: NodePlan) -> Any:
        address = node.local_addr
        return channels[node.name].call(
            "linkspeed.listen", timeout_s=_CALL_S, address=address, token=token, limit_s=limit_s
        )

    ports = all_or_raise(on_all(by_name, listen))

    def one(ends: tuple[str, str]) -> Pair:
        sender, target = ends
        try:
            found = channels[sender].call(
                "linkspeed.measure",
                timeout_s=_ANSWER_S + 5 * seconds,
                address=by_name[target].local_addr,
                port=ports[target],
                token=token,
                source=by_name[sender].local_addr,
                seconds=seconds,
                streams=STREAMS,
            )
        except RemoteError as error:
            where = f"{by_name[target].local_addr}:{ports[target]}"
            return Pair(source=sender, target=target, problem=f"no connection to {where}: {error.message}")
        return Pair(source=sender, target=target, **found)

    # Hosts on one machine, as in a lab, share its cores: measure one pair at a time.
    machines = {found.boot_id for found in facts.values()}
    schedule = rounds([node.name for node in nodes])
    if len(machines) < len(nodes):
        schedule = [[ends] for meeting in schedule for ends in meeting]
    found: dict[tuple[str, str], Pair] = {}
    progress("pairs", 0, num_pairs)
    for meeting in schedule:
        results = on_all({" → ".join(ends): ends for ends in meeting}, one)
        for pair in all_or_raise(results).values():
            found[pair.source, pair.target] = pair
        progress("pairs", len(found), num_pairs)
    # Measure slow pairs again with nothing else running, to exclude bursts of other traffic.
    doubtful = sorted({ends for slow in slow_links(list(found.values())) for ends in slow.links})
    for number, ends in enumerate(doubtful):
        progress("slow pairs again", number, len(doubtful))
        again = one(ends)
        if not again.problem:
            rate = max(found[ends].bytes_per_s or 0.0, again.bytes_per_s or 0.0)
            rtt_s = min(found[ends].rtt_s or math.inf, again.rtt_s or math.inf)
            found[ends] = replace(again, bytes_per_s=rate, rtt_s=rtt_s)
    return [found[a, b] for a in by_name for b in by_name if a != b]


def sizes(max_bytes: int) -> list[int]:
    """Return the sizes to measure: powers of 4 from 1 KiB to `max_bytes`, at most 1 GiB."""
    found = [SMALLEST_BYTES]
    while found[-1] * 4 <= min(max_bytes, LARGEST_BYTES):
        found.append(found[-1] * 4)
    return found


def _reduce(
    backend: str,
    nodes: Sequence[NodePlan],
    channels: Mapping[str, HostChannel],
    facts: Mapping[str, Facts],
    seconds: float,
    max_bytes: int,
    progress: Progress,
) -> tuple[list[Reduced], str]:
    """Run the all-reduce with the hosts' own torch: one rank per node with gloo, per GPU with nccl."""
    first = nodes[0]
    port = channels[first.name].call("ports.free_port", timeout_s=_CALL_S, address=first.local_addr)
    per_node = {node.name: len(node.gpus) if backend == "nccl" else 1 for node in nodes}
    ranks = [(node, local_rank) for node in nodes for local_rank in range(per_node[node.name])]
    on_machine = {
        name: sum(per_node[other] for other, each in facts.items() if each.boot_id == found.boot_id)
        for name, found in facts.items()
    }
    program = source("nodekit.deploy.bench.allreduce")

    def rank_of(number: int) -> dict[str, Any]:
        node, local_rank = ranks[number]
        share = 1 / on_machine[node.name]
        settings = {"backend": backend, "sizes": sizes(max_bytes), "seconds": seconds, "share": share}
        own = {"RANK": number, "LOCAL_RANK": local_rank, "WORLD_SIZE": len(ranks)}
        where = {"MASTER_ADDR": first.local_addr, "MASTER_PORT": port}
        # torch's variables and the job's, so that the job's network settings apply.
        mine = {name: str(value) for name, value in {**own, **where}.items()}
        env = {"NCCL_DEBUG": "WARN", **node.env, **mine}
        found: dict[str, Any] = channels[node.name].stream(
            "attend",
            lambda passed: progress(f"all-reduce, {backend}", round(passed), 0) if number == 0 else None,
            argv=[node.python, "-u", "-", json.dumps(settings)],
            cwd="/",
            kit_dir="",
            env=env,
            limit_s=2 * seconds + 60 + _END_S,
            text=program,
        )
        return found

    progress(f"all-reduce, {backend}", 0, 0)
    done = all_or_raise(on_all({str(number): number for number in range(len(ranks))}, rank_of))
    if problem := _why(backend, [(node.name, done[str(number)]) for number, (node, _) in enumerate(ranks)]):
        raise problem
    told = json.loads([line for line in done["0"]["out"].splitlines() if line.startswith("{")][-1])
    points = [
        Reduced(backend=backend, num_ranks=len(ranks), size_bytes=size, seconds=seconds)
        for size, seconds in told["points"]
    ]
    left_out = sizes(max_bytes)[len(points) :]
    if not left_out:
        return points, ""
    reason = "would not have fitted into the memory that is free"
    if told["stopped"] == "time":
        reason = f"would have taken longer than {seconds:g} s in all allow (--time-limit)"
    return points, f"{backend}: {size_text(left_out[0])} and more {reason}"


def _why(backend: str, ends: Sequence[tuple[str, Mapping[str, Any]]]) -> HostError | None:
    """Return the error of the rank that failed first, if any, and not that of a rank that only lost its peer."""
    failed = [(name, end) for name, end in ends if end["status"] != 0]
    if not failed:
        return None
    # Ranks that wait for a lost peer fail, too, or are stopped with it.
    name, end = min(failed, key=lambda each: (each[1]["status"] is None, "onnection" in each[1]["err"]))
    if end["status"] is None:
        return HostError(
            name,
            f"the all-reduce by {backend} came to no end, and was stopped",
            cure="kit check tries each pair of hosts, with large packets too",
        )
    lines = [line for line in end["err"].strip()[-_LAST_WORDS:].splitlines() if line.strip()]
    # NCCL's warnings say more than the exception.
    lines += [line for line in end.get("out", "").splitlines() if "NCCL WARN" in line]
    return HostError(name, f"the all-reduce by {backend} failed: {lines[-1] if lines else end['status']}")


# --- what is slow -------------------------------------------------------------------------------------------


def slow_links(pairs: Sequence[Pair]) -> list[Slow]:
    """Return nodes whose links are slow, then single slow links, the slowest first; pure."""
    rates = {(pair.source, pair.target): pair.bytes_per_s for pair in pairs if pair.bytes_per_s}
    found = _outliers(rates, SLOW, rate_text, "slow")
    known = {ends for slow in found for ends in slow.links}
    # Inverse latency, so that higher is better here, too.
    nearness = {
        (pair.source, pair.target): 1 / pair.rtt_s
        for pair in pairs
        if pair.rtt_s and (pair.source, pair.target) not in known
    }
    far = _outliers(nearness, 1 / FAR, lambda value: f"{1e3 / value:.2f} ms there and back", "far")
    middle_s = 1 / statistics.median(nearness.values()) if nearness else 0.0
    return found + [slow for slow in far if all(1 / nearness[ends] > middle_s + FAR_S for ends in slow.links)]


def _outliers(
    values: Mapping[tuple[str, str], float], share: float, shown: Callable[[float], str], word: str
) -> list[Slow]:
    left = dict(values)
    found: list[Slow] = []
    while group := _worst_node(left, share):
        own = [left.pop(ends) for ends in group.links]
        others = [value for ends, value in left.items() if group.node not in ends]
        text = (
            f"{group.node}: all {group.which} are {word}, {shown(statistics.median(own))} in the median; "
            f"the median of the others is {shown(statistics.median(others))}"
        )
        found.append(Slow(node=group.node, links=group.links, text=text))
    slowest_first = sorted(left.items(), key=lambda item: item[1])
    for place, (ends, value) in enumerate(slowest_first):
        others = [other for _, other in slowest_first[:place] + slowest_first[place + 1 :]]
        if not others or value >= share * statistics.median(others):
            break  # the following ones are faster
        what = "the way back" if len(others) == 1 else "the median of the others is"
        text = f"{ends[0]} → {ends[1]}: {shown(value)}; {what} {shown(statistics.median(others))}"
        found.append(Slow(links=(ends,), text=text))
    return found


@dataclass(frozen=True)
class _Group:
    """All links of a node, or those in one direction."""

    node: str
    which: str
    links: tuple[tuple[str, str], ...]
    ratio: float
    """Rate of the fastest of these links over the median of all links of other nodes."""


def _worst_node(values: Mapping[tuple[str, str], float], share: float) -> _Group | None:
    """Return the node whose links are all slow, or all in one direction; of several, the slowest."""
    groups = []
    best: dict[str, list[float]] = {}
    """Node → the highest rates at which it sends and receives."""
    for ends, value in values.items():
        for place, node in enumerate(ends):
            most = best.setdefault(node, [0.0, 0.0])
            most[place] = max(most[place], value)
    limit = share * max(values.values(), default=0.0)
    # Only nodes below this limit can be slow: the others' median is at most the best rate. Few of hundreds remain.
    for node in sorted(name for name, most in best.items() if min(most) < limit):
        others = [value for ends, value in values.items() if node not in ends]
        ways = {
            "its links": [ends for ends in values if node in ends],
            "links from it": [ends for ends in values if ends[0] == node],
            "links to it": [ends for ends in values if ends[1] == node],
        }
        for which, own in ways.items():
            # With a single peer, the link is slow, not the node.
            if len({name for ends in own for name in ends}) < 3 or not others:
                continue
            ratio = max(values[ends] for ends in own) / statistics.median(others)
            if ratio < share:
                groups.append(_Group(node, which, tuple(own), ratio))
                break  # no need to look at one direction if all links are slow
    return min(groups, key=lambda group: group.ratio, default=None)


# --- words --------------------------------------------------------------------------------------------------


def rate_text(bytes_per_s: float) -> str:
    """Format a rate in bits per second: ``9.41 Gb/s``."""
    bits = bytes_per_s * 8
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits >= size / 10:
            return f"{_digits(bits / size)} {unit}"
    return f"{_digits(bits / 1e3)} kb/s"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def size_text(num_bytes: int) -> str:
    """Format a size: ``4 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes} B"
