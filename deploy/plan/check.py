"""Gather the facts of the hosts, and check whether a job can start on them."""

from __future__ import annotations

import collections
import ipaddress
import posixpath
import re
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nodekit.deploy.connect.channel import HostChannel, all_or_raise, on_all
from nodekit.deploy.environment.requirements import OLDEST_PYTHON, OLDEST_TORCH
from nodekit.deploy.host import programs
from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.plan import gpus
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.plan.gpus import HostGpus
from nodekit.inventory.errors import HostError, Problem
from nodekit.inventory.schema import Environment, Host, Inventory
from nodekit.training.engine_info import LIBRARIES
from nodekit.training.errors import release_of
from nodekit.training.reporting.trackers import TRACKERS

NEEDED_BYTES = 100 * 1024**2  # the least free space in a workdir
FACTS_TIMEOUT_S = 15.0
SMI_TIMEOUT_S = 15.0  # without persistence mode, nvidia-smi takes a second or more per GPU
MAX_SKEW_S = 2.0  # an exported script uses torchrun, which counts a node as lost 3 s after its keepalive
PINGS = 3  # the one with the shortest round trip gives the best estimate of the clock


@dataclass(frozen=True)
class Interface:
    """One network interface of a host, with its addresses without prefix lengths."""

    name: str
    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one host."""

    host: str
    hostname: str
    user: str
    python: str
    """The version of the host's interpreter."""
    executable: str
    pip: str = "installs"
    """`hostfacts.pip`."""
    torch: str | None
    """The version of torch there; None: no torch."""
    torch_build: str = ""
    """The platform torch was built for: ``cuda 12.8``, ``hip 6.4``, ``cpu``; "" if unknown."""
    modules: tuple[str, ...]
    """Installed libraries of engines and trackers."""
    clock_offset_s: float
    """The host's clock minus that of this machine, to within `clock_error_s`."""
    cpus: int
    interfaces: tuple[Interface, ...]
    routes: Mapping[str, str | None]
    """Address of another host → the source address used to reach it."""
    gpus: HostGpus
    workdir: str
    """Absolute path."""
    workdir_problem: str | None
    workdir_errno: str = ""
    """The name of the problem's errno, such as EACCES."""
    workdir_owner: str = ""
    """The user name of its owner, as `files.owner` returns it."""
    workdir_id: str = ""
    """By which `hostfacts.folders` recognises hosts that share the folder."""
    free_bytes: int = 0
    rsync: bool
    boot_id: str
    ssh_port: str = ""
    """Of the sshd there that we came through; "" where it does not say."""
    rtt_s: float = 0.0
    """The shortest round trip of a call."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path, or program on the PATH, that the command runs → its `programs.kind`."""

    @property
    def num_gpus(self) -> int:
        """How many GPUs a job may use there."""
        return len(self.gpus.usable)

    def install(self, packages: str) -> str:
        """Return the command that installs packages for this python, as pip may there."""
        command = f"{self.executable} -m pip install {packages}"
        if self.pip == "managed":  # on Debian and Ubuntu: this pip refuses to install outside of a venv
            venv = f"{self.executable} -m venv --system-site-packages ~/venv"
            return (
                f"{venv} && ~/venv/bin/python -m pip install {packages}, and set `python: ~/venv/bin/python`"
            )
        # Environments that uv creates have no pip.
        return f"{self.executable} -m ensurepip && {command}" if self.pip == "none" else command

    @property
    def clock_error_s(self) -> float:
        """Maximum error of `clock_offset_s`: half of the round trip."""
        return self.rtt_s / 2


def gather(
    channels: Mapping[str, HostChannel],
    inventory: Inventory,
    *,
    peers: Mapping[str, tuple[str, ...]],
    files: Sequence[str] = (),
) -> dict[str, Facts]:
    """Ask all hosts in parallel for their facts; `files` are the files that the command runs there.

    Raises:
        KitError: with one line per host that gave no facts.
    """
    hosts = {host.name: host for host in inventory.hosts}

    def ask(channel: HostChannel) -> Facts:
        found = channel.call(
            "hostfacts.facts",
            timeout_s=FACTS_TIMEOUT_S + SMI_TIMEOUT_S,
            smi_timeout_s=SMI_TIMEOUT_S,
            workdir=hosts[channel.host].workdir,
            peers=peers[channel.host],
            modules=(*LIBRARIES, *TRACKERS),
            files=files,
        )
        return facts_of(channel, found)

    return all_or_raise(on_all(channels, ask))


