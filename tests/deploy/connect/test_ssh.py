"""Connections to real sshd processes: who is let in, who is trusted, and what is said when it fails."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from agents import until
from free_ports import free_port
from lab_hosts import BUSY_S
from sshd import Sshd, keygen, learn

from nodekit.deploy.connect import hostkeys, ssh, sshclient, sshconfig
from nodekit.deploy.connect.channel import on_all
from nodekit.inventory.errors import HostError, KitError

Start = Callable[..., Sshd]
Make = Callable[..., ssh.SshTarget]

AWKWARD = ["a b", "it's", 'say "hi"', "$HOME", ";", "a\nb", "ä", "-rf", "*", "", "~/x", "`id`", "\\", "!x"]


def run(connection: ssh.SshConnection, *argv: str) -> bytes:
    process = connection.exec(argv)
    try:
        return process.stdout.read()
    finally:
        process.close()


def problem(target: ssh.SshTarget, **options: Any) -> str:
    start = time.monotonic()
    with pytest.raises(HostError) as caught:
        ssh.connect(target, **options)
    assert time.monotonic() - start < options.get("timeout_s", 10.0) + BUSY_S
    assert caught.value.host == "gpu1"
    return str(caught.value.problem)


@pytest.fixture
def connection(start_sshd: Start, target: Make) -> Iterator[ssh.SshConnection]:
    opened = ssh.connect(target(start_sshd()))
    yield opened
    opened.close()


# --- commands -----------------------------------------------------------------------------------------------


def test_arguments_arrive_byte_for_byte(connection: ssh.SshConnection) -> None:
    script = "import sys, os; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])))"
    assert run(connection, "python3", "-c", script, *AWKWARD) == "|".join(AWKWARD).encode()


def test_tilde_of_the_command_is_the_home_on_the_host(connection: ssh.SshConnection, own_home: Path) -> None:
    tool = own_home / "my tools; $x" / "say"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    tool.chmod(0o755)
    assert run(connection, "~/my tools; $x/say", "~/a", "b c") == b"<~/a><b c>"


@pytest.mark.parametrize("options", ["MaxSessions 1", "ForceCommand /bin/false"])
def test_a_host_without_sftp_is_told_with_what_does_without(
    start_sshd: Start, target: Make, options: str
) -> None:
    with contextlib.closing(ssh.connect(target(start_sshd(options=options)))) as connection:
        taken = connection.exec(["cat"])
        with pytest.raises(
            HostError, match=r"has no SFTP: .*; install rsync on both machines, or let its sshd"
        ):
            connection.sftp()
        taken.close()


def test_a_host_that_starts_no_command_is_told_with_the_setting(start_sshd: Start, target: Make) -> None:
    with (
        contextlib.closing(ssh.connect(target(start_sshd(options="MaxSessions 0")))) as connection,
        pytest.raises(
            HostError, match=r"did not start a command: .*; its sshd needs a MaxSessions of 1 or more"
        ),
    ):
        connection.exec(["true"])


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["ls", "-l"], "ls -l"),
        (["~/bin/python", "-c", "1 + 1"], "\"$HOME\"/bin/python -c '1 + 1'"),
        (["~/a b/c", "~/d"], "\"$HOME\"/'a b/c' '~/d'"),
        (["echo", "$HOME", "it's"], "echo '$HOME' 'it'\"'\"'s'"),
    ],
)
def test_shell_line_quotes_once(command: list[str], line: str) -> None:
    assert ssh.shell_line(command) == line


def test_streams_and_exit_status_of_a_command(connection: ssh.SshConnection) -> None:
    process = connection.exec(["sh", "-c", "cat; echo oops >&2; exit 7"])
    assert process.exit_status is None
    process.stdin.write(b"\x00\xff\n")
    process.stdin.close()
    assert process.stdout.read() == b"\x00\xff\n"
    until(lambda: process.exit_status is not None)
    assert process.exit_status == 7
    until(lambda: process.stderr_tail() == "oops\n", what="what it wrote to stderr")
    process.close()


def test_flood_on_stderr_does_not_stop_a_command(connection: ssh.SshConnection) -> None:
    process = connection.exec(["sh", "-c", "head -c 8000000 /dev/zero >&2; echo end"])
    assert process.stdout.read() == b"end\n"
    assert len(process.stderr_tail()) <= 65536
    process.close()


def test_lost_connection_ends_reading(start_sshd: Start, target: Make) -> None:
    server = start_sshd()
    connection = ssh.connect(target(server))
    process = connection.exec(["cat"])
    for session in subprocess.run(
        ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split():
        with contextlib.suppress(ProcessLookupError):  # of the look whether sshd is there, and just ended
            os.kill(int(session), 9)
    assert process.stdout.read() == b""
    assert process.exit_status is None
    with pytest.raises(HostError, match=r"gpu1: .*did not start a command"):
        connection.exec(["true"])
    connection.close()


def test_sftp_goes_through_the_connection(connection: ssh.SshConnection, tmp_path: Path) -> None:
    with connection.sftp() as sftp, sftp.open(str(tmp_path / "a b"), "wb") as file:
        file.write(b"x")
    assert (tmp_path / "a b").read_bytes() == b"x"


# --- host keys ----------------------------------------------------------------------------------------------


def test_unknown_host_key_is_refused_with_the_command_to_accept_it(start_sshd: Start, target: Make) -> None:
    server = start_sshd(known=False)
    said = problem(target(server))
    scanned = subprocess.run(
        ["ssh-keygen", "-lf", str(server.folder / "host_ed25519.pub")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[1]
    assert f"127.0.0.1:{server.port} is unknown" in said
    assert f"`ssh-keyscan -p {server.port} 127.0.0.1 >> ~/.ssh/known_hosts`" in said
    assert scanned in said
    assert "--accept-new-host-keys" in said


@pytest.mark.parametrize("has_folder", [True, False])
def test_command_of_the_refusal_works(
    start_sshd: Start, target: Make, own_home: Path, has_folder: bool
) -> None:
    server = start_sshd(known=False)
    shutil.rmtree(own_home / ".ssh", ignore_errors=True)
    own = keygen(own_home / "elsewhere/key")
    (server.folder / "authorized_keys").write_text(own.with_suffix(".pub").read_text())
    if has_folder:
        (own_home / ".ssh").mkdir(mode=0o700)
    command = problem(target(server, identity_file=str(own))).split("accept it with `")[1].split("`")[0]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    ssh.connect(target(server, identity_file=str(own))).close()


def test_accepting_a_new_host_key_says_so_and_lasts(start_sshd: Start, target: Make, own_home: Path) -> None:
    server = start_sshd(known=False)
    shutil.rmtree(own_home / ".ssh", ignore_errors=True)
    said: list[str] = []
    own = keygen(own_home / "elsewhere/key")
    (server.folder / "authorized_keys").write_text(own.with_suffix(".pub").read_text())
    where = target(server, identity_file=str(own))
    ssh.connect(where, accept_new_host_keys=True, notice=said.append).close()
    assert hostkeys.fingerprint(_blob(server.host_key)) in said[0]
    assert (own_home / ".ssh").stat().st_mode & 0o777 == 0o700
    assert (own_home / ".ssh/known_hosts").stat().st_mode & 0o777 == 0o600
    ssh.connect(where, accept_new_host_keys=True, notice=said.append).close()
    ssh.connect(where).close()
    assert len(said) == 1


def test_accepted_key_keeps_a_file_without_a_last_newline(
    own_home: Path, start_sshd: Start, target: Make
) -> None:
    server = start_sshd(known=False)
    learn(own_home, "other ssh-ed25519 AAAA")
    ssh.connect(target(server), accept_new_host_keys=True).close()
    assert (own_home / ".ssh/known_hosts").read_text().splitlines()[0] == "other ssh-ed25519 AAAA"
    ssh.connect(target(server)).close()


@pytest.mark.parametrize("accept", [False, True])
def test_changed_host_key_is_refused_loudly(
    start_sshd: Start, target: Make, own_home: Path, key_pool: Path, accept: bool
) -> None:
    server = start_sshd(known=False)
    other = " ".join((key_pool / "host1_ed25519.pub").read_text().split()[:2])
    learn(own_home, f"# mine\n[127.0.0.1]:{server.port} {other}\n")
    before = (own_home / ".ssh/known_hosts").read_text()
    said = problem(target(server), accept_new_host_keys=accept)
    assert "HAS CHANGED" in said
    assert f"({own_home}/.ssh/known_hosts:2)" in said
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in said
    assert (own_home / ".ssh/known_hosts").read_text() == before


def test_revoked_host_key_is_refused(start_sshd: Start, target: Make, own_home: Path) -> None:
    server = start_sshd()
    learn(own_home, "@revoked " + server.known_line())
    assert "@revoked" in problem(target(server), accept_new_host_keys=True)


@pytest.mark.parametrize(
    "line",
    [
        "[127.0.0.1]:{port} {key}",
        "127.0.0.1 {key}",
        "[127.0.0.*]:{port},elsewhere {key}",
        "[127.0.0.1]:{port} ssh-rsa {rsa}",
    ],
    ids=["exact", "without the port", "pattern", "another type than the host prefers"],
)
def test_ways_a_host_is_known(start_sshd: Start, target: Make, own_home: Path, line: str) -> None:
    server = start_sshd(known=False)
    rsa = server.known_line("rsa").split()[2]
    learn(own_home, line.format(port=server.port, key=server.host_key, rsa=rsa) + "\n")
    ssh.connect(target(server)).close()


def test_negated_pattern_does_not_know_a_host(start_sshd: Start, target: Make, own_home: Path) -> None:
    server = start_sshd(known=False)
    learn(own_home, f"!127.0.0.1,127.* {server.host_key}\n")
    assert "unknown" in problem(target(server))


def test_hashed_known_hosts(start_sshd: Start, target: Make, own_home: Path) -> None:
    server = start_sshd()
    file = own_home / ".ssh/known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert "127.0.0.1" not in file.read_text()
    ssh.connect(target(server)).close()


def test_known_hosts_of_the_inventory(start_sshd: Start, target: Make, own_home: Path) -> None:
    server = start_sshd(known=False)
    file = own_home / "lab hosts"
    file.write_text(server.known_line())
    ssh.connect(target(server, known_hosts="~/lab hosts")).close()
    assert "does not exist" in problem(target(server, known_hosts="~/nowhere"))
    assert "is a folder" in problem(target(server, known_hosts="~"))


# --- ~/.ssh/config ------------------------------------------------------------------------------------------


def config(home: Path, text: str) -> None:
    (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
    (home / ".ssh/config").write_text(text)


def test_alias_of_the_config(start_sshd: Start, own_home: Path, identity: Path) -> None:
    server = start_sshd(known=False)
    learn(own_home, f"cluster-node {server.host_key}\n")
    (own_home / ".ssh/more").write_text(
        f'Host node\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile "{identity}"\n'
        f"  User {getpass.getuser()}\nHost somewhere-else\n  Port 9\n"
    )
    config(own_home, "Include mo*\nHostKeyAlias cluster-node\nHost other\n  Port 1\n")
    connection = ssh.connect(ssh.SshTarget(name="gpu1", address="node"))
    assert run(connection, "echo", "x") == b"x\n"
    assert ssh.hostname("node") == "127.0.0.1"
    connection.close()


def test_an_include_within_a_host_block_is_about_that_host_alone(tmp_path: Path) -> None:
    """Also after another Include in the file that is included."""
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "config").write_text("Host foo\n  Include b\nHost *\n  Port 7\n")
    (folder / "b").write_text("Include c\nUser x\n")
    (folder / "c").write_text("Compression yes\n")
    found = {host: sshconfig.read(tmp_path, host=host).lookup(host) for host in ("foo", "bar")}
    own = ("user", "compression")
    assert [found["foo"].get(each) for each in own] == ["x", "yes"]
    assert [found["bar"].get(each) for each in own] == [None, None]
    assert {each["port"] for each in found.values()} == {"7"}


@pytest.fixture
def jumped(start_sshd: Start, own_home: Path, identity: Path) -> tuple[Sshd, Sshd]:
    """A host behind a jump host, in ~/.ssh/config as `inner`."""
    outer, inner = start_sshd(), start_sshd()
    key = f'  HostName 127.0.0.1\n  IdentityFile "{identity}"\n  User {getpass.getuser()}\n'
    config(
        own_home,
        f"Host outer\n{key}  Port {outer.port}\nHost inner\n{key}  Port {inner.port}\n  ProxyJump outer\n",
    )
    return outer, inner


INNER = ssh.SshTarget(name="gpu1", address="inner")


def test_proxy_jump_goes_through_the_jump_host(jumped: tuple[Sshd, Sshd]) -> None:
    outer, _ = jumped
    connection = ssh.connect(INNER)
    assert run(connection, "printenv", "SSH_CONNECTION").startswith(b"127.0.0.1 ")
    assert "Accepted publickey" in outer.log
    argv = connection.rsync_rsh()
    assert argv is not None
    assert (
        subprocess.run([*argv, "any", "echo", "there"], capture_output=True, check=True).stdout == b"there\n"
    )
    assert outer.log.count("Accepted publickey") == 2
    connection.close()


def test_jump_host_that_is_down_is_named(jumped: tuple[Sshd, Sshd]) -> None:
    outer, _ = jumped
    outer.process.terminate()
    outer.process.wait(10)
    said = problem(INNER)
    assert f"the jump host 127.0.0.1:{outer.port} cannot be reached" in said


def test_unknown_key_of_the_jump_host_is_refused(jumped: tuple[Sshd, Sshd], own_home: Path) -> None:
    outer, inner = jumped
    (own_home / ".ssh/known_hosts").write_text(inner.known_line())
    assert f"host key of the jump host 127.0.0.1:{outer.port} is unknown" in problem(INNER)


def test_host_behind_a_jump_host_that_is_down_is_named(jumped: tuple[Sshd, Sshd]) -> None:
    outer, inner = jumped
    inner.process.terminate()
    inner.process.wait(10)
    said = problem(INNER)
    assert f"the jump host 127.0.0.1:{outer.port} was reached" in said
    assert f"127.0.0.1:{inner.port}" in said


def test_jump_host_that_jumps_through_itself_is_an_error(own_home: Path) -> None:
    config(own_home, "Host *\n  ProxyJump gate\nHost gate\n  HostName 127.0.0.1\n")
    assert "through itself" in problem(ssh.SshTarget(name="gpu1", address="inner"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('UserKnownHostsFile "x', "~/.ssh/config: userknownhostsfile .*No closing quotation"),
        ('Include "x', '/.ssh/config: Include "x: No closing quotation'),
        ('Match exec "x', "/.ssh/config: No closing quotation"),
        ("Port ssh", "~/.ssh/config of gpu1: .*'ssh'"),
        (
            'ProxyCommand "x',
            "the ProxyCommand to 127.0.0.1:.* did not lead to an SSH server .*[Uu]nterminated|matching",
        ),
    ],
)
def test_mistake_in_the_config_is_told(own_home: Path, line: str, says: str) -> None:
    config(own_home, f"Host gpu1\nHostName 127.0.0.1\n{line}\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = None if line.startswith("Port") else listener.getsockname()[1]
        target = ssh.SshTarget(name="gpu1", address="gpu1", port=port)
        with pytest.raises(KitError, match=says):
            ssh.connect(target, timeout_s=5)


@pytest.mark.parametrize("program", ["~/.ssh/proxy", "$HOME/.ssh/proxy", "2>/dev/null $HOME/.ssh/proxy"])
def test_proxy_command_goes_through_a_shell_as_that_of_ssh_does(
    start_sshd: Start, target: Make, own_home: Path, program: str
) -> None:
    server = start_sshd()
    config(own_home, f"Host gpu1\nHostName 127.0.0.1\nProxyCommand {program} %h %p %r\n")
    lines = ["#!/usr/bin/env python3", "import os, selectors, socket, sys", f"sys.stderr.write('x' * {1 << 18})",
             "far, ways = socket.create_connection((sys.argv[1], int(sys.argv[2]))), selectors.DefaultSelector()",
             "ends = {0: far.fileno(), far.fileno(): 1}", "for end in ends: ways.register(end, 1)", "while True:",
             "  for key, _ in ways.select():", "    data = os.read(key.fd, 1 << 16) or sys.exit()",
             "    while data: data = data[os.write(ends[key.fd], data):]"]  # fmt: skip
    (own_home / ".ssh/proxy").write_text("\n".join(lines))
    (own_home / ".ssh/proxy").chmod(0o700)
    connection = ssh.connect(target(server, address="gpu1"))
    assert run(connection, "echo", "there") == b"there\n"
    connection.close()


@pytest.mark.parametrize(
    ("command", "found"),
    [("echo the gate is shut >&2; exit 1", "did not lead to an SSH server .the gate is shut."),
     ("echo knocking >&2; sleep 30", "did not say the SSH greeting and agree on keys within 2 s .knocking."),
     ("no-such-program", "did not lead to an SSH server .*not found")],
)  # fmt: skip
def test_what_a_proxy_command_says_of_its_failure_is_told(own_home: Path, command: str, found: str) -> None:
    config(own_home, f"Host gpu1\nHostName 127.0.0.1\nProxyCommand sh -c '{command}'\n")
    with pytest.raises(HostError, match=found) as caught:
        ssh.connect(ssh.SshTarget(name="gpu1", address="gpu1"), timeout_s=2)
    cure = f"see what this does here, which ~/.ssh/config has for gpu1: sh -c '{command}'"
    assert caught.value.problem.cure == cure


def test_files_of_a_user_that_does_not_exist_are_not_there(
    start_sshd: Start, target: Make, own_home: Path, identity: Path
) -> None:
    server = start_sshd()
    nobody = "~no-such-user/file"
    config(
        own_home,
        f"Include {nobody}\nHost gpu1\nHostName 127.0.0.1\nUserKnownHostsFile {nobody}\n"
        f'IdentityFile {nobody}\nIdentityFile "{identity}"\n',
    )
    ssh.connect(target(server, address="gpu1", identity_file=None)).close()


def test_config_in_a_folder_that_may_not_be_read_is_named(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(own_home, "")
    closed = PermissionError(errno.EACCES, "Permission denied", str(own_home / ".ssh/config"))
    monkeypatch.setattr(Path, "is_file", mock.Mock(side_effect=closed))  # root may read any folder
    with pytest.raises(KitError, match=r"/.ssh/config: Permission denied"):
        ssh.connect(ssh.SshTarget(name="gpu1", address="127.0.0.1"))


# --- keys ---------------------------------------------------------------------------------------------------


def test_encrypted_key_is_asked_for_once_for_all_hosts(
    start_sshd: Start, target: Make, own_home: Path
) -> None:
    key = keygen(own_home / "locked", passphrase="open sesame")
    servers = [start_sshd(authorized=key.with_suffix(".pub")) for _ in range(3)]
    asked: list[str] = []

    def ask(file: str) -> str:
        asked.append(file)
        return "wrong" if len(asked) == 1 else "open sesame"

    targets = {str(n): target(server, identity_file=str(key)) for n, server in enumerate(servers)}
    results = on_all(targets, lambda where: ssh.connect(where, ask_passphrase=ask))
    assert asked == [str(key), str(key)]
    for connection in results.values():
        assert isinstance(connection, ssh.SshConnection)
        assert connection.rsync_rsh() is None
        assert connection.was_asked
        connection.close()


def test_encrypted_key_with_nobody_to_ask(start_sshd: Start, target: Make, own_home: Path) -> None:
    key = keygen(own_home / "locked", passphrase="open sesame")
    assert f"`ssh-add {key}`" in problem(target(start_sshd(), identity_file=str(key)))


def test_no_terminal_to_ask_at_is_nobody_to_ask(start_sshd: Start, target: Make, own_home: Path) -> None:
    def ask(_: str) -> str:
        raise EOFError

    key = keygen(own_home / "locked", passphrase="open sesame")
    said = problem(target(start_sshd(), identity_file=str(key)), ask_passphrase=ask)
    assert f"identity file {key} is encrypted and there is nobody to ask" in said


def test_with_nobody_to_ask_a_locked_default_key_is_named_where_it_is_the_only_one(
    start_sshd: Start, target: Make, own_home: Path
) -> None:
    key = keygen(own_home / ".ssh" / "id_rsa", passphrase="x")
    where = target(start_sshd(), identity_file=None)
    assert f"`ssh-add {key}`" in problem(where)
    keygen(own_home / ".ssh" / "id_ed25519")
    assert f"with any key tried ({own_home / '.ssh' / 'id_ed25519'})" in problem(where)


def test_what_says_nothing_is_given_words(
    start_sshd: Start, target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise EOFError

    monkeypatch.setattr(sshclient.Client, "connect", fails)
    assert problem(target(start_sshd())).endswith(" failed: the connection is lost (EOFError)")


def test_time_to_type_a_passphrase_is_not_counted(
    start_sshd: Start, target: Make, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keygen(own_home / "locked", passphrase="slow")
    server = start_sshd(authorized=key.with_suffix(".pub"))
    typed_s: list[float] = []
    # By a clock of its own: the rest has a minute, and a busy machine may need more than a second of it.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(typed_s))
    monkeypatch.setattr(sshclient, "time", clock)

    def ask(_: str) -> str:
        typed_s.append(3600.0)
        return "slow"

    ssh.connect(target(server, identity_file=str(key)), timeout_s=60.0, ask_passphrase=ask).close()
    assert typed_s == [3600.0]


@pytest.fixture
def agent(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ssh-agent of the test's own."""
    path = own_home / "agent"

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    until(listens, what="ssh-agent")
    yield
    process.terminate()
    process.wait(10)


