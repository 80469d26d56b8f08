"""Measure how long this node's ranks wait for others, and what keeps them from running. Standard library only.

kit's training module reports how long its ranks wait (training/reporting/waits.py). For other scripts the kernel tells:
a rank's main thread sleeps in a collective of gloo, and runs or wants a core when it works. While NCCL waits, the
thread spins; so ranks on GPUs have their stacks sampled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from nodekit.deploy.agent.stragglers.naming import NodeWindow, RankShare
from nodekit.deploy.agent.stragglers.sampled import Sampled

WAITS = ".waits"
"""Prefix of the files, beside the progress files, in which ranks report how long they have waited so far."""
_QUEUED_BYTES = 32 * 1024
_ESTABLISHED = "01"


class _Totals(NamedTuple):
    """A rank's running totals, in seconds; the difference of two gives a window."""

    at: float
    running_s: float
    """Time in which the main thread ran, or could have run."""
    starved_s: float
    """Time in which the main thread could have run, but had no core."""
    waits: Mapping[str, float] | None
    """The rank's own report; None if it writes none."""


class Measure:
    """The measurements of one attempt: `look` once a second, and take a `window` now and then."""

    def __init__(
        self,
        pids: Mapping[int, int],
        progress: Path,
        peers: Mapping[str, str],
        samples: Callable[[], Mapping[int, Sampled]] | None = None,
    ) -> None:
        """Begin the first window.

        Args:
            pids: rank → pid.
            progress: the folder of the progress files.
            peers: address → name, of the other nodes.
            samples: returns rank → shares of the present window's samples, for ranks on GPUs that report no waits.
        """
        self._pids, self._progress, self._peers = dict(pids), progress, dict(peers)
        self._samples = samples
        self._number = self._num_looks = 0
        self._queued: dict[str, int] = {}
        self._totals = {rank: self._total(rank) for rank in self._pids}

    @property
    def all_tell(self) -> bool:
        """Whether all ranks had reported, by the end of the last window, how long they wait."""
        return all(total.waits for total in self._totals.values())

    def look(self) -> None:
        """Count the peers for which data waits to be sent; call it once a second."""
        self._num_looks += 1
        for peer in _full_queues(self._peers):
            self._queued[peer] = self._queued.get(peer, 0) + 1

    def window(self, clock: float | None = None) -> NodeWindow:
        """Return the measurements since the last window, and begin another; `clock`: of the slowest GPU, in MHz."""
        ranks = {}
        samples = None if self._samples is None else self._samples()
        for rank, before in self._totals.items():
            self._totals[rank] = now = self._total(rank)
            share = _share(before, now)
            if share is not None and samples is not None and not now.waits:
                found = samples.get(rank)
                share = share._replace(own=found.own, loading=found.loading) if found else None
            if share is not None:
                ranks[rank] = share
        queued = {
            peer: round(self._queued.get(peer, 0) / max(1, self._num_looks), 3)
            for peer in self._peers.values()
        }
        self._number, self._num_looks, self._queued = self._number + 1, 0, {}
        return NodeWindow(self._number, ranks, queued, clock)

    def _total(self, rank: int) -> _Totals:
        pid = self._pids[rank]
        ran_s, starved_s = _scheduled(pid)
        waits = None
        with contextlib.suppress(OSError, ValueError):
            waits = json.loads((self._progress / f"{WAITS}{rank}").read_text(encoding="utf-8"))
        return _Totals(time.monotonic(), ran_s + starved_s, starved_s, waits)


def _share(before: _Totals, now: _Totals) -> RankShare | None:
    seconds = now.at - before.at
    if seconds <= 0:
        return None
    starved = min(1.0, max(0.0, now.starved_s - before.starved_s) / seconds)
    if now.waits and before.waits:
        passed = {name: now.waits[name] - before.waits[name] for name in now.waits}
        if passed["steps"] > 0 and passed["seconds"] > 0:
            return RankShare(
                round(max(0.0, 1 - passed["waited_s"] / passed["seconds"]), 3),
                round(starved, 3),
                round(min(1.0, passed["loading_s"] / passed["seconds"]), 3),
                round(passed["seconds"] / passed["steps"], 6),
            )
    if now.waits:  # no step was done, or the rank has just begun to report: nothing is known of this window
        return None
    own = min(1.0, max(0.0, now.running_s - before.running_s) / seconds)
    return RankShare(round(own, 3), round(starved, 3))


def _scheduled(pid: int) -> tuple[float, float]:
    """Return the seconds that a process's main thread has run, and those in which it could have run but had no core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        return int(fields[0]) / 1e9, int(fields[1]) / 1e9
    return 0.0, 0.0


def _full_queues(peers: Mapping[str, str]) -> set[str]:
    """Return the names of the nodes, of `peers` (address → name), for which much data waits to be sent."""
    found: set[str] = set()
    if not peers:  # reading the table takes the kernel 2 ms on a host with much memory
        return found
    wanted = {_as_kernel(address): name for address, name in peers.items()}
    with contextlib.suppress(OSError), open("/proc/net/tcp", encoding="ascii") as file:  # noqa: PTH123
        for line in file:
            fields = line.split()
            name = wanted.get(fields[2].partition(":")[0]) if len(fields) > 4 else None
            if name and fields[3] == _ESTABLISHED and int(fields[4].partition(":")[0], 16) > _QUEUED_BYTES:
                found.add(name)
    return found


def _as_kernel(address: str) -> str:
    """Return an IPv4 address as /proc/net/tcp writes it; "" for any other."""
    with contextlib.suppress(OSError):
        (number,) = struct.unpack("=I", socket.inet_aton(address))
        return f"{number:08X}"
    return ""
