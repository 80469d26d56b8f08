"""Connects one hop: TCP, host key, login; within a timeout, and with errors that say what to do.

It replaces paramiko's own client below fabric, which would accept any host key, wait without end, and try keys until
the host closes the connection.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nodekit.deploy.connect import hostkeys, identity, sshconfig
from nodekit.inventory.errors import HostError, LoginRefused

if TYPE_CHECKING:
    import paramiko

KEEPALIVE_S = 15
AGENT_TIMEOUT_S = (
    3.0  # how long an SSH agent may take to answer; a forwarded one answers from the user's machine
)
DEAD_AFTER_S = 45  # a connection is lost once data it sent was not acknowledged for so long
_NO_AGENT = "no SSH agent (SSH_AUTH_SOCK is not set)"
# One per process, so that the user is asked once for a key's passphrase, however many hosts need the key.
_key_files = identity.KeyFiles()


@dataclass(frozen=True, kw_only=True)
class SshTarget:
    """The host to connect to, and how; for a field that is None, `~/.ssh/config` decides."""

    name: str
    """The host's name in the inventory, for errors."""
    address: str
    """A host name, an IP address or an alias of `~/.ssh/config`."""
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    """The path of an additional known_hosts file."""


class TimeIsUpError(Exception):
    """The timeout for connecting has passed."""


class Clock:
    """The timeout of a connection, which stands still while the user types a passphrase."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds left; raise TimeIsUpError if there are none."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeIsUpError
        return left_s

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while the user is asked."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._deadline += time.monotonic() - start


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that a host and its jump hosts share."""

    target: SshTarget
    clock: Clock
    accept_new_host_keys: bool
    ask_passphrase: Callable[[str], str] | None
    notice: Callable[[str], None]


