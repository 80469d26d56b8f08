"""One round of a node's ranks, watched: until they are done, one fails or hangs, or a node is lost or comes in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Literal

from nodekit.deploy.agent.hang_diagnosis import HangDiagnosis
from nodekit.deploy.agent.ranks.attempt import Attempts
from nodekit.deploy.agent.ranks.budget import A_HANG, MAX_ATTEMPTS_WITHOUT_PROGRESS, Budget
from nodekit.deploy.agent.ranks.failures import how_it_ended, is_secondary, message_of
from nodekit.deploy.agent.ranks.messages import Kind
from nodekit.deploy.agent.rendezvous.formed import DONE, LEAVES, Formed
from nodekit.deploy.agent.rendezvous.rendezvous import Rendezvous
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.straggler_watch import StragglerWatch
from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.agent.telemetry.event_log import EventLog
from nodekit.deploy.agent.telemetry.gpu_health import Fault
from nodekit.deploy.host.schema import WorkerFailure

DYING_S = 0.5  # how long workers who have lost a peer may take to say so, before they are killed
EXPLAINED_S = 0.3  # the same, where it is known why they have: until they say that they save what they have
TOLD_S = 0.1  # the same, where they are in NCCL and would not say
ANSWERS_S = 10.0  # after a hang, for ranks to leave the collective that they wait in, and keep what they have
PAUSE_S = 300.0  # for ranks to end their step, or their evaluation, while a node waits to come in; they train meanwhile
JOINING_S = 60.0  # for ranks to make a first step, before a node that comes in is met
MEMBERS_S = 0.4  # between two questions to the store about the members, while ranks end one after the other
TRAINS = "trains"  # what the node of rank 0 tells the others of a round, once its log shows training
_POLL_S = 0.05
# While ranks train, each look takes its share of a core from them, so all that is to be looked at is looked at in one.
# A rank's end is told at once.
_LOOK_S = 0.5

Why = Literal["done", "failed", "again"]


class RoundWatch:
    """Watches the ranks of each round until it is over, and decides whether the job goes on with another round."""

    def __init__(
        self,
        spec: AgentSpec,
        record: EventLog,
        attempts: Attempts,
        *,
        pause: Callable[[], None],
        pause_briefly: Callable[[], None],
        leave_if_broken: Callable[[Fault | None], None],
    ) -> None:
        """Watch no round yet.

        Args:
            spec: of this node.
            record: this node's event log.
            attempts: this node's ranks.
            pause: is called during each wait, and raises what ends it.
            pause_briefly: the same, at less cost.
            leave_if_broken: raises if this node cannot go on, for a GPU's fault or a rank that cannot be ended.
        """
        self._spec, self._record, self._attempts = spec, record, attempts
        self._pause, self._pause_briefly, self._leave_if_broken = pause, pause_briefly, leave_if_broken
        self._hang_diagnosis = HangDiagnosis(spec.hang, record)
        self._straggler_watch = StragglerWatch(record, spec.window_s)
        self.dying_s = 0 if spec.gpus else DYING_S
        """How long ranks may take to report the loss of another one; 0 on GPUs: in NCCL they do not notice it."""
        self.budget = Budget(spec.max_restarts)
        self.failed_as = ""
        """Why a round was the last one, once it has ``failed``."""

    def until_over(self, spec: AgentSpec, rendezvous: Rendezvous, formed: Formed) -> Why:
        """Wait until the ranks are done, one fails or hangs, or the members change; end ranks that are not done."""
        attempts, self._spec = self._attempts, spec
        self._hang_diagnosis.begin(formed, attempts.pids, attempts.logs, attempts.recorder)
        self._straggler_watch.begin(formed, attempts.pids)
        exits: dict[int, int] = {}
        has_told = False
        members_at = hurry_until = 0.0
        while True:
            if attempts.workers.wait(_POLL_S if time.monotonic() < hurry_until else _LOOK_S):
                exits, members_at = attempts.poll(), 0.0
                # A rank may end since another node is lost, which the store knows a moment later.
                hurry_until = time.monotonic() + MEMBERS_S
                self._record.update(ended=sorted(rank for rank, code in exits.items() if not code))
            attempts.look()
            self._pause_briefly()
            if len(exits) == len(attempts.ranks) and not any(exits.values()):
                self._record.update(workers=[])
                attempts.tell_end("done")
                return "done"
            if self._is_broken(rendezvous, formed, exits):
                return self._after_failure(rendezvous, formed)
            if time.monotonic() < members_at:
                continue
            members_at = 0.0 if time.monotonic() < hurry_until else time.monotonic() + MEMBERS_S
            if why := self.members_changed(rendezvous, formed, is_ending=bool(exits)):
                return why
            with rendezvous.lost_store_is_told():
                if not has_told and self._record.seems_to_train:
                    formed.tell(TRAINS)
                    has_told = True
                hangs = self._hang_diagnosis.finds_a_hang(self._pause, has_ended=bool(exits))
                self._straggler_watch.look()
            if hangs:
                return self._after_hang()

    def end_if_broken(self, rendezvous: Rendezvous, formed: Formed) -> Why | None:
        """End the ranks, which train while the agents meet for the next round, if one has failed or a node is lost.

        They may have begun to pause, since ranks of other nodes were told to.
        """
        exits = self._attempts.failed_while_pausing()
        if self._is_broken(rendezvous, formed, exits):
            return self._after_failure(rendezvous, formed)
        if gone := rendezvous.gone(formed):
            return self._after_loss(gone, num_waiting=0)
        return None

    def members_changed(self, rendezvous: Rendezvous, formed: Formed, *, is_ending: bool) -> Why | None:
        """End the attempt if a member is lost; ``again`` also if a node waits to join, and can.

        It comes too late once some ranks have ended well (`is_ending`), unless another member has left the round for
        its sake.
        """
        waiting = rendezvous.num_nodes_waiting()
        if rendezvous.is_closed:
            self._end(DYING_S, "another node ended the job")
            return "again"  # the next rendezvous says how the job has ended
        if not waiting:
            return None
        with rendezvous.lost_store_is_told():  # asked last: who is gone by now, and not done, is lost
            without = formed.without(DONE)
            away = set(without) - rendezvous.here
            gone = formed.without(LEAVES, among=away)
            if not away and (is_ending or len(without) < len(formed.members)):
                return None
            if not gone and self._attempts.is_on:
                if not away and self._attempts.is_joining and self._attempts.seconds < JOINING_S:
                    return None  # let the ranks join first, or some would wait for others that have left
                formed.tell(LEAVES)
                return "again"
        return self._after_loss(gone, num_waiting=max(0, waiting - rendezvous.num_lost))

    def pause_for(self, rendezvous: Rendezvous, formed: Formed, last: Formed) -> Why:
        """Have the ranks pause that have trained during the rendezvous; end them if members of their round are lost.

        Ranks that still join each other, or evaluate, pause after that. If it takes too long, they leave the others as
        if one was lost, and keep their last step.
        """
        if why := self.end_if_broken(rendezvous, last):
            return why
        still = {each["name"] for each in formed.members if each["trains_in"] == last.round}
        num_new = len(set(formed.names).difference(last.names))
        if gone := sorted(set(last.names) - still):
            return self._after_loss(gone, num_waiting=num_new)
        if num_new:
            self._record.event("membership", lost=0, waiting=num_new, names=[])
        is_pausing, until = self._attempts.pause(), time.monotonic() + PAUSE_S
        while True:
            goes_on = is_pausing() and time.monotonic() < until
            if why := self.end_if_broken(rendezvous, last):
                return why  # all would wait for the lost rank
            if not goes_on:
                break
            rendezvous.num_nodes_waiting()  # raises if the rendezvous host is lost
            self._pause_briefly()
            self._attempts.workers.wait(_POLL_S)
        tell: Kind = "pause"
        # Others may wait for those that are ended now.
        if self._attempts.is_joining or time.monotonic() > until:
            rendezvous.tell_broken(last.round, is_explained=False)
            tell = "lost"
        self._end(self._spec.grace_s, "a node comes in", tell)
        return self._again_unless(None)

    def _after_loss(self, names: list[str], *, num_waiting: int) -> Why:
        """End the attempt since the members `names` are lost; none if all others have left to meet a new node."""
        if names:
            self._record.event("membership", lost=len(names), waiting=num_waiting, names=names)
        self._end(self.dying_s, "a node is lost", "lost")
        return self._again_unless(None)

    def _after_hang(self) -> Why:
        """End the attempt, which hangs; ranks that only wait for the hanging ones may keep their step and stay."""
        self._leave_if_broken(self._record.gpus.recent())
        found = self._hang_diagnosis
        if found.may_stay:
            self._attempts.kill(found.behind)
        # Ranks that hang while they join have an earlier attempt's step in memory, and nobody else may have it.
        saves = self._attempts.have_stayed and not found.may_stay
        self._end(
            self._spec.grace_s if saves else 0,
            "a hang",
            "lost" if found.may_stay else None,
            is_replaced=found.may_stay,
            ended_by=A_HANG,
            active_s=found.active_s,
            keep_s=ANSWERS_S,
        )
        return self._again_unless(self.budget.hung() if found.is_stepless else None)

    def _is_broken(self, rendezvous: Rendezvous, formed: Formed, exits: Mapping[int, int]) -> bool:
        """Whether a rank of the round, on any node, has failed; if one has here (`exits`), tell the other nodes."""
        if any(exits.values()):
            rendezvous.tell_broken(formed.round, is_explained=self._attempts.say_why(exits))
            return True
        if self._attempts.hears_of_a_loss():
            rendezvous.tell_broken(formed.round, is_explained=False)
        return rendezvous.is_broken(formed.round)

    def _after_failure(self, rendezvous: Rendezvous, formed: Formed) -> Why:
        """End the attempt, since a rank has failed on some node: record the failures, and charge our own."""
        wait_s = EXPLAINED_S if rendezvous.is_explained(formed.round) else DYING_S
        failures = self._attempts.failures(TOLD_S if self._spec.gpus else wait_s)
        own = [each for each in failures if not is_secondary(each["error"], each["exitcode"])]
        first = min(own, key=lambda each: each["when"], default=None)
        ended_by = (first["error"].strip() or how_it_ended(first["exitcode"])) if first else ""
        why = "a rank failed" if own else "a rank of another node failed"
        self._end(0, why, "lost", is_replaced=True, ended_by=ended_by)
        verdict = self._again_unless(None if first is None else self._charge(first, formed))
        self._attempts.ask_the_kernel(failures)  # after the ranks are replaced: the kernel's log is long
        self._record.failed(failures)
        if first:
            said: list[WorkerFailure] = [{**each, "error": message_of(each["error"])} for each in own]
            self._leave_if_broken(self._record.gpus.blamed_for(said))
        return verdict

    def _charge(self, failure: WorkerFailure, formed: Formed) -> str | None:
        """Charge a failure of this node's own ranks to the budget; None to go on, else why not."""
        seems_trained = False
        with contextlib.suppress(RuntimeError):  # the store is lost
            seems_trained = len(formed.without(TRAINS)) < len(formed.members)
        return self.budget.crashed(failure, seems_trained=seems_trained)

    def _again_unless(self, reason: str | None) -> Why:
        """``failed`` for a reason, or if too many attempts in a row have brought no progress; else ``again``."""
        if reason is None and self.budget.is_fruitless:
            reason = f"{MAX_ATTEMPTS_WITHOUT_PROGRESS} attempts in a row without progress"
            # Ranks that stay have not failed: of what kept them apart nobody else tells.
            if said := self._attempts.not_connected():
                reason += f": {said}"
        if reason is None:
            return "again"
        self.failed_as = reason
        return "failed"

    def _end(
        self,
        grace_s: float,
        why: str,
        tell: Kind | None = None,
        *,
        is_replaced: bool = False,
        ended_by: str = "",
        active_s: float | None = None,
        keep_s: float | None = None,
    ) -> None:
        """End the attempt, and count its progress.

        Args:
            grace_s: as of `Attempts.end`.
            why: likewise.
            tell: likewise.
            is_replaced: whether to start ranks in place of those that have ended, at once, since they need time to
                import. If the job turns out to have failed, they are ended with it.
            ended_by: as of `Budget.took_steps`.
            active_s: how long an attempt that hung went on before that.
            keep_s: as of `Attempts.end`.
        """
        self._attempts.end(grace_s, why, tell=tell, keep_s=keep_s)
        step, seconds = self._record.step, self._attempts.seconds
        if is_replaced:
            self._attempts.replace(self._spec)
        self._record.update(state="rendezvous", workers=[], members=[])
        self.budget.took_steps(
            step,
            seconds=seconds if active_s is None else active_s,
            seems_trained=any(guess.advances(str(log)) for log in self._attempts.logs.values()),
            ended_by=ended_by,
        )
