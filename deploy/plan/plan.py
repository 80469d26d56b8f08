"""The plan of a run: what each node executes, from the inventory and the facts of the hosts; pure."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.output.wording import count
from nodekit.deploy.plan import gpus as host_gpus
from nodekit.deploy.plan.check import Facts, choose_interface, choose_interfaces
from nodekit.deploy.plan.command import TRAINING_MODULE, argv_on, filled
from nodekit.deploy.plan.gpus import Gpu
from nodekit.inventory.errors import HostError, KitError, KitErrors
from nodekit.inventory.fields import size_bytes
from nodekit.inventory.schema import Host, Inventory
from nodekit.training.errors import SAFE_TORCH, is_safe


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The plan of one node: its ranks, addresses, GPUs, environment and folders."""

    name: str
    node_rank: int
    """The node's rank when all nodes are present; `master_addr` is the address of rank 0's node."""
    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    interface: str
    local_addr: str
    """This node's address on `interface`."""
    gpus: tuple[int, ...]
    """The GPUs its workers use, by nvidia-smi's index; empty: CPU and gloo."""
    max_restarts: int
    env: Mapping[str, str]
    """Environment of the workers, besides torchrun's own variables and secrets."""
    secrets: tuple[str, ...]
    """Names of secret variables; their values are sent separately and never written."""
    argv: tuple[str, ...]
    python: str
    code_dir: str
    node_dir: str
    """This node's folder of the run: spec, status, logs, snapshots, output."""
    kit_dir: str
    torch: str = ""
    """The version of torch there; "" in old records."""


@dataclass(frozen=True)
class Plan:
    """The plan of one run."""

    run_id: str
    nodes: tuple[NodePlan, ...]

    def to_json(self) -> str:
        """Return the plan as a JSON object with ``run_id`` and ``nodes``."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)

    def to_text(self) -> str:
        """Return the plan as text for the user, with a block per node."""
        spares = len(self.nodes) - len(self.active)
        blocks = [
            f"run {self.run_id}: {count(len(self.active), 'node')}, world size {self.world_size}"
            + (f", {count(spares, 'spare')}" if spares else "")
        ]
        for node in self.nodes:
            env = "\n".join(
                f"              {key}={shlex.quote(value)}{_remark(key, value)}"
                for key, value in node.env.items()
            )
            blocks.append(
                f"{node.name}{'' if node in self.active else ' (spare)'}\n"
                f"  node_rank   {node.node_rank} of {node.max_nodes}"
                + (f" (goes on with {node.min_nodes})" if node.min_nodes < node.max_nodes else "")
                + f"\n  workers     {node.nproc_per_node} on {_devices(node)}\n"
                f"  interface   {node.interface} ({node.local_addr})\n"
                f"  rendezvous  {node.master_addr}:{node.master_port}\n"
                f"  command     {shlex.join(node.argv)}\n"
                f"  in          {node.code_dir}\n"
                f"  python      {node.python}\n"
                + (f"  secrets     {', '.join(node.secrets)}\n" if node.secrets else "")
                + f"  environment\n{env}"
            )
        return "\n\n".join(blocks)

    @property
    def active(self) -> tuple[NodePlan, ...]:
        """The nodes that the job starts on; the others are spares."""
        return self.nodes[: self.nodes[0].max_nodes]

    @property
    def world_size(self) -> int:
        """The number of workers when all active nodes are present."""
        return sum(node.nproc_per_node for node in self.active)


def _devices(node: NodePlan) -> str:
    return f"GPU {', '.join(map(str, node.gpus))}" if node.gpus else "CPU, gloo"


def build(
    inventory: Inventory,
    facts: Mapping[str, Facts],
    *,
    run_id: str,
    peers: Mapping[str, tuple[str, ...]],
    master_port: int,
    kit_digest: str,
    command: Sequence[str] | None = None,
    others: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> Plan:
    """Build the plan of a run. Hosts without facts are left out, and keep their node_rank.

    Args:
        peers: host → addresses of the other hosts, for which `facts` has routes.
        master_port: a free port on the first host.
        command: the command line's, which replaces the inventory's.
        others: node → GPUs, for nodes that are in the job already.

    Raises:
        KitError: with a line for each host that has no single interface, no GPU while others have, or fewer than ranks.
    """
    hosts = [host for host in inventory.hosts if host.name in facts]
    argv = argv_on(inventory, command, facts)
    _refuse_unsafe_torch(argv, facts)
    own = host_gpus.share(hosts, {host.name: facts[host.name].gpus for host in hosts})
    chosen, unclear = choose_interfaces(inventory, hosts, facts, peers)
    _refuse(unclear.values(), own, inventory.job.nproc_per_node, others)
    num_workers = {name: inventory.job.nproc_per_node or len(gpus) or 1 for name, gpus in own.items()}
    threads = share_threads(facts, num_workers)
    nodes = []
    for node_rank, host in enumerate(inventory.hosts):
        if (found := facts.get(host.name)) is None:
            continue
        interface, address = chosen[host.name]
        run_dir = f"{found.workdir}/runs/{run_id}"
        gpus = host_gpus.for_ranks(host, own[host.name], inventory.job.nproc_per_node)
        node_dir = f"{run_dir}/{host.name}"
        given = {**sockets(interface, address), **threads[host.name]}
        env = _environment(inventory, host, found, gpus, run_id, node_dir, given)
        node = NodePlan(
            name=host.name,
            node_rank=node_rank,
            min_nodes=inventory.nodes.min,
            max_nodes=inventory.nodes.max,
            nproc_per_node=num_workers[host.name],
            master_addr=chosen[hosts[0].name][1],
            master_port=master_port,
            interface=interface,
            local_addr=address,
            gpus=tuple(gpu.index for gpu in gpus),
            max_restarts=inventory.job.max_restarts,
            env=env,
            secrets=inventory.job.secrets,
            argv=filled(argv, snapshot_dir=env["NODEKIT_SNAPSHOT_DIR"], run_id=run_id, node=host.name),
            python=found.executable,
            code_dir=f"{run_dir}/code",
            node_dir=node_dir,
            kit_dir=f"{found.workdir}/kit/{kit_digest}",
            torch=found.torch or "",
        )
        nodes.append(node)
    return Plan(run_id, tuple(nodes))


def _refuse_unsafe_torch(argv: Sequence[str], facts: Mapping[str, Facts]) -> None:
    """Raise KitError if kit's training module would load snapshots with a version of torch that may run their code."""
    if tuple(argv[2:4]) != TRAINING_MODULE:
        return
    wanted = (
        f"{'.'.join(map(str, SAFE_TORCH))} or newer for kit's training module: snapshots that an older one loads "
        "may run code"
    )
    errors = [
        HostError(
            name,
            f"torch {found.torch}",
            wanted=wanted,
            cure=f"{found.install('-U torch')}; a script of your own runs with it (docs/releases.md)",
        )
        for name, found in facts.items()
        if found.torch and not is_safe(found.torch)
    ]
    if errors:
        raise KitErrors(errors)


