"""`kit check`: examines all hosts in parallel, within a time limit, for what would keep a job from running."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import HostChannel, all_or_raise, on_all
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.plan import check, plan, script
from nodekit.deploy.plan.command import argv_of, refuse_options
from nodekit.deploy.plan.findings import Finding, failures
from nodekit.deploy.plan.script import Script
from nodekit.deploy.preflight import gpus, leftovers, software
from nodekit.deploy.preflight.network.netcheck import network_findings
from nodekit.deploy.preflight.network.netdeep import deep_findings
from nodekit.deploy.preflight.visits import CONNECT_SHARE, RESERVE_S, Later, Seen, Visits, visit
from nodekit.deploy.records import secret_files
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory

QUICK_TIMEOUT_S = 10.0
MAX_BUSY_FACTOR = 20.0
DEEP_TIMEOUT_S = 60.0
COLUMNS = ("access", "workdir", "software", "gpus", "clock", "network", "leftovers", "deep")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit check`."""

    inventory: Path
    command: tuple[str, ...] | None = None
    deep: bool = False
    timeout_s: float | None = None
    """None: `QUICK_TIMEOUT_S`, longer if this machine is busy."""
    ssh: SshOptions = field(default_factory=SshOptions)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of `kit check`."""

    inventory: Path
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether something would keep a job from running."""
        return any(each.level == "failure" for each in self.findings)


def run(options: Options) -> Report:
    """Examine all hosts.

    Raises:
        KitError: the inventory cannot be used, or is Slurm's.
    """
    started = time.monotonic()
    inventory = load_inventory(options.inventory)
    if not inventory.hosts:
        raise KitError(
            f"{inventory.path}: kit check looks at hosts, and which nodes the job gets is Slurm's to say",
            cure="list them as hosts: in another file, or see sinfo",
        )
    timeout_s, busy = options.timeout_s, 1.0
    if timeout_s is None:
        busy = how_busy()
        timeout_s = QUICK_TIMEOUT_S * busy
        if busy >= 2:
            options.ssh.notice(
                f"this machine is busy: kit check takes up to {timeout_s:.0f} s here, not {QUICK_TIMEOUT_S:.0f}"
            )
    findings, own = _here(inventory, options.command)
    visits = Visits(
        inventory, own, options.ssh,
        files=_files(inventory, options.command), timeout_s=timeout_s, busy=busy,
        deadline=started + timeout_s - RESERVE_S,
    )  # fmt: skip
    visits.wait(started + CONNECT_SHARE * timeout_s + RESERVE_S)
    if not visits.seen():
        visits.wait(visits.deadline)
    reached = visits.seen()
    network = (
        _network(visits.channels(reached), inventory, reached, deadline=visits.deadline) if reached else []
    )
    visits.wait(visits.deadline)  # for hosts that were too late for the network check
    seen = visits.seen()
    findings += visits.access()
    unmade = visits.unmade()
    findings += check.without_software(examine(inventory, seen, own), unmade)
    what = "its environment is not made yet, so what is in it was not looked at"
    findings += [
        Finding("software", name, "warning", what, "a host that has it", "kit up makes it first")
        for name in unmade
    ]
    findings += network
    if len(seen) == len(inventory.hosts) and not any(each.level == "failure" for each in findings):
        findings += _plan(inventory, seen, options.command, visits.peers())
    if options.deep:
        findings += _deep(visits.channels(seen), inventory, seen, findings)
    visits.leave()
    return Report(
        inventory=options.inventory,
        hosts=tuple(host.name for host in inventory.hosts),
        findings=tuple(findings),
        seconds=time.monotonic() - started,
    )


def survey(
    channels: Mapping[str, HostChannel],
    inventory: Inventory,
    own: Script,
    *,
    peers: Mapping[str, tuple[str, ...]],
    files: Sequence[str] = (),
) -> dict[str, Seen]:
    """Examine connected hosts for `kit up`; `files` are the hosts' own files that the command would run.

    Raises:
        KitError: with one line per host that gave no answer.
    """
    hosts = {host.name: host for host in inventory.hosts}

    def ask(channel: HostChannel) -> Seen:
        of = peers[channel.host]
        return visit(channel, hosts[channel.host], inventory, own, peers=of, files=files)

    return all_or_raise(on_all(channels, ask))


