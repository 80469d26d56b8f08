"""Determines how a run ended and why: the first cause, from what all nodes reported. Pure."""

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
    line_of,
    message_of,
    was_told,
)
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import ENDED, Outcome
from nodekit.deploy.story.attempts import order, text_of
from nodekit.deploy.story.cause import Cause
from nodekit.deploy.story.causes import DISK_CURE, NODE_LOST, NODE_LOST_MEANWHILE, TOO_FEW_NODES, recognise
from nodekit.deploy.story.losses import attempts_of, has_later, last_loss

_WAITED = re.compile(r"Timed out waiting|Watchdog caught|Socket Timeout|monitoredBarrier|[Ww]ait timeout")
_SUMMARY_WIDTH = 100


@dataclass(frozen=True)
class Told:
    """What one node has reported, as input for the verdict."""

    state: str = ""
    """The agent's last state; "" for a spare, which never had an agent."""
    failures: tuple[Failure, ...] = ()
    message: str = ""
    cause: str = ""
    """Why its agent ended, if known (`EndCause`)."""
    cure: str = ""
    """What to do about that, according to its agent."""
    no_progress: bool = False
    """Whether restarts brought no progress."""
    notice: str = ""
    """The last notice of its agent, which the user has seen."""
    unwritable: str = ""
    """Why nothing can be written to its folder; "" if something was written since, or it can be."""
    silent_since: float = 0.0
    """Since when the node is unreachable, in seconds since 1970; 0 if it is reachable."""
    attempt: str = ""
    """The last attempt that it took part in."""
    ranks: tuple[int, ...] = ()
    """Its ranks in that attempt."""
    ended: tuple[int, ...] = ()
    """Those of its ranks that have ended with status 0."""
    address: str = ""
    """The address by which the other nodes reach it."""

    @property
    def outcome(self) -> str:
        """How the node ended; ``gone`` if its agent reported no end."""
        return self.state if self.state in ENDED else "gone"


