"""Read hosts from files of other tools: hostfiles of MPI, DeepSpeed and Horovod, and ~/.ssh/config. Pure.

Ansible's inventories are read in `inventory/ansible.py`, Slurm's nodes in `inventory/scontrol.py`. The checks of host
names, users and ports are here for all of them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nodekit.inventory import hostlists
from nodekit.inventory.errors import InventoryError

_USER = re.compile(r"[^\s:@-][^\s:@]*")


@dataclass(frozen=True, kw_only=True)
class FoundHost:
    """One host in a file; None for what the file does not specify."""

    name: str
    where: str
    """``file:line``, or the file alone if it includes others."""
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    python: str | None = None
    """An interpreter that may be suitable for training."""
    connection: str | None = None
    """``local`` or None."""
    slots: int | None = None
    """Number of processes in a hostfile: usually GPUs, or cores on a host without GPUs."""
    note: str = ""
    """Further information for the user."""


@dataclass(frozen=True)
class Imported:
    """The hosts of a file."""

    hosts: tuple[FoundHost, ...]
    notes: tuple[str, ...] = ()
    """Entries that were skipped, and why."""


def checked_host(name: str, where: str) -> str:
    """Return a host's name or address if it is valid.

    Raises:
        InventoryError: it is invalid, such as ``-oProxyCommand=…``.
    """
    if not hostlists.is_name(name):
        raise InventoryError(f"{where}: found {name[:80]!r}", wanted="a host's name or address")
    return name


def checked_user(user: str, where: str) -> str:
    """Return a user's name if it is valid; raise InventoryError if not."""
    if not _USER.fullmatch(user) or not user.isprintable():
        raise InventoryError(f"{where}: found the user {user[:80]!r}", wanted="a name without spaces")
    return user


def checked_port(port: str, where: str) -> int:
    """Return a port if it is valid; raise InventoryError if not."""
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InventoryError(f"{where}: found the port {port[:80]!r}", wanted="1 to 65535")
    return int(port)


def from_arguments(arguments: Sequence[str]) -> Imported:
    """Parse hosts on a command line: names, addresses or hostlists (``gpu[01-04]``), optionally with ``user@``."""
    found: dict[str, FoundHost] = {}
    for argument in arguments:
        user, at, hosts = argument.rpartition("@")
        try:
            names = hostlists.expand(hosts)
        except ValueError as error:
            hint = "; a port goes into ~/.ssh/config" if re.search(r"[^:]:\d+$", hosts) else ""
            raise InventoryError(
                f"{argument[:80]!r}: wanted a host's name or a hostlist, as gpu[01-04] ({error}{hint})"
            ) from error
        for name in names:
            host = FoundHost(name=name, where="command line", user=user or None)
            if at:
                checked_user(user, f"{argument[:80]!r}")
            if name in found and found[name] != host:
                raise InventoryError(f"{argument[:80]!r}: {name} is there twice", wanted="it once")
            found[name] = host
    return Imported(tuple(found.values()))


def select(imported: Imported, patterns: Sequence[str]) -> Imported:
    """Select the hosts that match a pattern (``*`` and ``?``) or hostlist.

    Raises:
        InventoryError: a pattern matches no host.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        glob = pattern.replace("[", "[[]")  # brackets belong to hostlists: gpu[01-16] does not match gpu0
        names = {host.name for host in imported.hosts if fnmatch.fnmatchcase(host.name, glob)}
        with contextlib.suppress(ValueError):  # `gpu*` is not a hostlist
            names |= set(hostlists.expand(pattern)) & {host.name for host in imported.hosts}
        if not names:
            there = ", ".join(host.name for host in imported.hosts[:8])
            more = " …" if len(imported.hosts) > 8 else ""
            raise InventoryError(f"{pattern[:80]!r} names none of the hosts that were found: {there}{more}")
        chosen |= names
    return Imported(tuple(host for host in imported.hosts if host.name in chosen), imported.notes)


# --- hostfiles ----------------------------------------------------------------------------------------------


def hostfile(text: str, file: str) -> Imported:
    """Read a hostfile of MPI, DeepSpeed or Horovod: ``h``, ``h:8``, ``h slots=8``, ``h 8``, with comments.

    The slots of a repeated host are added up (as in $PBS_NODEFILE, with a line per slot).
    """
    found: dict[str, FoundHost] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{file}:{number}"
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        for entry in _entries(line):
            host = _hostfile_entry(entry, where)
            again = found.get(host.name)
            if again is not None:
                if (again.user, again.port) != (host.user, host.port):
                    raise InventoryError(f"{where}: {host.name} is another one than at {again.where}")
                host = replace(again, slots=(again.slots or 1) + (host.slots or 1))
            found[host.name] = host
    if not found:
        raise InventoryError(f"{file}: found no host", wanted="lines as `gpu1 slots=8` or `gpu1:8`")
    return Imported(tuple(found.values()))


def _entries(line: str) -> list[str]:
    """Split a line such as ``h1:8,h2:8``, Horovod's syntax for the command line, which some hostfiles have, too."""
    is_list = "," in line and not re.search(r"[\s=\[]", line)
    return [entry for entry in line.split(",") if entry] if is_list else [line]


