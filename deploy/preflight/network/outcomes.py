"""Outcomes of the connections between every ordered pair of hosts, and the findings from them; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.host.probes.network.netprobe import SMALL_BYTES
from nodekit.deploy.host.probes.network.netstate import Firewall
from nodekit.deploy.plan.findings import Finding, Level
from nodekit.deploy.preflight.network import firewall

MAX_PACKET = 65535
_MAX_COMMANDS = 3
_LEAST_MTU = {4: 576, 6: 1280}  # IP version → least MTU; below 1280 the kernel disables IPv6 on the interface
# outcome → description of the ports
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
    """One listening host."""

    host: str
    address: str
    interface: str
    mtu: int
    ports: tuple[int, ...]
    """Ports that it listens on."""
    udp_port: int | None
    port_range: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The outcome of one host's connections to another."""

    source: str
    target: str
    connects: tuple[int, ...] = ()
    failed: Mapping[str, tuple[int, ...]]
    """Outcome → ports."""
    words: Mapping[str, str]
    """Outcome → the message of the kernel, or of an unknown server."""
    source_address: str | None = None
    """Source address of the connections."""
    arrived: frozenset[int] = frozenset()
    """Sizes of the datagrams that arrived."""
    unsent: Mapping[str, str]
    """Size → why the source's kernel could not send it."""
    dropped_from: tuple[int, ...] = ()
    """Source ports of the connections without an answer."""
    is_alone: bool = False
    """Whether it was finally tried with nothing else running."""

    @property
    def is_open(self) -> bool:
        """Whether every port connects."""
        return bool(self.connects) and not self.failed


Pairs = dict[tuple[str, str], Pair]


@dataclass(frozen=True)
class Group:
    """Ordered pairs with the same finding."""

    host: str
    """Host of the finding: one host, or "a → b"."""
    hosts: tuple[str, ...]
    words: str
    """Describes the pairs, if there are several."""
    pairs: tuple[tuple[str, str], ...]


def grouped(faults: Mapping[tuple[str, str], Any], names: Sequence[str]) -> list[Group]:
    """Group the pairs from or to one host if all have the same fault; other pairs stay alone; pure."""
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


def findings(
    pairs: Pairs,
    ends: Mapping[str, End],
    firewalls: Mapping[str, Firewall],
    *,
    port: int,
    port_matters: bool,
) -> list[Finding]:
    """Return a finding for each faulty pair, or one for all pairs of a host with the same fault; pure.

    Args:
        pairs: the outcomes.
        ends: the hosts.
        firewalls: host → `netstate.firewall` there.
        port: the rendezvous port.
        port_matters: whether a job needs this very port; else a problem with it is a warning.
    """
    closed: dict[tuple[str, str], tuple[str, Level]] = {}
    for key, pair in pairs.items():
        if pair.failed and not is_secondary(pair, pairs, ends):
            failed = {number for ports in pair.failed.values() for number in ports}
            level: Level = "warning" if failed == {port} and not port_matters else "failure"
            closed[key] = closed_words(pair, ends[pair.target], port), level
    return [
        *(
            _closed(group, *closed[group.pairs[0]], pairs, ends, firewalls, port)
            for group in grouped(closed, list(ends))
        ),
        *_packet_findings(pairs, ends),
        *_strays(pairs, ends),
    ]


def _closed(
    group: Group,
    words: str,
    level: Level,
    pairs: Pairs,
    ends: Mapping[str, End],
    firewalls: Mapping[str, Firewall],
    port: int,
) -> Finding:
    """Return the finding of closed ports: a warning if the pair was never tried alone, as it may have been busy."""
    source, target = group.pairs[0]
    back = "" if group.words else _back(pairs, source, target)
    alone = [key for key in group.pairs if pairs[key].is_alone]
    if alone:
        because, cure = _firewall([pairs[key] for key in group.pairs], ends, firewalls)
        which = " → ".join(alone[0]) if group.words else "this pair"
        tried = f"tried twice, the second time {which} alone"
    else:
        level, because, cure = "warning", "", "give it more time: kit check --timeout 60"
        tried = (
            "while all hosts called one another; there was no time to try it alone, so it may well be open"
        )
    found = "; ".join(filter(None, [group.words + words, back, tried, because]))
    low, high = ends[target].port_range
    targets = list(dict.fromkeys(ends[each].address for _, each in group.pairs))
    if len(targets) > _MAX_COMMANDS:
        targets[_MAX_COMMANDS:] = [f"{len(targets) - _MAX_COMMANDS} more"]
    to = " and ".join(filter(None, [", ".join(targets[:-1]), targets[-1]]))
    wanted = f"TCP to {to} on port {port}, and on {low}-{high} for gloo and NCCL"
    return Finding("network", group.host, level, found, wanted, cure, group.hosts)


