"""Name the rank, node or link that makes others wait, by the nodes' last measurements. Pure; standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

NUM_WINDOWS = 4
"""How many windows in a row must show the same straggler before it is reported."""
GAP = 0.2
"""How much larger a slow rank's share of time without waiting must be than that of all other ranks."""
LEAST_COST_S = 0.01
"""How much a slow rank must cost each step; less is rank 0's report between quick steps, which is no fault."""
_STARVED = 0.15
_SLOWER_CLOCK = 0.9
_FULL, _EMPTY = 0.5, 0.25
_MOSTLY_WAITING = 0.7

Cause = Literal["cpu", "gpu", "link", "loader", ""]
OF_THE_HOST: tuple[Cause, ...] = ("cpu", "gpu", "link")
"""The causes that another host would not have; a loader, or more work to compute, is the job's own."""


class RankShare(NamedTuple):
    """What a rank did in a window, in shares (0 to 1) of its time."""

    own: float
    """Time in which the rank did not wait for others."""
    starved: float = 0.0
    """Time in which the rank could have run, but had no core."""
    loading: float = 0.0
    """Time in which the rank waited for its data."""
    step_s: float | None = None
    """How long a step took; None if the rank does not report it."""


@dataclass(frozen=True)
class NodeWindow:
    """The measurements of one node in one window."""

    number: int
    """Counts the node's windows."""
    ranks: Mapping[int, RankShare]
    queued: Mapping[str, float] = field(default_factory=dict)
    """Peer → the share of time in which much data for that node waited to be sent."""
    clock: float | None = None
    """Of the node's slowest GPU, in MHz."""

    def to_json(self) -> dict[str, Any]:
        """Return the window as a dictionary for JSON."""
        return {"number": self.number, "ranks": self.ranks, "queued": self.queued, "clock": self.clock}

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> NodeWindow:
        """Build the window from JSON."""
        ranks = {int(rank): RankShare(*share) for rank, share in fields["ranks"].items()}
        return cls(fields["number"], ranks, fields["queued"], fields["clock"])


Window = Mapping[str, NodeWindow]
"""Node → its measurements in the same window."""


@dataclass(frozen=True)
class Straggler:
    """The node, ranks or link that make the others wait."""

    node: str
    ranks: tuple[int, ...]
    """The slow ranks of that node; empty for a link."""
    cause: Cause
    """The cause; "" if no measurement explains it."""
    line: str
    """A sentence for the user."""
    is_certain: bool = True
    """False for a link if either of its ends may be the cause."""

    @property
    def is_of_the_host(self) -> bool:
        """Whether the job would be quicker without this node."""
        return self.cause in OF_THE_HOST and self.is_certain


def name(windows: Sequence[Window]) -> Straggler | None:
    """Return the straggler that each of the last windows shows; None if there is none, or not always the same."""
    last = windows[-NUM_WINDOWS:]
    if len(last) < NUM_WINDOWS:
        return None
    slow = [_slow(window) for window in last]
    if any(each is None for each in slow):
        return _slow_link(last)
    nodes = {each[0] for each in slow if each}
    ranks = set.intersection(*(set(each[1]) for each in slow if each))
    return _told((nodes.pop(), tuple(sorted(ranks))), last) if len(nodes) == 1 and ranks else None


def _slow(window: Window) -> tuple[str, tuple[int, ...]] | None:
    """Return the node, and its ranks, that wait clearly less than all other ranks; None if there is no such node."""
    shares = {(node, rank): each for node, own in window.items() for rank, each in own.ranks.items()}
    ordered = sorted(shares, key=lambda key: -shares[key].own)
    for number in range(1, len(ordered) // 2 + 1):
        slow, others = ordered[:number], ordered[number:]
        gap = shares[slow[-1]].own - shares[others[0]].own
        if gap < GAP:
            continue
        step_s = shares[slow[0]].step_s
        if step_s is not None and gap * step_s < LEAST_COST_S:
            return None
        nodes = {node for node, _ in slow}
        return (nodes.pop(), tuple(sorted(rank for _, rank in slow))) if len(nodes) == 1 else None
    return None


def _told(found: tuple[str, tuple[int, ...]], windows: Sequence[Window]) -> Straggler:
    node, ranks = found
    slow = [window[node].ranks[rank] for window in windows for rank in ranks]
    others = [
        each
        for window in windows
        for other, own in window.items()
        for rank, each in own.ranks.items()
        if (other, rank) not in {(node, each) for each in ranks}
    ]
    own_waits, they_wait = (1 - statistics.fmean(each.own for each in which) for which in (slow, others))
    gap = they_wait - own_waits
    starved, loading = (
        [statistics.fmean(getattr(each, what) for each in which) for which in (slow, others)]
        for what in ("starved", "loading")
    )
    clocks = {
        other: statistics.fmean(each.clock for each in of if each.clock is not None)
        for other in windows[-1]
        if (of := [window[other] for window in windows if other in window])
        and all(each.clock is not None for each in of)
    }
    usual = statistics.median([clock for other, clock in clocks.items() if other != node] or [0.0])
    cause: Cause = ""
    why = "its own work takes longer, and neither its CPU nor its loader is the reason"
    if starved[0] > _STARVED and starved[0] > starved[1] + _STARVED:
        cause = "cpu"
        why = (
            f"it had to wait for a core {starved[0]:.0%} of the time: other processes, or a limit on its CPU"
        )
    elif clocks.get(node, usual) < _SLOWER_CLOCK * usual:
        cause, why = "gpu", f"its GPU runs at {clocks[node]:.0f} MHz, those of the others at {usual:.0f}"
    elif loading[0] - loading[1] > gap / 2:
        cause, why = (
            "loader",
            f"it waits for its data {loading[0]:.0%} of the time, the others {loading[1]:.0%}",
        )
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    line = (
        f"{who} on {node} {'makes' if len(ranks) == 1 else 'make'} the others wait: they wait {they_wait:.0%} of the "
        f"time, and {'it' if len(ranks) == 1 else 'these'} {own_waits:.0%}; {why}"
    )
    return Straggler(node, ranks, cause, line)


def _slow_link(windows: Sequence[Window]) -> Straggler | None:
    """Return the link in which data nearly always waits, if no other link is so full, and ranks mostly wait."""
    shares = [each.own for window in windows for own in window.values() for each in own.ranks.values()]
    if not shares or statistics.fmean(shares) > _MOSTLY_WAITING:
        return None
    sums: dict[tuple[str, str], float] = {}
    for window in windows:
        for node, own in window.items():
            for peer, share in own.queued.items():
                sums[node, peer] = sums.get((node, peer), 0.0) + share / len(windows)
    full = sorted((link for link, share in sums.items() if share >= _FULL), key=lambda link: -sums[link])
    rest = max((share for link, share in sums.items() if link not in full), default=0.0)
    is_clear = len(sums) > len(full) and rest <= _EMPTY
    if not full or not is_clear:
        return None
    common = set(full[0]).intersection(*full)
    if not common:
        return None
    waits = f"data waits in it {sums[full[0]]:.0%} of the time, in the others {rest:.0%} at most"
    if len(full) == 1:
        source, target = full[0]
        line = f"the link from {source} to {target} makes all wait: {waits}"
        return Straggler(source, (), "link", line, is_certain=False)
    node = sorted(common)[0]
    if len(common) > 1:  # both ways between two
        other = next(each for each in full[0] if each != node)
        line = f"the link between {node} and {other} makes all wait: {waits}"
        return Straggler(node, (), "link", line, is_certain=False)
    return Straggler(node, (), "link", f"the link of {node} makes all wait: {waits}")
