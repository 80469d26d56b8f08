"""The column gpus of `kit check`, from the output of nvidia-smi and the kernel's log on the hosts; pure."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nodekit.deploy.host.probes.gpu.accelerators import NVIDIA
from nodekit.deploy.host.probes.gpu.xids import HARDWARE_XIDS, OFF_THE_BUS, Xid, parse_xids
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding, Level
from nodekit.deploy.plan.gpus import HostGpus, share
from nodekit.deploy.preflight import nvidia_smi
from nodekit.deploy.preflight.nvidia_smi import Gpu, Smi, SmiError
from nodekit.deploy.preflight.software import differing, unseen
from nodekit.inventory.schema import Inventory

_Told = tuple[Level, str, str, str]  # level, found, wanted, cure


def findings(
    inventory: Inventory, facts: Mapping[str, Facts], probes: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Return problems of the GPUs that the job would use; missing ones are in `check.needed`."""
    found: list[Finding] = []
    hosts = [host for host in inventory.hosts if host.name in facts]
    shares = share(hosts, {name: each.gpus for name, each in facts.items()})
    used = {name: tuple(gpu.index for gpu in own) for name, own in shares.items()}
    whole = {name: {gpu.index for gpu in own if "MIG-" not in gpu.token} for name, own in shares.items()}
    kinds: dict[str, str] = {}
    joined: dict[str, str] = {}
    for host in facts:
        told = probes[host]["gpus"]
        if "error" in told:
            found.append(unseen("gpus", host, told["error"]))
        elif told["problem"] and (level := _level_of_none(inventory, host, told["num_cards"])) != "ok":
            found.append(_silent(host, told["problem"], level))
        elif used[host] and facts[host].gpus.kind != NVIDIA:
            found.append(_unproven(host, facts[host].gpus, len(used[host])))
        elif not used[host]:
            nothing = "none" if not facts[host].num_gpus else "not used"
            found.append(Finding("gpus", host, "ok", nothing))
        else:
            try:
                smi = nvidia_smi.parse(told["smi"])
            except SmiError as error:
                found.append(unseen("gpus", host, str(error)))
                continue
            own = [gpu for gpu in smi.gpus if gpu.index in used[host]]
            names = collections.Counter(_short(gpu.name) for gpu in own)
            kinds[host] = ", ".join(f"{number} × {name}" for name, number in names.items())
            joined[host] = _joined(told, used[host])
            found += [
                *_other_models(inventory, host, own),
                *_host(host, smi, own, told, _own_pids(probes[host])),
                *_divided(host, [gpu for gpu in own if gpu.mig and gpu.index in whole[host]]),
            ] or [Finding("gpus", host, "ok", kinds[host])]
    return [*found, *_unequal(kinds, joined)]


def _unproven(host: str, there: HostGpus, number: int) -> Finding:
    """Return a warning for GPUs other than NVIDIA's: kit counts and hides them, but was never run on such hardware."""
    row = there.row
    return Finding(
        "gpus",
        host,
        "warning",
        f"{number} × {there.usable[0].name}: kit has not been run on {row.name} hardware (counted by {row.counted_by}, "
        f"hidden by {row.variable}, {row.backend})",
        "hardware that it has been run on",
        "see that the number is right and that each rank sees its own; kit selftest tries it, please send us its file",
    )


def _level_of_none(inventory: Inventory, host: str, num_cards: int) -> Level:
    """Return the level of a host without usable GPUs: it may be intended."""
    wanted = next(each.gpus for each in inventory.hosts if each.name == host)
    if wanted is None:
        return "warning" if num_cards else "ok"
    return "failure" if wanted else "ok"


