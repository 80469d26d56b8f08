"""An agent that nobody could find by its folder any more ends, instead of training on beside the next one."""

import json
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest

from nodekit.deploy.agent.orders import Disowned, Orders

SPEC: Any = SimpleNamespace(generation=0, call=0)


def _owned(folder: Path, pid: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.json").write_text(json.dumps({"pid": pid, "start_time": 1, "boot_id": "b"}))


def test_agent_whose_folder_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "runs" / "lab-1" / "a"
    _owned(node, 1)
    orders = Orders(node)
    orders.check(SPEC)
    rmtree(node.parent)
    orders.check(SPEC)  # it may be back in a moment
    monkeypatch.setattr("nodekit.deploy.agent.orders.GONE_S", 0.0)
    with pytest.raises(Disowned, match="removed"):
        orders.check(SPEC)


def test_a_file_system_that_is_away_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodekit.deploy.agent.orders.GONE_S", 0.0)
    node = tmp_path / "runs" / "lab-1" / "a"
    _owned(node, 1)
    orders = Orders(node)
    (tmp_path / "runs").rename(tmp_path / "away")
    orders.check(SPEC)
    (tmp_path / "away").rename(tmp_path / "runs")
    orders.check(SPEC)


def test_what_a_clean_up_has_removed_is_put_back(tmp_path: Path) -> None:
    _owned(tmp_path / "a", 1)
    own = (tmp_path / "a" / "agent.json").read_text()
    orders = Orders(tmp_path / "a")
    (tmp_path / "a" / "agent.json").unlink()
    orders.check(SPEC)
    assert json.loads((tmp_path / "a" / "agent.json").read_text()) == json.loads(own)


def test_agent_whose_folder_has_become_another_ones_is_told(tmp_path: Path) -> None:
    _owned(tmp_path / "a", 1)
    orders = Orders(tmp_path / "a")
    _owned(tmp_path / "a", 2)
    with pytest.raises(Disowned):
        orders.check(SPEC)


def test_agent_json_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    _owned(tmp_path / "a", 1)
    orders = Orders(tmp_path / "a")
    (tmp_path / "a" / "agent.json").write_text("{")
    orders.check(SPEC)
