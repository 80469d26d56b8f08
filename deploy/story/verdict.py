"""How a run ended, and why: the first cause, by what all nodes said. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nodekit.deploy.agent.ranks.failures import (
    Failure,
    awaited,
    blames_another,
    first_cause,
    how_it_ended,
    is_network,
    message_of,
    was_told,
)
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import ENDED, Outcome
from nodekit.deploy.story.attempts import order, text_of
from nodekit.deploy.story.cause import Cause
from nodekit.deploy.story.causes import NODE_LOST, NODE_LOST_MEANWHILE, TOO_FEW_NODES, recognise
from nodekit.deploy.story.losses import attempts_of, has_later, last_loss

_WAITED = re.compile(r"Timed out waiting|Watchdog caught|Socket Timeout|monitoredBarrier|[Ww]ait timeout")
_SUMMARY_WIDTH = 100


@dataclass(frozen=True)
class Told:
    """What one node has told, for the verdict."""

    state: str = ""
    """Empty for a spare, which never had an agent."""
    failures: tuple[Failure, ...] = ()
    message: str = ""
    cause: str = ""
    """Why its agent ended, where that is known (`EndCause`)."""
    cure: str = ""
    """What its agent has said to do about it."""
    no_progress: bool = False
    """It was restarted, and that brought nothing."""
    notice: str = ""
    """What the user was told of already."""
    silent_since: float = 0.0
    """Since when it is unreachable; 0: it is reachable."""
    attempt: str = ""
    """The last one it took part in."""
    ranks: tuple[int, ...] = ()
    """Its ranks there."""
    ended: tuple[int, ...] = ()
    """Those of them that have ended well."""
    address: str = ""
    """By which the others reach it."""

    @property
    def outcome(self) -> str:
        """How the node ended, ``gone`` for an agent that ended without a word."""
        return self.state if self.state in ENDED else "gone"


@dataclass(frozen=True)
class Verdict:
    """How a run ended, and why."""

    outcome: Outcome
    text: str
    """In a line; what follows below it is in the other fields."""
    no_progress: bool = False
    without: tuple[str, ...] = ()
    """Nodes that were not there at the end."""
    may_go_on: tuple[str, ...] = ()
    """Nodes that could not be told of the end, and may be training together."""
    first: Failure | None = None
    """What began it, where a rank did."""
    cause: Cause | None = None
    """The known cause that this is."""
    others: str = ""
    """What it did to the other ranks."""
    notes: tuple[str, ...] = ()
    """What else the nodes said."""
    awaited: tuple[tuple[int, str], ...] = ()
    """Who did not come while all others waited, where these named them: rank and node; `first` gave up first."""
    when: float = 0.0
    """When what went wrong in a run that goes on began; 0: not known, or it is over."""
    is_recovered: bool = False
    """Whether a run that goes on has begun another attempt since."""

    @property
    def summary(self) -> str:
        """One line for tables: who, and what."""
        text = self.text.partition("\n")[0]
        if self.first is None:
            return text
        said = self.cause.name.replace("-", " ") if self.cause else _last_line(self.first)
        return _cut(f"{text}: {said}" if said else text, _SUMMARY_WIDTH)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "outcome": self.outcome,
            "summary": self.summary,
            "text": self.text,
            "no_progress": self.no_progress,
            "without": list(self.without),
            "first": {**asdict(self.first), "ended": how_it_ended(self.first.exitcode)}
            if self.first
            else None,
            "cause": asdict(self.cause) if self.cause else None,
            "others": self.others,
            "notes": list(self.notes),
            "awaited": [{"rank": rank, "node": node} for rank, node in self.awaited],
        }


def verdict(
    nodes: Mapping[str, Told], *, max_restarts: int, also: str = "", because: Cause | None = None
) -> Verdict:
    """How it ended, by what all nodes said; pure. `also` is the supervisor's own reason, `because` its cause."""
    outcomes = {name: told.outcome for name, told in nodes.items()}
    gone = [name for name, outcome in outcomes.items() if outcome == "gone"]
    if any(outcome == "succeeded" for outcome in outcomes.values()) and "failed" not in outcomes.values():
        last = {told.attempt for told in nodes.values() if told.outcome == "succeeded"}
        # One that waited for the others' end was there, though it was stopped before it had heard of that.
        without = [
            name
            for name, told in nodes.items()
            if told.outcome != "succeeded"
            and not (told.ranks and set(told.ranks) == set(told.ended) and told.attempt in last)
        ]
        how = "trained to the end" + (f" without {', '.join(without)}" if without else "")
        return Verdict("succeeded", how, without=tuple(without))
    no_progress = any(told.no_progress for told in nodes.values())
    messages = [
        told.message
        for told in nodes.values()
        if told.message and told.outcome != "gone" and told.cause != "ended-elsewhere"
    ]
    said = tuple(
        f"{', '.join(name for name, told in nodes.items() if told.message == message)}: {message}"
        for message in dict.fromkeys(messages)
    )
    lost: tuple[str, ...] = tuple(_lost(name, nodes[name]) for name in gone)
    if "failed" not in outcomes.values():
        if also:
            cause = because or (_cause_of_loss(nodes) if lost else None)
            if lost and not any(name in also for name in gone):
                also = f"{also}: {'; '.join(lost)}"
                lost = ()
            return Verdict("failed", also, no_progress, cause=cause, notes=(*lost, *said))
        if "stopped" in outcomes.values():
            return Verdict("stopped", "stopped")
    return explain(nodes, max_restarts=max_restarts, also=also, notes=said)


