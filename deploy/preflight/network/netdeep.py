"""`kit check --deep`: a real rendezvous and one all-reduce over all hosts, and a diagnosis if it fails."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nodekit.deploy.agent.hang import flight
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import BOOT, HostChannel, on_all, source
from nodekit.deploy.host.probes.network.netstate import Firewall
from nodekit.deploy.plan import check, plan
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.plan.gpus import Gpu, environment, share
from nodekit.deploy.preflight.network import firewall, netpairs, outcomes
from nodekit.deploy.preflight.network.netcheck import FINISH_S, end_of, listening
from nodekit.inventory.errors import HostError
from nodekit.inventory.schema import Host, Inventory

NUMEL = 1 << 18
"""1 MB of floats: large enough to need full-size packets."""
GROUP_S = {"gloo": 10.0, "nccl": 30.0}
"""Timeout of the process group, once all hosts have arrived."""
CALL_S = 2.0
GRACE_S = 2.0  # for the others to report, after one has failed
PATIENCE_S = 5.0  # for a host that cannot reach an existing rendezvous
_POLL_S = 0.5
_MAX_DIAGNOSIS_S, _DIAGNOSIS_SHARE = 8.0, 0.3  # part of the deadline for the diagnosis
# stage → what a host does after it
_DOES = {
    "": "did not start",
    "imports": "imports torch",
    "calls": "calls the rendezvous",
    "arrived": "waits for the others",
    "complete": "connects to the others",
    "group": "reduces",
    "reduced": "is done",
}
_STAGES = list(_DOES)
# gloo's errors name the address, as remote=[198.18.0.11]:43210 or [::ffff:198.18.0.11]:43210
_REMOTE = re.compile(r"\[(?:::ffff:)?([0-9a-fA-F.:]+)\]:(\d+)")


@dataclass
class Progress:
    """The progress of one host."""

    stage: str = ""
    seconds: float = 0.0
    problem: str = ""
    """Why it cannot reach the rendezvous."""
    num_ranks: int = 1
    """The number of ranks of this host; a stage is reached when all of them have reached it."""
    stages: dict[int, str] = field(default_factory=dict)
    """Local rank → its last stage."""
    reduced: Mapping[str, Any] = field(default_factory=dict)
    status: int | None = None
    errors: str = ""
    lost: str = ""
    """Why it could not be started, or the host no longer answers."""
    python: str = "python"
    nccl: list[str] = field(default_factory=list)
    """Lines in which NCCL has warned."""

    def read_line(self, line: str) -> None:
        """Process one line of the job's output."""
        try:
            said = json.loads(line)
        except ValueError:  # a library that prints
            if "NCCL WARN" in line:
                self.nccl.append(line.strip())
            return
        self.stages[said.get("local_rank", 0)] = said["stage"]
        self.stage = min((self.stages.get(rank, "") for rank in range(self.num_ranks)), key=_STAGES.index)
        self.seconds = said["s"]
        self.problem = said.get("problem", "")
        if said["stage"] == "reduced":
            self.reduced = {**said, "is_right": said["is_right"] and self.reduced.get("is_right", True)}

    @property
    def is_done(self) -> bool:
        """Whether its all-reduce had the right result."""
        return self.status == 0 and self.stage == "reduced" and bool(self.reduced.get("is_right"))

    @property
    def has_failed(self) -> bool:
        """Whether it failed by itself."""
        return bool(self.lost or self.problem or self.status)

    def reached(self, stage: str) -> bool:
        """Whether it has reached a stage."""
        return _STAGES.index(self.stage) >= _STAGES.index(stage)


@dataclass(frozen=True)
class Call:
    """A failed connection of one host to another."""

    source: str
    target: str
    port: int
    problem: str


