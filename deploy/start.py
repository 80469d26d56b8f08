"""Starts a run: connect → check → plan → sync → agents; on any failure nothing is left running."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodekit.deploy import check, cluster, plan, runs, sync
from nodekit.deploy.cluster import SshOptions
from nodekit.deploy.link import Link, on_all
from nodekit.deploy.plan import NodePlan, Plan
from nodekit.deploy.runs import Run
from nodekit.deploy.spec import AgentSpec
from nodekit.deploy.supervise import FINAL
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import dump
from nodekit.inventory.schema import Inventory

GRACE_S = 30.0
CALL_TIMEOUT_S = 30.0
SYNC_TIMEOUT_S = 3600.0
STARTED_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line of `kit up` says."""

    inventory: Path
    command: tuple[str, ...] | None = None
    dry_run: bool = False
    json: bool = False
    detach: bool = False
    new: bool = False
    quiet: bool = False
    ssh: SshOptions = field(default_factory=SshOptions)


class Phases:
    """Says how long each phase took, and records it."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self.done: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time one phase; what the caller puts into the list is said at its end."""
        said: list[str] = []
        start = time.monotonic()
        yield said
        seconds = time.monotonic() - start
        self.done.append((name, seconds))
        self.say(f"{name:<8} {'; '.join(said)}  ({seconds:.1f} s)")

    def say(self, text: str) -> None:
        """One line, unless silent."""
        if not self._silent:
            print(text, flush=True)


def gather_facts(
    links: Mapping[str, Link], inventory: Inventory, kit_digest: str
) -> tuple[dict[str, check.Facts], dict[str, tuple[str, ...]]]:
    """The facts of all hosts, checked.

    Raises:
        KitError: with everything that is wrong, on every host.
    """
    peers = cluster.peer_addresses(inventory.hosts)
    facts = check.gather(links, inventory, kit_digest=kit_digest, peers=peers)
    problems = check.examine(inventory, facts)
    if problems:
        raise KitError("\n".join(str(problem) for problem in problems))
    return facts, peers


def hold_port(links: Mapping[str, Link], inventory: Inventory) -> int:
    """A port found free on the rendezvous host, the first, and kept for its agent."""
    port: int = links[inventory.hosts[0].name].call("hold_port", timeout_s=CALL_TIMEOUT_S)
    return port


def secrets_of(inventory: Inventory) -> dict[str, str]:
    """The secrets' values, from the environment here.

    Raises:
        KitError: some are not set.
    """
    absent = [name for name in inventory.job.secrets if name not in os.environ]
    if absent:
        raise KitError(
            f"{inventory.path}: job.secrets names {', '.join(absent)}, not set in this environment; "
            f"export {absent[0]}=… and run again"
        )
    return {name: os.environ[name] for name in inventory.job.secrets}


def start(
    stack: contextlib.ExitStack, inventory: Inventory, resumed: Run | None, options: Options
) -> tuple[dict[str, Link], Run, dict[str, float]]:
    """Start a run, or go on with `resumed`.

    Args:
        stack: closes the links.
        inventory: what the cluster is.
        resumed: the run to go on with, None for a new one.
        options: the command line's.

    Returns:
        The links, the run, and each host's clock minus ours in seconds.
    """
    phases = Phases(silent=options.quiet)
    secrets = secrets_of(inventory)
    run_id = resumed.run_id if resumed else runs.new_id(inventory.name)
    phases.say(f"{'resuming' if resumed else 'run'} {run_id}" + ("; --new starts over" if resumed else ""))
    # The code is read while the hosts are reached: a run has what was there when it was asked for.
    reading = _Reading(inventory, options)
    with phases.phase("connect") as said:
        links = stack.enter_context(cluster.links(inventory.hosts, options.ssh))
        said.append(count(len(links), "host"))
    with phases.phase("check") as said:
        package = sync.package()
        facts, peers = gather_facts(links, inventory, package.digest)
        planned = plan.build(
            inventory,
            facts,
            run_id=run_id,
            peers=peers,
            master_port=hold_port(links, inventory),
            kit_digest=package.digest,
            command=options.command,
        )
        said.append(_checked(facts, planned))
    for warning in check.warnings(facts):
        phases.say(f"warning: {warning}")
    run = _record(inventory, resumed, planned, options)
    groups = cluster.one_per_folder(facts)
    firsts = {name: links[name] for name in groups}
    try:
        with phases.phase("sync") as said:
            sync.send_package(
                package,
                {name: link for name, link in firsts.items() if not facts[name].has_kit},
                {name: facts[name].workdir for name in groups},
                timeout_s=SYNC_TIMEOUT_S,
            )
            # From here the agents import torch, which takes longer than an unchanged tree.
            check.all_or_raise(on_all(links, lambda link: _warm(link, planned, secrets)))
            tree, targets = _send(reading, firsts, facts, run_id, options)
            said.append(f"{count(tree.num_files, 'file')}, {tree.size_bytes / 1e6:.1f} MB")
        with phases.phase("start") as said:
            check.all_or_raise(on_all(links, lambda link: _go(link, planned, run.generation)))
            run.state = "running"
            run.save()
            _wait_started(run, links)
            said.append(f"{count(len(links), 'node')}, world size {planned.world_size}")
        # The copying that the sync put off: only who stays to watch has the time to let it run beside the job.
        (sync.settle if options.detach else sync.keep)(targets, timeout_s=SYNC_TIMEOUT_S)
    except BaseException:
        # Agents that got their go are stopped; those that did not end with their link.
        on_all(links, lambda link: _stop_now(link, run))
        run.finish("failed", "it did not start")
        raise
    for name, seconds in phases.done:
        run.event("phase", phase=name, seconds=round(seconds, 3))
    return links, run, {name: found.clock_offset_s for name, found in facts.items()}


