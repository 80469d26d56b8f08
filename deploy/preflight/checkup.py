"""`kit check`: looks at all hosts at once, never longer than it may, and says what would keep a job from running."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.connect.link import Link, on_all
from nodekit.deploy.notify import notify
from nodekit.deploy.plan import check, plan, script
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.plan.script import Script
from nodekit.deploy.preflight import gpus, leftovers, software
from nodekit.deploy.preflight.network.netcheck import network_findings
from nodekit.deploy.preflight.network.netdeep import deep_findings
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Host, Inventory
from nodekit.training.engine_info import LIBRARIES
from nodekit.training.reporting.trackers import TRACKERS

T = TypeVar("T")

QUICK_TIMEOUT_S = 10.0
MOST_BUSY = 20.0
DEEP_TIMEOUT_S = 60.0
CONNECT_SHARE = 0.6  # of that, for logging in: the rest is for the network, between those that can be reached
RESERVE_S = 0.5  # at the end, to close the links and to print
COLUMNS = ("access", "workdir", "software", "gpus", "clock", "network", "leftovers", "deep")
SLOW_RTT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line of `kit check` says."""

    inventory: Path
    command: tuple[str, ...] | None = None
    deep: bool = False
    timeout_s: float | None = None
    """None: `QUICK_TIMEOUT_S`, and more as far as this machine has other things to do."""
    ssh: SshOptions = field(default_factory=SshOptions)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found."""

    inventory: Path
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether something would keep a job from running."""
        return any(each.level == "failure" for each in self.findings)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One host as it has answered."""

    facts: Facts
    probe: Mapping[str, Any]


def run(options: Options) -> Report:
    """Look at all hosts.

    Raises:
        KitError: the inventory cannot be used, or is Slurm's.
    """
    started = time.monotonic()
    inventory = load_inventory(options.inventory)
    if inventory.slurm is not None:
        raise KitError(
            f"{inventory.path}: kit check looks at hosts, and which nodes the job gets is Slurm's to say; "
            "list them as hosts: in another file, or see sinfo"
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
    visits = _Visits(
        inventory, own, options.ssh,
        files=_files(inventory, options.command), timeout_s=timeout_s, busy=busy,
        deadline=started + timeout_s - RESERVE_S,
    )  # fmt: skip
    visits.wait(started + CONNECT_SHARE * timeout_s + RESERVE_S)
    if not visits.seen():
        visits.wait(visits.deadline)
    reached = visits.seen()
    network = _network(visits.links(reached), inventory, reached, deadline=visits.deadline) if reached else []
    visits.wait(visits.deadline)  # for who came too late for that
    seen = visits.seen()
    findings += visits.access()
    unmade = visits.unmade()
    findings += check.without_software(examine(inventory, seen, own), unmade)
    findings += [
        Finding(
            check="software",
            host=name,
            level="warning",
            found="its environment is not made yet, so what is in it was not looked at",
            wanted="a host that has it",
            cure="kit up makes it first",
        )
        for name in unmade
    ]
    findings += network
    if len(seen) == len(inventory.hosts) and not any(each.level == "failure" for each in findings):
        findings += _plan(inventory, seen, options.command, visits.peers())
    if options.deep:
        findings += _deep(visits.links(seen), inventory, seen, findings)
    visits.leave()
    return Report(
        inventory=options.inventory,
        hosts=tuple(host.name for host in inventory.hosts),
        findings=tuple(findings),
        seconds=time.monotonic() - started,
    )


def survey(
    links: Mapping[str, Link],
    inventory: Inventory,
    own: Script,
    *,
    kit_digest: str,
    peers: Mapping[str, tuple[str, ...]],
    files: Sequence[str] = (),
) -> dict[str, Seen]:
    """Look at hosts that there are links to, as `kit up` has them; `files` are those that the command runs there.

    Raises:
        KitError: with one line per host that gave no answer.
    """
    hosts = {host.name: host for host in inventory.hosts}

    def ask(link: Link) -> Seen:
        of = peers[link.host]
        return _look(link, hosts[link.host], inventory, own, kit_digest=kit_digest, peers=of, files=files)

    return check.all_or_raise(on_all(links, ask))


def examine(inventory: Inventory, seen: Mapping[str, Seen], own: Script) -> list[Finding]:
    """Everything but access and network; pure, but for the runs on record here."""
    facts = {name: each.facts for name, each in seen.items()}
    probes = {name: each.probe for name, each in seen.items()}
    found = [
        *check.needed(inventory, facts),
        *software.findings(inventory, facts, probes, own),
        *gpus.findings(inventory, facts, probes),
        *check.clocks(inventory, facts),
        *leftovers.findings(inventory, facts, probes),
    ]
    bad = {(each.check, each.host) for each in found if each.level != "ok"}
    return [each for each in found if each.level != "ok" or (each.check, each.host) not in bad]


def how_busy(load: Path = Path("/proc/loadavg"), cores: int | None = None) -> float:
    """How many times longer than on an idle machine everything takes here: from 1 to `MOST_BUSY`.

    Args:
        load: the file that has the load of the last minute, and how many processes want to run now.
        cores: how many there are for us. None: as many as the kernel gives us.
    """
    try:
        words = load.read_text().split()
        wanted = max(float(words[0]), float(words[3].partition("/")[0]))
    except (OSError, ValueError, IndexError):  # not Linux
        return 1.0
    return min(MOST_BUSY, max(1.0, wanted / (cores or len(os.sched_getaffinity(0)))))


def _look(
    link: Link,
    host: Host,
    inventory: Inventory,
    own: Script,
    *,
    kit_digest: str,
    peers: Sequence[str],
    files: Sequence[str],
    timeout_s: float = check.FACTS_TIMEOUT_S,
) -> Seen:
    paths = {**host.env, **inventory.job.env}.get("PYTHONPATH", "")
    found = link.call(
        "probes.probe",
        timeout_s=timeout_s,
        workdir=host.workdir,
        kit_digest=kit_digest,
        peers=peers,
        modules=(*LIBRARIES, *TRACKERS),
        imports=own.imports,
        source=own.source,
        path=[each for each in paths.split(os.pathsep) if each],
        files=files,
    )
    return Seen(facts=check.facts_of(link, found["facts"]), probe=found)


def _here(inventory: Inventory, command: Sequence[str] | None) -> tuple[list[Finding], Script]:
    """What can be told from here: whether the code and the secrets are there."""
    hosts = tuple(host.name for host in inventory.hosts)
    found = []
    own = Script()

    def failure(text: str, wanted: str, cure: str) -> Finding:
        return Finding(
            check="software",
            host="this machine",
            level="failure",
            found=text,
            wanted=wanted,
            cure=cure,
            hosts=hosts,
        )

    try:
        own = script.read(inventory, command)
    except (KitError, OSError) as error:
        text, cure = split(str(error))
        found.append(failure(text, "the job's script", cure))
    if absent := [name for name in inventory.job.secrets if name not in os.environ]:
        text = f"job.secrets names {', '.join(absent)}, not set in this environment"
        found.append(failure(text, "their values", f"export {absent[0]}=…"))
    try:
        notify.secrets_of(inventory)
    except KitError as error:
        text, cure = split(str(error))
        found.append(failure(text, "their values", cure))
    return found, own


def _plan(
    inventory: Inventory,
    seen: Mapping[str, Seen],
    command: Sequence[str] | None,
    peers: Mapping[str, tuple[str, ...]],
) -> list[Finding]:
    """What `kit up` would refuse when it puts together what each node runs."""
    facts = {name: each.facts for name, each in seen.items()}
    try:
        planned = plan.build(
            inventory, facts, run_id="check", peers=peers, master_port=0, kit_digest="", command=command
        )
        plan.refuse_options(
            planned.nodes[0].argv,
            Path(inventory.job.code).expanduser(),
            world_size=planned.world_size,
            env=planned.nodes[0].env,
            modules={name: found.modules for name, found in facts.items()},
        )
    except KitError as error:
        text, cure = split(str(error))
        wanted = "a job that can be started"
        return [
            Finding(
                check="software",
                host="the job",
                hosts=tuple(facts),
                level="failure",
                found=text,
                wanted=wanted,
                cure=cure,
            )
        ]
    return []


def split(problem: str) -> tuple[str, str]:
    """What was found, and what to do: our errors have that after their last semicolon."""
    found, _, cure = problem.rpartition("; ")
    return (found, cure) if found else (problem, "")


def _files(inventory: Inventory, command: Sequence[str] | None) -> tuple[str, ...]:
    try:
        return script.hosts_own(plan.argv_of(inventory, command))
    except KitError:
        return ()  # another launcher, which `_here` tells


class _Visits:
    """The way to each host and back, each in its own thread; who is late is left behind."""

    def __init__(
        self,
        inventory: Inventory,
        own: Script,
        ssh: SshOptions,
        *,
        files: Sequence[str],
        timeout_s: float,
        busy: float,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self._inventory = inventory
        self._own = own
        self._files = files
        self._ssh = ssh
        self._timeout_s = timeout_s
        self._facts_s = check.FACTS_TIMEOUT_S * busy
        self._digest = sync.package().digest
        self._lock = threading.Lock()
        self._all_done = threading.Condition(self._lock)
        self._links: dict[str, Link] = {}
        self._seen: dict[str, Seen] = {}
        self._unmade: dict[str, str] = {}
        self._failed: dict[str, Exception] = {}
        self._stage = {host.name: "connecting" for host in inventory.hosts}
        self._is_over = False
        if any(host.connection == "ssh" for host in inventory.hosts):
            import fabric  # noqa: F401  # once and here: threads that import it at the same time trip over each other
        self._peers = _Later(lambda: cluster.peer_addresses(inventory.hosts))
        for host in inventory.hosts:
            threading.Thread(target=self._visit, args=(host,), daemon=True).start()

    def _visit(self, host: Host) -> None:
        try:
            timeout_s = round(CONNECT_SHARE * self._timeout_s, 1)
            link = cluster.open_link(host, self._ssh, timeout_s=timeout_s)
            with self._lock:
                is_late = self._is_over
                if not is_late:
                    self._links[host.name] = link
                    self._stage[host.name] = "looking around there"
            if is_late:
                return link.close()
            unmade = check.enter_what_is_there({host.name: link}, self._inventory)
            peers = self.peers().get(host.name, ())
            seen = _look(
                link, host, self._inventory, self._own,
                kit_digest=self._digest, peers=peers, files=self._files, timeout_s=self._facts_s,
            )  # fmt: skip
            with self._lock:
                self._unmade |= unmade
                self._seen[host.name] = seen
        except Exception as error:  # told for this host, and the others go on
            with self._lock:
                self._failed[host.name] = error
        finally:
            with self._lock:
                self._stage.pop(host.name, None)
                self._all_done.notify_all()

    def peers(self) -> Mapping[str, tuple[str, ...]]:
        """For each host the addresses of the others; nothing where a name server takes too long."""
        return self._peers.get(max(0.1, self.deadline - time.monotonic())) or {}

    def wait(self, until: float) -> None:
        """Until all are back, or that time has come."""
        with self._all_done:
            while self._stage and (left_s := until - time.monotonic()) > 0:
                self._all_done.wait(left_s)

    def seen(self) -> dict[str, Seen]:
        """Who has answered so far, in the inventory's order."""
        with self._lock:
            return {
                host.name: self._seen[host.name] for host in self._inventory.hosts if host.name in self._seen
            }

    def unmade(self) -> list[str]:
        """Who has no environment yet, of those who have answered."""
        with self._lock:
            return [host.name for host in self._inventory.hosts if host.name in self._unmade]

    def links(self, hosts: Iterable[str]) -> dict[str, Link]:
        """Links to some who have answered."""
        with self._lock:
            return {name: self._links[name] for name in hosts}

    def access(self) -> list[Finding]:
        """The column access.

        Raises:
            Exception: a mistake of our own, with its traceback.
        """
        with self._lock:
            self._is_over = True
            for error in self._failed.values():
                if not isinstance(error, KitError):
                    raise error
            return [self._access(host) for host in self._inventory.hosts]

    def _access(self, host: Host) -> Finding:
        name = host.name
        if name in self._seen:
            rtt_s = self._seen[name].facts.rtt_s
            level = "ok" if rtt_s < SLOW_RTT_S else "warning"
            if level == "ok":
                return Finding(check="access", host=name, level="ok", found=f"{rtt_s * 1000:.1f} ms")
            return Finding(
                check="access",
                host=name,
                level="warning",
                found=f"an answer takes {rtt_s * 1000:.0f} ms",
                wanted=f"less than {SLOW_RTT_S * 1000:.0f} ms",
                cure="see whether it is busy (`uptime` there) or far away",
            )
        if name in self._failed:
            error = self._failed[name]
            problem = error.problem if isinstance(error, HostError) else str(error)
            text, cure = split(problem)
        else:
            text = f"no answer within {self._timeout_s:.3g} s, while {self._stage.get(name, 'connecting')}"
            cure = f"log in by hand: ssh {host.address}; or give it more time with --timeout"
        return Finding(
            check="access",
            host=name,
            level="failure",
            found=text,
            wanted="a host that kit can log in to",
            cure=cure,
        )

    def leave(self) -> None:
        """Close the links, as far as that takes no time."""
        with self._lock:
            links = list(self._links.values())
        closing = [threading.Thread(target=_close, args=(link,), daemon=True) for link in links]
        for thread in closing:
            thread.start()
        until = time.monotonic() + RESERVE_S
        for thread in closing:
            thread.join(max(0.0, until - time.monotonic()))


