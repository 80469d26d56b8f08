"""Findings of a host's own network: interface, MTU, speed, name, port, RDMA; pure."""

from __future__ import annotations

import collections
import ipaddress
import shlex
from collections.abc import Collection, Mapping, Sequence

from nodekit.deploy.host.probes.network.netprobe import Here
from nodekit.deploy.host.probes.network.netstate import NeighbourTable, OwnName, RdmaPort
from nodekit.deploy.host.probes.network.nics import Nic
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.preflight.network.outcomes import End
from nodekit.inventory.errors import HostError
from nodekit.inventory.schema import Host, Inventory

NAME_S = 1.0


def _failure(host: str, found: str, wanted: str, cure: str) -> Finding:
    return Finding(check="network", host=host, level="failure", found=found, wanted=wanted, cure=cure)


def _warning(host: str, found: str, wanted: str, cure: str) -> Finding:
    return Finding(check="network", host=host, level="warning", found=found, wanted=wanted, cure=cure)


def no_answer(host: str, error: HostError) -> Finding:
    """Return the finding of a host that did not answer in time."""
    return _failure(
        host,
        error.problem.found,
        "an answer from its python",
        f"log in to {host} and see what keeps it: uptime; dmesg | tail",
    )


def not_tried(host: str, deadline_s: float) -> Finding:
    """Return the finding of a host that there was no time for."""
    return _warning(
        host,
        f"not tried: {max(deadline_s, 0):.1f} s were left",
        "a few seconds to try every pair of hosts",
        "see what took the time in the other columns, and check again",
    )


def unchosen(host: Host, error: HostError, nics: Sequence[Nic], inventory: Inventory) -> Finding:
    """Return why no interface could be chosen."""
    have = ", ".join(f"{nic['name']} ({nic['addresses'][0]})" for nic in nics if nic["addresses"])
    by_name = {nic["name"]: nic for nic in nics}
    named = by_name.get(host.interface or "")
    if named is None and host.interface is None and inventory.network is not None:
        named = next((nic for nic in nics if _has_address_in(nic, str(inventory.network))), None)
    if named is not None and not named["up"]:
        return _failure(
            host.name,
            f"interface {named['name']} is down",
            f"{named['name']} to be up",
            f"on {host.name}: sudo ip link set {named['name']} up",
        )
    if named is not None and not named["addresses"]:
        network = inventory.network or "the network that the hosts share"
        return _failure(
            host.name,
            f"interface {named['name']} has no address",
            f"an address in {network}",
            f"on {host.name}: sudo ip address add ADDRESS/PREFIX dev {named['name']}",
        )
    if host.interface is not None and named is None:
        return _failure(
            host.name,
            f"no interface {host.interface}",
            f"one that it has: {have}",
            f"{inventory.path}: set `interface:` of {host.name} to one of these",
        )
    advice = (
        error.problem.cure
        or f"set `network:` to the one that the hosts share, or `interface:` of {host.name}"
    )
    return _failure(
        host.name, error.problem.found, f"one interface to use; it has {have}", f"{inventory.path}: {advice}"
    )


def _has_address_in(nic: Nic, network: str) -> bool:
    wanted = ipaddress.ip_network(network)
    return any(ipaddress.ip_interface(address).ip in wanted for address in nic["addresses"])


def no_carrier(host: str, nic: Nic) -> Finding:
    """Return the finding of an interface without a carrier."""
    return _failure(
        host,
        f"interface {nic['name']} has no carrier: nothing answers at the other end of its cable",
        "a link",
        f"check the cable and the switch's port; on {host}: ip link show {nic['name']}",
    )


