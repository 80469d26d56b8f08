import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from lab_hosts import best_connect_s, control_index, on, processes, wait_until

from nodekit.deploy.commands import cli
from nodekit.deploy.lab import lab_cluster, lab_disk, lab_network, lab_process
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.lab.lab_process import ProcessRecord
from nodekit.inventory.errors import KitError

in_a_lab = pytest.mark.lab
"""A mark on each test that needs root."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def namespaces(lab: Lab) -> set[int]:
    """The inode numbers of a lab's namespaces."""
    found = {path.stat().st_ino for path in [lab.folder / "switch", *lab.folder.glob("hosts/*/net")]}
    for host in lab.hosts:
        init = ProcessRecord.read(lab.folder / "hosts" / host / "init.json")
        assert init is not None
        found |= {Path(f"/proc/{init.pid}/ns/{kind}").stat().st_ino for kind in ("uts", "mnt", "pid", "ipc")}
    return found


def members(namespaces: set[int]) -> set[ProcessRecord]:
    """The processes that are in one of these namespaces.

    Whether a namespace is still there cannot be asked by its inode number: another lab, of a test beside this one, may
    have it by then.
    """
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/*"):
        with contextlib.suppress(OSError):
            if path.stat().st_ino in namespaces:
                found.add(ProcessRecord.of(int(path.parts[2])))
    return found


def everything_in(lab: Lab) -> list[ProcessRecord]:
    """All processes of a lab, those that make links slow too."""
    wires = [ProcessRecord.read(path) for path in lab.folder.glob("hosts/*/wire.json")]
    return [*(wire for wire in wires if wire), *(p for host in lab.hosts for p in processes(lab, host))]


@in_a_lab
def test_up_again_is_safe_and_another_size_is_refused(lab: Lab) -> None:
    before = everything_in(lab)
    assert Lab.up(3, folder=lab.folder) == lab
    with pytest.raises(KitError, match=r"has 3 hosts, not 5; `kit lab down --folder .+` it first"):
        Lab.up(5, folder=lab.folder)
    assert all(process.is_alive for process in before)


