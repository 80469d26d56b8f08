"""Tries every ordered pair of hosts, over the interfaces that the job will use, and judges what became of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.connect.link import Link, on_all
from nodekit.deploy.host.probes.netprobe import OPEN_AT_ONCE, SMALL_BYTES
from nodekit.deploy.plan.findings import Finding, Level
from nodekit.deploy.preflight.network import firewall
from nodekit.inventory.errors import HostError

ANSWER_S = 1.2  # a lost SYN is sent again after 1 s
ATTEMPTS = 2  # of all that fails at once: a packet may have been lost
FEW = 4  # so few pairs are at once tried alone
ALONE_S, LEAST_ALONE_S = (
    5.0,
    2.4,
)  # for a pair that is tried with nothing else under way: SYNs are sent after 1 and 3 s
_RESERVE_S = 1.2  # of the time, for what is asked after the pairs
LADDER = (1280, 1400, 1450, 1500, 2044, 4092, 9000)
"""Sizes of packets that networks are made for, to find out which still passes."""
MAX_PACKET = 65535
_ARRIVAL_S = 0.5  # for a datagram to come, once it was sent
_SPARE_S = 1.0  # of the time for a call: for its way there and back
_FIREWALL_S = 4.0
_MAX_COMMANDS = 3
# outcome → what is said of the ports
_WORDS = {
    "dropped": "dropped (no answer)",
    "refused": "refused, although it is listened at",
    "unreachable": "unreachable",
    "silent": "taken by somebody who says nothing",
    "stranger": "answered by somebody else",
    "untried": "not tried: the time was over",
    "rejected": "rejected (refused, or no answer)",
}


@dataclass(frozen=True, kw_only=True)
class End:
    """One host, listening."""

    host: str
    address: str
    interface: str
    mtu: int
    ports: tuple[int, ...]
    """Where it listens."""
    udp_port: int | None
    port_range: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What became of one host's calls to another."""

    source: str
    target: str
    connects: tuple[int, ...] = ()
    failed: Mapping[str, tuple[int, ...]]
    """Outcome → ports."""
    words: Mapping[str, str]
    """Outcome → what the kernel said, or the stranger."""
    source_address: str | None = None
    """What the source called from."""
    arrived: frozenset[int] = frozenset()
    """Sizes of the datagrams that came."""
    unsent: Mapping[str, str]
    """Size → why the source's kernel did not send it."""
    dropped_from: tuple[int, ...] = ()
    """The source's own ports of the calls that got no answer."""
    is_alone: bool = False
    """Whether it was tried with nothing else under way, at last."""

    @property
    def is_open(self) -> bool:
        """Whether every port connects."""
        return bool(self.connects) and not self.failed


Pairs = dict[tuple[str, str], Pair]


def measure(
    links: Mapping[str, Link], session: str, ends: Mapping[str, End], *, left_s: Callable[[], float]
) -> tuple[Pairs, dict[str, HostError]]:
    """Let every host call every other one; what fails is tried again, together, and then each pair alone.

    Returns:
        (source, target) → what became of it, and host → why it gave no answer: its pairs are left out.
    """
    names = list(ends)
    sizes = {(a, b): [SMALL_BYTES, _packet(ends, a, b)] for a in names for b in names if a != b}
    # Each begins with another one, so that not all call the same host at once.
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
        # A busy host needs longer than its limit; where there is time, it gets some.
        spare_s = max(_SPARE_S, (left_s() - limit_s) / 2)
        said = on_all(
            {a: links[a] for a in names if peers[a]},
            _calls(session, peers, limit_s=max(limit_s, 0.1), spare_s=spare_s),
        )
        sent = {b: {a: sizes[a, b] for a in names if (a, b) in wanted} for b in names}
        came = on_all({name: links[name] for name in names}, _asks(session, sent, limit_s=left_s()))
        for name, answer in (*said.items(), *came.items()):
            if isinstance(answer, HostError):
                silent.setdefault(name, answer)
            elif isinstance(answer, Exception):
                raise answer  # our own bug
        for a, b in wanted:
            if isinstance(answer := said.get(a), dict):
                pairs[a, b] = _merged(pairs.get((a, b)), a, b, answer[b])
        for (a, b), pair in pairs.items():
            if isinstance(here := came.get(b), dict):
                pairs[a, b] = dataclasses.replace(pair, arrived=pair.arrived | frozenset(here.get(a, ())))
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
    _try_alone(links, session, ends, pairs, left_s=left_s)
    return pairs, silent


