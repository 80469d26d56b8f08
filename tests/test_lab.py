import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from lab_hosts import processes, wait_until

from nodekit.deploy import lab_cluster, lab_disk
from nodekit.deploy.lab import Lab, add_commands
from nodekit.deploy.lab_process import ProcessRecord
from nodekit.inventory.errors import HostError, KitError

in_a_lab = pytest.mark.lab
"""A mark on each test that needs root."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

ECHO = """
import socket
server = socket.create_server(("", 7777))
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""
REACH = "import socket, sys; print(socket.create_connection((sys.argv[1], 22), timeout=5).recv(4).decode())"


def on(lab: Lab, host: str, *argv: str) -> str:
    """Run a command on a host; its output without the last newline."""
    answer = lab.run(host, argv, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.rstrip("\n")


@contextlib.contextmanager
def talk(lab: Lab, host: str) -> Iterator[socket.socket]:
    """A connection from this machine to a host that echoes; it has been seen to work."""
    command = lab.enter_argv(host, sys.executable, "-c", ECHO)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=lab.host_environment) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            with socket.create_connection((lab.hosts[host].address, 7777), timeout=5) as connection:
                connection.sendall(b"hello")
                assert connection.recv(5) == b"hello"
                yield connection
        finally:
            server.kill()


def connect_s(lab: Lab, host: str) -> float:
    """How long it takes to connect to a host's sshd."""
    started = time.perf_counter()
    socket.create_connection((lab.hosts[host].address, 22), timeout=5).close()
    return time.perf_counter() - started


def no_answer(lab: Lab, host: str) -> bool:
    """Whether a connection to a host's sshd gets neither accepted nor refused."""
    try:
        socket.create_connection((lab.hosts[host].address, 22), timeout=0.3).close()
    except TimeoutError:
        return True
    return False


def namespaces(lab: Lab) -> set[int]:
    """The inode numbers of a lab's namespaces."""
    found = {path.stat().st_ino for path in [lab.folder / "switch", *lab.folder.glob("hosts/*/net")]}
    for host in lab.hosts:
        init = ProcessRecord.read(lab.folder / "hosts" / host / "init.json")
        assert init is not None
        found |= {Path(f"/proc/{init.pid}/ns/{kind}").stat().st_ino for kind in ("uts", "mnt", "pid", "ipc")}
    return found


def namespaces_in_use() -> set[int]:
    """The inode numbers of the namespaces that a process is in or a mount keeps."""
    found = {int(number) for number in re.findall(r":\[(\d+)\]", Path("/proc/self/mountinfo").read_text())}
    for path in Path("/proc").glob("[0-9]*/ns/*"):
        with contextlib.suppress(OSError):
            found.add(path.stat().st_ino)
    return found


def everything_in(lab: Lab) -> list[ProcessRecord]:
    """All processes of a lab, those that make links slow too."""
    wires = [ProcessRecord.read(path) for path in lab.folder.glob("hosts/*/wire.json")]
    return [*(wire for wire in wires if wire), *(p for host in lab.hosts for p in processes(lab, host))]


