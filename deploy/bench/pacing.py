"""Measures the model size and step time of an inventory's own job, by running a few steps on one node."""

from __future__ import annotations

import json
import posixpath
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy.bench.forecast import Job
from nodekit.deploy.bench.netbench import Progress
from nodekit.deploy.connect.channel import HostChannel, all_or_raise, open_local
from nodekit.deploy.plan.command import argv_of, training_options
from nodekit.deploy.plan.plan import NodePlan
from nodekit.deploy.supervise import node_client
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Inventory
from nodekit.training.tasks import BUILT_IN

MODULE = "nodekit.training.pace"
LIMIT_S = 300.0
_TIMEOUT_S = 120.0
_WHAT = "a few steps of the job"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the training module's arguments in the inventory's job mean for the measurement."""

    arguments: tuple[str, ...]
    num_ranks: int
    per_node: int
    """Ranks per node."""
    needs_code: bool
    """Whether the model or the data is in the job's folder."""


def on_first(
    inventory: Inventory, channels: Mapping[str, HostChannel], nodes: Sequence[NodePlan], progress: Progress
) -> Job:
    """Run a few steps on the first node, with its python, its GPU if it has one, and the job's code.

    Args:
        inventory: the job's.
        channels: to its hosts.
        nodes: the plan; kit's package is sent to its `kit_dir`.
        progress: called as it goes on.

    Raises:
        KitError: the job does not run the training module, or fails.
    """
    node = nodes[0]
    channel = channels[node.name]
    asked = _asked(inventory, sum(each.nproc_per_node for each in nodes), node.nproc_per_node)
    progress(_WHAT, 0, 0)
    workdir = posixpath.dirname(posixpath.dirname(node.kit_dir))
    sync.send_package(sync.package(), {node.name: channel}, {node.name: workdir}, timeout_s=_TIMEOUT_S)
    if not asked.needs_code:
        return _paced(
            channel, asked, progress, python=node.python, cwd=workdir, kit_dir=node.kit_dir, env=node.env
        )
    folder = f"{workdir}/bench-{secrets.token_hex(4)}"
    tree = node_client.list_code(inventory, None)
    target = sync.code_target(channel, tree, workdir=workdir, dest=f"{folder}/code")
    try:
        all_or_raise(sync.send(tree, {node.name: target}, timeout_s=_TIMEOUT_S))
        return _paced(
            channel, asked, progress, python=node.python, cwd=target.dest, kit_dir=node.kit_dir, env=node.env
        )
    finally:
        channel.call("execute", timeout_s=_TIMEOUT_S, argv=["rm", "-rf", "--", folder], limit_s=_TIMEOUT_S)


def refuse(inventory: Inventory) -> None:
    """Check that the job's model size can be determined.

    Raises:
        KitError: the job does not run the training module.
    """
    _asked(inventory, max(1, len(inventory.hosts)), 1)


def here(inventory: Inventory, progress: Progress) -> Job:
    """Run a few steps on this machine, without connecting to any host."""
    per_node = inventory.job.nproc_per_node or 1
    asked = _asked(inventory, per_node * max(1, len(inventory.hosts)), per_node)
    code = Path(inventory.job.code).expanduser().resolve()
    if not code.is_dir():
        raise KitError(f"job.code: {code} is no folder")
    channel = open_local("this machine", sys.executable)
    progress(_WHAT, 0, 0)
    try:
        return _paced(
            channel, asked, progress, python=sys.executable, cwd=str(code), kit_dir="", env=inventory.job.env
        )
    finally:
        channel.close()


def _asked(inventory: Inventory, num_ranks: int, per_node: int) -> _Asked:
    argv = argv_of(inventory, None)
    options = training_options(argv, {"WORLD_SIZE": str(num_ranks)})
    if options is None:
        raise KitError(
            f"--plan job: the job runs {' '.join(argv)}, and only that knows its model",
            cure="give the number of parameters and --step-time, as --plan 110e6 --step-time 0.4",
        )
    return _Asked(
        arguments=argv[4:],
        num_ranks=num_ranks,
        per_node=per_node,
        needs_code=options.task not in BUILT_IN or bool(options.data or options.model),
    )


def _paced(
    channel: HostChannel,
    asked: _Asked,
    progress: Progress,
    *,
    python: str,
    cwd: str,
    kit_dir: str,
    env: Mapping[str, str],
) -> Job:
    done = channel.stream(
        "attend",
        lambda passed: progress(_WHAT, round(passed), 0),
        argv=[python, "-m", MODULE, str(asked.num_ranks), *asked.arguments],
        cwd=cwd,
        kit_dir=kit_dir,
        env=dict(env),
        limit_s=LIMIT_S,
    )
    if done["status"] is None:
        raise HostError(
            channel.host, f"too few steps of the job were done within {LIMIT_S:g} s", cure="give --step-time"
        )
    if done["status"] != 0:
        said = [line for line in done["err"].splitlines() if line.strip()]
        last = said[-1].removeprefix(f"python -m {MODULE}: ") if said else f"exit status {done['status']}"
        raise HostError(channel.host, f"the job's steps could not be tried: {last}")
    told = json.loads(done["out"].splitlines()[-1])
    return Job(
        num_parameters=told["num_parameters"],
        step_s=told["step_s"],
        batch=told["batch"] * asked.per_node,
        gradient_bytes=told["gradient_bytes"],
        powersgd_numbers=told["powersgd_numbers"],
    )