def facts_of(channel: HostChannel, found: Mapping[str, Any]) -> Facts:
    """Return the facts of a host, from `hostfacts.facts` and a measurement of round trip and clock.

    Raises:
        HostError: the connection is gone.
    """
    rtt_s, offset_s = min(_ask_time(channel) for _ in range(PINGS))
    return facts_from(channel.host, found, rtt_s=rtt_s, offset_s=offset_s)


def _ask_time(channel: HostChannel) -> tuple[float, float]:
    """Return a round trip, and the host's clock minus this machine's at its middle, both in seconds."""
    before, started = time.time(), time.perf_counter()
    there = channel.call("probes.now", timeout_s=FACTS_TIMEOUT_S)
    rtt_s = time.perf_counter() - started
    return rtt_s, there - (before + rtt_s / 2)


def facts_from(host: str, found: Mapping[str, Any], *, rtt_s: float, offset_s: float) -> Facts:
    """Return the facts of a host from its answer; pure."""
    own = {each.name: found[each.name] for each in fields(Facts) if each.name in found}
    own |= {
        "modules": tuple(found["modules"]),
        "gpus": HostGpus.of(found["gpus"]),
        "interfaces": tuple(
            Interface(each["name"], each["up"], tuple(each["addresses"])) for each in found["interfaces"]
        ),
    }
    return Facts(**own, host=host, rtt_s=rtt_s, clock_offset_s=offset_s)


def enter_what_is_there(channels: Mapping[str, HostChannel], inventory: Inventory) -> dict[str, str]:
    """Switch channels to the inventory's environments; return host → interpreter for those not built yet."""
    if inventory.environment is None:
        return {}
    from nodekit.deploy.environment import environment  # most inventories have none

    limit_s = inventory.timings.environment
    entered = environment.enter(
        channels, inventory.hosts, inventory.environment, timeout_s=limit_s, build=False
    )
    return {name: entered.python[name] for name in entered.missing}


def without_software(findings: Iterable[Finding], unmade: Collection[str]) -> list[Finding]:
    """Return the findings except those about software on hosts whose environment is not built yet."""
    return [each for each in findings if each.check != "software" or not set(each.hosts) <= set(unmade)]


def one_per_folder(facts: Mapping[str, Facts]) -> dict[str, list[str]]:
    """Group hosts that share a workdir: first host → all hosts of the group."""
    groups: dict[str, list[str]] = {}
    for name, folder in hostfacts.folders({name: found.workdir_id for name, found in facts.items()}).items():
        groups.setdefault(folder or name, []).append(name)
    return {names[0]: names for names in groups.values()}


def examine(
    inventory: Inventory, facts: Mapping[str, Facts], *, others: Sequence[str] = ()
) -> list[HostError]:
    """Return everything that would keep the job from running, as errors; pure.

    Args:
        inventory: describes the cluster.
        facts: of the hosts that will run the job.
        others: the versions of torch on hosts that run the job already.
    """
    return [HostError(each.host, *each.problem) for each in needed(inventory, facts, others=others)]


def needed(inventory: Inventory, facts: Mapping[str, Facts], *, others: Sequence[str] = ()) -> list[Finding]:
    """Return everything that would keep the job from running, as findings; arguments as for `examine`; pure."""
    problems: list[Finding] = []
    # Hosts that run the job already come first: in a tie, `most_common` returns the first version.
    torches = collections.Counter([*others, *(found.torch for found in facts.values() if found.torch)])
    common = torches.most_common(1)[0][0] if torches else None
    first: dict[Any, str] = {}
    for host in inventory.hosts:
        if (found := facts.get(host.name)) is None:
            continue
        checks = (
            ("access", _twin_problem(host, found, first)),
            (
                "software",
                _python_problem(found) or _torch_problem(found, common, torches, inventory.environment),
            ),
            ("workdir", _workdir_problem(found)),
            ("gpus", gpus.problem(host, found.gpus, found.torch or "", found.torch_build)),
            ("software", _file_problem(host, found, inventory)),
        )
        for check, problem in checks:
            if problem:
                problems.append(Finding(check, host.name, "failure", *problem))
    return problems


