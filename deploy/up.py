"""`kit up`: inventory → plan → check → sync → agents → watch → verdict; safe to run again at any point."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodekit.deploy import check, cluster, plan, runs, sync
from nodekit.deploy.cluster import SshOptions
from nodekit.deploy.link import Link, on_all
from nodekit.deploy.plan import NodePlan, Plan
from nodekit.deploy.runs import Run
from nodekit.deploy.spec import AgentSpec
from nodekit.deploy.supervise import FINAL, Supervisor, Verdict
from nodekit.deploy.view import View
from nodekit.inventory.errors import HostError, JobFailed, KitError
from nodekit.inventory.load import dump, load_inventory, restore
from nodekit.inventory.schema import Inventory

GRACE_S = 30.0
CALL_TIMEOUT_S = 30.0
SYNC_TIMEOUT_S = 3600.0
STARTED_TIMEOUT_S = 120.0
ATTACH_TAIL_BYTES = 4096


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
    ssh: SshOptions = SshOptions()


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


def up(options: Options) -> int:
    """Bring the job of an inventory to where it runs, and watch it; the exit status."""
    inventory = load_inventory(options.inventory)
    if inventory.slurm is not None:
        raise KitError(f"{options.inventory}: the Slurm backend is not there yet; use `hosts:` (SSH) for now")
    if options.dry_run:
        return dry_run(inventory, options)
    with contextlib.ExitStack() as stack:
        with runs.starting(inventory.path):
            run = _current(inventory, options)
            if run is not None and run.state == "running":
                links = stack.enter_context(cluster.links(inventory.hosts, options.ssh, some=True))
                if _any_alive(run, links):
                    print(f"attached to {run.run_id}, which is running (Ctrl-C stops it)", flush=True)
                    return watch(run, inventory, links, {}, options, tail_bytes=ATTACH_TAIL_BYTES)
                _settle(run, links)
            if run is not None and run.state == "succeeded":
                run = None  # it is done: up means to train again
            links, started, offsets = start(stack, inventory, run, options)
        if options.detach:
            print(
                f"{started.run_id} is running; kit up {options.inventory} attaches to it, kit logs -f shows its "
                "output, kit down stops it",
                flush=True,
            )
            return 0
        return watch(started, inventory, links, offsets, options)


def _current(inventory: Inventory, options: Options) -> Run | None:
    """The run this `kit up` is about: the inventory's latest, when it runs the same command."""
    run = runs.latest_of(inventory.path)
    if run is None:
        return None
    same = (run.command or run.inventory["job"].get("command")) == _command(inventory, options)
    if run.state in ("running", "starting") and options.new:
        raise KitError(f"{run.run_id} of this inventory is not over; kit down {run.run_id} stops it")
    if run.state == "running" and not same:
        raise KitError(
            f"{run.run_id} of this inventory is running another command; kit down {run.run_id} stops it, "
            "a copy of the inventory file runs beside it"
        )
    return run if same and not options.new else None


def _command(inventory: Inventory, options: Options) -> list[str] | None:
    command = options.command or inventory.job.command
    return list(command) if command else None


def _any_alive(run: Run, links: Mapping[str, Link]) -> bool:
    return any(status["alive"] for status in statuses(run, links).values())


def statuses(run: Run, links: Mapping[str, Link]) -> dict[str, dict[str, Any]]:
    """Each reachable node's status."""
    results = on_all(
        links,
        lambda link: link.call("status", timeout_s=CALL_TIMEOUT_S, node_dir=run.nodes[link.host]["node_dir"]),
    )
    return {name: result for name, result in results.items() if not isinstance(result, Exception)}


def _settle(run: Run, links: Mapping[str, Link]) -> None:
    """A run that is on record as running, and has no agent left: write down how it ended."""
    found = statuses(run, links)
    if len(found) < len(run.nodes):
        missing = ", ".join(name for name in run.nodes if name not in found)
        raise KitError(
            f"{run.run_id} may still be running on {missing}, which cannot be reached; "
            f"kit down {run.run_id} when it can, or kit up --new after making sure"
        )
    states = {status.get("state") for status in found.values()}
    run.finish("succeeded" if states == {"succeeded"} else "failed", "ended while nobody watched")


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


def dry_run(inventory: Inventory, options: Options) -> int:
    """Print exactly what would run, and run nothing."""
    package = sync.package()
    _secrets(inventory)
    with cluster.links(inventory.hosts, options.ssh) as links:
        facts, peers = gather_facts(links, inventory, package.digest)
        planned = plan.build(
            inventory,
            facts,
            run_id=runs.new_id(inventory.name),
            peers=peers,
            master_port=_hold_port(links, inventory),
            kit_digest=package.digest,
            command=options.command,
        )
    print(planned.to_json() if options.json else planned.to_text())
    return 0


def _hold_port(links: Mapping[str, Link], inventory: Inventory) -> int:
    port: int = links[inventory.hosts[0].name].call("hold_port", timeout_s=CALL_TIMEOUT_S)
    return port