@pytest.mark.usefixtures("agent")
def test_agent_holds_the_key(start_sshd: Start, target: Make, own_home: Path) -> None:
    others = [keygen(own_home / f"other{n}") for n in range(7)]  # more than a server lets anyone try
    key = keygen(own_home / "agents own", passphrase="x")
    server = start_sshd(authorized=key.with_suffix(".pub"))
    asking = own_home / "ask"
    asking.write_text("#!/bin/sh\necho x\n")
    asking.chmod(0o755)
    env = {**os.environ, "SSH_ASKPASS": str(asking), "SSH_ASKPASS_REQUIRE": "force"}
    for file in (*others, key):
        subprocess.run(["ssh-add", "-q", str(file)], check=True, env=env, stdin=subprocess.DEVNULL)
    connection = ssh.connect(target(server, identity_file=str(key)))
    argv = connection.rsync_rsh()
    assert argv is not None
    subprocess.run([*argv, "any", "true"], check=True)
    connection.close()
    assert "the agent's" in problem(target(server, identity_file=None))


@pytest.mark.usefixtures("agent")
def test_the_agents_key_is_found_by_its_public_half(start_sshd: Start, target: Make, own_home: Path) -> None:
    key = keygen(own_home / "key")
    server = start_sshd(authorized=key.with_suffix(".pub"))
    subprocess.run(["ssh-add", "-q", str(key)], check=True)
    old = own_home / "old"  # in PEM's format, encrypted: the public half is beside it alone
    old.write_text("-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n")
    old.chmod(0o600)
    shutil.copy(key.with_suffix(".pub"), own_home / "old.pub")
    for named in (old, key.with_suffix(".pub")):
        config = f"Host gpu1\nIdentityFile {named}\nIdentitiesOnly yes\n"
        (own_home / ".ssh/config").write_text(f"{config}HostName 127.0.0.1\n")
        ssh.connect(target(server, address="gpu1", identity_file=None)).close()


