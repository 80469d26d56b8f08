"""`kit shell`: one command on real hosts at once, and nothing of it left, however it ends."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from agents import until
from kit_runs import Kit

from nodekit.deploy.commands.cli import main
from nodekit.deploy.connect.channel import HostChannel, open_local
from nodekit.deploy.connect.cluster import SshOptions, login_argv
from nodekit.deploy.shell import shell
from nodekit.deploy.shell.shell import Ended, Lines
from nodekit.deploy.shell.shell_view import Prefixes, summary
from nodekit.inventory.errors import HostError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Host

HARD_ARGS = [
    "a b", "it's", '"q"', "$HOME", "$$", "; rm", "new\nline", "ünï ✓", "", "--lr=1", "*", "`id`", "\\", "--",
    "not\udcffutf8",
]  # fmt: skip
SHOW = """
import os, sys
sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])).replace(b'\\n', b'%') + b'\\n')
"""


def lines_of(text: str, host: str) -> list[str]:
    return [line.split(" | ", 1)[1] for line in text.splitlines() if line.startswith(f"{host} ")]


def sleepers(kit: Kit, mark: str = "4242") -> dict[str, list[int]]:
    """Host → pids of what a test's command started there."""
    assert kit.lab is not None
    found = {
        host: [pid for pid, argv in kit.lab.processes(host).items() if mark in " ".join(argv)]
        for host in kit.lab.hosts
    }
    return {host: pids for host, pids in found.items() if pids}