def deep_findings(
    channels: Mapping[str, HostChannel],
    inventory: Inventory,
    facts: Mapping[str, Facts],
    *,
    deadline_s: float,
    port: int = 0,
) -> list[Finding]:
    """Run a rendezvous and an all-reduce with a process on every host; nothing is left behind.

    Args:
        channels: to the hosts; one that is not among them is left out.
        inventory: of the cluster.
        facts: of the same hosts.
        deadline_s: time limit, including the diagnosis of a failure.
        port: of the rendezvous, on the first host; 0: any free port, as in a run.
    """
    left_s = netpairs.deadline(deadline_s - FINISH_S)
    hosts = [host for host in inventory.hosts if host.name in channels and host.name in facts]
    if not hosts:
        return []
    peers = cluster.peer_addresses(inventory.hosts)
    chosen, problems = check.choose_interfaces(inventory, hosts, facts, peers)
    if problems:
        return _failures(problems, "an interface to meet the others on", lambda _: f"see {inventory.path}")
    limit_s = deadline_s - min(_MAX_DIAGNOSIS_S, deadline_s * _DIAGNOSIS_SHARE) - FINISH_S
    gpus = share(hosts, {host.name: facts[host.name].gpus for host in hosts})
    has_nccl = all(gpus[host.name] and facts[host.name].gpus.row.backend == "nccl" for host in hosts)
    backend = "nccl" if has_nccl else "gloo"
    with listening(channels, hosts, facts, chosen, None, left_s=left_s) as (session, answers):
        here, silent = netpairs.told_apart(answers)
        if silent:
            return _failures(
                silent, "an answer from its python", lambda host: f"log in to {host} and see: uptime; dmesg"
            )
        first = hosts[0].name
        address = chosen[first][1]
        try:
            port = channels[first].call(
                "netjob.hold", timeout_s=CALL_S, session=session, address=address, port=port
            )
        except HostError as error:
            what = f"port {port} cannot be listened at: {error.problem.found}"
            cure = f"on {first}: sudo ss -ltnp 'sport = :{port}' names who has it"
            return [_failure(first, what, f"port {port} free for the rendezvous", error.problem.cure or cure)]
        num_ranks = {host.name: len(gpus[host.name]) if backend == "nccl" else 1 for host in hosts}
        settings = _settings(sum(num_ranks.values()), backend, address, port, limit_s)
        environments = {host.name: _environment(host, inventory, facts, chosen, gpus) for host in hosts}
        progress = _run(channels, session, hosts, facts, settings, environments, num_ranks, limit_s=limit_s)
        if all(each.is_done for each in progress.values()):
            return _fine(progress, backend, sum(num_ranks.values()))
        on_all(  # ends hanging processes, so that the hosts are free for the diagnosis
            {host.name: channels[host.name] for host in hosts},
            lambda channel: channel.call("netjob.end_job", timeout_s=FINISH_S, session=session),
        )
        why = _diagnosis(channels, session, progress, chosen, here, port=port, left_s=left_s)
    return [_summary(progress, backend), *why]


def _diagnosis(
    channels: Mapping[str, HostChannel],
    session: str,
    progress: Mapping[str, Progress],
    chosen: Mapping[str, tuple[str, str]],
    answers: Mapping[str, Any],
    *,
    port: int,
    left_s: Callable[[], float],
) -> list[Finding]:
    """Return why it failed, from the hosts' own errors and a test of every pair."""
    ends = {name: end_of(name, chosen[name], answer) for name, answer in answers.items()}
    broken, calls = _told(progress, chosen, port, {name: end.port_range for name, end in ends.items()})
    ends = {name: end for name, end in ends.items() if not progress[name].lost}
    pairs, _ = netpairs.measure(channels, session, ends, left_s=left_s)
    ill = {name for key, pair in pairs.items() if pair.failed for name in key}
    ill |= {name for call in calls for name in (call.source, call.target)}
    firewalls = netpairs.ask_firewalls(channels, ill & set(ends), left_s=left_s)
    called = [_called(call, chosen, firewalls) for call in calls]
    known = {finding.host for finding in called}
    found = outcomes.findings(pairs, ends, firewalls, port=port, port_matters=True)
    others = [dataclasses.replace(finding, check="deep") for finding in found if finding.host not in known]
    return [*broken, *called, *others]


def _settings(world_size: int, backend: str, address: str, port: int, limit_s: float) -> dict[str, Any]:
    """Return the settings of all processes."""
    return {
        "world_size": world_size,
        "backend": backend,
        "master_addr": address,
        "master_port": port,
        "limit_s": limit_s,
        "group_s": min(GROUP_S[backend], limit_s),
        "numel": NUMEL,
    }