def _other_models(inventory: Inventory, host: str, own: Sequence[Gpu]) -> list[Finding]:
    """Return a failure for GPUs of another model than the inventory's."""
    wanted = next(each.gpu_model for each in inventory.hosts if each.name == host)
    if wanted is None:
        return []
    others = [gpu for gpu in own if wanted.casefold() not in gpu.name.casefold()]
    if not others:
        return []
    names = ", ".join(f"GPU {gpu.index} is: {gpu.name}" for gpu in others)
    cure = "name those to use as `gpus: [0, 1]`, or mend `gpu_model:` in the inventory"
    return [Finding("gpus", host, "failure", names, f"`gpu_model: {wanted}`", cure)]


def _short(name: str) -> str:
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.removeprefix(word)
    return name


def _joined(told: Mapping[str, Any], used: tuple[int, ...]) -> str:
    links = nvidia_smi.links(nvidia_smi.parse_matrix(told["topo"]), used)
    peers = nvidia_smi.links(nvidia_smi.parse_matrix(told["p2p"]), used)
    return f"{links} without P2P ({peers})" if peers not in ("", "OK") else links


def _silent(host: str, problem: str, level: Level) -> Finding:
    cure = "see what the driver says with `sudo dmesg | grep -i nvrm`, or set `gpus: 0` to train on the CPU"
    return Finding("gpus", host, level, f"nvidia-smi: {problem}", "its list of GPUs", cure)


def _own_pids(probe: Mapping[str, Any]) -> dict[int, str]:
    """Return the processes of our runs: pid → the run."""
    return {each["pid"]: run["run"] for run in probe["runs"].get("runs", ()) for each in run["processes"]}


def _host(
    host: str, smi: Smi, own: list[Gpu], told: Mapping[str, Any], own_pids: Mapping[int, str]
) -> list[Finding]:
    xids = parse_xids(told["xid"])
    corrupt = {nvidia_smi.bus_of(address) for address in told["inforom"]}
    found = [
        each
        for gpu in own
        for each in (
            *_users(gpu, told["owners"], own_pids),
            *_modes(gpu),
            *_health(gpu),
            *_inforom(gpu, corrupt),
            *_errors(gpu, xids),
        )
    ]
    listed = {gpu.bus for gpu in smi.gpus}
    for bus in sorted({xid.bus for xid in xids if xid.number == OFF_THE_BUS} - listed):
        text = f"the GPU at {bus} has fallen off the bus (Xid {OFF_THE_BUS})"
        found.append(("failure", text, "all GPUs", "restart the host"))
    if lacking := [str(gpu.index) for gpu in own if gpu.persistence is False]:
        text = f"persistence mode is off (GPU {', '.join(lacking)}): each start waits for the driver"
        found.append(("warning", text, "on", "sudo nvidia-smi -pm 1"))
    return [Finding("gpus", host, *each) for each in found]


def _users(gpu: Gpu, owners: Mapping[str, str], own_pids: Mapping[int, str]) -> Iterator[_Told]:
    """Return processes that use a GPU already."""
    for process in gpu.processes:
        if process.kind == "G":  # graphics: a desktop, small and always present
            continue
        owner = owners.get(str(process.pid), "")
        whose = f" of {owner}" if owner else " (of another container)"
        run = own_pids.get(process.pid)
        memory = f", {process.memory_mib} MiB" if process.memory_mib is not None else ""
        cure = f"kit down {run}, or kit clean" if run else f"end it there, once {owner or 'its owner'} agrees"
        text = f"GPU {gpu.index} is used by pid {process.pid}{whose}: {process.name or '?'}{memory}"
        text += f", of {run}" if run else ""
        yield "warning", text, "a free GPU", f"{cure}; or name other GPUs as `gpus: [0, 1]`"


