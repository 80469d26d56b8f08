"""What a job writes in the shared folder while it runs, read through the login node: events, logs, statuses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from nodekit.deploy.connect.link import Link
from nodekit.deploy.host.node.schema import NodeStatus
from nodekit.deploy.records import events
from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen.view import status_line
from nodekit.slurm.login import CALL_TIMEOUT_S, read
from nodekit.slurm.show import leader_folder, now, record_of

LOST = "lost"  # the line of a node that the leader counts out
_TAIL_BYTES = 65536
_OF_A_RANK = re.compile(r"(\S+):(\d+) +\| (.*)")


class Source:
    """What is new in the shared folder."""

    def __init__(self, run: Run, link: Link) -> None:
        self._run = run
        self._link = link
        self._folder = leader_folder(run)
        self._events_at: Sequence[Any] = ("", 0)
        self._offsets: dict[str, int] | None = None
        self._nodes: list[str] = []

    def events(self) -> list[events.Event]:
        """Those of the leader's record since the last call."""
        found = self._link.call(
            "hostfollow.events",
            timeout_s=CALL_TIMEOUT_S,
            node_dir=self._folder,
            file=self._events_at[0],
            offset=self._events_at[1],
        )
        if found:
            self._events_at = found[-1][:2]
        return events.parse_all(line for _, _, line in found)

    def logs(self) -> list[tuple[str, str, str]]:
        """Lines of the ranks, as the leader shows them: node, rank, line."""
        self._offsets, found = self._link.call(
            "hostfollow.logs",
            timeout_s=CALL_TIMEOUT_S,
            node_dir=f"{self._run.slurm['run_dir']}/slurm",
            offsets=self._offsets,
            tail_bytes=_TAIL_BYTES if self._offsets is None else None,
        )
        lines = (line for _, text in found for line in text.splitlines())
        return [(told[1], told[2], told[3]) for line in lines if (told := _OF_A_RANK.fullmatch(line))]

    def statuses(self) -> tuple[dict[str, NodeStatus], dict[str, str]]:
        """Each node's status as the leader has heard it, and its line; none before the leader has a record."""
        if not self._nodes:
            record = record_of(self._run, self._link)
            self._nodes = list(record.nodes) if record else []
            if not self._nodes:
                return {}, {}
        told = json.loads(read(self._link, f"{self._run.slurm['run_dir']}/slurm/absent.json") or "{}")
        absent = told.get("nodes", []) if told.get("job") == self._run.slurm["job_id"] else []
        heard = now(self._run, self._link)
        found = {name: heard[name] for name in self._nodes if name in heard}
        lines = {name: status_line(found.get(name, {}), now=time.time()) for name in self._nodes}
        return found, {**lines, **dict.fromkeys(absent, LOST)}
