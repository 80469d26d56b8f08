"""Carries out actions on the nodes of one run: start, join, fence, set voters, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, HostChannel, RemoteError, all_or_raise, on_all
from nodekit.deploy.host.files import make_private
from nodekit.deploy.host.node import agents
from nodekit.deploy.host.schema import NodeStatus
from nodekit.deploy.plan import check, plan, script
from nodekit.deploy.plan.command import filled
from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.records.events import Gatherer, of_node
from nodekit.deploy.records.runs import Run
from nodekit.deploy.records.secret_files import RANKS, secrets_file
from nodekit.deploy.supervise.state import State
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.selection import IGNORE_FILE, why_left_out
from nodekit.inventory.errors import HostError, KitError, KitErrors
from nodekit.inventory.schema import Inventory

GRACE_S = 30.0  # how long ranks may take to save and end when they are stopped
EVENTS_TIMEOUT_S = 5.0  # events are for people to read, and not worth a long wait
SYNC_TIMEOUT_S = 3600.0
STOP_MARGIN_S = 10.0  # added to the ranks' grace: the time that their agent may take to end them
_OWN_FOLDERS = "/code/\n/envs/\n/kit/\n/runs/\n/bench-*\n"  # the folders that kit makes in a workdir


class BrokenHost(HostError):
    """The host is broken (GPUs are missing): starting its agent is pointless until it is repaired."""


class NodeClient:
    """A client for all nodes of a run, over the channels that are open at the moment.

    It is thread-safe: it reads the run's record and never writes it.
    """

    def __init__(self, run: Run, inventory: Inventory, channels: dict[str, HostChannel]) -> None:
        self.run = run
        self.inventory = inventory
        self.channels = channels
        self._started = run.started
        self._peers = cluster.peer_addresses(inventory.hosts)
        self._package: sync.Package | None = None

    def node(self, name: str) -> NodePlan:
        """Return the plan of a node from the run's record.

        Raises:
            HostError: the node was never started.
        """
        fields = self.run.nodes.get(name)
        if fields is None:
            raise HostError(name, "it was never started in this run")
        tuples = {key: tuple(fields[key]) for key in ("gpus", "secrets", "argv")}
        return NodePlan(**{**fields, **tuples})

    def prestart(self, name: str, secrets: Mapping[str, str]) -> None:
        """Start a node's agent, which imports torch and then waits for `start`."""
        node = self.node(name)
        env = {**node.env, "NODEKIT_START": self.inventory.job.start}
        if self.run.is_placed and secrets:
            # In a Slurm allocation the channel is not SSH, and not encrypted: the agent reads the run folder's file.
            file = secrets_file(Path(node.code_dir).parent, RANKS)
            secrets_at = {"env_file": str(file)} if file is not None else {}
        else:
            secrets_at, env = {}, {**env, **secrets}
        self._call(
            name,
            "prestart",
            node_dir=node.node_dir,
            python=node.python,
            kit_dir=node.kit_dir,
            env=env,
            **secrets_at,
        )

    def start(
        self, name: str, state: State, port: int | None, *, joins: bool = False, stands_by: bool = False
    ) -> None:
        """Send its spec to an agent that waits for it.

        `port` is, on the rendezvous host, the port reserved there for the store; `joins` says that the job is under
        way already, `stands_by` that ranks may be started before their attempt is known.
        """
        node = self.node(name)
        self._call(
            name,
            "start",
            node_dir=node.node_dir,
            spec=self._spec(name, state, joins=joins, stands_by=stands_by),
            port=port,
            called_off=state.called_off,
        )

    def start_anew(
        self,
        name: str,
        state: State,
        *,
        is_new: bool,
        stands_by: Callable[[], bool],
        record: Callable[[str, NodePlan, float], None],
    ) -> None:
        """Start the agent of a node that has none, after examining its host again.

        Args:
            name: of the node.
            state: the generation that the node is to join.
            is_new: whether the node may lack a run folder; if so, one is created.
            stands_by: returns whether the ranks can be started before their attempt is known, which holds if ranks of
                this run have stayed in their process. Called last: after a loss, it shows only while this node starts.
            record: writes to the run's record what the node runs, and its clock's offset from ours in seconds. Called
                before anything is started, so that a supervisor that takes over finds the node there.

        Raises:
            HostError: the host is unfit or unreachable, or the run has ended or was started again.
            KitError: raised by `record`.
        """
        host = next(each for each in self.inventory.hosts if each.name == name)
        channel = self._channel(name)
        if self._package is None:
            self._package = sync.package()
        alone = self.inventory.model_copy(update={"hosts": (host,)})
        if self.inventory.environment is not None:
            from nodekit.deploy.environment import environment  # most inventories have none

            # The node may have a new disk, or never have had the environment.
            limit_s = self.inventory.timings.environment
            environment.enter({name: channel}, [host], self.inventory.environment, timeout_s=limit_s)
        files = script.hosts_own(self._argv())
        facts = check.gather({name: channel}, alone, peers=self._peers, files=files)
        self._refuse_broken(name, facts[name])
        others = [each.get("torch", "") for other, each in self.run.nodes.items() if other != name]
        if problems := check.examine(alone, facts, others=[each for each in others if each]):
            raise KitErrors(problems)
        planned = self._planned(name, facts[name])
        code = self._lacking_code(planned)
        # An agent that runs there may belong to a later start of the run, which our copy of the record lacks.
        self._refuse_over(name)
        if name not in self.run.nodes:  # an agent that the last stop did not reach would run outdated code
            self._stop(planned, for_good=False)
        record(name, planned, facts[name].clock_offset_s)
        if not is_new and self.status(name)["fence"] < 0:
            raise HostError(
                name, "its folder of this run is gone; it comes in anew when the others have let it go"
            )
        workdirs = {name: facts[name].workdir}
        sync.send_package(self._package, {name: channel}, workdirs, timeout_s=SYNC_TIMEOUT_S)
        port = None
        if name == state.host:
            port = int(self._call(name, "hold_port", address=self.node(name).local_addr))
        try:
            self.prestart(name, secrets_of(self.inventory))
            if code is not None:
                self._send_code(name, code, facts[name])
            if self.run.stopped_by:
                raise HostError(name, "the run is being stopped")
            self._refuse_over(name)  # a start takes long
            called = dataclasses.replace(state, port=port or state.port)
            self.start(name, called, port, joins=True, stands_by=stands_by())
        except RemoteError:
            # An earlier request that timed out may have reached the host after all: then the node has its agent.
            if not self.status(name)["alive"]:
                raise

    def _refuse_over(self, name: str) -> None:
        if not self.run.as_recorded().is_still(self._started):
            raise HostError(name, "the run has ended, or was started anew")

    def _refuse_broken(self, name: str, found: check.Facts) -> None:
        """Raise BrokenHost if GPUs of the node's plan are missing, as after a reboot that did not bring one back."""
        planned = self.run.nodes.get(name, {}).get("gpus", ())
        there = {gpu.index for gpu in found.gpus.usable}
        if not planned or there.issuperset(planned):
            return
        cure = "see `sudo dmesg | grep -i nvrm` there; when it is mended, kit clean --forgive lets kit up use it again"
        if found.gpus.problem and "no answer" not in found.gpus.problem:
            raise BrokenHost(name, f"its GPUs cannot be listed: nvidia-smi: {found.gpus.problem}", cure=cure)
        if not found.gpus.problem:
            absent = ", ".join(str(index) for index in planned if index not in there)
            text = f"of the {len(planned)} GPUs that this node was planned with, nvidia-smi does not list {absent}"
            raise BrokenHost(name, text, cure=cure)

    def remember(self, name: str, why: str) -> None:
        """Note on the host itself that it is broken, for the next `kit up`."""
        workdir = str(Path(self.node(name).node_dir).parent.parent.parent)
        self._call(name, "broken.remember", workdir=workdir, node=name, run=self.run.run_id, why=why)

    def join(self, name: str, state: State) -> None:
        """Call a live agent into the present generation."""
        self._call(
            name,
            "join",
            node_dir=self.node(name).node_dir,
            spec=self._spec(name, state),
            called_off=state.called_off,
        )

    def fence(self, name: str, generation: int) -> None:
        """Refuse older generations on a node."""
        self._call(name, "fence", node_dir=self.node(name).node_dir, generation=generation)

    def set_voters(self, name: str, voters: Voters) -> None:
        """Have a node write down other voters."""
        self._call(name, "set_voters", node_dir=self.node(name).node_dir, voters=voters.to_dict())

    def stop(self, name: str, *, grace_s: float = GRACE_S, force: bool = False, for_good: bool = True) -> Any:
        """Stop a node's agent and return what was found there; with for_good=False the job goes on without the node."""
        return self._stop(self.node(name), grace_s=grace_s, force=force, for_good=for_good)

    def _stop(self, node: NodePlan, *, grace_s: float = GRACE_S, force: bool = False, for_good: bool) -> Any:
        return self._channel(node.name).call(
            "stop",
            timeout_s=_most_s(grace_s),
            node_dir=node.node_dir,
            grace_s=grace_s + STOP_MARGIN_S,
            force=force,
            for_good=for_good,
        )

    def stop_all(
        self, *, grace_s: float = GRACE_S, force: bool = False, say: Callable[[str], object] | None = None
    ) -> dict[str, Any]:
        """Stop the run on every connected node; return host → what was found there, or the exception.

        `say` is called now and then with the nodes that take long.
        """

        def waits(left: list[str], waited_s: float) -> None:
            assert say is not None
            say(
                f"waiting for {', '.join(left)} to stop, {waited_s:.0f} s of up to {_most_s(grace_s):.0f}: "
                "a snapshot is being saved, or a disk there does not answer"
            )

        return on_all(
            self._there(),
            lambda channel: self.stop(channel.host, grace_s=grace_s, force=force),
            waits=waits if say else None,
        )

    def gather_events(self, gatherer: Gatherer) -> None:
        """Fetch the new events and statuses of all connected nodes into the run's record."""

        def gather(channel: HostChannel) -> None:
            clock_offset = self.run.clock_offsets.get(channel.host, 0.0)
            node_dir = self.node(channel.host).node_dir
            for found in of_node(channel, node_dir, gatherer.at(channel.host), timeout_s=EVENTS_TIMEOUT_S):
                gatherer.add_of_node(channel.host, found, clock_offset=clock_offset)
            status = channel.call("status", timeout_s=EVENTS_TIMEOUT_S, node_dir=node_dir)
            gatherer.heard(channel.host, status, clock_offset=clock_offset)

        on_all(self._there(), gather)

    def _there(self) -> dict[str, HostChannel]:
        # Copy first, which is atomic: the threads that follow the nodes remove and replace channels.
        return {name: channel for name, channel in self.channels.copy().items() if name in self.run.nodes}

    def status(self, name: str) -> NodeStatus:
        """Return a node's status."""
        found: NodeStatus = self._call(name, "status", node_dir=self.node(name).node_dir)
        return found

    def _spec(
        self, name: str, state: State, *, joins: bool = False, stands_by: bool = False
    ) -> dict[str, Any]:
        return plan.spec_of(
            self.node(name),
            self.inventory,
            run_id=self.run.run_id,
            nodes=[host.name for host in self.inventory.hosts],
            voters=state.newest,
            master_addr=self.node(state.host).local_addr,
            master_port=state.port,
            is_host=name == state.host,
            token=self.run.token,
            grace_s=GRACE_S,
            joins=joins,
            stands_by=stands_by,
        ).to_dict()

    def _planned(self, name: str, found: check.Facts) -> NodePlan:
        if name in self.run.nodes:
            return plan.moved(self.node(name), self.inventory, found, self._peers[name])
        assert self._package is not None
        (node,) = plan.build(
            self.inventory,
            {name: found},
            run_id=self.run.run_id,
            peers=self._peers,
            master_port=0,
            kit_digest=self._package.digest,
            command=self.run.command,
            others={other: each["gpus"] for other, each in self.run.nodes.items()},
        ).nodes
        folder = node.env["NODEKIT_SNAPSHOT_DIR"]
        argv = filled(self._argv(), snapshot_dir=folder, run_id=self.run.run_id, node=name)
        return dataclasses.replace(node, argv=argv)

    def _argv(self) -> tuple[str, ...]:
        """Return what all nodes run, from the record: the code on this machine may have changed since the start."""
        return tuple(self.run.argv or next(iter(self.run.nodes.values()))["argv"])

    def _lacking_code(self, node: NodePlan) -> sync.Tree | None:
        """Return the run's code if a node lacks it (a new disk, or away when the run was resumed), else None.

        Raises:
            HostError: the code on this machine is not the run's either.
        """
        if self.run.is_placed:
            return None
        there = self._call(node.name, "tree.digest_at", dest=node.code_dir)
        wanted = self.run.code_digest
        if there and there == (wanted or there):
            return None
        tree = list_code(self.inventory, self.run.command)
        if wanted and tree.digest != wanted:
            has = "another version of this run's code" if there else "no copy of this run's code"
            raise HostError(
                node.name,
                f"it has {has}, and the code here has changed since the run was started",
                cure="kit down, then kit up, gives all nodes the code that is here",
            )
        return tree

    def _send_code(self, name: str, tree: sync.Tree, found: check.Facts) -> None:
        target = sync.code_target(
            self._channel(name), tree, workdir=found.workdir, dest=self.node(name).code_dir
        )
        all_or_raise(sync.send(tree, {name: target}, timeout_s=SYNC_TIMEOUT_S))
        all_or_raise(sync.finish_caching({name: target}, timeout_s=SYNC_TIMEOUT_S))

    def _channel(self, name: str) -> HostChannel:
        channel = self.channels.get(name)
        if channel is None:  # the thread that follows the node has dropped it, and opens another
            raise HostError(name, "the connection is gone")
        return channel

    def _call(self, name: str, op: str, **args: Any) -> Any:
        return self._channel(name).call(op, timeout_s=CALL_TIMEOUT_S, **args)


