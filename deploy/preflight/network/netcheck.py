"""The network part of `kit check`: the chosen interfaces, and every ordered pair of hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from secrets import token_hex

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import HostChannel, on_all
from nodekit.deploy.host.probes.network.netprobe import Here
from nodekit.deploy.host.probes.network.netstate import OwnName
from nodekit.deploy.host.probes.network.nics import Nic
from nodekit.deploy.plan import check
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.preflight.network import nethost, netpairs, outcomes
from nodekit.deploy.preflight.network.outcomes import End, Pairs
from nodekit.inventory.schema import Host, Inventory

RENDEZVOUS_PORT = 29500
"""torchrun's default port. kit itself uses a free port, so a problem with this one is only a warning."""
MAX_SAMPLED, MIN_SAMPLED = 16, 4
MAX_CONNECTIONS = 4096
"""Connections of one host to all others: with many hosts, fewer ports of each are tried."""
_SHARE_TO_BEGIN = 0.4  # share of the time to start listening; a slow host must leave time to test the others
FINISH_S = 1.0
_LEAST_S = 1.5  # with less time than this, healthy hosts would seem not to answer
_USUAL_MTU = 1500


def network_findings(
    channels: Mapping[str, HostChannel],
    inventory: Inventory,
    facts: Mapping[str, Facts],
    *,
    deadline_s: float,
    port: int | None = None,
) -> list[Finding]:
    """Return the network problems between hosts, on the interfaces that a job would use.

    Args:
        channels: to the hosts; one that is not among them is left out.
        inventory: of the cluster.
        facts: of the same hosts.
        deadline_s: time limit in seconds; a host that does not answer in time is reported.
        port: the port that the job's rendezvous needs. None: any; torchrun's is tried.
    """
    left_s = netpairs.deadline(deadline_s - FINISH_S)
    hosts = [host for host in inventory.hosts if host.name in channels and host.name in facts]
    if left_s() < _LEAST_S:
        return [nethost.not_tried(host.name, deadline_s) for host in hosts]
    wanted_port = port or RENDEZVOUS_PORT
    peers = cluster.peer_addresses(inventory.hosts)
    chosen, problems = check.choose_interfaces(inventory, hosts, facts, peers)
    with listening(channels, hosts, facts, chosen, wanted_port, left_s=left_s) as (session, answers):
        here, silent = netpairs.told_apart(answers)
        nics = {name: _nic(chosen[name], answer) for name, answer in here.items() if name in chosen}
        unlinked = {name: nic for name, nic in nics.items() if nic is not None and not nic["carrier"]}
        ends = {name: end_of(name, chosen[name], here[name]) for name in nics if name not in unlinked}
        pairs, silent_later = netpairs.measure(channels, session, ends, left_s=left_s)
        names = _own_names(channels, {name: chosen[name][1] for name in nics}, left_s=left_s)
        neighbours = _neighbours(here, names, pairs, num_hosts=len(hosts))
        # If the kernel reports the cause, it is not a firewall.
        full = {name for each in neighbours if each.level == "failure" for name in each.hosts}
        pairs = {key: pair for key, pair in pairs.items() if not (pair.failed and full & set(key))}
        ill = {name for key, pair in pairs.items() if pair.failed for name in key}
        firewalls = netpairs.ask_firewalls(channels, ill, left_s=left_s)
    silent = {**silent_later, **silent}
    found = [nethost.no_answer(name, why) for name, why in silent.items()]
    for host in hosts:
        if (name := host.name) in silent:
            continue
        if name in problems:
            found.append(nethost.unchosen(host, problems[name], here[name]["nics"], inventory))
        elif name in unlinked:
            found.append(nethost.no_carrier(name, unlinked[name]))
    found += neighbours + nethost.port_findings(here, wanted_port, matters=port is not None)
    found += outcomes.findings(pairs, ends, firewalls, port=wanted_port, port_matters=port is not None)
    linked = {name: nic for name, nic in nics.items() if nic is not None and name not in unlinked}
    found += nethost.mtu_findings(linked) + nethost.speed_findings(linked)
    if len(hosts) > 1:  # a single host only talks to itself
        for name, answer in names.items():
            found += nethost.name_findings(name, chosen[name][1], answer)
            found += nethost.peer_name_findings(name, answer)
    env = {host.name: {**host.env, **inventory.job.env} for host in hosts if facts[host.name].num_gpus}
    found += nethost.rdma_findings({name: answer["rdma"] for name, answer in here.items()}, linked, env=env)
    ill = {name for finding in found if finding.level == "failure" for name in finding.hosts}
    found += [nethost.fine(end, nics[name]) for name, end in ends.items() if name not in ill]
    place = {host.name: index for index, host in enumerate(hosts)}
    return sorted(found, key=lambda finding: place[finding.hosts[0]])


