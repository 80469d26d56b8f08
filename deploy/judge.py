"""The supervisor's judgement: what to do next, from what is known and what is seen. Pure; no clock, no network.

`decide` is called again and again with what was last seen of every node. Each action is about one node and safe to
repeat: it is asked for again when its effect has not been seen after a while. The story it tells:

- A node without an agent gets one (`Start`); an agent of an older generation is called into the present one (`Join`).
- The generation is *broken* when its rendezvous is gone: its host's agent has ended, or nobody that can be seen has
  a way to go on. Then every node in sight is fenced (`Fence`), and when so many of the electorate are that the rest
  cannot train (deploy/quorum.py), the next generation begins on the survivors.
- When nodes are lost for a while and the others train on, the electorate is shrunk to them (`Grant`), and grown
  again when they are back, so that the next loss is measured against who is there.
- What cannot be seen from here is left alone: a node out of sight whose peers train with it is fine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nodekit.deploy.quorum import Electorate

FINAL = ("succeeded", "failed", "stopped")
LAST_WORDS_S = 3.0  # after a node failed, how long the others may still tell of their own failure
ASK_AGAIN_S = 5.0
START_AGAIN_S = 60.0  # a start may take long: connecting, sync, imports
BROKEN_S = 0.3  # orphaned agents: how long the others may take to find out the same
NO_QUORUM_S = 1.0
STUCK_S = 60.0  # agents that could meet and do not
GRANT_S = 5.0
FAILURES_WINDOW_S = 600.0
FREE_FAILURES = 2
PAUSE_S, MAX_PAUSE_S = 10.0, 600.0

Outcome = Literal["succeeded", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the inventory says."""

    nodes: tuple[str, ...]
    """All hosts, in the inventory's order; those beyond `max_nodes` are spares."""
    min_nodes: int
    max_nodes: int
    wait_s: float = 1800.0
    """How long the job may wait for enough nodes."""