def _close(link: Link) -> None:
    with contextlib.suppress(Exception):
        link.close()


class _Later(Generic[T]):
    """A value that is worked out meanwhile."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._found: list[T | Exception] = []
        self._make = make
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._make())
        except Exception as error:  # raised where the value is asked for
            self._found.append(error)

    def get(self, timeout_s: float) -> T | None:
        """The value, or None where it is not there in time."""
        self._thread.join(timeout_s)
        if self._found and isinstance(self._found[0], Exception):
            raise self._found[0]
        return self._found[0] if self._found else None  # type: ignore[return-value]  # no exception, as just seen


def _network(
    links: Mapping[str, Link], inventory: Inventory, seen: Mapping[str, Seen], *, deadline: float
) -> list[Finding]:
    facts = {name: each.facts for name, each in seen.items()}
    left_s = max(0.1, deadline - time.monotonic())
    later: _Later[list[Finding]] = _Later(
        lambda: network_findings(links, inventory, facts, deadline_s=left_s)
    )
    if (found := later.get(left_s + RESERVE_S / 2)) is not None:
        return found
    return [  # it keeps to its time by itself; but nothing may hold up the rest
        Finding(
            check="network",
            host="all hosts",
            hosts=tuple(facts),
            level="warning",
            found=f"not known: no answer within {left_s:.0f} s",
            wanted="an answer",
            cure="give it more time with --timeout",
        )
    ]


def _deep(
    links: Mapping[str, Link],
    inventory: Inventory,
    seen: Mapping[str, Seen],
    findings: Sequence[Finding],
) -> list[Finding]:
    """A real rendezvous and an all-reduce, where nothing is known that would keep it from working."""
    if any(each.level == "failure" for each in findings):
        hosts = tuple(host.name for host in inventory.hosts)
        return [
            Finding(
                check="deep",
                host="all hosts",
                hosts=hosts,
                level="warning",
                found="not tried",
                wanted="no failure in the other columns",
                cure="mend those first, and run kit check --deep again",
            )
        ]
    facts = {name: each.facts for name, each in seen.items()}
    found: list[Finding] = deep_findings(links, inventory, facts, deadline_s=DEEP_TIMEOUT_S)
    return found
