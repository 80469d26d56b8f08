"""The columns workdir and software of `kit check`, from the hosts' answers; pure."""

from __future__ import annotations

import collections
import functools
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nodekit.deploy.output.wording import count
from nodekit.deploy.plan import script as scripts
from nodekit.deploy.plan.check import NEEDED_BYTES, Facts, make_room, mount_again, permission
from nodekit.deploy.plan.findings import Finding, Level
from nodekit.deploy.plan.script import Script
from nodekit.inventory.schema import Inventory

FEW_BYTES = 1024**3
FEW_INODES = 10_000
LEAST_FILES = 64  # with fewer, agents and ranks wait for descriptors that never come
FEW_FILES = 1024  # open files: connections to all peers, data loaders' workers, logs
FEW_SHM_BYTES = 256 * 1024**2  # for data loaders and NCCL; a container has 64 MiB by default
UNLIMITED = -1


def differing(
    check: str, what: str, values: Mapping[str, str], level: Level, cure: Callable[[str, str], str]
) -> list[Finding]:
    """Return a finding for each host whose value differs from most hosts', with `cure(host, common value)`."""
    if len(set(values.values())) < 2:
        return []
    common, number = collections.Counter(values.values()).most_common(1)[0]
    return [
        Finding(
            check,
            host,
            level,
            f"{what} {value}, but {number} of the hosts have {common}",
            "the same on all",
            cure(host, common),
        )
        for host, value in values.items()
        if value != common
    ]


_differ = functools.partial(differing, "software")


def findings(
    inventory: Inventory, facts: Mapping[str, Facts], probes: Mapping[str, Mapping[str, Any]], script: Script
) -> list[Finding]:
    """Return all findings of these columns but those of `check.needed`."""
    found = []
    env = {host.name: {**host.env, **inventory.job.env} for host in inventory.hosts}
    for host in facts:
        found += _workdir(host, facts[host], probes[host]["workdir"])
        found += _software(
            host, facts[host], probes[host], script, Path(inventory.job.code).expanduser(), env[host]
        )
    pythons = {host: _minor(each.python) for host, each in facts.items()}
    found += _differ("Python", pythons, "warning", lambda *_: "set `python:` to the same version everywhere")
    # Differences of torch itself are in `check.needed`, and cause the others.
    torch = (
        collections.Counter(each.torch or "" for each in facts.values()).most_common(1)[0][0] if facts else ""
    )
    same = [host for host, each in facts.items() if each.torch == torch]
    builds = {host: facts[host].torch_build.partition(" ") for host in same}
    cuda = {host: version for host, (kind, _, version) in builds.items() if kind == "cuda"}
    nccl = {host: str(value) for host in same if (value := probes[host]["software"].get("nccl"))}

    def other_cuda(host: str, common: str) -> str:
        wheels = f"https://download.pytorch.org/whl/cu{common.replace('.', '')}"
        options = f"--force-reinstall torch=={torch.partition('+')[0]} --index-url {wheels}"
        return facts[host].install(options)

    def other_nccl(host: str, common: str) -> str:
        package = f"nvidia-nccl-cu{cuda.get(host, '').partition('.')[0]}=={common}"
        return facts[host].install(package)

    found += _differ("CUDA runtime", cuda, "failure", other_cuda)
    found += _differ("NCCL", nccl, "failure", other_nccl)
    return found


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _workdir(host: str, facts: Facts, place: Mapping[str, Any]) -> list[Finding]:
    if facts.workdir_problem:
        return []  # reported by `check.needed`
    if "error" in place:
        return [unseen("workdir", host, place["error"])]
    quoted = shlex.quote(facts.workdir)
    fill = make_room(facts)
    finding = functools.partial(Finding, "workdir", host)
    found = []
    if place["problem"]:
        cure = permission(facts, f"sudo chown {facts.user} {quoted}")
        if place["errno"] in ("ENOSPC", "EDQUOT"):
            cure = fill
        elif place["errno"] == "EROFS":
            cure = mount_again(facts)
        wanted = "a folder that kit may write to"
        found.append(finding("failure", f"nothing can be written to {place['problem']}", wanted, cure))
    elif NEEDED_BYTES <= facts.free_bytes < FEW_BYTES:  # less is a failure, reported by `check.needed`
        free = f"{facts.free_bytes / 1024**2:.0f} MiB free in {facts.workdir}"
        found.append(finding("warning", free, "1 GiB or more, for snapshots and logs", fill))
    inodes = place["free_inodes"]
    if inodes is not None and inodes < FEW_INODES:
        wanted = f"{FEW_INODES} or more"
        cure = (
            f"see what has so many files with `du --inodes -xd2 {quoted}`, or set `workdir:` to another disk"
        )
        level: Level = "failure" if inodes < 100 else "warning"
        found.append(finding(level, f"{inodes} inodes free in {facts.workdir}", wanted, cure))
    quota = "some room below your quota"
    found += [finding("warning", line, quota, fill) for line in over_quota(place["quota"])]
    return found or [finding("ok", _size(facts.free_bytes))]


