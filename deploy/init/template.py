"""The inventory that `kit init` writes: findings become keys, decisions for the user become comments; pure."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodekit.deploy.connect.hostkeys import UnknownKey
from nodekit.deploy.host.probes.network.nics import Nic
from nodekit.deploy.init.defaults import (
    Pythons,
    Shared,
    Survey,
    choose_network,
    choose_nic,
    choose_pythons,
    fits,
    is_usable,
    rank,
    shared_networks,
)
from nodekit.deploy.init.template_text import (
    CHOOSE,
    Draft,
    comment,
    gib,
    heading,
    key_of,
    keyed,
    scalar,
    shown,
    visible,
)
from nodekit.inventory import hostlists
from nodekit.inventory.importers import FoundHost

_INTERFACE = re.compile(r"[^\s/,^=:-][^\s/,^=:]{0,14}")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """One host and its survey."""

    host: FoundHost
    survey: Survey | None = None
    problem: str = ""
    """Why there is no survey."""
    unknown_key: UnknownKey | None = None
    """The error, if the host's unknown SSH key is the reason."""


def _renamed(looked: Looked) -> Looked:
    """Return the host under another name if kit has a folder of its own with its name."""
    host = looked.host
    if not hostlists.is_own_name(host.name):
        return looked
    return replace(looked, host=replace(host, name=f"host-{host.name}", address=host.address or host.name))


def from_hosts(
    looked: Sequence[Looked], *, name: str, file: str, command: str, date: str, notes: Sequence[str] = ()
) -> Draft:
    """Return the inventory of these hosts.

    Args:
        looked: the hosts, in their order.
        name: the inventory's name.
        file: the name of the file that it will be written to.
        command: the command that made it, for the comment at the top.
        date: when it was made.
        notes: what a source contains that an inventory cannot express.
    """
    looked = [_renamed(each) for each in looked]
    twins = _twins(looked)
    kept = [each for each in looked if each.host.name not in twins]
    seen = {each.host.name: each.survey for each in kept if each.survey is not None}
    remote = {
        each.host.name: seen[each.host.name]
        for each in kept
        if each.host.connection is None and each.survey is not None
    }
    shared = shared_networks(remote)
    network = choose_network(shared)
    pythons = choose_pythons(seen)
    common = _common([each.host for each in kept])
    answered = f"{sum(each.survey is not None for each in looked)} of {len(looked)} answered"
    lines = [
        *heading(
            f"Written by `{command}` on {date}, by looking at the hosts: {answered}.",
            f"kit check {shown(file)}             what is wrong on these hosts, and how to mend it",
            f"kit up {shown(file)} --dry-run      what would run on each of them; starts nothing",
            name=name,
        ),
        *(f"{key}: {scalar(value)}" for key, value in common.items()),
        *([""] if common else []),
        *_python_lines(pythons, seen),
        "",
        *_network_lines(shared, network, remote),
        "",
        *_mixture_lines(seen),
        "hosts:",
    ]
    for each in looked:
        lines += _host_lines(each, twins.get(each.host.name, ""), common, pythons, network)
    lines += _slot_lines(looked)
    if notes:
        lines += ["", *comment("Passed over:")]
        for note in notes:
            lines += comment(note, bullet="- ")
    return Draft.of(lines, _hosts_summary(seen, looked, network, pythons))


def _hosts_summary(
    seen: Mapping[str, Survey], looked: Sequence[Looked], network: Shared | None, pythons: Pythons
) -> str:
    num_gpus = sum(len(survey["gpus"]) for survey in seen.values())
    unseen = sum(each.survey is None for each in looked)
    said = [
        f"{len(looked)} host{'s' * (len(looked) != 1)}" + (f" ({unseen} not seen)" if unseen else ""),
        f"{num_gpus} GPU{'s' * (num_gpus != 1)}" if num_gpus else "no GPU found",
    ]
    if network is not None:
        said.append(f"over {network.network} ({visible(network.names())})")
    if pythons.torch:
        said.append(f"torch {visible(pythons.torch)}")
    return ", ".join(said)


def _twins(looked: Sequence[Looked]) -> dict[str, str]:
    """Return host → another name of the same machine, listed before it; an inventory takes each machine once."""
    places: dict[Any, str] = {}
    found: dict[str, str] = {}
    for each in looked:
        if each.host.connection == "local":
            continue
        host = each.host
        keys: list[Any] = [("place", (host.address or host.name).lower(), host.port)]
        if each.survey is not None:
            addresses = frozenset(
                address
                for nic in each.survey["nics"]
                if rank(nic, each.survey["nics"]) is not None
                for address in nic["addresses"]
            )
            if addresses:  # containers of one machine share its boot id, but not its addresses
                keys.append((each.survey["boot_id"], addresses))
        twin = next((places[key] for key in keys if key in places), None)
        if twin is not None:
            found[host.name] = twin
        for key in keys:
            places.setdefault(key, host.name)
    return found


