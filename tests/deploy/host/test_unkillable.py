"""Processes that SIGKILL does not end, as in the driver of a lost GPU: nobody waits for them for ever."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import freeze

from nodekit.deploy.host import processes
from nodekit.deploy.host.errors import cure_of
from nodekit.deploy.host.node import agents


@pytest.fixture
def frozen(freezer: Path) -> Iterator[int]:
    """The pid of a process in state D."""
    with subprocess.Popen(["sleep", "600"]) as process:
        freeze(freezer, process.pid)
        yield process.pid
        process.kill()
        (freezer / "freezer.state").write_text("THAWED")


def test_it_is_told_where_a_process_waits(frozen: int) -> None:
    state, _ = processes.where_it_waits(frozen)
    assert state == "D"
    assert processes.unkillable(frozen).startswith(f"SIGKILL does not end pid {frozen} (state D")
    assert processes.activity(frozen) == processes.activity(frozen) != ""
    assert processes.activity(-1) == ""
    assert processes.where_it_waits(-1) == ("Z", "")


def test_the_stop_of_an_agent_that_cannot_be_killed_ends(
    frozen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "UNKILLABLE_S", 0.1)
    record = {"pid": frozen, "start_time": processes.start_time(frozen), "boot_id": processes.boot_id()}
    (tmp_path / "agent.json").write_text(json.dumps(record))
    (tmp_path / "events.jsonl").write_text(json.dumps({"run": "r", "time": time.time(), "node": "n"}) + "\n")
    with pytest.raises(RuntimeError, match=rf"SIGKILL does not end pid {frozen} \(state D") as told:
        agents.stop(str(tmp_path), grace_s=0.0, force=True)
    assert cure_of(told.value) == "reboot the host"