def test_keys_of_the_configuration_that_ssh_passes_over(
    start_sshd: Start, target: Make, own_home: Path, identity: Path
) -> None:
    server = start_sshd()
    config = own_home / ".ssh/config"
    config.write_text(f'Host gpu1\nHostName 127.0.0.1\nIdentityFile "{identity}"\n')
    identity.chmod(0o644)
    assert "is open to others (mode 0644)" in problem(target(server, address="gpu1", identity_file=None))
    identity.chmod(0o600)
    bad = own_home / "bad"
    bad.write_text("no key")
    bad.chmod(0o600)
    config.write_text(f'Host gpu1\nHostName 127.0.0.1\nIdentityFile {bad}\nIdentityFile "{identity}"\n')
    ssh.connect(target(server, address="gpu1", identity_file=None)).close()


def test_wrong_user_says_user_and_keys(start_sshd: Start, target: Make, identity: Path) -> None:
    said = problem(target(start_sshd(), user="nobody-here"))
    assert "user 'nobody-here'" in said
    assert str(identity) in said
    assert "ssh-copy-id" in said


def test_wrong_key_says_user_and_keys(start_sshd: Start, target: Make, own_home: Path) -> None:
    key = keygen(own_home / "stranger")
    said = problem(target(start_sshd(), identity_file=str(key)))
    assert f"user '{getpass.getuser()}' with any key tried ({key})" in said


