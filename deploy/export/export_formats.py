"""An inventory, or the plan of its job, as files for other tools; pure. Docker Compose is in `export_compose`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.resolver import Resolver

from nodekit.deploy.connect import sshconfig
from nodekit.deploy.export.export_script import (
    Source,
    bash_word,
    check_text,
    launched,
    one_line,
    script,
    torchrun_words,
)
from nodekit.deploy.plan.plan import NodePlan, Plan
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host, Inventory


@dataclass(frozen=True)
class File:
    """One file of an export."""

    name: str
    text: str
    mode: int | None = None


def slots_of(inventory: Inventory) -> dict[str, int] | None:
    """Return host → its number of processes; None if only the hosts know."""
    found: dict[str, int] = {}
    for host in inventory.hosts[: inventory.nodes.max]:
        num_gpus = len(host.gpus) if isinstance(host.gpus, tuple) else host.gpus
        if inventory.job.nproc_per_node is None and num_gpus is None:
            return None
        found[host.name] = inventory.job.nproc_per_node or num_gpus or 1
    return found


# --- hostfile, ansible ----------------------------------------------------------------------------------------


def hostfile(source: Source, slots: Mapping[str, int]) -> list[File]:
    """Return the hostfile that mpirun and deepspeed read; `slots`: host → number of processes, without spares."""
    inventory = source.inventory
    hosts = [host for host in inventory.hosts if host.name in slots]
    names = _ssh_names(inventory)
    lines: dict[str, int] = {}
    for host in hosts:  # local nodes are one machine, and get one line
        lines[names[host.name]] = lines.get(names[host.name], 0) + slots[host.name]
    total = sum(slots.values())
    horovod = ",".join(f"{name}:{number}" for name, number in lines.items())
    about = {
        "use": f"mpirun --hostfile hostfile -np {total} …  or  deepspeed --hostfile hostfile …\n"
        f"horovodrun reads no comments: horovodrun -np {total} -H {horovod} …"
    }
    if settings := _ssh_config(hosts, names):
        about["ssh"] = f"these tools know ~/.ssh/config alone; the inventory says:\n{settings}"
    if spares := [host.name for host in inventory.hosts if host.name not in slots]:
        about["spares"] = f"not in here, as the job takes {len(hosts)}: {', '.join(spares)}"
    head = source.head("The hosts, one a line, and how many processes each takes.", **about)
    width = max(map(len, lines))
    rows = [f"{name.ljust(width)} slots={number}" for name, number in lines.items()]
    return [File("hostfile", "\n".join([*head, *rows]) + "\n")]


def _ssh_names(inventory: Inventory) -> dict[str, str]:
    """Return host → its name for ssh: its address, or its own name if several hosts have that address."""
    remote = [host.address for host in inventory.hosts if host.connection == "ssh"]
    names = {
        host.name: host.name if remote.count(host.address) > 1 else host.address for host in inventory.hosts
    }
    return names | {host.name: "localhost" for host in inventory.hosts if host.connection == "local"}


def _ssh_config(hosts: Sequence[Host], names: Mapping[str, str]) -> str:
    """Return a ~/.ssh/config with the inventory's settings; hosts with equal settings share a block."""
    blocks: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        if host.connection == "local":
            continue
        name = names[host.name]
        settings = {
            "HostName": None if name == host.address else host.address,
            "User": host.user,
            "Port": None if host.port is None else str(host.port),
            "IdentityFile": host.identity_file and sshconfig.quoted(host.identity_file),
            "UserKnownHostsFile": host.known_hosts
            and f"{sshconfig.quoted(host.known_hosts)} ~/.ssh/known_hosts ~/.ssh/known_hosts2",
        }
        lines = tuple(f"  {key} {one_line(value)}" for key, value in settings.items() if value is not None)
        if lines:
            blocks.setdefault(lines, []).append(name)
    return "\n".join("\n".join([f"Host {' '.join(of)}", *lines]) for lines, of in blocks.items())


# Numbers of YAML 1.2, such as 1e-3, which docker compose parses as numbers, and PyYAML as text.
_NUMBER = re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|0o[0-7]+)")


class _Verbatim(str):
    """A text that Ansible must not expand as a template."""


class _Dumper(yaml.SafeDumper):
    """Dumps YAML as people write it: no anchors, and lists indented below their key."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
    tag = "!unsafe" if isinstance(data, _Verbatim) else Resolver.DEFAULT_SCALAR_TAG
    style = "'" if _NUMBER.fullmatch(data.replace("_", "")) else None
    # By default PyYAML writes U+0085 and U+2028 unescaped, and reads them back as a space.
    return dumper.represent_scalar(tag, str(data), style=style if data.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Dumper.add_representer(_Verbatim, _text)


def to_yaml(values: Any) -> str:
    """Dump values as YAML, in their own order."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000
    )


