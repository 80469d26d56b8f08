"""An SSH connection to one host, as `~/.ssh/config` says; refuses a host whose key is unknown.

fabric reads the user's configuration and connects through jump hosts. Where it would be lenient (host keys, timeouts,
which keys to try), `deploy/connect/sshclient.py` replaces paramiko's client.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from nodekit.deploy.connect import sshconfig
from nodekit.deploy.connect.sshclient import KEEPALIVE_S, Client, Clock, Settings, SshTarget
from nodekit.inventory.errors import HostError

if TYPE_CHECKING:
    import paramiko

__all__ = ["SshConnection", "SshProcess", "SshTarget", "connect", "hostname", "shell_line"]

_CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes256-ctr"


def connect(
    target: SshTarget,
    *,
    timeout_s: float = 10.0,
    accept_new_host_keys: bool = False,
    ask_passphrase: Callable[[str], str] | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> SshConnection:
    """Connect to a host, through its jump hosts if `~/.ssh/config` names some.

    Args:
        target: the host.
        timeout_s: for the whole connection, not counting the time that `ask_passphrase` takes.
        accept_new_host_keys: if no known_hosts file has the host, add its key to ~/.ssh/known_hosts. A key that
            differs from a known one is still refused.
        ask_passphrase: called with the path of an encrypted identity file, once per file and process; None to not ask.
        notice: receives a line for each host key that was accepted.

    Raises:
        HostError: has the address, the cause and the cure.
    """
    import fabric  # 0.15 s, and most commands never connect

    log = logging.getLogger("paramiko")
    if not log.handlers:  # else paramiko writes tracebacks to stderr; our errors say the same
        log.addHandler(logging.NullHandler())
    settings = Settings(
        target=target,
        clock=Clock(timeout_s),
        accept_new_host_keys=accept_new_host_keys,
        ask_passphrase=ask_passphrase,
        notice=notice,
    )
    try:
        known = {"User": target.user, "Port": target.port}  # a ProxyCommand may use them, as %r and %p
        config = fabric.Config(ssh_config=sshconfig.read(Path.home(), target.address, known), lazy=True)
        connection = fabric.Connection(target.address, user=target.user, port=target.port, config=config)
    except sshconfig.ConfigError as error:
        raise HostError(target.name, *error.problem) from error
    except ValueError as error:  # a Port that is not a number
        raise HostError(target.name, f"~/.ssh/config of {target.address}: {error}") from error
    except RecursionError:
        raise HostError(
            target.name,
            f"~/.ssh/config sends the jump host of {target.address} through itself",
            cure="give it `ProxyJump none`",
        ) from None
    hops = _equip(connection, settings)
    _open(connection, hops, target)
    return SshConnection(target, connection, hops)


def _open(connection: Any, hops: list[Client], target: SshTarget) -> None:
    """Open a connection through its hops; if that fails, close all of them and raise HostError."""
    import paramiko

    try:
        connection.open()
    except paramiko.ChannelException as error:
        _close_all(hops)
        raise HostError(
            target.name,
            f"{hops[-2].where} was reached, but it could not connect to "
            f"{connection.host}:{connection.port} ({error.text})",
            cure="is the host up, and does the jump host's sshd allow forwarding?",
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        _close_all(hops)
        raise HostError(
            target.name, f"connecting to {connection.host}:{connection.port} failed: {_words(error)}"
        ) from error
    except BaseException:
        _close_all(hops)
        raise


def _equip(connection: Any, settings: Settings) -> list[Client]:
    """Set our `Client` on a fabric connection and on its jump hosts; return them in the order of connecting."""
    hops: list[Client] = []
    jump = False
    while connection is not None and not isinstance(connection, str):
        if str(connection.ssh_config.get("proxyjump", "")).lower() == "none":
            connection.gateway = None
        proxy = connection.gateway if isinstance(connection.gateway, str) else None
        if proxy is not None:  # our client runs it: paramiko would use no shell, and not notice when it ends
            connection.gateway = None
        client = Client(
            settings, connection.ssh_config, original=connection.original_host, jump=jump, proxy_command=proxy
        )
        connection.client = client
        hops.insert(0, client)
        connection, jump = connection.gateway, True
    return hops


def _words(error: Exception) -> str:
    """Return the text of an error; if it has none, as many of paramiko's, the name of its class."""
    return str(error) or f"the connection is lost ({type(error).__name__})"


