"""Finds which nodes the attempts of a run lost, and what became of those nodes, from the run's events. Pure."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nodekit.deploy.records.events import Event
from nodekit.deploy.story.attempts import order, text_of


@dataclass(frozen=True)
class Loss:
    """The nodes that an attempt lost."""

    attempt: str
    when: float
    nodes: Mapping[str, str]
    """Node → a sentence about its loss."""


@dataclass
class AttemptMembers:
    """The members of an attempt, from its rendezvous to the next one."""

    begins: float
    members: frozenset[str]
    ends: float = float("inf")
    after: frozenset[str] | None = None
    """The members of the next attempt; None if there is none."""
    drained: bool = False
    """Whether a member was drained during the attempt."""


def attempts_of(events: Sequence[Event]) -> dict[str, AttemptMembers]:
    """Return attempt → its members, in the order of the attempts."""
    found: dict[str, AttemptMembers] = {}
    for event in events:
        if event.kind == "rendezvous":
            attempt, members = text_of(event.get("attempt")), frozenset(event.get("members") or ())
            known = found.setdefault(attempt, AttemptMembers(event.time, members))
            known.begins = min(known.begins, event.time)
    found = {attempt: found[attempt] for attempt in sorted(found, key=order)}
    for this, following in itertools.pairwise(found.values()):
        this.ends, this.after = following.begins, following.members
    for event in events:
        for each in found.values():
            if (
                event.kind == "drain"
                and event.about in each.members
                and each.begins <= event.time < each.ends
            ):
                each.drained = True
    return found


def last_loss(events: Sequence[Event], attempts: Mapping[str, AttemptMembers]) -> Loss | None:
    """Return the losses of the last attempt that lost nodes, by its supervisor or its other nodes; None if none did."""
    for attempt, each in reversed(list(attempts.items())):
        if lost := _lost_of(events, each):
            when = min(lost.values())
            return Loss(attempt, when, {name: _sentence(events, name, lost[name]) for name in lost})
    return None


def _lost_of(events: Sequence[Event], attempt: AttemptMembers) -> dict[str, float]:
    """Return lost member → since when; a member that left by itself, or was drained, is not lost."""
    during = [event for event in events if attempt.begins <= event.time < attempt.ends]
    left = {event.about for event in during if event.kind in ("drain", "agent-ended")}
    silent = {event.about: event.time for event in reversed(during) if event.kind == "unreachable"}
    again = {event.about: event.time for event in reversed(during) if event.kind == "agent-started"}
    # A node that misses all others is itself the lost one. And nodes that have left the round already, for the next
    # rendezvous, are missed by the others, too: so only a node that all of them miss is lost.
    told = [
        event
        for event in during
        if event.kind in ("membership", "store-lost") and event.about not in (*silent, *again)
    ]
    named = [
        set(event.get("names") or ()) for event in told if event.kind == "membership" and event.get("lost")
    ]
    missed = set.intersection(*named) - {event.about for event in told} if named else set()
    is_host_lost = any(event.kind == "store-lost" for event in told)
    out = attempt.members - attempt.after if attempt.after is not None else missed
    gone = out | again.keys() | {name for name in silent if is_host_lost or name in missed}
    began = min((event.time for event in told), default=attempt.ends)
    return {
        name: min(silent.get(name, began), again.get(name, began), began)
        for name in sorted(each for each in gone if each is not None)
        if name in attempt.members and name not in left
    }


def _sentence(events: Sequence[Event], name: str, when: float) -> str:
    """Return a sentence that a node was lost, and what became of it."""

    def clock(seconds: float) -> str:
        return time.strftime("%H:%M:%S", time.localtime(seconds))

    after = [event for event in events if event.time >= when]
    back = [e.time for e in after if e.kind == "rendezvous" and name in (e.get("members") or ())]
    silent = [e for e in after if e.kind in ("unreachable", "reached") and e.about == name]
    text = f"{name} was lost at {clock(when)}"
    if back:
        return f"{text}, and is back in the job since {clock(back[0])}"
    if silent and silent[-1].kind == "unreachable":
        return f"{text}: it has not been reached since {clock(silent[-1].time)}"
    return f"{text}, and is not back in the job"


def has_later(attempts: Mapping[str, AttemptMembers], attempt: tuple[int, int]) -> bool:
    """Whether another attempt has begun since this one."""
    return any(order(each) > attempt for each in attempts)