def _try_alone(
    links: Mapping[str, Link],
    session: str,
    ends: Mapping[str, End],
    pairs: Pairs,
    *,
    left_s: Callable[[], float],
) -> None:
    """Try what fails once more, one pair after the other, and unhurriedly: hosts and switches may only have been busy.

    Of pairs that fare alike the others are left out as soon as one has failed again in the same way. `pairs` has what
    became of it.
    """

    def faults() -> dict[tuple[str, str], tuple[str, bool]]:
        found = {}
        for key, pair in pairs.items():
            closed = pair.failed and not _is_echo(pair, pairs, ends)
            lost = SMALL_BYTES in pair.arrived and _packet(ends, *key) not in pair.arrived
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
        source, target = key
        ports = [port for ports in pairs[key].failed.values() for port in ports]
        sizes = [SMALL_BYTES, _packet(ends, source, target)]
        peers = {source: [_peer(ends[target], ports, sizes)]}
        said = on_all(
            {source: links[source]}, _calls(session, peers, limit_s=2 * answer_s, answer_s=answer_s)
        )
        is_asked = before[key][1]  # a datagram that is lost is waited for
        came = on_all(
            {target: links[target]} if is_asked else {},
            _asks(session, {target: {source: sizes}}, limit_s=max(left_s(), _SPARE_S)),
        )
        for answer in (*said.values(), *came.values()):
            if isinstance(answer, Exception) and not isinstance(answer, HostError):
                raise answer  # our own bug
        if isinstance(answer := said[source], dict):
            pair = _merged(pairs[key], source, target, answer[target])
            pairs[key] = dataclasses.replace(
                pair, arrived=pairs[key].arrived, is_alone="untried" not in answer[target]["failed"]
            )
        if isinstance(answer := came.get(target), dict):
            arrived = pairs[key].arrived | frozenset(answer.get(source, ()))
            pairs[key] = dataclasses.replace(pairs[key], arrived=arrived)
        if faults().get(key) == before[key] and pairs[key].is_alone:
            for group in groups:
                if key in group.pairs:
                    for each in group.pairs:
                        before.pop(each, None)


def _packet(ends: Mapping[str, End], source: str, target: str) -> int:
    """The size of the largest packet that both interfaces take."""
    return min(ends[source].mtu, ends[target].mtu, MAX_PACKET)


def _peer(end: End, ports: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    """A host as `netprobe.try_peers` takes it."""
    return {
        "name": end.host,
        "address": end.address,
        "ports": ports,
        "udp_port": end.udp_port,
        "sizes": sizes,
    }


def _calls(
    session: str,
    peers: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    limit_s: float,
    answer_s: float = ANSWER_S,
    spare_s: float = _SPARE_S,
) -> Callable[[Link], Any]:
    """What lets a host call its peers."""
    return lambda link: link.call(
        "netprobe.try_peers",
        timeout_s=limit_s + spare_s,
        session=session,
        peers=peers[link.host],
        answer_s=answer_s,
        limit_s=limit_s,
    )


def _asks(
    session: str, sent: Mapping[str, Mapping[str, Sequence[int]]], *, limit_s: float
) -> Callable[[Link], Any]:
    """What asks a host which datagrams have come."""
    return lambda link: link.call(
        "netprobe.arrived",
        timeout_s=max(limit_s, _SPARE_S),
        session=session,
        wanted=sent[link.host],
        wait_s=min(_ARRIVAL_S, limit_s / 2),
    )


def _merged(before: Pair | None, source: str, target: str, answer: Mapping[str, Any]) -> Pair:
    """A pair after one more attempt at what had failed."""
    failed: dict[str, list[int]] = {}
    # Silence says less than what was heard before: a kernel says no a few times a second only.
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
    links: Mapping[str, Link], hosts: Iterable[str], *, left_s: Callable[[], float]
) -> dict[str, Mapping[str, Any]]:
    """What filters packets on some hosts, as far as there is time to ask."""
    limit_s = min(_FIREWALL_S, left_s())
    if limit_s < 0.5:
        return {}
    asked = on_all(
        {name: links[name] for name in hosts}, lambda link: link.call("netstate.firewall", timeout_s=limit_s)
    )
    return {name: answer for name, answer in asked.items() if not isinstance(answer, Exception)}


