"""The agent of one node: joins the rendezvous, runs the node's ranks, and again when a rank or a node is lost.

When a rank fails, or a node is lost or comes, all agents end their ranks (but for those that go on with what they
have), meet again in torch's rendezvous (deploy/agent/rendezvous/rendezvous.py) and start them anew, from the newest
snapshot. When the rendezvous host is lost the agent keeps running, and waits for the store to be reachable again or for
the supervisor's call into another generation: a new ``spec.json``. deploy/agent/quorum.py says who may train meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.orders import Fenced, Orders, Superseded
from nodekit.deploy.agent.quorum import Voters, newest
from nodekit.deploy.agent.ranks.attempt import Attempts, is_training_module
from nodekit.deploy.agent.ranks.forkserver import ForkServer
from nodekit.deploy.agent.rendezvous.formed import DONE, Formed
from nodekit.deploy.agent.rendezvous.rendezvous import FormAgain, Rendezvous, StoreLost, answers
from nodekit.deploy.agent.rendezvous.signed_store import Forged
from nodekit.deploy.agent.replicas.replicas import Replicas
from nodekit.deploy.agent.round_watch import DYING_S, MEMBERS_S, RoundWatch, Why
from nodekit.deploy.agent.snapshot_sharing import share_snapshots
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.telemetry.event_log import EventLog
from nodekit.deploy.agent.telemetry.gpu_health import Fault
from nodekit.deploy.agent.unfit import Broken, Shortage, Unfit, Unreached, WaitedInVain, unfit
from nodekit.deploy.host import ports
from nodekit.deploy.host.errors import cure_of
from nodekit.deploy.host.schema import EndCause, Finished

ORPHANED_RETRY_S, MAX_ORPHANED_RETRY_S = 1.0, 120.0
ORPHANED_OFTEN_S = 600.0
LOST_S = 2.0  # added to the keepalive's own time: until all nodes know that a member is lost
SETTLE_S = 20.0  # for copying the last snapshots to other nodes, at the end
_POLL_S = 0.05


class GivenUp(Exception):
    """The ranks that trained while the agents met have failed, and are not started again."""


class Agent:
    """One node's part of a run, through all its rounds and generations."""

    def __init__(
        self, spec: AgentSpec, record: EventLog, check_stop: Callable[[], None], server: ForkServer | None
    ) -> None:
        """Start nothing yet; `check_stop` raises if this process was asked to end."""
        self._spec = spec
        self._record = record
        self._check_stop = check_stop
        self._attempts = Attempts(spec, record, server)
        descriptors.raise_limit()  # only now: ranks have the limit that they would have had
        self._folder = Path(spec.node_dir)
        self._watch = RoundWatch(
            spec,
            record,
            self._attempts,
            pause=self._pause,
            pause_briefly=self._pause_briefly,
            leave_if_broken=self._leave_if_broken,
        )
        self._shortage = Shortage(record)
        self._orders = Orders(self._folder)
        self._replicas = Replicas.of(spec, record.event)
        # For the rendezvous, should the supervisor choose this node.
        self._held = ports.listen(spec.local_addr)
        self._orphaned: list[float] = []
        self._voters = self._orders.voters(spec.known_voters())
        self._rendezvous: Rendezvous | None = None
        self._formed: Formed | None = None
        self._is_meeting = self._is_orphan = self._is_done = False
        self._say_where()

    def run(self) -> int:
        """Run to the end of the job; return 0 if it succeeded, 3 if it failed."""
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
                    raise Unfit(str(error), cure=cure_of(error)) from error
                if not descriptors.are_used_up(error):
                    raise
                lacking = error  # and then once more

    # --- generations ---

    def _generation(self) -> int:
        spec = self._spec
        self._pause()
        # Keep the state "orphaned" until the rendezvous is reached again: the supervisor relies on it.
        state = "orphaned" if self._is_orphan else "starting"
        self._record.update(state=state, generation=spec.generation, workers=[], blocked="")
        # Before the rendezvous: the agent still takes orders while it waits here.
        self._attempts.workers.warm_up(self._pause)
        if spec.joins:
            self._attempts.stand_by(spec, self._pause)  # the others need not wait for our imports
        wake = self._attempts.workers.wake
        self._rendezvous = rendezvous = Rendezvous(spec, self._pause, self._record.event, wake)
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
        """Meet the others and run the workers once; the exit status, None for another round.

        Where a node comes in, the workers of the last round train on until all have met.
        """
        spec, self._is_done = self._spec, False
        self._leave_if_broken()
        if not self._attempts.is_on:
            self._record.update(state="rendezvous", workers=[], members=[])
        self._is_meeting = True
        try:
            formed = rendezvous.form(self._own())
        except FormAgain:
            return None
        except GivenUp:
            return self._end("failed", self._watch.failed_as)
        except (RendezvousClosedError, RendezvousGracefulExitError):
            if rendezvous.outcome == "succeeded":
                return self._end("succeeded", "the others had trained to the end")
            return self._end("failed", "another node ended the job", "ended-elsewhere")
        except RendezvousTimeoutError as error:
            raise WaitedInVain(f"waited {spec.wait_s:.0f} s for {spec.min_nodes} nodes") from error
        finally:
            self._is_meeting = False
        has_paused = self._attempts.is_on
        if has_paused and self._formed is not None:
            if self._replicas is not None:
                self._replicas.announce((spec.generation, formed.round), spec.grace_s)
            why = self._watch.pause_for(rendezvous, formed, self._formed)
            if why == "failed":
                return self._end("failed", self._watch.failed_as)
        names = formed.names
        self._voters = newest(Voters.of(each["electorate"]) for each in formed.members)
        if not self._voters.may_train(names):
            self._wait_blocked(rendezvous, names)
            return None
        self._formed = formed
        try:
            share_snapshots(self._replicas, self._folder / "snapshots", formed, spec.generation)
        except Unreached:
            if not self._loses_one(rendezvous, formed):
                raise
            return None
        if has_paused and rendezvous.has_lost(formed):  # meanwhile: no rank that stays is to wait for it
            return None
        self._start(rendezvous, formed)
        why = self._watch.until_over(spec, rendezvous, formed)
        self._is_done = why == "done"
        if why == "done":
            why = self._wait_for_the_others(rendezvous, formed)
        if why == "done":
            return self._end("succeeded", "")
        return self._end("failed", self._watch.failed_as) if why == "failed" else None

    def _loses_one(self, rendezvous: Rendezvous, formed: Formed) -> bool:
        """Wait as long as the keepalive takes to notice a loss; whether it misses a member or the rendezvous host."""
        until = time.monotonic() + LOST_S + self._spec.keep_alive_s * self._spec.lost_after
        while time.monotonic() < until:
            if rendezvous.has_lost(formed):
                return True
            self._pause_briefly()
            time.sleep(_POLL_S)
        return False

    def _wait_for_descriptors(self, error: OSError) -> None:
        end = functools.partial(self._attempts.end, 0, "no file descriptor is left")
        self._shortage.wait(error, self._spec, end, self._pause)

    def _take_new_spec(self) -> None:
        self._attempts.end(DYING_S, "another generation", tell="lost", waits=True)
        self._leave()
        spec = descriptors.when_there(lambda: AgentSpec.load(self._folder), self._check_stop)
        old = self._spec
        if spec.is_host and spec.generation == old.generation:
            self._spec = replace(old, call=spec.call)
            raise Fenced  # a generation's store is opened once: its other nodes may still know the first one
        if spec.is_host:
            # The port was found free by being held: it goes over to the store, and another is held from now on.
            spec = replace(spec, listen_fd=self._held.detach())
            self._held = descriptors.when_there(lambda: ports.listen(spec.local_addr), self._check_stop)
        if spec.generation > old.generation:
            self._is_orphan = False
        self._spec = spec
        self._voters = self._orders.voters(spec.known_voters())
        self._say_where()
        self._record.event("generation", generation=spec.generation, host=spec.master_addr)

    def _wait_fenced(self) -> None:
        """This generation is over: wait until the supervisor calls this node into the next one, by `Superseded`."""
        # Ranks that keep their last step commit no other one here; they go on with it in the next generation.
        self._attempts.end(self._watch.dying_s, "fenced", tell="lost", waits=True)
        self._record.update(state="fenced", workers=[], members=[], blocked="")
        self._leave()
        deadline = time.monotonic() + self._spec.wait_s
        while time.monotonic() < deadline:
            self._check_stop()
            self._orders.check_spec(self._spec)
            time.sleep(_POLL_S)
        raise WaitedInVain(f"nobody called this node into the next generation for {self._spec.wait_s:.0f} s")

    def _wait_orphaned(self, lost: StoreLost) -> None:
        """The store is lost: wait until it can be reached again, or the supervisor calls."""
        why = str(lost)
        self._attempts.end(DYING_S, "the rendezvous host is lost", tell="lost", waits=True)
        self._leave()
        now = time.monotonic()
        self._orphaned = [when for when in self._orphaned if now - when < ORPHANED_OFTEN_S] + [now]
        is_forged = isinstance(lost.__cause__, Forged)
        self._record.event("store-lost", why=why, **({"forged": True} if is_forged else {}))
        if is_forged:
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
                raise WaitedInVain(f"the rendezvous host has been lost for {self._spec.wait_s:.0f} s")
            if time.monotonic() > retry_at:
                if answers(self._spec.master_addr, self._spec.master_port, self._pause):
                    return
                retry_at = time.monotonic() + ORPHANED_RETRY_S
            time.sleep(_POLL_S)

    def _pause(self) -> None:
        """Raise whatever ends the present wait; called again and again wherever the agent waits."""
        self._check_stop()
        if not self._is_done:
            self._leave_if_broken(self._record.gpus.fatal)
        self._orders.check(self._spec)
        if self._rendezvous is None or not self._is_meeting:
            return
        if not self._attempts.is_on:
            self._record.update(blocked=self._spec.who_is_missing(self._rendezvous.present))
        elif self._formed is not None:
            why = self._watch.end_if_broken(self._rendezvous, self._formed)
            if why == "failed":
                raise GivenUp

    def _pause_briefly(self) -> None:
        """As `_pause`, but read the orders in the node's folder only if they may have changed."""
        self._check_stop()
        if self._orders.may_have_changed():
            self._pause()

    def _leave_if_broken(self, fault: Fault | None = None) -> None:
        """Kill the ranks and raise Broken for a GPU's fault; raise Broken too if a rank cannot be ended."""
        if fault is not None:
            self._attempts.end(0, str(fault))
        if fault is not None or self._attempts.workers.stuck:
            raise Broken.of(fault, self._attempts.workers.stuck)

    # --- voters ---

    def _wait_blocked(self, rendezvous: Rendezvous, names: list[str]) -> None:
        """Wait, without workers, until others come or the supervisor reduces the voters."""
        voters = ", ".join(self._voters.nodes)
        self._record.update(
            members=names,
            no_quorum=True,
            blocked=f"{', '.join(names)} alone are no majority of {voters}; they may be training elsewhere",
        )
        self._record.event("no-quorum", members=names, electorate=self._voters.to_dict())
        before = self._voters
        try:
            while rendezvous.num_nodes_waiting() == 0 and self._voters == before:
                self._pause()
                self._voters = self._orders.voters(self._voters)
                time.sleep(_POLL_S)
        finally:
            self._record.update(no_quorum=False, blocked="")

    def _own(self) -> dict[str, Any]:
        self._voters = self._orders.voters(self._voters)
        # Scripts of the user's may write such files until their attempt ends.
        has_files = self._replicas is not None and (
            not is_training_module(self._spec) or self._replicas.has_files
        )
        return {
            "name": self._spec.name,
            "address": self._spec.local_addr,
            "nproc": self._spec.nproc_per_node,
            "electorate": self._voters.to_dict(),
            "replicas": self._replicas.endpoint if self._replicas else None,
            "has_files": has_files,
            "trains_in": self._formed.round if self._formed and self._attempts.is_on else None,
        }

    # --- workers ---

    def _start(self, rendezvous: Rendezvous, formed: Formed) -> None:
        spec = self._spec
        try:
            self._attempts.prepare(spec, formed)
        except OSError as error:
            raise unfit(str(error), error) from error
        self._pause()
        try:
            self._orders.check_fence(spec, self._pause)  # fenced meanwhile, it must not start any
        except OSError as error:
            text = f"the fence of this node cannot be read ({error}): no rank is started"
            raise unfit(text, error) from error
        rendezvous.workers_begin()
        self._attempts.start(spec, formed)

    # --- the end ---

    def _wait_for_the_others(self, rendezvous: Rendezvous, formed: Formed) -> Why:
        """Wait, without a limit, until all ranks of the round have ended well: only then the job has succeeded.

        If a node fails or is lost before that, its work is missing, and all start again from the snapshot. torchrun
        stops waiting after 300 s, and reports success.
        """
        look_at = 0.0
        with rendezvous.lost_store_is_told():
            others = [name for name in formed.without(DONE) if name != self._spec.name]
            self._record.update(state="waiting", done_at=time.time(), waits_for=others)
            if self._replicas is not None:
                # While the nodes that are to hold copies of the last files are still here.
                self._replicas.finish_copying(SETTLE_S)
            formed.tell(DONE)
            while not formed.have_all(DONE):
                self._pause()
                if time.monotonic() > look_at:
                    look_at = time.monotonic() + MEMBERS_S
                    if why := self._watch.members_changed(rendezvous, formed, is_ending=True):
                        return why
                    self._record.update(waits_for=formed.without(DONE))
                time.sleep(_POLL_S)
        # The job has succeeded, whatever happens now. The node with the store keeps it until the others have seen that.
        with contextlib.suppress(StoreLost, Fenced, Superseded), rendezvous.lost_store_is_told():
            formed.tell("left")
            if self._spec.is_host:
                rendezvous.wait_for(formed, "left", self._pause)
        return "done"

    def _end(self, state: Finished, message: str, cause: EndCause = "") -> int:
        self._attempts.end(0, message or state)
        fruitless = self._watch.budget.was_restarted or self._watch.budget.is_fruitless
        no_progress = state == "failed" and fruitless
        self._record.end(state, message=message, cause=cause, no_progress=no_progress)
        if self._rendezvous is not None:
            self._rendezvous.close(outcome=state)
        return 0 if state == "succeeded" else 3

    def shut_down(self) -> None:
        """End the workers, with time for a snapshot and for copying it to other nodes."""
        try:
            self._attempts.end(self._spec.grace_s, "stopped")
        except OSError as error:
            if not descriptors.are_used_up(error):
                raise
            return  # the ranks end with this process
        formed, rendezvous = self._formed, self._rendezvous
        if self._replicas is None or formed is None or rendezvous is None:
            return
        self._record.update(workers=[], copying=True)
        deadline = time.monotonic() + SETTLE_S
        self._replicas.finish_copying(SETTLE_S)
        if not (self._folder / "stop").exists():  # the others go on
            return
        with contextlib.suppress(StoreLost, SignalException), rendezvous.lost_store_is_told():
            formed.tell("settled")  # all are stopped, and each keeps copies of the others
            rendezvous.wait_for(formed, "settled", lambda: None, until=deadline)

    def abandon(self) -> None:
        """Kill the workers, and write nothing: the folder is gone, or is another agent's."""
        self._attempts.workers.stop(0)

    def _leave(self) -> None:
        rendezvous, self._rendezvous, self._formed = self._rendezvous, None, None
        if rendezvous is not None:
            rendezvous.close()

    def _say_where(self) -> None:
        """Record the port of the rendezvous, and the port held for it should the supervisor choose this node."""
        held_port = self._held.getsockname()[1]
        port = self._spec.master_port if self._spec.is_host else held_port
        self._record.update(port=port, held_port=held_port, electorate=self._voters.to_dict())
