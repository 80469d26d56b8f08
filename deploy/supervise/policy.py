"""The supervisor's policy: what to do next, from what is known and what is observed. Pure; no clock, no network.

`decide` is called again and again with what was last seen of every node. Each action is about one node and safe to
repeat: it is asked for again when its effect has not been seen after a while. In short:

- A node without an agent gets one (`Start`); an agent of an older generation is called into the present one (`Join`).
- The generation is *broken* when its rendezvous is gone (its host's agent has ended: a store is never opened twice
  in one generation), or when nobody that can be seen has a way to go on. Then, if enough nodes are in sight to make
  sure that no others go on, they are fenced (`Fence`), and when so many of the voters are that the rest cannot
  train (deploy/agent/quorum.py), the next generation begins on the survivors. If the old one turns out to
  train after all, the fencing is called off.
- When nodes are lost for a while and the others train on, the voters are reduced to them (`SetVoters`), and extended
  again when they are back, so that the next loss is measured against who is there.
- Nothing is done about an unreachable node while a reachable one still lists it as a member of its round.
- The agent of a node that the user drains is ended (`Drain`), after a snapshot with the others, and not started again.
- A broken node is drained (`Exclude`) if the job can go on without it; else it is tried again, like one that was lost.

A supervisor may die at any moment and another go on from `State.to_dict`. So whoever calls `decide` must have
`to_dict` on disk, when it differs from what is there, *before* it carries out the actions that came with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.output.wording import names
from nodekit.deploy.records.runs import ENDED, Outcome
from nodekit.deploy.story.causes import TOO_FEW_NODES
from nodekit.deploy.supervise.generations import regenerate
from nodekit.deploy.supervise.state import (
    Action,
    Drain,
    Exclude,
    Finish,
    Join,
    NodeHistory,
    Observation,
    Rules,
    SetVoters,
    Start,
    State,
    Stop,
)
from nodekit.deploy.supervise.turn import ASK_AGAIN_S, START_AGAIN_S, Turn

STALE_S = 10.0  # for a node's peers to find that it is lost
LAST_WORDS_S = 3.0  # after the job has ended on a node, how long the others may still tell how it did on them
GRANT_S = 5.0
STRAY_S = 20.0  # between reminders of where the rendezvous is
MAX_GAP_S = 5.0  # a longer time between two decisions is a clock that jumped, or a machine that slept


def begin(rules: Rules, *, generation: int, host: str, port: int, nodes: Iterable[str]) -> State:
    """The state right before a generation is started on `nodes`, of a job that no other supervisor leads."""
    return State(
        generation=generation,
        host=host,
        port=port,
        voters=Voters(generation, 0, tuple(nodes)),
        known={name: NodeHistory() for name in rules.nodes},
    )


def decide(
    state: State, seen: Mapping[str, Observation], now: float, rules: Rules
) -> tuple[State, tuple[Action, ...]]:
    """What to do now, and what to remember; `seen` has every node of `rules`."""
    gap = 0.0 if state.clock is None else min(max(now - state.clock, 0.0), MAX_GAP_S)
    state = dataclasses.replace(state, clock=now, elapsed_s=state.elapsed_s + gap)
    turn = Turn(state, seen, rules)
    _take_note(turn)
    if _has_ended(turn) or _is_led_by_another(turn) or _is_blind(turn):
        turn.change(broken_since=None, stuck_since=None, short_since=None)
    else:
        _exclude(turn)
        regenerate(turn)
        if turn.state.next_generation is None:
            _adjust_voters(turn)
            _fill(turn)
            _drain(turn)
        _wait(turn)
    return dataclasses.replace(turn.state, known=turn.known, said=turn.said), tuple(turn.actions)


# --- what happened ------------------------------------------------------------------------------------------


def _take_note(turn: Turn) -> None:
    """Count the losses of each node, once per loss. Unreachable is not lost, unless its peers train without it."""
    if turn.rounds and not turn.state.has_trained:
        turn.change(has_trained=True)
    had_folder = {name for name, each in turn.seen.items() if each.fence >= 0}
    if not had_folder <= turn.state.had_folder:
        turn.change(had_folder=turn.state.had_folder | had_folder)
    if not (lost_folder := turn.wiped()) <= turn.state.forgot:
        turn.change(forgot=turn.state.forgot | lost_folder)
    for name in turn.rules.nodes:
        old, each = turn.known[name], turn.seen[name]
        here = name in turn.here
        if here and name not in turn.own and not old.present and old.failures:
            # Peers that are heard a moment after its loss may still name it among those they train with.
            here = turn.now - old.failures[-1] > STALE_S
        gone = not here and (each.reachable or bool(turn.rounds))
        is_other = bool(each.agent) and each.agent != old.agent
        lost = old.present and gone
        stillborn = is_other and old.asked == "start" and not each.alive
        failed = bool(each.problem) and each.problem != old.problem and old.asked == "start"
        # Asked again when it is back: it may not know of it.
        is_cut_short = bool(old.asked) and not each.reachable
        if (old.agent, old.present, old.problem) == (each.agent, here, each.problem) and not is_cut_short:
            continue
        if (lost or stillborn or failed) and each.state not in ENDED:
            turn.count_failure(name)
        old = turn.known[name]
        turn.known[name] = dataclasses.replace(
            old,
            agent=each.agent or old.agent,
            present=here or (old.present and not gone),
            # Of one that came and is lost, nothing more comes of what it was asked.
            asked="" if is_other or is_cut_short or failed or lost else old.asked,
            problem=each.problem or old.problem,
        )


def _is_led_by_another(turn: Turn) -> bool:
    """Whether there is a generation that is not of this supervisor: whom it is made of is not known here."""
    state = turn.state
    own = max(state.generation, state.called_off, state.next_generation or 0)
    newest = max(max(each.generation, each.fence) for each in turn.seen.values())
    if newest > own:
        turn.say("job", f"generation {newest} was begun by another kit up; this one leaves it alone")
    return newest > own


def _is_blind(turn: Turn) -> bool:
    text = "no node can be reached from here; waiting (the job goes on without me)"
    turn.say("sight", "" if turn.in_sight else text)
    return not turn.in_sight


# --- the end ------------------------------------------------------------------------------------------------


def ended_states(seen: Iterable[Observation], generation: int) -> set[str]:
    """How the job has ended, on the nodes where it has; one that was lost before this generation has no say."""
    return {each.state for each in seen if each.generation >= generation and not each.alive} & {*ENDED}


def outcome_of(states: Collection[str]) -> Outcome:
    """How the job has ended as a whole, by `ended_states`."""
    return "failed" if "failed" in states else "succeeded" if "succeeded" in states else "stopped"


def _has_ended(turn: Turn) -> bool:
    """When the job has ended on one node: stop the others, and finish when nobody in sight runs any more."""
    seen, state = turn.seen, turn.state
    states = ended_states([seen[name] for name in turn.rules.nodes], state.generation)
    if not states:
        return False
    running = [name for name in turn.in_sight if seen[name].alive]
    since = turn.now if state.ended_since is None else state.ended_since
    turn.change(ended_since=since)
    # A node that was asked to start may have come and ended since it was observed: it still has something to show.
    is_unobserved = any(turn.known[name].asked == "start" for name in turn.in_sight)
    if not running and not (is_unobserved and turn.now - since < LAST_WORDS_S):
        outcome = outcome_of(states)
        unseen = [n for n in turn.rules.nodes if seen[n].alive and not seen[n].reachable]
        text = f"{names(unseen)} cannot be reached; an agent may still run there" if unseen else ""
        unfenced = _unfenced(turn) if outcome != "succeeded" else []
        may_go_on = tuple(unfenced) if state.may_train(unfenced) else ()
        turn.actions.append(Finish(outcome, text, may_go_on=may_go_on))
    finishing = states == {"succeeded"} and all(
        seen[name].trains and seen[name].generation == state.generation for name in running
    )
    if not finishing and turn.now - since >= LAST_WORDS_S:
        for name in running:
            turn.ask(name, "stop", ASK_AGAIN_S * 10, Stop(name))
    return True


def _unfenced(turn: Turn) -> list[str]:
    """The nodes that cannot be reached, but for those that the next generation's fence has reached before."""
    state = turn.state
    fenced_for = state.next_generation or max(state.generation, state.called_off) + 1
    return [n for n in turn.rules.nodes if not turn.seen[n].reachable and turn.seen[n].fence < fenced_for]


