"""One decision of the supervisor in the making: what it is made from, and what has come out so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nodekit.deploy.supervise.state import Action, Notice, Observation, Rules, State

ASK_AGAIN_S = 5.0
START_AGAIN_S = 60.0  # a start may take long: connecting, sync, imports
FORGIVEN_S = 600.0
SAY_AGAIN_S = 5.0


class Turn:
    """One decision in the making: what it is made from, and what has come out so far."""

    def __init__(self, state: State, seen: Mapping[str, Observation], rules: Rules) -> None:
        self.state = state
        self.seen = seen
        self.rules = rules
        self.now = state.elapsed_s
        self.known = dict(state.known)
        self.said = dict(state.said)
        self.actions: list[Action] = []
        self.lacks = ""
        """What the next generation waits for, other than nodes."""
        self.in_sight = [name for name in rules.nodes if seen[name].reachable]
        self.own = [n for n in self.in_sight if seen[n].alive and seen[n].generation == state.generation]
        """Whose agents of this generation can be seen."""
        # Most nodes name the same round: by identity first, for a thousand tuples of a thousand are long to compare.
        rounds = {id(seen[name].members): seen[name].members for name in self.own if seen[name].trains}
        self.rounds = {frozenset(members).intersection(seen) for members in rounds.values()}
        """The rounds that train, as those in sight say."""
        unseen = {member for members in self.rounds for member in members}.difference(self.in_sight)
        self.here = {*self.own, *unseen}
        """Who is in the job: reachable, or unreachable but training with a node that is reachable."""

    def change(self, **changes: Any) -> None:
        """Change fields of the state."""
        if any(getattr(self.state, name) != value for name, value in changes.items()):
            self.state = dataclasses.replace(self.state, **changes)

    def ask(self, name: str, what: str, again_s: float, action: Action) -> None:
        """Ask for an action, unless the same was asked for just now."""
        known = self.known[name]
        if known.asked == what and self.now - known.asked_at < again_s:
            return
        self.actions.append(action)
        self.known[name] = dataclasses.replace(known, asked=what, asked_at=self.now)

    def is_coming(self, name: str) -> bool:
        """Whether it was called into this generation a short while ago."""
        known = self.known[name]
        return known.asked in ("start", "join") and self.now - known.asked_at < START_AGAIN_S

    def is_paused(self, name: str) -> bool:
        """Whether it is to be left out now: it was lost too often, or the user wants it out."""
        return name in self.rules.drained or self.known[name].paused_until > self.now

    def tell(self, text: str) -> None:
        """Say what happens this once."""
        self.actions.append(Notice(text))

    def say(self, topic: str, text: str) -> None:
        """Say something once; "" takes it back, so that it may be said again."""
        old, at = self.said.get(topic, ("", -SAY_AGAIN_S))
        if text == old or (text and self.now - at < SAY_AGAIN_S):
            return
        if text:
            self.actions.append(Notice(text))
        self.said[topic] = (text, self.now if text else at)

    def wiped(self) -> set[str]:
        """Nodes whose vote counts, but whose run folder is gone, and with it what they promised.

        Started in this generation, such a node would vote as if it had promised nothing. So it comes in as a new node
        only once it has no vote (the others train, and the voters are reduced to them), or in the next generation.
        """
        voting = {*self.state.voters.nodes, *self.state.newest.nodes} & self.state.had_folder
        return {
            n for n in voting if self.seen[n].reachable and self.seen[n].fence < 0 and not self.seen[n].alive
        }

    def count_failure(self, name: str) -> None:
        """Note that a node was lost, or did not start."""
        if name in self.rules.drained:
            return
        old = self.known[name]
        is_forgiven = bool(old.failures) and self.now - max(old.failures[-1], old.paused_until) > FORGIVEN_S
        failures = (*(() if is_forgiven else old.failures[-20:]), self.now)
        self.known[name] = new = dataclasses.replace(old, failures=failures)
        if (pause_s := new.paused_until - self.now) > 0:
            self.say(name, f"{name}: lost {len(failures)} times lately; it is left out for {pause_s:.0f} s")
