"""Decide that a generation has no way to go on, fence it, and begin the next one on the survivors. Pure."""

from __future__ import annotations

import dataclasses

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.output.wording import names
from nodekit.deploy.supervise.state import Fence
from nodekit.deploy.supervise.turn import ASK_AGAIN_S, Turn

BROKEN_S = 0.3  # once an agent is orphaned: how long the others may take to notice the same
NO_QUORUM_S = 1.0  # how long a majority may be missing until the generation is broken, or a fence may take
STUCK_S = 60.0  # how long agents that could form a round may fail to
SLOW_START_S = 180.0  # the same, while some agents are being started


def regenerate(turn: Turn) -> None:
    """Fence the present generation if it cannot go on, and begin the next one once enough nodes are fenced."""
    following = turn.state.next_generation
    if following is not None and turn.rounds:
        turn.tell(f"generation {turn.state.generation} trains after all: not fencing it")
        turn.change(next_generation=None, called_off=following, met=())
    if turn.state.next_generation is None:
        why = _why_broken(turn)
        able = [name for name in turn.in_sight if not turn.is_paused(name)]
        # A fenced node cannot come back into this generation by itself, so fence only if a new one can begin.
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
        return  # the unreachable nodes may be training; then these nodes should rejoin them
    for name in turn.in_sight:
        if turn.seen[name].fence < following:
            turn.ask(name, f"fence{following}", ASK_AGAIN_S, Fence(name, following))
    # A node that lost its disk does not know whether it was in the last group, and lacks that group's snapshots: the
    # newest one may be on any other node.
    is_sure = turn.state.is_fenced_by(set(fenced) - turn.state.forgot)
    if not is_sure and len(fenced) < len(turn.rules.nodes):
        if turn.state.is_fenced_by(fenced):
            turn.lacks = (
                f"{names(turn.state.forgot)} lost what was on disk: all nodes are needed to find the newest"
            )
        return
    able = [name for name in fenced if turn.seen[name].reachable and not turn.is_paused(name)]
    slow = set(turn.in_sight).difference(fenced) & set(turn.state.newest.nodes)
    if len(able) < turn.rules.min_nodes or (
        slow and turn.now - (turn.state.fencing_since or 0.0) < NO_QUORUM_S
    ):
        return
    # The last group committed its snapshot on more than half of the voters, so a fenced one holds it. Go on from that.
    newest = max(turn.seen[name].held for name in fenced)
    if holders := [name for name in able if turn.seen[name].held == newest]:
        _begin_generation(turn, able, holders)
    else:
        have = [name for name in fenced if turn.seen[name].held == newest]
        turn.lacks = f"the newest snapshot, of step {newest[1]}, is only on {names(have)}"


def _why_broken(turn: Turn) -> str | None:
    """Return why the present generation cannot go on, once that has been so for a while; else None."""
    seen, state, own = turn.seen, turn.state, turn.own
    host = seen[state.host]
    wiped = turn.wiped()
    # The host's agent may also have lost its own store: it is fenced then, for a store is never opened twice.
    host_ended = (
        host.reachable
        and (not host.alive or host.state == "fenced")
        and (host.generation == state.generation or state.host in wiped)
    )
    host_coming = state.host not in own and turn.is_coming(state.host)
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
        all_know = bool(orphans) and len(orphans) == len(own) and not host.reachable
        patience_s = 0.0 if all_know else BROKEN_S if host_ended or orphans else NO_QUORUM_S
        if turn.now - state.broken_since < patience_s:
            return None
        if host_ended or (orphans and not host.reachable):
            how = "drained" if state.host in turn.rules.drained else "lost"
            return f"the rendezvous host {state.host} is {how}"
        return "too few nodes are left to go on by themselves"
    called = [n for n in turn.in_sight if n not in turn.here and turn.known[n].asked in ("start", "join")]
    is_slow = bool(called) or any(seen[name].state == "starting" for name in own)
    patience_s = SLOW_START_S if is_slow else STUCK_S
    if state.stuck_since is not None and turn.now - state.stuck_since >= patience_s:
        return f"the nodes have not met for {patience_s:.0f} s"
    return None


def _begin_fencing(turn: Turn, why: str) -> None:
    state = turn.state
    orphans = [name for name in turn.own if turn.seen[name].state == "orphaned"]
    others = [name for name in turn.own if name not in set(orphans)]
    turn.tell(f"{why}: fencing generation {state.generation}")
    turn.change(
        next_generation=max(state.generation, state.called_off) + 1,
        fencing_since=turn.now,
        met=tuple(orphans if len(orphans) > len(others) else others),
    )


def _begin_generation(turn: Turn, able: list[str], holders: list[str]) -> None:
    """Begin the next generation, for which the present one was fenced.

    Its voters are nodes that hold the newest snapshot, so that no group can go on without it; the other nodes of
    `able` join later, and receive it then.
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
    # Choose the next host in the inventory's order: the last one may be the one that the others cannot reach.
    at = rules.nodes.index(state.host) + 1
    in_turn = [name for name in (*rules.nodes[at:], *rules.nodes[:at]) if name in set(nodes)]
    host = next((name for name in in_turn if name in set(alive)), in_turn[0])
    following = state.next_generation
    assert following is not None
    turn.tell(f"generation {following}: {names(nodes)}; the rendezvous is on {host} now")
    for name in rules.nodes:
        if turn.known[name].present and name not in able:
            turn.count_failure(name)
        turn.known[name] = dataclasses.replace(turn.known[name], present=False, asked="")
    turn.change(
        generation=following,
        host=host,
        port=seen[host].port if seen[host].alive else 0,
        voters=Voters(following, 0, tuple(nodes)),
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