def _firewall(
    pairs: Sequence[Pair], ends: Mapping[str, End], firewalls: Mapping[str, Firewall]
) -> tuple[str, str]:
    """Return what blocks the connections of a group's pairs, and the cure; only certain rules, if there are any."""
    cures = {
        firewall.cure(
            firewalls,
            source=pair.source,
            target=pair.target,
            addresses={name: end.address for name, end in ends.items()},
            interfaces={name: end.interface for name, end in ends.items()},
            port=number,
            answer_port=next(iter(pair.dropped_from), None),
            is_refused=outcome == "unreachable",
        ): None
        for pair in pairs[:_MAX_COMMANDS]
        for outcome, ports in pair.failed.items()
        for number in ports
    }
    # A rule cures all pairs, a single address only one; cures without a command need not be repeated.
    certain = [each for each in cures if ", chain " in each[1]] or [each for each in cures if each[1]]
    certain = certain or list(cures)[:1]
    commands = list(dict.fromkeys(command for command, _ in certain))
    if len(commands) > 1 and len(pairs) > _MAX_COMMANDS:
        commands.append(f"so for all {len(pairs)} hosts")
    if "unreachable" in pairs[0].failed and not any(", chain " in seen for _, seen in certain):
        commands.append("or give `network:` another network, if this one does not connect them")
    return "; ".join(dict.fromkeys(seen for _, seen in certain if seen)), "; ".join(commands)


def _strays(pairs: Pairs, ends: Mapping[str, End]) -> list[Finding]:
    """Return hosts whose packets leave from another address than the chosen one."""
    found = []
    for own in ends.values():
        calls = [pair for pair in pairs.values() if pair.source == own.host]
        if strays := [pair for pair in calls if pair.source_address not in (None, own.address)]:
            what = (
                f"its packets to {', '.join(pair.target for pair in strays)} leave from "
                f"{strays[0].source_address}, not from {own.address} ({own.interface})"
            )
            wanted = "one route both ways, over the interface that was chosen"
            to = ends[strays[0].target].address
            cure = f"on {own.host}: sudo ip route replace {to} dev {own.interface} src {own.address}"
            found.append(Finding("network", own.host, "warning", what, wanted, cure))
    return found


def is_secondary(pair: Pair, pairs: Pairs, ends: Mapping[str, End]) -> bool:
    """Whether the failures are explained by a port range that is dropped in the other direction."""
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
    """Return which of a target's ports a source cannot connect to, and how that fails."""
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
    """Return some of the tried ports in words."""
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
    """Return the outcome in the other direction, by TCP, or by datagrams, which need no answer."""
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


def packet(ends: Mapping[str, End], source: str, target: str) -> int:
    """Return the size of the largest packet that both interfaces support."""
    return min(ends[source].mtu, ends[target].mtu, MAX_PACKET)


def _packet_findings(pairs: Pairs, ends: Mapping[str, End]) -> list[Finding]:
    """Return pairs between which small datagrams arrive and full-size ones do not."""
    lost: dict[tuple[str, str], tuple[int, int]] = {}
    for key, pair in pairs.items():
        wanted = packet(ends, *key)
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
        version = 6 if ":" in a.address else 4
        cures = [f"on {end.host}: sudo ip link set {end.interface} mtu {passes}" for end in which]
        if len(cures) > _MAX_COMMANDS:
            cures[_MAX_COMMANDS:] = [f"so on all {len(which)}"]
        cures.append("or raise the MTU of the switch")
        if passes < (least := _LEAST_MTU[version]):
            cures = [f"raise the MTU of the switch, or of the tunnel: IPv{version} needs {least} or more"]
        what = (
            f"{group.words}packets of {wanted} bytes are lost on the way, of {passes} pass; "
            f"{a.interface} of {a.host} has MTU {a.mtu}, {b.interface} of {b.host} {b.mtu}: "
            "something between them has a smaller one"
        )
        to_pass = f"packets of {wanted} bytes to pass unfragmented"
        found.append(Finding("network", group.host, "failure", what, to_pass, "; ".join(cures), group.hosts))
    return found