def _refuse(
    unclear: Iterable[HostError],
    gpus: Mapping[str, Sequence[Gpu]],
    nproc_per_node: int | None,
    others: Mapping[str, Collection[int]],
) -> None:
    """Raise the given errors, and those of hosts with fewer GPUs than ranks, or with none while others have some."""
    errors: list[KitError] = [*unclear]
    for name in (name for name, own in gpus.items() if own):
        if (nproc_per_node or 0) > len(gpus[name]):
            found = (
                f"`job.nproc_per_node: {nproc_per_node}`, but it has {len(gpus[name])} GPU(s) for its ranks"
            )
            cure = "set it lower, or `gpus: 0` to train on the CPU"
            errors.append(HostError(name, found, wanted="a GPU for each, as NCCL needs it", cure=cure))
    everywhere = {**others, **gpus}
    with_gpus = [name for name, own in everywhere.items() if own]
    if with_gpus and len(with_gpus) < len(everywhere):
        without = [name for name, own in everywhere.items() if not own]
        errors.append(
            KitError(
                f"{', '.join(without)}: no GPU, but {', '.join(with_gpus)} have some; a job runs on GPUs everywhere "
                "or nowhere",
                cure="leave these hosts out, or set `gpus: 0` for all",
            )
        )
    if errors:
        raise KitErrors(errors)