@pytest.mark.lab
def test_arguments_arrive_byte_for_byte_in_the_home_folder_with_nothing_on_stdin(kit: Kit) -> None:
    kit.inventory()
    done = subprocess.run(
        kit.argv("shell", "lab.yaml", "--", "python", "-c", SHOW, *HARD_ARGS),
        cwd=kit.folder,
        input=b"not for the command",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = b"|".join(map(os.fsencode, HARD_ARGS)).replace(b"\n", b"%")
    assert sorted(done.stdout.split(b"\n")) == [b""] + [
        b"node%d | " % number + wanted for number in (1, 2, 3)
    ]
    assert done.stderr == b"exit 0  node[1-3]\n"
    # --hosts picks some, and the order is the inventory's.
    where = kit.run("shell", "lab.yaml", "--hosts", "node[3,1]", "--", "sh", "-c", "hostname; pwd; cat")
    assert (lines_of(where.stdout, "node1"), lines_of(where.stdout, "node3")) == (
        ["node1", "/root"],
        ["node3", "/root"],
    )
    assert "node2" not in where.stdout
    assert where.stderr == "exit 0  node[1,3]\n"


@pytest.mark.lab
def test_each_hosts_exit_is_told_and_one_that_is_not_zero_is_the_commands(kit: Kit) -> None:
    kit.inventory()
    script = 'case $(hostname) in node2) echo gone >&2; exit 3;; node3) kill -KILL $$;; *) echo "fine";; esac'
    done = kit.run("shell", "lab.yaml", "--", "sh", "-c", script)
    assert done.returncode == 1
    assert done.stdout == "node1 | fine\n"
    assert sorted(done.stderr.splitlines()) == [
        "SIGKILL  node3",
        "exit 0   node1",
        "exit 3   node2",
        "node2 | gone",
    ]
    done = kit.run("shell", "lab.yaml", "node[1-2]", "--", "no such; command")
    assert done.returncode == 1
    assert lines_of(done.stderr, "node2") == [
        "kit: cannot run no such; command here: No such file or directory; "
        "with words in one pair of quotes, put before it: sh -c"
    ]
    assert done.stderr.endswith("exit 127  node[1-2]\n")


@pytest.mark.lab
def test_a_host_that_cannot_be_reached_is_named_and_the_others_do_their_work(kit: Kit) -> None:
    values = yaml.safe_load(kit.inventory().read_text())
    values["hosts"]["node2"]["port"] = 1
    (kit.folder / "lab.yaml").write_text(yaml.safe_dump(values))
    done = kit.run("shell", "lab.yaml", "--", "echo", "here")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["node1 | here", "node3 | here"]
    assert re.fullmatch(
        r"exit 0  node\[1,3\]\nfailed  node2 +198\.18\.\d+\.12:1 cannot be reached \(Connection refused\); .*\n",
        done.stderr,
    ), done.stderr


@pytest.mark.slow
def test_no_host_waits_for_another(tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text("connection: local\nhosts: {node1: , node2: , node3: }\n")
    others_have_ended = threading.Event()

    def connect(host: Host) -> HostChannel:
        if host.name != "node2":
            return open_local(host.name, host.python)
        assert others_have_ended.wait(60), "they wait for node2"
        raise HostError(host.name, "cannot be reached")

    ended = []
    hosts = load_inventory(tmp_path / "l.yaml").hosts
    with shell.Commands(hosts, ["true"], timeout_s=None, ssh=SshOptions(open=connect)) as commands:
        for event in commands.events():
            assert isinstance(event, Ended)
            ended.append(event)
            if len(ended) == 2:
                others_have_ended.set()
    assert {each.host for each in ended[:2]} == {"node1", "node3"}
    assert all(each.is_good for each in ended[:2])
    assert ended[2] == Ended("node2", problem="cannot be reached")


@pytest.mark.lab
def test_output_comes_as_it_is_written_in_whole_lines(kit: Kit) -> None:
    kit.inventory()
    program = (
        "import os, sys, time\n"
        "print('first', flush=True)\n"
        "while not os.path.exists('/tmp/go on'): time.sleep(0.02)\n"
        "for number in range(20):\n"
        "    os.write(1, b'%d ' % number + b'x' * 70000)\n"
        "    os.write(2, b'half of '); time.sleep(0.01); os.write(2, b'a line\\n')\n"
        "    os.write(1, b' end\\n')\n"
        "os.write(1, b'no newline')\n"
    )
    process = subprocess.Popen(
        kit.argv("shell", "lab.yaml", "--", "python", "-c", program),
        cwd=kit.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = sorted(process.stdout.readline() for _ in range(3))
    assert first == [f"node{number} | first\n" for number in (1, 2, 3)]
    for host in ("node1", "node2", "node3"):
        kit.on_host(host, "touch", "/tmp/go on")
    out, err = process.communicate(timeout=60)
    for host in ("node1", "node2", "node3"):
        kit.on_host(host, "rm", "/tmp/go on")
        wanted = [f"{number} {'x' * 70000} end" for number in range(20)]
        assert lines_of(out, host) == [*wanted, "no newline"]
        assert lines_of(err, host) == ["half of a line"] * 20
    assert process.returncode == 0


@pytest.mark.lab
@pytest.mark.parametrize("how", ["Ctrl-C", "twice", "killed", "the reader leaves"])
def test_nothing_is_left_on_any_host(kit: Kit, how: str) -> None:
    kit.inventory()
    # Deaf to what can be ignored, and with a child that has left its session and its parent.
    script = "trap '' INT TERM HUP; (setsid sh -c 'sleep 4242' &); echo on; while :; do sleep 0.05; echo 4242; done"
    if how == "the reader leaves":
        process = subprocess.Popen(
            kit.argv("shell", "lab.yaml", "--", "sh", "-c", script), cwd=kit.folder, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: len(sleepers(kit)) == 3, timeout_s=60)
        process.stdout.close()
        process.wait(60)
    else:
        process = kit.start("shell", "lab.yaml", "--", "sh", "-c", script)
        until(lambda: len(sleepers(kit)) == 3, timeout_s=60, what="the command on all hosts")
        os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGINT)
        if how == "twice":
            time.sleep(0.5)  # two at once would be one
            process.send_signal(signal.SIGINT)
        status = process.wait(60)
        assert status == (-signal.SIGKILL if how == "killed" else 130), kit.log()
        if how == "Ctrl-C":
            assert kit.log().endswith("SIGKILL  node[1-3]\n")
            assert not sleepers(kit)
    until(lambda: not sleepers(kit), timeout_s=30, what="the end of the command on all hosts")


@pytest.mark.lab
def test_a_time_limit_ends_it_and_a_background_process_is_not_waited_for(kit: Kit) -> None:
    kit.inventory()
    done = kit.run("shell", "lab.yaml", "node1", "--timeout", "2", "--", "sleep", "4242")
    assert (done.returncode, done.stderr) == (1, "SIGTERM  node1  ended after 2 s (--timeout)\n")
    assert not sleepers(kit)
    # A minute, which they do not need: on a busy machine seconds may go by.
    script = "setsid sleep 999 & echo done"
    done = kit.run("shell", "lab.yaml", "node[2-3]", "--timeout", "60", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "exit 0  node[2-3]\n")
    # It holds too where nobody reads what is written. It need not run on all hosts at the same time.
    argv = kit.argv(
        "shell", "lab.yaml", "--timeout", "2", "--", "sh", "-c", "touch /tmp/begun; exec yes 4242"
    )
    process = subprocess.Popen(argv, cwd=kit.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lab = kit.lab
    assert lab is not None

    def have_begun() -> bool:
        return all(lab.run(host, ["test", "-e", "/tmp/begun"]).returncode == 0 for host in lab.hosts)

    until(have_begun, what="the command on all hosts")
    for host in lab.hosts:
        kit.on_host(host, "rm", "/tmp/begun")
    until(lambda: not sleepers(kit), timeout_s=30, what="its end")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"SIGTERM  node[1-3]  ended after 2 s (--timeout)\n")


@pytest.mark.lab
def test_without_a_command_one_host_gives_a_shell_and_several_are_asked_about(kit: Kit) -> None:
    kit.inventory()
    done = kit.run("shell", "lab.yaml")
    assert done.returncode == 1
    assert "this is node[1-3]; name one: kit shell lab.yaml node1; or a command for all" in done.stderr
    done = subprocess.run(
        kit.argv("shell", "lab.yaml", "node2"),
        cwd=kit.folder,
        input="hostname; exit 5\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (5, "node2"), done.stderr


@pytest.mark.slow
def test_what_is_ended_before_it_began_does_not_begin(tmp_path: Path) -> None:
    channel = open_local("here", sys.executable)
    try:
        assert channel.call("hostshell.end", timeout_s=30, number=2, grace_s=0.1) == []
        answer = channel.call("hostshell.run", timeout_s=30, argv=["touch", str(tmp_path / "begun")])
    finally:
        channel.close()
    assert answer["status"] is None
    assert not (tmp_path / "begun").exists()


@pytest.mark.slow
def test_on_a_terminal_each_host_has_its_colour(tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text("connection: local\nhosts: {node1: , node2: }\n")
    ours, theirs = pty.openpty()
    kit = Kit(tmp_path / "x", None)
    argv = kit.argv("shell", "../l.yaml", "--", "printf", "50 %%\\r100 %%\\n")
    process = subprocess.Popen(argv, cwd=kit.folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 4096):
            said += data
    except OSError:  # a pty's way of saying that it is over
        pass
    os.close(ours)
    assert process.wait(60) == 0
    text = said.decode().replace("\r\n", "\n")
    assert "\x1b[36mnode1 │ \x1b[0m100 %\n" in text
    assert "\x1b[35mnode2 │ \x1b[0m100 %\n" in text
    assert text.endswith("\x1b[32mexit 0\x1b[0m  node[1-2]\n")


# --- pure ---------------------------------------------------------------------------------------------------


def test_names_are_as_wide_as_the_widest_and_a_file_gets_every_byte() -> None:
    prefixes = Prefixes(["a", "gpu10"])
    lines = Lines("a", "out", b"10 %\r20 %\r\n\xff\x1b[2J\x1b[1mbold\n")
    assert prefixes.apply(lines, is_terminal=False, colour=False) == (
        b"a     | 10 %\r20 %\r\na     | \xff\x1b[2J\x1b[1mbold\n"
    )
    assert prefixes.apply(lines, is_terminal=True, colour=False) == (
        "a     | 20 %\na     | \ufffd\x1b[1mbold\x1b[0m\n".encode()
    )


def test_hosts_that_ended_alike_share_a_line_and_the_bad_come_last() -> None:
    ended = [
        Ended("gpu1", 3),
        Ended("gpu2", 0),
        Ended("gpu4", 0),
        Ended("login", problem="10.0.0.9:22 cannot be reached"),
        Ended("gpu3", 0),
        Ended("gpu5", -9),
        Ended("fe80::1", 0, "could not end 12: another user's?"),
    ]
    assert summary(ended, colour=False).splitlines() == [
        "exit 0   gpu[2-4]",
        "exit 3   gpu1",
        "failed   login     10.0.0.9:22 cannot be reached",
        "SIGKILL  gpu5",
        "exit 0   fe80::1   could not end 12: another user's?",
    ]


@pytest.mark.parametrize(
    ("host", "argv"),
    [
        ("{}", ["ssh", "-o", "StrictHostKeyChecking=yes", "--", "gpu1"]),
        (
            "{user: me, port: 2222, address: 10.0.0.1}",
            ["ssh", "-o", "StrictHostKeyChecking=yes", "-l", "me", "-p", "2222", "--", "10.0.0.1"],
        ),
        (
            "{identity_file: my key, known_hosts: 100% known}",
            [
                "ssh", "-o", "StrictHostKeyChecking=yes", "-i", "{folder}/my key",
                "-o", 'UserKnownHostsFile="{folder}/100%% known" "~/.ssh/known_hosts" "~/.ssh/known_hosts2"',
                "--", "gpu1",
            ],
        ),
    ],
)  # fmt: skip
def test_logging_in_is_ssh_as_the_inventory_says(host: str, argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(f"hosts: {{gpu1: {host}}}")
    (found,) = load_inventory(tmp_path / "lab.yaml").hosts
    wanted = [each.replace("{folder}", str(tmp_path)) for each in argv]
    assert login_argv(found, accept_new_host_keys=False) == wanted
    assert "StrictHostKeyChecking=accept-new" in login_argv(found, accept_new_host_keys=True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["gpu[1-9]"], "lab.yaml has no gpu4, gpu5, gpu6, gpu7, gpu8, gpu9; it has gpu[1-3]"),
        (["gpu[1-"], "'gpu[1-' is no hostlist, as gpu[1-3]: "),
        (["--timeout", "0"], "--timeout: found 0, wanted seconds, a number above 0"),
        (["--timeout", "nan"], "--timeout: found nan, wanted seconds, a number above 0"),
    ],
)
def test_what_names_no_host_is_refused(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.yaml").write_text('hosts: {"gpu[1-3]": }')
    assert main(["shell", str(tmp_path / "lab.yaml"), *arguments, "--", "true"]) == 1
    assert problem in capsys.readouterr().err


def test_slurms_nodes_are_slurms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "big.yaml").write_text("slurm: {nodes: 2}")
    assert main(["shell", str(tmp_path / "big.yaml"), "--", "true"]) == 1
    assert "found slurm, wanted hosts" in capsys.readouterr().err
