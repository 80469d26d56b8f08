"""Describes a run's events (docs/events.md) in sentences for the user. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from nodekit.deploy.agent.ranks.failures import how_it_ended, is_secondary
from nodekit.deploy.output.wording import count, duration, names
from nodekit.deploy.records.events import Event

SAID_S = 2.0
"""How long after an attempt's first step to wait for the reports of all its nodes, which come each second."""
COMING_S = 10.0
"""How long after a node was reached, started or called no further steps of its joining are described."""


class Narrator:
    """Turns events into sentences, and remembers them, so that an event recorded by several nodes is described once."""

    def __init__(self) -> None:
        """Begin with no events."""
        self._told: set[Hashable] = set()
        self._started: float | None = None
        self._attempt = ""
        self._members: frozenset[str] = frozenset()
        self._entered: set[tuple[str, str | None]] = set()
        """Pairs (attempt, node) of nodes that have reported the attempt's rendezvous."""
        self._been: set[str] = set()
        self._named_lost: set[str] = set()
        self._world_size = 0
        self._stayed: dict[object, dict[str | None, int]] = {}
        """Attempt → node → the number of its ranks that kept their processes."""
        self._resuming: tuple[object, float, str] | None = None
        """(attempt, time of its first step, sentence) while not all its nodes have reported that number."""
        self._drained: set[str] = set()
        self._came: dict[str | None, float] = {}
        """Node → when a sentence last said that it is joining, or was reached."""
        self._broke: float | None = None
        self._going_since = 0.0
        self._has_trained = False
        self._step = 0
        self._resumed: tuple[object, int] = (None, 0)
        self._best: float | None = None

    def tell(self, event: Event) -> list[str]:
        """Return the sentences for the next event: mostly none, since other events have told the same.

        Args:
            event: the next one, in the order of the run's file or of time.
        """
        how: Callable[[Event], list[str]] | None = getattr(self, "_on_" + event.kind.replace("-", "_"), None)
        said = how(event) if how is not None else []
        return [*self._resumed_by(event), *said]

    def _once(self, *what: Hashable) -> bool:
        """Whether this is the first call with these values."""
        if what in self._told:
            return False
        self._told.add(what)
        return True

    def _breaks(self, event: Event) -> None:
        """Note that training was interrupted at this event, unless it was before."""
        if self._broke is None and event.time > self._going_since:  # else an event from before arrived late
            self._broke = event.time

    @property
    def _leaving(self) -> str:
        """The drained nodes that are still in the round, in words; "" if none. The others will miss them: no loss."""
        return names(sorted(self._drained & self._members))

    def _reaches(self, event: Event) -> None:
        self._step = max(self._step, int(event.get("step") or 0))

    # --- of the supervisor ---

    def _on_run_started(self, event: Event) -> list[str]:
        nodes = event.get("nodes") or ()
        self._started, self._broke, self._attempt, self._members = event.time, None, "", frozenset()
        number = count(len(nodes) if isinstance(nodes, Collection) else int(nodes), "node")
        if event.get("goes_on"):
            return [f"the run goes on with {number}, in generation {event.get('generation')}"]
        return [f"the run starts on {number}"]

    def _comes(self, event: Event, text: str) -> list[str]:
        """Return the text only once while a node joins, not for each step; failures to join have their own events."""
        told_s = event.time - self._came.get(event.about, -COMING_S)
        self._came[event.about] = event.time
        return [text] if told_s >= COMING_S else []

    def _on_start(self, event: Event) -> list[str]:
        return self._comes(event, f"{event.about}: starting its agent")

    def _on_join(self, event: Event) -> list[str]:
        generation = event.get("generation")
        if not self._once("join", event.about, generation):
            return []
        return self._comes(event, f"{event.about} is called into generation {generation}")

    def _on_stop(self, event: Event) -> list[str]:
        return [f"{event.about}: stopping it, for the job has ended elsewhere"]

    def _on_drain(self, event: Event) -> list[str]:
        self._drained |= {str(event.about)}
        if why := _first_line(event.get("why")):
            return [out_of_the_job(str(event.about), why)]
        return [f"{event.about} is drained: its ranks save, and it leaves the job"]

    def _on_undrain(self, event: Event) -> list[str]:
        self._drained -= {str(event.about)}
        return [f"{event.about} may come back into the job"]

    def _on_problem(self, event: Event) -> list[str]:
        return [f"{event.about}: not started: {event.get('why')}"]

    def _on_refused(self, event: Event) -> list[str]:
        return [f"{event.about}: {event.get('why')}"]

    def _on_unreachable(self, event: Event) -> list[str]:
        problems = event.get("problems") or [{}]
        why = _first_line(problems[0].get("found") or event.get("why"))
        return [f"{event.about} is unreachable" + (f": {why}" if why else "")]

    def _on_reached(self, event: Event) -> list[str]:
        self._came[event.about] = event.time
        return [f"{event.about}: reached again"]

    def _on_said(self, event: Event) -> list[str]:
        return [str(event.get("text"))] if event.get("text") else []

    def _on_run_ended(self, event: Event) -> list[str]:
        if not self._once("run-ended", self._started):  # several processes may record the end
            return []
        why = _first_line(event.get("verdict"))
        if event.get("state") == "stopped":
            return [f"the run was {why or 'stopped'}"]
        state = "has failed" if event.get("state") == "failed" else "is over"
        told = why and why != event.get("state")
        return [f"the run {state}" + (f": {why}" if told else "")]

    # --- of a node ---

    def _on_agent_started(self, event: Event) -> list[str]:
        return [f"{event.node}: its agent is there"] if self._has_trained else []

    def _on_agent_ended(self, event: Event) -> list[str]:
        self._breaks(event)
        if event.get("cause") == "broken":
            return [f"{event.node} leaves the job: {_first_line(event.get('message'))}"]
        if event.get("state") == "ended" and event.node not in self._drained:
            return [f"{event.node}: its agent was ended by someone else"]
        return []

    def _on_membership(self, event: Event) -> list[str]:
        self._breaks(event)
        lost, waiting = int(event.get("lost") or 0), int(event.get("waiting") or 0)
        if not lost and (self._attempt, event.node) not in self._entered:
            return []  # it pauses for nodes whose joining was described already
        who = event.get("names") or ()
        # A node that misses most of the others is more likely cut off itself.
        is_alone = not self._leaving and 2 * lost > len(self._members) > 1
        key = ("membership", self._attempt, event.node if is_alone else "")
        if not self._once(*key) or ("cause", self._attempt) in self._told:
            return []  # a node whose rank has failed leaves the round, and joins the next one
        if lost and self._leaving:
            return [f"{self._leaving} has left; the others re-rendezvous"]
        if is_alone:
            return [f"{event.node}: nothing is heard from {names(who) or count(lost, 'node')}"]
        if lost:
            self._named_lost |= set(who)
            text = names(who) or count(lost, "node")
            return [f"{text} {'is' if lost == 1 else 'are'} lost; the others re-rendezvous"]
        verb, whom = ("comes", "it") if waiting == 1 else ("come", "them")
        return [f"{count(waiting, 'node')} {verb} in: ranks finish their step, and go on with {whom}"]

    def _on_rendezvous(self, event: Event) -> list[str]:
        attempt = str(event.get("attempt"))
        self._entered.add((attempt, event.node))
        if not self._once("rendezvous", attempt):
            return []
        members = frozenset(event.get("members") or ())
        before, self._members, self._attempt = self._members, members, attempt
        lost, new = sorted(before - members), sorted(members - before)
        back = [name for name in new if name in self._been]
        come = [name for name in new if name not in self._been]
        named, self._named_lost = self._named_lost | self._drained, set()
        out = [name for name in lost if name not in named]
        self._been |= members
        if not before:
            return []
        number = count(len(members), "node")
        if not lost and not new:
            return [f"re-formed with the same {number}"]
        parts = [f"{names(back)} {'is' if len(back) == 1 else 'are'} back"] if back else []
        parts += [f"{names(come)} {'has' if len(come) == 1 else 'have'} come in"] if come else []
        parts += [f"{names(out)} {'is' if len(out) == 1 else 'are'} out"] if out else []
        return ["; ".join([*parts, f"re-formed with {number}"])]

    def _on_workers_started(self, event: Event) -> list[str]:
        self._world_size = int(event.get("world_size") or 0)
        self._stayed.setdefault(event.get("attempt"), {})[event.node] = len(event.get("stayed") or ())
        return []

    def _on_first_step(self, event: Event) -> list[str]:
        if not self._once("first-step", event.get("attempt")):
            return []
        step, last = int(event.get("step") or 0), self._step
        began = self._broke if self._broke is not None else self._started
        after = f" after {duration(event.time - began)}" if began is not None else ""
        self._broke, self._going_since = None, event.time
        attempt, saved = self._resumed
        is_resumed = attempt == event.get("attempt")
        self._step = step  # later steps that were reported are done again
        if not self._has_trained and last == 0 and not is_resumed:
            self._has_trained = True
            ranks = f" with {count(self._world_size, 'rank')}" if self._world_size else ""
            where = f" on {count(len(self._members), 'node')}" if self._members else ""
            return [f"training{where}{ranks}; the first step{after}"]
        self._has_trained = True
        goes_on = saved if is_resumed else step
        redone = last - goes_on
        again = f", {count(redone, 'step')} redone" if redone > 0 else ""
        earlier = self._resumed_text()
        self._resuming = event.get("attempt"), event.time, f"resumed at step {goes_on:,}{after}{again}"
        return earlier

    def _resumed_by(self, event: Event) -> list[str]:
        """Return that training resumed, once all nodes reported which ranks kept their process, or `SAID_S` passed."""
        if self._resuming is None:
            return []
        attempt, since, _ = self._resuming
        is_over = event.time > since + SAID_S or event.kind in ("attempt-ended", "agent-ended", "run-ended")
        told = self._stayed.get(attempt, {}).keys()
        return self._resumed_text() if is_over or not told or self._members <= told else []

    def _resumed_text(self) -> list[str]:
        """Return that training resumed, and how many ranks kept their processes by the reports so far."""
        if self._resuming is None:
            return []
        (attempt, _, text), self._resuming = self._resuming, None
        if not (number := sum(self._stayed.get(attempt, {}).values())):
            return [text]
        process = "its process" if number == 1 else "their processes"
        return [f"{text}; {number} of {count(self._world_size, 'rank')} kept {process}"]

    def _on_sample(self, event: Event) -> list[str]:
        if event.get("attempt") == self._attempt or not self._attempt:
            self._reaches(event)
        return []

    def _on_resumed(self, event: Event) -> list[str]:
        self._resumed = (event.get("attempt"), int(event.get("step") or 0))
        return []

    def _on_not_finite(self, event: Event) -> list[str]:
        ranks = [str(rank) for rank in event.get("ranks") or ()]
        who = f"rank{'s' * (len(ranks) != 1)} {names(ranks)}"
        is_loss = event.get("what") == "loss"
        is_what = f"is {event.get('value')}" if is_loss else "are not finite"
        when = f"{'of' if is_loss else 'after'} step {int(event.get('step') or 0):,}"
        back = ": back to the newest snapshot" if event.get("action") == "rollback" else ": training stops"
        return [f"the {event.get('what')} {when} {is_what} on {who}{back}"]

    def _on_attempt_ended(self, event: Event) -> list[str]:
        self._breaks(event)
        self._reaches(event)
        return []

    def _on_evaluation(self, event: Event) -> list[str]:
        metrics: Mapping[str, Any] = event.get("metrics") or {}
        key = "accuracy" if "accuracy" in metrics else "loss"
        value = metrics.get(key)
        if not isinstance(value, int | float):
            return []
        score = value if key == "accuracy" else -value
        if self._best is not None and score <= self._best:
            return []
        best, self._best = self._best is not None, score
        text = ", ".join(f"{name} {metric(name, each)}" for name, each in metrics.items())
        return [
            f"evaluated at step {int(event.get('step') or 0):,}: {text}"
            + (", the best so far" if best else "")
        ]

    def _on_worker_failed(self, event: Event) -> list[str]:
        self._breaks(event)
        error, exitcode = str(event.get("error") or ""), int(event.get("exitcode") or 0)
        attempt = event.get("attempt")
        who = f"rank {event.get('rank')} on {event.node}"
        if is_secondary(error, exitcode):
            if self._leaving:
                return []
            is_first = ("cause", attempt) not in self._told and self._once("echo", attempt)
            return [f"{who} has lost another rank"] if is_first else []
        self._told.add(("cause", attempt))
        last = (error.strip().splitlines() or ["it wrote nothing"])[-1]
        return [f"{who} failed ({how_it_ended(exitcode)}): {last}"]

    def _on_hang(self, event: Event) -> list[str]:
        self._breaks(event)
        text = _first_line(event.get("text"))
        return [text] if text and self._once("hang", self._attempt, text) else []

    def _on_slow(self, event: Event) -> list[str]:
        line = _first_line(event.get("line"))
        return [line] if line else []

    def _on_lingering(self, event: Event) -> list[str]:
        ranks = sorted(event.get("stacks") or (), key=lambda rank: (len(str(rank)), str(rank)))
        return [f"{event.node}: rank {', '.join(map(str, ranks))} did not end when asked"] if ranks else []

    def _on_gpu_error(self, event: Event) -> list[str]:
        gpu = "its GPUs" if event.get("gpu") is None else f"GPU {event.get('gpu')}"
        return [f"{event.node}: {gpu}: {_first_line(event.get('text'))}"]

    def _on_gpu_slow(self, event: Event) -> list[str]:
        who = f"{event.node}: GPU {event.get('gpu')}"
        if event.get("over"):
            return [f"{who} is at its full clock again after {duration(float(event.get('seconds') or 0))}"]
        told = [("temperature", "{} °C"), ("clock", "{} MHz"), ("clock_max", "of {} MHz"), ("power", "{} W")]
        figures = ", ".join(
            text.format(event.get(name)) for name, text in told if event.get(name) is not None
        )
        return [
            f"{who} is slowed down: {', '.join(event.get('reasons') or ())} ({figures})".replace(
                ", of", " of"
            )
        ]

    def _on_unkillable(self, event: Event) -> list[str]:
        who = "a process of the ranks" if event.get("rank") is None else f"rank {event.get('rank')}"
        where = f" in {event.get('wchan')}" if event.get("wchan") else ""
        return [
            f"{event.node}: SIGKILL does not end {who} (pid {event.get('pid')}, state {event.get('state')}{where})"
        ]

    def _on_false_alarm(self, event: Event) -> list[str]:
        wait = duration(float(event.get("lost_after_s") or 0))
        return [f"a node taken for lost was alive: the time-out is now {wait}"]

    def _on_no_quorum(self, event: Event) -> list[str]:
        members = tuple(event.get("members") or ())
        voters = event.get("electorate") or {}
        voters = voters.get("nodes", ()) if isinstance(voters, Mapping) else voters
        if not self._once("no-quorum", members, tuple(voters)):
            return []
        verb = "waits" if len(members) == 1 else "wait"
        return [f"{names(members)} {verb}: no majority of {names(voters)}"]

    def _on_store_lost(self, event: Event) -> list[str]:
        self._breaks(event)
        if not self._once("store-lost", self._attempt):
            return []
        why = _first_line(event.get("why"))
        if event.get("forged"):
            return [f"{event.node}: {why}"]
        if self._leaving:
            return [f"the rendezvous was on {self._leaving}, which is drained: it moves to another node"]
        return [f"{event.node} has lost the rendezvous host"]

    def _on_replica_failed(self, event: Event) -> list[str]:
        why = _first_line(event.get("reason"))
        if not self._once("replica", event.node, why):
            return []
        drained = f" ({self._leaving}: drained)" if self._leaving else ""
        return [f"{event.node}: a copy of a snapshot could not be kept: {why}{drained}"]

    _on_replica_refused = _on_replica_failed


def out_of_the_job(node: str, why: str) -> str:
    """Return a sentence that a broken node was drained, and how it can be used again after its repair."""
    return f"{node} is drained: {why}; after the repair, kit clean --forgive lets runs use it again"


def metric(name: str, value: Any) -> str:
    """Format a metric of an evaluation for the user; accuracies as percentages."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


def _first_line(text: object) -> str:
    return str(text or "").strip().partition("\n")[0]
