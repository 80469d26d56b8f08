"""The agent of one node: meets the others, runs the command's workers, and again when one of them is lost.

``python -m nodekit.deploy.agent NODE_DIR`` imports torch, waits on stdin for ``go`` and then reads its spec, so
that the slowest part of a start overlaps with checks and sync; when stdin ends without ``go`` it ends too, so a
start that was given up leaves nothing behind. Torch and the standard library only.

A worker that crashed, a node that is lost or comes: all agents end their workers, meet again in torch's rendezvous
(deploy/agent/rendezvous.py) and start them anew; those go on from the newest snapshot. When the rendezvous itself is
lost the agent keeps its process, and waits for the store to be reachable again or for the supervisor's call into
another generation: a new ``spec.json``. The rule of deploy/agent/quorum.py decides who may train meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.hang.inquiry import DONE, Inquiry
from nodekit.deploy.agent.quorum import Electorate, newest
from nodekit.deploy.agent.ranks.budget import MAX_ATTEMPTS_WITHOUT_PROGRESS, Budget
from nodekit.deploy.agent.ranks.failures import is_echo, last_words, may_be_the_kernels, tells_its_end
from nodekit.deploy.agent.ranks.forkserver import ForkServer
from nodekit.deploy.agent.ranks.workers import Workers, WorkerStart
from nodekit.deploy.agent.record import Record
from nodekit.deploy.agent.rendezvous import FormAgain, Formed, Rendezvous, StoreLost, answers
from nodekit.deploy.agent.replicas.replicas import Replicas
from nodekit.deploy.agent.signed_store import Forged
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.host import ports, processes, programs
from nodekit.deploy.host.logs.logbook import Logbook
from nodekit.deploy.host.node import status
from nodekit.deploy.host.probes import kernel

LOG_TAIL_BYTES = 64 * 1024
PRELOAD = (
    "torch._dynamo",
    "torch.optim",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "numpy",
    "nodekit.training.loop",
    "nodekit.training.engines.ddp",
    "nodekit.training.tasks.digits",
)
EXIT_UNFIT = 4
EXIT_STOPPED, EXIT_FENCED = 143, 144  # of a worker: after a snapshot at a step's edge; by a newer generation
DYING_S = 0.5  # how long workers who have lost a peer may take to say so, before they are killed
ORPHANED_RETRY_S, MAX_ORPHANED_RETRY_S = 1.0, 120.0
ORPHANED_OFTEN_S = 600.0
FENCE_S = 10.0  # how long a fence that cannot be read is tried again before ranks are started
GATHER_S = 10.0  # how long a node may say nothing of the snapshot files it has
SETTLE_S = 20.0  # to copy the last of them, at the end
_POLL_S = 0.05
# While ranks train, each look takes its share of a core from them, so all that is to be looked at is looked at in one.
# A rank's end is told at once.
_LOOK_S = 0.5
_FOLDER_S = 1.0  # until what is in the node's folder is read, though it does not seem to have changed
_MEMBERS_S = 0.4  # until the others are asked again, where ranks end one after the other


class Superseded(Exception):
    """The supervisor has called this node into another generation."""


class Unfit(Exception):
    """This node cannot take part now; others may go on without it, and it is tried again."""


class Fenced(Exception):
    """This generation is over; what comes next is the supervisor's to say."""


class Stop:
    """SIGTERM and SIGINT: an exception in the main thread, and a flag, for upstream swallows exceptions in places."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, *_: object) -> None:
        if not self.requested:
            self.requested = True
            self.check()

    def check(self) -> None:
        """Raise if a stop was asked for."""
        if self.requested:
            raise SignalException("asked to stop", signal.SIGTERM)


def _unfit(text: str, error: OSError) -> Exception:
    """What is raised of an error of this node's: itself, where it will pass."""
    return error if descriptors.are_used_up(error) else Unfit(text)


Why = Literal["done", "failed", "again"]