def _environment(
    host: Host,
    inventory: Inventory,
    facts: Mapping[str, Facts],
    chosen: Mapping[str, tuple[str, str]],
    gpus: Mapping[str, Sequence[Gpu]],
) -> dict[str, str]:
    """Return the environment of a run's processes, as far as it concerns the network."""
    env = {
        **plan.sockets(*chosen[host.name]),
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    found = facts[host.name]
    env |= flight.read_once({}, found.torch or "")  # also which NCCL backend it is
    return {**env, **environment(found.gpus, gpus[host.name]), **host.env, **inventory.job.env}


def _run(
    channels: Mapping[str, HostChannel],
    session: str,
    hosts: Sequence[Host],
    facts: Mapping[str, Facts],
    settings: Mapping[str, Any],
    environments: Mapping[str, Mapping[str, str]],
    num_ranks: Mapping[str, int],
    *,
    limit_s: float,
) -> dict[str, Progress]:
    """Start the job on all hosts and follow it until it ends, fails, or exceeds the limit."""
    left_s = netpairs.deadline(limit_s)
    first = hosts[0].name
    ranks = {host.name: sum(num_ranks[each.name] for each in hosts[:at]) for at, host in enumerate(hosts)}
    progress = {
        host.name: Progress(python=facts[host.name].executable, num_ranks=num_ranks[host.name])
        for host in hosts
    }
    failed = threading.Event()
    program = source("nodekit.deploy.preflight.network.netdeep_job")

    def follow(channel: HostChannel) -> None:
        own, seen = progress[channel.host], 0
        grace_s: Callable[[], float] | None = None
        patience_s: Callable[[], float] | None = None
        place = {"rank": ranks[channel.host], "num_local_ranks": num_ranks[channel.host]}
        try:
            channel.call(
                "netjob.start_job",
                timeout_s=CALL_S,
                session=session,
                argv=[facts[channel.host].executable, "-c", BOOT],
                program=program,
                settings={**settings, **place},
                env=environments[channel.host],
            )
            while own.status is None and left_s() and not (grace_s and not grace_s()):
                wait_s = min(_POLL_S, left_s())
                said = channel.call(
                    "netjob.job_said", timeout_s=wait_s + CALL_S, session=session, seen=seen, wait_s=wait_s
                )
                seen += len(said["lines"])
                for line in said["lines"]:
                    own.read_line(line)
                own.status, own.errors = said["status"], "\n".join([said["errors"], *own.nccl])
                if not (own.problem and progress[first].reached("arrived")):
                    patience_s = None
                elif patience_s is None:
                    patience_s = netpairs.deadline(PATIENCE_S)
                if own.status or (patience_s and not patience_s()):
                    failed.set()
                if failed.is_set() and grace_s is None:
                    grace_s = netpairs.deadline(GRACE_S)
        except HostError as error:
            own.lost = str(error.problem)
            failed.set()

    on_all({host.name: channels[host.name] for host in hosts}, follow)
    return progress


# --- what it says ---------------------------------------------------------------------------------------------


def _failure(host: str, found: str, wanted: str, cure: str, hosts: tuple[str, ...] = ()) -> Finding:
    return Finding("deep", host, "failure", found, wanted, cure, hosts)


def _failures(errors: Mapping[str, HostError], wanted: str, cure: Callable[[str], str]) -> list[Finding]:
    return [_failure(host, error.problem.found, wanted, cure(host)) for host, error in errors.items()]


def _fine(progress: Mapping[str, Progress], backend: str, num_ranks: int) -> list[Finding]:
    def told(each: Progress) -> str:
        ms = each.reduced["seconds"] * 1000
        if backend == "gloo":
            return f"gloo, {ms:.0f} ms"
        return f"nccl, {num_ranks} GPUs, {ms:.2f} ms (after {each.reduced['start_s']:.1f} s to start NCCL)"

    return [Finding("deep", name, "ok", told(each)) for name, each in progress.items()]


def _summary(progress: Mapping[str, Progress], backend: str) -> Finding:
    """Return who waited for whom, and the stage of each host that did not arrive; pure."""
    arrived = [name for name, each in progress.items() if each.reached("arrived")]
    absent = [name for name in progress if name not in arrived]
    if absent:
        # After a failure the others get no more time to arrive.
        late = [name for name in absent if progress[name].has_failed] or absent
        found = f"{', '.join(arrived)} waited for " if arrived else "did not arrive: "
        found += ", ".join(f"{name} ({_doing(progress[name])})" for name in late)
        if on_the_way := [name for name in absent if name not in late]:
            found += f"; {', '.join(on_the_way)} {'was' if len(on_the_way) == 1 else 'were'} still on the way"
    else:
        late = [name for name, each in progress.items() if not each.is_done]
        doing = ", ".join(f"{name} {_doing(each)}" for name, each in progress.items())
        found = f"all arrived, but there was no all-reduce ({backend}): {doing}"
    return _failure(
        ", ".join(late),
        found,
        f"a rendezvous of {len(progress)} hosts and one all-reduce",
        "mend what is named with it; kit check without --deep tries every pair of hosts",
        tuple(late),
    )


def _doing(each: Progress) -> str:
    if each.lost:
        return each.lost
    ended = f", then ended ({_end_words(each)})" if each.status else ""
    return f"{_DOES[each.stage]}{f' ({each.problem})' if each.problem else ''}{ended}"


def _end_words(each: Progress) -> str:
    """Return how the process ended, with its last error line."""
    status = each.status or 0
    how = f"signal {-status}" if status < 0 else f"status {status}"
    lines = [line.strip() for line in each.errors.splitlines()]
    last = next(
        (
            line
            for line in reversed(lines)
            if re.match(r"[\w.]*(Error|Exception)\b|terminate| *what\(\)|.*NCCL WARN", line)
        ),
        "",
    )
    last = re.sub(r"\[/\S+\] ", "", last)  # a location in torch's source
    return f"{how}: {last[:200]}" if last else how


def _told(
    progress: Mapping[str, Progress],
    chosen: Mapping[str, tuple[str, str]],
    port: int,
    ranges: Mapping[str, Sequence[int]],
) -> tuple[list[Finding], list[Call]]:
    """Return the hosts' own errors: broken torch installations, and failed connections; pure."""
    first = next(iter(progress))
    by_address = {address: name for name, (_, address) in chosen.items()}
    broken: list[Finding] = []
    calls: list[Call] = []
    for name, each in progress.items():
        if each.lost:
            cure = f"on {name}: {each.python} -c 'import torch'; uptime; dmesg | tail"
            broken.append(_failure(name, each.lost, "a python that starts, and a host that answers", cure))
        elif each.stage == "calls" and each.problem:
            calls.append(Call(name, first, port, each.problem))
        elif each.status and not each.reached("arrived"):
            broken.append(
                _failure(
                    name,
                    f"{_DOES[each.stage]}, then ended ({_end_words(each)})",
                    "a python whose torch runs",
                    f"on {name}: {each.python} -c 'import torch, torch.distributed'",
                )
            )
        # "closed by peer" is the error of a rank whose peer failed first.
        elif each.status and "closed by peer" not in each.errors:
            for address, number in reversed(_REMOTE.findall(each.errors)):
                if (other := by_address.get(address, name)) != name:
                    problem = "refused" if "refused" in each.errors else "no answer"
                    calls.append(Call(name, other, meant(int(number), *ranges[other]), problem))
                    break
    return broken, calls


def meant(port: int, low: int, high: int) -> int:
    """Return the port that gloo means: as of torch 2.13 it prints most ports in network byte order."""
    swapped = (port & 0xFF) << 8 | port >> 8
    return swapped if low <= swapped <= high else port


def _called(call: Call, chosen: Mapping[str, tuple[str, str]], firewalls: Mapping[str, Firewall]) -> Finding:
    cure, because = firewall.cure(
        firewalls,
        source=call.source,
        target=call.target,
        addresses={name: address for name, (_, address) in chosen.items()},
        interfaces={name: interface for name, (interface, _) in chosen.items()},
        port=call.port,
    )
    return _failure(
        f"{call.source} → {call.target}",
        f"port {call.port} {call.problem}" + (f"; {because}" if because else ""),
        f"TCP to {chosen[call.target][1]}:{call.port}, where {call.target} listens",
        cure,
        (call.source, call.target),
    )