@dataclass(frozen=True)
class Verdict:
    """How a run ended, and why."""

    outcome: Outcome
    text: str
    """The verdict in one line; the details are in the other fields."""
    no_progress: bool = False
    without: tuple[str, ...] = ()
    """Nodes that were not in the job at its end."""
    may_go_on: tuple[str, ...] = ()
    """Unreachable nodes that do not know of the end, and may be training together."""
    first: Failure | None = None
    """The first failure, if a rank's failure was the cause."""
    cause: Cause | None = None
    """The known cause, if there is one."""
    others: str = ""
    """What became of the other ranks, in words."""
    notes: tuple[str, ...] = ()
    """What else the nodes reported, one line each."""
    awaited: tuple[tuple[int, str], ...] = ()
    """(rank, node) of the ranks that did not join a collective, if the others named them; `first` timed out first."""
    when: float = 0.0
    """In a running run: when the last failure or loss began; 0 if unknown, or if the run has ended."""
    is_recovered: bool = False
    """In a running run: whether another attempt has begun since."""

    @property
    def summary(self) -> str:
        """The verdict in one line for tables: which rank or node, and the cause."""
        text = self.text.partition("\n")[0]
        if self.first is None:
            return text
        said = self.cause.name.replace("-", " ") if self.cause else line_of(self.first.error)
        return _cut(f"{text}: {said}" if said else text, _SUMMARY_WIDTH)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that ``--json`` prints."""
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
    """Return how a run ended, from what all nodes reported; pure.

    Args:
        nodes: node → its report.
        max_restarts: of the inventory.
        also: the reason for which the supervisor ended the run, if it did.
        because: the known cause of that reason.
    """
    outcomes = {name: told.outcome for name, told in nodes.items()}
    gone = [name for name, outcome in outcomes.items() if outcome == "gone"]
    if any(outcome == "succeeded" for outcome in outcomes.values()) and "failed" not in outcomes.values():
        last = {told.attempt for told in nodes.values() if told.outcome == "succeeded"}
        # A node whose ranks had all ended well took part to the end, though it was stopped before it knew of the end.
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
            cause = because or (_cause_of_loss(nodes, gone, NODE_LOST) if lost else None)
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
    """Return why the last attempt with a failure or loss ended, whatever became of the run afterwards.

    Args:
        nodes: node → its report.
        max_restarts: of the inventory.
        also: the reason for which the supervisor ended the run, if it did.
        notes: what else the nodes reported.
        lost: for a running run, node that the attempt lost → a sentence about that; None for a run that has ended,
            in which every node without a final state counts as lost.
    """
    no_progress = any(told.no_progress for told in nodes.values())
    gone = list(lost) if lost is not None else [n for n, told in nodes.items() if told.outcome == "gone"]
    failures = [failure for told in nodes.values() for failure in told.failures]
    last = _last_attempt(nodes, failures)
    attempt = [failure for failure in failures if order(failure.attempt) == last]
    first = first_cause(attempt)
    # Of a hang, without the stack below: the user has seen that, and here lines are wrapped into one.
    hints = tuple(dict.fromkeys(told.notice.splitlines()[0] for told in nodes.values() if told.notice))
    if gone and all(blames_another(failure) or is_network(failure) for failure in attempt):
        # Ranks that lose a peer report a network error; the cause is that the peer's node is gone.
        words = [nodes[name].message.strip().splitlines() for name in gone if not nodes[name].cure]
        notes = [*(line for lines in words for line in lines[-6:]), *notes]
        text = "; ".join(lost[name] if lost else _lost(name, nodes[name]) for name in gone)
        others = _echoes([each for each in attempt if each.node not in gone], ", ".join(gone))
        cause: Cause | None = _cause_of_loss(nodes, gone, NODE_LOST_MEANWHILE if lost else NODE_LOST)
        return Verdict("failed", text, no_progress, cause=cause, others=others, notes=(*notes,))
    if first is None:
        text = notes[0] if notes else also or "every node failed without a word"
        is_short = any(told.cause == "too-few-nodes" for told in nodes.values())
        cause = TOO_FEW_NODES if is_short else recognise("\n".join(notes), 0)
        spoken_of = _spoken_of("\n".join(notes), nodes)
        return Verdict("failed", text, no_progress, cause=cause, notes=(*notes[1:], *spoken_of, *hints))
    attempts = {each.attempt for each in failures}
    which = f", in the last of {len(attempts)} attempts" if len(attempts) > 1 else ""
    cause = recognise(first.error, first.exitcode, first.kernel)
    absent = [
        (rank, next((name for name, told in nodes.items() if rank in told.ranks), ""))
        for rank in (awaited(attempt) if blames_another(first) else ())
    ]
    num_well = sum(len(told.ended) for told in nodes.values() if told.attempt == first.attempt)
    if blames_another(first):
        notes = [*_spoken_of(first.error, nodes, by=first.node), *hints, *notes]
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
        notes=(
            *_failed_too(first, attempt),
            *(each for each in notes if each),
            *(_unwritable(name, told) for name, told in nodes.items() if told.unwritable),
        ),
    )


def _last_attempt(nodes: Mapping[str, Told], failures: Sequence[Failure]) -> tuple[int, int]:
    """Return the last attempt that a node took part in, or that a rank failed in."""
    told = [node.attempt for node in nodes.values()] + [failure.attempt for failure in failures]
    return max(map(order, told), default=(0, 0))


def _who(first: Failure, absent: Sequence[tuple[int, str]]) -> str:
    """Return, in words, which rank failed first; `absent` are the (rank, node) that the other ranks waited for."""
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


def _cause_of_loss(nodes: Mapping[str, Told], gone: Sequence[str], unknown: Cause) -> Cause:
    """Return why nodes were lost: what one of them reported about itself, or its disk, or `unknown`."""
    for told in (nodes[name] for name in gone):
        if told.outcome == "gone" and told.cure:
            return Cause("node-unfit", told.message, told.cure)
    disks = [_unwritable(name, nodes[name]) for name in gone if nodes[name].unwritable]
    return Cause("disk-unwritable", "; ".join(disks), DISK_CURE) if disks else unknown


def _unwritable(name: str, told: Told) -> str:
    return f"on {name} {told.unwritable}"


def _others(first: Failure, attempt: Sequence[Failure], num_well: int) -> str:
    """Return, in words, what became of the other ranks, and how soon; `num_well` of them had ended with status 0."""
    well = f"{num_well} other rank{'' if num_well == 1 else 's'} had ended well" if num_well else ""
    if (number := first.world_size - 1 - num_well) <= 0:
        return well
    # Count a rank once, even if several of its processes reported a failure.
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


def _spoken_of(text: str, nodes: Mapping[str, Told], *, by: str = "") -> list[str]:
    """Return notes on which nodes other than `by` the IP addresses in a text are of, since torch names no nodes."""
    names: dict[str, list[str]] = {}
    for name, told in nodes.items():
        names.setdefault(told.address, []).append(name)
    return [
        f"{address}, of which it speaks, is {those[0]}"
        for address, those in names.items()
        if address and len(those) == 1 and those[0] != by  # nodes of one host share an address
        if re.search(rf"(?<![\w.:]){re.escape(address)}(?![\w.])", text)
    ]


def _echoes(attempt: Sequence[Failure], nodes: str) -> str:
    """Return, in words, how many ranks of other nodes failed because they lost some nodes."""
    if not attempt:
        return ""
    whose = "rank" if len(attempt) == 1 else "ranks"
    names = ", ".join(dict.fromkeys(each.node for each in attempt))
    return f"{len(attempt)} {whose} on {names} lost {'its' if whose == 'rank' else 'their'} connection to {nodes}"


def _failed_too(first: Failure, attempt: Sequence[Failure]) -> list[str]:
    """Return notes on the first two ranks that failed in another way: a second cause, or an unclean exit."""
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
        + (line_of(each.error) or how_it_ended(each.exitcode))
        for each in sorted(others, key=lambda each: each.when)[:2]
    ]


def _within(first: Failure, others: Sequence[Failure]) -> str:
    seconds = max(each.when for each in others) - first.when
    return f", within {seconds:.1f} s" if seconds >= 0.05 else ", at once"


def _kind(failure: Failure) -> tuple[int, str]:
    """Return a key that failures of one kind share: the exception's type, with its text if the type is generic."""
    line = _message_lines(failure)[0]
    name = re.match(r"[\w.]+(?=:|$)", line) if failure.error else None
    if name and name[0].endswith(("RuntimeError", "BackendError", "NetworkError", "StoreError")):
        return 0, re.sub(r"\d+", "", line)[:60]
    return (0 if name else failure.exitcode, name[0] if name else "")