@dataclass(frozen=True, kw_only=True)
class Seen:
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
    """Generations below this are refused there."""
    electorate: Electorate | None = None
    """The newest it has written down."""
    port: int = 0
    """Where its rendezvous listens or would: a port it keeps."""
    problem: str = ""
    """Why its last start failed."""

    @property
    def trains(self) -> bool:
        """Whether its workers run."""
        return self.alive and self.state in ("running", "waiting")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is remembered of one node."""

    failures: tuple[float, ...] = ()
    """When it was lost, its agent ended, or a start failed."""
    agent: str = ""
    present: bool = False
    """Whether it was in the job when last seen."""
    asked: str = ""
    asked_at: float = 0.0
    said: str = ""

    def pause_until(self, now: float) -> float:
        """Until when it is left out: longer and longer for a node that is lost again and again."""
        recent = [when for when in self.failures if now - when < FAILURES_WINDOW_S]
        if len(recent) <= FREE_FAILURES:
            return 0.0
        return recent[-1] + min(PAUSE_S * 2.0 ** (len(recent) - FREE_FAILURES - 1), MAX_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class State:
    """What the supervisor knows; what it decides, it decides from this and what it sees."""

    generation: int
    host: str
    """The node whose agent keeps the rendezvous store."""
    port: int
    electorate: Electorate
    """The one in force."""
    granted: Electorate | None = None
    """One that is being written down."""
    next_generation: int | None = None
    """The one being fenced for."""
    known: Mapping[str, Known] = field(default_factory=dict)
    broken_since: float | None = None
    stuck_since: float | None = None
    stable_since: float | None = None
    short_since: float | None = None
    ended_since: float | None = None
    blind: bool = False
    said: str = ""


@dataclass(frozen=True)
class Start:
    """Start an agent on a node, for the present generation."""

    node: str


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
class Grant:
    """Have a node write down another electorate."""

    node: str
    electorate: Electorate


@dataclass(frozen=True)
class Stop:
    """Stop the agent on a node: the job has ended elsewhere."""

    node: str


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    outcome: Outcome
    text: str = ""


Action = Start | Join | Fence | Grant | Stop | Say | Finish


def begin(rules: Rules, *, generation: int, host: str, port: int, nodes: Iterable[str]) -> State:
    """The state right after a generation was started on `nodes`."""
    return State(
        generation=generation,
        host=host,
        port=port,
        electorate=Electorate(generation, 0, tuple(nodes)),
        known={name: Known() for name in rules.nodes},
    )


def decide(
    state: State, seen: Mapping[str, Seen], now: float, rules: Rules
) -> tuple[State, tuple[Action, ...]]:
    """What to do now, and what to remember; `seen` has every node of `rules`."""
    actions: list[Action] = []
    state = _take_note(state, seen, now, actions)
    ended = _ending(state, seen, now, rules)
    if ended is not None:
        state, more = ended
        return state, (*actions, *more)
    in_sight = [name for name in rules.nodes if seen[name].reachable]
    if not in_sight:
        if not state.blind:
            actions.append(Say("no node can be reached from here; waiting (the job goes on without me)"))
        return dataclasses.replace(state, blind=True, broken_since=None, stuck_since=None), tuple(actions)
    state = dataclasses.replace(state, blind=False)
    state = _regenerate(state, seen, now, rules, actions)
    if state.next_generation is None:
        state = _adjust_electorate(state, seen, now, actions)
        state = _fill(state, seen, now, rules, actions)
    state = _wait(state, seen, now, rules, actions)
    return state, tuple(actions)


# --- what happened ------------------------------------------------------------------------------------------


def present(state: State, seen: Mapping[str, Seen]) -> set[str]:
    """The nodes that are in the job: with a live agent of this generation, or out of sight but training with one."""
    generation = state.generation
    found = {
        name
        for name, each in seen.items()
        if each.reachable and each.alive and each.generation == generation and each.state not in FINAL
    }
    for each in seen.values():
        if each.reachable and each.trains and each.generation == generation:
            found.update(name for name in each.members if name in seen and not seen[name].reachable)
    return found


def _take_note(state: State, seen: Mapping[str, Seen], now: float, actions: list[Action]) -> State:
    """Count the losses of each node, once per loss."""
    known = dict(state.known)
    here = present(state, seen)
    for name, each in seen.items():
        old = known[name]
        lost = old.present and name not in here and each.state not in FINAL
        restarted = bool(old.agent and each.agent and each.agent != old.agent)
        failed = bool(each.problem) and each.problem != old.said
        failures = old.failures
        if (lost and state.next_generation is None) or failed:
            failures = (*[when for when in failures if now - when < FAILURES_WINDOW_S], now)
            until = dataclasses.replace(old, failures=failures).pause_until(now)
            if until > now:
                actions.append(
                    Say(f"{name}: lost {len(failures)} times lately; it is left out for {until - now:.0f} s")
                )
        known[name] = dataclasses.replace(
            old,
            failures=failures,
            agent=each.agent or old.agent,
            present=name in here,
            asked="" if restarted or (failed and old.asked == "start") else old.asked,
            said=each.problem or old.said,
        )
    return dataclasses.replace(state, known=known)


# --- the end ------------------------------------------------------------------------------------------------


def _ending(
    state: State, seen: Mapping[str, Seen], now: float, rules: Rules
) -> tuple[State, list[Action]] | None:
    """When the job has ended on one node: stop the others, and finish when nobody in sight runs any more."""
    ended = [name for name in rules.nodes if not seen[name].alive and seen[name].state in FINAL]
    ended = [name for name in ended if seen[name].generation >= state.generation]
    if not ended:
        return None
    states = {seen[name].state for name in ended}
    running = [name for name in rules.nodes if seen[name].reachable and seen[name].alive]
    since = now if state.ended_since is None else state.ended_since
    state = dataclasses.replace(state, ended_since=since)
    if not running:
        outcome: Outcome = (
            "failed" if "failed" in states else "succeeded" if "succeeded" in states else "stopped"
        )
        return state, [Finish(outcome)]
    finishing = states == {"succeeded"} and all(
        seen[name].state in ("running", "waiting") and seen[name].generation == state.generation
        for name in running
    )
    actions: list[Action] = []
    if not finishing and now - since >= LAST_WORDS_S:
        for name in running:
            state = _ask(state, name, "stop", now, ASK_AGAIN_S * 10, Stop(name), actions)
    return state, actions


# --- the next generation ------------------------------------------------------------------------------------


def _regenerate(
    state: State, seen: Mapping[str, Seen], now: float, rules: Rules, actions: list[Action]
) -> State:
    """Begin another generation where this one cannot go on, after fencing it."""
    state = _is_broken(state, seen, now, rules, actions)
    if state.next_generation is None:
        return state
    following = state.next_generation
    in_sight = [name for name in rules.nodes if seen[name].reachable]
    for name in in_sight:
        if seen[name].fence < following:
            key = f"fence{following}"
            state = _ask(state, name, key, now, ASK_AGAIN_S, Fence(name, following), actions)
    fenced = [name for name in rules.nodes if seen[name].fence >= following]
    if not state.electorate.is_fenced_by(fenced):
        return _say(
            state,
            f"cannot go on: {', '.join(n for n in state.electorate.nodes if n not in fenced)} cannot be reached "
            "and may be training together; waiting for more of them",
            actions,
        )
    slow = [name for name in in_sight if name not in fenced and name in state.electorate.nodes]
    if slow and state.broken_since is not None and now - state.broken_since < NO_QUORUM_S + BROKEN_S:
        return state
    able = [name for name in fenced if seen[name].reachable]
    if not able:
        return state
    alive = [name for name in able if seen[name].alive and seen[name].port]
    fit = [name for name in alive if name != state.host] or alive or able
    host = fit[0]
    nodes = alive or able[: rules.max_nodes]
    actions.append(Say(f"generation {following}: {', '.join(nodes)}; the rendezvous is on {host} now"))
    return dataclasses.replace(
        state,
        generation=following,
        host=host,
        port=seen[host].port if seen[host].alive else 0,
        electorate=Electorate(following, 0, tuple(nodes)),
        granted=None,
        next_generation=None,
        broken_since=None,
        stuck_since=None,
        stable_since=None,
        known={
            name: dataclasses.replace(each, present=False, asked="") for name, each in state.known.items()
        },
    )


def _is_broken(
    state: State, seen: Mapping[str, Seen], now: float, rules: Rules, actions: list[Action]
) -> State:
    """Set `next_generation` when the present one has no way to go on."""
    newest = max((each.generation for each in seen.values()), default=-1)
    fence = max((each.fence for each in seen.values()), default=-1)
    if state.next_generation is not None:
        if fence > state.next_generation or newest >= state.next_generation:
            return dataclasses.replace(state, next_generation=max(fence, newest) + 1)
        return state
    own = [
        each
        for each in seen.values()
        if each.reachable and each.alive and each.generation == state.generation and each.state not in FINAL
    ]
    host = seen[state.host]
    # A host that never came up: its start is asked for again until it is given up as stuck.
    host_ended = host.reachable and not host.alive and host.generation == state.generation
    adrift = [each for each in own if each.state in ("orphaned", "fenced") or each.blocked]
    orphans = [each for each in own if each.state in ("orphaned", "fenced")]
    nobody_can = bool(adrift) and len(adrift) == len(own)
    broken = (host_ended and bool(orphans or not own)) or nobody_can or fence > state.generation
    trains = any(each.trains for each in own)
    stuck = not trains and not broken and (len(own) >= rules.min_nodes or not host.reachable)
    state = dataclasses.replace(
        state,
        broken_since=(now if state.broken_since is None else state.broken_since) if broken else None,
        stuck_since=(now if state.stuck_since is None else state.stuck_since) if stuck else None,
    )
    wait_s = BROKEN_S if orphans or host_ended else NO_QUORUM_S
    is_over = state.broken_since is not None and now - state.broken_since >= wait_s
    is_stuck = state.stuck_since is not None and now - state.stuck_since >= STUCK_S
    if is_over or is_stuck:
        why = (
            f"the rendezvous host {state.host} is lost"
            if orphans or host_ended
            else "too few nodes are left to go on by themselves"
            if is_over
            else f"the nodes have not met for {STUCK_S:.0f} s"
        )
        actions.append(Say(f"{why}: fencing generation {state.generation}"))
        return dataclasses.replace(state, next_generation=max(state.generation, newest, fence - 1) + 1)
    return state


# --- keeping the generation whole ---------------------------------------------------------------------------


def _adjust_electorate(state: State, seen: Mapping[str, Seen], now: float, actions: list[Action]) -> State:
    """Shrink the electorate to those who train on, or grow it with those who came."""
    rounds = {
        frozenset(each.members)
        for each in seen.values()
        if each.reachable and each.trains and each.generation == state.generation
    }
    members = next(iter(rounds)) if len(rounds) == 1 else frozenset[str]()
    wanted = tuple(sorted(members))
    if state.granted is not None:
        granted = state.granted
        written = [name for name, each in seen.items() if each.electorate == granted]
        if state.electorate.is_changed_by(written):
            return dataclasses.replace(state, electorate=granted, granted=None, stable_since=None)
        for name in granted.nodes:
            if seen[name].reachable and seen[name].alive and name not in written:
                state = _ask(
                    state, name, f"grant{granted.version}", now, ASK_AGAIN_S, Grant(name, granted), actions
                )
        return state
    if not wanted or set(wanted) == set(state.electorate.nodes):
        return dataclasses.replace(state, stable_since=None)
    since = now if state.stable_since is None else state.stable_since
    state = dataclasses.replace(state, stable_since=since)
    if now - since < GRANT_S:
        return state
    # A version that somebody has written down already, of a supervisor that died, must not be used again.
    version = max([state.electorate.version, *(e.electorate.version for e in seen.values() if e.electorate)])
    return dataclasses.replace(state, granted=Electorate(state.generation, version + 1, wanted))


def _fill(state: State, seen: Mapping[str, Seen], now: float, rules: Rules, actions: list[Action]) -> State:
    """Bring nodes in until there are as many as the job takes: those of the electorate first, then spares."""
    if seen[state.host].generation == state.generation and seen[state.host].alive and seen[state.host].port:
        state = dataclasses.replace(state, port=seen[state.host].port)
    here = present(state, seen)
    coming = {
        name
        for name, each in state.known.items()
        if name not in here and each.asked in ("start", "join") and now - each.asked_at < START_AGAIN_S
    }
    order = [state.host, *state.electorate.nodes, *rules.nodes]
    for name in dict.fromkeys(order):
        each = seen[name]
        if name in here or not each.reachable:
            continue
        if len(here | coming | {name}) > rules.max_nodes:
            break
        if state.known[name].pause_until(now) > now and name != state.host:
            continue
        if name != state.host and not state.port:
            continue  # the rendezvous is not there yet
        coming.add(name)
        if each.alive:
            state = _ask(state, name, "join", now, ASK_AGAIN_S, Join(name), actions)
        else:
            state = _ask(state, name, "start", now, START_AGAIN_S, Start(name), actions)
    return state


def _wait(state: State, seen: Mapping[str, Seen], now: float, rules: Rules, actions: list[Action]) -> State:
    """Say when the job waits for nodes, and give up after a long while."""
    here = present(state, seen)
    trains = any(each.trains and each.reachable for each in seen.values())
    if trains or (len(here) >= rules.min_nodes and state.next_generation is None):
        return dataclasses.replace(state, short_since=None, said="" if trains else state.said)
    since = now if state.short_since is None else state.short_since
    state = dataclasses.replace(state, short_since=since)
    if now - since > rules.wait_s:
        actions.append(Finish("failed", f"waited {rules.wait_s:.0f} s for enough nodes"))
    elif now - since > LAST_WORDS_S and state.next_generation is None:
        absent = [name for name in rules.nodes if name not in here]
        state = _say(
            state,
            f"{len(here)} of at least {rules.min_nodes} nodes are there; waiting up to {rules.wait_s:.0f} s "
            f"for {', '.join(absent)}",
            actions,
        )
    return state


def _ask(
    state: State, name: str, what: str, now: float, again_s: float, action: Action, actions: list[Action]
) -> State:
    """Ask for an action, unless the same was asked for just now."""
    known = state.known[name]
    if known.asked == what and now - known.asked_at < again_s:
        return state
    actions.append(action)
    changed = dataclasses.replace(known, asked=what, asked_at=now)
    return dataclasses.replace(state, known={**state.known, name: changed})


def _say(state: State, text: str, actions: list[Action]) -> State:
    """Say something once."""
    if state.said == text:
        return state
    actions.append(Say(text))
    return dataclasses.replace(state, said=text)
