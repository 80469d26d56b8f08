"""Fixtures: three real hosts for the session, handed to each test whole and left without its processes."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodekit.deploy.lab.lab_cluster import Lab, down
from nodekit.deploy.lab.lab_process import ProcessRecord, kill
from nodekit.inventory.errors import KitError

BUSY_S = 60.0
"""What a deadline of kit's may be overrun by on a busy machine, where a process waits for its turn.

5 s, as it once was, are less than a machine stands still whose processors somebody else has.
"""


def wait_until(
    condition: Callable[[], object], *, timeout_s: float = 60, what: str = "the condition"
) -> None:
    """Poll until a condition holds; AssertionError if it does not in time.

    10 s, as it once was, are little more than a machine stands still whose processors somebody else has.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.01)


def make_whole(lab: Lab) -> None:
    """Mend every link and start every crashed host; disks keep what is on them."""
    for host in lab.hosts:
        if lab.status(host) != "up":
            lab.mend(host)
            lab.revive(host)


def control_index(lab: Lab) -> str:
    """The number of its interface on this machine, "" without one: its name may be another worker's lab's at once."""
    with contextlib.suppress(OSError):
        return Path("/sys/class/net", lab.control_interface, "ifindex").read_text()
    return ""


def processes(lab: Lab, host: str) -> set[ProcessRecord]:
    """What runs on a host now, so that it can be told from what runs there later."""
    found = set()
    for pid in lab.processes(host):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(ProcessRecord.of(pid))
    return found


def on(lab: Lab, host: str, *argv: str) -> str:
    """Run a command on a host; its output without the last newline."""
    answer = lab.run(host, argv, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    output: str = answer.stdout
    return output.rstrip("\n")


def connect_s(lab: Lab, host: str) -> float:
    """How long it takes to connect to a host's sshd."""
    started = time.perf_counter()
    socket.create_connection((lab.hosts[host].address, 22), timeout=5).close()
    return time.perf_counter() - started


def best_connect_s(lab: Lab, host: str, below_s: float) -> float:
    """The fastest of as many connections as it takes until one is faster than that: this machine may be busy."""
    deadline, best = time.monotonic() + 60, connect_s(lab, host)
    while best >= below_s and time.monotonic() < deadline:
        best = min(best, connect_s(lab, host))
    return best


def crash_together(lab: Lab, *hosts: str) -> None:
    """Crash hosts, none of which has noticed the end of another by its own: they are stopped first."""
    for host in hosts:
        for pid in lab.processes(host):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGSTOP)
    for host in hosts:
        lab.crash(host)


def no_answer(lab: Lab, host: str) -> bool:
    """Whether a connection to a host's sshd gets neither accepted nor refused."""
    try:
        socket.create_connection((lab.hosts[host].address, 22), timeout=0.3).close()
    except TimeoutError:
        return True
    return False


def remove_labs(folder: Path) -> None:
    """Remove every lab below a folder, and the folder."""
    for record in list(folder.rglob("lab.json")):
        down(record.parent)
    shutil.rmtree(folder)


def remove_labs_of_the_gone(everyones: Path) -> None:
    """Remove the labs of sessions that were ended before they could."""
    with (everyones.parent / "nodekit-test-labs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a session begin at once, and one is to remove them
        for other in everyones.iterdir():
            owner = ProcessRecord.read(other / "pytest.json")
            if owner is None or not owner.is_alive:
                with contextlib.suppress(KitError):  # made by another version of kit
                    remove_labs(other)


# Ctrl-C of pytest kills its workers: what they have started is removed by a process of its own.
WHEN_GONE = """
import os, select, sys
from pathlib import Path
select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
import lab_hosts
lab_hosts.remove_labs_of_the_gone(Path(sys.argv[2]))
"""


@pytest.fixture(scope="session")
def session_labs() -> Iterator[Path]:
    """Where this session's labs are; they are removed at its end, whatever that is."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    everyones = Path(tempfile.gettempdir()) / "nodekit-test-labs"
    everyones.mkdir(mode=0o700, exist_ok=True)
    remove_labs_of_the_gone(everyones)
    made = Path(tempfile.mkdtemp())
    ProcessRecord.of(os.getpid()).write(made / "pytest.json")
    folder = made.rename(everyones / made.name)  # with its owner in it: another session may be looking
    guard = subprocess.Popen(
        [sys.executable, "-c", WHEN_GONE, str(os.getpid()), str(everyones)],
        cwd=Path(__file__).parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield folder
    remove_labs(folder)
    guard.kill()
    guard.wait()


@pytest.fixture
def labs(session_labs: Path) -> Iterator[Path]:
    """An empty folder for a test that makes labs of its own; those it leaves are removed."""
    folder = Path(tempfile.mkdtemp(dir=session_labs))
    yield folder
    remove_labs(folder)


@pytest.fixture(scope="session")
def lab3(session_labs: Path) -> Iterator[Lab]:
    """Three hosts, for the session. Tests use `lab`."""
    lab = Lab.up(3, folder=session_labs / "three hosts")
    yield lab
    lab.down()


@pytest.fixture
def lab(lab3: Lab) -> Iterator[Lab]:
    """The session's three hosts, up and with whole links; what the test leaves running there is killed."""
    make_whole(lab3)
    before = {host: processes(lab3, host) for host in lab3.hosts}
    yield lab3
    for host, own in before.items():
        now = processes(lab3, host)
        if own <= now:
            kill(*(now - own))
        else:  # it was crashed, perhaps revived, or lost its sshd
            lab3.crash(host)
    make_whole(lab3)