def _secrets(inventory: Inventory) -> dict[str, str]:
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
    """Connect, check, sync and start; on any failure nothing is left running."""
    phases = Phases(silent=options.quiet)
    secrets = _secrets(inventory)
    code = Path(inventory.job.code).expanduser()
    run_id = resumed.run_id if resumed else runs.new_id(inventory.name)
    phases.say(f"{'resuming' if resumed else 'run'} {run_id}" + ("; --new starts over" if resumed else ""))
    with phases.phase("connect") as said:
        links = stack.enter_context(cluster.links(inventory.hosts, options.ssh))
        said.append(_count(len(links), "host"))
    with phases.phase("check") as said:
        package = sync.package()
        facts, peers = gather_facts(links, inventory, package.digest)
        for warning in check.warnings(facts):
            phases.say(f"warning: {warning}")
        planned = plan.build(
            inventory,
            facts,
            run_id=run_id,
            peers=peers,
            master_port=_hold_port(links, inventory),
            kit_digest=package.digest,
            command=options.command,
        )
        said.append(_checked(facts, planned))
    run = resumed or Run(
        run_id=run_id,
        name=inventory.name,
        inventory_path=str(inventory.path),
        inventory=dump(inventory),
        command=list(options.command) if options.command else None,
        created=time.time(),
    )
    if resumed:
        run.generation += 1
        run.inventory = dump(inventory)
    run.state, run.ended, run.verdict = "starting", None, ""
    run.nodes = {node.name: _where(node) for node in planned.nodes}
    run.save()
    groups = cluster.one_per_folder(facts)
    firsts = {name: links[name] for name in groups}
    workdirs = {name: facts[name].workdir for name in groups}
    try:
        with phases.phase("sync") as said:
            sync.send_package(
                package,
                {name: link for name, link in firsts.items() if not facts[name].has_kit},
                workdirs,
                timeout_s=SYNC_TIMEOUT_S,
            )
            check.all_or_raise(on_all(links, lambda link: _warm(link, planned, secrets)))
            said.append(_sync_code(code, firsts, workdirs, run_id, options))
            _script_exists(planned, code)
        with phases.phase("start") as said:
            check.all_or_raise(on_all(links, lambda link: _go(link, planned, run.generation)))
            run.state = "running"
            run.save()
            _wait_started(run, links)
            said.append(f"{_count(len(links), 'node')}, world size {planned.world_size}")
    except BaseException:
        # Agents that got their go are stopped; those that did not end with their link.
        on_all(links, lambda link: _stop_now(link, run))
        run.finish("failed", "it did not start")
        raise
    for name, seconds in phases.done:
        run.event("phase", phase=name, seconds=round(seconds, 3))
    return links, run, {name: found.clock_offset_s for name, found in facts.items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _checked(facts: Mapping[str, check.Facts], planned: Plan) -> str:
    first = next(iter(facts.values()))
    num_gpus = sum(len(node.gpus) for node in planned.nodes)
    interfaces = " ".join(dict.fromkeys(node.interface for node in planned.nodes))
    return f"torch {first.torch}; {f'{num_gpus} GPUs, nccl' if num_gpus else 'CPU, gloo'}; over {interfaces}"


def _where(node: NodePlan) -> dict[str, Any]:
    return {"node_dir": node.node_dir, "node_rank": node.node_rank, "code_dir": node.code_dir}


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


def _sync_code(
    code: Path, firsts: Mapping[str, Link], workdirs: Mapping[str, str], run_id: str, options: Options
) -> str:
    tree = sync.take(code)
    with sync.progress_bars(silent=options.quiet) as progress:
        results = sync.send(
            tree,
            {
                name: sync.Target(
                    link,
                    dest=f"{workdirs[name]}/runs/{run_id}/code",
                    cache=f"{workdirs[name]}/code/{sync.project_key(code)}",
                )
                for name, link in firsts.items()
            },
            timeout_s=SYNC_TIMEOUT_S,
            progress=progress,
        )
    check.all_or_raise(results)
    return f"{tree.num_files} files, {tree.size_bytes / 1e6:.1f} MB"


def _script_exists(planned: Plan, code: Path) -> None:
    argv = planned.nodes[0].argv
    script = next((part for part in argv[2:3] if part.endswith(".py")), None)
    if script and not Path(script).is_absolute() and not (code / script).is_file():
        raise KitError(
            f"no {script} in {code.resolve()}, the folder that is synced; "
            "run kit from your code's folder, or set job.code"
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
                raise HostError(link.host, f"its agent ended at once:\n{status['agent_log'].strip()}")
            if time.monotonic() > deadline:
                raise HostError(
                    link.host,
                    f"still {status.get('state', 'starting')} after {STARTED_TIMEOUT_S:.0f} s: the nodes do not "
                    "reach each other; is a firewall between them?",
                )
            time.sleep(0.05)

    check.all_or_raise(on_all(links, wait))


def _stop_now(link: Link, run: Run) -> Any:
    return link.call(
        "stop", timeout_s=CALL_TIMEOUT_S, node_dir=run.nodes[link.host]["node_dir"], grace_s=5.0, force=False
    )


def watch(
    run: Run,
    inventory: Inventory,
    links: dict[str, Link],
    offsets: Mapping[str, float],
    options: Options,
    *,
    tail_bytes: int | None = None,
) -> int:
    """Watch the run to its end; Ctrl-C stops it everywhere. The exit status."""
    hosts = {host.name: host for host in inventory.hosts}
    with View(list(run.nodes), logs=not options.quiet) as view, _sigterm_interrupts():
        supervisor = Supervisor(
            run,
            links,
            view,
            reopen=lambda name: cluster.open_link(hosts[name], options.ssh),
            min_nodes=inventory.nodes.min,
            max_restarts=inventory.job.max_restarts,
            grace_s=GRACE_S,
            clock_offsets=offsets,
            tail_bytes=tail_bytes,
        )
        try:
            verdict = supervisor.watch()
        except KeyboardInterrupt:
            return _stop_everywhere(run, supervisor, view)
    run.finish(verdict.outcome, verdict.text.partition("\n")[0])
    return conclude(run, links, verdict)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop_everywhere(run: Run, supervisor: Supervisor, view: View) -> int:
    view.say(f"stopping {run.run_id} on {_count(len(run.nodes), 'node')} (Ctrl-C again kills it at once)")
    import threading

    box: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: box.append(supervisor.stop(force=False)), daemon=True)
    asking.start()
    try:
        while asking.is_alive():
            asking.join(0.2)
    except KeyboardInterrupt:
        view.say("killing it")
        box.insert(0, supervisor.stop(force=True))
    run.finish("stopped", "stopped by Ctrl-C")
    view.say(stopped_text(run, box[0]))
    return 130


def stopped_text(run: Run, results: Mapping[str, Any]) -> str:
    """What to say after a stop: where it is stopped, and where that is not known."""
    failed = [str(result) for result in results.values() if isinstance(result, Exception)]
    killed = [
        name for name, result in results.items() if not isinstance(result, Exception) and result["killed"]
    ]
    unheard = [name for name in run.nodes if name not in results]
    text = f"{run.run_id} is stopped on {_count(len(results) - len(failed), 'node')}"
    if killed:
        text += f"; had to be killed on {', '.join(killed)}"
    problems = [f"not known: {problem}" for problem in failed]
    problems += [f"not known: {name} cannot be reached" for name in unheard]
    return "\n".join([text, *problems])


def conclude(run: Run, links: Mapping[str, Link], verdict: Verdict) -> int:
    """Say how it ended and where everything is; the exit status."""
    first = min(run.nodes, key=lambda name: run.nodes[name]["node_rank"])
    print()
    if verdict.outcome == "failed":
        print(f"{run.run_id} failed: {verdict.text}")
    elif verdict.outcome == "stopped":
        print(f"{run.run_id} was stopped; kit up {_shown(run.inventory_path)} goes on from its snapshot")
    else:
        seconds = (run.ended or time.time()) - run.created
        print(f"{run.run_id} {verdict.text} in {seconds:.0f} s{_result(run, links, first)}")
    node_dir = run.nodes[first]["node_dir"]
    print(f"  logs       {first}:{node_dir}/logs   (kit logs {run.run_id})")
    print(f"  snapshots  {first}:{node_dir}/snapshots")
    print(f"  curves     {first}:{node_dir}/output   (tensorboard --logdir …/output)")
    return 0 if verdict.outcome == "succeeded" else JobFailed.exit_code


def _result(run: Run, links: Mapping[str, Link], first: str) -> str:
    """`, accuracy 98.3 %` when the job wrote a result.json."""
    import json

    if first not in links:
        return ""
    with contextlib.suppress(KitError, ValueError):
        text = links[first].call(
            "read_file", timeout_s=CALL_TIMEOUT_S, path=f"{run.nodes[first]['node_dir']}/output/result.json"
        )
        accuracy = json.loads(text or "{}").get("accuracy")
        if isinstance(accuracy, float):
            return f", accuracy {accuracy:.2%}"
    return ""


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def inventory_of(run: Run) -> Inventory:
    """The inventory as the run was started with."""
    return restore(run.inventory)


def down(run: Run, options: SshOptions, *, force: bool) -> int:
    """Stop a run everywhere; the exit status is 1 when a node could not be asked."""
    hosts = inventory_of(run).hosts
    with cluster.links(hosts, options, some=True) as links:
        results = on_all(
            links,
            lambda link: link.call(
                "stop",
                timeout_s=GRACE_S + 15,
                node_dir=run.nodes[link.host]["node_dir"],
                grace_s=GRACE_S + 10,
                force=force,
            ),
        )
    was_running = any(
        not isinstance(each, Exception) and each["was"] == "running" for each in results.values()
    )
    clean = len(links) == len(run.nodes) and not any(isinstance(each, Exception) for each in results.values())
    if run.state not in runs.ENDED and clean:
        run.finish("stopped", "stopped by kit down")
    if not was_running and clean:
        print(f"{run.run_id} is not running ({run.state})")
    else:
        print(stopped_text(run, results))
    return 0 if clean else 1
