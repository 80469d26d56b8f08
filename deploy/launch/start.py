"""Starts a run: connect → check → plan → sync → agents; on any failure nothing is left running."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from nodekit.deploy.connect.channel import (
    LOST_AFTER_S,
    ChannelLost,
    HostChannel,
    all_or_raise,
    on_all,
)
from nodekit.deploy.host.schema import VERSION
from nodekit.deploy.launch import broken_hosts, planning, stopping
from nodekit.deploy.launch.options import Options
from nodekit.deploy.launch.started import wait_started
from nodekit.deploy.output.interrupts import Interrupts, NothingLeft
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.output.wording import count, size_text
from nodekit.deploy.plan import check, plan, script
from nodekit.deploy.plan.command import argv_of, argv_on, refuse_options
from nodekit.deploy.plan.plan import Plan
from nodekit.deploy.records import events, runs, secret_files
from nodekit.deploy.records.runs import Run
from nodekit.deploy.story import leftout
from nodekit.deploy.story.attempts import of_kind
from nodekit.deploy.story.leftout import LeftOut
from nodekit.deploy.supervise import policy
from nodekit.deploy.supervise.node_client import SYNC_TIMEOUT_S, NodeClient, list_code, secrets_of
from nodekit.deploy.supervise.state import Rules
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.progress import build_lines
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import dump
from nodekit.inventory.schema import Environment, Inventory

T = TypeVar("T")


def start(
    stack: contextlib.ExitStack,
    inventory: Inventory,
    resumed: Run | None,
    options: Options,
    *,
    placed: str = "",
    interrupts: Interrupts | None = None,
) -> NodeClient:
    """Start a run, or go on with `resumed`.

    It runs then, and `interrupts` are held: who watches it says what they do.

    Args:
        stack: closes the channels.
        inventory: what the cluster is.
        resumed: the run to go on with, None for a new one.
        options: the command line's.
        placed: the id of a run whose code lies in its place on all hosts already.
        interrupts: Ctrl-C's; None where signals are the caller's.

    Raises:
        KitError: it cannot start.
        NothingLeft: after a Ctrl-C, where all that had started is stopped.
    """
    interrupts = interrupts or Interrupts()
    starting = _Starting(inventory, resumed, options, placed)
    channels = starting.connect(stack)
    channels, broken = starting.on_those_left(
        channels, lambda: broken_hosts.leave_out(channels, inventory, starting.phases.say)
    )
    if (asked := inventory.environment) is not None:
        starting.on_those_left(channels, lambda: starting.enter_environment(channels, asked))
    facts, planned = starting.on_those_left(channels, lambda: starting.check_and_plan(channels))
    run = _record(inventory, resumed, planned, facts, options, is_placed=bool(placed))
    client = NodeClient(run, inventory, channels)
    try:
        if resumed or broken:  # a node that the user had out may come back with a new start
            run.drain(broken)
        starting.tell(run, planned, facts)
        interrupts.once()
        planned, targets, code = starting.send(client, planned, facts)
        without = starting.start_agents(client, planned, code)
        targets = {name: target for name, target in targets.items() if name not in without}
        # The copying that the sync put off: only who stays to watch has the time to let it run beside the job.
        if options.detach:
            sync.finish_caching(targets, timeout_s=SYNC_TIMEOUT_S)
        else:
            sync.begin_caching(targets)
        interrupts.hold()
    except BaseException as error:
        is_over = stopping.undo(client, error, interrupts, starting.phases.say)
        if is_over and isinstance(error, KeyboardInterrupt):
            raise NothingLeft(*error.args) from error
        raise
    finally:
        for name, seconds, done in starting.phases.done:
            run.event("phase", time=done, phase=name, seconds=round(seconds, 3))
    return client


@dataclasses.dataclass(frozen=True)
class _Code:
    """What is on record of the code that the nodes have."""

    digest: str
    left_out: dict[str, list[str]]


class _Starting:
    """The phases of one start, in their order, and what they have in common."""

    def __init__(self, inventory: Inventory, resumed: Run | None, options: Options, placed: str) -> None:
        self.phases = Phases(silent=options.quiet)
        self._inventory, self._options, self._placed = inventory, options, placed
        self._goes_on = resumed is not None
        self._secrets = secrets_of(inventory)
        if not placed:  # else they were looked at where the job was submitted
            secret_files.notify_secrets(inventory)
            script.find(inventory, options.command)
        self._run_id = placed or (resumed.run_id if resumed else runs.new_id(inventory.name))
        how = "resuming" if resumed else "run"
        if placed:
            self.phases.say(f"{how} {self._run_id} in the job's allocation, led by {inventory.hosts[0].name}")
        else:
            self.phases.say(f"{how} {self._run_id}" + ("; --new starts over" if resumed else ""))
        # The code is read while the hosts are reached: a run has what was there when it was asked for.
        self._reading = None if placed else _Reading(inventory, options)
        self._prestarted: set[str] = set()

    def connect(self, stack: contextlib.ExitStack) -> dict[str, HostChannel]:
        """Channels to all hosts; an elastic job does with those that can be reached, if they are enough."""
        with self.phases.phase("connect") as said:
            reached = planning.enough_channels(self._inventory, self._options, self.phases.say)
            channels = stack.enter_context(reached)
            said.append(count(len(channels), "host"))
        return channels

    def on_those_left(
        self, channels: dict[str, HostChannel], do: Callable[[], T], *, unfit: type[HostError] = ChannelLost
    ) -> T:
        """Return what `do` returns; call it again if hosts are lost meanwhile and an elastic job has enough without.

        They are taken out of `channels`, which ends an agent that still waits for its start. The supervisor tries them
        again.

        Args:
            channels: those that `do` uses.
            do: may be called several times.
            unfit: the error that leaves a host out even where it answers.
        """
        while True:
            try:
                return do()
            except KitError as error:
                least = self._inventory.nodes.min
                if len(channels) <= least:
                    raise
                lost = {each.host: each for each in error.errors if isinstance(each, unfit)}
                lost = {name: each for name, each in lost.items() if name in channels}
                # What is raised may be a consequence of a loss, as of a build that was cut short.
                others = {name: channel for name, channel in channels.items() if name not in lost}
                asked = on_all(others, lambda channel: channel.call("probes.now", timeout_s=LOST_AFTER_S))
                lost |= {name: each for name, each in asked.items() if isinstance(each, HostError)}
                if not lost or len(channels) - len(lost) < least:
                    raise
                for name, why in lost.items():
                    self.phases.say(f"warning: without {why}")
                    self.phases.say(f"         {name} is tried again while the job runs")
                    threading.Thread(target=channels.pop(name).close, daemon=True).start()

    def enter_environment(self, channels: Mapping[str, HostChannel], asked: Environment) -> None:
        """Have the channels answer by the inventory's environment, made where it is not there yet."""
        from nodekit.deploy.environment import environment  # most inventories have none

        limit_s = self._inventory.timings.environment
        with (
            self.phases.phase("environment") as said,
            build_lines(silent=self._options.quiet) as progress,
        ):
            entered = environment.enter(
                channels, self._inventory.hosts, asked, timeout_s=limit_s, progress=progress
            )
            said.append(entered.line())

    def check_and_plan(self, channels: Mapping[str, HostChannel]) -> tuple[dict[str, check.Facts], Plan]:
        """The facts of all hosts, and what each node runs.

        Raises:
            KitError: with everything that is wrong.
        """
        inventory, options = self._inventory, self._options
        with self.phases.phase("check") as said:
            self._package = sync.package()
            facts, peers, warnings = planning.gather_facts(channels, inventory, options, placed=self._placed)
            planned = plan.build(
                inventory,
                facts,
                run_id=self._run_id,
                peers=peers,
                master_port=0,
                kit_digest=self._package.digest,
                command=options.command,
            )
            planned = planning.hold_port(channels, planned)
            first = planned.nodes[0]
            refuse_options(
                first.argv,
                Path(inventory.job.code).expanduser(),
                world_size=planned.world_size,
                env=first.env,
                modules={name: found.modules for name, found in facts.items()},
            )
            said.append(_checked(facts, planned))
        for warning in planning.grouped(warnings):
            self.phases.say(f"warning: {warning}")
        return facts, planned

    def tell(self, run: Run, planned: Plan, facts: Mapping[str, check.Facts]) -> None:
        """Write the first events."""
        run.event(
            "run-started",
            version=VERSION,
            time=self.phases.began,
            generation=run.generation,
            nodes=[node.name for node in planned.active],
            # As it was written: each node's own differs.
            command=list(argv_of(self._inventory, self._options.command)),
            goes_on=self._goes_on,
        )
        for name, found in facts.items():  # for the report: it may be asked for when the hosts are long gone
            versions = {"python": found.python, "torch": found.torch, "cpus": found.cpus}
            run.event("host", about=name, hostname=found.hostname, **versions, num_gpus=found.num_gpus)

    def send(
        self, client: NodeClient, planned: Plan, facts: Mapping[str, check.Facts]
    ) -> tuple[Plan, dict[str, sync.Target], _Code]:
        """Send kit and the code, while the agents import torch: the plan of the nodes that are left then.

        With it what was sent where, to be settled later, and what is on record of it.
        """

        def attempt() -> tuple[Plan, dict[str, sync.Target], _Code]:
            nonlocal planned
            planned = self._planned_of_those_left(client, planned)
            return planned, *self._send(client, planned, facts)

        return self.on_those_left(client.channels, attempt, unfit=HostError)

    def _planned_of_those_left(self, client: NodeClient, planned: Plan) -> Plan:
        """The plan, and on record, without nodes whose channel is gone: they come in later as hosts that were away."""
        left = tuple(node for node in planned.nodes if node.name in client.channels)
        if len(left) == len(planned.nodes):
            return planned
        run, first = client.run, planned.nodes[0]
        planned = Plan(planned.run_id, left)
        if left[0].name != first.name:
            planned = planning.hold_port(client.channels, planned)
            self._prestarted.discard(left[0].name)  # its agent is to have the port, by its start
        with run.changing():
            if not run.is_placed:
                run.earlier = _earlier(run, [node.name for node in left])
            run.nodes = {node.name: run.nodes[node.name] for node in left}
        return planned

    def _send(
        self, client: NodeClient, planned: Plan, facts: Mapping[str, check.Facts]
    ) -> tuple[dict[str, sync.Target], _Code]:
        run, active = client.run, [node.name for node in planned.active]
        facts = {name: found for name, found in facts.items() if name in client.channels}
        groups = check.one_per_folder(facts)
        firsts = {name: client.channels[name] for name in groups}
        with self.phases.phase("sync") as said:
            # Where it is already, too: files of it may have gone, as in a scratch folder that is swept.
            sync.send_package(
                self._package,
                firsts,
                {name: facts[name].workdir for name in groups},
                timeout_s=SYNC_TIMEOUT_S,
            )
            anew = [name for name in active if name not in self._prestarted]
            # Agents that the last stop did not reach: of a node out of reach, or of a task that Slurm was still ending.
            if self._goes_on:
                _on_nodes(anew, lambda name: client.stop(name, for_good=False))
            # From here the agents import torch, which takes longer than an unchanged tree.
            _on_nodes(anew, lambda name: self._prestart(client, name))
            if self._reading is None:
                said.append("in the shared folder")
                targets: dict[str, sync.Target] = {}
                code = _Code(run.code_digest, run.left_out)
            else:
                tree, left_out = self._reading.result()
                targets, digest = _send(tree, firsts, facts, run.run_id, self._options)
                said += [f"{count(tree.num_files, 'file')}, {size_text(tree.size_bytes)}", *left_out.said()]
                code = _Code(digest, left_out.to_dict())
            # What an earlier generation left, on a node that could not be reached when it was stopped, has no say.
            _on_nodes(list(run.nodes), lambda name: client.fence(name, run.generation))
            return targets, code

    def _prestart(self, client: NodeClient, name: str) -> None:
        client.prestart(name, self._secrets)
        self._prestarted.add(name)

    def start_agents(self, client: NodeClient, planned: Plan, code: _Code) -> Collection[str]:
        """Start the agents, and wait until ranks run on every node; return the nodes that the job begins without."""
        run, active = client.run, [node.name for node in planned.active]
        state = policy.begin(
            Rules.of(self._inventory),
            generation=run.generation,
            host=active[0],
            port=planned.nodes[0].master_port,
            nodes=active,
        )
        waits_for = f"torch to be imported on {count(len(active), 'node')}, and for the nodes to meet"
        with self.phases.phase("start", waits_for=waits_for) as said:
            with run.changing():
                stopping.refuse_stopped(run)
                run.judgement = state.to_dict()  # who votes, before any of them begins
                run.code_digest, run.left_out = code.digest, code.left_out
            told = on_all(
                {name: name for name in active},
                lambda name: client.start(name, state, state.port if name == state.host else None),
            )
            # One of these may have heard it all the same: it has a vote, and the supervisor looks after it.
            unsure = {name: each for name, each in told.items() if isinstance(each, HostError)}
            all_or_raise({name: each for name, each in told.items() if name not in unsure})
            with run.changing():
                stopping.refuse_stopped(run)  # before all agents were started
                run.state = "running"
            least = self._inventory.nodes.min
            without = wait_started(client, active, least=least, say=self.phases.say, lost=unsure)
            world_size = sum(node.nproc_per_node for node in planned.active if node.name not in without)
            going = f"{count(len(active) - len(without), 'node')}, world size {world_size}"
            said.append(going if world_size else "none trains yet")
            said += [f"without {error}" if world_size else str(error) for error in without.values()]
            if len(active) < len(client.channels):
                said.append(count(len(client.channels) - len(active), "spare"))
        return without