def test_default_key_is_found(start_sshd: Start, target: Make, identity: Path) -> None:
    identity.rename(identity.with_name("id_ed25519"))
    connection = ssh.connect(target(start_sshd(), identity_file=None))
    assert connection.rsync_rsh() is not None
    connection.close()


def test_no_key_at_all(start_sshd: Start, target: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    said = problem(target(start_sshd(), identity_file=None))
    assert re.search(r"no key to log in with .*: no key file, and no SSH agent .*; `ssh-add` it, set", said)


@pytest.mark.usefixtures("agent")
def test_an_agent_without_keys(start_sshd: Start, target: Make) -> None:
    said = problem(target(start_sshd(), identity_file=None))
    assert re.search(r"no key file, and the SSH agent holds none; `ssh-add` it", said)


@pytest.mark.parametrize("backlog", [8, 0])  # 0: a connection to it waits, too
def test_an_agent_that_never_answers_is_none(
    start_sshd: Start, target: Make, own_home: Path, monkeypatch: pytest.MonkeyPatch, backlog: int
) -> None:
    monkeypatch.setattr(sshclient, "AGENT_TIMEOUT_S", 0.2)
    path = own_home / "stalled agent"  # as one that is forwarded over a session that has stalled
    with socket.socket(socket.AF_UNIX) as stalled, socket.socket(socket.AF_UNIX) as waiting:
        stalled.bind(str(path))
        stalled.listen(backlog)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        if not backlog:
            waiting.connect(str(path))
        server = start_sshd()
        connection = ssh.connect(target(server))
        argv = connection.rsync_rsh()
        assert argv is not None
        assert (
            subprocess.run([*argv, "any", "echo here"], stdout=subprocess.PIPE, timeout=60).stdout
            == b"here\n"
        )
        connection.close()
        said = problem(target(server, identity_file=None))
    assert (
        f"no key file, and the SSH agent of SSH_AUTH_SOCK ({path}) does not answer: no answer within" in said
    )


def test_a_login_waits_for_a_stalled_agent_once(
    start_sshd: Start, target: Make, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sshclient, "AGENT_TIMEOUT_S", 0.2)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(own_home / "stalled agent"))
    with socket.socket(socket.AF_UNIX) as stalled:
        stalled.bind(str(own_home / "stalled agent"))
        stalled.listen(8)
        problem(target(start_sshd(), identity_file=None))
        stalled.setblocking(False)
        stalled.accept()[0].close()
        with pytest.raises(BlockingIOError):
            stalled.accept()


