"""Supervises a run: follows every node, carries out what `policy.py` decides, and returns the verdict at its end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Literal

from nodekit.deploy.agent.hang.hang import Progress
from nodekit.deploy.agent.ranks.failures import Failure, how_it_ended, is_secondary, line_of, was_told
from nodekit.deploy.connect.channel import ChannelLost, HostChannel, RemoteError
from nodekit.deploy.host import processes
from nodekit.deploy.host.schema import EventKind, NodeStatus
from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.records import runs
from nodekit.deploy.records.events import CLOCK_SET_S, Follower, Gatherer
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.story.event_text import out_of_the_job
from nodekit.deploy.story.status import absence, status_line, unwritable
from nodekit.deploy.story.verdict import Told, Verdict, verdict
from nodekit.deploy.supervise import drain, policy
from nodekit.deploy.supervise.node_client import BrokenHost, NodeClient
from nodekit.deploy.supervise.observation import seen_of
from nodekit.deploy.supervise.observer import Observer, Over, View
from nodekit.deploy.supervise.record_writer import RecordWriter
from nodekit.deploy.supervise.state import (
    Action,
    Drain,
    Exclude,
    Fence,
    Finish,
    Join,
    NodeAction,
    NodeHistory,
    Notice,
    Observation,
    Rules,
    SetVoters,
    Start,
    State,
    Stop,
)
from nodekit.inventory.errors import HostError, KitError, NotWritten

_LOG = logging.getLogger(__name__)

RETRY_S = 1.0
UNREACHABLE_AFTER_S = 3.0  # a node reports every second; after this long without a report it is unreachable
HOST_UNREACHABLE_AFTER_S = 2.0  # the same for the rendezvous host, if another node has lost it too
LATE_AFTER_S = 1.6  # nodes report within 1.5 s: once this has passed, the rendezvous host may be lost
SOON_S = 0.1  # how often to look for its report then
# The other node's last report must be this much newer: else the connection from here to both may be cut.
_LATER_S = 1.0
MAX_UNGATHERED = 2000  # events per node that a process which only watches keeps
LOOK_AGAIN_S = 0.5  # how often to look for an agent on a node that has none
Heard = Literal["plan", "busy", "problem", "refused", "lost", "unknown", "part", "ended"]
"""The kinds of message that the threads of a supervisor send about their nodes."""
NO_ROOM = "{0}/events.jsonl cannot be written; see to the disk (df {0})"


class Supervisor:
    """Follows the nodes of one run until it ends, and acts on them unless another supervisor does.

    Each node is followed, and each action carried out, in a thread of its own, which puts its results into a queue. The
    thread that calls `watch` reads the queue; it alone decides, and writes the run's record.
    """

    def __init__(
        self,
        client: NodeClient,
        view: View,
        lock: SupervisorLock,
        *,
        rules: Rules,
        reopen: Callable[[str], HostChannel],
        tail_bytes: int | None = None,
        shown: Mapping[str, Mapping[str, int]] | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Start nothing before `watch`.

        Args:
            client: acts on the nodes.
            view: shows the run to the user.
            lock: held by the supervisor that acts.
            rules: of the inventory.
            reopen: opens a new channel to a host; raises HostError if it is unreachable.
            tail_bytes: of each log that exists already, show only the last bytes.
            shown: node → log → number of its bytes that were shown before.
            observers: receive all statuses and events from now on.
        """
        self._client = client
        self._run = client.run
        self._channels = client.channels
        self._view = view
        self._lock = lock
        self._acts = lock.acquire()
        if self._acts:  # the previous supervisor may have decided more since this record was read
            try:
                client.run.reload()
            except KitError:  # only watch, until `_take_over` can read the record
                lock.release()
                self._acts = False
        self._state = State.from_dict(client.run.judgement, rules)
        self._rules = rules
        self._reopen = reopen
        self._tail_bytes = tail_bytes
        self._shown = shown or {}
        self._observers = list(observers)
        self._gatherer = Gatherer(client.run.folder)
        self._ungathered = {name: collections.deque[Any](maxlen=MAX_UNGATHERED) for name in rules.nodes}
        self._events = Follower(client.run.folder)
        self._statuses: dict[str, NodeStatus] = {}
        self._queue: queue.Queue[tuple[str, Heard, Any]] = queue.Queue()
        self._closing = threading.Event()
        self._seen = {name: Observation(reachable=name in self._channels) for name in rules.nodes}
        self._heard: dict[str, float] = {}  # node → when, by time.monotonic()
        self._told = {name: Told() for name in rules.nodes}
        self._lines: dict[str, str] = dict.fromkeys(rules.nodes, "connecting")
        self._busy: dict[str, str] = {}
        self._first_step = False
        self._drained = drain.Drained(client.run)
        self._exclusions = drain.Exclusions(client.run)
        self._writer = RecordWriter(client.run, view)
        self._slow_nodes = drain.SlowNodes()
        self._clock_ahead_s = processes.clock_ahead_s()
        self._has_ended = False
        """Whether the record has the run's end: no action is carried out any more."""
        self._record_problem = ""
        """Why this process could not take over, as reported last."""
        self._take_over_at = 0.0
        """When to try to take over again, by time.monotonic()."""

    def watch(self) -> Verdict:
        """Follow every node until the run ends, and return the verdict.

        A KeyboardInterrupt, and what the view raises, leave the job running.

        Raises:
            Over: another process has ended the run, or started it again.
        """
        for name in self._rules.nodes:
            threading.Thread(target=self._follow, args=(name,), name=f"follow-{name}", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                self._take(*self._queue.get(timeout=self._wait_s()))
                while True:
                    self._take(*self._queue.get_nowait())
            self._view.status(self._lines)
            self._tell_observers()
            self._view.keys()
            if len(self._heard) < len(self._rules.nodes):
                continue  # a node that was not looked at yet must not be taken for lost
            self._miss_host()
            if (finish := self._decide()) is not None:
                self._closing.set()
                return self._end(finish)

    def _tell_observers(self) -> None:
        """Pass new events and the statuses to the view and to the observers."""
        new = self._events.more()
        for event in new:
            self._view.event(event)
        self._view.see(self._statuses)
        for each in list(self._observers):
            try:
                for event in new:
                    each.event(event)
                each.see(self._statuses)
            except Exception as error:
                self._observers.remove(each)
                self._view.say(
                    f"{type(each).__name__} failed and is left out: {type(error).__name__}: {error}"
                )

    def _wait_s(self) -> float:
        """Return how many seconds to wait for reports of nodes: few if the rendezvous host's is late."""
        silent_s = time.monotonic() - self._heard.get(self._state.host, math.inf)
        is_late = LATE_AFTER_S < silent_s <= UNREACHABLE_AFTER_S
        return min(self._view.tick_s, SOON_S) if is_late else self._view.tick_s

    def _miss_host(self) -> None:
        """Mark the rendezvous host as unreachable earlier than others if a reachable node has lost it, too."""
        host, now = self._state.host, time.monotonic()
        if not self._seen[host].reachable or now - self._heard[host] <= HOST_UNREACHABLE_AFTER_S:
            return
        orphans = [name for name, seen in self._seen.items() if seen.is_orphan(self._state.generation)]
        if any(self._heard[name] - self._heard[host] > _LATER_S for name in orphans):
            silence = f"no answer within {HOST_UNREACHABLE_AFTER_S:.0f} s"
            self._take(host, "lost", HostError(host, silence))

    def _decide(self) -> Finish | None:
        self._has_ended = self._writer.has_ended(self._seen)
        if not self._acts and time.monotonic() >= self._take_over_at and self._is_free():
            self._take_over()
        if problem := self._drained.look():
            self._view.say(problem, is_event=self._acts)
        if (drained := self._drained.nodes) != self._rules.drained:
            self._rules = dataclasses.replace(self._rules, drained=drained)
        if self._acts and self._client.inventory.job.on_slow == "drain":
            absent = [name for name, seen in self._seen.items() if not seen.reachable]
            for text in self._slow_nodes.drain(self._run, self._rules, self._statuses, absent=absent):
                self._view.say(text, is_event=True)
                self._note("said", text=text)
        state, actions = policy.decide(self._state, self._seen, time.monotonic(), self._rules)
        finish = next((action for action in actions if isinstance(action, Finish)), None)
        if actions:
            self._has_ended = self._writer.has_ended(self._seen, at_once=True)
        if not self._acts or self._has_ended:
            self._pass(state)
            return finish  # only the end concerns this process; the other supervisor acts
        if not self._drained.is_known or not self._writer.is_written(state, self._gatherer):
            self._pass(state)
            return finish
        self._state = state
        for action in actions:
            self._do(action, state)
        return finish

    def _is_free(self) -> bool:
        """Acquire the lock unless another process holds it; if the lock file cannot be written, retry later."""
        try:
            return self._lock.acquire()
        except NotWritten:
            self._take_over_at = time.monotonic() + RETRY_S
            return False

    def _take_over(self) -> None:
        """Act from now on, from the state that the last supervisor recorded; if it is unreadable, only watch."""
        try:
            self._run.reload()
        except KitError as error:
            self._lock.release()
            self._take_over_at = time.monotonic() + RETRY_S
            if not self._record_problem:
                self._view.say(f"nobody supervises this run: {error}", is_event=True)
            self._record_problem = str(error)
            return
        self._acts = True
        self._has_ended = self._writer.has_ended(self._seen, at_once=True)
        self._gatherer = Gatherer(self._run.folder)
        for name, found in self._ungathered.items():
            self._gather(name, found)
        self._state = State.from_dict(self._run.judgement, self._rules)
        self._view.say("supervising now: the one before is gone")

    def _pass(self, state: State) -> None:
        """Take over only the time from a decision that is not carried out."""
        self._state = dataclasses.replace(
            self._state, clock=state.clock, elapsed_s=state.elapsed_s, ended_since=state.ended_since
        )

    def _do(self, action: Action, state: State) -> None:
        _LOG.debug("generation %d: %s", state.generation, action)
        if isinstance(action, Notice):
            self._view.say(action.text, is_event=True)
            self._note("said", text=action.text)
        elif isinstance(action, Start | Join) and self._run.stopped_by:
            pass
        elif isinstance(action, Exclude):
            self._exclude(action, state)
        elif not isinstance(action, Finish):
            self._note(action.kind, about=action.node, generation=state.generation)
            threading.Thread(target=self._attempt, args=(action, state), daemon=True).start()

    def _exclude(self, action: Exclude, state: State) -> None:
        try:
            is_done = self._exclusions.exclude(action.node, action.why)
        except KitError as error:
            self._exclude_again(action.node)
            if isinstance(error, NotWritten):
                self._writer.cannot_write(str(error))
            else:
                self._view.say(f"{action.node} is not drained, though broken: {error}", is_event=True)
            return
        if not is_done:
            self._exclude_again(action.node)
            return
        self._view.say(out_of_the_job(action.node, action.why), is_event=True)
        self._note("drain", about=action.node, why=action.why)
        threading.Thread(target=self._attempt, args=(action, state), daemon=True).start()

    def _exclude_again(self, name: str) -> None:
        """Have the policy decide again to drain a node, since that has failed."""
        known = self._state.known
        again = dataclasses.replace(known[name], excluded=NodeHistory().excluded)
        self._state = dataclasses.replace(self._state, known={**known, name: again})

    def _attempt(self, action: NodeAction, state: State) -> None:
        try:
            match action:
                case Start(name, is_new):
                    self._start(name, state, is_new)
                case Join(name):
                    self._client.join(name, state)
                case Fence(name, generation):
                    self._client.fence(name, generation)
                case SetVoters(name, voters):
                    self._client.set_voters(name, voters)
                case Stop(name):
                    self._client.stop(name)
                case Drain(name):
                    self._client.stop(name, for_good=False)
                case Exclude(name, why):
                    self._client.remember(name, why)
        except KitError as error:
            kind: Heard = "problem" if isinstance(action, Start) else "refused"
            _LOG.debug("generation %d: %s: %s", state.generation, action, type(error).__name__)
            self._queue.put((action.node, kind, error))

    def _start(self, name: str, state: State, is_new: bool) -> None:
        self._queue.put((name, "busy", "starting its agent"))
        try:
            self._client.start_anew(
                name, state, is_new=is_new, stands_by=self._has_stayed, record=self._record
            )
        finally:
            self._queue.put((name, "busy", ""))

    def _has_stayed(self) -> bool:
        """Whether a rank of this run has kept its process from one attempt to the next."""
        return any(status.get("stayed") for status in self._statuses.copy().values())

    def _record(self, name: str, node: NodePlan, clock_offset_s: float) -> None:
        """Have the watching thread record a node's plan and clock offset, and wait until it has.

        Raises:
            KitError: the record cannot be written, or the watching thread is about to end.
        """
        written: Future[None] = Future()
        self._queue.put((name, "plan", (node, clock_offset_s, written)))
        while not self._closing.is_set():
            with contextlib.suppress(NotYet):
                return written.result(timeout=LOOK_AGAIN_S)
        raise KitError("the run is being ended")

    def _write_plan(self, name: str, node: NodePlan, clock_offset_s: float, written: Future[None]) -> None:
        try:
            self._writer.write_plan(name, node, clock_offset_s)
        except NotWritten as error:
            written.set_exception(error)
        except Over as over:
            written.set_exception(KitError(str(over)))
        else:
            written.set_result(None)

    def _end(self, finish: Finish) -> Verdict:
        running = [name for name, seen in self._seen.items() if seen.reachable and seen.alive]
        if running and self._acts and not self._has_ended:
            self._client.stop_all()
        out = tuple(name for name in self._rules.nodes if name in self._rules.drained and name not in running)
        took_part = {name: told for name, told in self._told.items() if told.state and name not in out}
        found = verdict(
            took_part or self._told,
            max_restarts=self._client.inventory.job.max_restarts,
            also=finish.text,
            because=finish.cause,
        )
        return dataclasses.replace(found, without=(*found.without, *out), may_go_on=finish.may_go_on)

    def stop(self, *, force: bool) -> dict[str, Any]:
        """Stop the run on every node; return host → what was found there, or the exception."""
        self._closing.set()
        return self._client.stop_all(force=force, say=self._view.say)

    def close(self) -> None:
        """Stop following the nodes, and pass the last events to the observers; call once the end is on record."""
        self._closing.set()
        if self._acts:
            self._client.gather_events(self._gatherer)
        self._tell_observers()
        for each in self._observers:
            with contextlib.suppress(Exception):
                each.close()

    # --- reports of the nodes ---

    def _follow(self, name: str) -> None:
        offsets = dict(self._shown[name]) if name in self._shown else None

        def take(part: Any) -> None:
            nonlocal offsets
            if (moved := part["offsets"]) is not None:
                offsets = {**(offsets or {}), **moved}
            self._queue.put((name, "part", part))

        while not self._closing.is_set():
            pause_s = LOOK_AGAIN_S
            try:
                if name not in self._channels:
                    self._channels[name] = self._reopen(name)
                if name not in self._run.nodes:  # it was never started: the first start makes its plan
                    if self._channels[name].is_lost:  # nothing else would notice that
                        raise ChannelLost(name, "the connection is gone")
                    self._queue.put((name, "unknown", None))
                else:
                    final = self._channels[name].stream(
                        "hostfollow.follow",
                        take,
                        silence_s=UNREACHABLE_AFTER_S,
                        node_dir=self._run.nodes[name]["node_dir"],
                        offsets=offsets,
                        tail_bytes=self._tail_bytes if offsets is None else None,
                        events_at=self._gatherer.at(name),
                    )
                    self._queue.put((name, "ended", final))
            except RemoteError as error:
                self._queue.put((name, "lost", error))
                pause_s = RETRY_S
            except HostError as error:
                self._queue.put((name, "lost", error))
                if (lost := self._channels.pop(name, None)) is not None:
                    threading.Thread(target=lost.close, daemon=True).start()
                    pause_s = 0.0
                else:
                    pause_s = RETRY_S
            if self._closing.wait(pause_s):
                return

    def _take(self, name: str, kind: Heard, value: Any) -> None:
        seen = self._seen[name]
        if kind == "plan":
            self._write_plan(name, *value)
            return
        if kind == "busy":
            self._busy[name] = value
            return
        if kind in ("problem", "refused"):
            why = self._note_error(kind, name, value)
            self._busy[name] = ""
            if kind == "problem":
                self._view.say(f"{name}: not started: {why}", is_event=self._acts)
                broken = why if isinstance(value, BrokenHost) else ""
                self._seen[name] = dataclasses.replace(seen, problem=why, broken=broken)
            return
        if kind == "lost":
            if seen.reachable or name not in self._heard:
                self._note_error("unreachable", name, value)
                why = "; ".join(each.problem.found for each in value.errors)
                what = (
                    "its status cannot be read"
                    if isinstance(value, RemoteError)
                    else "no connection from here"
                )
                self._view.say(f"{name}: {what}: {why}; trying again", is_event=self._acts)
                self._told[name] = dataclasses.replace(self._told[name], silent_since=time.time())
            self._heard.setdefault(name, 0.0)
            self._statuses.pop(name, None)
            self._seen[name] = dataclasses.replace(seen, reachable=False)
            self._lines[name] = "unreachable  trying again"
            return
        if not seen.reachable and name in self._heard:
            self._view.say(f"{name}: reached again", is_event=self._acts)
            self._note("reached", about=name)
        self._heard[name] = time.monotonic()
        if kind == "unknown":
            self._seen[name] = Observation(problem=seen.problem, broken=seen.broken)
            self._lines[name] = self._drained.line(name) or "spare"
            return
        status = value["status"] if kind == "part" else value
        if kind == "part":
            self._see_to_clock(name, value["time"])
            for file, text in value["logs"]:
                self._log(name, file, text)
            self._gather(name, value["events"])
        self._statuses[name] = status
        if self._acts:
            offset = self._run.clock_offsets.get(name, 0.0)
            with self._writer.timed():
                self._gatherer.heard(name, status, clock_offset=offset)
        self._tell(name, status)
        left = {"problem": seen.problem, "broken": seen.broken} if not status["alive"] else {}
        new = seen_of(status, **left)
        if new.state != seen.state:
            self._note("node-state", about=name, state=new.state, attempt=status.get("attempt"))
        said = str(status.get("progress") or "")
        if not self._first_step and not Progress.parse(said, 0.0).is_start:
            self._first_step = True
            self._note("first-progress", about=name, progress=said)
        self._seen[name] = new
        self._lines[name] = self._line(name, status)

    def _note(self, kind: EventKind, **fields: Any) -> None:
        """Add an event to the run's, if this process acts; else the supervisor that acts records the same."""
        if self._acts:
            self._add(lambda: self._gatherer.add(self._run.event_line(kind, **fields)))

    def _add(self, add: Callable[[], bool]) -> None:
        """Add events to the run's by a call that returns False if the disk is full; that is told to the user."""
        with self._writer.timed():
            is_written = add()
        if not is_written:
            self._writer.cannot_write(NO_ROOM.format(self._run.folder))

    def _note_error(self, kind: EventKind, name: str, error: KitError) -> str:
        """Add an event about a node's error, and return the error in one line, without the node's name."""
        problems = [each.problem for each in error.errors]
        why = "; ".join(map(str, problems))
        self._note(kind, about=name, why=why, problems=[each._asdict() for each in problems])
        return why

    def _gather(self, name: str, found: Sequence[Any]) -> None:
        """Add a node's events to the run's; a process that only watches keeps the last ones, in case it takes over."""
        if self._acts:
            offset = self._run.clock_offsets.get(name, 0.0)
            self._add(lambda: self._gatherer.add_of_node(name, found, clock_offset=offset))
            set_s = self._gatherer.clock_offset(name, offset) - offset
            if set_s and self._writer.write_clocks({name: offset + set_s}):
                self._tell_of_clock(f"{name}: its clock", set_s)
        else:
            self._ungathered[name].extend(found)

    def _see_to_clock(self, name: str, its_time: float) -> None:
        """Where our clock was set, by what a node sends at the moment: its own has stood still by comparison, then.

        After a pause of this machine, as of a virtual one, both have gone on.
        """
        ahead_s = processes.clock_ahead_s()
        set_s = ahead_s - self._clock_ahead_s
        if abs(set_s) <= CLOCK_SET_S:
            return
        self._clock_ahead_s = ahead_s
        offset = self._run.clock_offsets.get(name, 0.0) - set_s
        if not self._acts or abs(its_time - time.time() - offset) > CLOCK_SET_S:
            return
        offsets = {**dict.fromkeys(self._run.nodes, 0.0), **self._run.clock_offsets}
        self._writer.write_clocks({node: each - set_s for node, each in offsets.items()})
        self._gatherer.our_clock_was_set(set_s)
        self._tell_of_clock("this machine's clock", set_s, clock_set_s=set_s)

    def _tell_of_clock(self, which: str, set_s: float, **fields: float) -> None:
        """Tell the user, and record, that a clock was set forward by `set_s` seconds, or back."""
        way = "forward" if set_s > 0 else "back"
        text = f"{which} was set {way} by about {abs(set_s):.0f} s; times are corrected for that"
        self._view.say(text, is_event=True)
        self._note("said", text=text, **fields)

    def _line(self, name: str, status: NodeStatus) -> str:
        if not status["alive"] and (out := self._drained.line(name)):
            return out
        if not status["alive"] and status.get("state") not in runs.ENDED:
            return self._busy.get(name) or absence(status)
        now = time.time() + self._run.clock_offsets.get(name, 0.0)
        return status_line(status, now=now)

    def _tell(self, name: str, status: NodeStatus) -> None:
        """Report new failures of a node to the user, and keep them for the verdict."""
        told = self._told[name]
        offset = self._run.clock_offsets.get(name, 0.0)
        failures = tuple(Failure.of(name, each, clock_offset=offset) for each in status.get("failures", ()))
        before = told.failures
        # The status lists the latest failures. Compare those first: a run of weeks has thousands.
        is_new = before[len(before) - len(failures) :] != failures
        for failure in failures if is_new else ():
            if failure not in before:
                line = line_of(failure.error) or "it wrote nothing"
                how = how_it_ended(failure.exitcode)
                how = f"was {how}" if how.startswith("killed") else f"ended with {how}"
                if is_secondary(failure.error, failure.exitcode) and not was_told(failure):
                    line = "it has lost another rank"  # the error itself is long, and in the log
                text = f"{name}: rank {failure.rank} {how}: {line}"
                self._view.say(text, is_event=True)
        if (notice := str(status.get("notice") or "")) != told.notice and notice:
            self._view.say(notice)
        unfit = str(status.get("unwritable") or "")
        if unfit and unfit != told.unwritable:
            text = f"warning: {name}: {unwritable(status)}"
            self._view.say(text, is_event=True)
            self._note("said", about=name, text=text, unwritable=unfit)
        attempt = str(status.get("attempt") or told.attempt)
        state = str(status.get("state") or ("starting" if status.get("agent") else ""))
        message = str(status.get("message") or "")
        cure = str(status.get("cure") or "")
        if not status["alive"] and state not in runs.ENDED and not cure:
            message = str(status.get("agent_log", "")).strip()[-2000:]
        self._told[name] = Told(
            state=state,
            # A restarted agent begins a new list; failures from before its restart still count.
            failures=(*(each for each in before if each not in failures), *failures) if is_new else before,
            message=message,
            cause=str(status.get("cause") or ""),
            cure=cure,
            no_progress=bool(status.get("no_progress")),
            notice=notice,
            # Not told again and again; but it has written since where it is in another attempt.
            unwritable=unfit or (told.unwritable if attempt == told.attempt else ""),
            attempt=attempt,
            ranks=tuple(each["rank"] for each in status.get("workers") or ()) or told.ranks,
            ended=tuple(status.get("ended") or ()),
            address=str(status.get("address") or told.address),
        )

    def _log(self, node: str, file: str, text: str) -> None:
        rank = file.removeprefix("rank").partition("-")[0]
        lines = []
        for line in text.split("\n")[:-1]:
            lines.append(line.rstrip("\r").rpartition("\r")[2])  # a progress bar's last state is its line
        self._view.log(node, rank, lines)