def _message_lines(failure: Failure) -> list[str]:
    return message_of(failure.error).strip().splitlines() or [""]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


# --- from events ---


def told_in(events: Sequence[Event]) -> dict[str, Told]:
    """Return node → what it has reported since the run's last start, from the run's events."""
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
                unwritable="",  # what it has written since is read here
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
            node["unwritable"] = ""
        elif event.kind == "said":
            node["unwritable"] = text_of(event.get("unwritable"))
        elif event.kind == "hang" and event.get("line"):
            node["notice"] = event.get("line")
        elif event.kind == "node-state" and event.get("state"):
            # For an agent that was killed, and reported no end: its last observed state, which is no final one.
            node.setdefault("state", event.get("state"))
        elif event.kind in ("unreachable", "reached"):
            node["silent_since"] = event.time if event.kind == "unreachable" else 0.0
    return {
        name: Told(**{**node, "failures": tuple(node["failures"])})
        for name, node in told.items()
        if node.get("state") or node["failures"]
    }


def _last_start(events: Sequence[Event]) -> int:
    """Return the index of the event of the run's last start."""
    return max((number for number, event in enumerate(events) if event.kind == "run-started"), default=0)


def failure_of(event: Event) -> Failure:
    """Return the failure in a ``worker-failed`` event; fields of a wrong type get a default."""
    return Failure.of(event.node or "?", event.fields, when=event.time)


def verdict_of(
    events: Sequence[Event],
    *,
    max_restarts: int,
    state: str,
    reason: str,
    known: Mapping[str, str] | None = None,
) -> Verdict | None:
    """Return the verdict on a run from its events; None if it is running, and nothing has failed.

    Args:
        events: of the run.
        max_restarts: of the inventory.
        state: of the run.
        reason: the recorded verdict (`Run.verdict`).
        known: the recorded cause (`Run.cause`); None in old records.
    """
    nodes = told_in(events)
    if state in ENDED:
        found = verdict(nodes, max_restarts=max_restarts)
        if found.outcome == state and (state != "failed" or found.first or reason in ("", found.summary)):
            return found
        if state == "failed":
            # The supervisor or Slurm ended the run, for a reason that the nodes do not know.
            cause = Cause(**known) if known else recognise(reason, 0)
            return Verdict(
                "failed", reason, cause=cause, notes=tuple(n for n in found.notes if n not in reason)
            )
        return Verdict(state, reason or state)
    return _of_a_run_that_goes_on(events[_last_start(events) :], nodes)


# --- of a run that goes on ---


def _of_a_run_that_goes_on(events: Sequence[Event], nodes: Mapping[str, Told]) -> Verdict | None:
    """Return a verdict on the last failure or loss of nodes in a running run, however old; None if there is none."""
    attempts = attempts_of(events)
    drained = {attempt for attempt in attempts if attempts[attempt].drained}
    failures = [
        failure
        for told in nodes.values()
        for failure in told.failures
        # Ranks that lose a rank of a node that is being drained have not failed.
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
    meant = set(failures)  # a run of weeks may have ten thousand
    told = {
        name: replace(node, attempt="", failures=tuple(each for each in node.failures if each in meant))
        for name, node in nodes.items()
    }
    found = explain({name: node for name, node in told.items() if node.failures or node.unwritable}, lost={})
    when = found.first.when if found.first else 0.0
    return replace(found, when=when, is_recovered=has_later(attempts, last))