def _verbatim(text: str | None) -> str | None:
    """Return a text in a form that Ansible takes literally.

    Raises:
        KitError: the text is not UTF-8, as YAML requires.
    """
    if text is None or re.fullmatch(r"[\w ./~@:+=,'\"-]+", text, re.ASCII):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        raise KitError(f"{text!r} is not UTF-8, and an Ansible inventory can hold nothing else") from None
    # Ansible converts tagged values to booleans, numbers or null, even in quotes, and cannot read `&`. Such values
    # are strings if untagged and in quotes, and none of them is a template.
    resolve: Callable[..., str] = Resolver().resolve
    is_text = resolve(yaml.ScalarNode, text, (True, False)) == Resolver.DEFAULT_SCALAR_TAG
    return _Verbatim(text) if is_text else text


def ansible(source: Source) -> list[File]:
    """Return the hosts as an Ansible inventory.

    Raises:
        KitError: YAML cannot represent a text of the inventory.
    """
    hosts = {}
    for host in source.inventory.hosts:
        is_local = host.connection == "local"
        known = host.known_hosts and shlex.quote(f"UserKnownHostsFile={sshconfig.quoted(host.known_hosts)}")
        values = {
            "ansible_connection": "local" if is_local else None,
            "ansible_host": None if is_local else _verbatim(host.address),
            "ansible_user": None if is_local else _verbatim(host.user),
            "ansible_port": None if is_local else host.port,
            "ansible_ssh_private_key_file": None if is_local else _verbatim(host.identity_file),
            "ansible_ssh_common_args": None if is_local or not known else _verbatim(f"-o {known}"),
            "ansible_python_interpreter": None if host.python == "python3" else _verbatim(host.python),
        }
        hosts[host.name] = {key: value for key, value in values.items() if value is not None}
    group = re.sub(r"\W", "_", source.inventory.name, flags=re.ASCII)
    group = f"_{group}" if group[0].isdigit() or group in ("all", "ungrouped") else group
    about = {"use": f"ansible -i hosts.yaml {group} -m ping"}
    if any(host.python.startswith("~") for host in source.inventory.hosts):
        about["python"] = (
            "Ansible 2.19 does not replace ~ by the user's home (earlier ones do): write it out for that"
        )
    head = source.head("The hosts, as an Ansible inventory.", **about)
    inventory = {"all": {"children": {group: {"hosts": hosts}}}}
    return [File("hosts.yaml", "\n".join(head) + "\n" + to_yaml(inventory))]


# --- accelerate, deepspeed ------------------------------------------------------------------------------------


def accelerate(planned: Plan, source: Source) -> list[File]:
    """Return a configuration file of `accelerate launch` for each node.

    Raises:
        KitError: the nodes differ in their number of processes, or accelerate cannot run the command.
    """
    nodes = planned.active
    if len({node.nproc_per_node for node in nodes}) > 1:
        found = ", ".join(f"{node.name} {node.nproc_per_node}" for node in nodes)
        raise KitError(
            f"accelerate starts the same number of processes on each machine, and here they differ ({found})",
            cure="set job.nproc_per_node",
        )
    return [File(f"{node.name}.yaml", _accelerate(node, planned, source)) for node in nodes]


def _accelerate(node: NodePlan, planned: Plan, source: Source) -> str:
    check_text(node.argv, node.env)
    is_alone = planned.world_size == 1
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # MULTI_GPU also for several machines without GPUs: accelerate would leave MULTI_CPU to mpirun.
        "distributed_type": "NO" if is_alone else "MULTI_GPU",
        "use_cpu": not node.gpus,
        "num_machines": len(planned.active),
        "num_processes": planned.world_size,
        "machine_rank": node.node_rank,
        "main_process_ip": node.master_addr,
        "main_process_port": node.master_port,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "mixed_precision": "no",
        "debug": False,
    }
    own = dict(node.env)
    if shown := own.pop("CUDA_VISIBLE_DEVICES", ""):
        values["gpu_ids"] = shown
    if not node.gpus:
        own["ACCELERATE_USE_CPU"] = "true"
    words = launched(node.argv, node.python) if is_alone else torchrun_words(node.argv, node.python)
    flags = [word.replace("no-python", "no_python") for word in words[:1] if word.startswith("--")]
    start = ["accelerate", "launch", "--config_file", f"{node.name}.yaml", *flags, *words[len(flags) :]]
    exports = "\n".join(f"export {name}={bash_word(value)}" for name, value in own.items())
    head = source.head(
        f"For accelerate on {node.name}, machine {node.node_rank} of {len(planned.active)}: "
        f"the job of `{source.kit_up}`.",
        use="in the folder of the code, on this host (the others' files on theirs):\n"
        + " ".join(map(bash_word, start)),
        env=f"accelerate's files have no variables, so before that:\n{exports}",
        **source.secrets(),
    )
    return "\n".join(head) + "\n" + to_yaml(values)