def explain(
    nodes: Mapping[str, Told],
    *,
    max_restarts: int = 1,
    also: str = "",
    notes: Sequence[str] = (),
    lost: Mapping[str, str] | None = None,
) -> Verdict:
    """What ended the last attempt in which something failed, whatever became of the run after it.

    Args:
        nodes: what each has told.
        max_restarts: the inventory's.
        also: the supervisor's own reason.
        notes: what else the nodes said.
        lost: of a run that goes on, the nodes that this attempt has lost, each with a sentence on it; None for a run
            that is over, whose nodes without a final state are gone.
    """
    no_progress = any(told.no_progress for told in nodes.values())
    gone = list(lost) if lost is not None else [n for n, told in nodes.items() if told.outcome == "gone"]
    failures = [failure for told in nodes.values() for failure in told.failures]
    last = _last_attempt(nodes, failures)
    attempt = [failure for failure in failures if order(failure.attempt) == last]
    first = first_cause(attempt)
    hints = tuple(dict.fromkeys(told.notice for told in nodes.values() if told.notice))
    if gone and all(blames_another(failure) or is_network(failure) for failure in attempt):
        # Who has lost its peer speaks of the network; that the peer is gone is what it means.
        words = [nodes[name].message.strip().splitlines() for name in gone if not nodes[name].cure]
        notes = [*(line for lines in words for line in lines[-6:]), *notes]
        text = "; ".join(lost[name] if lost else _lost(name, nodes[name]) for name in gone)
        others = _echoes([each for each in attempt if each.node not in gone], ", ".join(gone))
        cause: Cause | None = NODE_LOST_MEANWHILE if lost else _cause_of_loss(nodes)
        return Verdict("failed", text, no_progress, cause=cause, others=others, notes=(*notes,))
    if first is None:
        text = notes[0] if notes else also or "every node failed without a word"
        is_short = any(told.cause == "too-few-nodes" for told in nodes.values())
        cause = TOO_FEW_NODES if is_short else recognise("\n".join(notes), 0)
        return Verdict("failed", text, no_progress, cause=cause, notes=(*notes[1:], *hints))
    attempts = {each.attempt for each in failures}
    which = f", in the last of {len(attempts)} attempts" if len(attempts) > 1 else ""
    cause = recognise(first.error, first.exitcode, first.kernel)
    absent = [
        (rank, next((name for name, told in nodes.items() if rank in told.ranks), ""))
        for rank in (awaited(attempt) if blames_another(first) else ())
    ]
    num_well = sum(len(told.ended) for told in nodes.values() if told.attempt == first.attempt)
    if blames_another(first):
        notes = [*_spoken_of(first, nodes), *hints, *notes]
    if len(attempts) == 1 and max_restarts == 0:
        notes = [*notes, "job.max_restarts is 0: a failed rank ends the job"]
    return Verdict(
        "failed",
        _who(first, absent) + which,
        no_progress,
        first=first,
        cause=cause,
        others="" if absent else _others(first, attempt, num_well),
        awaited=tuple(absent),
        notes=(*_failed_too(first, attempt), *(each for each in notes if each)),
    )


