"""Who holds a run, and a file: without a second process, for a lock is an open file's."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.records import locks, record_files
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError, NotWritten


def run_of(folder: Path, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "state": "starting",
        "created": 1.7e9,
        "inventory": {},
        "command": None,
        **changes,
    }
    run = Run(run_id="lab-1122-060115-77ab", name="lab", inventory_path=str(folder / "lab.yaml"), **fields)
    run.save()
    return run


def test_a_file_is_one_processs_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not locks.is_held(path)
    assert not path.exists(), "who looks makes none"
    with locks.locked(path) as file:  # type: ignore[union-attr]
        assert file.writable()
        assert path.stat().st_mode & 0o777 == 0o600
        assert locks.locked(path) is None
        assert locks.is_held(path)
    assert not locks.is_held(path)
    with path.open() as other:
        assert not locks.is_held(path)
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not locks.is_held(path), "by who looks"
    again = locks.locked(path)
    assert again is not None
    again.close()


def test_a_lock_that_cannot_be_looked_at_may_be_held(tmp_path: Path) -> None:
    """Else `kit status` would say of a run that is looked after that it ended while nobody watched."""
    (tmp_path / "lock").symlink_to("lock")
    assert locks.is_held(tmp_path / "lock")
    assert not locks.is_held(tmp_path / "no folder" / "lock")


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        locks.locked(tmp_path / "no folder" / "lock")
    run = run_of(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(NotWritten, match="No space left"):
        SupervisorLock(run).acquire()
    with pytest.raises(NotWritten, match="No space left"), locks.starting(tmp_path / "lab.yaml"):
        pass


def test_one_supervises_a_run_and_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    lock, other = SupervisorLock(run), SupervisorLock(run)
    assert other.owner() == "?"
    assert not locks.is_supervised(run)
    assert not lock.is_held
    assert lock.acquire()
    assert lock.acquire(), "again"
    assert lock.is_held
    assert other.owner() == str(os.getpid())
    assert not other.acquire()
    assert not other.is_held
    assert locks.is_supervised(run)
    other.release()
    assert locks.is_supervised(run), "it is not that one's"
    lock.release()
    lock.release()
    assert not lock.is_held
    (run.folder / "supervisor.lock").write_text("77")
    assert not locks.is_supervised(run)
    assert lock.owner() == "77", "who only asks does not sign"
    assert other.acquire()
    other.release()
    (run.folder / "supervisor.lock").write_text("99999999999")
    assert lock.acquire()
    assert lock.owner() == str(os.getpid()), "nothing is left of the one before"
    lock.release()


def test_two_kit_ups_start_no_two_runs_of_an_inventory(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    inventory, other = tmp_path / "lab.yaml", tmp_path / "other.yaml"
    inventory.touch()
    (tmp_path / "link.yaml").symlink_to(inventory)
    assert not locks.is_starting(run)
    with locks.starting(inventory):
        assert locks.is_starting(run)
        run.state = "running"
        assert not locks.is_starting(run), "it has been started"
        run.state = "starting"
        for path in (inventory, tmp_path / "link.yaml"):
            another = rf"another kit up \(pid {os.getpid()}\) is just"
            with pytest.raises(KitError, match=another) as raised, locks.starting(path):
                pass
            assert raised.value.problem.cure == "wait for it, then kit up attaches to its run"
        with locks.starting(other):
            pass
    assert not locks.is_starting(run)
    with locks.starting(inventory):
        pass


@pytest.mark.parametrize(("written", "pid"), [(b"", "?"), (b"77\n", "77"), (b"\xff7", "\ufffd7")])
def test_whoever_holds_a_lock_is_named_as_far_as_it_can_be_read(
    written: bytes, pid: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path)
    (run.folder / "supervisor.lock").write_bytes(written)
    assert SupervisorLock(run).owner() == pid
    with locks.starting(tmp_path / "lab.yaml"):
        locks.starting_lock(run).write_bytes(written)
        with (
            pytest.raises(KitError, match=rf"\(pid {re.escape(pid)}\)"),
            locks.starting(tmp_path / "lab.yaml"),
        ):
            pass


def test_the_first_kit_up_of_all_makes_the_folder_of_its_lock(tmp_path: Path) -> None:
    with locks.starting(tmp_path / "lab.yaml"):
        assert record_files.folder().stat().st_mode & 0o777 == 0o700
