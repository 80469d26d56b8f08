"""Nodes for the tests of replicas, and a disk that fails."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replica_cluster import PATIENT_S, Cluster, Fails

from nodekit.deploy.agent import agent_wire
from nodekit.deploy.agent.replicas import replicas
from nodekit.training.snapshots.files import commit


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "POLL_S", 0.02)
    monkeypatch.setattr(replicas, "STABLE_S", 0.15)
    connect = agent_wire.connect

    def patient(
        endpoint: str, token: str, timeout_s: float = PATIENT_S, announce: Callable[..., object] | None = None
    ) -> agent_wire.Wire:
        return connect(endpoint, token, timeout_s, announce)

    monkeypatch.setattr(agent_wire, "CONNECT_S", PATIENT_S)
    monkeypatch.setattr(agent_wire, "connect", patient)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made = []

    def make(num_nodes: int, copies: int = 2) -> Cluster:
        made.append(Cluster(tmp_path, num_nodes, copies))
        return made[-1]

    yield make
    for each in made:
        for node in each.nodes:
            node.die()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("replicas")] == []


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Makes reading a file of a name, or listing a folder of that name, fail so many times."""
    monkeypatch.setattr(commit, "_PAUSE_S", 0.1)
    left: dict[str, list[int]] = {}

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int):
                for name, numbers in left.items():
                    if Path(path).name.startswith(name) and numbers:
                        raise OSError(numbers[0], os.strerror(numbers.pop()), str(path))
            return real(path, *args, **kwargs)

        return call

    for owner, name in ((os, "open"), (os, "scandir"), (Path, "read_bytes"), (Path, "iterdir")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))

    def fail(name: str, times: int, number: int = errno.EIO) -> None:
        # What fails a few times is waited for, however long the machine stands still meanwhile.
        monkeypatch.setattr(commit, "RETRY_S", PATIENT_S if times < 10 else 1.0)
        left[name] = [number] * times

    return fail