def _common(hosts: Sequence[FoundHost]) -> dict[str, str | int]:
    """Return the login settings that are the same for all hosts, if there are several."""
    found: dict[str, str | int] = {}
    for key in ("user", "port", "identity_file", "known_hosts"):
        values = {getattr(host, key) for host in hosts}
        if len(hosts) > 1 and len(values) == 1 and (value := values.pop()) is not None:
            found[key] = value
    return found


# --- interpreters and networks ------------------------------------------------------------------------------


def _python_lines(pythons: Pythons, seen: Mapping[str, Survey]) -> list[str]:
    if pythons.everywhere is not None:
        more = "on every host that answered" if len(seen) > 1 else "there"
        return keyed(f"python: {scalar(pythons.everywhere)}", f"torch {pythons.torch} {more}")
    if pythons.of_host:
        return comment(f"python: differs from host to host, see below; torch {pythons.torch} in each")
    if pythons.choices:
        intro = (
            f"{CHOOSE} an interpreter: several on every host have torch. Without a choice, kit takes python3."
        )
        return [*comment(intro), *_python_choices(pythons.choices, seen)]
    if not seen:
        return [
            *comment(f"{CHOOSE} an interpreter with torch; no host has been seen."),
            "# python: ~/venv/bin/python",
        ]
    if not any(fits(python) for survey in seen.values() for python in survey["pythons"]):
        return [
            *comment(
                f"{CHOOSE} an interpreter: none with a torch that kit can use was found. Install it on every host:"
            ),
            "#   python3 -m venv ~/venv && ~/venv/bin/pip install torch",
            "# python: ~/venv/bin/python",
        ]
    return comment(
        f"{CHOOSE} an interpreter for each host, see below: no one path has the same torch on every host, and all "
        "nodes of a job need the same."
    )


def _python_choices(paths: Iterable[str], seen: Mapping[str, Survey]) -> list[str]:
    first = next(iter(seen.values()))["pythons"]
    lines = []
    for path in paths:
        python = next(each for each in first if each["path"] == path)
        default = ", which is python3 there" if python["default"] else ""
        lines += keyed(
            f"# python: {scalar(path)}", f"torch {python['torch']}, Python {python['version']}{default}"
        )
    return lines


def _network_lines(
    shared: Sequence[Shared], chosen: Shared | None, remote: Mapping[str, Survey]
) -> list[str]:
    if len(remote) < 2:
        return ["# network: 10.0.0.0/24   the network to train over, where there are several hosts"]
    among = "all hosts" if len(remote) > 1 else "the host"
    lines: list[str] = []
    if chosen is not None:
        lines += keyed(f"network: {scalar(str(chosen.network))}", _network_comment(chosen))
        others = [each for each in shared if each is not chosen]
        if others:
            lines += comment(f"{among} share these, too:")
    elif shared:
        lines += comment(
            f"{CHOOSE} a network: {among} share several, and which one is the fastest cannot be told. Without a "
            "choice, kit takes the interface by which each host routes to the others."
        )
        others = list(shared)
    else:
        return comment(
            f"{CHOOSE}, if need be: no network was found that {among} have an address in. kit takes the interface by "
            "which each host routes to the others; where that is wrong, name each host's `interface:`."
        )
    for each in others:
        lines += keyed(f"# network: {each.network}", _network_comment(each))
    return lines


def _network_comment(shared: Shared) -> str:
    kinds = {1: ", of containers", 2: ", a tunnel"}
    return f"{shared.names()}, {speed(shared.speed_mbit)}{kinds.get(shared.rank, '')}"


def speed(mbit: int | None) -> str:
    """Format a speed in Mb/s: ``25 Gb/s``."""
    if mbit is None:
        return "speed not known"
    return f"{mbit / 1000:g} Gb/s" if mbit >= 1000 else f"{mbit} Mb/s"


# --- one host -----------------------------------------------------------------------------------------------


def _host_lines(
    looked: Looked, twin: str, common: Mapping[str, Any], pythons: Pythons, network: Shared | None
) -> list[str]:
    host, survey = looked.host, looked.survey
    keys: list[str] = []
    for key in ("address", "user", "port", "identity_file", "known_hosts", "connection"):
        value = getattr(host, key)
        if value is not None and key not in common:
            keys.append(f"{key}: {scalar(value)}")
    if host.note:
        keys += comment(host.note)
    if survey is None:
        keys += comment(f"could not be looked at: {looked.problem}")
        if host.slots is not None:
            keys += keyed(f"# gpus: {host.slots}", f"slots={host.slots} in {host.where}")
    else:
        keys += _gpu_lines(host, survey)
        keys += _host_python_lines(host.name, survey, pythons)
        keys += _nic_lines(host, survey, network)
    lines = [f"  {key_of(host.name)}:", *(f"    {line}" for line in keys)]
    if twin:
        intro = comment(f"{CHOOSE} one of the two: {host.name} is the same machine as {twin}", indent="  ")
        lines = [*intro, *(f"  # {line[2:]}" for line in lines)]
    return lines


