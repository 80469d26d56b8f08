"""What was found on the hosts, and whether a job can start on them."""

from __future__ import annotations

import collections
import ipaddress
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.link import Link, on_all
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Environment, Host, Inventory
from nodekit.training.engines import LIBRARIES

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)
NEEDED_BYTES = 100 * 1024**2
FACTS_TIMEOUT_S = 15.0
SKEW_WARNING_S = 2.0


@dataclass(frozen=True)
class Interface:
    """One network interface of a host, with its addresses without prefix lengths."""

    name: str
    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found on one host."""

    host: str
    hostname: str
    user: str
    python: str
    """The version of the host's interpreter."""
    executable: str
    torch: str | None
    """The version of torch there; None: no torch."""
    modules: tuple[str, ...]
    """Which of the libraries are there that only some ways to train need."""
    clock_offset_s: float
    """The host's clock minus ours, to within half the round trip."""
    cpus: int
    interfaces: tuple[Interface, ...]
    routes: Mapping[str, str | None]
    """Address of another host → the address this one sends from to reach it."""
    num_gpus: int
    workdir: str
    """Absolute."""
    workdir_id: str
    """The same on two hosts when they share the folder."""
    workdir_problem: str | None
    free_bytes: int
    rsync: bool
    boot_id: str
    has_kit: bool


def gather(
    links: Mapping[str, Link], inventory: Inventory, *, kit_digest: str, peers: Mapping[str, tuple[str, ...]]
) -> dict[str, Facts]:
    """Ask every host at once for its facts.

    Raises:
        KitError: with one line per host that gave none.
    """
    hosts = {host.name: host for host in inventory.hosts}

    def ask(link: Link) -> Facts:
        before = time.time()
        found = link.call(
            "hostfacts.facts",
            timeout_s=FACTS_TIMEOUT_S,
            workdir=hosts[link.host].workdir,
            kit_digest=kit_digest,
            peers=peers[link.host],
            modules=LIBRARIES,
        )
        return _facts(link.host, found, middle=(before + time.time()) / 2)

    return all_or_raise(on_all(links, ask))


def _facts(host: str, found: Mapping[str, Any], *, middle: float) -> Facts:
    return Facts(
        host=host,
        hostname=found["hostname"],
        user=found["user"],
        python=found["python"],
        executable=found["executable"],
        torch=found["torch"],
        modules=tuple(found["modules"]),
        clock_offset_s=found["time"] - middle,
        cpus=found["cpus"],
        interfaces=tuple(
            Interface(each["name"], each["up"], tuple(each["addresses"])) for each in found["interfaces"]
        ),
        routes=found["routes"],
        num_gpus=len(found["gpus"]),
        workdir=found["workdir"],
        workdir_id=found.get("workdir_id", ""),
        workdir_problem=found["workdir_problem"],
        free_bytes=found.get("free_bytes", 0),
        rsync=found["rsync"],
        boot_id=found["boot_id"],
        has_kit=found["has_kit"],
    )