def judge(
    pairs: Pairs,
    ends: Mapping[str, End],
    firewalls: Mapping[str, Mapping[str, Any]],
    *,
    port: int,
    port_matters: bool,
) -> list[Finding]:
    """A finding for each pair that something is wrong with, those of one host as one where all are alike; pure.

    Args:
        pairs: what was measured.
        ends: the hosts.
        firewalls: host → `netstate.firewall` there.
        port: the rendezvous port.
        port_matters: whether a job needs just this one; else only a warning comes of it.
    """
    addresses = {name: end.address for name, end in ends.items()}
    interfaces = {name: end.interface for name, end in ends.items()}
    found: list[Finding] = []
    closed: dict[tuple[str, str], tuple[str, Level]] = {}
    for key, pair in pairs.items():
        if pair.failed and not _is_echo(pair, pairs, ends):
            harmless = not port_matters and {
                number for ports in pair.failed.values() for number in ports
            } == {port}
            closed[key] = (closed_words(pair, ends[pair.target], port), "warning" if harmless else "failure")
    for group in grouped(closed, list(ends)):
        source, target = group.pairs[0]
        pair = pairs[source, target]
        words, level = closed[source, target]
        cures = {
            firewall.cure(
                firewalls,
                source=source,
                target=target,
                addresses=addresses,
                interfaces=interfaces,
                port=number,
                answer_port=next(iter(pair.dropped_from), None),
            ): None
            for ports in pair.failed.values()
            for number in ports
        }
        certain = [each for each in cures if ", chain " in each[1]] or list(cures)
        because = "; ".join(filter(None, (seen for _, seen in certain)))
        way = "; ".join(command for command, _ in certain)
        alone = [key for key in group.pairs if pairs[key].is_alone]
        tried = (
            f"tried twice, the second time {'this pair' if not group.words else ' → '.join(alone[0])} alone"
            if alone
            else ""
        )
        if not alone:
            level = "warning"
            tried = "while all hosts called one another; there was no time to try it alone, so it may well be open"
            because, way = "", "give it more time: kit check --timeout 60"
        parts = [
            group.words + words,
            *([] if group.words else [_back(pairs, source, target)]),
            tried,
            because,
        ]
        low, high = ends[target].port_range
        found.append(
            Finding(
                check="network",
                host=group.host,
                level=level,
                found="; ".join(filter(None, parts)),
                wanted=f"TCP to {addresses[target]} on port {port}, and on {low}-{high} for gloo and NCCL",
                cure=way,
                hosts=group.hosts,
            )
        )
    found += _packet_findings(pairs, ends)
    for own in ends.values():
        strays = [
            pair
            for pair in pairs.values()
            if pair.source == own.host and pair.source_address not in (None, own.address)
        ]
        if strays:
            found.append(
                Finding(
                    check="network",
                    host=own.host,
                    level="warning",
                    found=f"its packets to {', '.join(pair.target for pair in strays)} leave from "
                    f"{strays[0].source_address}, not from {own.address} ({own.interface})",
                    wanted="one route both ways, over the interface that was chosen",
                    cure=f"on {own.host}: sudo ip route replace {addresses[strays[0].target]} "
                    f"dev {own.interface} src {own.address}",
                )
            )
    return found


def _is_echo(pair: Pair, pairs: Pairs, ends: Mapping[str, End]) -> bool:
    """Whether just those calls failed whose answers go to a port range that is dropped on their way back."""
    if set(pair.failed) != {"dropped"} or not pair.connects:
        return False
    own = sorted(ends[pair.source].ports)
    for (_, target), other in pairs.items():
        first, last = ends[pair.source].port_range
        closed = [port for port in other.failed.get("dropped", ()) if first <= port <= last]
        if target != pair.source or not closed or not other.connects:
            continue
        low = max((port for port in own if port < min(closed)), default=0)
        high = min((port for port in own if port > max(closed)), default=MAX_PACKET)
        is_range = not any(low < port < high for port in other.connects)
        if is_range and all(low < port < high for port in pair.dropped_from):
            return True
    return False


def closed_words(pair: Pair, target: End, port: int) -> str:
    """Which of a target's ports a source does not get through to, and how."""
    parts = []
    failed = dict(pair.failed)
    if "dropped" in failed and (
        outcome := next((way for way in ("refused", "unreachable") if way in failed), "")
    ):
        failed["rejected"] = tuple(sorted((*failed.pop(outcome), *failed.pop("dropped"))))
    for outcome, ports in failed.items():
        said = pair.words.get(outcome, "")
        parts.append(f"{_ports(ports, target, port)} {_WORDS[outcome]}" + (f" ({said})" if said else ""))
    return "; ".join(parts)