def test_an_agent_that_is_gone_is_named(
    start_sshd: Start, target: Make, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(own_home / "gone"))
    key = keygen(own_home / "stranger")
    said = problem(target(start_sshd(), identity_file=str(key)))
    assert (
        f"with any key tried ({key}); the SSH agent of SSH_AUTH_SOCK ({own_home}/gone) does not answer"
        in said
    )


def test_identity_file_that_cannot_be_used(
    start_sshd: Start, target: Make, identity: Path, own_home: Path
) -> None:
    server = start_sshd()
    assert "No such file" in problem(target(server, identity_file="~/nothing"))
    (own_home / "text").write_text("hello")
    (own_home / "text").chmod(0o600)
    assert "not a private key" in problem(target(server, identity_file="~/text"))
    identity.chmod(0o644)
    assert f"`chmod 600 {identity}`" in problem(target(server))


# --- the network --------------------------------------------------------------------------------------------


def test_name_that_does_not_resolve(target: Make, start_sshd: Start) -> None:
    assert "'no-such-host.invalid' does not resolve" in problem(
        target(start_sshd(), address="no-such-host.invalid")
    )


def test_refused_port(target: Make, start_sshd: Start) -> None:
    port = free_port()
    assert f"127.0.0.1:{port} cannot be reached (Connection refused)" in problem(
        target(start_sshd(), port=port)
    )


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        yield server