def all_or_raise(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results, when no host failed; else one error with a line per host that did."""
    failures = {host: result for host, result in results.items() if isinstance(result, Exception)}
    if not failures:
        return dict(results)
    for failure in failures.values():
        if not isinstance(failure, KitError):
            raise failure  # our own bug: its traceback is worth more than a summary
    first = next(iter(failures.values()))
    if len(failures) == 1:
        raise first
    raise KitError("\n".join(str(failure) for failure in failures.values())) from first


def examine(inventory: Inventory, facts: Mapping[str, Facts]) -> list[HostError]:
    """Everything that would keep the job from running, on every host; pure."""
    problems: list[HostError] = []
    torches = collections.Counter(found.torch for found in facts.values() if found.torch)
    common = torches.most_common(1)[0][0] if torches else None
    for host in inventory.hosts:
        found = facts[host.name]
        for problem in (
            _python_problem(found),
            _torch_problem(found, common, torches, inventory.environment),
            found.workdir_problem and f"its workdir cannot be used: {found.workdir_problem}",
            _disk_problem(found),
            _gpu_problem(host, found),
        ):
            if problem:
                problems.append(HostError(host.name, problem))
    return problems


def warnings(facts: Mapping[str, Facts]) -> list[str]:
    """What may hurt, but need not; pure."""
    return [
        f"{name}: its clock is {found.clock_offset_s:+.1f} s from this machine's; "
        "torch compares the nodes' clocks to tell who is alive: set up NTP there"
        for name, found in facts.items()
        if abs(found.clock_offset_s) > SKEW_WARNING_S
    ]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])


def _python_problem(found: Facts) -> str | None:
    if _version(found.python) >= OLDEST_PYTHON:
        return None
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return (
        f"{found.executable} is Python {found.python}, {wanted} or newer is wanted; "
        "set `python:` to a newer interpreter there"
    )


def _torch_problem(
    found: Facts, common: str | None, torches: Mapping[str, int], environment: Environment | None
) -> str | None:
    if environment is not None and found.torch is None:
        return (
            f"no torch in the environment ({found.executable}); add it to what the inventory's `environment:` "
            "names, or set `system_site_packages: true` there where the host's own python has it"
        )
    if environment is not None and len(torches) > 1 and found.torch != common:
        return (
            f"torch {found.torch}, but {torches[common or '']} of the hosts have {common}; all must have the same: "
            f"write torch=={str(common).split('+')[0]} where the inventory's `environment:` points to"
        )
    if found.torch is None:
        return (
            f"no torch in {found.executable}; set `python:` to an interpreter there that has it, "
            f"or install it: {found.executable} -m pip install torch"
        )
    if _version(found.torch) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return f"torch {found.torch}, {wanted} or newer is wanted (older ones load unsafe snapshots)"
    if len(torches) > 1 and found.torch != common:
        return (
            f"torch {found.torch}, but {torches[common or '']} of the hosts have {common}; "
            f"all must have the same: {found.executable} -m pip install torch=={str(common).split('+')[0]}"
        )
    return None


def _disk_problem(found: Facts) -> str | None:
    if found.workdir_problem or found.free_bytes >= NEEDED_BYTES:
        return None
    return (
        f"only {found.free_bytes / 1024**2:.0f} MiB free in {found.workdir}, "
        f"at least {NEEDED_BYTES // 1024**2} MiB are wanted"
    )


def _gpu_problem(host: Host, found: Facts) -> str | None:
    wanted = host.gpus
    if isinstance(wanted, int) and wanted > found.num_gpus:
        return f"`gpus: {wanted}`, but nvidia-smi lists {found.num_gpus}"
    if isinstance(wanted, tuple):
        absent = [index for index in wanted if index >= found.num_gpus]
        if absent:
            return f"`gpus:` names {absent}, but nvidia-smi lists {found.num_gpus} (numbered from 0)"
    return None


def choose_interface(host: Host, found: Facts, network: Any, peers: tuple[str, ...]) -> tuple[str, str]:
    """The interface the job's traffic takes on a host, and its address there; pure.

    The one the inventory names, else the one with an address in `network:`, else the one that routes to the
    other hosts.

    Raises:
        HostError: there is no such interface, or no single one.
    """
    by_name = {interface.name: interface for interface in found.interfaces}
    have = ", ".join(f"{each.name} ({each.addresses[0]})" for each in found.interfaces if each.addresses)
    if host.interface is not None:
        if (chosen := by_name.get(host.interface)) is None:
            raise HostError(host.name, f"no interface '{host.interface}'; it has {have}")
        return _usable(host, chosen, network)
    if network is not None:
        wanted = ipaddress.ip_network(network)
        inside = [
            (each, address)
            for each in found.interfaces
            for address in each.addresses
            if ipaddress.ip_address(address) in wanted
        ]
        if not inside:
            raise HostError(host.name, f"no interface has an address in `network: {wanted}`; it has {have}")
        if len({each.name for each, _ in inside}) > 1:
            names = " and ".join(each.name for each, _ in inside)
            raise HostError(
                host.name, f"{names} both have an address in `network: {wanted}`; name one as `interface:`"
            )
        return _usable(host, inside[0][0], network)
    sources = {source for peer in peers if (source := found.routes.get(peer))}
    chosen_by_route = {
        each.name: each for each in found.interfaces for address in each.addresses if address in sources
    }
    if not peers:  # a single node talks to itself alone
        sources, chosen_by_route = {"127.0.0.1"}, {"lo": by_name["lo"]} if "lo" in by_name else {}
    if len(chosen_by_route) == 1:
        return _usable(host, next(iter(chosen_by_route.values())), None, sources)
    if not chosen_by_route:
        raise HostError(
            host.name,
            f"no route to the other hosts ({', '.join(peers)}); name the network they share as `network:` "
            f"or this host's `interface:`; it has {have}",
        )
    raise HostError(
        host.name,
        f"the other hosts are reached over {' and '.join(sorted(chosen_by_route))}; "
        "name the network they share as `network:`",
    )


def _usable(
    host: Host, interface: Interface, network: Any, sources: set[str] | None = None
) -> tuple[str, str]:
    if not interface.up:
        raise HostError(
            host.name, f"interface '{interface.name}' is down: sudo ip link set {interface.name} up"
        )
    if not interface.addresses:
        raise HostError(host.name, f"interface '{interface.name}' has no address")
    inside = [
        address
        for address in interface.addresses
        if (network is not None and ipaddress.ip_address(address) in ipaddress.ip_network(network))
        or (sources is not None and address in sources)
    ]
    return interface.name, (inside or list(interface.addresses))[0]