class Client:
    """An SSH client with the methods that fabric needs: connect, get_transport, open_sftp, close."""

    def __init__(
        self,
        settings: Settings,
        config: dict[str, Any],
        *,
        original: str,
        jump: bool,
        proxy_command: str | None,
    ) -> None:
        self._settings = settings
        self._config = config
        self.original = original
        self.proxy_command = proxy_command
        self._jump = jump
        self._proxy: _Proxy | None = None
        self._transport: paramiko.Transport | None = None
        self._agent: paramiko.Agent | None = None
        self._agent_problem = ""
        """Why no SSH agent can be asked for keys."""
        self.host, self.port, self.user = "", 22, ""
        self.host_key: paramiko.PKey | None = None
        """The key that the host presented; set in the handshake, before it is compared with the known ones."""
        self.used: tuple[identity.Candidate, paramiko.PKey] | None = None

    @property
    def where(self) -> str:
        """The host's address, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'the jump host ' if self._jump else ''}{host}:{self.port}"

    def problem(self, found: str, wanted: str = "", cure: str = "") -> HostError:
        """Return an error that names the inventory's host."""
        return HostError(self._settings.target.name, found, wanted, cure)

    def refusal(self, found: str, wanted: str = "", cure: str = "") -> LoginRefused:
        """Return such an error for a case in which another try would fail the same way."""
        return LoginRefused(self._settings.target.name, found, wanted, cure)

    def get_transport(self) -> paramiko.Transport | None:
        """Return the open transport; None before `connect`."""
        return self._transport

    def connect(self, *, hostname: str, port: int, username: str, sock: Any = None, **_: Any) -> None:
        """Connect and log in.

        Raises:
            HostError: that failed; has the cause and the cure.
        """
        import paramiko

        self.host, self.port, self.user = hostname, port, username
        clock = self._settings.clock
        phase = "connect"
        try:
            if self.proxy_command:
                self._proxy = _Proxy(self.proxy_command)
                sock = self._proxy.socket
            elif sock is None:
                sock = self._tcp()
            phase = "say the SSH greeting and agree on keys"
            transport = self._transport = paramiko.Transport(sock)
            transport.channel_timeout = clock.timeout_s
            self._handshake(transport)
            phase = "accept a key"
            self._login(transport)
            transport.set_keepalive(KEEPALIVE_S)
        except TimeIsUpError:
            found = f"{self.where} did not {phase} within {clock.timeout_s:g} s"
            if self._proxy is not None and not self._is_greeted:
                raise self._no_proxy(self._proxy, found) from None
            # The first message that fills a packet comes after that.
            if self._is_greeted and self.host_key is None:
                found = f"{self.where} has greeted, but did not agree on keys within {clock.timeout_s:g} s"
                cure = f"are large packets lost on the way (`ping -M do -s 1472 {self.host}`; a smaller MTU cures it)?"
                raise self.problem(found, cure=f"{cure} Or is it overloaded?") from None
            raise self.problem(found, cure="is it overloaded, or a firewall in between?") from None
        except sshconfig.ConfigError as error:
            raise self.problem(*error.problem) from error
        finally:
            if self.used is None:  # not logged in
                self.close()
                if sock is not None:
                    sock.close()  # a transport that did not start leaves it open

    @property
    def _is_greeted(self) -> bool:
        return self._transport is not None and bool(self._transport.remote_version)

    def _no_proxy(self, proxy: _Proxy, found: str) -> HostError:
        """Return the error for a ProxyCommand that led to no SSH server, with the last line that it wrote."""
        said = proxy.last_words()
        cure = f"see what this does here, which ~/.ssh/config has for {self.original}: {self.proxy_command}"
        return self.problem(found + (f" ({said})" if said else ""), cure=cure)

    def _tcp(self) -> socket.socket:
        clock = self._settings.clock
        try:
            addresses = _resolve(self.host, self.port, clock.left_s())
        except socket.gaierror as error:
            raise self.problem(
                f"the name '{self.host}' does not resolve ({error.strerror})",
                cure="set `address` to the host's IP address or to an alias of ~/.ssh/config",
            ) from error
        failed: dict[str, OSError] = {}
        for number, address in enumerate(addresses):
            try:
                # Divide the time, so that an address that does not answer leaves some for the others.
                return _connected(address, clock.left_s() / (len(addresses) - number))
            except OSError as error:
                failed[address[4][0]] = error
        raise self._unreached(failed) from next(iter(failed.values()))

    def _unreached(self, failed: Mapping[str, OSError]) -> HostError | TimeIsUpError:
        """Return the error for a host none of whose addresses accepted a connection; `failed` is address → error."""
        refused = [each for each, error in failed.items() if isinstance(error, ConnectionRefusedError)]
        silent = [each for each, error in failed.items() if isinstance(error, TimeoutError)]
        if silent and not refused:
            return TimeIsUpError()  # tells more than the errors of IPv6 addresses on a machine without IPv6
        words = {each: "no answer" if each in silent else str(failed[each].strerror) for each in failed}
        is_one = len(set(words.values())) == 1
        order = dict.fromkeys((*refused, *silent, *failed))
        said = words[min(order)] if is_one else "; ".join(f"{words[each]} at {each}" for each in order)
        cure = "is the host up, and its address right?"
        if refused:
            cure = "is sshd running there, and on that port?"
            if not is_one:
                cure = f"is sshd running at {refused[0]}, and on that port?"
        if silent:
            cure += f" is {silent[0]} overloaded, or a firewall in between?"
        return self.problem(f"{self.where} cannot be reached ({said})", cure=cure)

    def _handshake(self, transport: paramiko.Transport) -> None:
        import paramiko

        clock = self._settings.clock
        home = Path.home()
        files = sshconfig.known_hosts_files(self._config, self._settings.target.known_hosts, home)
        alias = self._config.get("hostkeyalias")
        name = alias or hostkeys.host_pattern(self.host, self.port)
        known = hostkeys.lookup(files, name)
        # As ssh does: a key known without the port is accepted, but another key then counts as unknown, not as changed.
        hints = known or ([] if alias else hostkeys.lookup(files, self.host.lower()))
        options = transport.get_security_options()
        options.key_types = hostkeys.preferred_key_types(options.key_types, hints)
        # GCM first: it is twice as fast as AES-CTR with an HMAC.
        options.ciphers = sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher)
        transport.banner_timeout = transport.handshake_timeout = clock.left_s()
        try:
            transport.start_client(timeout=clock.left_s())
        except (paramiko.SSHException, EOFError, OSError) as error:
            clock.left_s()
            if self._proxy is not None and not self._is_greeted:
                found = f"the ProxyCommand to {self.where} did not lead to an SSH server"
                raise self._no_proxy(self._proxy, found) from error
            if not transport.remote_version:
                raise self.problem(
                    f"{self.where} took the connection but did not greet as an SSH server",
                    cure="is the port right, or does it refuse you (MaxStartups, a firewall)?",
                ) from error
            raise self.problem(f"{self.where} and kit could not agree on keys ({error})") from error
        if not transport.initial_kex_done:
            raise TimeIsUpError
        key = self.host_key = transport.get_remote_server_key()
        shown = key.asbytes()
        if any(entry.revoked and entry.blob == shown for entry in hints):
            revoked = next(entry for entry in hints if entry.revoked and entry.blob == shown)
            raise self.refusal(f"the host key of {self.where} is marked @revoked ({revoked.where})")
        if any(entry.blob == shown for entry in hints):
            return
        known = [entry for entry in known if not entry.revoked]
        if known:
            raise self.refusal(*hostkeys.changed_problem(where=self.where, name=name, key=key, known=known))
        if not self._settings.accept_new_host_keys:
            proxied = self._config.get("proxyjump") or self._config.get("proxycommand")
            scannable = alias is None and not proxied
            host = self.host if scannable else self.original
            raise hostkeys.unknown_key(
                self._settings.target.name,
                where=self.where,
                name=name,
                host=host,
                port=self.port,
                key=key,
                scannable=scannable,
                files=files,
            )
        accepted = home / ".ssh/known_hosts"
        hostkeys.accept(accepted, name, key)
        self._settings.notice(
            f"{self._settings.target.name}: accepted the new host key of {self.where}, {key.get_name()} "
            f"{hostkeys.fingerprint(shown)}, into {accepted}"
        )

    def _login(self, transport: paramiko.Transport) -> None:
        import paramiko

        clock = self._settings.clock
        tried: list[str] = []
        passed_over: identity.IdentityError | None = None
        own = self._settings.target.identity_file
        try:
            for candidate in self._candidates():
                try:
                    with clock.stopped():
                        key = candidate.load()
                except identity.IdentityError as error:
                    if own is not None and candidate.file == Path(own).expanduser():
                        raise
                    passed_over = passed_over or error  # as ssh does: another key may be accepted
                    continue
                tried.append(candidate.label)
                transport.auth_timeout = clock.left_s()
                try:
                    more = transport.auth_publickey(self.user, key)
                except paramiko.BadAuthenticationType as error:
                    raise self.refusal(
                        f"{self.where} takes no keys, only {', '.join(error.allowed_types)}",
                        cure="allow PubkeyAuthentication in its sshd_config",
                    ) from error
                except (paramiko.SSHException, EOFError, OSError) as error:
                    clock.left_s()
                    if not transport.is_active():
                        raise self.problem(
                            f"{self.where} closed the connection while user '{self.user}' tried {', '.join(tried)}",
                            cure="where the agent holds many keys, name the right one with `identity_file`",
                        ) from error
                    continue
                if more:
                    raise self.refusal(
                        f"{self.where} wants more than a key of user '{self.user}': {', '.join(more)}; "
                        "kit cannot answer that"
                    )
                self.used = (candidate, key)
                return
            if passed_over is not None:
                raise passed_over
        except identity.IdentityError as error:
            found = f"{error.problem.found} (for user '{self.user}' at {self.where})"
            raise self.refusal(found, cure=error.problem.cure) from error
        agent = self._agent_problem
        if not tried:
            raise self.refusal(
                f"no key to log in with as user '{self.user}' at {self.where}: no key file, and "
                f"{agent or 'the SSH agent holds none'}",
                cure="`ssh-add` it, set `identity_file`, or make one with `ssh-keygen -t ed25519`",
            )
        port = "" if self.port == 22 else f"-p {self.port} "
        raise self.refusal(
            f"{self.where} does not accept user '{self.user}' with any key tried ({', '.join(tried)})"
            + f"; {agent}" * (agent not in ("", _NO_AGENT)),
            cure=f"is `user` right? `ssh-copy-id {port}{self.user}@{self.host}` adds a key there",
        )

    def _candidates(self) -> Iterator[identity.Candidate]:
        import paramiko

        named = [Path(os.path.expanduser(file)) for file in self._config.get("identityfile", [])]  # noqa: PTH111
        named = [file for file in named if file.is_file()]  # ssh skips missing files
        own = self._settings.target.identity_file
        if own is not None and not self._jump:
            identity.check_file(Path(own).expanduser())
            named.insert(0, Path(own).expanduser())
        self._agent_problem = _agent_problem()
        if not self._agent_problem:  # paramiko would wait for its answer without a limit
            with contextlib.suppress(paramiko.SSHException, OSError):
                self._agent = paramiko.Agent()
        return identity.candidates(
            named=list(dict.fromkeys(named)),
            only_named=self._config.get("identitiesonly", "no").lower() == "yes",
            agent_keys=self._agent.get_keys() if self._agent else (),
            home=Path.home(),
            keys=_key_files,
            ask=self._settings.ask_passphrase,
        )

    def open_sftp(self) -> paramiko.SFTPClient:
        """Open an SFTP session."""
        import paramiko

        assert self._transport is not None
        sftp = paramiko.SFTPClient.from_transport(self._transport)
        assert sftp is not None
        return sftp

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
        if self._proxy is not None:
            self._proxy.close()
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _agent_problem() -> str:
    """Return why no SSH agent can be asked for keys; "" if one answers."""
    path = os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return _NO_AGENT
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(AGENT_TIMEOUT_S)
            sock.connect(path)
            sock.sendall(b"\0\0\0\1\x0b")  # SSH_AGENTC_REQUEST_IDENTITIES, as it asks itself
            if sock.recv(1 << 18):  # all of it: what is left unread resets the connection
                return ""
            reason = "it has closed the connection"
    except OSError as error:
        is_slow = isinstance(error, (TimeoutError, BlockingIOError))  # the latter where too many wait for it
        reason = f"no answer within {AGENT_TIMEOUT_S:g} s" if is_slow else str(error.strerror or error)
    return f"the SSH agent of SSH_AUTH_SOCK ({path}) does not answer: {reason}"


