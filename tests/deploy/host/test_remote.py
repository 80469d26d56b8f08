"""What the server on a host ends: recorded processes, and no others; and what it writes down at whose word."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodekit.deploy.host import current_status, files, processes
from nodekit.deploy.host.node import agents, fence, status


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield started
    started.kill()
    started.wait()


def node_of(folder: Path, worker: subprocess.Popen[bytes], *, boot_id: str) -> str:
    """A node's folder that records this worker, of an agent that is gone."""
    node = {"run": "lab-1", "node": "n0"}
    line = {**node, "time": 1.0, "kind": "agent-started"}
    (folder / "events.jsonl").write_text(json.dumps(line) + "\n")
    process = {"pid": worker.pid, "start_time": processes.start_time(worker.pid)}
    workers = [{**process, "rank": 0, "local_rank": 0}]
    current_status.StatusFile(str(folder / "events.jsonl")).write(
        {**node, "time": 1.0, "state": "running", "workers": workers}
    )
    agent = {"pid": 2**22 + 1, "start_time": 1, "boot_id": boot_id}
    (folder / "agent.json").write_text(json.dumps(agent))
    return str(folder)


def test_a_worker_that_outlived_its_agent_is_killed(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    node_dir = node_of(tmp_path, worker, boot_id=processes.boot_id())
    assert agents.stop(node_dir, grace_s=1.0) == {"was": "not running", "killed": False}
    assert worker.wait(10) == -signal.SIGKILL


def test_a_node_that_leaves_a_job_that_goes_on_is_not_said_to_be_stopped(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    """Else its agent's death just before would end the job of all others."""
    node_dir = node_of(tmp_path, worker, boot_id=processes.boot_id())
    agents.stop(node_dir, grace_s=1.0, for_good=False)
    assert worker.wait(10) == -signal.SIGKILL
    assert status.said(node_dir)["state"] == "running"


def test_a_process_of_this_boot_is_not_a_worker_of_an_earlier_one(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    node_dir = node_of(tmp_path, worker, boot_id="an earlier one")
    assert agents.inject(node_dir, "worker", signal.SIGKILL)["pids"] == []
    assert agents.inject(node_dir, "node", signal.SIGKILL)["pids"] == []
    assert agents.stop(node_dir, grace_s=1.0, force=True) == {"was": "not running", "killed": False}
    assert worker.poll() is None
    assert status.said(node_dir)["state"] == "stopped"


def test_of_requests_that_come_at_once_the_older_never_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_dir = str(tmp_path / "n0")
    write = files.write_private

    def writes(path: str, data: bytes, durable: bool = False) -> None:
        if path.endswith(("fence", "electorate.json")):  # an older one takes its time
            number = json.loads(data) if path.endswith("fence") else json.loads(data)["version"]
            time.sleep(0.05 / (1 + number))
        write(path, data, durable=durable)

    fence.fence(node_dir, 0)
    write(f"{node_dir}/spec.json", json.dumps({"generation": 0}).encode())
    monkeypatch.setattr(files, "write_private", writes)
    voters = {"generation": 0, "nodes": ["n0"]}
    calls: list[Callable[[], object]] = [
        lambda number=number: fence.fence(node_dir, number) for number in range(1, 6)
    ]
    calls += [
        lambda number=number: fence.set_voters(node_dir, {**voters, "version": number})
        for number in range(1, 6)
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert status.fence_in(node_dir) == 5
    assert files.load(f"{node_dir}/electorate.json")["version"] == 5


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_late_fence_does_not_lower_that_of_a_shared_folder(tmp_path: Path, is_damaged: bool) -> None:
    shared = tmp_path / "shared"
    env = {"NODEKIT_SNAPSHOT_DIR": str(shared), "NODEKIT_SNAPSHOT_SHARED": "1"}
    nodes = [str(tmp_path / name) for name in ("n0", "n1")]
    for node_dir in nodes:
        fence.fence(node_dir, 0)
        files.write_private(f"{node_dir}/spec.json", json.dumps({"generation": 0, "env": env}).encode())
    fence.fence(nodes[0], 5)
    if is_damaged:
        (shared / "fence").write_text("x")
    fence.fence(nodes[1], 4)
    assert status.fence_in(str(shared)) == (4 if is_damaged else 5)
    assert [status.fence_in(node_dir) for node_dir in nodes] == [5, 4]
