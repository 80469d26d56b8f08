"""Sharded snapshots where each node has a folder of its own: a node is lost with its disk, and comes back empty."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from agents import Agents, until
from test_reform import STEPS, Run, agent_of

from nodekit.training import Snapshots

pytestmark = pytest.mark.slow

SHARDED = ("--engine", "fsdp", "--snapshot-every", "10")


def test_a_node_is_lost_with_its_disk_and_comes_back_empty(agents: Agents) -> None:
    """The agents, which copy a script's own files to each other, leave the parts alone."""
    run = Run(agents, *SHARDED, min_nodes=2, copies=2)
    run.wait_step(25)
    (rank,) = run.pids()["n2"]
    os.kill(agent_of(rank), signal.SIGKILL)
    run.wait_world(2)
    until(lambda: not Path(f"/proc/{rank}").exists(), what="its end: it writes to its disk")
    shutil.rmtree(agents.node_dir("n2") / "snapshots")
    run.wait_step(35)
    (agents.folder / "code/long").touch()  # the others are not to be done before it is there
    run.join("n2", 2)
    run.wait_world(3)
    (agents.folder / "code/long").unlink()
    losses = run.end()
    assert sorted(losses) == list(range(1, STEPS + 1))
    started = [event["world_size"] for event in run.events("n0", "workers-started")]
    assert started == [3, 2, 3]
    assert len({run.result(name)["weights_sha256"] for name in run.names}) == 1
    resumed = [event["step"] for event in run.events("n0", "resumed")]
    assert resumed[0] >= 10, "when step 20 was due, 10 was on the disks"
    assert resumed[1] >= 20
    assert run.result("n2")["resumed_at_step"] == resumed[1]
    for name in run.names:
        newest = Snapshots(agents.node_dir(name) / "snapshots").manifests()[0]
        assert newest.step == STEPS
        assert len(newest.kept_by) == 3
        assert not list((agents.node_dir(name) / "kept").rglob("*.distcp"))
        assert run.events(name, "replica-kept") == []
        assert run.events(name, "replica-failed") == []