class _Proxy:
    """A running ProxyCommand. As in ssh, the user's shell runs it, since it may contain ~ or variables."""

    def __init__(self, command: str) -> None:
        """Start the command; `socket` is connected to its stdin and stdout, and ends when the command does."""
        self.socket, far = socket.socketpair()
        argv = [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"]
        try:
            with far:
                self._process = subprocess.Popen(
                    argv, stdin=far.fileno(), stdout=far.fileno(), stderr=subprocess.PIPE
                )
        except BaseException:
            self.socket.close()
            raise
        self._lines: collections.deque[bytes] = collections.deque(maxlen=4)
        # If stderr were not read, the command would block once the pipe is full.
        self._thread = threading.Thread(target=self._read_stderr, name="proxy-stderr", daemon=True)
        self._thread.start()

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            while line := stderr.readline(4096):
                if line.strip():
                    self._lines.append(line)
        self._process.wait()

    def last_words(self) -> str:
        """Return the last line that it wrote to stderr."""
        self._thread.join(0.5)  # if the command has ended, let the thread read the rest
        lines = list(self._lines)
        return lines[-1].decode("utf-8", "replace").strip() if lines else ""

    def close(self) -> None:
        """End the command."""
        self.socket.close()
        self._process.terminate()


def _connected(found: Any, timeout_s: float) -> socket.socket:
    """Connect to one of the addresses that `_resolve` returned; raise OSError if that fails or takes too long."""
    family, kind, protocol, _, address = found
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # else TCP takes 15 minutes to notice a cut cable
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
    except BaseException:
        sock.close()
        raise
    return sock


def _resolve(host: str, port: int, timeout_s: float) -> list[Any]:
    """Call getaddrinfo in a thread, since it has no timeout of its own."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer from the name server within {timeout_s:.0f} s")
    if isinstance(found[0], OSError):
        raise found[0]
    return cast("list[Any]", found[0])
