"""Fixtures: real sshd processes on loopback, each with its own port and host key, and keys to log in."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

_READY_WITHIN_S = 60.0
"""10 s, as it once was, are little more than a machine stands still whose processors somebody else has."""


@dataclass(frozen=True, kw_only=True)
class Sshd:
    """One running sshd."""

    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def host_key(self) -> str:
        """``type base64`` of its ed25519 host key."""
        return " ".join((self.folder / "host_ed25519.pub").read_text().split()[:2])

    def known_line(self, kind: str = "ed25519") -> str:
        key = " ".join((self.folder / f"host_{kind}.pub").read_text().split()[:2])
        return f"[127.0.0.1]:{self.port} {key}\n"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def keygen(file: Path, *, kind: str = "ed25519", passphrase: str = "", rounds: int = 1) -> Path:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    size = ["-b", "2048"] if kind == "rsa" else []
    argv = [
        "ssh-keygen",
        "-q",
        "-t",
        kind,
        *size,
        "-a",
        str(rounds),
        "-N",
        passphrase,
        "-C",
        "",
        "-f",
        str(file),
    ]
    subprocess.run(argv, check=True)
    return file


@pytest.fixture(scope="session")
def key_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key to log in with and host keys, made once: rsa takes a while."""
    pool = tmp_path_factory.mktemp("keys")
    keygen(pool / "id_ed25519")
    for number in range(3):
        keygen(pool / f"host{number}_ed25519")
    keygen(pool / "host_rsa", kind="rsa")
    return pool


@pytest.fixture
def start_sshd(
    tmp_path_factory: pytest.TempPathFactory, own_home: Path, key_pool: Path
) -> Iterator[Callable[..., Sshd]]:
    """A function that starts an sshd that takes the key of `identity` and is known to ~/.ssh/known_hosts.

    Its keyword arguments are: `known`, False to leave it out of known_hosts; `options`, more of sshd_config;
    `authorized`, the public key file to take in place of that of `identity`.
    """
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(sshd).exists():
        pytest.fail("sshd is not installed: apt install openssh-server")
    started: list[Sshd] = []

    def start(
        *, known: bool = True, options: str = "", authorized: Path | None = None, environment: str = ""
    ) -> Sshd:
        folder = tmp_path_factory.mktemp("sshd")
        for end in ("", ".pub"):
            shutil.copy(key_pool / f"host{len(started) % 3}_ed25519{end}", folder / f"host_ed25519{end}")
            shutil.copy(key_pool / f"host_rsa{end}", folder / f"host_rsa{end}")
        shutil.copy(authorized or key_pool / "id_ed25519.pub", folder / "authorized_keys")
        port = free_port()
        config = f"""
{options}
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_ed25519
HostKey {folder}/host_rsa
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PrintMotd no
MaxStartups 100
Subsystem sftp internal-sftp
SetEnv HOME={own_home} {environment}
"""
        (folder / "sshd_config").write_text(config)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        argv = [sshd, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        server = Sshd(port=port, folder=folder, process=process)
        started.append(server)
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"sshd did not start: {server.log}")
                time.sleep(0.01)
        if known:
            learn(own_home, server.known_line())
        return server

    yield start
    for server in started:
        server.process.terminate()
    for server in started:
        server.process.wait(60)


def learn(home: Path, line: str) -> None:
    """Add a line to ~/.ssh/known_hosts."""
    (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    with (home / ".ssh/known_hosts").open("a") as file:
        file.write(line)


@pytest.fixture
def identity(own_home: Path, key_pool: Path) -> Path:
    """The key that every sshd takes, in ~/.ssh under a name that ssh does not try by itself."""
    (own_home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    for end in ("", ".pub"):
        shutil.copy(key_pool / f"id_ed25519{end}", own_home / f".ssh/kit key{end}")
    return own_home / ".ssh/kit key"


@pytest.fixture
def target(identity: Path) -> Callable[..., Any]:
    """A function that makes the SshTarget of an sshd; keyword arguments go to it."""
    from nodekit.deploy.connect.ssh import SshTarget

    def make(server: Sshd, **fields: Any) -> SshTarget:
        given = {
            "name": "gpu1",
            "address": "127.0.0.1",
            "user": getpass.getuser(),
            "port": server.port,
            "identity_file": str(identity),
        }
        return SshTarget(**{**given, **fields})

    return make
