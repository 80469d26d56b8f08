"""What is said of a phase that takes long, while it does."""

from __future__ import annotations

import re

import pytest
from agents import until

from nodekit.deploy.output import phases
from nodekit.deploy.output.phases import Phases


def test_a_phase_that_takes_long_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(phases, "SILENT_S", 600.0)  # for what is quick, on a busy machine too
    told = Phases(silent=False)
    with told.phase("start", waits_for="torch") as said:  # quick
        said.append("2 nodes")
    monkeypatch.setattr(phases, "SILENT_S", 0.0)
    shown = [capsys.readouterr().out]
    with told.phase("start", waits_for="torch") as said:
        until(lambda: shown.append(capsys.readouterr().out) or any(shown[1:]), what="a word")
        said.append("2 nodes")
    shown.append(capsys.readouterr().out)
    assert re.fullmatch(r"start    2 nodes  \(\d+\.\d s\)\n", shown[0])
    assert "".join(shown[1:]).startswith("start    waiting for torch\nstart    2 nodes  (")