def _close_all(hops: Sequence[Client]) -> None:
    """Close all hops, the farthest first."""
    for client in reversed(hops):
        client.close()


class _ChannelStream(io.RawIOBase):
    """A channel's stdin or stdout as a file. Paramiko's own flushes when it is garbage collected, maybe too late."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._channel.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        import paramiko

        try:
            self._channel.sendall(data)
        except (paramiko.SSHException, EOFError) as error:  # for example because a ProxyCommand has ended
            raise ConnectionError(str(error) or "it is closed") from error
        return len(data)


class _ChannelStdin(_ChannelStream):
    def close(self) -> None:
        if not self.closed:
            import paramiko

            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                self._channel.shutdown_write()
        super().close()


class SshProcess:
    """A command that runs on the host; its streams are binary."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self.stdin = cast("IO[bytes]", _ChannelStdin(channel))
        self.stdout = cast("IO[bytes]", io.BufferedReader(_ChannelStream(channel), 1 << 16))
        self._stderr: collections.deque[bytes] = collections.deque(maxlen=16)
        # If stderr were not read, the command would block once the channel's window is full.
        self._drain = threading.Thread(target=self._read_stderr, name="ssh-stderr", daemon=True)
        self._drain.start()

    def _read_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._channel.recv_stderr(4096):
                self._stderr.append(data)

    def stderr_tail(self) -> str:
        """Return the last that it wrote to stderr, up to 64 KiB."""
        if self._channel.closed or self._channel.eof_received:
            self._drain.join(1.0)  # let it read the rest
        return b"".join(self._stderr.copy()).decode("utf-8", "replace")

    @property
    def exit_status(self) -> int | None:
        """The command's exit status; None while it runs, or if the connection was lost before it arrived."""
        if not self._channel.exit_status_ready():
            return None
        status = self._channel.recv_exit_status()
        return None if status == -1 else status

    def close(self) -> None:
        """Close its stdin and the channel; processes that it started may keep running."""
        import paramiko

        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # the connection may be lost
            self._channel.close()


