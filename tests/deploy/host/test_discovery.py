"""The interpreters that `deploy/host/probes/discovery.py` finds in a home, good ones and others."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from nodekit.deploy.host.probes import discovery, hostfacts


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return own_home


def test_an_environment_in_the_home_has_a_path_from_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "my venv").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    found = {each["path"]: each for each in discovery.interpreters()}
    ours = found["~/my venv/bin/python"]
    assert ours == {
        "path": "~/my venv/bin/python",
        "version": ".".join(map(str, sys.version_info[:3])),
        "torch": hostfacts.module_version("torch"),
        "default": False,
    }
    assert [each["path"] for each in found.values() if each["default"]] == ["/usr/bin/python3"]


def test_what_is_no_interpreter_is_passed_over_in_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(home / "broken/bin/python", "exit 1")
    program(home / "liar/bin/python", "echo 'it is 3.11'")
    program(home / "list/bin/python", "echo '[1, 2]'")
    program(home / "slow/bin/python", "exec sleep 60")
    (home / "gone/bin").mkdir(parents=True)
    (home / "gone/bin/python").symlink_to("/nowhere/python")
    (home / "mine/bin").mkdir(parents=True)
    (home / "mine/bin/python").write_text("not executable")
    monkeypatch.setattr(discovery, "_PROBE_TIMEOUT_S", 2)
    start = time.monotonic()
    found = discovery.interpreters()
    assert time.monotonic() - start < 30
    assert found[0]["default"]
    assert not [
        each["path"] for each in found if each["path"].startswith("~/") and "pyenv" not in each["path"]
    ]


def test_torch_is_found_and_not_imported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = home / "packages/torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(home / 'imported')!r}, 'w')")
    (package / "version.py").write_text("from x import y\n__version__ = '9.8.7+cu124'\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert discovery.interpreters()[0]["torch"] == "9.8.7+cu124"
    assert not (home / "imported").exists()
    (package / "version.py").unlink()
    assert discovery.interpreters()[0]["torch"] != "9.8.7+cu124"


def test_it_does_not_look_for_torch_where_it_stands(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "torch").mkdir()
    (home / "torch/version.py").write_text("__version__ = '9.8.7'\n")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert "9.8.7" not in {each["torch"] for each in discovery.interpreters()}
