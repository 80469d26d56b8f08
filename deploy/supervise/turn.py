"""The working state of one decision of the policy: what it is based on, and the actions decided so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nodekit.deploy.supervise.state import Action, Notice, Observation, Rules, State

ASK_AGAIN_S = 5.0  # an action whose effect has not been seen is repeated after this time
START_AGAIN_S = 60.0  # the same for a start, which may take long: connecting, sync, imports
FORGIVEN_S = 600.0  # a node that was not lost for so long starts again with no failures counted
SAY_AGAIN_S = 5.0  # the least time between two notices on one topic


class Turn:
    """One decision of the policy: its inputs, the state that it changes, and the actions decided so far."""

    def __init__(self, state: State, seen: Mapping[str, Observation], rules: Rules) -> None:
        self.state = state
        self.seen = seen
        self.rules = rules
        self.now = state.elapsed_s
        self.known = dict(state.known)
        self.said = dict(state.said)
        self.actions: list[Action] = []
        self.lacks = ""
        """What the next generation waits for, other than nodes, in words for the user."""
        self.in_sight = [name for name in rules.nodes if seen[name].reachable]
        self.own = [n for n in self.in_sight if seen[n].alive and seen[n].generation == state.generation]
        """Reachable nodes with a live agent of the present generation."""
        # Most nodes name the same round. Compare by identity first: comparing 1000 tuples of 1000 names takes long.
        rounds = {id(seen[name].members): seen[name].members for name in self.own if seen[name].trains}
        self.rounds = {frozenset(members).intersection(seen) for members in rounds.values()}
        """The members of each rendezvous round that trains, as reachable nodes report them."""
        unseen = {member for members in self.rounds for member in members}.difference(self.in_sight)
        self.here = {*self.own, *unseen}
        """Nodes in the job: those of `own`, and unreachable ones that train with a reachable node."""

    def change(self, **changes: Any) -> None:
        """Change fields of the state."""
        if any(getattr(self.state, name) != value for name, value in changes.items()):
            self.state = dataclasses.replace(self.state, **changes)

    def ask(self, name: str, what: str, again_s: float, action: Action) -> None:
        """Add an action on a node, unless the same one (`what`) was added less than `again_s` seconds ago."""
        known = self.known[name]
        if known.asked == what and self.now - known.asked_at < again_s:
            return
        self.actions.append(action)
        self.known[name] = dataclasses.replace(known, asked=what, asked_at=self.now)

    def is_coming(self, name: str) -> bool:
        """Whether a node was started or called into this generation less than `START_AGAIN_S` ago."""
        known = self.known[name]
        return known.asked in ("start", "join") and self.now - known.asked_at < START_AGAIN_S

    def is_paused(self, name: str) -> bool:
        """Whether a node is left out for now: it was lost too often, or is drained."""
        return name in self.rules.drained or self.known[name].paused_until > self.now

    def tell(self, text: str) -> None:
        """Tell the user, every time."""
        self.actions.append(Notice(text))

    def say(self, topic: str, text: str) -> None:
        """Tell the user, unless this was the last text on the topic; "" clears the topic."""
        old, at = self.said.get(topic, ("", -SAY_AGAIN_S))
        if text == old or (text and self.now - at < SAY_AGAIN_S):
            return
        if text:
            self.actions.append(Notice(text))
        self.said[topic] = (text, self.now if text else at)

    def wiped(self) -> set[str]:
        """Return voters whose run folder is gone, and with it their fence and the voters that they had written down.

        If such a node were started in this generation, it would vote as if it had promised nothing. It may rejoin as
        a new node once it is no voter (the others train, and the voters are reduced to them) or in the next generation.
        """
        voting = {*self.state.voters.nodes, *self.state.newest.nodes} & self.state.had_folder
        return {
            n for n in voting if self.seen[n].reachable and self.seen[n].fence < 0 and not self.seen[n].alive
        }

    def count_failure(self, name: str) -> None:
        """Count one more loss, or failed start, of a node; a node lost again and again is left out for a while."""
        if name in self.rules.drained:
            return
        old = self.known[name]
        is_forgiven = bool(old.failures) and self.now - max(old.failures[-1], old.paused_until) > FORGIVEN_S
        failures = (*(() if is_forgiven else old.failures[-20:]), self.now)
        self.known[name] = new = dataclasses.replace(old, failures=failures)
        if (pause_s := new.paused_until - self.now) > 0:
            self.say(name, f"{name}: lost {len(failures)} times lately; it is left out for {pause_s:.0f} s")