def _environment(
    inventory: Inventory,
    host: Host,
    found: Facts,
    gpus: Sequence[Gpu],
    run_id: str,
    node_dir: str,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of a node's workers: ``given`` and kit's further ones, which the user's override."""
    env = {
        **given,
        "NODEKIT_RUN_ID": run_id,
        "NODEKIT_SNAPSHOT_DIR": f"{node_dir}/snapshots",
        "NODEKIT_OUTPUT_DIR": f"{node_dir}/output",
    }
    env |= {
        **host_gpus.environment(found.gpus, gpus),
        "NODEKIT_SNAPSHOT_EVERY": str(inventory.snapshots.every),
        "NODEKIT_COLLECTIVE_TIMEOUT_S": f"{inventory.timings.collective:g}",
        "NODEKIT_ON_NAN": inventory.job.on_nan,
        "PYTHONFAULTHANDLER": "1",  # prints the stack of a rank that crashes or hangs
    }
    if inventory.snapshots.shared is not None:
        env["NODEKIT_SNAPSHOT_DIR"] = f"{inventory.snapshots.shared}/{run_id}"
        env["NODEKIT_SNAPSHOT_SHARED"] = "1"
    users = {**host.env, **inventory.job.env}
    env |= users
    if {found.gpus.row.variable, *found.gpus.row.also} & users.keys():
        env.pop("NODEKIT_NUM_GPUS", None)  # the user chooses which GPUs the ranks see
    return env


def moved(node: NodePlan, inventory: Inventory, found: Facts, peers: Sequence[str]) -> NodePlan:
    """Return a node's plan after its host has come back, perhaps with another address or interface.

    Raises:
        HostError: the host has no single interface.
    """
    host = next(each for each in inventory.hosts if each.name == node.name)
    interface, address = choose_interface(host, found, inventory.network, tuple(peers))
    env = {**node.env, **sockets(interface, address), **host.env, **inventory.job.env}
    return dataclasses.replace(
        node,
        interface=interface,
        local_addr=address,
        python=found.executable,
        torch=found.torch or "",
        env=env,
    )


def spec_of(
    node: NodePlan,
    inventory: Inventory,
    *,
    run_id: str,
    nodes: Sequence[str],
    voters: Voters,
    master_addr: str,
    master_port: int,
    is_host: bool,
    token: str,
    grace_s: float,
    joins: bool,
    stands_by: bool,
) -> AgentSpec:
    """Return the spec of a node's agent for one generation; pure."""
    timings = inventory.timings
    names = {each.name for each in dataclasses.fields(NodePlan)}
    own = {
        each.name: getattr(node, each.name) for each in dataclasses.fields(AgentSpec) if each.name in names
    }
    return AgentSpec(
        **{**own, "master_addr": master_addr, "master_port": master_port},
        run_id=run_id,
        generation=voters.generation,
        nodes=tuple(nodes),
        electorate=voters.nodes,
        electorate_version=voters.version,
        is_host=is_host,
        grace_s=grace_s,
        keep_alive_s=timings.keep_alive,
        lost_after=timings.lost_after,
        last_call_s=timings.last_call,
        wait_s=timings.wait,
        hang=timings.hang,
        copies=1 if inventory.snapshots.shared is not None else inventory.snapshots.copies,
        keep_log_bytes=size_bytes(inventory.logs.keep),
        token=token,
        joins=joins,
        stands_by=stands_by,
    )


def sockets(interface: str, address: str) -> dict[str, str]:
    """Return the variables that name the interface for gloo and NCCL, and the address family for NCCL.

    NCCL's value begins with `=`, as eth1 alone would match eth10, too.
    """
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {**names, "NCCL_SOCKET_FAMILY": "AF_INET6"} if ":" in address else names


def _remark(key: str, value: str) -> str:
    """Return an explanation of a variable's value that is not plain by itself, as a comment; else ""."""
    is_exact = key == "NCCL_SOCKET_IFNAME" and value.startswith("=")
    return f"   # {value} means exactly this name" if is_exact else ""


def share_threads(facts: Mapping[str, Facts], num_workers: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Return OMP_NUM_THREADS: nodes on one machine share its cores; else 1 for several workers, as torchrun does.

    Otherwise each worker would start a thread per core, and they would compete for the cores.
    """
    shared: dict[str, dict[str, str]] = {}
    for name, found in facts.items():
        machine = [other for other, each in facts.items() if each.boot_id == found.boot_id]
        workers = sum(num_workers[other] for other in machine)
        shared[name] = {"OMP_NUM_THREADS": "1"} if num_workers[name] > 1 else {}
        if len(machine) > 1:
            shared[name] = {"OMP_NUM_THREADS": str(max(1, found.cpus // workers))}
    return shared
