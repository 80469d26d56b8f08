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


@pytest.mark.parametrize("force", [False, True])
def test_an_agent_whose_imports_go_on_is_killed_when_it_gets_no_spec(tmp_path: Path, *, force: bool) -> None:
    """As from a file server that is slow, or hangs: `kit up` has failed meanwhile, or Ctrl-C was pressed, or twice."""
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 300 &\nwait\n")
    (tmp_path / "python").chmod(0o700)
    node_dir = str(tmp_path / "n0")
    pid = agents.prestart(node_dir, str(tmp_path / "python"), "/none", {})["pid"]
    began = time.monotonic()
    assert agents.stop(node_dir, grace_s=5.0 if force else 0.5, force=force) == {
        "was": "not running",
        "killed": True,
    }
    assert not force or time.monotonic() - began < 4
    deadline = time.monotonic() + 10
    while any(each.group == pid and not each.has_ended for each in processes.all_of_them().values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("by", ["stop", "prestart"])
def test_an_agent_that_waits_for_a_server_that_was_cut_off_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Its host may not notice for hours that nobody can give it its go any more."""
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 300 &\nwait\n")
    (tmp_path / "python").chmod(0o700)
    args = (str(tmp_path / "n0"), str(tmp_path / "python"), "/none", {})
    first = agents.prestart(*args)["pid"]
    with agents._started[args[0]].process as waiting:
        monkeypatch.setattr(agents, "_started", {})  # those of another connection
        if by == "prestart":
            agents.prestart(*args)
            assert waiting.wait(10) == -signal.SIGKILL
        assert agents.stop(args[0], grace_s=0.1) == {"was": "not running", "killed": by == "prestart"}
        assert waiting.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(each.group == first and not each.has_ended for each in processes.all_of_them().values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_agent_that_takes_the_place_of_the_one_that_ends_keeps_its_ranks(
    tmp_path: Path, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where `kit up` comes right after a `kit down`, over another connection."""
    node_dir = node_of(tmp_path, worker, boot_id=processes.boot_id())
    with subprocess.Popen(["sleep", "300"]) as old, subprocess.Popen(["sleep", "300"]) as new:
        records = [
            {"pid": each.pid, "start_time": processes.start_time(each.pid), "boot_id": processes.boot_id()}
            for each in (old, new)
        ]
        (tmp_path / "agent.json").write_text(json.dumps(records[0]))

        def end_as_asked(pid: int, number: int) -> None:
            assert pid == old.pid
            old.kill()
            old.wait()
            (tmp_path / "agent.json").write_text(json.dumps(records[1]))

        monkeypatch.setattr(processes, "send", end_as_asked)
        assert agents.stop(node_dir, grace_s=1.0) == {"was": "running", "killed": False}
        assert (worker.poll(), new.poll(), status.said(node_dir)["state"]) == (None, None, "running")
        new.kill()


def test_a_process_of_this_boot_is_not_a_worker_of_an_earlier_one(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    node_dir = node_of(tmp_path, worker, boot_id="an earlier one")
    assert agents.inject(node_dir, "worker", signal.SIGKILL)["pids"] == []
    assert agents.inject(node_dir, "node", signal.SIGKILL)["pids"] == []
    assert agents.stop(node_dir, grace_s=1.0, force=True) == {"was": "not running", "killed": False}
    assert worker.poll() is None
    assert status.said(node_dir)["state"] == "stopped"


def test_a_process_of_this_boot_is_not_an_agent_of_an_earlier_one(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    """It may have the agent's pid, and even its start time, which is counted from the boot on."""
    process = {"pid": worker.pid, "start_time": processes.start_time(worker.pid)}
    (tmp_path / "agent.json").write_text(json.dumps({**process, "boot_id": "an earlier one"}))
    assert status.agent_alive(str(tmp_path)) is None
    assert agents.stop(str(tmp_path), grace_s=1.0, force=True) == {"was": "not running", "killed": False}
    assert worker.poll() is None


def test_how_an_agent_has_ended_stays_where_it_is_told_to_stop(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    node_dir = node_of(tmp_path, worker, boot_id=processes.boot_id())
    current_status.of(node_dir).write(
        {**status.said(node_dir), "time": 2.0, "state": "succeeded", "workers": []}
    )
    agents.stop(node_dir, grace_s=1.0)
    assert status.said(node_dir)["state"] == "succeeded"


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


def test_voters_of_another_generation_are_not_written_down(tmp_path: Path) -> None:
    fence.fence(str(tmp_path), 1)
    files.write_private(str(tmp_path / "spec.json"), json.dumps({"generation": 1}).encode())
    for generation in (0, 2):
        fence.set_voters(str(tmp_path), {"generation": generation, "version": 1, "nodes": ["n0"]})
        assert files.load(str(tmp_path / "electorate.json")) is None
    fence.set_voters(str(tmp_path), {"generation": 1, "version": 1, "nodes": ["n0"]})
    assert files.load(str(tmp_path / "electorate.json"))["version"] == 1


def test_a_node_that_was_fenced_before_it_knew_where_snapshots_are_fences_them_as_it_enters(
    tmp_path: Path,
) -> None:
    node_dir, shared = str(tmp_path / "n0"), tmp_path / "shared"
    fence.fence(node_dir, 1)
    env = {"NODEKIT_SNAPSHOT_DIR": str(shared), "NODEKIT_SNAPSHOT_SHARED": "1"}
    fence.enter(node_dir, {"generation": -1}, {"generation": 1, "env": env}, called_off=-1)
    assert status.fence_in(str(shared)) == 1


def test_a_shared_folder_is_not_made_in_place_of_a_mount_that_is_missing(tmp_path: Path) -> None:
    """What ranks saved there would lie on this host's own disk, and be hidden by the mount later."""
    with pytest.raises(OSError, match=r"mnt \(snapshots.shared\) is not there"):
        fence.make_snapshot_folder(str(tmp_path / "mnt" / "run"), is_shared=True)
    assert list(tmp_path.iterdir()) == []