def _modes(gpu: Gpu) -> Iterator[_Told]:
    """Return settings that keep processes from a GPU, or it from the others."""
    name = f"GPU {gpu.index}"
    if gpu.compute_mode != "Default":
        is_none = gpu.compute_mode == "Prohibited"
        lets = "no process may use it" if is_none else "one process at a time may use it, one left over, too"
        yield (
            "failure" if is_none else "warning",
            f"{name}: its compute mode is {gpu.compute_mode}: {lets}",
            "Default",
            f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        )
    if gpu.fabric:
        yield (
            "failure",
            f"{name} has not joined its NVSwitch fabric: {gpu.fabric}; CUDA does not start, or has no NVLink",
            "Completed, Success",
            "sudo systemctl restart nvidia-fabricmanager (its version is the driver's), or "
            "`journalctl -u nvidia-fabricmanager` and reboot",
        )


def _divided(host: str, own: Sequence[Gpu]) -> list[Finding]:
    """Return that GPUs are divided by MIG: CUDA shows a process one instance, whatever their number."""
    if not own:
        return []
    text = f"GPU {', '.join(str(gpu.index) for gpu in own)}: divided by MIG, and CUDA shows a process one instance"
    cure = "turn MIG off with `sudo nvidia-smi -mig 0`, or use one instance: `gpus: 1`"
    return [Finding("gpus", host, "failure" if len(own) > 1 else "warning", text, "whole GPUs", cure)]


def _health(gpu: Gpu) -> Iterator[_Told]:
    """Return problems that a GPU reports of its memory and clocks."""
    name, reset = f"GPU {gpu.index}", f"sudo nvidia-smi -r -i {gpu.index} (with nothing on it)"
    if gpu.is_broken:
        yield (
            "failure",
            f"{name}: a row of its memory could not be replaced",
            "a whole GPU",
            "have it exchanged",
        )
    elif gpu.uncorrectable:
        text = f"{name}: {gpu.uncorrectable} uncorrectable ECC errors since the driver was loaded"
        yield "failure", text, "none", f"{reset}, or restart the host"
    elif gpu.needs_reset:
        yield "warning", f"{name}: a repair of its memory waits for a reset", "a GPU without one", reset
    if gpu.slowdowns:
        text = f"{name} is slowed down: {', '.join(gpu.slowdowns)}"
        cure = f"see to its cooling and power: nvidia-smi -q -i {gpu.index} -d PERFORMANCE"
        yield "warning", text, "full clocks", cure


def _inforom(gpu: Gpu, corrupt: Collection[str]) -> Iterator[_Told]:
    """Return that a GPU's infoROM is corrupt: it computes, and loses what it should remember of its errors."""
    if gpu.bus in corrupt:
        text = f"GPU {gpu.index}: its infoROM is corrupt (nvidia-smi exits with 14): it may forget its errors"
        cure = f"sudo nvidia-smi -r -i {gpu.index} (with nothing on it); if it stays, have the GPU exchanged"
        yield "warning", text, "a whole one", cure


def _errors(gpu: Gpu, xids: Sequence[Xid]) -> Iterator[_Told]:
    """Return errors that the driver has logged of a GPU."""
    times = collections.Counter(xid.number for xid in xids if xid.bus == gpu.bus)
    for number in sorted(times.keys() & HARDWARE_XIDS.keys()):
        text = (
            f"GPU {gpu.index}: Xid {number} ({HARDWARE_XIDS[number]}) × {times[number]} since the last boot"
        )
        level: Level = "failure" if number == OFF_THE_BUS else "warning"
        yield level, text, "none", "restart the host; if it comes again, have the GPU exchanged"


def _unequal(kinds: Mapping[str, str], joined: Mapping[str, str]) -> list[Finding]:
    """Return hosts whose GPUs, or their interconnect, differ from most hosts'."""
    pace = "the slowest sets the pace: leave it out, or give it a smaller share"
    topology = "compare `nvidia-smi topo -m` there; is an NVLink bridge or a BIOS setting missing?"
    found = differing("gpus", "its GPUs are", kinds, "warning", lambda *_: pace)
    others = {each.host for each in found}
    named = {host: each or "nothing" for host, each in joined.items()}
    joins = differing("gpus", "its GPUs are joined by", named, "warning", lambda *_: topology)
    return found + [each for each in joins if each.host not in others]
