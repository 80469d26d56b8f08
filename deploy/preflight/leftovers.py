"""Processes left on hosts by earlier runs of ours: found by `kit check`, ended by `kit clean`, by recorded ids."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nodekit.deploy.connect.channel import HostChannel, on_all
from nodekit.deploy.host.broken import Broken
from nodekit.deploy.host.node import agents
from nodekit.deploy.host.probes.leftovers import Remains
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.preflight import nvidia_smi
from nodekit.deploy.preflight.software import unseen
from nodekit.deploy.records import runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.schema import Host, Inventory

LOOK_TIMEOUT_S = 15.0
GRACE_S = 10.0
STOP_MARGIN_S = 20.0
RECENT_S = 120.0  # ranks with output within this time count as working
ENDING_S = 60.0  # grace period of an agent whose run is over

# left: the agent has ended; forgotten: the agent runs, and the run is over; running: leave it alone
Standing = Literal["left", "forgotten", "running"]


@dataclass(frozen=True, kw_only=True)
class Left:
    """The remains of one run on one host."""

    host: str
    run: str
    node: str
    node_dir: str
    standing: Standing
    still_trains: bool
    text: str
    """Description for people."""


def lefts(
    host: str, found: Sequence[Remains], records: Mapping[str, Run], gpu_of: Mapping[int, int]
) -> list[Left]:
    """Return the remains on a host, from the answer of `leftovers.runs`; pure.

    Args:
        records: run id → the run on record here; runs that others have started have none.
        gpu_of: pid → the GPU it uses.
    """
    return [
        Left(
            host=host,
            run=each["run"],
            node=each["node"],
            node_dir=each["node_dir"],
            standing=_standing(each, records.get(each["run"])),
            still_trains=each["agent"] is not None
            or (bool(each["processes"]) and each["quiet_s"] < RECENT_S),
            text=_text(each, gpu_of),
        )
        for each in found
    ]


def _standing(found: Remains, record: Run | None) -> Standing:
    if found["agent"] is None:
        return "left"
    is_over = record is not None and record.state in runs.ENDED
    if (is_over or found["state"] in runs.ENDED) and found["quiet_s"] > ENDING_S:
        return "forgotten"
    if is_over and found["state"] not in runs.ENDED:
        return "forgotten"
    return "running"


def _text(found: Remains, gpu_of: Mapping[int, int]) -> str:
    parts = []
    if found["agent"] is not None:
        parts.append(f"agent {found['agent']} ({found['state'] or 'starting'})")
    for each in found["processes"]:
        rank = "" if each["rank"] is None else f"rank {each['rank']}, "
        held = [f"{each['rss_bytes'] / 1e6:.0f} MB"]
        if each["pid"] in gpu_of:
            held.append(f"GPU {gpu_of[each['pid']]}")
        held += [f"port {port}" for port in each["ports"]]
        parts.append(f"pid {each['pid']} ({rank}{', '.join(held)})")
    if found["shm"]:
        size_mb = sum(each["size_bytes"] for each in found["shm"]) / 1e6
        parts.append(f"{len(found['shm'])} segments of shared memory, {size_mb:.0f} MB")
    return ", ".join(parts)


def findings(
    inventory: Inventory, facts: Mapping[str, Facts], probes: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Return the column leftovers of `kit check`."""
    records = {run.run_id: run for run in runs.all_runs()}
    found = []
    told: set[tuple[str, str]] = set()
    for host in facts:
        if "error" in (own := probes[host]["runs"]):
            if facts[host].workdir_problem:
                continue  # reported by `check.needed`
            found.append(unseen("leftovers", host, own["error"]))
            continue
        mine = _first(facts[host].boot_id, own["runs"], told)
        gpu_of = nvidia_smi.gpu_of(probes[host]["gpus"].get("smi", ""))
        here = lefts(host, mine, records, gpu_of)
        bad = [each for each in here if each.standing != "running"]
        found += [_finding(each, inventory) for each in bad]
        spec = next(each for each in inventory.hosts if each.name == host)
        if why := broken_of(spec, own.get("broken", {})):
            cure = f"when it is mended: kit clean --forgive {shlex.quote(str(inventory.path))}"
            found.append(
                Finding("leftovers", host, "warning", f"kit up leaves it out: {why}", "a sound host", cure)
            )
        elif not bad:
            running = ", ".join(sorted({each.run for each in here}))
            text = f"{running} runs" if running else "none"
            found.append(Finding("leftovers", host, "ok", text))
    return found