def _most_s(grace_s: float) -> float:
    """How long a node may take to stop."""
    return grace_s + STOP_MARGIN_S + agents.COPYING_GRACE_S + 5


def secrets_of(inventory: Inventory) -> dict[str, str]:
    """Return name → value of the job's secrets, from this process's environment.

    Raises:
        KitError: some are not set.
    """
    absent = [name for name in inventory.job.secrets if name not in os.environ]
    if absent:
        raise KitError(
            f"{inventory.path}: job.secrets names {', '.join(absent)}, not set in this environment",
            cure=f"export {absent[0]}=… and run again",
        )
    return {name: os.environ[name] for name in inventory.job.secrets}


def list_code(inventory: Inventory, command: list[str] | tuple[str, ...] | None) -> sync.Tree:
    """List the files of the job's code folder as they are now.

    Raises:
        KitError: the folder or the command's script is missing or unreadable.
    """
    code = Path(inventory.job.code).expanduser()
    script.find(inventory, command)
    _leave_out_workdir(code.resolve(), inventory)
    return sync.list_code(code)


def _leave_out_workdir(code: Path, inventory: Inventory) -> None:
    """Exclude a local node's workdir that lies in the code folder: each start would send all earlier runs along.

    Raises:
        KitError: only the user can exclude it.
    """
    for host in inventory.hosts:
        written = os.path.expanduser(host.workdir)  # noqa: PTH111  # raises for no user
        workdir = Path(written).resolve()
        if host.connection != "local" or not Path(written).is_absolute() or not workdir.is_relative_to(code):
            continue
        if why_left_out(code, (workdir.relative_to(code) / "runs/any").as_posix()) is not None:
            continue
        own = workdir / IGNORE_FILE
        with contextlib.suppress(OSError):
            if workdir != code and not own.exists():
                make_private(str(workdir))
                own.write_text(_OWN_FOLDERS, encoding="utf-8")
                continue
        raise KitError(
            f"{host.name}: `workdir: {host.workdir}` is in {code}, the folder that is sent",
            cure=f"set another one, or leave it out by a line in {code / IGNORE_FILE}",
        )