class Agent:
    """One node's part of a run, through all its rounds and generations."""

    def __init__(self, spec: AgentSpec, record: Record, stop: Stop, server: ForkServer | None) -> None:
        self._spec = spec
        self._record = record
        self._stop = stop
        self._workers = Workers(server)
        descriptors.raise_limit()  # only now: ranks have the limit that they would have had
        self._budget = Budget(spec.max_restarts)
        self._folder = Path(spec.node_dir)
        self._inquiry = Inquiry(spec.hang, record)
        self._logbook = Logbook(str(self._folder / "logs"), spec.keep_log_bytes, self._say_of_logs)
        self._replicas = (
            Replicas(
                name=spec.name,
                folder=self._folder / "snapshots",
                kept=self._folder / "kept",
                copies=spec.copies,
                address=spec.local_addr,
                token=spec.token,
                say=record.event,
            )
            if spec.copies > 1 and len(spec.nodes) > 1
            else None
        )
        # For the rendezvous, should the supervisor choose this node.
        self._held = ports.listen(spec.local_addr)
        self._orphaned: list[float] = []
        self._electorate = spec.known_electorate()
        self._attempt = ""
        self._world_size = 0
        self._expected_snapshot = ""
        self._failed_as = ""
        self._is_on = False  # whether an attempt has begun whose end is not told
        self._rendezvous: Rendezvous | None = None
        self._formed: Formed | None = None
        self._is_meeting = self._is_orphan = self._has_told_of_descriptors = False
        self._spec_changed = 0
        self._folder_changed, self._folder_read_at = 0, 0.0
        self._read_electorate()
        self._say_where()

    def run(self) -> int:
        """To the end: 0 trained, 3 failed."""
        following: Callable[[], int | None] = self._generation
        lacking: OSError | None = None
        while True:
            try:
                if lacking is not None:
                    self._wait_for_descriptors(lacking)
                    lacking = None
                status = following()
                if status is not None:
                    return status
                following = self._generation
            except Superseded:
                following = self._take_new_spec
            except Fenced:
                following = self._wait_fenced
            except StoreLost as error:
                following = functools.partial(self._wait_orphaned, error)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise Unfit(str(error)) from error
                if not descriptors.are_used_up(error):
                    raise
                lacking = error  # and then once more

    # --- generations ---

    def _generation(self) -> int:
        spec = self._spec
        self._pause()
        # Orphaned it is until it has found its way back: the supervisor goes by that.
        state = "orphaned" if self._is_orphan else "starting"
        self._record.update(state=state, generation=spec.generation, workers=[], blocked="")
        if spec.joins:
            self._workers.warm_up()  # nobody else is to wait for our imports
        self._rendezvous = rendezvous = Rendezvous(spec, self._pause, self._record.event)
        self._is_orphan = False
        while True:
            try:
                status = self._round(rendezvous)
            except OSError as error:
                if not descriptors.are_used_up(error):
                    raise
                self._wait_for_descriptors(error)
                continue
            if status is not None:
                return status

    def _round(self, rendezvous: Rendezvous) -> int | None:
        """Meet the others and run the workers once; the exit status, None for another round."""
        spec = self._spec
        self._record.update(state="rendezvous", workers=[], members=[])
        self._is_meeting = True
        try:
            formed = rendezvous.form(self._own())
        except FormAgain:
            return None
        except (RendezvousClosedError, RendezvousGracefulExitError):
            if rendezvous.outcome == "succeeded":
                return self._end("succeeded", "the others had trained to the end")
            return self._end("failed", "another node ended the job")
        except RendezvousTimeoutError:
            return self._end("failed", f"waited {spec.wait_s:.0f} s for {spec.min_nodes} nodes")
        finally:
            self._is_meeting = False
        names = formed.names
        self._electorate = newest(Electorate.of(each["electorate"]) for each in formed.members)
        if not self._electorate.may_train(names):
            self._wait_blocked(rendezvous, names)
            return None
        self._formed = formed
        self._share_snapshots(formed)
        self._start(formed)
        why = self._watch(rendezvous, formed)
        if why == "done":
            why = self._wait_for_the_others(rendezvous, formed)
        if why == "done":
            return self._end("succeeded", "")
        return self._end("failed", self._failed_as) if why == "failed" else None

    def _wait_for_descriptors(self, error: OSError) -> None:
        """All file descriptors are in use, by strangers' connections most likely: until there are some again."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = (
            f"{self._spec.name}: all {limit} file descriptors of the agent were in use: does somebody else connect to "
            f"its ports on {self._spec.local_addr}?"
        )
        is_first, self._has_told_of_descriptors = not self._has_told_of_descriptors, True
        if is_first:
            print(f"{text} {error}", file=sys.stderr, flush=True)
        descriptors.when_there(lambda: self._end_workers(0, "no file descriptor is left"), self._pause)
        descriptors.when_there(descriptors.check, self._pause)
        if is_first:
            self._record.event("no-descriptors", limit=limit, why=str(error))
            self._record.update(notice=text)

    def _take_new_spec(self) -> None:
        self._end_workers(DYING_S, "another generation")
        self._leave()
        spec = descriptors.when_there(lambda: AgentSpec.load(self._folder), self._stop.check)
        old = self._spec
        if spec.is_host and spec.generation == old.generation:
            self._spec = replace(old, call=spec.call)
            raise Fenced  # a generation's store is opened once: its other nodes may still know the first one
        if spec.is_host:
            # The port was found free by being held: it goes over to the store, and another is held from now on.
            spec = replace(spec, listen_fd=self._held.detach())
            self._held = descriptors.when_there(lambda: ports.listen(spec.local_addr), self._stop.check)
        if spec.generation > old.generation:
            self._is_orphan = False
        self._spec = spec
        self._electorate = spec.known_electorate()
        self._read_electorate()
        self._say_where()
        self._record.event("generation", generation=spec.generation, host=spec.master_addr)

    def _wait_fenced(self) -> None:
        """This generation is over: until the supervisor calls into the next one; Superseded then."""
        self._end_workers(0, "fenced")
        self._record.update(state="fenced", workers=[], members=[], blocked="")
        self._leave()
        deadline = time.monotonic() + self._spec.wait_s
        while time.monotonic() < deadline:
            self._stop.check()
            self._check_spec()
            time.sleep(_POLL_S)
        raise TimeoutError(f"nobody called this node into the next generation for {self._spec.wait_s:.0f} s")

    def _wait_orphaned(self, lost: StoreLost) -> None:
        """The store is lost: until it can be reached again, or the supervisor calls."""
        why = str(lost)
        self._end_workers(DYING_S, "the rendezvous host is lost")
        self._leave()
        now = time.monotonic()
        self._orphaned = [when for when in self._orphaned if now - when < ORPHANED_OFTEN_S] + [now]
        self._record.event("store-lost", why=why)
        if isinstance(lost.__cause__, Forged):
            self._record.update(notice=f"{self._spec.name}: {why}")
        self._is_orphan = True
        if self._spec.is_host:
            raise Fenced  # the host's own store cannot be lost; this one was given a dead spec
        wait_s = min(ORPHANED_RETRY_S * 2.0 ** (len(self._orphaned) - 1), MAX_ORPHANED_RETRY_S)
        self._record.update(
            state="orphaned", workers=[], members=[], blocked=f"the rendezvous host is lost ({why})"
        )
        retry_at, give_up_at = now + wait_s, now + self._spec.wait_s
        while True:
            self._pause()
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the rendezvous host has been lost for {self._spec.wait_s:.0f} s")
            if time.monotonic() > retry_at:
                if answers(self._spec.master_addr, self._spec.master_port):
                    return
                retry_at = time.monotonic() + ORPHANED_RETRY_S
            time.sleep(_POLL_S)

    def _pause(self) -> None:
        """Called wherever the agent waits: what ends the wait is raised here."""
        self._stop.check()
        self._check_spec()
        with contextlib.suppress(OSError):  # it cannot be read: what runs goes on, and nothing new begins
            self._look_at_fence()
        if self._rendezvous is not None and self._is_meeting:
            self._record.update(blocked=self._who_is_missing(self._rendezvous.present))

    def _look_at_fence(self) -> None:
        if status.fence_in(str(self._folder)) > self._spec.generation:
            raise Fenced

    def _see_fence(self) -> None:
        """`_look_at_fence`, for who must know."""
        until = time.monotonic() + FENCE_S
        while True:
            try:
                return self._look_at_fence()
            except OSError as error:
                if time.monotonic() > until:
                    raise _unfit(
                        f"the fence of this node cannot be read ({error}): no rank is started", error
                    ) from error
            self._pause()

    def _pause_briefly(self) -> None:
        """`_pause`, without reading what is in the node's folder while that does not change."""
        self._stop.check()
        try:
            changed = os.stat(self._spec.node_dir).st_mtime_ns  # noqa: PTH116  # twice a second
        except OSError:
            changed = 0
        # A change within the same tick of the file system's clock as the last look is seen by the next read.
        if changed != self._folder_changed or time.monotonic() > self._folder_read_at + _FOLDER_S:
            self._folder_changed, self._folder_read_at = changed, time.monotonic()
            self._pause()

    def _check_spec(self) -> None:
        """Superseded if there is a spec of a later generation."""
        with contextlib.suppress(OSError, ValueError):
            path = f"{self._spec.node_dir}/spec.json"
            changed = os.stat(path).st_mtime_ns  # noqa: PTH116  # often, while it waits
            if changed != self._spec_changed:
                self._spec_changed = changed
                spec = json.loads(Path(path).read_text(encoding="utf-8"))
                if (spec["generation"], spec["call"]) > (self._spec.generation, self._spec.call):
                    raise Superseded

    def _who_is_missing(self, present: list[int]) -> str:
        names = [self._spec.name_of(number) for number in present]
        absent = [name for name in self._spec.nodes if name not in names]
        if len(names) >= self._spec.min_nodes or not absent:
            return ""
        return f"{len(names)} of at least {self._spec.min_nodes} nodes are here, without {', '.join(absent)}"

    # --- electorate ---

    def _read_electorate(self) -> None:
        """Take over what the supervisor has granted since."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            granted = Electorate.of(
                json.loads((self._folder / "electorate.json").read_text(encoding="utf-8"))
            )
            if granted.generation == self._spec.generation:
                self._electorate = max(self._electorate, granted)

    def _wait_blocked(self, rendezvous: Rendezvous, names: list[str]) -> None:
        """Wait, without workers, until others come or the supervisor shrinks the electorate."""
        voters = ", ".join(self._electorate.nodes)
        self._record.update(
            members=names,
            no_quorum=True,
            blocked=f"{', '.join(names)} alone are no majority of {voters}; they may be training elsewhere",
        )
        self._record.event("no-quorum", members=names, electorate=self._electorate.to_dict())
        before = self._electorate
        try:
            while rendezvous.num_nodes_waiting() == 0 and self._electorate == before:
                self._pause()
                self._read_electorate()
                time.sleep(_POLL_S)
        finally:
            self._record.update(no_quorum=False, blocked="")

    def _own(self) -> dict[str, Any]:
        self._read_electorate()
        return {
            "name": self._spec.name,
            "nproc": self._spec.nproc_per_node,
            "electorate": self._electorate.to_dict(),
            "replicas": self._replicas.endpoint if self._replicas else None,
        }

    def _share_snapshots(self, formed: Formed) -> None:
        """Have what the workers of any member wrote to their folders, before any is started."""
        peers = {each["name"]: each["replicas"] for each in formed.members if each["replicas"]}
        if self._replicas is not None and len(peers) == len(formed.members):
            attempt = (self._spec.generation, formed.round)
            folder, text = self._folder / "snapshots", ""
            try:
                gathered = self._replicas.gather(peers, attempt, deadline_s=GATHER_S)
            except OSError as error:
                if descriptors.are_used_up(error):
                    raise
                text = f"what the ranks saved cannot be read ({error})"
            else:
                if gathered.missing:
                    text = f"{', '.join(gathered.missing)} could not be written to {folder}"
            if text:  # ranks without a file that others have would begin at another step, and save over what there is
                raise Unfit(
                    f"{text}: no rank is started here until it can; mend or make room on the disk of {folder}"
                )

    # --- workers ---

    def _start(self, formed: Formed) -> None:
        spec = self._spec
        try:
            self._record.make_snapshot_dir()
            self._expected_snapshot = self._record.expected_snapshot
        except OSError as error:
            raise _unfit(str(error), error) from error
        self._attempt = f"{spec.generation}.{formed.round}"
        self._record.begin(self._attempt, group_rank=formed.group_rank, log_of_rank_0=self._log_of(0))
        first = sum(int(each["nproc"]) for each in formed.members[: formed.group_rank])
        world_size = self._world_size = formed.world_size
        self._ranks = {local_rank: first + local_rank for local_rank in range(spec.nproc_per_node)}
        self._record.event(
            "rendezvous",
            attempt=self._attempt,
            group_rank=formed.group_rank,
            num_nodes=len(formed.members),
            members=formed.names,
            master=f"{formed.master_addr}:{formed.master_port}",
        )
        self._logbook.begin([self._log_of(rank) for rank in self._ranks.values()])
        _name_threads()
        self._pause()
        self._see_fence()  # fenced meanwhile, it must not start any
        self._kills = kernel.oom_kills()
        pids = self._workers.start(
            [
                WorkerStart(
                    local_rank=local_rank,
                    argv=spec.argv,
                    env=self._environment(formed, local_rank, rank, world_size),
                    cwd=spec.code_dir,
                    log=self._log_of(rank),
                )
                for local_rank, rank in self._ranks.items()
            ]
        )
        self._started = time.monotonic()
        self._ended: dict[int, float] = {}
        workers = [
            {"local_rank": key, "rank": self._ranks[key], "pid": pid, "start_time": processes.start_time(pid)}
            for key, pid in pids.items()
        ]
        self._record.update(
            state="running",
            attempt=self._attempt,
            rank=first,
            world_size=world_size,
            workers=workers,
            members=formed.names,
            blocked="",
            ended=[],
            waits_for=[],
        )
        self._record.event("workers-started", attempt=self._attempt, world_size=world_size, workers=workers)
        self._is_on = True

    def _environment(self, formed: Formed, local_rank: int, rank: int, world_size: int) -> dict[str, str]:
        """A worker's whole environment: torchrun's variables, and ours."""
        spec = self._spec
        return {
            **os.environ,
            "PATH": programs.rank_path(),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
            "GROUP_RANK": str(formed.group_rank),
            "NODE_RANK": str(formed.group_rank),
            "GROUP_WORLD_SIZE": str(len(formed.members)),
            "ROLE_NAME": "worker",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": formed.master_addr,
            "MASTER_PORT": str(formed.master_port),
            # Upstream counts restarts on each node by itself, and has the workers meet under that number: nodes
            # that do not agree would wait for each other for ever. The round is the same on all of them.
            "TORCHELASTIC_RESTART_COUNT": str(formed.round),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": f"{spec.run_id}.{spec.generation}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "NODEKIT_GENERATION": str(spec.generation),
            "NODEKIT_SNAPSHOT_DIR": str(self._record.snapshot_dir),
            "NODEKIT_SNAPSHOT_EXPECTED": self._expected_snapshot,
            "NODEKIT_PROGRESS_FILE": str(self._record.progress_dir / f"rank{rank}"),
            "NODEKIT_EVENTS_FILE": str(self._record.told_dir / f"rank{rank}"),
        }

    def _say_of_logs(self, kind: str, **fields: Any) -> None:
        self._record.event(kind, **fields)
        if kind == "logs-not-bounded":
            self._record.update(notice=f"{self._spec.name}: its logs cannot be kept small: {fields['why']}")

    def _log_of(self, rank: int) -> str:
        return str(self._folder / "logs" / f"rank{rank}-attempt{self._attempt}.log")

    def _watch(self, rendezvous: Rendezvous, formed: Formed) -> Why:
        """Until the workers are done, one has failed or hangs, or the members change; ends them but for ``done``."""
        pids = {self._ranks[local_rank]: pid for local_rank, pid in self._workers.pids.items()}
        self._inquiry.begin(formed, pids, {rank: Path(self._log_of(rank)) for rank in pids})
        exits: dict[int, int] = {}
        members_at = 0.0
        while True:
            if self._workers.wait(_LOOK_S):
                exits = self._poll()
                self._record.update(ended=sorted(self._ranks[key] for key, code in exits.items() if not code))
            self._logbook.look()
            self._record.look_soon()
            self._pause_briefly()
            if any(exits.values()):
                return self._after_failure()
            if len(exits) == len(self._ranks):
                self._record.update(workers=[])
                self._tell_end("done")
                return "done"
            if time.monotonic() < members_at:
                continue
            members_at = time.monotonic() + _MEMBERS_S
            waiting = rendezvous.num_nodes_waiting()
            if rendezvous.is_closed:
                self._end_attempt(DYING_S, "another node ended the job")
                return "again"  # which says how it has ended
            if waiting:
                with rendezvous.lost_store_is_told():
                    without = formed.without(DONE)
                is_lost = not rendezvous.here.issuperset(without)
                is_ending = bool(exits) or len(without) < len(formed.members)
                # Who waits to come in can wait for a snapshot at the next step's edge, and comes too late once some
                # ranks have ended well; the lost cannot take part.
                if is_lost or not is_ending:
                    self._say_membership(rendezvous, formed)
                    if is_lost:
                        self._end_attempt(DYING_S, "a node is lost")
                    else:
                        self._end_attempt(self._spec.grace_s, "a node comes in")
                    return self._or_give_up("again")
            with rendezvous.lost_store_is_told():
                hangs = self._inquiry.finds_a_hang(self._pause, has_ended=bool(exits))
            if hangs:
                self._end_attempt(0, "a hang")
                return self._or_give_up("again")

    def _after_failure(self) -> Why:
        """Some worker has ended badly: take down what it said, and judge whose fault it was."""
        deadline = time.monotonic() + DYING_S
        while time.monotonic() < deadline and len(self._poll()) < len(self._ranks):
            time.sleep(_POLL_S)
        self._logbook.look()
        exits = self._poll()
        failures = [self._failure(key, code) for key, code in exits.items() if code]
        own = [each for each in failures if not is_echo(each["error"], each["exitcode"])]
        own = [each for each in own if each["exitcode"] not in (EXIT_STOPPED, EXIT_FENCED)]
        self._end_attempt(0, "a rank failed" if own else "a rank of another node failed")
        self._record.failed(
            [each for each in failures if each["exitcode"] not in (EXIT_STOPPED, EXIT_FENCED)]
        )
        if own and (reason := self._budget.crashed(min(own, key=lambda each: each["when"]))):
            self._failed_as = reason
            return "failed"
        return self._or_give_up("again")

    def _poll(self) -> dict[int, int]:
        """Local rank → exit code of those that have ended; when they were found to have is remembered."""
        exits = self._workers.poll()
        for local_rank in exits:
            self._ended.setdefault(local_rank, time.time())
        return exits

    def _or_give_up(self, why: Why) -> Why:
        if self._budget.is_fruitless:
            self._failed_as = f"{MAX_ATTEMPTS_WITHOUT_PROGRESS} attempts in a row without progress"
            return "failed"
        return why

    def _end_attempt(self, grace_s: float, why: str) -> None:
        self._end_workers(grace_s, why)
        self._budget.took_steps(self._record.step, seconds=time.monotonic() - self._started)

    def _end_workers(self, grace_s: float, why: str) -> None:
        self._workers.stop(grace_s)
        self._tell_end(why)

    def _tell_end(self, why: str) -> None:
        """The ranks have ended: what they told last is what counts."""
        self._logbook.look()
        if self._is_on:
            self._is_on = False
            self._record.look(is_last=True)
            seconds = round(time.monotonic() - self._started, 3)
            self._record.event(
                "attempt-ended", attempt=self._attempt, step=self._record.step, seconds=seconds, why=why
            )

    def _failure(self, local_rank: int, exitcode: int) -> dict[str, Any]:
        rank = self._ranks[local_rank]
        log = self._log_of(rank)
        text, written = "", 0.0
        with contextlib.suppress(OSError), open(log, "rb") as file:  # noqa: PTH123
            stat = os.fstat(file.fileno())
            if stat.st_size:
                written = stat.st_mtime
                file.seek(max(0, stat.st_size - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        error = last_words(text, exitcode)
        # The last words come before the sockets close, so their order is that of cause and effect. What has died
        # without any wrote its last line at some other time.
        has_said = written > 0 and (is_echo(error, exitcode) or tells_its_end(error))
        return {
            "attempt": self._attempt,
            "rank": rank,
            "local_rank": local_rank,
            "world_size": self._world_size,
            "exitcode": exitcode,
            "when": written if has_said else self._ended.get(local_rank, time.time()),
            "log": log,
            "error": error,
            "kernel": self._kernel(local_rank, error, exitcode),
        }

    def _kernel(self, local_rank: int, error: str, exitcode: int) -> list[str]:
        """What the kernel says of a rank that it may have ended, or whose GPU or DataLoader worker it may have."""
        if is_echo(error, exitcode) or not may_be_the_kernels(error, exitcode):
            return []
        pids = [self._workers.pids.get(local_rank, 0), *map(int, re.findall(r"\(pid(?:\(s\))? (\d+)", error))]
        return kernel.said(pids, age_s=time.monotonic() - self._started, kills_before=self._kills)

    # --- the end ---

    def _wait_for_the_others(self, rendezvous: Rendezvous, formed: Formed) -> Why:
        """Wait, however long, until every rank of the round has ended well: then, and only then, the job has succeeded.

        A node that fails or is lost before that leaves work undone: all start again from the snapshot. Upstream gives
        up waiting after 300 s, and takes the job for succeeded then.
        """
        look_at = 0.0
        with rendezvous.lost_store_is_told():
            others = [name for name in formed.without(DONE) if name != self._spec.name]
            self._record.update(state="waiting", done_at=time.time(), waits_for=others)
            if self._replicas is not None:
                self._replicas.settle(SETTLE_S)  # while those who are to keep the last files are still here
            formed.tell(DONE)
            while not formed.have_all(DONE):
                self._pause()
                if time.monotonic() > look_at:
                    look_at = time.monotonic() + _MEMBERS_S
                    # Asked before: who is gone by then, and not done, is lost.
                    waiting = rendezvous.num_nodes_waiting()
                    without = formed.without(DONE)
                    self._record.update(waits_for=without)
                    if rendezvous.is_closed:
                        self._end_attempt(0, "another node ended the job")
                        return "again"  # which says how it has ended
                    if waiting and not rendezvous.here.issuperset(without):
                        self._say_membership(rendezvous, formed)
                        self._end_attempt(0, "a node is lost")
                        return self._or_give_up("again")
                time.sleep(_POLL_S)
        # It has succeeded, whatever happens now. Who has the store keeps it until the others have seen that.
        with contextlib.suppress(StoreLost, Fenced, Superseded), rendezvous.lost_store_is_told():
            formed.tell("left")
            while self._spec.is_host and not rendezvous.here.isdisjoint(formed.without("left")):
                self._pause()
                rendezvous.num_nodes_waiting()  # looks who is here
                time.sleep(_POLL_S)
        return "done"

    def _say_membership(self, rendezvous: Rendezvous, formed: Formed) -> None:
        lost = rendezvous.num_lost
        gone = sorted(set(formed.names) - rendezvous.here) if lost else []
        waiting = rendezvous.num_nodes_waiting() - lost
        self._record.event("membership", lost=lost, waiting=waiting, names=gone)

    def _end(self, state: str, message: str) -> int:
        self._end_workers(0, message or state)
        fruitless = self._budget.was_restarted or self._budget.is_fruitless
        changes = {"message": message} if message and message != "crashed" else {}
        self._record.end(state, workers=[], no_progress=state == "failed" and fruitless, **changes)
        if self._rendezvous is not None:
            self._rendezvous.close(outcome=state)
        return 0 if state == "succeeded" else 3

    def shut_down(self) -> None:
        """End the workers, with time for a snapshot and for copying it to other nodes."""
        try:
            self._end_workers(self._spec.grace_s, "stopped")
        except OSError as error:
            if not descriptors.are_used_up(error):
                raise
            return  # what is left ends with this process
        formed, rendezvous = self._formed, self._rendezvous
        if self._replicas is None or formed is None or rendezvous is None:
            return
        self._record.update(workers=[], copying=True)
        deadline = time.monotonic() + SETTLE_S
        self._replicas.settle(SETTLE_S)
        if not (self._folder / "stop").exists():  # the others go on
            return
        with contextlib.suppress(StoreLost, SignalException), rendezvous.lost_store_is_told():
            formed.tell("settled")  # all are stopped, and each keeps copies of the others
            while time.monotonic() < deadline and not rendezvous.here.isdisjoint(formed.without("settled")):
                rendezvous.num_nodes_waiting()  # looks who is here
                time.sleep(_POLL_S)

    def _leave(self) -> None:
        self._formed = None
        if self._rendezvous is not None:
            rendezvous, self._rendezvous = self._rendezvous, None
            rendezvous.close()

    def _say_where(self) -> None:
        """Where the rendezvous is, if it is here, or would be."""
        port = self._spec.master_port if self._spec.is_host else self._held.getsockname()[1]
        self._record.update(
            port=port, held_port=self._held.getsockname()[1], electorate=self._electorate.to_dict()
        )


def _name_threads() -> None:
    """Give our threads their names in `top -H` too (Python does from 3.14 on), and bench/overhead what each takes."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            with contextlib.suppress(OSError):  # it has just ended, or this is no Linux
                Path(f"/proc/self/task/{thread.native_id}/comm").write_text(
                    thread.name[:15], encoding="utf-8"
                )