def _hostfile_entry(entry: str, where: str) -> FoundHost:
    words = re.sub(r"\s*=\s*", "=", entry).split()
    place, *settings = words
    if "=" in place:
        raise InventoryError(f"{where}: found {entry[:80]!r}", wanted="a host first, as `gpu1 slots=8`")
    if place[0] in "^+":
        raise InventoryError(
            f"{where}: found {place[:80]!r}", wanted="a host's name: it names others than itself"
        )
    user, at, place = place.rpartition("@")
    name, slots = _split_count(place)
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.lower().replace("-", "_")
        if not equals and key.isdigit():  # LSF's and some DeepSpeed users' `gpu1 8`
            key, value = "slots", key
        elif not equals or not key.isidentifier():  # not an identifier: a rankfile's `rank 0=gpu1 slot=1`
            raise InventoryError(f"{where}: found {setting[:80]!r}", wanted="settings as slots=8")
        values[key] = value
    written = values.get("slots", values.get("cpu", values.get("count", slots)))
    if written is not None and not re.fullmatch(r"[0-9]{1,6}", written):
        raise InventoryError(f"{where}: found slots={written[:80]!r}", wanted="a number")
    user = values.get("user", values.get("username", user))
    port = values.get("port")
    most = values.get("max_slots", "")
    return FoundHost(
        name=checked_host(name, where),
        where=where,
        user=checked_user(user, where) if user or at else None,
        port=checked_port(port, where) if port is not None else None,
        slots=int(written) if written is not None else None,
        note=f"max_slots={most} in {where}" if re.fullmatch(r"[0-9]{1,6}", most) else "",
    )


def _split_count(place: str) -> tuple[str, str | None]:
    """Split ``gpu1:8`` and ``[fe80::1]:8`` into host and count; ``fe80::1`` is only an address."""
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::([0-9]+))?", place)
    if bracketed:
        return bracketed.group(1), bracketed.group(2)
    try:
        return str(ipaddress.IPv6Address(place)), None
    except ValueError:
        # MVAPICH's h:2:mlx5_0 also names an adapter.
        counted = re.fullmatch(r"([^:]+):([0-9]+)(?::.*)?", place)
    return (counted.group(1), counted.group(2)) if counted else (place, None)


# --- ~/.ssh/config ------------------------------------------------------------------------------------------


def ssh_config(text: str, file: str) -> Imported:
    """Return the aliases of an SSH configuration, in its order.

    Patterns, and hosts with User git, are skipped. Only names are taken: kit reads the other settings when it connects.
    """
    aliases: dict[str, dict[str, str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        keyword = re.match(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)", line)
        if keyword is None:
            continue
        name, value = keyword.group(1).lower(), keyword.group(2).strip()
        if name in ("host", "match"):
            current = _aliases(value) if name == "host" else []
            for alias in current:
                aliases.setdefault(alias, {})
        elif name in ("hostname", "user"):
            for alias in current:
                aliases[alias].setdefault(name, value.strip('"'))
    hosts, notes = [], []
    for alias, settings in aliases.items():
        if not hostlists.is_name(alias):
            notes.append(f"{file}: {alias[:80]!r} is no name that an inventory takes")
        elif settings.get("user") == "git":
            notes.append(f"{file}: {alias}, where one is User git")
        else:
            hosts.append(FoundHost(name=alias, where=file, note=_hostname_note(alias, settings)))
    if not hosts:
        raise InventoryError(f"{file}: found no host", wanted="lines as `Host gpu1` (patterns name none)")
    return Imported(tuple(hosts), tuple(notes))


def _aliases(value: str) -> list[str]:
    """Return the words of a Host line that are not patterns, without quotes."""
    words = re.findall(r'"([^"]*)"|(\S+)', value.split(" #", 1)[0])
    return [word for pair in words if (word := pair[0] or pair[1]) and not re.search(r"[*?!]", word)]


def _hostname_note(alias: str, settings: dict[str, str]) -> str:
    hostname = settings.get("hostname", "")
    return f"HostName {hostname}" if hostname not in ("", alias, "%h") else ""