def over_quota(text: str) -> list[str]:
    """Return the file systems above their soft limit, marked by an asterisk in ``quota -w -p``."""
    found = []
    for line in text.splitlines():
        words = line.split()
        for place, noun in ((1, "KiB"), (5, "files")):
            if len(words) >= 9 and words[place].endswith("*"):
                used, soft = words[place].rstrip("*"), words[place + 1]
                found.append(f"{used} {noun} used of a quota of {soft} on {words[0]}")
    return found


def _size(size_bytes: float) -> str:
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    return next((f"{size_bytes / unit:.0f} {name}" for name, unit in units if size_bytes >= unit), "full")


def _software(
    host: str,
    facts: Facts,
    probe: Mapping[str, Any],
    script: Script,
    code: Path,
    env: Mapping[str, str],
) -> list[Finding]:
    own = probe["software"]
    if "error" in own:
        return [unseen("software", host, own["error"])]
    finding = functools.partial(Finding, "software", host)
    found = []
    if own["syntax"]:
        what = f"{script.name} is no Python to {facts.executable} ({facts.python}): {own['syntax']}"
        cure = f"correct {script.name} {own['syntax'].partition(':')[0]}"
        found.append(finding("failure", what, "a script that compiles", cure))
    if missing := scripts.without_own(script, own["missing"], code):
        packages = " ".join(scripts.DISTRIBUTIONS.get(name, name) for name in missing)
        what = f"no {', '.join(missing)} in {facts.executable}"
        wanted = f"what {script.name} imports"
        found.append(finding("failure", what, wanted, facts.install(packages)))
    if scripts.spawns(script.source):
        what = (
            f"{script.name} calls mp.spawn, whose processes wait for torchrun's store and not for each other"
        )
        cure = (
            "let kit start the ranks, or run it as one process: job.nproc_per_node: 1 and the command "
            f"env -u TORCHELASTIC_USE_AGENT_STORE python {script.name}"
        )
        found.append(finding("warning", what, "a script that is one rank", cure))
    elif place := scripts.own_rendezvous(script):
        # As under torchrun: TORCHELASTIC_USE_AGENT_STORE makes every rank a client, and torch never removes the file.
        why = (
            "the ranks of a restart find those before them in that file, and hosts that do not share it never meet"
            if "file://" in place
            else "no rank opens a store there if a launcher starts them, and all wait for it"
        )
        what = f"{script.name} {place}: {why}"
        cure = "leave it out, or say env://: then MASTER_ADDR and MASTER_PORT count, which kit sets for each start"
        found.append(finding("warning", what, "ranks that meet where kit has them meet", cure))
    found += [finding(*each) for each in _limits(facts, own, env)]
    return found or [finding("ok", f"torch {facts.torch}")]


_Told = tuple[Level, str, str, str]


def _limits(facts: Facts, own: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[_Told]:
    nofile, memlock, shm = own["nofile"][0], own["memlock"][0], own["shm"]
    conf = "/etc/security/limits.d/nodekit.conf"
    # With one of these variables the job has another locale than the probe.
    is_told = env.keys() & {"LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8"}
    if not is_told and (own["locale"] or own["encoding"].lower() != "utf-8"):
        what = own["locale"] or f"the encoding of file names is {own['encoding']}"
        yield "warning", f"locale: {what}", "one with UTF-8", "set `env: {LC_ALL: C.UTF-8}` for this host"
    if nofile != UNLIMITED and nofile < FEW_FILES:
        cure = f"echo '{facts.user} - nofile 65536' | sudo tee -a {conf}, and log in anew"
        level: Level = "failure" if nofile < LEAST_FILES else "warning"
        yield level, f"ulimit -n (open files) is {nofile}", f"{FEW_FILES} or more", cure
    if locks := own["build_locks"]:
        what = f"{count(len(locks), 'lock')} of torch extensions that were being compiled: {', '.join(locks)}"
        cure = "if no process compiles them any more, on any machine with this folder: rm " + shlex.join(
            locks
        )
        yield (
            "warning",
            what,
            "none: a rank that needs such an extension waits until its lock is removed",
            cure,
        )
    if own["infiniband"] and memlock != UNLIMITED:
        cure = f"echo '{facts.user} - memlock unlimited' | sudo tee -a {conf}, and log in anew"
        what = f"ulimit -l (locked memory) is {memlock // 1024} KiB, and there is InfiniBand"
        yield "warning", what, "unlimited, or RDMA fails", cure
    if shm is None or not shm["writable"]:
        cure = "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        yield "failure", "no /dev/shm that can be written to", "shared memory", cure
    elif shm["free_bytes"] < FEW_SHM_BYTES:
        free, size = shm["free_bytes"] / 1024**2, shm["size_bytes"] / 1024**2
        cure = "sudo mount -o remount,size=50% /dev/shm (docker: --shm-size=8g)"
        what = f"/dev/shm has {free:.0f} of {size:.0f} MiB free"  # noqa: S108
        yield "warning", what, f"{FEW_SHM_BYTES // 1024**2} MiB or more, for data loaders and NCCL", cure


def unseen(check: str, host: str, error: str) -> Finding:
    """Return the finding of a part of a host that could not be examined."""
    cure = "look at the host itself; tell us, if it is well"
    return Finding(check, host, "warning", f"could not be looked at: {error}", "an answer", cure)