def _neighbours(
    here: Mapping[str, Here], names: Mapping[str, OwnName], pairs: Pairs, *, num_hosts: int
) -> list[Finding]:
    """Return hosts whose neighbour table is full. Only these hosts know, not those whose packets they drop."""
    before = {name: answer["neighbours"] for name, answer in here.items()}
    after = {name: answer["neighbours"] for name, answer in names.items()}
    closed = [key for key, pair in pairs.items() if pair.failed]
    return nethost.neighbour_findings(before, after, lost=closed, num_hosts=num_hosts)


def _own_names(
    channels: Mapping[str, HostChannel], addresses: Mapping[str, str], *, left_s: Callable[[], float]
) -> dict[str, OwnName]:
    names = list(addresses)
    following = dict(zip(names, [*names[1:], *names[:1]], strict=True))
    limit_s = min(nethost.NAME_S, left_s() / 2)
    if limit_s < _LEAST_S / 10:
        return {}

    def ask(channel: HostChannel) -> OwnName:
        peer = addresses[following[channel.host]]
        told: OwnName = channel.call("netstate.own_name", timeout_s=2 * limit_s, limit_s=limit_s, peer=peer)
        return told

    return netpairs.told_apart(on_all({name: channels[name] for name in names}, ask))[0]


@contextlib.contextmanager
def listening(
    channels: Mapping[str, HostChannel],
    hosts: Sequence[Host],
    facts: Mapping[str, Facts],
    chosen: Mapping[str, tuple[str, str]],
    port: int | None,
    *,
    left_s: Callable[[], float],
) -> Iterator[tuple[str, Mapping[str, Here | Exception]]]:
    """Let every host listen; yields the session and each host's answer. Ends the session on exit."""
    session, token = token_hex(8), token_hex(16)
    num_sampled = max(MIN_SAMPLED, min(MAX_SAMPLED, MAX_CONNECTIONS // max(1, len(hosts))))
    first_at: dict[tuple[str, str], str] = {}
    for host in hosts:  # local hosts share a machine: only one of them listens on the port
        address = chosen.get(host.name, ("", ""))[1]
        first_at.setdefault((facts[host.name].boot_id, address), host.name)
    limit_s = left_s() * _SHARE_TO_BEGIN

    def begin(channel: HostChannel) -> Here:
        address = chosen[channel.host][1] if channel.host in chosen else None
        found: Here = channel.call(
            "netprobe.begin",
            timeout_s=limit_s,
            session=session,
            name=channel.host,
            token=token,
            address=address,
            port=port if channel.host in first_at.values() else None,
            num_sampled=num_sampled,
            lifetime_s=left_s() + FINISH_S,
        )
        return found

    own = {host.name: channels[host.name] for host in hosts}
    try:
        yield session, on_all(own, begin)
    finally:
        on_all(own, lambda channel: channel.call("netprobe.finish", timeout_s=FINISH_S, session=session))


def end_of(name: str, chosen: tuple[str, str], answer: Here) -> End:
    """Return a listening host, from its answer."""
    nic = _nic(chosen, answer)
    low, high = answer["range"]
    return End(
        host=name,
        address=chosen[1],
        interface=chosen[0],
        mtu=nic["mtu"] if nic else _USUAL_MTU,
        ports=tuple(answer["ports"]),
        udp_port=answer["udp_port"],
        port_range=(low, high),
    )


def _nic(chosen: tuple[str, str], answer: Here) -> Nic | None:
    return next((nic for nic in answer["nics"] if nic["name"] == chosen[0]), None)