def test_a_way_on_which_large_packets_are_lost_is_told_of(target: Make, start_sshd: Start) -> None:
    """The greeting is small, and the first message that fills a packet never comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                while connection.recv(1 << 16):
                    pass

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(HostError, match=r"has greeted, but did not agree on keys within 2 s") as caught:
            ssh.connect(target(start_sshd(), port=server.getsockname()[1]), timeout_s=2)
        greeter.join()
    assert "are large packets lost on the way" in caught.value.problem.cure


def test_port_that_never_greets_is_bounded(target: Make, start_sshd: Start, silent: socket.socket) -> None:
    silent.listen(100)  # it is called more than once
    port = silent.getsockname()[1]
    tell_in_time(target(start_sshd(), port=port), f"127.0.0.1:{port} did not say the SSH greeting")


def tell_in_time(where: ssh.SshTarget, wanted: str) -> None:
    """What is said of a host for which there are 0.7 s.

    Where the machine has stood still for so long, the time was over before the host was called, or its other address.
    """

    def is_told() -> bool:
        said = problem(where, timeout_s=0.7)
        late = "did not connect within 0.7 s" in said or "no answer from the name server" in said
        assert late or wanted in said
        return not late

    until(is_told, what=wanted)


def test_port_that_takes_no_connection_is_bounded(
    target: Make, start_sshd: Start, silent: socket.socket
) -> None:
    with taking_no_more(silent):
        where = target(start_sshd(), port=silent.getsockname()[1])
        assert "did not connect within 0.7 s" in problem(where, timeout_s=0.7)


@contextlib.contextmanager
def taking_no_more(server: socket.socket) -> Iterator[None]:
    """A full backlog drops what comes."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["the first answers", "the second answers"])
