"""The command that a run goes on with: what is printed is to do that when it is pasted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen.verdict_screen import resume_command
from nodekit.inventory.load import example_path


def run(path: Path, **fields: Any) -> Run:
    return Run(
        run_id="lab-1",
        name="lab",
        inventory_path=str(path),
        inventory={},
        created=1.0,
        **{"command": None, **fields},
    )


def test_it_has_all_that_the_run_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lab = tmp_path / "my lab.yaml"
    assert resume_command(run(lab)) == "kit up 'my lab.yaml'"
    own = run(lab, command=["train.py", "--name", "a b"], skip_check=True)
    assert resume_command(own) == "kit up 'my lab.yaml' --skip-check -- train.py --name 'a b'"


def test_kits_own_inventory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = example_path("local")
    assert resume_command(run(local, command=["train.py"])) == "kit up local -- train.py"
    (tmp_path / "local").touch()  # which `kit up local` would read
    assert resume_command(run(local)) == f"kit up {local}"
