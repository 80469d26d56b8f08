"""Tests the connections of every ordered pair of hosts, over the interfaces that the job will use."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from nodekit.deploy.connect.channel import HostChannel, on_all
from nodekit.deploy.host.probes.network.netprobe import OPEN_AT_ONCE, SMALL_BYTES, Peer, Tried
from nodekit.deploy.host.probes.network.netstate import Firewall
from nodekit.deploy.preflight.network.outcomes import (
    End,
    Group,
    Pair,
    Pairs,
    closed_words,
    grouped,
    is_secondary,
    packet,
)
from nodekit.inventory.errors import HostError

T = TypeVar("T")

ANSWER_S = 1.2  # a lost SYN is sent again after 1 s
ATTEMPTS = 2  # attempts of all failures together: a packet may have been lost
FEW = 4  # up to this number of failures are tried alone without a second joint attempt
# For a pair that is tried alone: SYNs are sent again after 1 and 3 s.
ALONE_S, LEAST_ALONE_S = 5.0, 2.4
_RESERVE_S = 1.2  # time reserved for the questions after the pairs
LADDER = (576, 1000, 1200, 1280, 1400, 1450, 1500, 2044, 4092, 9000)
"""Common packet sizes, to find the largest that passes."""
_ARRIVAL_S = 0.5  # for a datagram to arrive
_SPARE_S = 1.0  # part of a call's time limit for the round trip
_FIREWALL_S = 4.0


def measure(
    channels: Mapping[str, HostChannel], session: str, ends: Mapping[str, End], *, left_s: Callable[[], float]
) -> tuple[Pairs, dict[str, HostError]]:
    """Let every host connect to every other one; retry failures together, and then each pair alone.

    Returns:
        (source, target) → the outcome, and host → why it did not answer: its pairs are left out.
    """
    names = list(ends)
    sizes = {(a, b): [SMALL_BYTES, packet(ends, a, b)] for a in names for b in names if a != b}
    # Each starts with another peer, so that not all connect to the same host at once.
    order = {a: [*names[i + 1 :], *names[:i]] for i, a in enumerate(names)}
    wanted = {(a, b): ends[b].ports for a in names for b in order[a]}
    pairs: Pairs = {}
    silent: dict[str, HostError] = {}
    for attempt in range(ATTEMPTS):
        num_calls = max((len(ports) for ports in wanted.values()), default=0) * len(names)
        limit_s = min(left_s() - 2 * _SPARE_S, 2 * ANSWER_S * (1 + num_calls / OPEN_AT_ONCE) + _SPARE_S)
        if attempt and limit_s < ANSWER_S:
            break
        peers = {
            a: [_peer(ends[b], wanted[a, b], sizes[a, b]) for b in order[a] if (a, b) in wanted]
            for a in names
        }
        # A busy host may need longer than its limit, and gets extra time if there is some.
        spare_s = max(_SPARE_S, (left_s() - limit_s) / 2)
        answers = on_all(
            {a: channels[a] for a in names if peers[a]},
            _calls(session, peers, limit_s=max(limit_s, 0.1), spare_s=spare_s),
        )
        sent = {b: {a: sizes[a, b] for a in names if (a, b) in wanted} for b in names}
        arrivals = on_all({name: channels[name] for name in names}, _asks(session, sent, limit_s=left_s()))
        (said, not_said), (came, not_come) = told_apart(answers), told_apart(arrivals)
        silent = {**not_come, **not_said, **silent}
        for a, b in wanted:
            if a in said:
                pairs[a, b] = _merged(pairs.get((a, b)), a, b, said[a][b])
        for (a, b), pair in pairs.items():
            if b in came:
                pairs[a, b] = dataclasses.replace(pair, arrived=pair.arrived | frozenset(came[b].get(a, ())))
        wanted = {}
        for (a, b), pair in pairs.items():
            most = sizes[a, b][-1]
            if {a, b} & set(silent) or not (pair.failed or most not in pair.arrived):
                continue
            wanted[a, b] = tuple(port for ports in pair.failed.values() for port in ports)
            sizes[a, b] = [SMALL_BYTES, *(size for size in LADDER if size < most), most]
        if sum(map(bool, wanted.values())) <= FEW:
            wanted = {(a, b): () for a, b in wanted if sizes[a, b][-1] not in pairs[a, b].arrived}
        if not wanted:
            break
    pairs = {key: pair for key, pair in pairs.items() if not set(key) & set(silent)}
    _try_alone(channels, session, ends, pairs, left_s=left_s)
    return pairs, silent


def _try_alone(
    channels: Mapping[str, HostChannel],
    session: str,
    ends: Mapping[str, End],
    pairs: Pairs,
    *,
    left_s: Callable[[], float],
) -> None:
    """Retry failures one pair at a time, with longer timeouts: hosts and switches may only have been busy.

    Of pairs with the same outcome, the others are skipped as soon as one has failed again in the same way. Updates
    `pairs`.
    """

    def faults() -> dict[tuple[str, str], tuple[str, bool]]:
        found = {}
        for key, pair in pairs.items():
            closed = pair.failed and not is_secondary(pair, pairs, ends)
            lost = SMALL_BYTES in pair.arrived and packet(ends, *key) not in pair.arrived
            if closed or lost:
                found[key] = closed_words(pair, ends[pair.target], 0) if closed else "", bool(lost)
        return found

    before = faults()
    groups = grouped(before, list(ends))
    if len(before) == len(pairs) and len(set(before.values())) == 1:
        groups = [Group("all hosts", tuple(ends), "between all: ", tuple(before))]
    for key in dict.fromkeys(key for group in groups for key in group.pairs):
        if key not in before:
            continue
        there_is_s = left_s() - _RESERVE_S
        if there_is_s < LEAST_ALONE_S:
            return
        num_left = sum(any(each in before for each in group.pairs) for group in groups)
        answer_s = min(ALONE_S, max(LEAST_ALONE_S, there_is_s / num_left))
        pairs[key] = _tried_alone(channels, session, ends, pairs[key], answer_s, left_s, asks=before[key][1])
        if faults().get(key) == before[key] and pairs[key].is_alone:
            for group in groups:
                if key in group.pairs:
                    for each in group.pairs:
                        before.pop(each, None)


def _tried_alone(
    channels: Mapping[str, HostChannel],
    session: str,
    ends: Mapping[str, End],
    pair: Pair,
    answer_s: float,
    left_s: Callable[[], float],
    *,
    asks: bool,
) -> Pair:
    """Return a pair after one more attempt; `asks`: wait for a datagram that was lost."""
    source, target = pair.source, pair.target
    ports = [port for ports in pair.failed.values() for port in ports]
    sizes = [SMALL_BYTES, packet(ends, source, target)]
    peers = {source: [_peer(ends[target], ports, sizes)]}
    answers = on_all(
        {source: channels[source]}, _calls(session, peers, limit_s=2 * answer_s, answer_s=answer_s)
    )
    arrivals = on_all(
        {target: channels[target]} if asks else {},
        _asks(session, {target: {source: sizes}}, limit_s=max(left_s(), _SPARE_S)),
    )
    (said, _), (came, _) = told_apart(answers), told_apart(arrivals)
    if source in said:
        answer = said[source][target]
        is_alone = "untried" not in answer["failed"]
        pair = dataclasses.replace(_merged(pair, source, target, answer), is_alone=is_alone)
    if target in came:
        pair = dataclasses.replace(pair, arrived=pair.arrived | frozenset(came[target].get(source, ())))
    return pair


def told_apart(answers: Mapping[str, T | Exception]) -> tuple[dict[str, T], dict[str, HostError]]:
    """Split results into the answers of hosts, and the errors of those that did not answer."""
    told: dict[str, T] = {}
    silent: dict[str, HostError] = {}
    for name, answer in answers.items():
        if isinstance(answer, HostError):
            silent[name] = answer
        elif isinstance(answer, Exception):
            raise answer  # a bug of ours
        else:
            told[name] = answer
    return told, silent


def _peer(end: End, ports: Sequence[int], sizes: Sequence[int]) -> Peer:
    """Return a host as an argument of `netprobe.try_peers`."""
    return {
        "name": end.host,
        "address": end.address,
        "ports": ports,
        "udp_port": end.udp_port,
        "sizes": sizes,
    }


def _calls(
    session: str,
    peers: Mapping[str, Sequence[Peer]],
    *,
    limit_s: float,
    answer_s: float = ANSWER_S,
    spare_s: float = _SPARE_S,
) -> Callable[[HostChannel], dict[str, Tried]]:
    """Return the call that lets a host connect to its peers."""
    return lambda channel: channel.call(
        "netprobe.try_peers",
        timeout_s=limit_s + spare_s,
        session=session,
        peers=peers[channel.host],
        answer_s=answer_s,
        limit_s=limit_s,
    )


def _asks(
    session: str, sent: Mapping[str, Mapping[str, Sequence[int]]], *, limit_s: float
) -> Callable[[HostChannel], dict[str, list[int]]]:
    """Return the call that asks a host which datagrams have arrived."""
    return lambda channel: channel.call(
        "netprobe.arrived",
        timeout_s=max(limit_s, _SPARE_S),
        session=session,
        wanted=sent[channel.host],
        wait_s=min(_ARRIVAL_S, limit_s / 2),
    )


def _merged(before: Pair | None, source: str, target: str, answer: Tried) -> Pair:
    """Return a pair after one more attempt at its failed ports."""
    failed: dict[str, list[int]] = {}
    # An earlier answer outweighs silence: a kernel rejects connections only a few times per second.
    known = {port: outcome for outcome, ports in before.failed.items() for port in ports} if before else {}
    tried = {*answer["connects"], *(port for ports in answer["failed"].values() for port in ports)}
    for port in known.keys() - tried:
        failed.setdefault(known[port], []).append(port)
    for outcome, ports in answer["failed"].items():
        for port in ports:
            failed.setdefault(known.get(port, outcome) if outcome == "dropped" else outcome, []).append(port)
    return Pair(
        source=source,
        target=target,
        connects=(*(before.connects if before else ()), *answer["connects"]),
        failed={outcome: tuple(sorted(ports)) for outcome, ports in failed.items()},
        words={**(before.words if before else {}), **answer["words"]},
        source_address=answer["source"] or (before.source_address if before else None),
        arrived=before.arrived if before else frozenset(),
        unsent=answer["unsent"],
        dropped_from=tuple(answer["dropped_from"]) if tried or before is None else before.dropped_from,
    )


def ask_firewalls(
    channels: Mapping[str, HostChannel], hosts: Iterable[str], *, left_s: Callable[[], float]
) -> dict[str, Firewall]:
    """Return the firewalls of some hosts, if there is time to ask."""
    limit_s = min(_FIREWALL_S, left_s())
    if limit_s < 0.5:
        return {}

    def ask(channel: HostChannel) -> Firewall:
        found: Firewall = channel.call("netstate.firewall", timeout_s=limit_s)
        return found

    asked = on_all({name: channels[name] for name in hosts}, ask)
    return {name: answer for name, answer in asked.items() if not isinstance(answer, Exception)}


def deadline(seconds: float) -> Callable[[], float]:
    """Return a function that returns the seconds left, never below zero."""
    end = time.monotonic() + seconds
    return lambda: max(0.0, end - time.monotonic())