def neighbour_findings(
    before: Mapping[str, Mapping[str, NeighbourTable]],
    after: Mapping[str, Mapping[str, NeighbourTable]],
    *,
    lost: Collection[tuple[str, str]],
    num_hosts: int,
) -> list[Finding]:
    """Return hosts whose neighbour table is too small, so that their kernel drops packets; pure.

    Args:
        before: host → `netstate.neighbours` when the check began.
        after: the same at its end.
        lost: ordered pairs that do not connect.
        num_hosts: number of hosts in the check.
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for name, tables in after.items():
        for table, now in tables.items():
            is_over = now["overflows"] > before.get(name, {}).get(table, now)["overflows"]
            if is_over or (table == "arp_cache" and num_hosts > now["most"]):
                groups.setdefault((table, is_over), []).append(name)
    found = []
    for (table, is_over), names in groups.items():
        fullest = max(names, key=lambda name: after[name][table]["entries"])
        now = after[fullest][table]
        wanted = 1024
        while wanted < 4 * max(num_hosts, now["entries"], now["most"]):
            wanted *= 2
        key = f"net.{'ipv6' if table == 'ndisc_cache' else 'ipv4'}.neigh.default.gc_thresh"
        num_lost = sum(bool(set(pair) & set(names)) for pair in lost) if is_over else 0
        times = now["overflows"] - before.get(fullest, {}).get(table, now)["overflows"]
        what = (
            f"the kernel's neighbour table overflowed {times} times during this check "
            f'("neighbour: {table}: neighbor table overflow!" in its log)'
            if is_over
            else f"the kernel's neighbour table is too small for {num_hosts} hosts"
        )
        settings = " ".join(f"{key}{number}={wanted >> (3 - number)}" for number in (1, 2, 3))
        where = f"on {fullest}" if now["is_ours"] else f"on the machine that {fullest} is a part of"
        found.append(
            Finding(
                check="network",
                host=names[0] if len(names) == 1 else f"{len(names)} hosts",
                hosts=tuple(names),
                level="failure" if num_lost else "warning",
                found=f"{what}: {now['entries']:,} entries on {fullest}, {key}3 is {now['most']:,}"
                + (f"; {num_lost} pairs of hosts got no answer" if num_lost else ""),
                wanted=f"room for {wanted:,} entries, of all hosts, containers and other machines",
                cure=f"{where}: sudo sysctl -w {settings}"
                + ("; so on all of them" if len(names) > 1 else "")
                + "; a file in /etc/sysctl.d keeps it",
            )
        )
    return found


def mtu_findings(nics: Mapping[str, Nic]) -> list[Finding]:
    """Return hosts whose MTU differs from most others'; pure."""
    counts = collections.Counter(nic["mtu"] for nic in nics.values())
    if len(counts) < 2:
        return []
    common = max(counts, key=lambda mtu: (counts[mtu], -mtu))
    return [
        _warning(
            name,
            f"MTU {nic['mtu']} on {nic['name']}, but {_num_have(counts[common], len(nics))} {common}",
            f"the same MTU on all hosts, as {common}",
            f"on {name}: sudo ip link set {nic['name']} mtu {common}",
        )
        for name, nic in nics.items()
        if nic["mtu"] != common
    ]


def speed_findings(nics: Mapping[str, Nic]) -> list[Finding]:
    """Return hosts whose interface is slower than the fastest, as all wait for the slowest; pure."""
    speeds = {name: nic["speed_mbit"] for name, nic in nics.items() if nic["speed_mbit"]}
    if len(set(speeds.values())) < 2:
        return []
    fastest, slowest = max(speeds.values()), min(speeds.values())
    num_fastest = sum(speed == fastest for speed in speeds.values())
    return [
        _warning(
            name,
            f"{nics[name]['name']} runs at {speed_words(speed)}"
            + (", the slowest" if speed == slowest else "")
            + f"; {_num_have(num_fastest, len(nics))} {speed_words(fastest)}",
            speed_words(fastest),
            f"check its cable and the switch's port (on {name}: sudo ethtool {nics[name]['name']}), or set "
            f"`interface:` of {name} to a faster one",
        )
        for name, speed in speeds.items()
        if speed < fastest
    ]


def _num_have(number: int, of: int) -> str:
    return f"{number} of {of} hosts {'has' if number == 1 else 'have'}"


def speed_words(speed_mbit: int) -> str:
    """Return a speed in Gb/s or Mb/s."""
    return f"{speed_mbit / 1000:g} Gb/s" if speed_mbit >= 1000 else f"{speed_mbit} Mb/s"


def fine(end: End, nic: Nic | None) -> Finding:
    """Return the finding of a host without problems, short enough for the table."""
    speed = speed_words(nic["speed_mbit"]) if nic and nic["speed_mbit"] else f"MTU {end.mtu}"
    return Finding(check="network", host=end.host, level="ok", found=f"{end.interface}, {speed}")


# --- names, ports, RDMA ---------------------------------------------------------------------------------------


def name_findings(host: str, address: str, answer: OwnName) -> list[Finding]:
    """Return problems with a host's own name; pure.

    A name that resolves to 127.0.1.1, as on Debian, is no problem: gloo would listen there, but kit sets its interface.
    """
    name, addresses = answer["name"], answer["addresses"]
    if addresses is None:
        return [
            _warning(
                host,
                f"its own name {name} is not resolved within {NAME_S:.0f} s",
                f"{name} → {address}",
                f"on {host}: sudo sed -i {shlex.quote(f'1i {address} {name}')} /etc/hosts",
            )
        ]
    return []