def _ports(ports: Sequence[int], target: End, port: int) -> str:
    """Some of the ports that were tried, in words: how far they reach, and where it connects again."""
    if len(ports) == len(target.ports):
        return "every port" if len(ports) > 1 else f"port {ports[0]}"
    words = [f"port {port}"] if port in ports else []
    sampled = sorted(set(target.ports) - {port})
    bad = [number for number in sampled if number in ports]
    if len(bad) == 1:
        words.append(f"port {bad[0]}")
    elif bad:
        words.append(f"ports {bad[0]}-{bad[-1]} ({len(bad)} of the {len(sampled)} tried in {_range(target)})")
    return " and ".join(words)


def _range(target: End) -> str:
    return f"{target.port_range[0]}-{target.port_range[1]}"


def _back(pairs: Pairs, source: str, target: str) -> str:
    """How it is the other way, by TCP, or else by datagrams, which need no answer."""
    back = pairs.get((target, source))
    if back is None:
        return f"{target} → {source} was not tried"
    if back.is_open:
        return f"{target} → {source} connects"
    there = pairs[source, target].arrived
    if bool(there) != bool(back.arrived):
        lost, passes = (f"{target} → {source}", f"{source} → {target}")
        if not there:
            lost, passes = passes, lost
        return f"{target} → {source} fails, too; datagrams {passes} arrive, {lost} are lost"
    return f"{target} → {source} fails, too"


@dataclass(frozen=True)
class Group:
    """Ordered pairs of which the same is to be said."""

    host: str
    """The finding's: one host, or "a → b"."""
    hosts: tuple[str, ...]
    words: str
    """Which pairs these are, where it is not just one."""
    pairs: tuple[tuple[str, str], ...]


def grouped(faults: Mapping[tuple[str, str], Any], names: Sequence[str]) -> list[Group]:
    """One group where all other hosts fare alike with one host, one where it does with all, others alone; pure."""
    groups: list[Group] = []
    left = dict.fromkeys(faults)
    num_others = len(names) - 1
    for name in names:
        for way, end in (("from", 1), ("to", 0)):
            own = tuple(key for key in faults if key[end] == name)
            is_alike = len(own) == num_others > 1 and len({faults[key] for key in own}) == 1
            if is_alike and any(key in left for key in own):
                groups.append(Group(name, (name,), f"{way} all {num_others} other hosts: ", own))
                for key in own:
                    left.pop(key, None)
    return groups + [Group(f"{a} → {b}", (a, b), "", ((a, b),)) for a, b in left]


def _packet_findings(pairs: Pairs, ends: Mapping[str, End]) -> list[Finding]:
    """Pairs between which small datagrams pass and those of both interfaces' MTU do not."""
    lost: dict[tuple[str, str], tuple[int, int]] = {}
    for key, pair in pairs.items():
        wanted = _packet(ends, *key)
        if SMALL_BYTES in pair.arrived and wanted not in pair.arrived:
            lost[key] = wanted, max(pair.arrived)
    names = list(ends)
    groups = grouped(lost, names)
    if len(names) > 2 and len(lost) == len(names) * (len(names) - 1) and len(set(lost.values())) == 1:
        groups = [Group("all hosts", tuple(names), f"between all {len(names)} hosts: ", tuple(lost))]
    found = []
    for group in groups:
        a, b = (ends[name] for name in group.pairs[0])
        wanted, passes = lost[group.pairs[0]]
        which = [ends[name] for name in dict.fromkeys(name for key in group.pairs for name in key)]
        commands = [f"on {end.host}: sudo ip link set {end.interface} mtu {passes}" for end in which]
        found.append(
            Finding(
                check="network",
                host=group.host,
                level="failure",
                found=f"{group.words}packets of {wanted} bytes are lost on the way, of {passes} pass; "
                f"{a.interface} of {a.host} has MTU {a.mtu}, {b.interface} of {b.host} {b.mtu}: "
                "something between them has a smaller one",
                wanted=f"packets of {wanted} bytes to pass unfragmented",
                cure="; ".join(
                    [
                        *commands[:_MAX_COMMANDS],
                        *([f"so on all {len(which)}"] if len(which) > _MAX_COMMANDS else []),
                    ]
                )
                + "; or raise the MTU of the switch",
                hosts=group.hosts,
            )
        )
    return found


def deadline(seconds: float) -> Callable[[], float]:
    """What is left of some seconds from now, never below zero."""
    end = time.monotonic() + seconds
    return lambda: max(0.0, end - time.monotonic())
