"""`kit why` on what this machine's record of a run lacks."""

import os
import time
from pathlib import Path

import pytest
from fake_nodes import Nodes

from nodekit.deploy.commands.afterwards.why import record_gap
from nodekit.deploy.records import events, locks


def test_a_gap_in_the_record_is_not_taken_for_a_run_without_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Nodes(tmp_path, monkeypatch).run
    run.state = "running"
    run.event("run-started")
    assert "nobody has supervised this run since about" in record_gap(run, [])
    lock = locks.SupervisorLock(run)
    assert lock.acquire()
    try:
        assert record_gap(run, []) == ""
        old = time.time() - 60
        os.utime(run.folder / events.FILE, (old, old))
        assert f"nothing was added to {run.folder} since" in record_gap(run, [])
        assert "does not answer, or no node can be reached" in record_gap(run, [])
        (run.folder / events.FILE).unlink()
        assert "cannot be seen: No such file or directory" in record_gap(run, [])
    finally:
        lock.release()
    run.state = "failed"
    assert record_gap(run, []) == ""
    run.event("said", text="it can be written again", num_lost=7)
    assert "7 events before" in record_gap(run, events.read(run.folder))