def _on_nodes(names: Sequence[str], function: Callable[[str], Any]) -> None:
    all_or_raise(on_all({name: name for name in names}, function))


class _Reading:
    """The code being read in the background, and what of its folder is not sent."""

    def __init__(self, inventory: Inventory, options: Options) -> None:
        self._found: dict[str, tuple[sync.Tree, LeftOut] | Exception] = {}

        def read(_: None) -> tuple[sync.Tree, LeftOut]:
            tree = list_code(inventory, options.command)
            return tree, leftout.find(tree, argv_of(inventory, options.command))

        self._thread = threading.Thread(
            target=lambda: self._found.update(on_all({"code": None}, read)), daemon=True
        )
        self._thread.start()

    def result(self) -> tuple[sync.Tree, LeftOut]:
        """The tree and what is left out of it, once it is read.

        Raises:
            KitError: it could not be.
        """
        self._thread.join()
        found: tuple[sync.Tree, LeftOut] = all_or_raise(self._found)["code"]
        return found


def _record(
    inventory: Inventory,
    resumed: Run | None,
    planned: Plan,
    facts: Mapping[str, check.Facts],
    options: Options,
    *,
    is_placed: bool,
) -> Run:
    run = resumed or Run(
        run_id=planned.run_id,
        name=inventory.name,
        inventory_path=str(inventory.path),
        inventory={},
        command=list(options.command) if options.command else None,
        created=time.time(),
    )
    saved = of_kind(events.read(run.folder), "snapshot") if resumed else []
    # Before it is on record as starting: from then on it is this start that a `kit down` ends.
    run.say_stop("")
    with run.changing():
        if resumed:  # above all that hosts may have been fenced for, also where that was called off
            told = run.judgement
            run.generation = 1 + max(
                run.generation, told.get("called_off") or 0, told.get("next_generation") or 0
            )
        run.token = run.token or token_hex(16)
        run.clock_offsets = {name: found.clock_offset_s for name, found in facts.items()}
        if not is_placed:  # else the nodes share the folder
            run.earlier = _earlier(run, [node.name for node in planned.nodes])
        run.inventory, run.is_placed = dump(inventory), is_placed
        run.skip_check = options.skip_check
        # The first start is when it was created: see `Run.was_resumed`.
        run.state, run.started, run.ended = "starting", time.time() if resumed else run.created, None
        run.verdict, run.cause = "", {}
        run.nodes = {node.name: dataclasses.asdict(node) for node in planned.nodes}
        run.argv = list(argv_on(inventory, options.command, facts))
        if saved:
            newest = max(saved, key=lambda each: (each.get("generation", 0), each.get("step", 0)))
            words = f"step {newest.get('step')} of generation {newest.get('generation')} was committed on {newest.node}"
            for each in run.nodes.values():
                each["env"]["NODEKIT_SNAPSHOT_EXPECTED"] = words
    return run


