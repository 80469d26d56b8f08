"""Opens the channels to an inventory's hosts, all at once; and what logs in to one with the system's ssh."""

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
    """How the command line wants SSH."""

    accept_new_host_keys: bool = False
    notice: Callable[[str], None] = print
    open: Callable[[Host], HostChannel] | None = None
    """What opens a channel in place of SSH, where the hosts are a Slurm allocation's."""
    may_ask: bool = True
    """Whether somebody is there to be asked for a key's passphrase."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_passphrase(self, path: str) -> str:
        """Ask for the passphrase of an encrypted key, at the terminal."""
        import getpass

        with self._lock:
            return getpass.getpass(f"passphrase of {path}: ")


def open_channel(host: Host, options: SshOptions, *, timeout_s: float = CONNECT_TIMEOUT_S) -> HostChannel:
    """A channel to one host; `timeout_s` is for logging in.

    Raises:
        HostError: it cannot be reached, or its python does not run.
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
    """Log in anew where a channel is lost; whoever has it goes on with it.

    Raises:
        LoginRefused: it cannot be, as it is now.
        HostError: as of `open_channel`; it may be tried again.
    """
    connection = None
    if host.connection != "local":
        # A passphrase that was given before is known; now a live view may have the terminal.
        connection = _connect(host, options, timeout_s=CONNECT_TIMEOUT_S, may_ask=False)
    channel.switch(host.python, connection)


def _connect(host: Host, options: SshOptions, *, timeout_s: float, may_ask: bool = True) -> SshConnection:
    from nodekit.deploy.connect import ssh  # paramiko is slow to import, and a local run does without

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
    """What opens a shell on one host: the system's ssh as the inventory says, or, for a local node, a shell."""
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
        # ssh takes the first value it is given: those that it would look into by itself are named again.
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
    """Channels to all hosts, closed at the end.

    Args:
        some: do with those that can be reached and tell of the others, instead of failing.
        unreachable: is told of them; None for the options' ``notice``.

    Raises:
        KitError: with a line for each host that cannot be reached.
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
    """Whether somebody typed a passphrase to open one of these: a process in the background could not open it."""
    opened = [channel.connection for channel in channels.values()]
    return any(connection is not None and connection.was_asked for connection in opened)


def peer_addresses(hosts: Iterable[Host]) -> dict[str, tuple[str, ...]]:
    """For each host the addresses of the others, as far as they can be told from here.

    The loopback address of a local host says nothing to another machine; only when all hosts are local do they
    reach each other by it.
    """
    hosts = list(hosts)
    all_local = all(host.connection == "local" for host in hosts)
    # At once: of names that only a jump host knows, a name server that is gone costs its 10 s once.
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
    """The IP address behind a host's `address`, through ~/.ssh/config's HostName and the resolver here."""
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
        return None  # reached through a jump host that knows the name