def _last_attempt(nodes: Mapping[str, Told], failures: Sequence[Failure]) -> tuple[int, int]:
    """The last that any node took part in, or any rank failed in."""
    told = [node.attempt for node in nodes.values()] + [failure.attempt for failure in failures]
    return max(map(order, told), default=(0, 0))


def _who(first: Failure, absent: Sequence[tuple[int, str]]) -> str:
    """Who began it; `absent`: the ranks, each with its node, that did not come while all others waited."""
    who, how = f"rank {first.rank} on {first.node}", how_it_ended(first.exitcode)
    if absent:
        names = ", ".join(f"rank {rank}" + (f" on {node}" if node else "") for rank, node in absent)
        return (
            f"{names} did not come, and the others gave up waiting for {'it' if len(absent) == 1 else 'them'}"
        )
    if not blames_another(first) or was_told(first):
        return f"{who} {'failed first' if first.world_size > 1 else 'failed'} ({how})"
    if _WAITED.search(first.error):
        return f"the ranks waited for each other in vain; {who} gave up first"
    return f"the ranks lost each other; {who} was the first to notice ({how})"


def _lost(name: str, told: Told) -> str:
    if told.silent_since:
        clock = time.strftime("%H:%M:%S", time.localtime(told.silent_since))
        return f"{name} was lost: it has not been reached since {clock}"
    return f"{name} was lost: its agent {'could not go on' if told.cure else 'is gone without a word'}"


def _cause_of_loss(nodes: Mapping[str, Told]) -> Cause:
    """Why nodes are gone: what one has said of itself, if one has."""
    told = next((told for told in nodes.values() if told.outcome == "gone" and told.cure), None)
    return Cause("node-unfit", told.message, told.cure) if told else NODE_LOST


def _others(first: Failure, attempt: Sequence[Failure], num_well: int) -> str:
    """What became of the other ranks, and how soon; `num_well` of them had ended well."""
    well = f"{num_well} other rank{'' if num_well == 1 else 's'} had ended well" if num_well else ""
    if (number := first.world_size - 1 - num_well) <= 0:
        return well
    # A rank is counted once, whatever the number of processes that spoke for it.
    others = {each.rank: each for each in attempt if each is not first and each.rank != first.rank}
    alike = [each for each in others.values() if _kind(each) == _kind(first)]
    same = [each for each in alike if blames_another(each) == blames_another(first)]
    echoes = [
        each for each in others.values() if each not in same and (blames_another(each) or is_network(each))
    ]
    if blames_another(first):
        echoes = []
    parts = []
    if same:
        parts.append(f"{len(same)} in the same way{_within(first, same)}")
    if waited := [each for each in echoes if _WAITED.search(each.error)]:
        parts.append(f"{len(waited)} waited for it in vain")
    if lost := [each for each in echoes if each not in waited]:
        whose = "its" if len(lost) == 1 else "their"
        parts.append(f"{len(lost)} lost {whose} connection to {first.node}{_within(first, lost)}")
    if different := len(others) - len(same) - len(waited) - len(lost):
        parts.append(f"{different} failed too")
    if ended := number - len(others):
        parts.append(f"{ended} {'was' if ended == 1 else 'were'} ended with it")
    if num_well:
        parts.append(well)
    if len(same) == number:
        plural = "rank" if number == 1 else "ranks"
        return f"the {'' if number == 1 else f'{number} '}other {plural} ended in the same way{_within(first, same)}"
    plural = "rank" if number == 1 else "ranks"
    text = f"{number} other {plural} ended {'too' if same else 'because of it'}"
    if len(parts) == 1:
        return text if ended else f"{text}: {parts[0].partition(' ')[2]}"
    return f"{text}: {', '.join(parts)}"


