"""The agents of a round find out together whether their ranks hang, and which rank holds up the others."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from nodekit.deploy.agent.hang import culprit, hang
from nodekit.deploy.agent.hang.stacks import Stack, stacks
from nodekit.deploy.agent.rendezvous.rendezvous import Formed
from nodekit.deploy.agent.telemetry.event_log import EventLog

DONE = "done"
"""What a node tells the others of its round when all its ranks have ended well."""
LOOK_S = 1.0  # how often is looked
STACKS_S = 10.0  # to read the stacks of all ranks
_POLL_S = 0.05


class HangDiagnosis:
    """One node's part of it, through all rounds: what was learnt of the job's pace stays."""

    def __init__(self, setting: float | Literal["auto", "never"], record: EventLog) -> None:
        """`setting` is the inventory's ``timings.hang``."""
        self._is_off = setting == "never"
        self._watch = hang.Watch(hang=setting)
        self._record = record

    def begin(self, formed: Formed, pids: Mapping[int, int], logs: Mapping[int, Path]) -> None:
        """Another round; `pids` and `logs` are this node's, by rank."""
        self._formed, self._pids, self._logs = formed, pids, logs
        self._look_at = 0.0
        self._watch.begin()

    def finds_a_hang(self, pause: Callable[[], None], *, has_ended: bool = False) -> bool:
        """Whether the workers are to be ended and started anew; why is told. `pause` is called while it waits.

        `has_ended`: some of this node's have ended well.
        """
        if self._is_off or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        progress = hang.read_progress(self._record.progress_dir)
        self._watch.observe(
            time.monotonic(), progress, {rank: _size(log) for rank, log in self._logs.items()}
        )
        suspicion = self._watch.suspect(time.monotonic())
        text = suspicion.text if suspicion else ""
        store = self._formed.store
        try:
            if suspicion is None and store.get("hang") is None:
                return self._lingers(has_ended=has_ended)
            store.set("hang", "")
            found = stacks(self._pids, python=sys.executable, timeout_s=STACKS_S, logs=self._logs)
            said = [{rank: asdict(each) for rank, each in part.items()} for part in (found, progress)]
            store.set(f"hang/{self._formed.group_rank}", json.dumps(said))
            self._explain(text, pause)
        except RuntimeError as error:  # the store is lost
            if suspicion is None:
                return False
            self._record.event("hang", text=text, why=str(error))
        return True

    def _lingers(self, *, has_ended: bool) -> bool:
        """Whether workers do not end, and say nothing any more, though others have ended well."""
        quiet_s = self._watch.quiet_s(time.monotonic())
        if quiet_s < self._watch.limit_s or not (has_ended or self._has_any_ended):
            return False
        self._watch.be_more_patient()  # it may have been a long save
        found = stacks(self._pids, python=sys.executable, timeout_s=STACKS_S)
        self._record.event("lingering", stacks={rank: each.text for rank, each in found.items()})
        return True

    @property
    def _has_any_ended(self) -> bool:
        return len(self._formed.without(DONE)) < len(self._formed.members)

    def _explain(self, suspicion: str, pause: Callable[[], None]) -> None:
        """Name who is behind, by the stacks of all ranks that come in time."""
        formed, deadline = self._formed, time.monotonic() + 2 * STACKS_S
        parts, nodes = [], {}
        for group_rank, name in enumerate(formed.names):
            key = f"hang/{group_rank}"
            while (said := formed.store.get(key)) is None and time.monotonic() < deadline:
                pause()
                time.sleep(_POLL_S)
            if said is not None:
                parts.append(json.loads(said))
                nodes.update({int(rank): name for rank in parts[-1][0]})
        found = {int(rank): Stack.load(each) for part in parts for rank, each in part[0].items()}
        progress = {int(rank): hang.Progress(**each) for part in parts for rank, each in part[1].items()}
        blamed = culprit.explain(found, progress, nodes=nodes, world_size=formed.world_size)
        own = list(
            itertools.takewhile(lambda line: "deploy/agent/ranks/forkserver.py" not in line, blamed.stack)
        )
        self._record.event("hang", text=suspicion, line=blamed.line, stack=own)
        if formed.group_rank == 0:  # one is enough to tell the user
            shown = [f"    {line}" for line in own if "<frozen runpy>" not in line]
            self._record.update(notice="\n".join([blamed.line, *shown]))


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size  # noqa: PTH116  # once a second and rank
    return 0
