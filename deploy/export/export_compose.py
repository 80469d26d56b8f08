"""The job as a Docker Compose file: each host is a container on one machine; pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nodekit.deploy.export.export_formats import File, to_yaml
from nodekit.deploy.export.export_script import (
    Source,
    check_text,
    torchrun_env,
    torchrun_options,
    torchrun_words,
)
from nodekit.deploy.plan import plan
from nodekit.deploy.plan.check import Facts, Interface
from nodekit.deploy.plan.gpus import Gpu, HostGpus
from nodekit.deploy.plan.plan import NodePlan, Plan
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host, Inventory

_PORT = 29500
_NETWORK = "10.222.0.0"  # not one of docker's own, and rarely used
_FIRST_ADDRESS = 11
_NODEKIT = "/nodekit"
_CODE = "/code"


def compose(source: Source, *, run_id: str, kit_digest: str) -> list[File]:
    """Return the compose file of the job: each host is a container with an address of its own.

    Raises:
        KitError: torchrun cannot run the command, or YAML cannot represent a text.
    """
    inventory = source.inventory
    hosts = inventory.hosts[: inventory.nodes.max]
    subnet = ipaddress.ip_network(f"{_NETWORK}/{24 if len(hosts) < 240 else 16}")
    addresses = {host.name: str(subnet[_FIRST_ADDRESS + number]) for number, host in enumerate(hosts)}
    planned = _in_containers(inventory, hosts, addresses, source.command, run_id, kit_digest)
    names = _service_names([host.name for host in hosts])
    services: dict[str, Any] = {}
    next_gpu = 0
    for node in planned.nodes:
        gpus = [str(next_gpu + number) for number in range(len(node.gpus))]
        next_gpu += len(gpus)
        name = names[node.name]
        services[name] = _service(node, planned.run_id, name, inventory.job.code, addresses[node.name], gpus)
    values = {
        "name": re.sub(r"[^a-z0-9_-]", "-", inventory.name.lower()).lstrip("_-") or "kit",
        "services": services,
        "networks": {"job": {"ipam": {"config": [{"subnet": str(subnet)}]}}},
        "volumes": {
            volume["source"]: {} for node in planned.nodes for volume in _volumes(node, names[node.name])
        },
    }
    about = {
        "use": "docker compose up --abort-on-container-failure    (docker compose down -v removes all of it)",
        "image": "one with python and torch, and what the job imports: KIT_IMAGE=… docker compose up",
        "code": "is this machine's folder, not a copy; snapshots and output are in a volume for each host",
        **source.secrets(),
        "gpus": f"this machine's first {next_gpu}, shared out among the hosts"
        if next_gpu
        else "none: give the hosts `gpus:` in the inventory to have this machine's shared out",
    }
    head = source.head(f"The job of `{source.kit_up}` on one machine: each host is a container.", **about)
    return [File("compose.yaml", "\n".join(head) + "\n" + to_yaml(values))]


def _service(
    node: NodePlan, run_id: str, name: str, code: str, address: str, gpus: Sequence[str]
) -> dict[str, Any]:
    """Return a node's service; `gpus`: the indices of the machine's GPUs for this node."""
    check_text(node.argv, node.env)
    environment: dict[str, str | None] = {
        **{name: _dollars(value) for name, value in {**torchrun_env(node), **node.env}.items()},
        **dict.fromkeys(node.secrets),  # null: docker compose takes the value from its own environment
    }
    options = [word for option in torchrun_options(node, run_id) for word in option]
    words = [*options, *torchrun_words(node.argv, node.python)]
    folder = _dollars(str(Path(code).expanduser().resolve()))
    service: dict[str, Any] = {
        "image": "${KIT_IMAGE:-pytorch/pytorch:latest}",
        "hostname": name,
        "working_dir": _CODE,
        "entrypoint": ["python", "-m", "torch.distributed.run"],
        "command": [_dollars(word) for word in words],
        "environment": environment,
        "volumes": [{"type": "bind", "source": folder, "target": _CODE}, *_volumes(node, name)],
        "networks": {"job": {"ipv4_address": address}},
        "shm_size": "2gb",  # docker's default of 64 MB is too small for DataLoader workers and NCCL
        "ulimits": {"memlock": -1},
    }
    if gpus:
        device = {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _volumes(node: NodePlan, service: str) -> list[dict[str, str]]:
    """Return the volumes for snapshots and output."""
    snapshots = "snapshots" if node.env.get("NODEKIT_SNAPSHOT_SHARED") else f"{service}-snapshots"
    wanted = {"NODEKIT_SNAPSHOT_DIR": snapshots, "NODEKIT_OUTPUT_DIR": f"{service}-output"}
    return [
        {"type": "volume", "source": volume, "target": _dollars(node.env[name])}
        for name, volume in wanted.items()
        if node.env[name].startswith("/")  # else the user has chosen another place
    ]


def _in_containers(
    inventory: Inventory,
    hosts: Sequence[Host],
    addresses: Mapping[str, str],
    command: Sequence[str] | None,
    run_id: str,
    kit_digest: str,
) -> Plan:
    """Return the plan for containers, whose facts are known without connecting to hosts."""
    update = {"connection": "ssh", "interface": "eth0", "python": "python", "workdir": _NODEKIT}
    facts: dict[str, Facts] = {}
    inside = []
    for host in hosts:
        num_gpus = len(host.gpus) if isinstance(host.gpus, tuple) else host.gpus or 0
        inside.append(host.model_copy(update={**update, "gpus": num_gpus}))
        facts[host.name] = Facts(
            host=host.name,
            hostname=host.name,
            user="root",
            python="",
            executable="python",
            torch="",
            modules=(),
            clock_offset_s=0.0,
            cpus=1,
            interfaces=(Interface("eth0", True, (addresses[host.name],)),),
            routes={},
            gpus=HostGpus(usable=tuple(Gpu(index=each, token=str(each)) for each in range(num_gpus))),
            workdir=_NODEKIT,
            workdir_problem=None,
            rsync=False,
            boot_id=host.name,
        )
    contained = inventory.model_copy(update={"hosts": tuple(inside), "network": None})
    return plan.build(
        contained,
        facts,
        run_id=run_id,
        peers=dict.fromkeys(facts, ()),
        master_port=_PORT,
        kit_digest=kit_digest,
        command=command,
    )


def _service_names(names: Sequence[str]) -> dict[str, str]:
    """Return host → a valid name for a service, a container and a volume."""
    found: dict[str, str] = {}
    for name in names:
        fit = re.sub(r"[^A-Za-z0-9-]", "-", name).strip("-") or "host"
        while fit in found.values():
            fit += "-x"
        found[name] = fit
    return found


def _dollars(text: str) -> str:
    """Escape ``$`` for docker compose, which would expand variables.

    Raises:
        KitError: the text is not UTF-8, as YAML requires.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise KitError(f"{text!r} is not UTF-8, and a compose file can hold nothing else") from None
    return text.replace("$", "$$")