def _spoken_of(first: Failure, nodes: Mapping[str, Told]) -> list[str]:
    """Whose the addresses are that a rank speaks of: torch names no nodes."""
    names: dict[str, list[str]] = {}
    for name, told in nodes.items():
        names.setdefault(told.address, []).append(name)
    return [
        f"{address}, of which it speaks, is {those[0]}"
        for address, those in names.items()
        if address and len(those) == 1 and those[0] != first.node  # nodes of one host share theirs
        if re.search(rf"(?<![\w.:]){re.escape(address)}(?![\w.])", first.error)
    ]


def _echoes(attempt: Sequence[Failure], nodes: str) -> str:
    """What the ranks of other nodes said when some nodes were lost."""
    if not attempt:
        return ""
    whose = "rank" if len(attempt) == 1 else "ranks"
    names = ", ".join(dict.fromkeys(each.node for each in attempt))
    return f"{len(attempt)} {whose} on {names} lost {'its' if whose == 'rank' else 'their'} connection to {nodes}"


def _failed_too(first: Failure, attempt: Sequence[Failure]) -> list[str]:
    """Those that failed by themselves in another way: they may be another cause, or only untidy."""
    if blames_another(first):
        return []
    others = [
        each
        for each in attempt
        if each is not first
        and not (blames_another(each) or is_network(each))
        and _kind(each) != _kind(first)
    ]
    return [
        f"rank {each.rank} on {each.node} failed too, {max(each.when - first.when, 0):.1f} s later: "
        + (_last_line(each) or how_it_ended(each.exitcode))
        for each in sorted(others, key=lambda each: each.when)[:2]
    ]


def _within(first: Failure, others: Sequence[Failure]) -> str:
    seconds = max(each.when for each in others) - first.when
    return f", within {seconds:.1f} s" if seconds >= 0.05 else ", at once"


def _kind(failure: Failure) -> tuple[int, str]:
    """What two failures of one kind have in common: the exception's type, and its words where that says little."""
    line = _message_lines(failure)[0]
    name = re.match(r"[\w.]+(?=:|$)", line) if failure.error else None
    if name and name[0].endswith(("RuntimeError", "BackendError", "NetworkError", "StoreError")):
        return 0, re.sub(r"\d+", "", line)[:60]
    return (0 if name else failure.exitcode, name[0] if name else "")


def _message_lines(failure: Failure) -> list[str]:
    return message_of(failure.error).strip().splitlines() or [""]


def _last_line(failure: Failure) -> str:
    """The line that names the exception."""
    lines = _message_lines(failure)
    return lines[0] if failure.error.startswith("Traceback") else lines[-1]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


# --- from events ---


