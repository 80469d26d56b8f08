"""The supervisor's policy: what to do next, from what is known and what is observed. Pure; no clock, no network.

`decide` is called again and again with what was last seen of every node. Each action is about one node and safe to
repeat: it is asked for again when its effect has not been seen after a while. The story it tells:

- A node without an agent gets one (`Start`); an agent of an older generation is called into the present one (`Join`).
- The generation is *broken* when its rendezvous is gone (its host's agent has ended: a store is never opened twice
  in one generation), or when nobody that can be seen has a way to go on. Then, if enough nodes are in sight to make
  sure that no others go on, they are fenced (`Fence`), and when so many of the voters are that the rest cannot
  train (deploy/agent/quorum.py), the next generation begins on the survivors. If the old one turns out to
  train after all, the fencing is called off.
- When nodes are lost for a while and the others train on, the voters are reduced to them (`SetVoters`), and extended
  again when they are back, so that the next loss is measured against who is there.
- What cannot be seen from here is left alone: an unreachable node whose peers train with it is fine.
- A node that the user wants out has its agent ended (`Drain`), which saves with the others, and gets no other one.

A supervisor may die at any moment and another go on from `State.to_dict`. So whoever calls `decide` must have
`to_dict` on disk, when it differs from what is there, *before* it carries out the actions that came with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.records.runs import ENDED, Outcome
from nodekit.deploy.story.causes import TOO_FEW_NODES, Cause

LAST_WORDS_S = 3.0  # after a node failed, how long the others may still tell of their own failure
ASK_AGAIN_S = 5.0
START_AGAIN_S = 60.0  # a start may take long: connecting, sync, imports
BROKEN_S = 0.3  # orphaned agents: how long the others may take to find out the same
NO_QUORUM_S = 1.0
STUCK_S = 60.0  # agents that could meet and do not
SLOW_START_S = 180.0  # the same, while some are being started
GRANT_S = 5.0
STRAY_S = 20.0  # between reminders of where the rendezvous is
FORGIVEN_S = 600.0
FREE_FAILURES = 2
PAUSE_S, MAX_PAUSE_S = 10.0, 600.0
SAY_AGAIN_S = 5.0
MAX_GAP_S = 5.0  # a longer time between two decisions is a clock that jumped, or a machine that slept


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the inventory says."""

    nodes: tuple[str, ...]
    """All hosts, in the inventory's order; those beyond `max_nodes` are spares."""
    min_nodes: int
    max_nodes: int
    wait_s: float = 1800.0
    """How long the job may wait for enough nodes."""
    drained: frozenset[str] = frozenset()
    """Those that the user wants out of the job (`kit drain`); not of the inventory."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What was last seen of one node."""

    reachable: bool = True
    alive: bool = False
    """Whether its agent runs."""
    agent: str = ""
    """Names the process."""
    generation: int = -1
    """Its agent's; of one that ended, its last."""
    state: str = ""
    """starting, rendezvous, running, waiting (done, for the others), orphaned, fenced; succeeded, failed, stopped."""
    blocked: bool = False
    """It waits in a round that may not train."""
    members: tuple[str, ...] = ()
    """Who is in its round."""
    fence: int = -1
    """Generations below this are refused there; -1 where there is no run folder (never started, or lost)."""
    electorate: Voters | None = None
    """The newest it has written down."""
    port: int = 0
    """Where its rendezvous listens or would: a port it keeps."""
    held: tuple[int, int] = (-1, 0)
    """The newest snapshot committed there: (generation, step)."""
    problem: str = ""
    """Why its last start failed."""

    @property
    def trains(self) -> bool:
        """Whether its workers run."""
        return self.alive and self.state in ("running", "waiting")


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """What is remembered of one node."""

    failures: tuple[float, ...] = ()
    """When it was lost, its agent ended, or a start failed; forgiven when all has been well for long."""
    agent: str = ""
    present: bool = False
    """Whether it was in the job when last seen."""
    asked: str = ""
    asked_at: float = 0.0
    problem: str = ""

    @property
    def paused_until(self) -> float:
        """Until when it is left out: longer and longer for a node that is lost again and again."""
        num_paused = len(self.failures) - FREE_FAILURES
        if num_paused <= 0:
            return 0.0
        return self.failures[-1] + min(PAUSE_S * 2.0 ** (num_paused - 1), MAX_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class State:
    """What the supervisor knows; what it decides, it decides from this and what it sees."""

    generation: int
    host: str
    """The node whose agent keeps the rendezvous store."""
    port: int
    electorate: Voters
    """The one in force."""
    granted: Voters | None = None
    """One that is being written down: until it is in force, either may be what a group goes by."""
    next_generation: int | None = None
    """The one being fenced for."""
    called_off: int = -1
    """The last that was fenced for in vain. A `Start` or `Join` says it: up to here a fence holds no longer."""
    voters: frozenset[str] = frozenset()
    """Those that have had a run folder."""
    forgot: frozenset[str] = frozenset()
    """Those of the electorate that have lost theirs since, and with it what they promised and held."""
    known: Mapping[str, NodeHistory] = field(default_factory=dict)
    met: tuple[str, ...] = ()
    """While fencing: the nodes that had a way to each other."""
    has_trained: bool = False
    """Whether this generation was seen to train."""
    elapsed_s: float = 0.0
    """The time that decisions go by: it never goes back, and leaves out when nobody decided."""
    clock: float | None = None
    broken_since: float | None = None
    stuck_since: float | None = None
    fencing_since: float | None = None
    stable_since: float | None = None
    floor: tuple[int, int] = (-1, 0)
    """What nodes must hold to be counted on, since `stable_since`."""
    short_since: float | None = None
    ended_since: float | None = None
    said: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Topic → what was said last, and when."""

    @property
    def newest(self) -> Voters:
        """The electorate that a `Start` or `Join` gives along."""
        return self.granted or self.electorate

    def to_dict(self) -> dict[str, Any]:
        """What another supervisor must know to go on, for JSON; see the top of this file."""
        return {
            "generation": self.generation,
            "host": self.host,
            "port": self.port,
            "electorate": self.electorate.to_dict(),
            "granted": self.granted.to_dict() if self.granted else None,
            "next_generation": self.next_generation,
            "called_off": self.called_off,
            "voters": sorted(self.voters),
            "forgot": sorted(self.forgot),
            "failures": {name: list(each.failures) for name, each in self.known.items() if each.failures},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], rules: Rules) -> State:
        """The state of a supervisor that takes over."""
        failures = {name: tuple(fields["failures"].get(name, ())) for name in rules.nodes}
        return cls(
            generation=fields["generation"],
            host=fields["host"],
            port=fields["port"],
            electorate=Voters.of(fields["electorate"]),
            granted=Voters.of(fields["granted"]) if fields["granted"] else None,
            next_generation=fields["next_generation"],
            called_off=fields["called_off"],
            voters=frozenset(fields["voters"]),
            forgot=frozenset(fields["forgot"]),
            known={name: NodeHistory(failures=failures[name]) for name in rules.nodes},
            elapsed_s=max((when for each in failures.values() for when in each), default=0.0),
        )

    def is_fenced_by(self, nodes: Collection[str]) -> bool:
        """Whether, with these fenced, no group of the others may go on, by whichever electorate."""
        return self.electorate.is_fenced_by(nodes) and self.newest.is_fenced_by(nodes)

    def may_train(self, nodes: Collection[str]) -> bool:
        """Whether a group of these might go on, by whichever electorate."""
        return self.electorate.may_train(nodes) or self.newest.may_train(nodes)


@dataclass(frozen=True)
class Start:
    """Start an agent on a node, for the present generation."""

    node: str
    is_new: bool = False
    """Whether it may make the run folder; where there is none although there should, the node must refuse."""


@dataclass(frozen=True)
class Join:
    """Call a live agent into the present generation."""

    node: str


@dataclass(frozen=True)
class Fence:
    """Refuse all older generations on a node, from now on."""

    node: str
    generation: int


@dataclass(frozen=True)
class SetVoters:
    """Have a node write down another electorate."""

    node: str
    electorate: Voters


@dataclass(frozen=True)
class Stop:
    """Stop the agent on a node: the job has ended elsewhere."""

    node: str


@dataclass(frozen=True)
class Drain:
    """End the agent on a node while the job goes on without it."""

    node: str


@dataclass(frozen=True)
class Notice:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    outcome: Outcome
    text: str = ""
    cause: Cause | None = field(default=None, repr=False)


NodeAction = Start | Join | Fence | SetVoters | Stop | Drain
Action = NodeAction | Notice | Finish


def begin(rules: Rules, *, generation: int, host: str, port: int, nodes: Iterable[str]) -> State:
    """The state right before a generation is started on `nodes`, of a job that no other supervisor leads."""
    return State(
        generation=generation,
        host=host,
        port=port,
        electorate=Voters(generation, 0, tuple(nodes)),
        known={name: NodeHistory() for name in rules.nodes},
    )


def decide(
    state: State, seen: Mapping[str, Observation], now: float, rules: Rules
) -> tuple[State, tuple[Action, ...]]:
    """What to do now, and what to remember; `seen` has every node of `rules`."""
    gap = 0.0 if state.clock is None else min(max(now - state.clock, 0.0), MAX_GAP_S)
    state = dataclasses.replace(state, clock=now, elapsed_s=state.elapsed_s + gap)
    turn = _Turn(state, seen, rules)
    _take_note(turn)
    if _has_ended(turn) or _is_led_by_another(turn) or _is_blind(turn):
        turn.change(broken_since=None, stuck_since=None, short_since=None)
    else:
        _regenerate(turn)
        if turn.state.next_generation is None:
            _adjust_electorate(turn)
            _fill(turn)
            _drain(turn)
        _wait(turn)
    return dataclasses.replace(turn.state, known=turn.known, said=turn.said), tuple(turn.actions)


class _Turn:
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
        """Who is in the job: in sight, or out of sight but training with one in sight."""

    def change(self, **changes: Any) -> None:
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


def _names(names: Collection[str]) -> str:
    """For people: a few of them."""
    first = ", ".join(list(names)[:8])
    return first if len(names) <= 8 else f"{first} and {len(names) - 8} more"


# --- what happened ------------------------------------------------------------------------------------------


def _take_note(turn: _Turn) -> None:
    """Count the losses of each node, once per loss. Out of sight is not lost, unless its peers train without it."""
    if turn.rounds and not turn.state.has_trained:
        turn.change(has_trained=True)
    had_folder = {name for name, each in turn.seen.items() if each.fence >= 0}
    if not had_folder <= turn.state.voters:
        turn.change(voters=turn.state.voters | had_folder)
    if not (lost_folder := _wiped(turn)) <= turn.state.forgot:
        turn.change(forgot=turn.state.forgot | lost_folder)
    for name in turn.rules.nodes:
        old, each = turn.known[name], turn.seen[name]
        here = name in turn.here
        gone = not here and (each.reachable or bool(turn.rounds))
        is_other = bool(each.agent) and each.agent != old.agent
        lost = old.present and gone
        stillborn = is_other and old.asked == "start" and not each.alive
        failed = bool(each.problem) and each.problem != old.problem and old.asked == "start"
        is_cut_short = (
            bool(old.asked) and not each.reachable
        )  # asked again when it is back: it may not know of it
        if (old.agent, old.present, old.problem) == (each.agent, here, each.problem) and not is_cut_short:
            continue
        if (lost or stillborn or failed) and each.state not in ENDED:
            _count_failure(turn, name)
        old = turn.known[name]
        turn.known[name] = dataclasses.replace(
            old,
            agent=each.agent or old.agent,
            present=here or (old.present and not gone),
            # Of one that came and is lost, nothing more comes of what it was asked.
            asked="" if is_other or is_cut_short or failed or lost else old.asked,
            problem=each.problem or old.problem,
        )


def _count_failure(turn: _Turn, name: str) -> None:
    if name in turn.rules.drained:
        return
    old = turn.known[name]
    is_forgiven = bool(old.failures) and turn.now - max(old.failures[-1], old.paused_until) > FORGIVEN_S
    failures = (*(() if is_forgiven else old.failures[-20:]), turn.now)
    turn.known[name] = new = dataclasses.replace(old, failures=failures)
    if (pause_s := new.paused_until - turn.now) > 0:
        turn.say(name, f"{name}: lost {len(failures)} times lately; it is left out for {pause_s:.0f} s")


def _is_led_by_another(turn: _Turn) -> bool:
    """Whether there is a generation that is not of this supervisor: whom it is made of is not known here."""
    state = turn.state
    own = max(state.generation, state.called_off, state.next_generation or 0)
    newest = max(max(each.generation, each.fence) for each in turn.seen.values())
    if newest > own:
        turn.say("job", f"generation {newest} was begun by another kit up; this one leaves it alone")
    return newest > own


def _is_blind(turn: _Turn) -> bool:
    text = "no node can be reached from here; waiting (the job goes on without me)"
    turn.say("sight", "" if turn.in_sight else text)
    return not turn.in_sight


# --- the end ------------------------------------------------------------------------------------------------


def _has_ended(turn: _Turn) -> bool:
    """When the job has ended on one node: stop the others, and finish when nobody in sight runs any more."""
    seen, state = turn.seen, turn.state
    ended = [n for n in turn.rules.nodes if not seen[n].alive and seen[n].state in ENDED]
    states = {seen[name].state for name in ended if seen[name].generation >= state.generation}
    if not states:
        return False
    running = [name for name in turn.in_sight if seen[name].alive]
    since = turn.now if state.ended_since is None else state.ended_since
    turn.change(ended_since=since)
    if not running:
        outcome: Outcome = (
            "failed" if "failed" in states else "succeeded" if "succeeded" in states else "stopped"
        )
        unseen = [n for n in turn.rules.nodes if seen[n].alive and not seen[n].reachable]
        text = f"{_names(unseen)} cannot be reached; an agent may still run there" if unseen else ""
        turn.actions.append(Finish(outcome, text))
    finishing = states == {"succeeded"} and all(
        seen[name].trains and seen[name].generation == state.generation for name in running
    )
    if not finishing and turn.now - since >= LAST_WORDS_S:
        for name in running:
            turn.ask(name, "stop", ASK_AGAIN_S * 10, Stop(name))
    return True


# --- the next generation ------------------------------------------------------------------------------------


def _regenerate(turn: _Turn) -> None:
    """Begin another generation where this one cannot go on, after fencing it."""
    following = turn.state.next_generation
    if following is not None and turn.rounds:
        turn.tell(f"generation {turn.state.generation} trains after all: not fencing it")
        turn.change(next_generation=None, called_off=following, met=())
    if turn.state.next_generation is None:
        why = _why_broken(turn)
        able = [name for name in turn.in_sight if not turn.is_paused(name)]
        # Those who are fenced cannot come back into this generation by themselves: not before there is a use in it.
        if why is None or len(able) < turn.rules.min_nodes or not turn.state.is_fenced_by(turn.in_sight):
            return
        _begin_fencing(turn, why)
    following = turn.state.next_generation
    assert following is not None
    fenced = [
        name
        for name, each in turn.seen.items()
        if each.fence >= following and not (each.trains and each.generation < following)
    ]
    if not turn.state.is_fenced_by({*turn.in_sight, *fenced}):
        return  # those out of sight may go on, and then so should these
    for name in turn.in_sight:
        if turn.seen[name].fence < following:
            turn.ask(name, f"fence{following}", ASK_AGAIN_S, Fence(name, following))
    # One that lost its disk no longer knows whether it was in the last group, nor holds what that group committed: then
    # it may be anywhere.
    is_sure = turn.state.is_fenced_by(set(fenced) - turn.state.forgot)
    if not is_sure and len(fenced) < len(turn.rules.nodes):
        if turn.state.is_fenced_by(fenced):
            turn.lacks = (
                f"{_names(turn.state.forgot)} lost what was on disk: all nodes are needed to find the newest"
            )
        return
    able = [name for name in fenced if turn.seen[name].reachable and not turn.is_paused(name)]
    slow = set(turn.in_sight).difference(fenced) & set(turn.state.newest.nodes)
    if len(able) < turn.rules.min_nodes or (
        slow and turn.now - (turn.state.fencing_since or 0.0) < NO_QUORUM_S
    ):
        return
    # The last group committed on more than half of the electorate, so on one that is fenced. It goes on from there.
    newest = max(turn.seen[name].held for name in fenced)
    if holders := [name for name in able if turn.seen[name].held == newest]:
        _begin_generation(turn, able, holders)
    else:
        have = [name for name in fenced if turn.seen[name].held == newest]
        turn.lacks = f"the newest snapshot, of step {newest[1]}, is only on {_names(have)}"


def _why_broken(turn: _Turn) -> str | None:
    """Why the present generation has no way to go on, once that has been so for a while."""
    seen, state, own = turn.seen, turn.state, turn.own
    host = seen[state.host]
    wiped = _wiped(turn)
    host_ended = (
        host.reachable and not host.alive and (host.generation == state.generation or state.host in wiped)
    )
    host_coming = host.reachable and state.host not in own and turn.is_coming(state.host)
    blocked = [name for name in own if seen[name].blocked]
    orphans = [name for name in own if seen[name].state in ("orphaned", "fenced")]
    coming = {name for name in turn.in_sight if turn.is_coming(name)}
    is_starting = (
        not state.has_trained and bool(blocked) and state.may_train({*blocked, *coming.difference(own)})
    )
    is_full = any(len(seen[name].members) >= turn.rules.max_nodes for name in blocked)
    are_adrift = bool(own) and (len({*blocked, *orphans}) == len(own) or is_full)
    nobody_can = are_adrift and not (host_coming or is_starting)
    broken = not turn.rounds and (host_ended or nobody_can or bool(wiped))
    stuck = not turn.rounds and not broken and (state.host not in own or len(own) >= turn.rules.min_nodes)
    turn.change(
        broken_since=(turn.now if state.broken_since is None else state.broken_since) if broken else None,
        stuck_since=(turn.now if state.stuck_since is None else state.stuck_since) if stuck else None,
    )
    state = turn.state
    if state.broken_since is not None:
        if turn.now - state.broken_since < (BROKEN_S if host_ended or orphans else NO_QUORUM_S):
            return None
        if host_ended or (orphans and not host.reachable):
            return f"the rendezvous host {state.host} is lost"
        return "too few nodes are left to go on by themselves"
    called = [n for n in turn.in_sight if n not in turn.here and turn.known[n].asked in ("start", "join")]
    is_slow = bool(called) or any(seen[name].state == "starting" for name in own)
    patience_s = SLOW_START_S if is_slow else STUCK_S
    if state.stuck_since is not None and turn.now - state.stuck_since >= patience_s:
        return f"the nodes have not met for {patience_s:.0f} s"
    return None


def _wiped(turn: _Turn) -> set[str]:
    """Nodes whose vote counts, but whose run folder is gone, and with it what they promised.

    Started in this generation, such a node would vote as if it had promised nothing. So it comes in as a new node
    only once it has no vote (the others train, and the electorate is shrunk to them), or in the next generation.
    """
    voting = {*turn.state.electorate.nodes, *turn.state.newest.nodes} & turn.state.voters
    return {n for n in voting if turn.seen[n].reachable and turn.seen[n].fence < 0 and not turn.seen[n].alive}


def _begin_fencing(turn: _Turn, why: str) -> None:
    state = turn.state
    orphans = [name for name in turn.own if turn.seen[name].state == "orphaned"]
    others = [name for name in turn.own if name not in set(orphans)]
    turn.tell(f"{why}: fencing generation {state.generation}")
    turn.change(
        next_generation=max(state.generation, state.called_off) + 1,
        fencing_since=turn.now,
        met=tuple(orphans if len(orphans) > len(others) else others),
    )


def _begin_generation(turn: _Turn, able: list[str], holders: list[str]) -> None:
    """Begin the generation that was fenced for.

    Its electorate are nodes that hold the newest snapshot, so that nobody goes on without it; the others of `able`
    come in, and are given it, later.
    """
    state, seen, rules = turn.state, turn.seen, turn.rules
    met = set(state.met)
    if len([name for name in able if seen[name].alive and name in met]) < rules.min_nodes:
        met = set(able)
    alive = [name for name in holders if seen[name].alive and seen[name].port]
    nodes = [name for name in alive if name in met] or alive
    nodes = [*nodes, *(name for name in holders if name not in set(nodes))][
        : max(len(nodes), rules.min_nodes)
    ]
    nodes = nodes[: rules.max_nodes]
    # Another host than before, in turn: the last one may be the one that the others cannot reach.
    at = rules.nodes.index(state.host) + 1
    in_turn = [name for name in (*rules.nodes[at:], *rules.nodes[:at]) if name in set(nodes)]
    host = next((name for name in in_turn if name in set(alive)), in_turn[0])
    following = state.next_generation
    assert following is not None
    turn.tell(f"generation {following}: {_names(nodes)}; the rendezvous is on {host} now")
    for name in rules.nodes:
        if turn.known[name].present and name not in able:
            _count_failure(turn, name)
        turn.known[name] = dataclasses.replace(turn.known[name], present=False, asked="")
    turn.change(
        generation=following,
        host=host,
        port=seen[host].port if seen[host].alive else 0,
        electorate=Voters(following, 0, tuple(nodes)),
        granted=None,
        next_generation=None,
        forgot=frozenset(),
        met=(),
        has_trained=False,
        broken_since=None,
        stuck_since=None,
        stable_since=None,
    )
    turn.own, turn.rounds, turn.here = [], set(), set()


# --- keeping the generation whole ---------------------------------------------------------------------------


def _adjust_electorate(turn: _Turn) -> None:
    """Shrink the electorate to those who train on, or grow it with those who came."""
    state, granted = turn.state, turn.state.granted
    if granted is not None:
        written = {name for name, each in turn.seen.items() if each.electorate == granted}
        if state.electorate.is_changed_by(written):
            if state.stable_since is None:
                turn.change(stable_since=turn.now, floor=max(turn.seen[name].held for name in written))
            # What the old electorate committed must be with a majority of the new, or it could go on without.
            elif granted.may_train([name for name in granted.nodes if turn.seen[name].held >= state.floor]):
                turn.change(electorate=granted, granted=None, stable_since=None)
                return
        for name in (name for name in turn.own if name not in written and name not in turn.rules.drained):
            turn.ask(name, f"grant{granted.version}", ASK_AGAIN_S, SetVoters(name, granted))
        return
    members = next(iter(turn.rounds)) if len(turn.rounds) == 1 else frozenset[str]()
    if not members or members == set(state.electorate.nodes):
        turn.change(stable_since=None)
        return
    if state.stable_since is None:
        electors = members & set(state.electorate.nodes)
        floor = min(turn.seen[name].held for name in electors or members)
        turn.change(stable_since=turn.now, floor=floor)
        return
    # A newcomer has a vote once it holds what the others held before: no majority can go on without that.
    wanted = {n for n in members if n in state.electorate.nodes or turn.seen[n].held >= state.floor}
    if turn.now - state.stable_since >= GRANT_S and wanted != set(state.electorate.nodes):
        version = state.electorate.version + 1
        granted = Voters(state.generation, version, tuple(sorted(wanted)))
        turn.change(granted=granted, stable_since=None)


def _fill(turn: _Turn) -> None:
    """Bring nodes in until there are as many as the job takes: those of the electorate first, then spares."""
    seen, state = turn.seen, turn.state
    electorate = {*state.electorate.nodes, *state.newest.nodes}
    wiped, has_host = _wiped(turn), state.host in turn.own
    if has_host and seen[state.host].port not in (0, state.port):
        turn.change(port=seen[state.host].port)
    orphans = [name for name in turn.own if seen[name].state == "orphaned" and name not in turn.rules.drained]
    for name in (
        orphans if has_host else ()
    ):  # what they were told of the host may be of an earlier process there
        turn.ask(name, "join", STRAY_S, Join(name))
    out = {name for name in turn.own if seen[name].state == "fenced"}
    if turn.rounds:  # one that has not found the others for long makes room
        out |= set(orphans) - electorate
    taken = {name for name in turn.rules.nodes if turn.is_coming(name)} | (turn.here - out)
    wanted: Sequence[str] = [state.host, *state.electorate.nodes, *turn.rules.nodes]
    if not turn.rounds and state.may_train(unseen := electorate.difference(turn.in_sight)):
        # They may be training, with those who did when they were seen, and nobody knows how many others.
        taken |= unseen | {
            name for name in turn.rules.nodes if turn.known[name].present and not seen[name].reachable
        }
        wanted = [
            state.host,
            *state.newest.nodes,
        ]  # another has been replaced, or will be when they are seen again
    for name in dict.fromkeys(wanted):
        each = seen[name]
        if (name in turn.here and each.state != "fenced") or not each.reachable:
            continue
        if name not in taken and len(taken) >= turn.rules.max_nodes:
            break
        if turn.is_paused(name) or name in wiped or (name != state.host and not turn.state.port):
            continue  # or: the rendezvous is not there yet
        taken.add(name)
        if each.alive and name == turn.state.host and not turn.state.port:
            if not each.port:
                continue  # its agent is so young that it has not told yet where it listens
            turn.change(port=each.port)
        if each.alive:
            turn.ask(name, "join", ASK_AGAIN_S, Join(name))
        elif not (turn.known[name].asked == "start" and turn.is_coming(name)):
            if turn.known[name].asked == "start":
                _count_failure(turn, name)  # nothing came of it
            turn.ask(name, "start", START_AGAIN_S, Start(name, is_new=each.fence < 0))


def _drain(turn: _Turn) -> None:
    """End the agents of nodes that the user wants out, where enough others are here or can come."""
    drained, rules = turn.rules.drained, turn.rules
    for name in (name for name in turn.in_sight if name in drained and turn.seen[name].alive):
        others = [
            each
            for each in rules.nodes
            if each not in drained
            and (each in turn.here or (turn.seen[each].reachable and not turn.is_paused(each)))
        ]
        if len(others) >= rules.min_nodes:
            turn.ask(name, "drain", ASK_AGAIN_S * 10, Drain(name))
        else:
            turn.say(
                "drain",
                f"{name} is not drained yet: {len(others)} of at least {rules.min_nodes} nodes are left",
            )


def _wait(turn: _Turn) -> None:
    """Say when the job waits for nodes, and give up after a long while."""
    state, rules = turn.state, turn.rules
    fenced_for = state.next_generation or max(state.generation, state.called_off) + 1
    unseen = [n for n in rules.nodes if not turn.seen[n].reachable and turn.seen[n].fence < fenced_for]
    is_short = len(turn.here) < rules.min_nodes or state.next_generation is not None
    if turn.rounds or not is_short or state.may_train(unseen):
        text = (
            f"{_names(unseen)} cannot be reached and may be training together; waiting for them "
            "(if they are off: kit down --lost, and kit up goes on without them)"
        )
        turn.say("wait", "" if turn.rounds or not state.may_train(unseen) else text)
        turn.change(short_since=None)
        return
    since = turn.now if state.short_since is None else state.short_since
    turn.change(short_since=since)
    if turn.now - since > rules.wait_s:
        text = f"waited {rules.wait_s:.0f} s for enough nodes"
        turn.actions.append(Finish("failed", text, TOO_FEW_NODES))
    elif turn.now - since > LAST_WORDS_S:
        absent = [name for name in rules.nodes if name not in turn.here and name not in rules.drained]
        out = [name for name in rules.nodes if name in rules.drained]
        turn.say(
            "wait",
            (f"{turn.lacks}; waiting up to {rules.wait_s:.0f} s" if turn.lacks else "")
            or f"{len(turn.here)} of at least {rules.min_nodes} nodes are there; waiting up to {rules.wait_s:.0f} s "
            f"for {_names(absent)}"
            + (
                f" ({_names(out)}: drained; kit drain --undo)"
                if out
                else _without(len(turn.here), rules.max_nodes)
            ),
        )


def _without(num_here: int, max_nodes: int) -> str:
    """How a job would go on with the nodes that are here, which are fewer than it needs; "" where none is."""
    if not num_here:
        return ""
    return (
        f"; with nodes: {num_here}:{max_nodes} in the inventory it goes on without, on fewer ranks: "
        "change it, kit down, kit up"
    )