# --- keeping the generation whole ---------------------------------------------------------------------------


def _adjust_voters(turn: Turn) -> None:
    """Reduce the voters to those who train on, or extend them by those who came."""
    state, granted = turn.state, turn.state.granted
    if granted is not None:
        written = {name for name, each in turn.seen.items() if each.voters == granted}
        if state.voters.is_changed_by(written):
            if state.stable_since is None:
                turn.change(stable_since=turn.now, floor=max(turn.seen[name].held for name in written))
            # What the old voters committed must be with a majority of the new, or it could go on without. And those who
            # train must be one, or another generation could begin beside a group that met by the old ones.
            elif (
                granted.may_train([name for name in granted.nodes if turn.seen[name].held >= state.floor])
                and turn.rounds
                and all(granted.may_train(members) for members in turn.rounds)
            ):
                turn.change(voters=granted, granted=None, stable_since=None)
                return
        for name in (name for name in turn.own if name not in written and name not in turn.rules.drained):
            turn.ask(name, f"grant{granted.version}", ASK_AGAIN_S, SetVoters(name, granted))
        return
    members = next(iter(turn.rounds)) if len(turn.rounds) == 1 else frozenset[str]()
    if not members or members == set(state.voters.nodes):
        turn.change(stable_since=None)
        return
    if state.stable_since is None:
        electors = members & set(state.voters.nodes)
        floor = min(turn.seen[name].held for name in electors or members)
        turn.change(stable_since=turn.now, floor=floor)
        return
    # A newcomer has a vote once it holds what the others held before: no majority can go on without that.
    wanted = {n for n in members if n in state.voters.nodes or turn.seen[n].held >= state.floor}
    if turn.now - state.stable_since >= GRANT_S and wanted != set(state.voters.nodes):
        version = state.voters.version + 1
        granted = Voters(state.generation, version, tuple(sorted(wanted)))
        turn.change(granted=granted, stable_since=None)