def clocks(facts: Mapping[str, Facts]) -> list[Finding]:
    """Return a finding per host about its clock, compared with the others'; pure. kit's rendezvous needs no clocks."""
    if not facts:
        return []
    middle = _middle_clock(list(facts.values()))
    findings = []
    for name, found in facts.items():
        skew_s = found.clock_offset_s - middle.clock_offset_s
        error_s = found.clock_error_s + middle.clock_error_s
        if abs(skew_s) - error_s <= MAX_SKEW_S:
            text = f"{round(skew_s * 1000) or 0:+d} ms" if abs(skew_s) < 1 else f"{skew_s:+.1f} s"
            findings.append(Finding("clock", name, "ok", text))
            continue
        text = f"its clock is {skew_s:+.1f} s (± {error_s:.3f} s) from the other hosts'"
        wanted = (
            f"within {MAX_SKEW_S:g} s: the times of files and in your script's log differ, and torchrun without kit "
            "(kit export) compares the hosts' clocks to tell who is alive"
        )
        findings.append(Finding("clock", name, "warning", text, wanted, "sudo timedatectl set-ntp true"))
    return findings


def addresses(
    inventory: Inventory, facts: Mapping[str, Facts], peers: Mapping[str, tuple[str, ...]]
) -> list[Finding]:
    """Return a warning for each host whose interface has several addresses, and a backend would use a wrong one; pure.

    gloo and NCCL are given an interface, and use its first address: gloo of any family, NCCL of the family that kit
    sets. Neither has a variable for the address itself.
    """
    hosts = [host for host in inventory.hosts if host.name in facts]
    chosen, _ = choose_interfaces(inventory, hosts, facts, peers)
    findings = []
    for name, (interface, address) in chosen.items() if len(hosts) > 1 else ():
        own = next(each.addresses for each in facts[name].interfaces if each.name == interface)
        family = [each for each in own if (":" in each) == (":" in address)]
        takes = {"gloo": own[0], "NCCL": family[0]}
        wrong = {backend: other for backend, other in takes.items() if other != address}
        if not wrong:
            continue
        # The kernel lists IPv4 before IPv6, whatever was added first; of IPv4 the oldest first, of IPv6 the newest.
        if ":" in own[0]:
            first = f"sudo ip address del {address} dev {interface}, and add it again: of IPv6, the newest is the first"
        elif ":" in address:
            first = f"name the network of {own[0]} as `network:`"
        else:
            first = f"sudo ip address del {own[0]} dev {interface}, and add it again behind {address}"
        told = f"{' and '.join(wrong)} will take {' or '.join(dict.fromkeys(wrong.values()))}"
        findings.append(
            Finding(
                "network",
                name,
                "warning",
                f"{interface} has {len(own)} addresses, and {told}, its first, which cannot be chosen",
                f"{address} as the first, or on an interface of its own",
                f"{first}; or give {address} an interface of its own (a VLAN or macvlan) and name that",
            )
        )
    return findings


