import contextlib
import json
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lab_hosts import best_connect_s, connect_s, no_answer, on, processes, wait_until

from nodekit.deploy.lab import lab_disk, lab_network
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.sync.listing import list_code
from nodekit.inventory.errors import HostError

in_a_lab = pytest.mark.lab
"""A mark on each test that needs root."""

ECHO = """
import socket
server = socket.create_server(("", 7777))
print("ready", flush=True)
connection, _ = server.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""
REACH = "import socket, sys; print(socket.create_connection((sys.argv[1], 22), timeout=5).recv(4).decode())"


@contextlib.contextmanager
def talk(lab: Lab, host: str) -> Iterator[socket.socket]:
    """A connection from this machine to a host that echoes; it has been seen to work."""
    command = lab.enter_argv(host, sys.executable, "-c", ECHO)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=lab.host_environment) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            # Its answers have more than the 5 s that a machine may stand still with all that is on it.
            with socket.create_connection((lab.hosts[host].address, 7777), timeout=60) as connection:
                connection.sendall(b"hello")
                assert connection.recv(5) == b"hello"
                yield connection
        finally:
            server.kill()


def hear(lab: Lab, host: str, wait_s: float) -> bytes:
    """What a host says to this machine in a datagram."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind((lab_network.control_address(lab.network), 0))
        ear.settimeout(wait_s)
        port = str(ear.getsockname()[1])
        on(lab, host, "bash", "-c", 'printf hello > "/dev/udp/control/$0"', port)
        return ear.recv(100)


@in_a_lab
def test_each_host_has_its_own_name_interface_and_processes(lab: Lab) -> None:
    assert [on(lab, host, "hostname") for host in lab.hosts] == list(lab.hosts) == ["node1", "node2", "node3"]
    for host in lab.hosts.values():
        links = json.loads(on(lab, host.name, "ip", "-json", "-4", "address"))
        found = {link["ifname"]: [a["local"] for a in link["addr_info"]] for link in links}
        assert found == {"lo": ["127.0.0.1"], host.interface: [host.address]}
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
    try:
        assert not interpreter.exists()
    finally:
        interpreter.unlink(missing_ok=True)


@in_a_lab
def test_a_host_sees_neither_the_lab_nor_this_machines_homes(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    for path in (tmp_path / "secret", lab.folder / "lab.json", lab.folder / "hosts"):
        assert path.exists()
        assert lab.run("node1", ["test", "-e", str(path)]).returncode == 1
    home = on(lab, "node1", "sh", "-c", "cd && ls -A && cat .bashrc .profile").split()
    own = {"nodekit", ".cache", ".config"}  # made there by tests before this one, and by what they import
    assert set(home) <= {".bashrc", ".profile", ".ssh", *Path(sys.base_prefix).parts[2:3], *own}


@in_a_lab
def test_a_folder_that_a_lab_lies_in_can_be_sent(lab: Lab) -> None:
    sent = {entry.path for entry in list_code(lab.folder).entries}
    assert sent == {".kitignore", "known_hosts", "lab.json", "lab.yaml"}


@in_a_lab
def test_a_host_runs_this_python_with_its_packages(lab: Lab) -> None:
    assert on(lab, "node2", sys.executable, "-c", "import yaml; print(yaml.__file__)") == yaml.__file__


@in_a_lab
def test_the_stock_ssh_client_gets_in_with_the_labs_key_and_known_hosts(lab: Lab) -> None:
    for host in lab.hosts:
        answer = subprocess.run(
            lab.ssh_argv(host, "hostname; echo ~"), capture_output=True, text=True, timeout=60
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
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert lab.status("node1") == "crashed"
    assert not any(process.is_alive for process in before)
    with pytest.raises(ConnectionRefusedError):
        connect_s(lab, "node1")
    with pytest.raises(HostError, match="node1: has crashed; `kit lab revive node1 --folder "):
        lab.run("node1", ["true"])
    assert best_connect_s(lab, "node2", 1) < 1
    lab.crash("node1")  # once more does no harm


@in_a_lab
def test_a_revived_host_has_its_disk_address_and_host_key(lab: Lab) -> None:
    on(
        lab,
        "node2",
        "sh",
        "-c",
        "echo kept > /root/kept; touch /run/not-kept; sleep 1000.2 >/dev/null 2>&1 &",
    )
    lab.crash("node2")
    lab.revive("node2")
    answer = subprocess.run(
        lab.ssh_argv("node2", "cat /root/kept; ls /run"), capture_output=True, text=True, timeout=60
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
        assert best_connect_s(lab, "node3", 0.5) < 0.5
        # TCP says it again at growing intervals: that may be as long after the mending as the cable was out.
        connection.settimeout(60)
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
    assert hear(lab, "node1", 30) == b"hello"
    with talk(lab, "node1") as connection:
        lab.cut_control("node1")
        connection.sendall(b"are you there")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert no_answer(lab, "node1")
        assert lab.status("node1") == "up, control cut"
        with pytest.raises(TimeoutError):
            hear(lab, "node1", 0.5)
        assert on(lab, "node1", sys.executable, "-c", REACH, "node2") == "SSH-"
        assert on(lab, "node2", sys.executable, "-c", REACH, "node1") == "SSH-"
        lab.mend("node1")
        assert best_connect_s(lab, "node1", 0.5) < 0.5


@in_a_lab
def test_a_slow_link_delays_each_way_until_mended(lab: Lab) -> None:
    assert best_connect_s(lab, "node1", 0.1) < 0.1
    lab.slow("node1", delay_ms=100)
    assert lab.status("node1") == "up, slow"
    assert 0.2 <= best_connect_s(lab, "node1", 0.5) < 0.5
    assert best_connect_s(lab, "node2", 0.1) < 0.1
    lab.slow("node1", delay_ms=30)  # in place of the first delay, not on top of it
    assert 0.06 <= best_connect_s(lab, "node1", 0.2) < 0.2
    lab.mend("node1")
    assert best_connect_s(lab, "node1", 0.06) < 0.06


@in_a_lab
def test_a_slow_link_has_a_rate_and_loses_packets(lab: Lab) -> None:
    def fetch_s() -> float:
        started = time.perf_counter()
        command = lab.ssh_argv("node2", "head -c 2000000 /dev/zero")
        answer = subprocess.run(command, capture_output=True, timeout=60, check=True)
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
    assert best_connect_s(lab, "node1", 0.2) < 0.2


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
        "nodes": f"{len(lab.hosts) - 1}:{len(lab.hosts)}",
        "hosts": {host.name: {"address": host.address, "gpus": 0} for host in lab.hosts.values()},
    }


@in_a_lab
def test_an_unknown_host_is_refused_with_the_ones_there_are(lab: Lab) -> None:
    for command in (lab.crash, lab.revive, lab.cut, lab.mend, lab.slow, lab.status, lab.cut_control):
        with pytest.raises(HostError, match="gpu7: no such host in the lab: it has node1, node2, node3"):
            command("gpu7")
