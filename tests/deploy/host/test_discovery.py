"""The interpreters that `deploy/host/probes/discovery.py` finds in a home, good ones and others."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import until

from nodekit.deploy.host import processes
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
    for name in ("_PROBE_TIMEOUT_S", "_PROBES_TIMEOUT_S"):  # 6 s are less than a machine may stand still
        monkeypatch.setattr(discovery, name, 120)
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
        "named": False,
    }
    assert [each["path"] for each in found.values() if each["default"]] == ["/usr/bin/python3"]


def test_an_interpreter_that_is_named_is_one_wherever_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    (tmp_path / "odd place").symlink_to(sys.prefix)
    named = str(tmp_path / "odd place/bin/python")
    assert named not in {each["path"] for each in discovery.interpreters()}
    assert [each["path"] for each in discovery.interpreters(named) if each["named"]] == [named]
    assert [each["path"] for each in discovery.interpreters("/usr/bin/python3") if each["named"]] == [
        "/usr/bin/python3"
    ]
    assert not [each for each in discovery.interpreters("/nowhere/python") if each["named"]]


def test_what_is_no_interpreter_is_passed_over_in_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(home / "broken/bin/python", "exit 1")
    program(home / "liar/bin/python", "echo 'it is 3.11'")
    program(home / "list/bin/python", "echo '[1, 2]'")
    program(home / "slow/bin/python", "exec sleep 3600")  # longer than a test may take
    (home / "gone/bin").mkdir(parents=True)
    (home / "gone/bin/python").symlink_to("/nowhere/python")
    (home / "mine/bin").mkdir(parents=True)
    (home / "mine/bin/python").write_text("not executable")
    monkeypatch.setattr(discovery, "_PROBE_TIMEOUT_S", 2)

    def look() -> list[dict[str, Any]]:
        found = discovery.interpreters()
        # On a machine that stands still for 2 s, those that are good have not answered either.
        return found if found and found[0]["default"] else []

    found = until(look, what="an answer of the one that runs this")
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


def test_a_copied_folder_on_another_machines_own_disk_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that names it is in the copy, too: an image of a disk, or a home that was copied."""
    monkeypatch.setattr(hostfacts, "_is_on_own_disk", lambda _: True)
    monkeypatch.setattr(processes, "boot_id", lambda: "one")
    here = hostfacts.folder_id(str(tmp_path))
    assert here == hostfacts.folder_id(str(tmp_path))
    monkeypatch.setattr(processes, "boot_id", lambda: "another")
    assert hostfacts.folder_id(str(tmp_path)) != here
    monkeypatch.setattr(hostfacts, "_is_on_own_disk", lambda _: False)
    assert hostfacts.folder_id(str(tmp_path)) == here.partition("@")[0]
    assert hostfacts.read_folder_id(str(tmp_path / "none")) == ""


def test_copies_of_a_folder_on_one_machine_are_two_and_a_second_way_to_it_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers of one image that has been used on a host: they have the machine's boot in common."""
    monkeypatch.setattr(hostfacts, "_is_on_own_disk", lambda _: True)
    (tmp_path / "a").mkdir()
    here = hostfacts.folder_id(str(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "way").symlink_to("a")
    assert hostfacts.folder_id(str(tmp_path / "way")) == here != hostfacts.folder_id(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("ids", "groups"),
    [
        (["x@boot:1:2", "x", "x"], ["abc"]),
        (["x", "x@boot:1:2", "y"], ["ab", "c"]),
        (["x@boot:1:2", "x@boot:1:3", "x@boot:1:2"], ["ac", "b"]),
        (["x@boot:1:2", "x@other:1:2", "y"], ["a", "b", "c"]),
        (["", "", "x"], ["ab", "c"]),
    ],
)
def test_a_folder_that_one_host_serves_to_the_others_is_one(ids: list[str], groups: list[str]) -> None:
    found = hostfacts.folders(dict(zip("abc", ids, strict=True)))
    assert [
        "".join(host for host in "abc" if found[host] == name) for name in dict.fromkeys(found.values())
    ] == (groups)


def test_which_file_system_a_folder_is_on_is_known() -> None:
    assert hostfacts._is_on_own_disk("/dev/shm")
    assert not hostfacts._is_on_own_disk("/proc")