def run(node_dir: Path, server: ForkServer | None) -> int:
    """Run the spec in `node_dir` to its end; the exit status is 0 trained, 3 failed, 4 unfit, 143 stopped."""
    spec = AgentSpec.load(node_dir)
    os.environ.update(spec.env)
    record = Record(spec)
    try:
        agent = Agent(spec, record, Stop(), server)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _end_unfit(record, spec, error)
    try:
        return agent.run()
    except SignalException:
        agent.shut_down()
        # Who asks by way of kit says so; anything else that ends us is a loss to be made good.
        record.end("stopped" if (node_dir / "stop").exists() else "ended", workers=[])
        return EXIT_STOPPED
    except Unfit as error:
        agent.shut_down()
        return _end_unfit(record, spec, error)
    except Exception as error:
        agent.shut_down()
        record.end("failed", workers=[], message=f"the agent failed: {type(error).__name__}: {error}")
        raise  # its traceback belongs in agent.log


def _end_unfit(record: Record, spec: AgentSpec, error: Exception) -> int:
    record.update(notice=f"{spec.name}: {error}")
    print(error, file=sys.stderr)
    record.end("ended", workers=[], message=str(error))
    return EXIT_UNFIT


def _format_plainly() -> None:
    """Take torch's log formatter away: it imports torch._dynamo, 1.6 s, to format the first traceback."""
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                handler.setFormatter(plain)


def main() -> int:
    """Wait for the go, then run."""
    node_dir = Path(sys.argv[1])
    forked = os.environ.pop("NODEKIT_START", "forkserver") == "forkserver"
    server = ForkServer.start(PRELOAD) if forked else None  # before there is any thread
    _format_plainly()
    try:
        return run(node_dir, server) if sys.stdin.readline() == "go\n" else 0
    finally:
        if server is not None:
            server.close()