def broken_of(host: Host, found: Mapping[str, Broken]) -> str:
    """Return what an earlier run found broken on a host, from the answer of `broken.recall`; "" if nothing."""
    # Local nodes share this machine, but not their GPUs.
    own = [each for node, each in found.items() if node == host.name or host.connection != "local"]
    if not own:
        return ""
    newest = max(own, key=lambda each: float(each["time"]))
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest["time"]))
    return f"{newest['why']} (drained by {newest['run']}, {when})"


def _first(boot_id: str, found: Sequence[Remains], told: set[tuple[str, str]]) -> list[Remains]:
    """Return the remains not yet in `told`: hosts may be folders of one machine, where each sees the same processes."""
    new = [each for each in found if (boot_id, each["node_dir"]) not in told]
    told.update((boot_id, each["node_dir"]) for each in new)
    return new


def _finding(left: Left, inventory: Inventory) -> Finding:
    if left.standing == "forgotten":
        what, cure = "is over, but runs here", f"kit down {left.run}"
    else:
        what, cure = "has lost its agent and left", f"kit clean {shlex.quote(str(inventory.path))}"
    text = f"{left.run} {what}: {left.text}"
    return Finding("leftovers", left.host, "failure", text, "nothing of runs that are over", cure)


def find(channels: Mapping[str, HostChannel], inventory: Inventory) -> dict[str, list[Left] | Exception]:
    """Return the remains on each host, those of running runs too; an exception if a host cannot be asked."""
    records = {run.run_id: run for run in runs.all_runs()}
    workdirs = {host.name: host.workdir for host in inventory.hosts}
    told: set[tuple[str, str]] = set()

    def ask(channel: HostChannel) -> tuple[str, Sequence[Remains]]:
        boot_id = channel.call("processes.boot_id", timeout_s=LOOK_TIMEOUT_S)
        return boot_id, channel.call(
            "leftovers.runs", timeout_s=LOOK_TIMEOUT_S, workdir=workdirs[channel.host]
        )

    found: dict[str, list[Left] | Exception] = {}
    for host, answer in on_all(channels, ask).items():
        if isinstance(answer, Exception):
            found[host] = answer
            continue
        boot_id, own = answer
        mine = _first(boot_id, own, told)
        found[host] = lefts(host, mine, records, {})
    return found


def end(
    channels: Mapping[str, HostChannel], inventory: Inventory, chosen: Sequence[Left]
) -> dict[str, Exception]:
    """End the chosen remains by their recorded ids; return host → the error there."""
    workdirs = {host.name: host.workdir for host in inventory.hosts}

    def act(channel: HostChannel) -> None:
        own = [each for each in chosen if each.host == channel.host]
        for each in own:
            if each.standing == "forgotten":
                timeout_s = GRACE_S + STOP_MARGIN_S + agents.COPYING_GRACE_S
                channel.call("stop", timeout_s=timeout_s, node_dir=each.node_dir, grace_s=GRACE_S)
        names = [(each.run, each.node) for each in own]
        timeout_s = GRACE_S + STOP_MARGIN_S
        channel.call(
            "leftovers.clean",
            timeout_s=timeout_s,
            workdir=workdirs[channel.host],
            names=names,
            grace_s=GRACE_S,
        )

    hosts = {each.host for each in chosen}
    results = on_all({host: channel for host, channel in channels.items() if host in hosts}, act)
    return {host: result for host, result in results.items() if isinstance(result, Exception)}
