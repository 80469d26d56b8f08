"""Opens channels to all hosts of an inventory in parallel; and builds the ssh command line for a login shell."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.deploy.connect import sshconfig
from nodekit.deploy.connect.channel import HostChannel, all_or_raise, on_all, open_local, open_ssh
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host

if TYPE_CHECKING:
    from nodekit.deploy.connect.ssh import SshConnection

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SshOptions:
    """SSH options from the command line."""

    accept_new_host_keys: bool = False
    notice: Callable[[str], None] = print
    open: Callable[[Host], HostChannel] | None = None
    """Opens a channel in place of SSH, for hosts of a Slurm allocation."""
    may_ask: bool = True
    """Whether to ask the user for the passphrase of an encrypted key."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_passphrase(self, path: str) -> str:
        """Ask for the passphrase of an encrypted key at the terminal."""
        import getpass

        with self._lock:
            return getpass.getpass(f"passphrase of {path}: ")


def open_channel(host: Host, options: SshOptions, *, timeout_s: float = CONNECT_TIMEOUT_S) -> HostChannel:
    """Open a channel to one host; `timeout_s` limits the login.

    Raises:
        HostError: the host is unreachable, or its python does not run.
    """
    if options.open is not None:
        return options.open(host)
    if host.connection == "local":
        return open_local(host.name, host.python)
    connection = _connect(host, options, timeout_s=timeout_s)
    try:
        return open_ssh(connection, host.name, host.python)
    except BaseException:
        connection.close()
        raise


def reopen(channel: HostChannel, host: Host, options: SshOptions) -> None:
    """Log in again for a lost channel, so that all its users can go on with it.

    Raises:
        LoginRefused: the host refuses the login; another try would fail the same way.
        HostError: as `open_channel` does; another try may succeed.
    """
    connection = None
    if host.connection != "local":
        # Passphrases given before are known. Do not ask now: a live view may be using the terminal.
        connection = _connect(host, options, timeout_s=CONNECT_TIMEOUT_S, may_ask=False)
    channel.switch(host.python, connection)


def _connect(host: Host, options: SshOptions, *, timeout_s: float, may_ask: bool = True) -> SshConnection:
    from nodekit.deploy.connect import ssh  # paramiko is slow to import, and a local run does not need it

    return ssh.connect(
        ssh.SshTarget(
            name=host.name,
            address=host.address,
            user=host.user,
            port=host.port,
            identity_file=host.identity_file,
            known_hosts=host.known_hosts,
        ),
        timeout_s=timeout_s,
        accept_new_host_keys=options.accept_new_host_keys,
        ask_passphrase=options.ask_passphrase if may_ask and options.may_ask else None,
        notice=options.notice,
    )


def login_argv(host: Host, *, accept_new_host_keys: bool) -> list[str]:
    """Return the argv that opens a shell on a host: the system's ssh as the inventory says; for a local one, $SHELL."""
    if host.connection == "local":
        return [os.environ.get("SHELL", "/bin/sh")]
    argv = ["ssh", "-o", f"StrictHostKeyChecking={'accept-new' if accept_new_host_keys else 'yes'}"]
    if host.user is not None:
        argv += ["-l", host.user]
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.identity_file is not None:
        argv += ["-i", str(Path(host.identity_file).expanduser())]
    if host.known_hosts is not None:
        # The option replaces ssh's default files, so they are named as well.
        files = [str(Path(host.known_hosts).expanduser()), "~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
        argv += ["-o", f"UserKnownHostsFile={' '.join(map(sshconfig.quoted, files))}"]
    return [*argv, "--", host.address]


@contextmanager
def channels(
    hosts: Iterable[Host],
    options: SshOptions,
    *,
    some: bool = False,
    unreachable: Callable[[str], None] | None = None,
) -> Iterator[dict[str, HostChannel]]:
    """Open channels to all hosts, and close them at the end.

    Args:
        hosts: the hosts.
        options: for SSH.
        some: go on with the reachable hosts and report the others, instead of failing.
        unreachable: receives the error text of each unreachable host; None for the options' ``notice``.

    Raises:
        KitError: has a line for each host that is unreachable.
    """
    by_name = {host.name: host for host in hosts}
    results = on_all(by_name, lambda host: open_channel(host, options))
    opened = {name: channel for name, channel in results.items() if isinstance(channel, HostChannel)}
    try:
        if some:
            for result in results.values():
                if isinstance(result, KitError):
                    (unreachable or options.notice)(str(result))
                elif isinstance(result, Exception):
                    raise result
        else:
            all_or_raise(results)
        yield opened
    finally:
        on_all(opened, HostChannel.close)


def was_asked(channels: Mapping[str, HostChannel]) -> bool:
    """Whether the user typed a passphrase to open one of these; a process in the background could not open it again."""
    opened = [channel.connection for channel in channels.values()]
    return any(connection is not None and connection.was_asked for connection in opened)


def peer_addresses(hosts: Iterable[Host]) -> dict[str, tuple[str, ...]]:
    """Return host → IP addresses of the other hosts, as far as this machine can find them out.

    The loopback address of a local host is of no use to other machines; it is included only if all hosts are local.
    """
    hosts = list(hosts)
    all_local = all(host.connection == "local" for host in hosts)
    # In parallel: if the name server is down, its time-out of 10 s passes once, not for each name.
    found = all_or_raise(on_all({host.name: host for host in hosts}, _numeric))
    addresses = {
        name: address
        for name, address in found.items()
        if address is not None and (all_local or not ipaddress.ip_address(address).is_loopback)
    }
    return {
        host.name: tuple(address for name, address in addresses.items() if name != host.name)
        for host in hosts
    }


def _numeric(host: Host) -> str | None:
    """Resolve a host's `address` to an IP address, by ~/.ssh/config's HostName and this machine's resolver."""
    name = host.address
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    if host.connection == "ssh":
        from nodekit.deploy.connect import ssh

        name = ssh.hostname(name)
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None  # perhaps only a jump host knows the name