@in_a_lab
@needs_root
def test_hosts_of_a_large_lab_need_no_room_in_the_kernels_neighbour_table(
    labs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is one table for the whole machine; permanent entries are not counted, and survive all faults."""
    limit = tmp_path / "gc_thresh3"
    limit.write_text("1024\n")
    assert [lab_network.neighbours_fit(n, limit) for n in (3, 15, 16, 200)] == [True, True, False, False]
    monkeypatch.setattr(lab_network, "SHARE_OF_NEIGHBOURS", 0)
    lab = Lab.up(2, folder=labs / "large")
    first, second = lab.hosts.values()

    def entries(host: str, *which: str) -> str:
        return on(lab, host, "ip", "neighbour", "show", *which)

    reach = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=10).close()"
    for _ in ("as made", "after a fault"):
        on(lab, first.name, sys.executable, "-c", reach, second.address)
        on(lab, second.name, sys.executable, "-c", reach, first.address)
        known = (
            f"{second.address} dev {first.interface} lladdr {lab_network.hardware_address(second)} PERMANENT"
        )
        assert entries(first.name, "nud", "permanent").strip() == known
        assert first.address in entries(second.name, "nud", "permanent")
        lab.cut(second.name)
        lab.cut_control(second.name)
        lab.mend(second.name)
    lab.down()


@in_a_lab
def test_down_leaves_nothing(labs: Path) -> None:
    folder = labs / "lab"
    lab = Lab.up(2, folder=folder)
    lab.slow("node2", delay_ms=1)
    on(lab, "node1", "sh", "-c", "setsid sleep 1000.3 >/dev/null 2>&1 &")
    # The sshd that has greeted this machine as the lab was made may end a moment later.
    wait_until(lambda: len(everything_in(lab)) == 6, what="two hosts, their sshds, a wire and a sleep alone")
    made, inside = everything_in(lab), members(namespaces(lab))
    assert inside >= {process for process in made if process.is_alive}
    assert (interface := control_index(lab))
    assert str(folder) in Path("/proc/self/mountinfo").read_text()
    # An open namespace does not die, so its links would stay.
    with (folder / "hosts/node1/upper/etc/hostname").open() as held_open, (folder / "switch").open():
        lab.down()
        assert held_open.read() == "node1\n"
        assert control_index(lab) != interface
    assert not any(process.is_alive for process in made)
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert not folder.exists()
    assert not any(process.is_alive for process in inside)
    assert lab_cluster.down(folder) is None  # once more does no harm


@in_a_lab
@needs_root
@pytest.mark.parametrize("name", ["a 0", 'a\'; echo "$HOME" #', "50%h, upperdir=:\\ ü"])
def test_folders_may_have_any_name(labs: Path, name: str) -> None:
    lab = Lab.up(1, folder=labs / name)
    try:
        answer = subprocess.run(lab.ssh_argv("node1", "hostname"), capture_output=True, text=True, timeout=60)
        assert (answer.stdout, answer.stderr) == ("node1\n", "")
        assert yaml.safe_load(lab.inventory.read_text())["known_hosts"] == str(lab.known_hosts)
        lab.slow("node1", delay_ms=1)
    finally:
        lab.down()
    assert not (labs / name).exists()


@in_a_lab
@needs_root
def test_two_labs_made_at_once_do_not_meet(labs: Path) -> None:
    with ThreadPoolExecutor() as pool:
        one, two = pool.map(lambda name: Lab.up(1, folder=labs / name), ["one", "two"])
    try:
        assert one.network != two.network
        assert one.hosts["node1"].address != two.hosts["node1"].address
        one.crash("node1")
        assert two.status("node1") == "up"
        one.down()
        assert best_connect_s(two, "node1", 1) < 1
    finally:
        one.down()
        two.down()


@in_a_lab
@needs_root
def test_a_folder_on_an_overlay_gets_disks_in_memory(labs: Path) -> None:
    for part in ("lower", "upper", "work", "merged"):
        (labs / part).mkdir()
    options = "lowerdir=lower,upperdir=upper,workdir=work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, "merged"], cwd=labs, check=True)
    try:
        lab = Lab.up(1, folder=labs / "merged/lab")
        on(lab, "node1", "touch", "/root/kept")
        lab.crash("node1")
        lab.revive("node1")
        on(lab, "node1", "test", "-e", "/root/kept")
        lab.down()
        assert not any((labs / "merged").iterdir())
    finally:
        subprocess.run(["umount", labs / "merged"], check=True)


@in_a_lab
@needs_root
def test_down_after_a_restart_of_the_machine_kills_no_stranger(labs: Path) -> None:
    lab = Lab.up(2, folder=labs / "lab")
    for host in lab.hosts:
        lab.crash(host)
    # As after a restart: no mounts, no links, and the recorded pids belong to someone else.
    mounts = [lab.folder / "switch", *lab.folder.glob("hosts/*/net")]
    subprocess.run(["umount", "--lazy", *mounts], check=True)
    with subprocess.Popen(["sleep", "1000.4"]) as stranger:
        now = ProcessRecord.of(stranger.pid)
        for host, boot_id, start_ticks in (
            ("node1", "another boot", now.start_ticks),
            ("node2", now.boot_id, now.start_ticks - 1),
        ):
            ProcessRecord(stranger.pid, start_ticks, boot_id).write(lab.folder / f"hosts/{host}/init.json")
        with pytest.raises(KitError, match=r"not whole.*`kit lab down --folder \S+/lab`"):
            Lab.up(2, folder=lab.folder)
        assert lab_cluster.down(lab.folder) == []
        assert stranger.poll() is None
        stranger.kill()
    assert not lab.folder.exists()


@in_a_lab
@needs_root
def test_down_removes_what_up_made_and_nothing_else(labs: Path) -> None:
    lab = Lab.up(1, folder=labs / "my lab")
    data = labs / "data"
    data.mkdir()
    (data / "precious").touch()
    (lab.folder / "notes.txt").touch()
    (lab.folder / "slurm").mkdir()  # not this lab's: it has none
    (lab.folder / "hosts/my own").mkdir()
    (lab.folder / "hosts/node1/upper/link").symlink_to(data)
    mounted = lab.folder / "hosts/node1/upper/mnt"
    mounted.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", data, mounted], check=True)
    try:
        with pytest.raises(KitError, match="hosts/node1/upper/mnt: mounted in the lab, by somebody else"):
            lab_cluster.down(lab.folder)
        assert lab.status("node1") == "up"
    finally:
        subprocess.run(["umount", mounted], check=True)
    copy = labs / "copy"
    shutil.copytree(lab.folder, copy, symlinks=True, ignore=shutil.ignore_patterns("switch", "net"))
    with pytest.raises(KitError, match=r"its lab.json is that of a lab in .*/my lab"):
        lab_cluster.down(copy)
    (labs / "link").symlink_to(lab.folder)
    with pytest.raises(KitError, match="is a link; name the lab's folder itself"):
        lab_cluster.down(labs / "link")
    assert lab.status("node1") == "up"
    (copy / "lab.json").unlink()
    assert lab_cluster.down(lab.folder) == ["hosts/my own", "notes.txt", "slurm"]
    assert sorted(path.name for path in lab.folder.iterdir()) == ["hosts", "notes.txt", "slurm"]
    assert (data / "precious").exists()
    assert lab_cluster.down(lab.folder) is None


@in_a_lab
@needs_root
def test_a_host_that_does_not_start_is_named_and_nothing_is_left(
    labs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_listening(_: ProcessRecord) -> bool:
        """No, but only once each host has come as far as its sshd: a busy machine needs more than the deadline."""
        logs = [host / "console.log" for host in (labs / "lab/hosts").iterdir() if host.name != "trial"]
        wait_until(lambda: all(log.exists() and "UseTheForce" in log.read_text() for log in logs))
        return False

    monkeypatch.setattr(lab_disk, "SSHD_CONFIG", "UseTheForce yes\n")
    monkeypatch.setattr(lab_cluster, "SSH_DEADLINE_S", 0.5)
    monkeypatch.setattr(lab_cluster, "_is_listening", is_listening)
    with pytest.raises(KitError, match=r"(?s)node1: no sshd .*console.log.*UseTheForce.*\nnode2: no sshd"):
        Lab.up(2, folder=labs / "lab")
    assert not (labs / "lab").exists()
    assert str(labs) not in Path("/proc/self/mountinfo").read_text()


@in_a_lab
@needs_root
def test_a_host_does_not_see_the_disks_of_the_others_wherever_they_are() -> None:
    with tempfile.TemporaryDirectory(dir="/var/lib") as folder:
        lab = Lab.up(1, folder=Path(folder))
        try:
            assert on(lab, "node1", "ls", "-A", folder) == ""
        finally:
            lab.down()
        Path(folder).mkdir()


@in_a_lab
@needs_root
def test_a_folder_with_other_things_is_refused_and_left_alone(labs: Path) -> None:
    (labs / "thesis.tex").touch()
    with pytest.raises(KitError, match="not an empty folder"):
        Lab.up(1, folder=labs)
    assert lab_cluster.down(labs) is None
    assert [path.name for path in labs.iterdir()] == ["thesis.tex"]
    with pytest.raises(KitError, match=rf"no lab in .*; .*`kit lab up 3 --folder {labs}` makes one"):
        Lab.load(labs)
    with pytest.raises(KitError, match="1 to 200 hosts, not 0"):
        Lab.up(0, folder=labs / "lab")


def run_python(code: str, *argv: str, prefix: tuple[str, ...] = ()) -> str:
    """Run code with Lab and KitError at hand, which ends in a KitError; the error's text."""
    code = f"""
import os, sys
from pathlib import Path
from nodekit.deploy.lab.lab_cluster import Lab, down
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
def test_without_root_one_line_says_so(labs: Path, call: str) -> None:
    message = run_python(f"folder = Path(sys.argv[1]); os.setuid(65534); {call}", str(labs / "lab"))
    assert message == "a lab needs root, for its namespaces and mounts; run this as root, or with sudo\n"


@needs_root
def test_root_without_the_right_to_make_namespaces_is_told(labs: Path) -> None:
    no_admin = ("setpriv", "--bounding-set=-sys_admin")
    message = run_python("Lab.up(1, folder=Path(sys.argv[1]))", str(labs / "lab"), prefix=no_admin)
    assert "Operation not permitted" in message
    assert "--privileged" in message
    assert not (labs / "lab").exists()


@needs_root
def test_missing_programs_are_named_with_their_packages(
    labs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("nsenter", "unshare", "mount", "umount", "ssh-keygen"):
        (tmp_path / program).symlink_to("/bin/true")
    monkeypatch.setattr("nodekit.deploy.lab.lab_needs.search_path", lambda: str(tmp_path))
    with pytest.raises(
        KitError, match="needs ip, sshd; on Debian, `apt-get install iproute2 openssh-server`"
    ):
        Lab.up(1, folder=labs / "lab")


def kit(*argv: str) -> int:
    """Run a command as kit's own command line would."""
    args = cli.parser("lab").parse_args(argv)
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
            (["crash", "node1"], ["node1: crashed already: nothing was done"]),
            (["revive", "node1"], ["node1: up\n"]),
            (["revive", "node1"], ["node1: up already: nothing was done"]),
            (["cut", "node2"], ["node2: up, cut"]),
            (["mend", "node2"], ["node2: up\n"]),
            (["mend", "node2"], ["node2: up already: nothing was done"]),
            (["slow", "node2", "--delay-ms", "5", "--rate-mbit", "9"], ["node2: up, slow\n"]),
            (["slow", "node2", "--delay-ms", "6"], ["node2: up, slow\n"]),
            (["down"], [rf"removing the lab in {folder}: ends its hosts", rf"removed the lab in {folder}"]),
            (["down"], ["no lab in .*: nothing to do"]),
        ):
            assert kit("lab", *argv) == 0
            output = "".join(reversed(capsys.readouterr()))
            for pattern in told:
                assert re.search(pattern, output), (argv, output)
            if argv[0] == "up":
                assert "#   kit lab crash HOST\n" in (folder / "lab.yaml").read_text()
    finally:
        lab_cluster.down(folder)


