"""Find, together with the other agents of a round, whether its ranks hang, and which rank holds up the others."""

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

from nodekit.deploy.agent.hang import culprit, flight, hang
from nodekit.deploy.agent.hang.stacks import Stack, can_answer, stacks
from nodekit.deploy.agent.rendezvous.formed import DONE, Formed
from nodekit.deploy.agent.telemetry.event_log import EventLog

LOOK_S = 1.0  # between two checks of the ranks' progress
STACKS_S = 10.0  # how long reading the stacks of a node's ranks may take
RECORDS_S = 5.0  # how long the ranks may take to dump their flight recorders
_POLL_S = 0.05


class HangDiagnosis:
    """One node's part in finding a hang and its culprit; kept for all rounds, since it learns the pace of the job."""

    def __init__(self, setting: float | Literal["auto", "never"], record: EventLog) -> None:
        """`setting` is the inventory's ``timings.hang``."""
        self._is_off = setting == "never"
        self._watch = hang.Watch(hang=setting)
        self._record = record

    def begin(
        self,
        formed: Formed,
        pids: Mapping[int, int],
        logs: Mapping[int, Path],
        recorder: Mapping[str, str] | None = None,
    ) -> None:
        """Begin another round; `pids` and `logs`: of this node's ranks; `recorder`: the ranks' `flight.environment`."""
        self._formed, self._pids, self._logs, self._recorder = formed, pids, logs, recorder or {}
        self._has_told_of_start = False
        self.active_s: float | None = None
        """After a hang: seconds from the attempt's beginning to the last sign of life of any rank on any node."""
        self.is_stepless = False
        """After a hang: whether no rank, on any node, had reported progress in this attempt."""
        self.behind: tuple[int, ...] = ()
        """After a hang: the ranks that hold up the others; empty if all ranks hang."""
        self.may_stay = False
        """After a hang: whether the other ranks may go on in the next attempt, with their last step."""
        self._look_at = 0.0
        self._watch.begin()

    def finds_a_hang(self, pause: Callable[[], None], *, has_ended: bool = False) -> bool:
        """Whether the ranks hang, and must be restarted; if so, report the culprit.

        Args:
            pause: called again and again while this waits for the other nodes.
            has_ended: whether some of this node's ranks have succeeded.
        """
        if self._is_off or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        progress = self._record.progress()
        sizes = {rank: _size(log, self._pids.get(rank, 0)) for rank, log in self._logs.items()}
        self._watch.observe(time.monotonic(), progress, sizes)
        suspicion = self._watch.suspect(time.monotonic())
        if suspicion is not None and self._record.cannot_be_told():
            self._watch.excuse()
            suspicion = None
        text = suspicion.text if suspicion else ""
        store = self._formed.store
        try:
            if suspicion is None and store.get("hang") is None:
                self._tell_of_start(pause)
                return self._lingers(has_ended=has_ended)
            self._share("hang", logs=self._logs)
            blamed, own = self._explain("hang", pause)
            self._record.event("hang", text=text, line=blamed.line, stack=own)
            has_others = len(blamed.ranks) < self._formed.world_size
            self.behind = blamed.ranks if has_others else ()
            # After a hang before any step, the cause may lie in the other ranks' state or processes: renew them too.
            self.may_stay = has_others and not self.is_stepless
        except RuntimeError as error:  # the store is unreachable
            if suspicion is None:
                return False
            self._record.event("hang", text=text, why=str(error))
        return True

    def _tell_of_start(self, pause: Callable[[], None]) -> None:
        """Report which rank keeps a silent job from its first step; end nothing, since the job may only be slow."""
        if self._has_told_of_start or self._watch.has_begun:
            return
        if self._watch.is_silent(time.monotonic()) or self._formed.store.get("start") is not None:
            self._has_told_of_start = True
            self._share("start", logs=None)
            self._explain("start", pause)

    def _lingers(self, *, has_ended: bool) -> bool:
        """Whether ranks are silent and do not end although others have succeeded."""
        quiet_s = self._watch.quiet_s(time.monotonic())
        if quiet_s < self._watch.limit_s or not (has_ended or self._has_any_ended):
            return False
        self._watch.be_more_patient()  # the cause may be a long save
        found = stacks(self._pids, python=sys.executable, timeout_s=STACKS_S)
        self._record.event("lingering", stacks={rank: each.text for rank, each in found.items()})
        return True

    @property
    def _has_any_ended(self) -> bool:
        return len(self._formed.without(DONE)) < len(self._formed.members)

    def _share(self, key: str, logs: Mapping[int, Path] | None) -> None:
        """Ask the other nodes for their stacks, and publish this node's; with `logs`, reading one may end its rank."""
        self._formed.store.set(key, "")
        asked = [rank for rank, pid in self._pids.items() if can_answer(pid)]
        records = flight.ask(self._recorder, asked, timeout_s=RECORDS_S)
        found = stacks(self._pids, python=sys.executable, timeout_s=STACKS_S, logs=logs)
        progress = self._record.progress()
        said = [{rank: asdict(each) for rank, each in part.items()} for part in (found, progress)]
        signs = {"active_s": self._watch.active_s, "has_begun": self._watch.has_begun}
        self._formed.store.set(f"{key}/{self._formed.group_rank}", json.dumps([*said, records, signs]))

    def _explain(self, key: str, pause: Callable[[], None]) -> tuple[culprit.Culprit, list[str]]:
        """Wait a limited time for the nodes' stacks; return the culprit, and its stack without kit's frames."""
        formed, deadline = self._formed, time.monotonic() + RECORDS_S + 2 * STACKS_S
        parts, nodes = [], {}
        for group_rank, name in enumerate(formed.names):
            while (said := formed.store.get(f"{key}/{group_rank}")) is None and time.monotonic() < deadline:
                pause()
                time.sleep(_POLL_S)
            if said is not None:
                parts.append(json.loads(said))
                nodes.update({int(rank): name for rank in parts[-1][0]})
        found = {int(rank): Stack.load(each) for part in parts for rank, each in part[0].items()}
        progress = {int(rank): hang.Progress(**each) for part in parts for rank, each in part[1].items()}
        records = {int(rank): flight.load(each) for part in parts for rank, each in part[2].items()}
        if key == "hang":
            self.active_s = max((float(part[3]["active_s"]) for part in parts), default=None)
            self.is_stepless = not any(part[3]["has_begun"] for part in parts)
        blamed = culprit.explain(
            found,
            progress,
            records=records,
            nodes=nodes,
            world_size=formed.world_size,
            on_gpus=int(os.environ.get("NODEKIT_NUM_GPUS") or 0) > 0,
        )
        own = list(
            itertools.takewhile(lambda line: "deploy/agent/ranks/forkserver.py" not in line, blamed.stack)
        )
        if formed.group_rank == 0:  # only one node reports to the user
            shown = [f"    {line}" for line in own if "<frozen runpy>" not in line]
            is_start = "no first step yet: " if key == "start" else ""
            self._record.update(notice="\n".join([is_start + blamed.line, *shown]))
        return blamed, own


def _size(log: Path, pid: int) -> int:
    # A rank whose log was removed still writes to the open file, and must not be taken for silent.
    for path in (log, f"/proc/{pid}/fd/1"):
        with contextlib.suppress(OSError):
            return os.stat(path).st_size  # noqa: PTH116  # once a second and rank
    return 0
