"""This node's ranks, attempt after attempt: started, ended, and why each failed."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nodekit.deploy.agent.hang import flight
from nodekit.deploy.agent.ranks import children
from nodekit.deploy.agent.ranks.failures import (
    NOT_CONNECTED,
    is_cause,
    is_secondary,
    last_words,
    may_be_the_kernels,
    tells_its_end,
)
from nodekit.deploy.agent.ranks.forkserver import ForkServer
from nodekit.deploy.agent.ranks.messages import Kind, Messages
from nodekit.deploy.agent.ranks.target import TRAINING, Target
from nodekit.deploy.agent.ranks.workers import Workers, WorkerStart
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.telemetry.event_log import EventLog
from nodekit.deploy.host import processes, programs
from nodekit.deploy.host.logs.logbook import Logbook
from nodekit.deploy.host.probes import kernel
from nodekit.deploy.host.schema import EventKind, WorkerFailure
from nodekit.training.imports import imports_of
from nodekit.training.options.arguments import OptionsError, read
from nodekit.training.process import stages

LOG_TAIL_BYTES = 64 * 1024
# After this part of the grace, ranks that still wait for others save alone, which takes a while.
STALLED_AFTER = 0.5
EXITS_NO_FAILURE = (0, 143, 144)  # done; stopped, after a snapshot; fenced by a newer generation
STAND_BY_S = 600.0  # how long the ranks of a node that joins may take to import and to read their data
ALSO_S = 0.1  # wait so long for further failures of the same cause, once a rank has said why it failed
# Limits counted in looks, not in seconds: while a machine stands still, or has no core to spare, ranks cannot answer.
LOOK_S = 0.008  # looks that follow each other sooner count as one
UNREAD_LOOKS = 200  # until ranks must have read a message; a look takes one to two hundredths of a second
HEARD_LOOKS = 15  # from then until they must have answered; their main thread may be at work
_POLL_S = 0.02


class Attempts:
    """Starts the ranks of one attempt at a time, and writes down how each has ended."""

    def __init__(self, spec: AgentSpec, record: EventLog, server: ForkServer | None) -> None:
        """No rank is started yet; ranks are forks of `server`, fresh processes without one."""
        self._record = record
        self._name = spec.name
        self._folder = Path(spec.node_dir)
        self._messages = Messages(self._folder / "messages")
        self._told: dict[int, Kind] = {}  # local rank → what it was told of this attempt's end
        self._heard_looks = 0  # looks since all of these have read it
        self._keeping: set[int] = set()  # local ranks that keep their step, or are to pause
        self._staying: set[int] = set()  # local ranks that wait for the next attempt
        self._stayed: set[int] = set()  # local ranks that go on in this attempt from an earlier one
        self._may_stay = False  # whether the ranks of this attempt can go on in another one
        self._have_stayed = False  # whether ranks have, in this attempt or an earlier one
        self._grace_s = spec.grace_s
        self._has_gpus = bool(spec.gpus)
        self._is_own_loop = not is_training_module(spec)
        self._logbook = Logbook(str(self._folder / "logs"), spec.keep_log_bytes, self._say_of_logs)
        self.workers = Workers(server)
        self.workers.preload(imports_for(spec.argv), self._base_environment())
        self._attempt = ""
        self._kernel = kernel.Watch()
        self._standing_by: set[int] = set()  # local ranks that wait for their first attempt
        self._pids_then: Mapping[int, int] = {}  # rank → pid, when `failures` was last called
        self.is_on = False
        """Whether an attempt has begun, and its end is not on record yet."""
        self._world_size = 0
        self.recorder: Mapping[str, str] = {}
        """The environment variables that name the files of torch's flight recorder."""
        self.ranks: dict[int, int] = {}
        """Local rank → rank."""

    def stand_by(self, spec: AgentSpec, pause: Callable[[], None]) -> None:
        """Start the ranks of a node that joins, and wait until they have read their data, before the others pause.

        Only kit's training module and scripts with `run_attempts` can wait for their attempt; that a script is one is
        known once ranks of this run have stayed. For other programs only the imports are prepared.
        """
        if not self._can_stand_by(spec) or self.workers.pids:
            return
        self._record.make_snapshot_dir()
        self._record.forget_progress()
        self.ranks = {local_rank: local_rank for local_rank in range(spec.nproc_per_node)}
        self._expected_snapshot, self._world_size = "", spec.nproc_per_node
        # An estimate: other nodes may have another number of ranks.
        self._start_standing_by(spec, self.ranks, num_ranks=spec.max_nodes * spec.nproc_per_node)
        until = time.monotonic() + STAND_BY_S
        while len(ready := self._in_stage(stages.WAITING)) < len(self.ranks):
            if self.workers.poll() or time.monotonic() > until:
                self.workers.stop(0)
                self._standing_by.clear()
                self._messages.keep_no_more()
                return
            pause()
            self.workers.wait(_POLL_S)
        self._staying = ready

    def replace(self, spec: AgentSpec) -> None:
        """Start ranks in place of those that have ended, to import and read their data while the nodes meet."""
        ended = self.ranks.keys() - self.workers.pids.keys()
        if ended and self._can_stand_by(spec):
            self._start_standing_by(spec, ended, num_ranks=0)

    def _can_stand_by(self, spec: AgentSpec) -> bool:
        return is_training_module(spec) or spec.stands_by or self._have_stayed or bool(self._staying)

    def _start_standing_by(self, spec: AgentSpec, local_ranks: Collection[int], *, num_ranks: int) -> None:
        self._messages.prepare(range(spec.nproc_per_node))
        for local_rank in local_ranks:
            self._messages.keep(local_rank)
            log = Path(self._log_before(local_rank))
            with contextlib.suppress(OSError):
                log.unlink(missing_ok=True)  # of the rank before
                log.touch(mode=0o600)
        starts = [
            WorkerStart(
                local_rank=local_rank,
                argv=spec.argv,
                env={
                    **self._environment(spec, None, local_rank),
                    **flight.read_once(os.environ, torch.__version__),
                    "NODEKIT_STANDBY": str(num_ranks),
                    **_started_now(),
                },
                cwd=spec.code_dir,
                log=self._log_before(local_rank),
            )
            for local_rank in local_ranks
        ]
        self.workers.start_soon(starts)
        self._standing_by.update(local_ranks)

    def prepare(self, spec: AgentSpec, formed: Formed) -> None:
        """Prepare the folders of an attempt, and record which nodes have met for it.

        Raises:
            OSError: the snapshot folder cannot be made, or what is expected in it cannot be read.
        """
        self._messages.prepare(range(spec.nproc_per_node))
        if self._messages.inbox is not None:
            self.workers.wake_by(self._messages.inbox)
            self._messages.hears_of_a_loss()  # of the last attempt
        self._record.make_snapshot_dir()
        self._expected_snapshot = self._record.expected_snapshot
        self._attempt = f"{spec.generation}.{formed.round}"
        first = sum(int(each["nproc"]) for each in formed.members[: formed.group_rank])
        self._world_size = formed.world_size
        self.ranks = {local_rank: first + local_rank for local_rank in range(spec.nproc_per_node)}
        self._record.begin(
            self._attempt,
            ranks=self.ranks.values(),
            group_rank=formed.group_rank,
            log_of_rank_0=self._log_of(0),
        )
        self._record.event(
            "rendezvous",
            attempt=self._attempt,
            group_rank=formed.group_rank,
            num_nodes=len(formed.members),
            members=formed.names,
            master=f"{formed.master_addr}:{formed.master_port}",
        )
        for local_rank in self._standing_by:
            # It goes on writing there until it hears of the attempt. Give the file a second name: it may not even have
            # opened the first one yet.
            before, log = Path(self._log_before(local_rank)), Path(self._log_of(self.ranks[local_rank]))
            with contextlib.suppress(OSError):
                try:
                    log.hardlink_to(before)
                except OSError:  # a file system without such links
                    before.replace(log)
        self._logbook.begin([self._log_of(rank) for rank in self.ranks.values()])
        _name_threads()

    def start(self, spec: AgentSpec, formed: Formed) -> None:
        """Start the ranks; those that have stayed go on."""
        self.recorder = flight.environment(self._record.flight_dir, os.environ, torch.__version__)
        self._kernel.close()
        self._kernel = kernel.Watch()
        starts = [
            WorkerStart(
                local_rank=local_rank,
                argv=spec.argv,
                env=self._environment(spec, formed, local_rank),
                cwd=spec.code_dir,
                log=self._log_of(rank),
            )
            for local_rank, rank in self.ranks.items()
        ]
        ended = self.workers.poll()
        there = self.workers.pids.keys() - ended.keys()
        waiting = there & (self._staying | self._standing_by)
        if there != self.workers.pids.keys():  # some have ended while they stood by
            self.workers.stop(0, staying=lambda: waiting)
        stayed = waiting - self._standing_by
        self._have_stayed |= bool(stayed)
        self._may_stay = self._can_stand_by(spec)
        self._staying, self._standing_by, self._stayed, self._told = set(), set(), stayed, {}
        for start in starts:
            if start.local_rank not in waiting:
                continue
            changes = {key: value for key, value in start.env.items() if os.environ.get(key) != value}
            if not self._messages.send(start.local_rank, {"kind": "next", "env": changes, "log": start.log}):
                os.kill(self.workers.pids[start.local_rank], signal.SIGKILL)  # then it has failed
        anew = [start for start in starts if start.local_rank not in waiting]
        for start in anew:
            self._messages.renew(start.local_rank)
        pids = self.workers.start([replace(start, env={**start.env, **_started_now()}) for start in anew])
        self._started = time.monotonic()
        self._ended: dict[int, float] = {}
        workers = [
            {"local_rank": key, "rank": self.ranks[key], "pid": pid, "start_time": processes.start_time(pid)}
            for key, pid in pids.items()
        ]
        told: dict[str, Any] = {
            "attempt": self._attempt,
            "world_size": self._world_size,
            "workers": workers,
            "stayed": sorted(self.ranks[local_rank] for local_rank in stayed),
        }
        self._record.update(
            state="running",
            rank=self.ranks[0],
            members=formed.names,
            blocked="",
            ended=[],
            waits_for=[],
            **told,
        )
        self._record.event("workers-started", **told)
        self.is_on = True

    def _environment(self, spec: AgentSpec, formed: Formed | None, local_rank: int) -> dict[str, str]:
        """A worker's whole environment: torchrun's variables and ours; without `formed`, as if this node were alone."""
        rank = self.ranks[local_rank]
        group_rank, num_nodes, number = (
            (formed.group_rank, len(formed.members), formed.round) if formed else (0, 1, 0)
        )
        master = (formed.master_addr, formed.master_port) if formed else (spec.local_addr, 0)
        return {
            **self._base_environment(),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
            "GROUP_RANK": str(group_rank),
            "NODE_RANK": str(group_rank),
            "GROUP_WORLD_SIZE": str(num_nodes),
            "ROLE_NAME": "worker",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            # Upstream counts restarts on each node by itself, and has the workers meet under that number: nodes
            # that do not agree would wait for each other for ever. The round is the same on all of them.
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": f"{spec.run_id}.{spec.generation}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            **self.recorder,
            "NODEKIT_GENERATION": str(spec.generation),
            "NODEKIT_SNAPSHOT_DIR": str(self._record.snapshot_dir),
            "NODEKIT_SNAPSHOT_EXPECTED": self._expected_snapshot,
            "NODEKIT_PROGRESS_FILE": str(self._record.progress_dir / f"rank{rank}"),
            "NODEKIT_EVENTS_FILE": str(self._record.told_dir / f"rank{rank}"),
            "NODEKIT_AGENT_PIPE": str(self._messages.path(local_rank)),
        }

    @staticmethod
    def _base_environment() -> dict[str, str]:
        """The part of the environment that all workers of all attempts have in common."""
        return {**os.environ, "PATH": programs.rank_path()}

    def _say_of_logs(self, kind: EventKind, **fields: Any) -> None:
        self._record.event(kind, **fields)
        if kind == "logs-not-bounded":
            self._record.update(notice=f"{self._name}: its logs cannot be kept small: {fields['why']}")

    def _log_of(self, rank: int) -> str:
        return str(self._folder / "logs" / f"rank{rank}-attempt{self._attempt}.log")

    def _log_before(self, local_rank: int) -> str:
        """The log of a rank whose attempt is not known yet."""
        return str(self._folder / f"standby{local_rank}.log")

    @property
    def pids(self) -> dict[int, int]:
        """Rank → pid, of all that were started and not stopped yet."""
        return {self.ranks[local_rank]: pid for local_rank, pid in self.workers.pids.items()}

    @property
    def logs(self) -> dict[int, Path]:
        """Rank → path of its log."""
        return {rank: Path(self._log_of(rank)) for rank in self.ranks.values()}

    @property
    def seconds(self) -> float:
        """Seconds since the ranks were started."""
        return time.monotonic() - self._started

    def poll(self) -> dict[int, int]:
        """Rank → exit code of those that have ended; remember when each was first seen to have."""
        exits = {self.ranks[local_rank]: code for local_rank, code in self.workers.poll().items()}
        for rank in exits:
            self._ended.setdefault(rank, time.time())
        return exits

    def look(self) -> None:
        """Read the logs, and the ranks' progress and events, if it is time to."""
        self._logbook.look()
        self._record.look_soon()

    def failures(self, wait_s: float) -> list[WorkerFailure]:
        """Return the failures of ranks, once all have ended or `wait_s` is over: those that lost a peer may say so.

        Once a rank has said why it failed, do not wait for the others: those that wait in NCCL would not end. A rank
        that was stopped after a snapshot, was fenced, or waits for the next attempt has not failed. `ask_the_kernel`
        adds the kernel's messages.
        """
        deadline, num_ended = time.monotonic() + wait_s, 0
        keeping = self._tell("lost")
        while len(exits := self.poll()) < len(self.ranks) - len(self._stay()):
            if not keeping() and time.monotonic() > deadline:
                break
            if len(exits) > num_ended and self.say_why(exits):
                deadline = min(deadline, time.monotonic() + ALSO_S)
            num_ended = len(exits)
            self.workers.wait(_POLL_S)
        self._logbook.look()
        self._pids_then = self.pids
        return [self._failure(rank, code) for rank, code in exits.items() if code not in EXITS_NO_FAILURE]

    def ask_the_kernel(self, failures: Sequence[WorkerFailure]) -> None:
        """Add the kernel's messages of ranks that it may have killed, or whose GPU or DataLoader worker it may have."""
        for each in failures:
            error, exitcode = each["error"], each["exitcode"]
            if is_secondary(error, exitcode) or not may_be_the_kernels(error, exitcode):
                continue
            listed = re.findall(r"\(pid(?:\(s\))? ([\d, ]+)", error)  # torch names all that have ended
            others = map(int, re.findall(r"\d+", " ".join(listed)))
            pids = [self._pids_then.get(each["rank"], 0), *others]
            each["kernel"] = self._kernel.said(pids)

    def not_connected(self) -> str:
        """What a rank of this attempt has said of another one to which it could not connect; "" if none has."""
        for rank in self.ranks.values():
            if found := NOT_CONNECTED.findall(self._end_of_log(rank)[0]):
                return f"rank {rank}: {found[-1]}"
        return ""

    def say_why(self, exits: Mapping[int, int]) -> bool:
        """Whether the last words of a rank in `exits` are the cause of the end of the whole round."""
        return any(
            code not in EXITS_NO_FAILURE and is_cause(self._last_words(rank, code)[0], code)
            for rank, code in exits.items()
        )

    def _tell(self, kind: Kind, keep_s: float | None = None) -> Callable[[], bool]:
        """Tell the ranks that another one is lost, or to pause since a node comes in.

        The returned function says whether to go on waiting, for at most `keep_s` (None: the spec's grace): a rank keeps
        its last step, or pauses, and is not done with that. A rank that has stayed, and has reported nothing in this
        attempt yet, counts as keeping one; and for a while so does one that has not read the message, or not answered.
        """
        until = time.monotonic() + (self._grace_s if keep_s is None else keep_s)
        for local_rank in self.workers.pids:
            knows = self._told.get(local_rank) in (kind, "lost")
            if not knows and self._messages.send(local_rank, {"kind": kind}):
                self._told[local_rank] = kind
                self._heard_looks = 0
        self._keeping = set()  # remembered, since a rank may report another stage after that
        unread_looks, counted_s = 0, 0.0

        def is_kept() -> bool:
            nonlocal unread_looks, counted_s
            left = self.workers.pids.keys() - self.workers.poll().keys() - self._stay()
            # This is called more often than every LOOK_S: also when a rank reports something, or ends.
            if time.monotonic() > counted_s + LOOK_S:
                counted_s, told = time.monotonic(), left & self._told.keys()
                if unread_looks < UNREAD_LOOKS and any(map(self._messages.is_unread, told)):
                    unread_looks, self._heard_looks = unread_looks + 1, 0
                else:
                    self._heard_looks += 1
            self._keeping.update(self._in_stage(stages.KEEPING, stages.PAUSING))
            self._keeping.update(self._stayed - self._in_stage())
            # A rank that evaluates, or still joins the others, pauses after that.
            self._keeping.update(self._told if kind == "pause" and self._may_stay else ())
            may_answer = self._heard_looks < HEARD_LOOKS and not left.isdisjoint(self._told)
            return time.monotonic() < until and (may_answer or not self._keeping.isdisjoint(left))

        return is_kept

    def pause(self) -> Callable[[], bool]:
        """Tell the ranks to pause, since a node comes in; the returned function says whether some are yet to do so."""
        return self._tell("pause", math.inf)

    def failed_while_pausing(self) -> dict[int, int]:
        """Rank → exit code of those that have failed; a rank that is to pause, and cannot, may end by any code."""
        told = {key for key, kind in self._told.items() if kind == "pause"}
        cannot = {self.ranks[key] for key in told - self._keeping}
        stops = {self.ranks[key] for key in told}  # by a signal of their own, which cannot pause
        return {
            rank: code
            for rank, code in self.poll().items()
            if code not in EXITS_NO_FAILURE
            and rank not in cannot
            and not (rank in stops and code == -signal.SIGTERM)
        }

    @property
    def have_stayed(self) -> bool:
        """Whether ranks go on in this attempt from an earlier one, with the step that they had."""
        return bool(self._stayed)

    @property
    def is_joining(self) -> bool:
        """Whether ranks that can go on in another attempt have not reported a step in this one yet.

        A training loop of the user's may report no steps: its ranks have joined when their stage of joining is over.
        """
        told = self._record.progress()
        begun = {
            rank
            for rank, each in told.items()
            if not each.is_start or (self._is_own_loop and not each.text.strip())
        }
        left = self.workers.pids.keys() - self.workers.poll().keys() - self._stay()
        return self._may_stay and not {self.ranks[key] for key in left} <= begun

    def hears_of_a_loss(self) -> bool:
        """Whether a rank has said, since the last call, that it has lost another one and waits for the next attempt."""
        return self._messages.hears_of_a_loss()

    def _stay(self) -> set[int]:
        """The local ranks that wait for the next attempt."""
        if self._told:
            self._staying.update(self._in_stage(stages.WAITING))
        # The last report of a rank that has ended is still there.
        self._staying &= self.workers.pids.keys() - self.workers.poll().keys()
        return self._staying

    def _in_stage(self, *stages: str) -> set[int]:
        """The local ranks that report one of these stages; without `stages`, those that have reported anything."""
        told = self._record.progress()
        return {
            key
            for key, rank in self.ranks.items()
            if rank in told and (not stages or told[rank].says(stages))
        }

    def kill(self, ranks: Collection[int]) -> None:
        """Kill those of these ranks that are this node's, so that nobody waits for an answer of theirs."""
        with contextlib.suppress(ProcessLookupError):
            blamed = {rank: pid for rank, pid in self.pids.items() if rank in ranks}
            children.signal_groups(blamed, signal.SIGKILL)

    def end(
        self,
        grace_s: float,
        why: str,
        *,
        tell: Kind | None = None,
        keep_s: float | None = None,
        waits: bool = False,
    ) -> None:
        """End the ranks, and record how far they came, and which of them cannot be ended (`Workers.stuck`).

        Args:
            grace_s: how long they have to end after SIGTERM.
            why: of the attempt's end, for the record.
            tell: a rank is lost, or a node comes in: ranks that wait for the next attempt, with their last step, stay.
            keep_s: with `tell`, how long they have to keep that step; None: the spec's grace.
            waits: whether to wait until nothing is left of those that end. On GPUs this waits in any case: the driver
                may keep a process from ending.
        """
        known = len(self.workers.stuck)
        if tell is not None:
            keeping = self._tell(tell, keep_s)
            self.workers.stop(
                grace_s,
                is_wanted=keeping,
                unsignalled=self._told,
                staying=self._stay,
                waits=waits or self._has_gpus,
            )
        else:
            # Ranks that wait for a next attempt, which does not come, save their step now.
            grace_s = max(grace_s, self._grace_s) if self._stay() else grace_s
            self.workers.stop(grace_s, is_wanted=self._tell_of_a_stall(grace_s * STALLED_AFTER))
            self._staying.clear()
        self._standing_by &= self._staying
        self._messages.keep_no_more()
        for each in self.workers.stuck[known:]:
            rank = None if each.local_rank is None else self.ranks.get(each.local_rank)
            told = {"rank": rank, "pid": each.pid, "state": each.state, "wchan": each.wchan}
            self._record.event("unkillable", attempt=self._attempt, **told)
        self.tell_end(why)

    def _tell_of_a_stall(self, after_s: float) -> Callable[[], bool]:
        """A function for `Workers.stop` that tells the ranks which are left so long after SIGTERM, once; always False.

        They may wait in a collective for a rank that stands still, and would end without a snapshot.
        """
        at = time.monotonic() + after_s if after_s else math.inf

        def tell() -> bool:
            nonlocal at
            if time.monotonic() >= at:
                at = math.inf
                for local_rank in self.ranks:
                    self._messages.send(local_rank, {"kind": "stalled"})
            return False

        return tell

    def tell_end(self, why: str) -> None:
        """Record the end of the attempt, with the last step that the ranks reported."""
        self._logbook.look()
        if self.is_on:
            self.is_on = False
            self._record.look(is_last=True)
            self._record.event(
                "attempt-ended",
                attempt=self._attempt,
                step=self._record.step,
                seconds=round(self.seconds, 3),
                why=why,
            )

    def _failure(self, rank: int, exitcode: int) -> WorkerFailure:
        local_rank = next(key for key, each in self.ranks.items() if each == rank)
        error, written = self._last_words(rank, exitcode)
        # A rank writes its error before its sockets close, so the order of these times is that of cause and effect. A
        # rank that died without an error wrote its last line at some other time.
        has_said = written > 0 and (is_secondary(error, exitcode) or tells_its_end(error))
        return {
            "attempt": self._attempt,
            "rank": rank,
            "local_rank": local_rank,
            "world_size": self._world_size,
            "exitcode": exitcode,
            "when": written if has_said else self._ended.get(rank, time.time()),
            "log": self._log_of(rank),
            "error": error,
            "kernel": [],
        }

    def _last_words(self, rank: int, exitcode: int) -> tuple[str, float]:
        """The end of a rank's log that tells why it ended, and when its last line was written; 0 for an empty log."""
        text, written = self._end_of_log(rank)
        return last_words(text, exitcode), written

    def _end_of_log(self, rank: int) -> tuple[str, float]:
        text, written = "", 0.0
        with contextlib.suppress(OSError), open(self._log_of(rank), "rb") as file:  # noqa: PTH123
            stat = os.fstat(file.fileno())
            if stat.st_size:
                written = stat.st_mtime
                file.seek(max(0, stat.st_size - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        return text, written


def is_training_module(spec: AgentSpec) -> bool:
    """Whether the ranks run kit's training module: they can be started before their attempt is known."""
    return ("-m", TRAINING) in itertools.pairwise(spec.argv)


def imports_for(argv: Sequence[str]) -> list[str]:
    """What kit's training module will import for its options; [] for other programs, of which that is not known."""
    target = Target.parse(argv)
    if target is None or not target.is_training:
        return []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return imports_of(read(target.args))
    except (OptionsError, SystemExit):  # the ranks say what is wrong, or how the module is used
        return []


def _started_now() -> dict[str, str]:
    """When a rank was started, in seconds since the machine was: its process, a fork, may have been made earlier."""
    return {"NODEKIT_STARTED": f"{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}"}


def _name_threads() -> None:
    """Give our threads their names in `top -H` too (Python does from 3.14 on), and bench/overhead what each takes."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            with contextlib.suppress(OSError):  # it has just ended, or this is no Linux
                path = Path(f"/proc/self/task/{thread.native_id}/comm")
                path.write_text(thread.name[:15], encoding="utf-8")