@in_a_lab
def test_each_host_has_its_own_name_interface_and_processes(lab: Lab) -> None:
    assert [on(lab, host, "hostname") for host in lab.hosts] == list(lab.hosts) == ["node1", "node2", "node3"]
    for host in lab.hosts.values():
        links = json.loads(on(lab, host.name, "ip", "-json", "-4", "address"))
        found = {link["ifname"]: [a["local"] for a in link["addr_info"]] for link in links}
        assert found == {"lo": ["127.0.0.1"], host.interface: [host.address]}
        assert os.listdir("/sys/class/net") != [*found]
        assert set(on(lab, host.name, "ls", "/sys/class/net").split()) == set(found)
    assert len({host.interface for host in lab.hosts.values()}) == 3
    with subprocess.Popen(lab.enter_argv("node1", "sleep", "1000.1")) as sleeper:
        wait_until(lambda: ["sleep", "1000.1"] in lab.processes("node1").values())
        assert "1000.1" in on(lab, "node1", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "1000.1" not in on(lab, "node2", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        sleeper.kill()


@in_a_lab
def test_what_a_host_writes_stays_on_its_own_disk(lab: Lab, tmp_path: Path) -> None:
    for path in (
        "/etc/written-by-node1",
        "/root/written-by-node1",
        "/tmp/written-by-node1",
        "/dev/shm/by-node1",
    ):
        on(lab, "node1", "touch", path)
        assert not Path(path).exists()
        assert lab.run("node2", ["test", "-e", path]).returncode == 1
        on(lab, "node1", "rm", path)
    interpreter = Path(sys.base_prefix) / "written-by-node1"
    lab.run("node1", ["touch", str(interpreter)], stderr=subprocess.DEVNULL)
    assert not interpreter.exists()


@in_a_lab
def test_a_host_sees_neither_the_lab_nor_this_machines_homes(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    for path in (tmp_path / "secret", lab.folder / "lab.json", lab.folder / "hosts"):
        assert path.exists()
        assert lab.run("node1", ["test", "-e", str(path)]).returncode == 1
    home = on(lab, "node1", "sh", "-c", "cd && ls -A && cat .bashrc .profile").split()
    assert set(home) <= {".bashrc", ".profile", ".ssh", Path(sys.base_prefix).parts[2], "nodekit", ".cache"}


@in_a_lab
def test_a_host_runs_this_python_with_its_packages(lab: Lab) -> None:
    assert on(lab, "node2", sys.executable, "-c", "import yaml; print(yaml.__file__)") == yaml.__file__


@in_a_lab
def test_the_stock_ssh_client_gets_in_with_the_labs_key_and_known_hosts(lab: Lab) -> None:
    for host in lab.hosts:
        answer = subprocess.run(
            lab.ssh_argv(host, "hostname; echo ~"), capture_output=True, text=True, timeout=10
        )
        assert (answer.stdout.split(), answer.stderr) == ([host, str(lab_disk.root_home())], "")
    keys = {line.split()[2] for line in lab.known_hosts.read_text().splitlines()}
    assert len(keys) == 3
    assert stat.S_IMODE(lab.identity_file.stat().st_mode) == 0o600


@in_a_lab
def test_hosts_reach_each_other_by_name_and_nothing_else(lab: Lab) -> None:
    for host, peer in (("node1", "node2"), ("node2", "node3"), ("node3", "node1")):
        assert on(lab, host, sys.executable, "-c", REACH, peer) == "SSH-"
    assert (
        on(lab, "node1", sys.executable, "-c", "import socket; print(socket.gethostbyname('node1'))")
        == "127.0.1.1"
    )
    assert "default" not in on(lab, "node1", "ip", "route")


@in_a_lab
def test_orphans_are_buried(lab: Lab) -> None:
    on(lab, "node1", "sh", "-c", "sh -c 'sleep 0.01 & sleep 0.02 & exit' &")
    stats = "cat /proc/[0-9]*/stat 2>/dev/null | cut -d' ' -f2,3"
    wait_until(
        lambda: "sleep" not in on(lab, "node1", "sh", "-c", stats), what="no sleep, and no zombie of one,"
    )


@in_a_lab
def test_a_crash_resets_connections_and_ends_every_process(lab: Lab) -> None:
    before = processes(lab, "node1")
    with talk(lab, "node1") as connection:
        lab.crash("node1")
        connection.settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert lab.status("node1") == "crashed"
    assert not any(process.is_alive for process in before)
    with pytest.raises(ConnectionRefusedError):
        connect_s(lab, "node1")
    with pytest.raises(HostError, match="node1: has crashed: `kit lab revive node1`"):
        lab.run("node1", ["true"])
    assert connect_s(lab, "node2") < 1
    lab.crash("node1")  # once more does no harm


@in_a_lab
def test_a_revived_host_has_its_disk_address_and_host_key(lab: Lab) -> None:
    on(lab, "node2", "sh", "-c", "echo kept > /root/kept; touch /run/not-kept; sleep 1000.2 & ")
    lab.crash("node2")
    lab.revive("node2")
    answer = subprocess.run(
        lab.ssh_argv("node2", "cat /root/kept; ls /run"), capture_output=True, text=True, timeout=10
    )
    assert answer.stdout.split() == ["kept", "lock", "sshd"]
    assert ["sleep", "1000.2"] not in lab.processes("node2").values()
    first = processes(lab, "node2")
    lab.revive("node2")  # an up host is left alone
    assert processes(lab, "node2") >= {process for process in first if process.is_alive} != set()


@in_a_lab
def test_a_cut_cable_is_silent_until_mended(lab: Lab) -> None:
    with talk(lab, "node3") as connection:
        lab.cut("node3")
        assert lab.status("node3") == "up, cut"
        connection.sendall(b"are you there")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert no_answer(lab, "node3")
        lab.mend("node3")
        assert connect_s(lab, "node3") < 0.5
        connection.settimeout(5)
        assert connection.recv(100) == b"are you there"
    assert lab.status("node3") == "up"


@in_a_lab
def test_cut_then_crash_is_a_power_loss_that_nobody_is_told_of(lab: Lab) -> None:
    with talk(lab, "node3") as connection:
        lab.cut("node3")
        lab.crash("node3")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert lab.status("node3") == "crashed, cut"
    lab.revive("node3")
    assert lab.status("node3") == "up, cut"
    assert no_answer(lab, "node3")


@in_a_lab
def test_a_host_cut_off_from_this_machine_still_sees_the_others(lab: Lab) -> None:
    with talk(lab, "node1") as connection:
        lab.cut_control("node1")
        connection.sendall(b"are you there")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert no_answer(lab, "node1")
        assert lab.status("node1") == "up, control cut"
        assert on(lab, "node1", sys.executable, "-c", REACH, "node2") == "SSH-"
        assert on(lab, "node2", sys.executable, "-c", REACH, "node1") == "SSH-"
        lab.mend("node1")
        assert connect_s(lab, "node1") < 0.5


@in_a_lab
def test_a_slow_link_delays_each_way_until_mended(lab: Lab) -> None:
    assert connect_s(lab, "node1") < 0.1
    lab.slow("node1", delay_ms=100)
    assert lab.status("node1") == "up, slow"
    assert 0.2 <= connect_s(lab, "node1") < 0.5
    assert connect_s(lab, "node2") < 0.1
    lab.slow("node1", delay_ms=60)
    assert 0.12 <= connect_s(lab, "node1") < 0.2
    lab.mend("node1")
    assert connect_s(lab, "node1") < 0.1


@in_a_lab
def test_a_slow_link_has_a_rate_and_loses_packets(lab: Lab) -> None:
    def fetch_s() -> float:
        started = time.perf_counter()
        command = lab.ssh_argv("node2", "head -c 2000000 /dev/zero")
        answer = subprocess.run(command, capture_output=True, timeout=20, check=True)
        assert len(answer.stdout) == 2_000_000
        return time.perf_counter() - started

    lab.slow("node2", rate_mbit=20)
    assert fetch_s() >= 0.8  # what 2 MB take at 20 Mbit/s
    lab.slow("node2", loss_percent=100)
    assert no_answer(lab, "node2")
    lab.slow("node2", loss_percent=2)
    fetch_s()


@in_a_lab
def test_mend_undoes_all_faults_at_once(lab: Lab) -> None:
    lab.slow("node1", delay_ms=100)
    lab.cut("node1")
    lab.cut_control("node1")
    assert lab.status("node1") == "up, cut, slow, control cut"
    lab.mend("node1")
    assert lab.status("node1") == "up"
    assert connect_s(lab, "node1") < 0.1


@in_a_lab
def test_the_inventory_has_what_kit_needs(lab: Lab) -> None:
    inventory = yaml.safe_load(lab.inventory.read_text())
    assert inventory == {
        "name": "lab",
        "network": lab.network,
        "user": "root",
        "identity_file": str(lab.identity_file),
        "known_hosts": str(lab.known_hosts),
        "python": sys.executable,
        "workdir": "~/nodekit",
        "hosts": {host.name: {"address": host.address} for host in lab.hosts.values()},
    }


@in_a_lab
def test_an_unknown_host_is_refused_with_the_ones_there_are(lab: Lab) -> None:
    for command in (lab.crash, lab.revive, lab.cut, lab.mend, lab.slow, lab.status, lab.cut_control):
        with pytest.raises(HostError, match="gpu7: no such host in the lab: it has node1, node2, node3"):
            command("gpu7")


@in_a_lab
def test_up_again_is_safe_and_another_size_is_refused(lab: Lab) -> None:
    before = everything_in(lab)
    assert Lab.up(3, folder=lab.folder) == lab
    with pytest.raises(KitError, match=r"has 3 hosts, not 5: `kit lab down` it first"):
        Lab.up(5, folder=lab.folder)
    assert all(process.is_alive for process in before)


@in_a_lab
@needs_root
def test_down_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    with (tmp_path / "log").open("w") as log:
        lab = Lab.up(2, folder=folder)
        lab.slow("node2", delay_ms=1)
        on(lab, "node1", "sh", "-c", "setsid sleep 1000.3 >/dev/null 2>&1 &")
        made, inside = everything_in(lab), namespaces(lab)
        assert len(made) == 6
        assert inside <= namespaces_in_use()
        assert Path("/sys/class/net", lab.control_interface).exists()
        assert str(folder) in Path("/proc/self/mountinfo").read_text()
        with (folder / "hosts/node1/upper/etc/hostname").open() as held_open:
            started = time.monotonic()
            lab.down()
            assert time.monotonic() - started < 2
            assert held_open.read() == "node1\n"
        assert not log.closed
    assert not any(process.is_alive for process in made)
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert not Path("/sys/class/net", lab.control_interface).exists()
    assert not folder.exists()
    wait_until(lambda: not inside & namespaces_in_use(), what="no namespace of the lab in use")
    assert lab_cluster.down(folder) is False  # once more does no harm


@in_a_lab
@needs_root
@pytest.mark.parametrize("name", ["a 0", 'a\'; echo "$HOME" #', "50%h, upperdir=:\\ ü"])
def test_folders_may_have_any_name(tmp_path: Path, name: str) -> None:
    lab = Lab.up(1, folder=tmp_path / name)
    try:
        answer = subprocess.run(lab.ssh_argv("node1", "hostname"), capture_output=True, text=True, timeout=10)
        assert (answer.stdout, answer.stderr) == ("node1\n", "")
        assert yaml.safe_load(lab.inventory.read_text())["known_hosts"] == str(lab.known_hosts)
        lab.slow("node1", delay_ms=1)
    finally:
        lab.down()
    assert not (tmp_path / name).exists()


@in_a_lab
@needs_root
def test_two_labs_made_at_once_do_not_meet(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        one, two = pool.map(lambda name: Lab.up(1, folder=tmp_path / name), ["one", "two"])
    try:
        assert one.network != two.network
        assert one.hosts["node1"].address != two.hosts["node1"].address
        one.crash("node1")
        assert two.status("node1") == "up"
        one.down()
        assert connect_s(two, "node1") < 1
    finally:
        one.down()
        two.down()


@in_a_lab
@needs_root
def test_a_folder_on_an_overlay_gets_disks_in_memory(tmp_path: Path) -> None:
    for part in ("lower", "upper", "work", "merged"):
        (tmp_path / part).mkdir()
    options = "lowerdir=lower,upperdir=upper,workdir=work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, "merged"], cwd=tmp_path, check=True)
    try:
        lab = Lab.up(1, folder=tmp_path / "merged/lab")
        on(lab, "node1", "touch", "/root/kept")
        lab.crash("node1")
        lab.revive("node1")
        on(lab, "node1", "test", "-e", "/root/kept")
        lab.down()
        assert os.listdir(tmp_path / "merged") == []
    finally:
        subprocess.run(["umount", tmp_path / "merged"], check=True)


@in_a_lab
@needs_root
def test_down_after_a_restart_of_the_machine_kills_no_stranger(tmp_path: Path) -> None:
    lab = Lab.up(1, folder=tmp_path / "lab")
    record = tmp_path / "lab/hosts/node1/init.json"
    init = ProcessRecord.read(record)
    assert init is not None
    lab.crash("node1")
    # As after a restart: no mounts, no links, and the recorded pid belongs to someone else.
    subprocess.run(["umount", "--lazy", lab.folder / "switch", lab.folder / "hosts/node1/net"], check=True)
    with subprocess.Popen(["sleep", "1000.4"]) as stranger:
        now = ProcessRecord.of(stranger.pid)
        for boot_id, start_ticks in (("another boot", now.start_ticks), (now.boot_id, now.start_ticks - 1)):
            ProcessRecord(stranger.pid, start_ticks, boot_id).write(record)
            with pytest.raises(KitError, match="not whole.*`kit lab down`"):
                Lab.up(1, folder=lab.folder)
            shutil.copytree(lab.folder, tmp_path / boot_id)
            assert lab_cluster.down(tmp_path / boot_id) is True
            assert stranger.poll() is None
        assert lab_cluster.down(lab.folder) is True
        stranger.kill()
    assert not lab.folder.exists()


@in_a_lab
@needs_root
def test_a_host_that_does_not_start_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = tmp_path / "bin/sshd"
    sshd.parent.mkdir()
    sshd.write_text("#!/bin/sh\necho this is no sshd\n")
    sshd.chmod(0o755)
    monkeypatch.setenv("PATH", str(sshd.parent), prepend=":")
    monkeypatch.setattr(lab_cluster, "SSH_DEADLINE_S", 0.5)
    links = os.listdir("/sys/class/net")
    with pytest.raises(KitError, match=r"(?s)node1: no sshd after .*console.log.*node2: no sshd") as caught:
        Lab.up(2, folder=tmp_path / "lab")
    assert "sshd" in str(caught.value)
    assert not (tmp_path / "lab").exists()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert {*os.listdir("/sys/class/net")} <= {*links}


@in_a_lab
@needs_root
def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(KitError, match="not an empty folder"):
        Lab.up(1, folder=tmp_path)
    assert lab_cluster.down(tmp_path) is False
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(KitError, match="no lab in .*: `kit lab up 3` makes one"):
        Lab.load(tmp_path)
    with pytest.raises(KitError, match="1 to 200 hosts, not 0"):
        Lab.up(0, folder=tmp_path / "lab")


def run_python(code: str, *argv: str, prefix: tuple[str, ...] = ()) -> str:
    """Run code with Lab and KitError at hand, which ends in a KitError; the error's text."""
    code = f"""
import os, sys
from pathlib import Path
from nodekit.deploy.lab_cluster import Lab, down
from nodekit.inventory.errors import KitError
try:
    {code}
except KitError as error:
    print(error)
"""
    command = [*prefix, sys.executable, "-c", code, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


@needs_root
@pytest.mark.parametrize("call", ["Lab.up(1, folder=folder)", "Lab.load(folder)", "down(folder)"])
def test_without_root_one_line_says_so(tmp_path: Path, call: str) -> None:
    message = run_python(f"folder = Path(sys.argv[1]); os.setuid(65534); {call}", str(tmp_path / "lab"))
    assert message == "a lab needs root, for its namespaces and mounts: run this as root, or with sudo\n"


@needs_root
def test_root_without_the_right_to_make_namespaces_is_told(tmp_path: Path) -> None:
    no_admin = ("setpriv", "--bounding-set=-sys_admin")
    message = run_python("Lab.up(1, folder=Path(sys.argv[1]))", str(tmp_path / "lab"), prefix=no_admin)
    assert "Operation not permitted" in message
    assert "--privileged" in message
    assert not (tmp_path / "lab").exists()


@needs_root
def test_missing_programs_are_named_with_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("nsenter", "unshare", "mount", "umount", "ssh-keygen"):
        (tmp_path / program).symlink_to("/bin/true")
    monkeypatch.setattr("nodekit.deploy.lab_needs.search_path", lambda: str(tmp_path))
    with pytest.raises(
        KitError, match="needs ip, sshd: on Debian, `apt-get install iproute2 openssh-server`"
    ):
        Lab.up(1, folder=tmp_path / "lab")


def kit(*argv: str) -> int:
    """Run a command as kit's own command line would."""
    parser = argparse.ArgumentParser(prog="kit")
    add_commands(parser.add_subparsers())
    args = parser.parse_args(argv)
    result = args.run(args)
    assert isinstance(result, int)
    return result


@in_a_lab
@needs_root
def test_the_commands_make_break_show_and_remove_a_lab(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(os.environ["XDG_STATE_HOME"]) / "nodekit/lab"
    try:
        for argv, told in (
            (
                ["up", "2", "--name", "mine"],
                [r"^up: 2 hosts in 198\.", rf"kit up {folder}/lab.yaml", "ssh .*node|@198"],
            ),
            (["up", "2"], ["already up: 2 hosts"]),
            (["crash", "node1"], ["node1: crashed"]),
            (["status"], [r"node1 .*eth0 .*crashed\n", r"node2 .*ens5 .*up\n"]),
            (["revive", "node1"], ["node1: up"]),
            (["cut", "node2"], ["node2: up, cut"]),
            (["mend", "node2"], ["node2: up\n"]),
            (["slow", "node2", "--delay-ms", "5", "--rate-mbit", "9"], ["node2: up, slow"]),
            (["down"], [rf"removed the lab in {folder}"]),
            (["down"], ["no lab in .*: nothing to do"]),
        ):
            assert kit("lab", *argv) == 0
            output = capsys.readouterr().out
            for pattern in told:
                assert re.search(pattern, output), (argv, output)
    finally:
        lab_cluster.down(folder)


def test_every_command_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kit("lab", "--help")
    page = capsys.readouterr().out
    for command in ("up", "down", "status", "crash", "cut", "mend", "revive", "slow"):
        assert re.search(rf"^    {command} +\w+", page, re.MULTILINE)
    assert "Needs root" in page


def test_hosts_file_has_debians_line_for_the_own_name() -> None:
    text = lab_disk.hosts_file("node2", {"node1": "198.18.0.11", "node2": "198.18.0.12"})
    assert text.splitlines()[:2] == ["127.0.0.1 localhost", "127.0.1.1 node2"]
    assert text.splitlines()[-2:] == ["198.18.0.11 node1", "198.18.0.12 node2"]


def test_kill_waits_for_the_end() -> None:
    with subprocess.Popen(["sleep", "1000.5"]) as sleeper:
        record = ProcessRecord.of(sleeper.pid)
        lab_cluster.lab_process.kill(record)
        assert not record.is_alive
        assert sleeper.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        ProcessRecord.of(sleeper.pid)