def _mixture_lines(seen: Mapping[str, Survey]) -> list[str]:
    """Return a comment if only some hosts have GPUs, which `kit up` refuses."""
    without = [name for name, survey in seen.items() if not (survey["gpus"] or survey["gpu_problem"])]
    if not without or len(without) == len(seen):
        return []
    listed = ", ".join(without[:8]) + (" …" if len(without) > 8 else "")
    return comment(
        f"{CHOOSE} which hosts: a job runs on GPUs everywhere or nowhere, and none was found on {listed}. Leave those "
        "out, or write `gpus: 0` at the top for all."
    )


def _gpu_lines(host: FoundHost, survey: Survey) -> list[str]:
    models = collections.Counter(f"{gpu['name']}, {gib(gpu['memory_mib'])}" for gpu in survey["gpus"])
    seen = " and ".join(f"{count} × {model}" for model, count in models.items())
    machine = f"{survey['cpus']} cores, {gib(survey['memory_mib'])} memory"
    if not models:
        slots = f"; slots={host.slots} in {host.where}" if host.slots is not None else ""
        if survey["gpu_problem"]:
            return comment(
                f"{CHOOSE} gpus: N: they cannot be listed (nvidia-smi: {survey['gpu_problem']}); {machine}{slots}"
            )
        return comment(f"no GPU found; {machine}{slots}")
    found = len(survey["gpus"])
    if host.slots is None or host.slots == found:
        return keyed(f"gpus: {found}", f"{seen}; {machine}")
    lines = comment(
        f"{CHOOSE} how many GPUs: nvidia-smi lists {found}, and {host.where} has slots={host.slots}"
    )
    if 0 < host.slots < found:
        lines += keyed(f"# gpus: {host.slots}", "as the hostfile says")
    return [*lines, *keyed(f"# gpus: {found}", f"{seen}; {machine}")]


def _host_python_lines(name: str, survey: Survey, pythons: Pythons) -> list[str]:
    if name in pythons.of_host:
        return [f"python: {scalar(pythons.of_host[name])}"]
    lines: list[str] = []
    is_decided = pythons.everywhere is not None or bool(pythons.choices)
    for python in survey["pythons"]:
        if is_decided or not python["torch"]:
            continue
        about = f"torch {python['torch']}, Python {python['version']}"
        lines += keyed(f"# python: {scalar(python['path'])}", about + ("" if fits(python) else ": too old"))
    return lines


def _nic_lines(host: FoundHost, survey: Survey, network: Shared | None) -> list[str]:
    """Return each suitable interface as a commented line; `interface:` if two are in the chosen network."""
    if host.connection == "local":
        return []
    lines: list[str] = []
    inside = network.nics.get(host.name, ()) if network is not None else ()
    if len(inside) > 1:
        best = choose_nic(inside)
        if best is not None and _is_interface(best):
            lines += keyed(f"interface: {scalar(best['name'])}", "the fastest of those in `network:`")
        else:
            lines += comment(f"{CHOOSE} one interface: these are all in `network:`")
    passed: list[str] = []
    for nic in survey["nics"]:
        if nic["kind"] == "loopback":
            continue
        if rank(nic, survey["nics"]) is None or not _is_interface(nic):
            if nic["addresses"]:
                passed.append(f"{nic['name']} ({nic['addresses'][0]})")
        elif nic["addresses"] or nic["kind"] != "virtual":
            mark = ", in `network:`" if nic in inside else ""
            lines += keyed(f"# interface: {scalar(nic['name'])}", _nic_comment(nic) + mark)
    if passed:
        lines += comment(f"not to train over: {', '.join(passed)}")
    return lines


def _is_interface(nic: Nic) -> bool:
    """Whether an interface's name is valid in an inventory: the kernel accepts nearly any name."""
    return nic["name"].isprintable() and _INTERFACE.fullmatch(nic["name"]) is not None


def _nic_comment(nic: Nic) -> str:
    state = "up" if is_usable(nic) else "down" if not nic["up"] else "no link" if not nic["carrier"] else "up"
    about = [" ".join(nic["addresses"]) or "no address", speed(nic["speed_mbit"]), state]
    if nic["kind"] != "physical":
        about.append(nic["driver"] if nic["kind"] == "virtual" else nic["kind"])
    return ", ".join(map(str, about))


def _slot_lines(looked: Sequence[Looked]) -> list[str]:
    """Return the slots of hosts without GPUs, as a commented `nproc_per_node:`."""
    slots = {
        each.host.slots
        for each in looked
        if each.survey is not None and not each.survey["gpus"] and each.host.slots
    }
    if not slots:
        return []
    return [
        "",
        *comment(
            f"{CHOOSE}, if need be: hosts without GPUs run one process each, and the hostfile has slots:"
        ),
        "# job:",
        *(f"#   nproc_per_node: {each}" for each in sorted(slots)),
    ]
