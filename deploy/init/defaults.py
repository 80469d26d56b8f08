"""The choices of `kit init`: the network that all hosts share, and the interpreter with torch; pure.

If several answers are possible, the user gets all of them, and decides.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodekit.deploy.environment.requirements import OLDEST_PYTHON, OLDEST_TORCH
from nodekit.deploy.host.probes.network.nics import Nic
from nodekit.training.errors import is_safe, release_of

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Survey = Mapping[str, Any]
"""The answer of a host, from `deploy/host/probes/discovery.py`."""

_NEVER = re.compile(
    r"lo|docker.*|br-[0-9a-f]{6,}|veth.*|virbr.*|vnet\d+.*|cni.*|flannel.*|cali.*|cilium.*|lxc.*|lxdbr.*|podman.*"
    r"|kube.*|nodelocaldns|weave.*|nerdctl.*|vmnet.*|vboxnet.*|dummy.*|ifb.*|ovs-system|idrac|usb\d+"
)
_OWN_CABLE = ("veth", "macvlan", "ipvlan")
"""Network drivers inside containers."""
_NO_NETWORK = ("dummy", "ifb", "nlmon", "vcan", "can")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A network that all hosts have an address in."""

    network: Network
    nics: Mapping[str, tuple[Nic, ...]]
    """Host → its interfaces in the network."""
    rank: int
    """Rank of the worst interface, see `rank`."""
    speed_mbit: int | None
    """Speed of the slowest interface; None if one is unknown."""

    def names(self) -> str:
        """Return the names of the interfaces, each once: ``eth0/ens5``."""
        return "/".join(dict.fromkeys(str(nic["name"]) for nics in self.nics.values() for nic in nics))


def rank(nic: Nic, nics: Iterable[Nic]) -> int | None:
    """Return how suitable an interface is: 0 physical, 1 a container's, 2 a tunnel; None: unusable.

    A bridge counts as physical if a physical interface, bond or VLAN is in it; Docker's bridges have none.
    """
    if _NEVER.fullmatch(nic["name"]) or nic["kind"] == "loopback" or nic["driver"] in _NO_NETWORK:
        return None
    if nic["kind"] == "bridge":
        parts = [part for part in nics if part["master"] == nic["name"]]
        return 0 if any(part["kind"] in ("physical", "bond", "vlan") for part in parts) else None
    if nic["master"] is not None:
        return None  # packets do not leave by its own address
    if nic["kind"] != "virtual":
        return 0
    return 1 if nic["driver"] in _OWN_CABLE else 2


def is_usable(nic: Nic) -> bool:
    """Whether an interface is up, has a carrier, and has an address."""
    return bool(nic["up"] and nic["carrier"] and nic["addresses"])


def shared_networks(surveys: Mapping[str, Survey]) -> list[Shared]:
    """Return the networks that every host has a usable interface in, best first.

    An address that two hosts have, such as docker0's 172.17.0.1, does not connect them, and is skipped.
    """
    if len(surveys) < 2:
        return []
    places: dict[Network, dict[str, dict[str, tuple[Nic, int]]]] = {}
    owners: dict[str, set[str]] = {}
    for host, survey in surveys.items():
        for nic in survey["nics"]:
            for written in nic["addresses"]:
                owners.setdefault(written.split("/")[0], set()).add(host)
    for host, survey in surveys.items():
        for nic in survey["nics"]:
            worth = rank(nic, survey["nics"])
            for written in nic["addresses"] if worth is not None and is_usable(nic) else ():
                address = ipaddress.ip_interface(written)
                network = address.network
                is_shared = len(owners[written.split("/")[0]]) > 1
                if is_shared or network.num_addresses == 1 or address.is_link_local:
                    continue
                assert worth is not None
                places.setdefault(network, {}).setdefault(host, {})[nic["name"]] = (nic, worth)
    found = []
    for network, hosts in places.items():
        if len(hosts) == len(surveys):
            best = {host: min(worth for _, worth in inside.values()) for host, inside in hosts.items()}
            nics = {
                host: tuple(nic for nic, worth in inside.values() if worth == best[host])
                for host, inside in hosts.items()
            }
            speeds = [max(nic["speed_mbit"] or 0 for nic in inside) for inside in nics.values()]
            found.append(
                Shared(network=network, nics=nics, rank=max(best.values()), speed_mbit=min(speeds) or None)
            )
    found.sort(key=lambda each: (each.rank, each.network.version, -(each.speed_mbit or 0), str(each.network)))
    return found


def choose_network(found: Sequence[Shared]) -> Shared | None:
    """Return the network to train over: the only one of the best rank, or the fastest if all speeds are known."""
    best = [
        each
        for each in found
        if (each.rank, each.network.version) == (found[0].rank, found[0].network.version)
    ]
    if len(best) == 1:
        return best[0]
    speeds = [each.speed_mbit for each in best]
    if best and None not in speeds and speeds.count(speeds[0]) == 1:
        return best[0]
    return None


def choose_nic(nics: Sequence[Nic]) -> Nic | None:
    """Return one of several interfaces in a network: the fastest, if all speeds are known."""
    speeds = sorted((nic["speed_mbit"] or 0 for nic in nics), reverse=True)
    if len(nics) == 1 or (min(speeds) > 0 and speeds[0] > speeds[1]):
        return max(nics, key=lambda nic: nic["speed_mbit"] or 0)
    return None


# --- interpreters -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pythons:
    """The interpreters that the hosts should use."""

    everywhere: str | None = None
    """The interpreter that all hosts have, with the same torch."""
    of_host: Mapping[str, str]
    """Host → its only interpreter, if the paths differ but all have the same torch. Else empty."""
    choices: tuple[str, ...] = ()
    """The interpreters to choose from, if all hosts have several."""
    torch: str = ""
    """The version of torch; "" if the user must choose."""


def fits(python: Mapping[str, Any]) -> bool:
    """Whether kit can train with an interpreter."""
    torch = python["torch"]
    return (
        bool(torch) and release_of(torch) >= OLDEST_TORCH and release_of(python["version"]) >= OLDEST_PYTHON
    )


def _usable(pythons: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return path → torch of the interpreters to offer: one that a file names, or those with a safe torch, or any."""
    for each in pythons:
        if each.get("named") and fits(each):
            return {each["path"]: str(each["torch"])}
    found = {each["path"]: str(each["torch"]) for each in pythons if fits(each)}
    return {path: torch for path, torch in found.items() if is_safe(torch)} or found


def choose_pythons(surveys: Mapping[str, Survey]) -> Pythons:
    """Choose the interpreter with torch that all hosts have, or list the choices.

    A torch too old for kit's training module is chosen only if there is no other.
    """
    usable = {host: _usable(survey["pythons"]) for host, survey in surveys.items()}
    first, *others = usable.values() if usable else [{}]
    common = {
        path: torch for path, torch in first.items() if all(other.get(path) == torch for other in others)
    }
    if len(common) == 1:
        ((path, torch),) = common.items()
        return Pythons(everywhere=path, of_host={}, torch=torch)
    if common:
        return Pythons(of_host={}, choices=tuple(common))
    versions = {torch for found in usable.values() for torch in found.values()}
    if len(versions) == 1 and all(len(found) == 1 for found in usable.values()):
        return Pythons(
            of_host={host: next(iter(found)) for host, found in usable.items()}, torch=versions.pop()
        )
    return Pythons(of_host={})