def _earlier(run: Run, nodes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The nodes that a run has had before it goes on with `nodes`, and how they were reached, for `kit rm`."""
    hosts = {host["name"]: host for host in run.inventory.get("hosts", ())}
    before = {name: {**node, "host": hosts[name]} for name, node in run.nodes.items() if name in hosts}
    return {name: node for name, node in {**run.earlier, **before}.items() if name not in nodes}


def _send(
    tree: sync.Tree,
    firsts: Mapping[str, HostChannel],
    facts: Mapping[str, check.Facts],
    run_id: str,
    options: Options,
) -> tuple[dict[str, sync.Target], str]:
    """Send the code; where, and the digest of what is there now: it may have changed while it was sent."""
    targets = {
        name: sync.code_target(
            channel, tree, workdir=facts[name].workdir, dest=f"{facts[name].workdir}/runs/{run_id}/code"
        )
        for name, channel in firsts.items()
    }
    with sync.progress_bars(silent=options.quiet) as progress:
        sent = all_or_raise(sync.send(tree, targets, timeout_s=SYNC_TIMEOUT_S, progress=progress))
    return targets, next(iter(sent.values())).digest


def _checked(facts: Mapping[str, check.Facts], planned: Plan) -> str:
    first = next(iter(facts.values()))
    num_gpus = sum(len(node.gpus) for node in planned.nodes)
    interfaces = " ".join(dict.fromkeys(node.interface for node in planned.nodes))
    return f"torch {first.torch}; {f'{num_gpus} GPUs, nccl' if num_gpus else 'CPU, gloo'}; over {interfaces}"