def _middle_clock(facts: Sequence[Facts]) -> Facts:
    """Return the facts of the host with the median clock, as this machine's may be wrong; of two, the closer one."""
    if len(facts) == 2:
        return min(facts, key=lambda found: abs(found.clock_offset_s))
    return sorted(facts, key=lambda found: found.clock_offset_s)[(len(facts) - 1) // 2]


def _twin_problem(host: Host, found: Facts, first: dict[Any, str]) -> Problem | None:
    """Tell of a host that `first`, those before it, has under another name: the ranks of both would use its GPUs."""
    if host.connection == "local" or not found.ssh_port:
        return None  # nodes on one machine are meant, also where kit itself was started over SSH
    # Containers of one machine share its boot id, and have another name and address, or at least another sshd.
    twin = first.setdefault((found.boot_id, found.hostname, found.interfaces, found.ssh_port), host.name)
    if twin == host.name:
        return None
    text = f"{host.address} is the same machine as {twin} ({found.hostname})"
    return Problem(text, "each machine once", f"remove {host.name} or {twin} from `hosts:`")


def _python_problem(found: Facts) -> Problem | None:
    if release_of(found.python) >= OLDEST_PYTHON:
        return None
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Problem(
        f"{found.executable} is Python {found.python}",
        f"{wanted} or newer",
        "set `python:` to a newer interpreter there",
    )


def _torch_problem(
    found: Facts, common: str | None, torches: Mapping[str, int], environment: Environment | None
) -> Problem | None:
    python = found.executable
    if found.torch is None and environment is not None:
        return Problem(
            f"no torch in the environment ({python})",
            cure="add it to what the inventory's `environment:` names, or set `system_site_packages: true` there "
            "where the host's own python has it",
        )
    if found.torch is None:
        cure = f"set `python:` to an interpreter there that has it, or install it: {found.install('torch')}"
        return Problem(f"no torch in {python}", cure=cure)
    differs = len(torches) > 1 and found.torch != common
    if release_of(found.torch) < OLDEST_TORCH and not (differs and environment is not None):
        wanted = f"{'.'.join(map(str, OLDEST_TORCH))} or newer"
        return Problem(f"torch {found.torch}", wanted, found.install("-U torch"))
    if not differs:
        return None
    pin = f"torch=={str(common).split('+')[0]}"
    cure = found.install(pin)
    if environment is not None:
        cure = f"write {pin} where the inventory's `environment:` points to"
    number = torches[common or ""]
    found_text = f"torch {found.torch}, but {number} of the hosts have {common}"
    return Problem(found_text, "the same on all", cure)


def _workdir_problem(found: Facts) -> Problem | None:
    if found.workdir_problem:
        text = f"its workdir cannot be used: {found.workdir_problem}"
        return Problem(text, "a folder that kit may write to", _workdir_cure(found))
    if found.free_bytes >= NEEDED_BYTES:
        return None
    return Problem(
        f"only {found.free_bytes / 1024**2:.0f} MiB free in {found.workdir}",
        f"at least {NEEDED_BYTES // 1024**2} MiB",
        make_room(found),
    )


def _workdir_cure(found: Facts) -> str:
    if found.workdir_errno in ("ENOSPC", "EDQUOT"):
        return make_room(found)
    if found.workdir_errno == "EROFS":
        return mount_again(found)
    if found.workdir_errno == "EACCES":
        return permission(found, f"sudo install -d -o {found.user} {shlex.quote(found.workdir)}")
    return "set `workdir:` to a folder that can be made and written to there"


def permission(found: Facts, command: str) -> str:
    """Return the cure of a folder that may not be written to: a command, unless it would take it from another user."""
    if found.workdir_owner not in ("", "root", found.user):
        return f"that folder is {found.workdir_owner}'s: set `workdir:` to one of {found.user}'s own"
    return f"{command}, or set `workdir:` to another folder"


def mount_again(found: Facts) -> str:
    """Return the cure of a file system that is read-only: no owner and no mode helps there."""
    at = shlex.quote(found.workdir)
    return (
        f"see `findmnt -T {at}` and `sudo dmesg` there; mount it writable, or set `workdir:` to another disk"
    )


def make_room(found: Facts) -> str:
    """Return the cure of a full disk; the workdir itself may not exist yet."""
    parent = shlex.quote(posixpath.dirname(found.workdir) or "/")
    return f"see what fills it with `du -xhd2 {parent}`, or set `workdir:` to another disk"


def _file_problem(host: Host, found: Facts, inventory: Inventory) -> Problem | None:
    absent = [name for name, kind in found.files.items() if not kind]
    if not absent:
        return None
    name = absent[0]
    code = Path(inventory.job.code).expanduser().resolve()
    if not Path(name).is_absolute():
        if "PATH" in {**host.env, **inventory.job.env}:
            return None  # the ranks' PATH is not the one that was searched
        # Behind another program: as the first word, it is ./NAME already.
        if kind := programs.kind(str(code / name)):
            return Problem(
                f"no program {name} on its PATH; that of {code}, the folder that is synced, needs its path here",
                cure=f"say {'python ' if kind == 'python' else './'}{name}",
            )
        cure = "install it there, or give its path"
        if re.match(r"[A-Za-z_]\w*=", name):
            cure = f"write env in front of it, or set {name.partition('=')[0]} under job.env"
        return Problem(
            f"no program {name} on its PATH, and no such file in {code}, the folder that is synced", cure=cure
        )
    cure = "lay it at the same place on each host, or into the folder that is synced (job.code)"
    if Path(name).is_relative_to(code):
        cure = f"it lies in the folder that is synced, so say {Path(name).relative_to(code)}"
    return Problem(f"no {name} there, which the command runs", cure=cure)


def choose_interfaces(
    inventory: Inventory,
    hosts: Iterable[Host],
    facts: Mapping[str, Facts],
    peers: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, tuple[str, str]], dict[str, HostError]]:
    """Return host → interface and address (`choose_interface`), and host → error if there is none; pure."""
    chosen: dict[str, tuple[str, str]] = {}
    problems: dict[str, HostError] = {}
    for host in hosts:
        try:
            chosen[host.name] = choose_interface(host, facts[host.name], inventory.network, peers[host.name])
        except HostError as error:
            problems[host.name] = error
    return chosen, problems