def told_in(events: Sequence[Event]) -> dict[str, Told]:
    """What each node has told since the run was started the last time, from the run's events."""
    told: dict[str, dict[str, Any]] = {}
    for event in events[_last_start(events) :]:
        if (name := event.about) is None:
            continue
        node = told.setdefault(name, {"failures": []})
        if event.kind == "agent-started":
            node.update(
                state="starting",
                message="",
                cause="",
                cure="",
                no_progress=False,
                address=text_of(event.get("address")),
            )
        elif event.kind == "worker-failed":
            node["failures"].append(failure_of(event))
        elif event.kind == "agent-ended":
            node.update(
                state=event.get("state", "ended"),
                message=event.get("message", ""),
                cause=text_of(event.get("cause")),
                cure=text_of(event.get("cure")),
                no_progress=bool(event.get("no_progress")),
            )
        elif event.kind == "workers-started":
            node["attempt"] = str(event.get("attempt") or "")
            node["ranks"] = tuple(each["rank"] for each in event.get("workers") or ())
        elif event.kind == "hang" and event.get("line"):
            node["notice"] = event.get("line")
        elif event.kind == "node-state" and event.get("state"):
            # An agent that was killed has told no end; what it was last seen doing is no final state.
            node.setdefault("state", event.get("state"))
        elif event.kind in ("unreachable", "reached"):
            node["silent_since"] = event.time if event.kind == "unreachable" else 0.0
    return {
        name: Told(**{**node, "failures": tuple(node["failures"])})
        for name, node in told.items()
        if node.get("state") or node["failures"]
    }


def _last_start(events: Sequence[Event]) -> int:
    """The index of the event from which on the run is told of."""
    return max((number for number, event in enumerate(events) if event.kind == "run-started"), default=0)


def failure_of(event: Event) -> Failure:
    """A rank's failure as its node's agent wrote it down, as far as what it wrote makes sense."""
    return Failure.of(event.node or "?", event.fields, when=event.time)


def verdict_of(
    events: Sequence[Event],
    *,
    max_restarts: int,
    state: str,
    reason: str,
    known: Mapping[str, str] | None = None,
) -> Verdict | None:
    """The verdict on a run, from its events alone; None while nothing has failed and it is not over.

    Args:
        events: of the run.
        max_restarts: the inventory's.
        state: the run's.
        reason: what is on record as its end.
        known: the cause on record (`Run.cause`); an old record has none.
    """
    nodes = told_in(events)
    if state in ENDED:
        found = verdict(nodes, max_restarts=max_restarts)
        if found.outcome == state and (state != "failed" or found.first or reason in ("", found.summary)):
            return found
        if state == "failed":
            # It was the supervisor's decision, or Slurm's: more than the nodes know.
            cause = Cause(**known) if known else recognise(reason, 0)
            return Verdict(
                "failed", reason, cause=cause, notes=tuple(n for n in found.notes if n not in reason)
            )
        return Verdict(state, reason or state)
    return _of_a_run_that_goes_on(events[_last_start(events) :], nodes)


# --- of a run that goes on ---


def _of_a_run_that_goes_on(events: Sequence[Event], nodes: Mapping[str, Told]) -> Verdict | None:
    """The last thing that went wrong, however long ago it was: ranks that failed, nodes that were lost, or both."""
    attempts = attempts_of(events)
    drained = {attempt for attempt in attempts if attempts[attempt].drained}
    failures = [
        failure
        for told in nodes.values()
        for failure in told.failures
        # Ranks that lose one that leaves since its node is drained have not failed.
        if not (failure.attempt in drained and (blames_another(failure) or is_network(failure)))
    ]
    loss = last_loss(events, attempts)
    last = max((order(failure.attempt) for failure in failures), default=None)
    if loss is not None and (last is None or order(loss.attempt) >= last):
        told = {
            name: replace(
                node,
                attempt=loss.attempt,
                failures=tuple(each for each in node.failures if each.attempt == loss.attempt),
            )
            for name, node in {**dict.fromkeys(loss.nodes, Told()), **nodes}.items()
        }
        is_recovered = has_later(attempts, order(loss.attempt))
        return replace(explain(told, lost=loss.nodes), when=loss.when, is_recovered=is_recovered)
    if last is None:
        return None
    meant = set(failures)  # of weeks there may be some ten thousand
    told = {
        name: replace(node, attempt="", failures=tuple(each for each in node.failures if each in meant))
        for name, node in nodes.items()
    }
    found = explain({name: node for name, node in told.items() if node.failures}, lost={})
    when = found.first.when if found.first else 0.0
    return replace(found, when=when, is_recovered=has_later(attempts, last))