class _Reading:
    """The code being read in the background."""

    def __init__(self, inventory: Inventory, options: Options) -> None:
        self._found: dict[str, sync.Tree | Exception] = {}
        self._thread = threading.Thread(
            target=lambda: self._found.update(on_all({"code": None}, lambda _: _take(inventory, options))),
            daemon=True,
        )
        self._thread.start()

    def result(self) -> sync.Tree:
        """The tree, once it is read.

        Raises:
            KitError: it could not be.
        """
        self._thread.join()
        tree: sync.Tree = check.all_or_raise(self._found)["code"]
        return tree


def _take(inventory: Inventory, options: Options) -> sync.Tree:
    code = Path(inventory.job.code).expanduser()
    if not code.is_dir():
        raise KitError(f"job.code: {code.resolve()} is no folder")
    command = options.command or inventory.job.command or ("",)
    script = command[0]
    if script.endswith(".py") and not Path(script).is_absolute() and not (code / script).is_file():
        raise KitError(
            f"no {script} in {code.resolve()}, the folder that is synced; "
            "run kit from your code's folder, or set job.code"
        )
    return sync.take(code)


def _record(inventory: Inventory, resumed: Run | None, planned: Plan, options: Options) -> Run:
    run = resumed or Run(
        run_id=planned.run_id,
        name=inventory.name,
        inventory_path=str(inventory.path),
        inventory={},
        command=list(options.command) if options.command else None,
        created=time.time(),
    )
    if resumed:
        run.generation += 1
    run.inventory = dump(inventory)
    run.state, run.started, run.ended, run.verdict = "starting", time.time(), None, ""
    run.nodes = {
        node.name: {"node_dir": node.node_dir, "node_rank": node.node_rank, "code_dir": node.code_dir}
        for node in planned.nodes
    }
    run.save()
    return run


def _send(
    reading: _Reading,
    firsts: Mapping[str, Link],
    facts: Mapping[str, check.Facts],
    run_id: str,
    options: Options,
) -> tuple[sync.Tree, dict[str, sync.Target]]:
    tree = reading.result()
    targets = {
        name: sync.Target(
            link,
            dest=f"{facts[name].workdir}/runs/{run_id}/code",
            cache=f"{facts[name].workdir}/code/{sync.project_key(tree.root)}",
        )
        for name, link in firsts.items()
    }
    with sync.progress_bars(silent=options.quiet) as progress:
        check.all_or_raise(sync.send(tree, targets, timeout_s=SYNC_TIMEOUT_S, progress=progress))
    return tree, targets


def count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _checked(facts: Mapping[str, check.Facts], planned: Plan) -> str:
    first = next(iter(facts.values()))
    num_gpus = sum(len(node.gpus) for node in planned.nodes)
    interfaces = " ".join(dict.fromkeys(node.interface for node in planned.nodes))
    return f"torch {first.torch}; {f'{num_gpus} GPUs, nccl' if num_gpus else 'CPU, gloo'}; over {interfaces}"


def _node(planned: Plan, name: str) -> NodePlan:
    return next(node for node in planned.nodes if node.name == name)


def _warm(link: Link, planned: Plan, secrets: Mapping[str, str]) -> Any:
    node = _node(planned, link.host)
    return link.call(
        "warm",
        timeout_s=CALL_TIMEOUT_S,
        node_dir=node.node_dir,
        python=node.python,
        kit_dir=node.kit_dir,
        env=dict(secrets),
    )


def _go(link: Link, planned: Plan, generation: int) -> Any:
    node = _node(planned, link.host)
    spec = AgentSpec(
        run_id=planned.run_id,
        generation=generation,
        name=node.name,
        node_rank=node.node_rank,
        min_nodes=node.min_nodes,
        max_nodes=node.max_nodes,
        nproc_per_node=node.nproc_per_node,
        master_addr=node.master_addr,
        master_port=node.master_port,
        local_addr=node.local_addr,
        max_restarts=node.max_restarts,
        argv=node.argv,
        env=node.env,
        code_dir=node.code_dir,
        node_dir=node.node_dir,
        grace_s=GRACE_S,
    )
    port = node.master_port if node.node_rank == 0 else None
    return link.call("go", timeout_s=CALL_TIMEOUT_S, node_dir=node.node_dir, spec=spec.to_dict(), port=port)


def _wait_started(run: Run, links: Mapping[str, Link]) -> None:
    """Until workers run on every node (or a node has more to say than that).

    Raises:
        HostError: an agent ended at once, or the nodes did not find each other in time.
    """
    deadline = time.monotonic() + STARTED_TIMEOUT_S

    def wait(link: Link) -> None:
        node_dir = run.nodes[link.host]["node_dir"]
        while True:
            status = link.call("status", timeout_s=CALL_TIMEOUT_S, node_dir=node_dir)
            if status.get("state") in ("running", "waiting", *FINAL):
                return
            if not status["alive"]:
                raise HostError(
                    link.host, f"its agent ended at once: {status['agent_log'].strip() or 'was it stopped?'}"
                )
            if time.monotonic() > deadline:
                raise HostError(
                    link.host,
                    f"still {status.get('state', 'starting')} after {STARTED_TIMEOUT_S:.0f} s: "
                    "the nodes do not reach each other; is there a firewall between them?",
                )
            time.sleep(0.05)

    check.all_or_raise(on_all(links, wait))


def _stop_now(link: Link, run: Run) -> Any:
    return link.call(
        "stop", timeout_s=CALL_TIMEOUT_S, node_dir=run.nodes[link.host]["node_dir"], grace_s=5.0, force=False
    )
