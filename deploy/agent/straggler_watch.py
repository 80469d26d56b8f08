"""Find, together with the other agents of a round, the rank, node or link that makes the others wait."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping

from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.stragglers import naming
from nodekit.deploy.agent.stragglers.measure import Measure
from nodekit.deploy.agent.stragglers.sampled import Sampler
from nodekit.deploy.agent.telemetry.event_log import EventLog

LOOK_S = 1.0  # between two measurements
SAY_AGAIN_S = 600.0  # how long until the same node is reported again


class StragglerWatch:
    """One node's part in the search; the node of rank 0 compares the nodes' measurements, and reports."""

    def __init__(self, record: EventLog, window_s: float) -> None:
        self._record, self._window_s = record, window_s
        self._said: dict[str, float] = {}

    def begin(self, formed: Formed, pids: Mapping[int, int]) -> None:
        """Begin another round; `pids`: rank → pid, of this node's ranks."""
        self._formed = formed
        peers = {
            str(each["address"]): str(each["name"])
            for number, each in enumerate(formed.members)
            if number != formed.group_rank and each.get("address")
        }
        self._is_alone = len(formed.members) < 2 and len(pids) < 2
        self._sampler = None
        if int(os.environ.get("NODEKIT_NUM_GPUS") or 0) and not self._is_alone:
            self._sampler = Sampler(pids, python=sys.executable)
            self._sampler.begin(self._window_s)
        samples = self._sampler.shares if self._sampler else None
        self._measure = Measure(pids, self._record.progress_dir, peers, samples)
        self._windows: deque[dict[str, naming.NodeWindow]] = deque(maxlen=naming.NUM_WINDOWS)
        self._look_at = 0.0
        self._window_at = time.monotonic() + self._window_s
        self._record.update(slow=None)

    def look(self) -> None:
        """Measure if `LOOK_S` has passed; publish, and on the node of rank 0 compare, if the window is over.

        Raises:
            RuntimeError: the store is unreachable.
        """
        now = time.monotonic()
        if self._is_alone or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._measure.look()
        if now < self._window_at:
            return
        self._window_at = now + self._window_s
        own = self._measure.window(self._record.gpu_clock)
        if self._sampler and not self._measure.all_tell:
            self._sampler.begin(self._window_s)
        self._formed.store.set(f"slow/{self._formed.group_rank}", json.dumps(own.to_json()))
        if self._formed.group_rank == 0:
            self._compare()

    def _compare(self) -> None:
        """Compare the nodes' latest windows, once every node has published one, and report a straggler."""
        window = {}
        for number, node in enumerate(self._formed.names):
            if (said := self._formed.store.get(f"slow/{number}")) is not None:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    window[node] = naming.NodeWindow.load(json.loads(said))
        if len(window) < len(self._formed.names):
            return
        self._windows.append(window)
        found = naming.name(list(self._windows))
        self._record.update(
            slow={"node": found.node, "cause": found.cause, "of_host": found.is_of_the_host}
            if found
            else None
        )
        if found and time.monotonic() >= self._said.get(found.node, 0.0):
            self._said[found.node] = time.monotonic() + SAY_AGAIN_S
            self._record.event(
                "slow",
                about=found.node,
                ranks=list(found.ranks),
                cause=found.cause,
                line=found.line,
                windows=[{name: each.to_json() for name, each in window.items()} for window in self._windows],
            )
            self._record.update(notice=found.line)
