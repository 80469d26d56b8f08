"""Host keys: reads known_hosts files as OpenSSH does, and builds the errors for unknown and changed keys."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.deploy.host.files import make_private
from nodekit.inventory.errors import LoginRefused, Problem

if TYPE_CHECKING:
    import paramiko

_append_lock = threading.Lock()  # keys of several hosts may be accepted in parallel


@dataclass(frozen=True, kw_only=True)
class KnownKey:
    """A host's key, from one line of a known_hosts file."""

    key_type: str
    blob: bytes
    where: str
    """The line's place, ``FILE:LINE``."""
    revoked: bool


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint of a public key in OpenSSH's form."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def host_pattern(host: str, port: int) -> str:
    """Return a host's name in the form of known_hosts: ``[HOST]:PORT``, or HOST for port 22."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def lookup(files: Sequence[Path], name: str) -> list[KnownKey]:
    """Return the known keys of a host, whose name has the form of `host_pattern`; missing files are skipped."""
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for number, line in enumerate(lines, 1):
            fields = line.split()
            marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
            # Skip @cert-authority: paramiko does not support host certificates.
            if len(fields) < 3 or fields[0].startswith("#") or marker == "@cert-authority":
                continue
            if not _matches(fields[0], name):
                continue
            try:
                blob = base64.b64decode(fields[2], validate=True)
            except binascii.Error:
                continue
            where = f"{file}:{number}"
            found.append(KnownKey(key_type=fields[1], blob=blob, where=where, revoked=marker == "@revoked"))
    return found


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in patterns[3:].split("|"))
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    matched = False
    for pattern in patterns.lower().split(","):
        # Only * and ? are special in known_hosts; brackets are part of [host]:port.
        glob = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, glob):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def preferred_key_types(offered: Iterable[str], known: Sequence[KnownKey]) -> list[str]:
    """Sort the host key algorithms, those of known keys first, since a host presents only one of its keys."""
    types = {key.key_type for key in known if not key.revoked}
    if "ssh-rsa" in types:
        types |= {"rsa-sha2-512", "rsa-sha2-256"}
    return sorted(offered, key=lambda name: name not in types)  # sorted() is stable


def accept(file: Path, name: str, key: paramiko.PKey) -> None:
    """Append a host's key to a known_hosts file."""
    with _append_lock:
        make_private(file.parent)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            if size and os.pread(handle, 1, size - 1) != b"\n":
                stream.write(b"\n")
            stream.write(f"{name} {key.get_name()} {key.get_base64()}\n".encode())


class UnknownKey(LoginRefused):
    """No known_hosts file has the host's key."""

    def __init__(
        self, name: str, problem: Problem, *, shown: str, command: str, scan: tuple[str, str] | None
    ) -> None:
        """Make the error for one host; the other fields are for `accept_all`.

        Args:
            name: of the host in the inventory.
            problem: the full message.
            shown: a short message: the address, and the key that it presented.
            command: the command that accepts the key.
            scan: ssh-keyscan's port option and address; None if ssh-keyscan cannot reach the host.
        """
        super().__init__(name, *problem)
        self.shown, self.command, self.scan = shown, command, scan


def unknown_key(
    target: str,
    *,
    where: str,
    name: str,
    host: str,
    port: int,
    key: paramiko.PKey,
    scannable: bool,
    files: Sequence[Path],
) -> UnknownKey:
    """Return the error for a host whose key is in no known_hosts file.

    Args:
        target: the host's name in the inventory.
        where: its address, for messages.
        name: its name in the form of known_hosts.
        host: the host to name in the command that accepts the key.
        port: of its sshd.
        key: the key that it presented.
        scannable: whether ssh-keyscan can reach it: not behind a jump host, nor under another name.
        files: the known_hosts files that were read.
    """
    port_option = "" if port == 22 else f"-p {port} "
    scan = (port_option, host) if scannable else None
    command = f"ssh {port_option}{host}"  # behind a jump host, or under another name
    if scan:
        command = _scan_command(port_option, [host])
    shown = f"{key.get_name()} {fingerprint(key.asbytes())}"
    problem = Problem(
        f"the host key of {where} is unknown ('{name}' is not in {', '.join(map(str, files))}). It showed {shown}",
        cure=_ask_first(f"`{command}`"),
    )
    short = f"the host key of {where} is unknown; it showed {shown}"
    return UnknownKey(target, problem, shown=short, command=command, scan=scan)


def accept_all(errors: Iterable[UnknownKey]) -> str:
    """Return the cure for several hosts with unknown keys, with one ssh-keyscan command per port."""
    ports: dict[str, dict[str, None]] = {}
    commands: dict[str, None] = {}
    for error in errors:
        if error.scan:
            ports.setdefault(error.scan[0], {})[error.scan[1]] = None
        else:
            commands[error.command] = None
    commands = dict.fromkeys([*(_scan_command(port, hosts) for port, hosts in ports.items()), *commands])
    return _ask_first(" and ".join(f"`{command}`" for command in commands))


def _scan_command(port_option: str, hosts: Iterable[str]) -> str:
    folder = "" if (Path.home() / ".ssh").is_dir() else "mkdir -p -m 700 ~/.ssh && "
    return f"{folder}ssh-keyscan {port_option}{' '.join(hosts)} >> ~/.ssh/known_hosts"


def _ask_first(commands: str) -> str:
    return (
        "if that is the host's (ask `ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub` there), accept it with "
        f"{commands}, or run kit again with --accept-new-host-keys"
    )


def changed_problem(*, where: str, name: str, key: paramiko.PKey, known: Sequence[KnownKey]) -> Problem:
    """Return the error for a host that presented another key than the known ones."""
    old = next((entry for entry in known if entry.key_type == key.get_name()), known[0])
    file = old.where.rpartition(":")[0]
    return Problem(
        f"THE HOST KEY OF {where} HAS CHANGED: someone may be in between, or it was installed anew. "
        f"It showed {key.get_name()} {fingerprint(key.asbytes())}; known is {old.key_type} "
        f"{fingerprint(old.blob)} ({old.where}). Nothing was sent",
        cure="if its administrator confirms the new key, remove the old one by "
        f"`ssh-keygen -R '{name}' -f '{file}'` and accept the new one",
    )
