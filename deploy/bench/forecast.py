"""Forecasts the speed of training on several nodes, from model size, one node's step time and the network; pure.

The assumptions, which ``bench/plan`` tests:

- An all-reduce takes the time that was measured for its size. Between two sizes the time is interpolated linearly, so
  each interval has its own latency and rate (alpha and beta); beyond the last size, its rate holds. For k nodes instead
  of the n measured, latency scales with the k - 1 hops of a ring, and the rest with (k - 1) / k.
- The last two thirds of a step's compute time are the backward pass (for each multiplication forward there are two
  backward), in which gradients become ready evenly, last layers first. DDP sends them in buckets, the first of 1 MiB
  and the others of 25 MiB, one after the other, each as soon as it is ready. Nothing else hides communication.
- The batch per node stays the same: with more nodes, a step has more samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BACKWARD = 2 / 3
"""The backward pass's share of a step's compute time."""
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Bucket sizes of DistributedDataParallel, by default."""
SMALL_BYTES = 64
"""Bytes of losses and flags that the ranks exchange in each step."""
SUMS_EVERY_S = 2.0
"""With local SGD, ranks exchange losses and flags at each sync step, and otherwise about this often, in seconds."""
MATRIX = 1024
"""Assumed size of a model's square matrices, for PowerSGD, if only the number of parameters is known."""
GOOD = 0.9
"""The lowest scaling efficiency to recommend."""
WORTH = 1.2
"""The lowest speed-up over one node for which several nodes are recommended."""
HS = (8, 16, 32, 50, 100, 128, 200, 256, 500)
"""Steps between two averages to choose from; local SGD and DiLoCo were shown to learn as well with up to about 500."""
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Curve:
    """The duration of an all-reduce by its size, for the number of nodes on which it was measured."""

    num_nodes: int
    points: tuple[tuple[float, float], ...]
    """(bytes, seconds), with increasing sizes and non-decreasing times."""
    least_s_per_byte: float = 0.0
    """Lower bound of the seconds per byte beyond the largest size."""

    @classmethod
    def measured(
        cls, points: Sequence[tuple[float, float]], *, num_nodes: int, link_bytes_per_s: float | None = None
    ) -> Curve:
        """Return the curve of measured times; times that decrease with the size (noise) are replaced by their mean.

        Args:
            points: (bytes, seconds), by increasing size.
            num_nodes: number of nodes in the measurement.
            link_bytes_per_s: speed of the links, if all data goes through them, as it does with TCP.
        """
        groups: list[list[float]] = []
        for _, seconds in points:
            groups.append([seconds])
            while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
                last = groups.pop()
                groups[-1] += last
        smooth = [_mean(group) for group in groups for _ in group]
        least = 2 * (num_nodes - 1) / num_nodes / link_bytes_per_s if link_bytes_per_s else 0.0
        sizes = [size for size, _ in points]
        return cls(num_nodes, tuple(zip(sizes, smooth, strict=True)), least)

    @classmethod
    def of_link(cls, *, bytes_per_s: float, rtt_s: float, num_nodes: int = 2) -> Curve:
        """Return the curve of a ring over equal links: 2 (n - 1) hops, each with 1/n of the bytes."""
        latency_s = 2 * (num_nodes - 1) * rtt_s / 2
        share = 2 * (num_nodes - 1) / num_nodes / bytes_per_s
        return cls(num_nodes, tuple((size, latency_s + size * share) for size in (1.0, 2.0**30)))

    def seconds(self, size_bytes: float, num_nodes: int | None = None) -> float:
        """Return the seconds of an all-reduce of this size; `num_nodes` None: as many nodes as were measured."""
        if num_nodes == 1:
            return 0.0
        found = self._seconds(size_bytes)
        if num_nodes in (None, self.num_nodes):
            return found
        assert num_nodes is not None
        latency_s = min(found, self.points[0][1])
        rate = (num_nodes - 1) / num_nodes / ((self.num_nodes - 1) / self.num_nodes)
        return latency_s * (num_nodes - 1) / (self.num_nodes - 1) + (found - latency_s) * rate

    def _seconds(self, size_bytes: float) -> float:
        if size_bytes <= self.points[0][0]:
            return self.points[0][1]
        stretches = list(zip(self.points, self.points[1:], strict=False))
        last_size, last_seconds = self.points[-1]
        if size_bytes > last_size or not stretches:
            (size, seconds) = self.points[-2] if stretches else (0.0, 0.0)
            slope = max((last_seconds - seconds) / (last_size - size), self.least_s_per_byte)
            return last_seconds + slope * (size_bytes - last_size)
        (size, seconds), (other_size, other_seconds) = next(
            pair for pair in stretches if size_bytes <= pair[1][0]
        )
        return seconds + (other_seconds - seconds) * (size_bytes - size) / (other_size - size)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, as far as its speed depends on it."""

    num_parameters: int
    step_s: float
    """Seconds per step on one node alone."""
    batch: int | None = None
    """Samples per step; None: unknown."""
    gradient_bytes: int = 4
    """Size of one gradient element."""
    powersgd_numbers: int | None = None
    """Elements of a gradient compressed at rank 1; None: assume matrices of `MATRIX` × `MATRIX`."""

    @property
    def size_bytes(self) -> int:
        """Size of all gradients."""
        return self.num_parameters * self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy to train on several nodes, by options of `nodekit.training`."""

    name: str
    compress: str = "off"
    accumulate: int = 1
    """Micro-batches per exchange, each of one node's batch size."""
    local_steps: int = 0
    """Steps between two averages; 0: exchange gradients in each step."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The speed of a strategy on a number of nodes."""

    way: Way
    num_nodes: int
    step_s: float
    """Seconds from one update to the next; with local SGD, the mean."""
    exchange_s: float
    """Seconds of one exchange, overlapped or not."""
    efficiency: float
    """Samples per second over those of as many independent nodes."""
    samples_per_s: float | None

    @property
    def speedup(self) -> float:
        """Speed relative to one node."""
        return self.efficiency * self.num_nodes