def examine(inventory: Inventory, seen: Mapping[str, Seen], own: Script) -> list[Finding]:
    """Return all findings but access and network; pure, except for the runs on record here."""
    facts = {name: each.facts for name, each in seen.items()}
    probes = {name: each.probe for name, each in seen.items()}
    found = [
        *check.needed(inventory, facts),
        *software.findings(inventory, facts, probes, own),
        *gpus.findings(inventory, facts, probes),
        *check.clocks(facts),
        *check.addresses(inventory, facts, cluster.peer_addresses(inventory.hosts)),
        *leftovers.findings(inventory, facts, probes),
    ]
    bad = {(each.check, each.host) for each in found if each.level != "ok"}
    return [each for each in found if each.level != "ok" or (each.check, each.host) not in bad]


def how_busy(load: Path = Path("/proc/loadavg"), cores: int | None = None) -> float:
    """Return how many times longer everything takes here than on an idle machine: 1 to `MAX_BUSY_FACTOR`.

    Args:
        load: the file with the load average of the last minute and the number of runnable processes.
        cores: cores available to this process. None: ask the kernel.
    """
    try:
        words = load.read_text().split()
        wanted = max(float(words[0]), float(words[3].partition("/")[0]))
    except (OSError, ValueError, IndexError):  # not Linux
        return 1.0
    return min(MAX_BUSY_FACTOR, max(1.0, wanted / (cores or len(os.sched_getaffinity(0)))))


def _here(inventory: Inventory, command: Sequence[str] | None) -> tuple[list[Finding], Script]:
    """Check this machine: the code and the secrets."""
    hosts = tuple(host.name for host in inventory.hosts)
    found: list[Finding] = []
    own = Script()

    def refused(error: KitError, wanted: str) -> None:
        found.extend(failures("software", "this machine", error, wanted, hosts))

    try:
        own = script.read(inventory, command)
    except KitError as error:
        refused(error, "the job's script")
    except OSError as error:
        refused(KitError(str(error)), "the job's script")
    if absent := [name for name in inventory.job.secrets if name not in os.environ]:
        text = f"job.secrets names {', '.join(absent)}, not set in this environment"
        refused(KitError(text, cure=f"export {absent[0]}=…"), "their values")
    try:
        secret_files.notify_secrets(inventory)
    except KitError as error:
        refused(error, "their values")
    return found, own


def _plan(
    inventory: Inventory,
    seen: Mapping[str, Seen],
    command: Sequence[str] | None,
    peers: Mapping[str, tuple[str, ...]],
) -> list[Finding]:
    """Return why `kit up` could not plan the job, if so."""
    facts = {name: each.facts for name, each in seen.items()}
    try:
        planned = plan.build(
            inventory, facts, run_id="check", peers=peers, master_port=0, kit_digest="", command=command
        )
        refuse_options(
            planned.nodes[0].argv,
            Path(inventory.job.code).expanduser(),
            world_size=planned.world_size,
            env=planned.nodes[0].env,
            modules={name: found.modules for name, found in facts.items()},
        )
    except KitError as error:
        return failures("software", "the job", error, "a job that can be started", tuple(facts))
    return []


def _files(inventory: Inventory, command: Sequence[str] | None) -> tuple[str, ...]:
    try:
        return script.hosts_own(argv_of(inventory, command))
    except KitError:
        return ()  # another launcher, which `_here` reports


def _network(
    channels: Mapping[str, HostChannel], inventory: Inventory, seen: Mapping[str, Seen], *, deadline: float
) -> list[Finding]:
    facts = {name: each.facts for name, each in seen.items()}
    left_s = max(0.1, deadline - time.monotonic())
    later: Later[list[Finding]] = Later(
        lambda: network_findings(channels, inventory, facts, deadline_s=left_s)
    )
    if (found := later.get(left_s + RESERVE_S / 2)) is not None:
        return found
    # It has a time limit of its own; this one ensures that the rest is not delayed.
    text, cure = f"not known: no answer within {left_s:.0f} s", "give it more time with --timeout"
    return [Finding("network", "all hosts", "warning", text, "an answer", cure, tuple(facts))]


def _deep(
    channels: Mapping[str, HostChannel],
    inventory: Inventory,
    seen: Mapping[str, Seen],
    findings: Sequence[Finding],
) -> list[Finding]:
    """Try a real rendezvous and an all-reduce, unless a failure is known already."""
    if any(each.level == "failure" for each in findings):
        hosts = tuple(host.name for host in inventory.hosts)
        wanted, cure = "no failure in the other columns", "mend those first, and run kit check --deep again"
        return [Finding("deep", "all hosts", "warning", "not tried", wanted, cure, hosts)]
    facts = {name: each.facts for name, each in seen.items()}
    return deep_findings(channels, inventory, facts, deadline_s=DEEP_TIMEOUT_S)