@in_a_lab
def test_the_commands_that_the_inventory_names_find_the_lab(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    named = re.findall(r"#   kit (lab \w+.*)", lab.inventory.read_text())
    assert [line.split()[1] for line in named] == ["crash", "revive", "cut", "mend", "down"]
    for line in named[:-1]:
        assert kit(*shlex.split(line.replace("HOST", "node1"))) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["node1: crashed", "node1: up", "node1: up, cut", "node1: up"]
    assert shlex.split(named[-1]) == ["lab", "down", "--folder", str(lab.folder)]


@needs_root
def test_where_there_is_no_lab_the_folder_is_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        KitError, match=r"no lab in .*; `--folder DIR` names .* another, `kit lab up 3` makes one"
    ):
        kit("lab", "crash", "node1")
    with pytest.raises(
        KitError, match=rf"no lab in {tmp_path}; .*, `kit lab up 3 --folder {tmp_path}` makes one"
    ):
        kit("lab", "crash", "node1", "--folder", str(tmp_path))


def test_a_link_is_made_slow_in_some_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "slow", "node1"]) == 2
    assert "wanted --delay-ms, --rate-mbit or --loss-percent" in capsys.readouterr().err


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
    assert text.splitlines()[3:5] == ["198.18.0.11 node1", "198.18.0.12 node2"]
    assert text.splitlines()[5:] == ["::ffff:198.18.0.11 node1.lab", "::ffff:198.18.0.12 node2.lab"]


def test_kill_waits_for_the_end() -> None:
    with subprocess.Popen(["sleep", "1000.5"]) as sleeper:
        record = ProcessRecord.of(sleeper.pid)
        lab_process.kill(record)
        assert not record.is_alive
        assert sleeper.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        ProcessRecord.of(sleeper.pid)


def test_a_process_that_ends_just_before_it_is_killed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "1000.5"]) as sleeper:
        record = ProcessRecord.of(sleeper.pid)
        send = signal.pidfd_send_signal

        def late(pidfd: int, number: int) -> None:
            sleeper.kill()
            sleeper.wait()
            send(pidfd, number)

        monkeypatch.setattr(signal, "pidfd_send_signal", late)
        lab_process.kill(record)
        assert not record.is_alive