def peer_name_findings(host: str, answer: OwnName) -> list[Finding]:
    """Return a warning if a host's name server does not answer when asked for the names of other hosts; pure."""
    if answer["names_peers"] or answer["addresses"] is None:  # the latter is reported by `name_findings`
        return []
    return [
        _warning(
            host,
            f"its DNS server gives no answer within {NAME_S:.0f} s when asked for the name of another host's address: "
            "torch asks when a rank connects to another node, and waits up to 10 s at each start",
            "an answer, or a refusal",
            f"on {host}: mend the nameserver in /etc/resolv.conf (`options timeout:1 attempts:1` there makes the wait "
            "shorter), or have a line `::ffff:ADDRESS NAME` in /etc/hosts for each host, for in this form torch asks",
        )
    ]


def port_findings(here: Mapping[str, Here], port: int, *, matters: bool) -> list[Finding]:
    """Return hosts on which the rendezvous port is taken."""
    found = []
    for name, answer in here.items():
        if not (taken := answer["taken"]):
            continue
        if taken["pid"]:
            who = f"by pid {taken['pid']} of {taken['user'] or 'nobody known'}: {taken['command']}"
            cure = f"on {name}: sudo kill {taken['pid']}, if it is not wanted any more"
        elif taken["user"]:
            who = f"by a process of {taken['user']} (which, only root sees)"
            cure = f"on {name}: sudo ss -ltnp 'sport = :{port}' names it"
        else:
            who = f"({taken['problem']})"
            cure = f"on {name}: sudo ss -tanp 'sport = :{port}' names who has it"
        found.append(
            (_failure if matters else _warning)(
                name,
                f"port {port} is taken {who}"
                + ("" if matters else "; kit takes a free one, torchrun this one"),
                f"port {port} free for the rendezvous",
                cure + ("" if matters else "; or give torchrun another --master-port"),
            )
        )
    return found


def rdma_findings(
    ports: Mapping[str, Sequence[RdmaPort]],
    nics: Mapping[str, Nic],
    *,
    env: Mapping[str, Mapping[str, str]],
) -> list[Finding]:
    """Return inactive RDMA ports that NCCL or an IPoIB interface would need; pure.

    Args:
        ports: host → `netstate.rdma_ports` there.
        nics: host → its chosen interface.
        env: host → the job's environment there; only hosts that train on GPUs, and so with NCCL.
    """
    found: list[Finding] = []
    used = {
        name: [port for port in own if is_chosen_hca(env[name].get("NCCL_IB_HCA", ""), port)]
        for name, own in ports.items()
        if name in env and env[name].get("NCCL_IB_DISABLE", "0") == "0"
    }
    for name, nic in nics.items():
        below = [port for port in ports.get(name, ()) if nic["name"] in port["interfaces"]]
        if nic["kind"] == "infiniband" and below and not any(port["state"] == "ACTIVE" for port in below):
            found.append(_inactive(name, below))
            used.pop(name, None)
    active = {name: sum(port["state"] == "ACTIVE" for port in own) for name, own in used.items()}
    most = max(active.values(), default=0)
    for name, own in used.items():
        if own and not active[name] and any(port["link_layer"] == "InfiniBand" for port in own):
            found.append(_inactive(name, own))
        elif active[name] < most:
            ill = [port for port in own if port["state"] != "ACTIVE"]
            which = f" ({_states(ill)})" if ill else ""
            found.append(
                _warning(
                    name,
                    f"{active[name]} active RDMA ports{which}; {max(active, key=lambda n: active[n])} has {most}",
                    f"{most}, as there",
                    f"on {name}: {_rdma_cure(ill)}; or have the job use no RDMA anywhere: "
                    "`job: env: {NCCL_IB_DISABLE: '1'}`",
                )
            )
    return found


def is_chosen_hca(wanted: str, port: RdmaPort) -> bool:
    """Whether NCCL_IB_HCA includes a port: prefixes of names; ``=`` whole names, ``^`` all others."""
    negated, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    entries = [entry for entry in wanted.lstrip("^=").split(",") if entry]
    if not entries:
        return True
    inside = False
    for entry in entries:
        device, _, number = entry.partition(":")
        same = port["device"] == device if exact else port["device"].startswith(device)
        inside |= same and number in ("", str(port["port"]))
    return inside != negated


def _states(ports: Sequence[RdmaPort]) -> str:
    return ", ".join(f"{port['device']} port {port['port']} is {port['state']}" for port in ports)


def _rdma_cure(ports: Sequence[RdmaPort]) -> str:
    if not ports:
        return "see whether its driver is loaded: ls /sys/class/infiniband; sudo modprobe mlx5_ib"
    if any(port["state"] == "INIT" for port in ports):
        return (
            "the link is there but no subnet manager has set it up: sudo systemctl start opensm (on one host)"
        )
    return f"check the cable and the switch: ibstat {ports[0]['device']}"


def _inactive(name: str, ports: Sequence[RdmaPort]) -> Finding:
    return _failure(name, f"RDMA: {_states(ports)}", "an ACTIVE port", f"on {name}: {_rdma_cure(ports)}")