def test_a_name_with_an_address_that_does_not_answer_is_reached_at_its_other(
    target: Make, start_sshd: Start, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    sshd = start_sshd()
    ask = socket.getaddrinfo

    def answer(host: str, port: int, **kwargs: Any) -> list[Any]:
        return [found for last in order for found in ask(f"127.0.0.{last}", port, **kwargs)]

    shares_s: list[float] = []
    connected = sshclient._connected

    def connect(found: Any, share_s: float) -> socket.socket:
        shares_s.append(share_s)
        return connected(found, min(share_s, 1.0) if found[4][0] == "127.0.0.2" else share_s)

    # A minute, for a busy machine to log in; the silent address has its share of that, half, cut short here.
    monkeypatch.setattr(sshclient, "_connected", connect)
    with socket.create_server(("127.0.0.2", sshd.port), backlog=1) as silent, taking_no_more(silent):
        monkeypatch.setattr(socket, "getaddrinfo", answer)
        opened = ssh.connect(target(sshd), timeout_s=60.0)
    assert shares_s[0] <= 30
    assert run(opened, "echo", "there") == b"there\n"
    opened.close()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["silent, refused", "refused, silent"])
def test_what_is_said_of_a_name_is_that_one_of_its_addresses_does_not_answer_and_that_the_other_refuses(
    target: Make,
    start_sshd: Start,
    monkeypatch: pytest.MonkeyPatch,
    silent: socket.socket,
    order: tuple[int, int],
) -> None:
    port, ask = silent.getsockname()[1], socket.getaddrinfo

    def answer(host: str, port: int, **kwargs: Any) -> list[Any]:
        return [found for last in order for found in ask(f"127.0.0.{last}", port, **kwargs)]

    where = target(start_sshd(), port=port)
    with taking_no_more(silent):
        monkeypatch.setattr(socket, "getaddrinfo", answer)  # at 127.0.0.2 nobody listens
        tell_in_time(
            where,
            f"127.0.0.1:{port} cannot be reached (Connection refused at 127.0.0.2; no answer at 127.0.0.1); "
            "is sshd running at 127.0.0.2, and on that port? is 127.0.0.1 overloaded, or a firewall in between?",
        )