def ways(*, accumulate: int, local_steps: int | None) -> list[Way]:
    """Return the strategies to compare."""
    found = [
        Way(name="ddp"),
        Way(name="--compress bf16", compress="bf16"),
        Way(name="--compress powersgd", compress="powersgd"),
        Way(name=f"--accumulate {accumulate}", accumulate=accumulate),
    ]
    if local_steps:
        found.append(Way(name=f"--diloco {local_steps}", local_steps=local_steps))
    return found


def forecast(way: Way, job: Job, curve: Curve, num_nodes: int) -> Forecast:
    """Forecast a strategy on a number of nodes."""
    sum_s = curve.seconds(SMALL_BYTES, num_nodes)
    computing_s = job.step_s * way.accumulate
    if num_nodes == 1:
        step_s = computing_s
        exchange_s = 0.0
    elif way.local_steps:
        exchange_s = sum(curve.seconds(size, num_nodes) for size in buckets(job.size_bytes, first=False))
        num_sums = 1 + int(way.local_steps * job.step_s / SUMS_EVERY_S)
        step_s = computing_s + (exchange_s + num_sums * sum_s) / way.local_steps
    else:
        messages = _messages(way, job, curve, num_nodes)
        exchange_s = sum(seconds for _, seconds in messages)
        step_s = computing_s - job.step_s + _overlapped(job.step_s, messages) + sum_s
    return Forecast(
        way=way,
        num_nodes=num_nodes,
        step_s=step_s,
        exchange_s=exchange_s,
        efficiency=computing_s / step_s,
        samples_per_s=None if job.batch is None else num_nodes * job.batch * way.accumulate / step_s,
    )


def buckets(size_bytes: float, *, first: bool = True) -> list[float]:
    """Split this many bytes into DDP's buckets; `first`: the first one is small, so that sending can start early."""
    found = [min(size_bytes, FIRST_BUCKET_BYTES)] if first else []
    left = size_bytes - sum(found)
    while left > 0:
        found.append(min(left, BUCKET_BYTES))
        left -= found[-1]
    return found


def _messages(way: Way, job: Job, curve: Curve, num_nodes: int) -> list[tuple[float, float]]:
    """Return for each bucket its share of the gradients, and the seconds to send it."""
    found = []
    for size in buckets(job.size_bytes):
        share = size / job.size_bytes
        if way.compress == "powersgd":
            whole = job.num_parameters * 2 / MATRIX if job.powersgd_numbers is None else job.powersgd_numbers
            # Two thin matrices, one after the other, and the parameters that are not matrices.
            seconds = 3 * curve.seconds(whole * 4 * share / 3, num_nodes)
        else:
            sent = size if way.compress == "off" else share * job.num_parameters * 2
            seconds = curve.seconds(sent, num_nodes)
        found.append((share, seconds))
    return found


