"""Agents started by hand on this machine, as `kit up` starts them: channels, a held port, warm, go."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents

import nodekit.deploy
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.connect.channel import HostChannel, open_local
from nodekit.deploy.host import processes

KIT_DIR = str(Path(nodekit.deploy.__file__).parent.parent.parent)
ANSWER_S = 60.0
"""How long a call has: 5 or 10 s, as some had, are no more than a machine may stand still with all that is on it."""


def until(condition: Callable[[], Any], *, timeout_s: float = 60.0, what: str = "it") -> Any:
    """The first true value of `condition`, asked for again until the deadline.

    On a machine that is busy ten times over, three agents take 30 s to import torch.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        ended = time.monotonic()
        assert ended < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        # Looking takes a fifth of a core at most, which is wanted for what is waited for.
        time.sleep(min(max(0.05, 4 * (ended - began)), 0.5))


def processes_of(marker: str) -> dict[int, str]:
    """The live processes with `marker` in their environment: pid → command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found[int(folder.name)] = command
    return found


def no_process_left(marker: str, *, timeout_s: float = 20.0) -> None:
    """Wait until no live process has `marker` in its environment; the error says who is left, and what it waits for."""
    deadline = time.monotonic() + timeout_s
    while left := processes_of(marker):
        if time.monotonic() > deadline:
            told = [f"{pid} {processes.where_it_waits(pid)}: {command}" for pid, command in left.items()]
            raise AssertionError(f"{len(left)} processes left after {timeout_s:.0f} s:\n" + "\n".join(told))
        time.sleep(0.05)


class Agents:
    """Local nodes of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.channels: dict[str, HostChannel] = {}
        self.marker = f"NODEKIT_TEST={folder}"
        (folder / "code").mkdir(parents=True)

    def node_dir(self, name: str) -> Path:
        return self.folder / name

    def start(
        self, script: str, *args: str, num_nodes: int = 2, go: bool = True, python: str = "", **changes: Any
    ) -> None:
        """Start a node per name with `script` as its program; by `python` where the agent's own pid is needed."""
        (self.folder / "code" / "job.py").write_text(script)
        names = [f"n{number}" for number in range(num_nodes)]
        secrets = changes.pop("secrets", {})
        for name in names:
            self.channels[name] = open_local(name, warm_agents.program())
        port = self.channels["n0"].call("hold_port", timeout_s=ANSWER_S, address="127.0.0.1")
        for name in names:
            self._prestart(name, python, secrets)
        for rank, name in enumerate(names if go else ()):
            self._start(
                self.spec(name, *args, node_rank=rank, master_port=port, num_nodes=num_nodes, **changes)
            )

    def start_again(self, name: str, **changes: Any) -> None:
        """Start the agent of a node whose agent is gone."""
        self._prestart(name, "", {})
        self._start(self.spec(name, **changes))

    def _prestart(self, name: str, python: str, secrets: dict[str, str]) -> None:
        self.channels[name].call(
            "prestart",
            timeout_s=ANSWER_S,
            node_dir=str(self.node_dir(name)),
            python=python or warm_agents.program(),
            kit_dir=KIT_DIR,
            env={"NODEKIT_TEST": str(self.folder), "GLOO_SOCKET_IFNAME": "lo", **secrets},
        )

    def _start(self, spec: AgentSpec) -> None:
        self.channels[spec.name].call(
            "start",
            timeout_s=ANSWER_S,
            node_dir=spec.node_dir,
            spec=spec.to_dict(),
            port=spec.master_port if spec.is_host else None,
        )

    def spec(self, name: str, *args: str, num_nodes: int = 1, **changes: Any) -> AgentSpec:
        """The spec of a node that runs ``job.py``, loopback and one worker; `changes` are of its fields."""
        values: dict[str, Any] = {
            "run_id": "r",
            "generation": 0,
            "name": name,
            "node_rank": 0,
            "min_nodes": num_nodes,
            "max_nodes": num_nodes,
            "nproc_per_node": 1,
            "master_addr": "127.0.0.1",
            "master_port": 0,
            "is_host": changes.get("node_rank", 0) == 0,
            "nodes": tuple(f"n{number}" for number in range(num_nodes)),
            "electorate": tuple(f"n{number}" for number in range(num_nodes)),
            "wait_s": 60.0,
            "local_addr": "127.0.0.1",
            "max_restarts": 0,
            "argv": ("python", "-u", "job.py", *args),
            # Threads as `plan.share_threads` has it for nodes on one machine; libraries that find none take all cores.
            "env": {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            "code_dir": str(self.folder / "code"),
            "node_dir": str(self.node_dir(name)),
            "grace_s": 5.0,
            "token": "the run's token",
        }
        return AgentSpec(**{**values, **changes})

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.channels[name].call(
            "status", timeout_s=ANSWER_S, node_dir=str(self.node_dir(name))
        )
        return found

    def wait(self, name: str, *states: str, timeout_s: float = 60.0) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            status = self.status(name)
            ended = states[0] in ("succeeded", "failed", "stopped", "gone")
            if ended and not status["alive"]:
                return status
            return status if not ended and status.get("state") in states else None

        found: dict[str, Any] = until(there, timeout_s=timeout_s, what=f"{name} {' or '.join(states)}")
        return found

    def log(self, rank: int, attempt: str = "0.0") -> str:
        (path,) = self.folder.glob(f"n*/logs/rank{rank}-attempt{attempt}.log")
        return path.read_text()

    def close(self) -> None:
        for name, channel in self.channels.items():
            with contextlib.suppress(Exception):
                node_dir = str(self.node_dir(name))
                channel.call("stop", timeout_s=ANSWER_S, node_dir=node_dir, grace_s=0.0, force=True)
            channel.close()
        with contextlib.suppress(AssertionError):  # a killed agent's fork server needs a moment to see it
            until(lambda: not processes_of(self.marker), timeout_s=30)
        left = processes_of(self.marker)
        for pid in left:
            os.kill(pid, 9)
        assert not left, left


LEFT_WAITING = "another rank is lost, and this one still waits for it"
"""What a rank says that gloo leaves waiting."""
THREAD_LEFT_WAITING = "its threads of the last attempt have not ended"
"""What one says of which gloo leaves Horovod's thread waiting."""


def again_if_left_waiting(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of ranks that stay once more, on other nodes, if it fails where gloo has left one of them waiting.

    Of a hundred losses one is of that kind (training/group/connections.py): that rank saves its step and is started
    again, by rights.
    """

    @functools.wraps(test)
    def run(*, agents: Agents, **fixtures: Any) -> None:
        try:
            test(agents=agents, **fixtures)
        except (AssertionError, ValueError):  # of one attempt more than it unpacks
            logs = [path.read_text() for path in agents.folder.glob("n*/logs/*.log")]
            if not any(text in log for log in logs for text in (LEFT_WAITING, THREAD_LEFT_WAITING)):
                raise
            again = Agents(agents.folder / "once more")
            try:
                test(agents=again, **fixtures)
            finally:
                again.close()

    return run


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Nodes in a folder with a name that a shell would take apart."""
    started = Agents(tmp_path / "a 'b\" $HOME;c")
    yield started
    started.close()


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup whose processes are in state D while it is frozen (`freeze`), and not even SIGKILL ends them."""
    folder = Path(f"/sys/fs/cgroup/freezer/kit-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup v1 freezer: {error}")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def freeze(folder: Path, pid: int) -> None:
    """Put a process into the cgroup, and into state D."""
    (folder / "cgroup.procs").write_text(str(pid))
    (folder / "freezer.state").write_text("FROZEN")
    until(lambda: (folder / "freezer.state").read_text() == "FROZEN\n")