def choose_interface(host: Host, found: Facts, network: Any, peers: tuple[str, ...]) -> tuple[str, str]:
    """Return the interface for the job's traffic on a host, and its address; pure.

    It is the interface that the inventory names, else the one with an address in `network:`, else the one that routes
    to the other hosts.

    Raises:
        HostError: there is no such interface, or no single one.
    """
    by_name = {interface.name: interface for interface in found.interfaces}
    have = ", ".join(f"{each.name} ({each.addresses[0]})" for each in found.interfaces if each.addresses)
    if host.interface is not None:
        if (chosen := by_name.get(host.interface)) is None:
            raise HostError(host.name, f"no interface '{host.interface}'", wanted=f"one that it has: {have}")
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
            raise HostError(
                host.name,
                f"no interface has an address in `network: {wanted}`",
                wanted=f"the network of one that it has: {have}",
            )
        if len({each.name for each, _ in inside}) > 1:
            names = " and ".join(each.name for each, _ in inside)
            raise HostError(
                host.name,
                f"{names} both have an address in `network: {wanted}`",
                cure="name one as `interface:`",
            )
        return _usable(host, inside[0][0], network)
    sources = {source for peer in peers if (source := found.routes.get(peer))}
    chosen_by_route = {
        each.name: each for each in found.interfaces for address in each.addresses if address in sources
    }
    if not peers:  # a single node only talks to itself
        sources, chosen_by_route = {"127.0.0.1"}, {"lo": by_name["lo"]} if "lo" in by_name else {}
    if len(chosen_by_route) == 1:
        return _usable(host, next(iter(chosen_by_route.values())), None, sources)
    if not chosen_by_route:
        raise HostError(
            host.name,
            f"no route to the other hosts ({', '.join(peers)})",
            cure=f"name the network they share as `network:` or this host's `interface:`; it has {have}",
        )
    raise HostError(
        host.name,
        f"the other hosts are reached over {' and '.join(sorted(chosen_by_route))}",
        cure="name the network they share as `network:`",
    )


def _usable(
    host: Host, interface: Interface, network: Any, sources: set[str] | None = None
) -> tuple[str, str]:
    if not interface.up:
        raise HostError(
            host.name, f"interface '{interface.name}' is down", cure=f"sudo ip link set {interface.name} up"
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
