"""Convert an `InventoryFile` to an `Inventory`: expand hostlists, fill in defaults, check keys against each other."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from nodekit.inventory import hostlists
from nodekit.inventory.fields import Nodes
from nodekit.inventory.schema import Environment, Host, HostBlock, HostSettings, Inventory, InventoryFile
from nodekit.inventory.source import Path as KeyPath
from nodekit.inventory.source import Problem, quoted

_INSTEAD_UNDER_SLURM = {
    "nodes": "slurm.nodes",
    "gpus": "slurm.gpus_per_node",
    "gpu_model": "slurm.constraint",
    "workdir": "slurm.shared_dir",
    "connection": "none: Slurm reaches its nodes itself",
}
_NOT_IN_EXTRA = {
    "array": "slurm.array",
    "nodes": "slurm.nodes",
    "setup": "slurm.setup",
    "signal": "slurm.extra.signal_delay_s (seconds before the time limit): the signal is kit's",
    "srun_args": "slurm.srun_args",
    "clusters": "none: set SLURM_CLUSTERS, which squeue, scontrol and scancel follow, too",
    **dict.fromkeys(
        (
            "command",
            "error",
            "folder",
            "map_count",
            "ntasks",
            "ntasks_per_node",
            "open_mode",
            "output",
            "parsable",
            "test_only",
            "use_srun",
            "wait",
        ),
        "none: kit needs its own",
    ),
}
"""Options of sbatch and submitit that kit sets itself: with other values it would not find its job or the output, not
hear of the time limit, or have two tasks on a node.
"""
_SECRET_PATHS = (
    ("hooks.slack.com", "/services/"),
    ("discord.com", "/api/webhooks/"),
    ("webhook.office.com", "/"),
)
"""Host and path of webhooks whose URL is a secret."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ENVIRONMENTS = ("python", "requirements", "pyproject", "lock")


def resolve(
    file: InventoryFile, path: Path, written: set[str], left_out: set[KeyPath]
) -> tuple[Inventory | None, list[Problem]]:
    """Return the inventory, or the conflicts between the file's keys.

    Args:
        file: the valid part of the file, with its name set.
        path: the file's absolute path.
        written: the keys at the top of the file, including mistaken ones.
        left_out: paths of mistaken keys; checks that depend on them are skipped.
    """
    defaults = _with_paths_beside(file, path.parent)
    if file.environment and file.environment.python and file.python is None:
        defaults = defaults.model_copy(update={"python": file.environment.python})
    hosts = [
        (key, name, host)
        for key, block in (file.hosts or {}).items()
        for name, host in _hosts(key, block or HostBlock(), defaults, path.parent)
    ]
    problems = [
        *_section_problems(file, written),
        *_address_count_problems(file),
        *_name_problems(hosts),
        *_own_name_problems(hosts),
        *_address_problems(hosts, left_out),
        *_node_count_problems(file, len(hosts), left_out),
        *_secret_problems(file),
        *_code_problems(file.job.code),
        *_environment_problems(file, left_out),
        *_notify_problems(file, left_out),
    ]
    if problems or left_out:
        return None, problems
    inventory = Inventory(
        name=file.name or path.stem,
        path=path,
        network=file.network,
        nodes=file.slurm.nodes if file.slurm else file.nodes or Nodes(len(hosts), len(hosts)),
        hosts=tuple(host for _, _, host in hosts),
        slurm=file.slurm,
        defaults=defaults,
        environment=_environment(file, path.parent),
        job=file.job,
        snapshots=file.snapshots,
        logs=file.logs,
        timings=file.timings,
        notify=file.notify,
    )
    return inventory, []


def _with_paths_beside(settings: HostSettings, folder: Path) -> HostSettings:
    """Return the host settings alone, with paths on the control machine made absolute."""
    values = {key: getattr(settings, key) for key in HostSettings.model_fields}
    for key in ("identity_file", "known_hosts"):
        if values[key] is not None:
            # Path.expanduser raises for a user that does not exist; SSH names the missing file better.
            values[key] = str(folder / os.path.expanduser(values[key]))  # noqa: PTH111
    return HostSettings.model_validate(values)