def deepspeed(planned: Plan, source: Source) -> list[File]:
    """Return a hostfile, the environment for all hosts, and a script with the command.

    Raises:
        KitError: deepspeed cannot run the command.
    """
    nodes = planned.active
    first = nodes[0]
    if any(node.argv != first.argv for node in nodes):
        raise KitError(
            "deepspeed gives all hosts one command, and {snapshot_dir} or {node} in this one is "
            "another on each",
            cure="give a path that is the same everywhere, or take --to shell",
        )
    check_text(first.argv, first.env)
    (hosts,) = hostfile(source, {node.name: node.nproc_per_node for node in nodes})
    env, left_out = _same_everywhere(nodes)
    words = [word.replace("no-python", "no_python") for word in launched(first.argv, first.python)[:1]]
    words += launched(first.argv, first.python)[1:]
    about = {
        "use": "./run.sh, in the folder of the code: code and python must lie at the same place on all hosts, and\n"
        "pdsh must be installed here; hostfile says how ssh must find the hosts",
        "env": "is in .deepspeed_env, which can hold no comment: deepspeed makes each line a command",
        **source.secrets("add them to .deepspeed_env, and keep it from others: {}"),
    }
    if left_out:
        about["without"] = (
            f"{', '.join(left_out)}:\ndifferent from host to host, or changed by the shell deepspeed puts them through"
        )
    if odd := [word for word in words if not re.fullmatch(r"[\w@+=:,./-]+", word, re.ASCII)]:
        shown = one_line(shlex.join(odd))
        about["beware"] = f"deepspeed has a shell on each host read the arguments; it may change\n{shown}"
    head = source.head(f"Runs the job of `{source.kit_up}` by deepspeed.", **about)
    options = [
        ["--hostfile", '"$KIT_FOLDER/hostfile"'],
        ["--master_addr", first.master_addr],
        ["--master_port", str(first.master_port)],
        ["--no_local_rank"],
    ]
    lines = [
        "#!/usr/bin/env bash",
        *head,
        "set -euo pipefail",
        'KIT_FOLDER=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)',
        'export DS_ENV_FILE="$KIT_FOLDER/.deepspeed_env"',
        "KIT_COMMAND=(",
        *(f"  {bash_word(word)}" for word in words),
        ")",
        f"exec deepspeed {' '.join(word for option in options for word in option)} " + '"${KIT_COMMAND[@]}"',
    ]
    return [
        hosts,
        File(".deepspeed_env", "".join(f"{name}={value}\n" for name, value in env.items()), mode=0o600),
        File("run.sh", "\n".join(lines) + "\n", mode=0o755),
    ]


def _same_everywhere(nodes: Sequence[NodePlan]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that deepspeed can set on all nodes, and the names of those that it cannot."""
    env: dict[str, str] = {}
    left_out = []
    for name in dict.fromkeys(name for node in nodes for name in node.env):
        values = list(dict.fromkeys(node.env.get(name, "") for node in nodes))
        # NCCL accepts several names, and uses those that exist.
        if name == "NCCL_SOCKET_IFNAME" and len(values) > 1:
            values = ["=" + ",".join(value.removeprefix("=") for value in values)]
        # gloo accepts one name only, so each host's shell looks up its own.
        if name == "GLOO_SOCKET_IFNAME" and len(values) > 1:
            known = " ".join(f"-e {node.local_addr}" for node in nodes)
            env[name] = f"$(ip -o addr | grep -wF {known} | awk '{{print $2; exit}}')"
            continue
        if len(values) > 1 or not _survives(values[0]):
            left_out.append(name)
        else:
            env[name] = values[0]
    return env, left_out


def _survives(value: str) -> bool:
    """Whether deepspeed passes a value on unchanged: it strips it and quotes with ``"``, and pdsh expands ``%``."""
    return value.isprintable() and value == value.strip() and not re.search(r"[\"$`\\%!]", value)


def shell(planned: Plan, source: Source) -> list[File]:
    """Return a script for each node; in an elastic job also for spares, which wait.

    Raises:
        KitError: the command or a variable contains a character that cannot be passed to a program.
    """
    is_elastic = planned.nodes[0].min_nodes < planned.nodes[0].max_nodes
    nodes = planned.nodes if is_elastic else planned.active
    return [File(f"{node.name}.sh", script(node, planned, source), mode=0o755) for node in nodes]
