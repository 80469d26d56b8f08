"""Gathers the facts of all hosts, checks them, and plans what each node runs; nothing is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel
from nodekit.deploy.launch import broken_hosts
from nodekit.deploy.launch.options import Options
from nodekit.deploy.plan import check, plan, script
from nodekit.deploy.plan.command import argv_of
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.plan.plan import Plan
from nodekit.deploy.plan.script import Script
from nodekit.deploy.preflight import checkup
from nodekit.deploy.records import runs
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import HostError, KitError, KitErrors
from nodekit.inventory.schema import Inventory


@contextmanager
def enough_channels(
    inventory: Inventory, options: Options, say: Callable[[str], None]
) -> Iterator[dict[str, HostChannel]]:
    """Channels to all hosts; an elastic job does with those that can be reached, if they are enough.

    Raises:
        KitError: with a line for each host that cannot be reached.
    """
    hosts, least = inventory.hosts, inventory.nodes.min
    problems: list[str] = []
    some = least < len(hosts)
    with cluster.channels(hosts, options.ssh, some=some, unreachable=problems.append) as channels:
        if len(channels) < least:
            few = f"{len(channels)} of at least {least} hosts can be reached"
            raise KitError("\n".join([*problems, few]))
        for problem in problems:
            say(f"warning: without {problem}")
        yield {host.name: channels[host.name] for host in hosts if host.name in channels}


def gather_facts(
    channels: Mapping[str, HostChannel],
    inventory: Inventory,
    options: Options,
    *,
    placed: str = "",
    unmade: Mapping[str, str] | None = None,
) -> tuple[dict[str, check.Facts], dict[str, tuple[str, ...]], list[Finding]]:
    """The facts of all hosts, checked; and what was found that may hurt, but need not.

    Args:
        channels: to the hosts.
        inventory: what the cluster is.
        options: the command line's.
        placed: where the code lies already, if it does.
        unmade: hosts whose interpreter is still to be made, and where: it cannot be checked.

    Raises:
        KitError: with everything that is wrong, on every host.
    """
    peers = cluster.peer_addresses(inventory.hosts)
    inventory = inventory.model_copy(
        update={"hosts": tuple(host for host in inventory.hosts if host.name in channels)}
    )
    files = script.hosts_own(argv_of(inventory, options.command))
    if options.skip_check:
        facts = check.gather(channels, inventory, peers=peers, files=files)
        findings = check.needed(inventory, facts)
    else:
        # Where the code lies in its place already, it need not be here, and was looked at before it was put there.
        own = Script() if placed else script.read(inventory, options.command)
        seen = checkup.survey(channels, inventory, own, peers=peers, files=files)
        facts = {name: each.facts for name, each in seen.items()}
        findings = checkup.examine(inventory, seen, own)
    for name, python in (unmade or {}).items():
        facts[name] = dataclasses.replace(facts[name], executable=python)
    findings = check.without_software(findings, unmade or {})
    # What an earlier run has left is no obstacle: if it is of this one, it is fenced off, and ended.
    problems = [each for each in findings if each.level == "failure" and each.check != "leftovers"]
    if problems:
        raise KitErrors(HostError(each.host, *each.problem) for each in problems)
    return facts, peers, [each for each in findings if each.level != "ok"]


def grouped(findings: Sequence[Finding]) -> list[str]:
    """A line for each; what is the same on several hosts is told once."""
    groups: dict[str, list[str]] = {}
    for each in findings:
        groups.setdefault(str(each.problem), []).append(each.host)
    return [f"{', '.join(hosts)}: {text}" for text, hosts in groups.items()]


def planned(
    inventory: Inventory, options: Options, *, master_port: int | None = None, some: bool = False
) -> Plan:
    """What each node would run, exactly; nothing is run.

    Args:
        inventory: what the cluster is.
        options: the command line's.
        master_port: None for one that is free now.
        some: plan an elastic job without hosts that cannot be reached, and tell of them, as `kit up` does.

    Raises:
        KitError: a host cannot be reached, or will not do.
    """
    package = sync.package()
    notice = options.ssh.notice
    reached = (
        enough_channels(inventory, options, notice)
        if some
        else cluster.channels(inventory.hosts, options.ssh)
    )
    with reached as all_channels:
        channels, _ = broken_hosts.leave_out(all_channels, inventory, notice)
        unmade = check.enter_what_is_there(channels, inventory)
        facts, peers, warnings = gather_facts(channels, inventory, options, unmade=unmade)
        planned = plan.build(
            inventory,
            facts,
            run_id=runs.new_id(inventory.name),
            peers=peers,
            master_port=master_port or 0,
            kit_digest=package.digest,
            command=options.command,
        )
        if master_port is None:
            planned = hold_port(channels, planned)
    for warning in grouped(warnings):
        notice(f"warning: {warning}")
    if unmade:
        names = ", ".join(unmade)
        notice(f"environment: kit up makes it first on {names}; what is in it was not looked at")
    return planned


def hold_port(channels: Mapping[str, HostChannel], planned: Plan) -> Plan:
    """The plan with a port found free at the training address of the rendezvous host, and kept for its agent."""
    first = planned.nodes[0]
    port: int = channels[first.name].call("hold_port", timeout_s=CALL_TIMEOUT_S, address=first.local_addr)
    nodes = tuple(
        dataclasses.replace(node, master_addr=first.local_addr, master_port=port) for node in planned.nodes
    )
    return dataclasses.replace(planned, nodes=nodes)