def _hosts(key: str, block: HostBlock, defaults: HostSettings, folder: Path) -> Iterator[tuple[str, Host]]:
    own = _with_paths_beside(block, folder)
    merged = {
        name: value
        for settings in (defaults, own)
        for name in HostSettings.model_fields
        if (value := getattr(settings, name)) is not None
    }
    is_local = merged.get("connection") == "local"
    settled = {
        "connection": "ssh",
        "python": sys.executable if is_local else "python3",
        "workdir": "~/nodekit",
        **merged,
        "env": {**defaults.env, **own.env},
    }
    names = hostlists.expand(key)
    addresses = ("127.0.0.1",) * len(names) if is_local else names
    if block.address:
        given = hostlists.expand(block.address)
        # `_address_count_problems` reports a mismatch.
        addresses = given if len(given) == len(names) else names
    for name, address in zip(names, addresses, strict=True):
        yield name, Host.model_validate({**settled, "name": name, "address": address})


def _section_problems(file: InventoryFile, written: set[str]) -> Iterator[Problem]:
    if {"hosts", "slurm"} <= written:
        yield Problem(("slurm",), "found beside hosts, wanted one of the two", at_key=True)
    elif not {"hosts", "slurm"} & written:
        yield Problem(
            (),
            "found neither hosts nor slurm, wanted one of the two, as hosts: {gpu1: {}} or slurm: {nodes: 2}",
        )
    elif "slurm" in written:
        for key in _INSTEAD_UNDER_SLURM.keys() & written:
            yield Problem((key,), f"found beside slurm, wanted {_INSTEAD_UNDER_SLURM[key]}", at_key=True)
        for key in sorted(_NOT_IN_EXTRA.keys() & set(file.slurm.extra if file.slurm else ())):
            yield Problem(
                ("slurm", "extra", key), f"found below extra, wanted {_NOT_IN_EXTRA[key]}", at_key=True
            )
        if file.job.on_slow == "drain":
            yield Problem(("job", "on_slow"), "found drain beside slurm, which keeps its nodes, wanted tell")


def _address_count_problems(file: InventoryFile) -> Iterator[Problem]:
    for key, block in (file.hosts or {}).items():
        if block and block.address:
            num_names, num_addresses = len(hostlists.expand(key)), len(hostlists.expand(block.address))
            if num_names != num_addresses:
                text = f"{_count(num_addresses, 'address', 'es')}, wanted {num_names} for {key}"
                yield Problem(("hosts", key, "address"), f"found {text}")