def _overlapped(step_s: float, messages: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a DDP step: a bucket is sent once it is ready and the previous one has been sent."""
    free_at = 0.0
    ready_share = 0.0
    for share, seconds in messages:
        ready_share += share
        ready_at = step_s * (1 - BACKWARD) + step_s * BACKWARD * ready_share
        free_at = max(ready_at, free_at) + seconds
    return max(step_s, free_at)


# --- which way ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecasts of all strategies on all numbers of nodes, and a recommendation."""

    job: Job
    rows: tuple[tuple[Forecast, ...], ...]
    """One row per strategy, with a forecast for each number of nodes."""
    sentence: str


def plan(
    job: Job,
    curve: Curve,
    *,
    nums_nodes: Sequence[int],
    accumulate: int = 4,
    local_steps: int | None = None,
    link_text: str,
) -> Plan:
    """Compare all strategies, and recommend one for the largest number of nodes.

    Args:
        job: the job to forecast.
        curve: of the network between the nodes.
        nums_nodes: numbers of nodes, increasing.
        accumulate: micro-batches per exchange to try.
        local_steps: H of local SGD; None: the smallest of `HS` that is efficient enough.
        link_text: description of the network.
    """
    most = nums_nodes[-1]
    chosen = local_steps or enough_local_steps(job, curve, most)
    rows = tuple(
        tuple(forecast(way, job, curve, number) for number in nums_nodes)
        for way in ways(accumulate=accumulate, local_steps=chosen)
    )
    return Plan(job=job, rows=rows, sentence=advise(job, [row[-1] for row in rows], link_text))


def enough_local_steps(job: Job, curve: Curve, num_nodes: int) -> int:
    """Return the smallest H of `HS` whose efficiency is at least `GOOD`, else the largest."""
    for number in HS:
        way = Way(name="", local_steps=number)
        if forecast(way, job, curve, num_nodes).efficiency >= GOOD:
            return number
    return HS[-1]


def advise(job: Job, found: Sequence[Forecast], link_text: str) -> str:
    """Return the recommendation, from the forecasts of all strategies (DDP first) for one number of nodes."""
    ddp, *others = found
    model = f"{parameters_text(job.num_parameters)} parameters"
    costs = f"{seconds_of(ddp.exchange_s)} of communication for {seconds_of(job.step_s)} of compute"
    begin = f"with {link_text} between nodes, {model}: {costs}; "
    if ddp.num_nodes == 1:
        return f"{model}: with one node there is nothing to send"
    nodes = f"{ddp.num_nodes} nodes"
    if ddp.efficiency >= GOOD:
        return f"{begin}use ddp on {nodes}: {_share(ddp)}"
    # Strategies that change the training least come first: half precision, a larger batch, local SGD. PowerSGD is not
    # recommended, as the forecast does not include its compute time.
    offers = [each for each in others if each.way.compress != "powersgd"]
    good = next((each for each in offers if each.efficiency >= GOOD), None)
    best = good or max(offers, key=lambda each: each.efficiency)
    larger = f" (a batch {best.way.accumulate} times as large)" if best.way.accumulate > 1 else ""
    use = f"use {best.way.name}{larger}: {_share(best)}"
    if best.speedup < WORTH:
        return f"{begin}stay on one node: the best of {nodes} would be {_share(best)}, by {best.way.name}"
    if ddp.speedup < WORTH:
        return f"{begin}stay on one node, or {use}"
    return f"{begin}{nodes} by ddp give {ddp.speedup:.1f} times one node's speed ({_share(ddp)}); {use}"


def _share(found: Forecast) -> str:
    return f"{found.efficiency:.2f}"


def parameters_text(number: int) -> str:
    """Format a number of parameters with three digits: ``110 M``, ``6.7 G``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}" if number < 999.5 * size else f"{number / size:,.0f} {unit}"
    return str(number)


def seconds_of(seconds: float) -> str:
    """Format seconds: ``3.6 s``, ``12 ms``."""
    if seconds >= 0.0995:
        return f"{seconds:,.2g} s" if seconds < 99.5 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.2g} ms" if seconds >= 9.95e-5 else f"{math.ceil(seconds * 1e6)} µs"
