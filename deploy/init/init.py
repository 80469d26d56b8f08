"""`kit init`: writes an inventory from a list of hosts (the user's, or a file's) and a survey of each host."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nodekit.deploy.connect import cluster, sshconfig
from nodekit.deploy.connect.channel import on_all, open_local
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.connect.hostkeys import UnknownKey, accept_all
from nodekit.deploy.init import template, template_slurm
from nodekit.deploy.init.template import Looked
from nodekit.deploy.init.template_text import Draft, visible
from nodekit.deploy.output import whole_file
from nodekit.inventory import ansible, importers, scontrol
from nodekit.inventory.errors import HostError, InventoryError, KitError
from nodekit.inventory.importers import FoundHost, Imported
from nodekit.inventory.load import read_limited

SURVEY_TIMEOUT_S = 25.0
"""For the survey of one host; connecting has its own timeout, `cluster.CONNECT_TIMEOUT_S`."""
MAX_FILE_BYTES = 16 * 1024**2


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit init`."""

    hosts: tuple[str, ...] = ()
    """Names of hosts; with another source, patterns that select its hosts."""
    ssh_config: bool = False
    hostfile: Path | None = None
    ansible: Path | None = None
    group: str | None = None
    """Only this group of the Ansible inventory."""
    slurm: bool = False
    output: Path = Path("cluster.yaml")
    """The file to write; ``-`` means stdout."""
    force: bool = False
    """Overwrite an existing file."""
    ssh: SshOptions = field(default_factory=SshOptions)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of `kit init`."""

    template: Draft
    num_reached: int
    """Number of hosts that answered; 1 for Slurm."""


def init(options: Options, say: Callable[[str], None]) -> Written:
    """Survey the hosts, and write the inventory.

    Args:
        options: those of the command line.
        say: called with lines of progress.

    Raises:
        KitError: a source cannot be read or names no host, or the output file exists.
    """
    _refuse_options(options)
    is_file = str(options.output) != "-"
    if is_file and not options.force and options.output.exists():
        raise KitError(
            f"{options.output} is there already", cure="--force writes over it, -o FILE writes another one"
        )
    if is_file and not options.output.parent.is_dir():  # before all hosts are surveyed
        raise KitError(f"{options.output} cannot be written: there is no folder {options.output.parent}")
    stem = options.output.stem if is_file else "cluster"
    is_name = re.fullmatch(r"[^\x00-\x20\x7f/.-][\w -]{0,46}", stem) and stem == stem.strip()
    told = {
        "name": stem if is_name else "cluster",
        "file": str(options.output) if is_file else "cluster.yaml",
        "command": _command(options),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    if options.slurm:
        made, num_reached = _from_slurm(told), 1
    else:
        imported = _hosts(options)
        looked = discover(imported.hosts, options.ssh, say)
        made = template.from_hosts(looked, notes=imported.notes, **told)
        num_reached = sum(each.survey is not None for each in looked)
    _write(made.text, options.output if is_file else None, told["name"], force=options.force)
    return Written(template=made, num_reached=num_reached)


def _refuse_options(options: Options) -> None:
    given = {
        "--ssh-config": options.ssh_config,
        "--hostfile": options.hostfile,
        "--ansible": options.ansible,
        "--slurm": options.slurm,
    }
    sources = [name for name, value in given.items() if value]
    if len(sources) > 1:
        raise KitError(f"kit init: found {' and '.join(sources)}", wanted="one of them")
    if not sources and not options.hosts:
        raise KitError(
            "kit init: found no host", wanted="HOST…, --ssh-config, --hostfile F, --ansible F or --slurm"
        )
    if options.group is not None and options.ansible is None:
        raise KitError("kit init: found --group without --ansible", wanted="both: the groups are Ansible's")
    if options.slurm and options.hosts:
        raise KitError("kit init: found hosts beside --slurm", wanted="none: Slurm chooses its nodes itself")


def _command(options: Options) -> str:
    words = ["kit init", *options.hosts]
    words += ["--ssh-config"] if options.ssh_config else []
    words += [f"--hostfile {options.hostfile}"] if options.hostfile else []
    words += [f"--ansible {options.ansible}"] if options.ansible else []
    words += [f"--group {options.group}"] if options.group else []
    words += ["--slurm"] if options.slurm else []
    line = " ".join(words)
    return line if len(line) <= 60 else line[:59] + "…"


# --- which hosts --------------------------------------------------------------------------------------------


def _hosts(options: Options) -> Imported:
    if options.ssh_config:
        file = Path.home() / ".ssh/config"
        found = importers.ssh_config(sshconfig.text(file), "~/.ssh/config")
    elif options.hostfile is not None:
        found = importers.hostfile(_read(options.hostfile), str(options.hostfile))
    elif options.ansible is not None:
        found = ansible.read(_read(options.ansible), str(options.ansible), options.group)
        found = _with_absolute_files(found, options.ansible)
    else:
        return importers.from_arguments(options.hosts)
    return importers.select(found, options.hosts) if options.hosts else found


def _with_absolute_files(found: Imported, file: Path) -> Imported:
    """Make paths to keys absolute: Ansible resolves them from the working directory, kit from the inventory's folder.

    A known_hosts file that does not exist is dropped: ssh works without it, while kit would refuse it.
    """

    def absolute(path: str | None) -> str | None:
        return str(Path.cwd() / path) if path and not path.startswith("~") else path

    def is_there(path: str) -> bool:
        return os.path.isfile(os.path.expanduser(path))  # noqa: PTH111, PTH113

    hosts = []
    missing: dict[str, None] = {}
    for host in found.hosts:
        known_hosts = absolute(host.known_hosts)
        if known_hosts and not is_there(known_hosts):
            missing.setdefault(known_hosts)
            known_hosts = None
        hosts.append(replace(host, identity_file=absolute(host.identity_file), known_hosts=known_hosts))
    beside = [name for name in ("group_vars", "host_vars") if (file.parent / name).is_dir()]
    note = (
        f"{' and '.join(beside)} beside {file} was not read; `ansible-inventory -i {file} --list > hosts.json`, and "
        "kit init --ansible hosts.json, has what it says"
    )
    notes = [f"{path}, which {file} names as UserKnownHostsFile, does not exist" for path in missing]
    return Imported(tuple(hosts), (*found.notes, *([note] if beside else []), *notes))


def _read(file: Path) -> str:
    try:
        if file.is_dir():
            raise KitError(f"{file}: found a folder", wanted="one of the files in it")
        return read_limited(file, MAX_FILE_BYTES, wanted="a list of hosts").decode("utf-8-sig", "replace")
    except OSError as error:
        raise KitError(f"{file}: cannot be read: {error.strerror or error}") from error


def _from_slurm(told: dict[str, str]) -> Draft:
    from nodekit.slurm.cluster.jobs import Slurm

    channel = open_local("this machine", sys.executable)
    try:
        slurm = Slurm(channel)
        status, out, err = slurm.run("scontrol", "show", "nodes")
        if status != 0:
            raise KitError(
                f"scontrol show nodes failed: {(err or out).strip() or status}", cure="does slurmctld run?"
            )
        known = slurm.partitions()
    finally:
        channel.close()
    default = next((name for name, each in known.items() if each.get("Default") == "YES"), None)
    return template_slurm.from_slurm(scontrol.partitions(out, default), default=default, **told)


# --- what they have -----------------------------------------------------------------------------------------


def discover(hosts: Sequence[FoundHost], ssh: SshOptions, say: Callable[[str], None]) -> list[Looked]:
    """Survey all hosts in parallel; a host that cannot be surveyed gets the reason in its `Looked`."""
    say(f"looking at {len(hosts)} host{'s' * (len(hosts) != 1)}")
    width = min(max(len(host.name) for host in hosts), 30)
    lock = threading.Lock()

    def ask(host: FoundHost) -> Looked:
        start = time.monotonic()
        looked = _ask(host, ssh)
        with lock:
            said = _seen(looked) if looked.survey is not None else f"not reached: {looked.problem}"
            say(f"  {host.name:<{width}}  {visible(said)}  ({time.monotonic() - start:.1f} s)")
        return looked

    results = on_all({host.name: host for host in hosts}, ask)
    for result in results.values():
        if isinstance(result, Exception):
            raise result  # a bug of ours: errors of hosts are in their Looked
    looked = [result for result in results.values() if isinstance(result, Looked)]
    if unknown := [each.unknown_key for each in looked if each.unknown_key is not None]:
        say(f"{', '.join(error.host for error in unknown)}: {accept_all(unknown)}")
    return looked


def _ask(host: FoundHost, ssh: SshOptions) -> Looked:
    from nodekit.inventory.schema import Host

    is_local = host.connection == "local"
    try:
        channel = cluster.open_channel(
            Host(
                name=host.name,
                address=host.address or ("127.0.0.1" if is_local else host.name),
                connection="local" if is_local else "ssh",
                python=sys.executable if is_local else "python3",
                workdir="~/nodekit",
                user=host.user,
                port=host.port,
                identity_file=host.identity_file and os.path.expanduser(host.identity_file),  # noqa: PTH111
                known_hosts=host.known_hosts,
            ),
            ssh,
        )
    except UnknownKey as error:
        return Looked(host=host, problem=error.shown, unknown_key=error)
    except HostError as error:
        return Looked(host=host, problem=str(error.problem))
    try:
        survey = channel.call("discovery.survey", timeout_s=SURVEY_TIMEOUT_S, python=host.python or "")
        return Looked(host=host, survey=survey)
    except HostError as error:
        return Looked(host=host, problem=str(error.problem))
    finally:
        channel.close()


def _seen(looked: Looked) -> str:
    survey = looked.survey
    assert survey is not None
    names = sorted({gpu["name"] for gpu in survey["gpus"]})
    none = (
        f"its GPUs cannot be listed (nvidia-smi: {survey['gpu_problem']})"
        if survey["gpu_problem"]
        else "no GPU"
    )
    gpus = f"{len(survey['gpus'])} × {' / '.join(names)}" if names else none
    torches = [f"torch {each['torch']} in {each['path']}" for each in survey["pythons"] if each["torch"]]
    torch = torches[0] if torches else "no torch"
    torch += f" and {len(torches) - 1} more" if len(torches) > 1 else ""
    return f"{gpus}, {survey['cpus']} cores, {torch}"


# --- the file -----------------------------------------------------------------------------------------------


def _write(text: str, output: Path | None, name: str, *, force: bool) -> None:
    """Check the text with kit's own loader, and write it atomically.

    Raises:
        KitError: the file cannot be written, or the text is no valid inventory.
    """
    from nodekit.inventory.load import load_inventory

    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / f"{name}.yaml"
        trial.write_text(text, encoding="utf-8")
        try:
            load_inventory(trial)
        except InventoryError as error:
            raise KitError(f"what was found makes no inventory:\n{error}") from error
    if output is None:
        return
    try:
        if not force:
            with output.open("x", encoding="utf-8") as file:
                file.write(text)
            return
        whole_file.write(output, text, mode=0o666)
    except FileExistsError:
        raise KitError(f"{output} is there already", cure="--force writes over it") from None
    except OSError as error:
        raise KitError(f"{output} cannot be written: {error.strerror or error}") from error