def _name_problems(hosts: list[tuple[str, str, Host]]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for key, name, _ in hosts:
        if first.setdefault(name, key) != key:
            yield Problem(
                ("hosts", key),
                f"found the host {name} again (first in {first[name]}), wanted it once",
                at_key=True,
            )


def _own_name_problems(hosts: list[tuple[str, str, Host]]) -> Iterator[Problem]:
    for key, name, _ in hosts:
        if hostlists.is_own_name(name):
            own = ", ".join(hostlists.OWN_NAMES)
            text = f"found the host {name}, as kit calls a folder of its own ({own})"
            yield Problem(
                ("hosts", key),
                f"{text}, wanted another name, as host-{name}: {{address: {name}}}",
                at_key=True,
            )


def _address_problems(hosts: list[tuple[str, str, Host]], left_out: set[KeyPath]) -> Iterator[Problem]:
    first: dict[tuple[str, int | None], str] = {}
    flawed = {path[1] for path in left_out if path[:1] == ("hosts",) and len(path) > 1}
    for key, name, host in hosts:
        if key in flawed:
            continue
        place = (host.address.lower(), host.port)
        if host.connection == "ssh" and first.setdefault(place, name) != name:
            text = f"found {name} at {host.address}, the address and port of {first[place]}"
            yield Problem(("hosts", key, "address"), f"{text}, wanted one of its own")


def _node_count_problems(file: InventoryFile, num_hosts: int, left_out: set[KeyPath]) -> Iterator[Problem]:
    hosts_are_known = not any(path[:1] == ("hosts",) and len(path) <= 2 for path in left_out)
    if hosts_are_known and file.hosts and file.nodes and file.nodes.max > num_hosts:
        text = f"found {file.nodes}, wanted at most {num_hosts}: there {'is' if num_hosts == 1 else 'are'}"
        yield Problem(("nodes",), f"{text} {_count(num_hosts, 'host')}")


def _secret_problems(file: InventoryFile) -> Iterator[Problem]:
    blocks = {key: block for key, block in (file.hosts or {}).items() if block}
    places: list[tuple[KeyPath, dict[str, str]]] = [
        ((), file.env),
        (("job",), file.job.env),
        *((("hosts", key), block.env) for key, block in blocks.items()),
    ]
    for path, env in places:
        for name in env.keys() & set(file.job.secrets):
            text = (
                "found among job.secrets too, wanted in one of the two (a secret's value is not written here)"
            )
            yield Problem((*path, "env", name), text, at_key=True)


def _code_problems(code: str) -> Iterator[Problem]:
    if code.startswith("~") and os.path.expanduser(code) == code:  # noqa: PTH111  # Path.expanduser raises
        text = f"found {quoted(code)}, wanted a folder here: this machine has no such user"
        yield Problem(("job", "code"), text)


def _environment(file: InventoryFile, folder: Path) -> Environment | None:
    """Return the environment to build, with absolute paths; None if an interpreter is given."""
    asked = file.environment
    if asked is None or not (asked.requirements or asked.pyproject or asked.lock):
        return None
    update: dict[str, object] = {
        key: str(folder / os.path.expanduser(value))  # noqa: PTH111  # as for identity_file
        for key in ("requirements", "pyproject", "lock")
        if (value := getattr(asked, key)) is not None
    }
    update["find_links"] = tuple(
        each if "://" in each else str(folder / os.path.expanduser(each))  # noqa: PTH111
        for each in asked.find_links
    )
    return asked.model_copy(update=update)


def _environment_problems(file: InventoryFile, left_out: set[KeyPath]) -> Iterator[Problem]:
    asked = file.environment
    if asked is None or any(path[:1] == ("environment",) for path in left_out):
        return
    given = [key for key in _ENVIRONMENTS if getattr(asked, key) is not None]
    if len(given) != 1:
        found = " beside ".join(given) or f"none of {', '.join(_ENVIRONMENTS)}"
        yield Problem(
            ("environment",), f"found {found}, wanted one of them, as requirements: requirements.txt"
        )
    elif given == ["python"]:
        if file.python is not None:
            text = "found beside python at the top of the file, wanted one of the two"
            yield Problem(("environment", "python"), text, at_key=True)
        for key in sorted(asked.model_fields_set - {"python"}):
            text = (
                "found beside python, wanted it beside requirements, pyproject or lock: nothing is installed"
            )
            yield Problem(("environment", key), text, at_key=True)
    elif asked.extras and given == ["requirements"]:
        text = "found beside requirements, wanted beside pyproject or lock: a requirements file has none"
        yield Problem(("environment", "extras"), text, at_key=True)
    if asked.no_index and not asked.find_links:
        yield Problem(("environment", "no_index"), "found without find_links, wanted both", at_key=True)


def _notify_problems(file: InventoryFile, left_out: set[KeyPath]) -> Iterator[Problem]:
    asked = file.notify
    if asked is None or any(path[:1] == ("notify",) for path in left_out):
        return
    if asked.command is None and asked.webhook is None:
        yield Problem(
            ("notify",), "found neither command nor webhook, wanted one, as command: [notify-send, kit]"
        )
    if asked.webhook is None:
        return
    url, where = asked.webhook.url, ("notify", "webhook")
    if (url is None) == (asked.webhook.url_from is None):
        found = "found neither url nor url_from" if url is None else "found url beside url_from"
        yield Problem(where, f"{found}, wanted one of the two, as url: https://example.org/kit")
        return
    parts = urlsplit(url or "")
    if any(parts.netloc.endswith(host) and parts.path.startswith(path) for host, path in _SECRET_PATHS):
        text = (
            f"found a URL of {parts.netloc}, which is a secret as a whole, wanted url_from: NAME, of the variable "
            "of your environment that holds it"
        )
        yield Problem((*where, "url"), text)
    if parts.scheme == "http" and asked.webhook.headers_from and parts.hostname not in _LOOPBACK:
        yield Problem(
            (*where, "headers_from"),
            "found beside an http url, wanted https: a secret would travel where others can read it",
            at_key=True,
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