class SshConnection:
    """An open SSH connection, kept alive until `close`, for any number of commands and file transfers."""

    def __init__(self, target: SshTarget, connection: Any, hops: list[Client]) -> None:
        self.target = target
        self._connection = connection
        self._hops = hops
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def exec(self, command: Sequence[str]) -> SshProcess:
        """Start a command; a leading ``~/`` of its first word stands for the home folder on the host."""
        import paramiko

        try:
            channel = self._connection.transport.open_session()
            channel.exec_command(shell_line(command))
        except (paramiko.SSHException, EOFError, OSError) as error:
            refused = isinstance(error, paramiko.ChannelException)
            raise HostError(
                self.target.name,
                f"{self._hops[-1].where} did not start a command: {_words(error)}",
                cure="its sshd needs a MaxSessions of 1 or more (`sshd -T` there shows it)"
                if refused
                else "",
            ) from error
        return SshProcess(channel)

    def sftp(self) -> paramiko.SFTPClient:
        """Open an SFTP session, which the caller has to close."""
        import paramiko

        try:
            return self._hops[-1].open_sftp()
        except (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError) as error:
            where, transport = self._hops[-1].where, self._connection.transport
            is_lost = transport is None or not transport.is_active()
            found = f"the connection to {where} is lost" if is_lost else f"{where} has no SFTP"
            cure = (
                "install rsync on both machines, or let its sshd have SFTP (in sshd_config: Subsystem sftp "
                "internal-sftp, and a MaxSessions of 2 or more)"
            )
            raise HostError(
                self.target.name, f"{found}: {_words(error)}", cure="" if is_lost else cure
            ) from error

    def to_port(self, port: int) -> paramiko.Channel:
        """Connect to a port on the host's own loopback, for `deploy/connect/tunnel.py`.

        Raises:
            ConnectionRefusedError: nothing listens there.
            HostError: the host's sshd forwards nothing, or the connection is lost.
        """
        import paramiko

        try:
            channel: paramiko.Channel = self._connection.transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=10
            )
        except paramiko.ChannelException as error:
            if error.code == 2:  # connect failed
                raise ConnectionRefusedError(error.text) from error
            raise HostError(
                self.target.name,
                f"{self._hops[-1].where} does not forward ({error.text})",
                cure="its sshd needs AllowTcpForwarding yes",
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise HostError(
                self.target.name, f"{self._hops[-1].where} cannot be reached any more: {_words(error)}"
            ) from error
        return channel

    @property
    def was_asked(self) -> bool:
        """Whether the user typed the passphrase of a key used for the host or a jump host."""
        return any(hop.used is not None and hop.used[0].asked for hop in self._hops)

    def rsync_rsh(self) -> list[str] | None:
        """Return an argv of the system's ssh client that reaches this host, whatever destination is added to it.

        It reads no configuration and asks no questions: address, user, key, jump hosts and the only accepted host key
        are in its arguments. None if there is no ssh client, or it cannot use our key without its passphrase.
        """
        if shutil.which("ssh") is None or self.was_asked:
            return None
        with self._lock:
            if self._files is None:
                self._files = tempfile.TemporaryDirectory(prefix="nodekit-ssh-")
        argv: list[str] = []
        for number, hop in enumerate(self._hops):
            argv = _ssh_argv(hop, number, argv, Path(self._files.name))
        return argv

    def close(self) -> None:
        """Close the connection, and those to its jump hosts."""
        _close_all(self._hops)
        with self._lock:
            if self._files is not None:
                self._files.cleanup()
                self._files = None


def hostname(address: str) -> str:
    """Return the HostName that ``~/.ssh/config`` has for an alias, or the alias itself if it has none."""
    return str(sshconfig.read(Path.home()).lookup(address)["hostname"])


def shell_line(command: Sequence[str]) -> str:
    """Quote a command as one line for the host's login shell. Quoting for that shell happens only here."""
    first, *rest = command
    if first.startswith("~/"):
        return shlex.join([first, *rest]).replace(shlex.quote(first), '"$HOME"/' + shlex.quote(first[2:]), 1)
    return shlex.join(command)


def _ssh_argv(hop: Client, number: int, before: list[str], folder: Path) -> list[str]:
    """Return the ssh argv that reaches one hop; `before` is the argv of the previous hop, empty for the first."""
    import paramiko

    used, server_key = hop.used, hop.host_key
    assert used is not None
    assert server_key is not None
    candidate, key = used
    known_hosts, public = folder / f"known_hosts{number}", folder / f"key{number}.pub"
    known_hosts.write_text(
        f"host{number} {server_key.get_name()} {server_key.get_base64()}\n", encoding="ascii"
    )
    if candidate.file is None:  # the public key tells ssh which of the agent's keys to use
        public.write_text(f"{key.get_name()} {key.get_base64()}\n", encoding="ascii")
    proxy = hop.proxy_command and hop.proxy_command.replace("%", "%%")
    if before:
        host = f"[{hop.host}]" if ":" in hop.host else hop.host
        proxy = shlex.join([*before, "-W", f"{host}:{hop.port}", "jump"]).replace("%", "%%")
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": sshconfig.quoted(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": f"host{number}",
        "UpdateHostKeys": "no",
        "IdentitiesOnly": "yes",
        "IdentityFile": sshconfig.quoted(candidate.file or public),
        "HostName": hop.host.replace("%", "%%"),
        "ServerAliveInterval": str(KEEPALIVE_S),
        "Ciphers": _CIPHERS,
        "LogLevel": "ERROR",
    }
    if not isinstance(key, paramiko.AgentKey):  # ssh would wait for ever for one that does not answer
        options["IdentityAgent"] = "none"
    if proxy:
        options["ProxyCommand"] = proxy
    argv = ["ssh", "-F", "none", "-l", hop.user, "-p", str(hop.port)]
    for name, value in options.items():
        argv += ["-o", f"{name}={value}"]
    return argv