def _fill(turn: Turn) -> None:
    """Bring nodes in until there are as many as the job takes: the voters first, then spares."""
    seen, state = turn.seen, turn.state
    voters = {*state.voters.nodes, *state.newest.nodes}
    wiped, has_host = turn.wiped(), state.host in turn.own
    if has_host and seen[state.host].port not in (0, state.port):
        turn.change(port=seen[state.host].port)
    orphans = [name for name in turn.own if seen[name].state == "orphaned" and name not in turn.rules.drained]
    # What they were told of the host may be of an earlier process there. Not as a "join": it would count as coming.
    # Nor while voters are asked for: of the two only the last would be known, and both be asked for in each decision.
    for name in orphans if has_host else ():
        if state.granted in (None, seen[name].voters):
            turn.ask(name, "stray", STRAY_S, Join(name))
    out = {name for name in turn.own if seen[name].state == "fenced"}
    if turn.rounds:  # one that has not found the others for long makes room
        out |= set(orphans) - voters
    taken = {name for name in turn.rules.nodes if turn.is_coming(name)} | (turn.here - out)
    wanted: Sequence[str] = [state.host, *state.voters.nodes, *turn.rules.nodes]
    if not turn.rounds and state.may_train(unseen := voters.difference(turn.in_sight)):
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
                turn.count_failure(name)  # nothing came of it
            turn.ask(name, "start", START_AGAIN_S, Start(name, is_new=each.fence < 0))


def _others_than(turn: Turn, name: str) -> list[str]:
    """Those that are here, or can come, besides a node and the drained ones."""
    return [
        each
        for each in turn.rules.nodes
        if each not in (name, *turn.rules.drained)
        and (each in turn.here or (turn.seen[each].reachable and not turn.is_paused(each)))
    ]


def _exclude(turn: Turn) -> None:
    """Drain nodes whose agent has left, or was not started, because something is broken."""
    for name in turn.rules.nodes:
        each, known = turn.seen[name], turn.known[name]
        which = (each.agent, each.broken)
        if not each.broken or each.alive or name in turn.rules.drained or known.excluded == which:
            continue
        others = _others_than(turn, name)
        if len(others) >= turn.rules.min_nodes:
            turn.known[name] = dataclasses.replace(known, excluded=which)
            turn.rules = dataclasses.replace(turn.rules, drained=turn.rules.drained | {name})
            turn.actions.append(Exclude(name, each.broken))
        else:
            needed = (
                f"at least {turn.rules.min_nodes} nodes are needed, and without it {len(others)} are left"
            )
            turn.say(f"{name} broken", f"{name}: {each.broken}; it is tried again: {needed}")


def _drain(turn: Turn) -> None:
    """End the agents of nodes that the user wants out, where enough others are here or can come."""
    drained, rules = turn.rules.drained, turn.rules
    for name in (name for name in turn.in_sight if name in drained and turn.seen[name].alive):
        others = _others_than(turn, name)
        if len(others) >= rules.min_nodes:
            turn.ask(name, "drain", ASK_AGAIN_S * 10, Drain(name))
        else:
            turn.say(
                "drain",
                f"{name} is not drained yet: {len(others)} of at least {rules.min_nodes} nodes are left",
            )


def _wait(turn: Turn) -> None:
    """Say when the job waits for nodes, and give up after a long while."""
    state, rules = turn.state, turn.rules
    unseen = _unfenced(turn)
    is_short = len(turn.here) < rules.min_nodes or state.next_generation is not None
    if turn.rounds or not is_short or state.may_train(unseen):
        text = (
            f"{names(unseen)} cannot be reached and may be training together; waiting for them "
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
            f"for {names(absent)}"
            + (
                f" ({names(out)}: drained; kit drain --undo)"
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