REFUSES = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
NO_ROUTE = OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([TimeoutError("timed out"), NO_ROUTE], "did not connect within 10 s; is it overloaded"),
        ([REFUSES, NO_ROUTE], "cannot be reached (Connection refused at 127.0.0.1; Network is unreachable at 127.0.0.2)"
         "; is sshd running at 127.0.0.1, and on that port?"),
        ([REFUSES, REFUSES], "cannot be reached (Connection refused); is sshd running there, and on that port?"),
        ([NO_ROUTE], "cannot be reached (Network is unreachable); is the host up, and its address right?"),
    ],
)  # fmt: skip
def test_of_a_name_that_is_not_reached_each_address_is_said_that_has_more_to_say(
    target: Make, start_sshd: Start, monkeypatch: pytest.MonkeyPatch, errors: list[OSError], said: str
) -> None:
    def refuse(found: Any, _: float) -> socket.socket:
        raise errors[int(found[4][0][-1]) - 1]

    ask, where = socket.getaddrinfo, target(start_sshd())
    found = [
        each
        for last in range(len(errors))
        for each in ask(f"127.0.0.{last + 1}", 22, type=socket.SOCK_STREAM)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(sshclient, "_connected", refuse)
    assert f":{where.port} {said}" in problem(where)


def test_port_of_something_else(target: Make, start_sshd: Start, silent: socket.socket) -> None:
    def hang_up() -> None:
        silent.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    assert "did not greet as an SSH server" in problem(target(start_sshd(), port=silent.getsockname()[1]))
    thread.join()


def test_failures_print_nothing(target: Make, start_sshd: Start, silent: socket.socket) -> None:
    where = target(start_sshd(), port=silent.getsockname()[1])
    script = (
        "import sys\nfrom nodekit.deploy.connect import ssh\nfrom nodekit.inventory.errors import HostError\n"
        f"try: ssh.connect({where!r}, timeout_s=0.3)\nexcept HostError: print('told')"
    ).replace("SshTarget(", "ssh.SshTarget(", 1)
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("told\n", "")


def test_system_ssh_meets_the_same_host_key_only(start_sshd: Start, target: Make) -> None:
    server = start_sshd()
    connection = ssh.connect(target(server))
    argv = connection.rsync_rsh()
    assert argv is not None
    server.process.terminate()
    server.process.wait(10)
    imposter = start_sshd(known=False)
    argv[argv.index("-p") + 1] = str(imposter.port)
    done = subprocess.run([*argv, "any", "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 255
    assert "HOST IDENTIFICATION HAS CHANGED" in done.stderr
    connection.close()


def _blob(public: str) -> bytes:
    import base64

    return base64.b64decode(public.split()[1])


@pytest.mark.parametrize("path", ["/a b", '/a"b', "/a\\b", "/100%h", "/a'b"])
def test_a_files_name_is_quoted_as_ssh_reads_it(path: str) -> None:
    argv = ["ssh", "-F", "none", "-G", "-o", f"UserKnownHostsFile={sshconfig.quoted(path)}", "host"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    assert f"userknownhostsfile {path}\n" in said
