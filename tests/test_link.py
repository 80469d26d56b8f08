"""Calls into a host's hands, here on this machine."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodekit.deploy import link as links
from nodekit.deploy.link import Link, LinkLost, RemoteError, on_all, open_local
from nodekit.inventory.errors import HostError


@pytest.fixture
def link() -> Iterator[Link]:
    opened = open_local("here", sys.executable)
    yield opened
    opened.close()


def test_facts_say_what_the_host_is(link: Link, tmp_path: Path) -> None:
    found = link.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path / "a b"), peers=["127.0.0.1"])
    assert found["hostname"] == socket.gethostname()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"name": "lo", "up": True, "addresses": ["127.0.0.1", "::1"]} in found["interfaces"]
    assert found["routes"] == {"127.0.0.1": "127.0.0.1"}
    assert found["workdir_problem"] is None
    assert abs(found["time"] - time.time()) < 5


def test_torchs_version_is_told_without_importing_it(link: Link, tmp_path: Path) -> None:
    import torch

    found = link.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path))
    assert found["torch"] == torch.__version__


def test_hosts_that_share_a_folder_say_so(link: Link, tmp_path: Path) -> None:
    ids = [
        link.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path / name))["workdir_id"]
        for name in "aab"
    ]
    assert ids[0] == ids[1] != ids[2]


def test_a_workdir_that_cannot_be_made_is_named(link: Link, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = link.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path / "file" / "x"))
    assert found["workdir_problem"] == f"{tmp_path}/file/x: Not a directory"


def test_a_held_port_is_nobody_elses(link: Link) -> None:
    port = link.call("hold_port", timeout_s=5)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))


def test_an_error_there_keeps_its_type_and_names_the_host(link: Link) -> None:
    with pytest.raises(RemoteError) as caught:
        link.call("go", timeout_s=5, node_dir="/nonexistent", spec={})
    assert (caught.value.host, caught.value.type) == ("here", "KeyError")


def test_the_newest_committed_snapshot_is_told(link: Link, tmp_path: Path) -> None:
    def newest() -> object:
        return link.call("status", timeout_s=5, node_dir=str(tmp_path))["snapshot"]

    assert newest() == [-1, 0]
    (tmp_path / "snapshots").mkdir()
    for name in (
        "g0000-s000000900.json",
        "g0001-s000000020.json",
        "g0001-s000000040-0123456789abcdef.pt",
        "mine",
    ):
        (tmp_path / "snapshots" / name).touch()
    assert newest() == [1, 20]
    (tmp_path / "spec.json").write_text(json.dumps({"env": {"NODEKIT_SNAPSHOT_DIR": str(tmp_path / "no")}}))
    assert newest() == [-1, 0]


def test_what_takes_too_long_is_not_waited_for(link: Link, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "agent.json")  # reading it blocks
    with pytest.raises(LinkLost, match="here: no answer to 'status' within 0 s"):
        link.call("status", timeout_s=0.2, node_dir=str(tmp_path))
    assert link.call("hold_port", timeout_s=5)  # and the link lives on


def test_calls_run_side_by_side(link: Link, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "agent.json")
    blocked = on_all(
        {"blocked": tmp_path, "free": tmp_path / "none"},
        lambda path: link.call("status", timeout_s=0.5, node_dir=str(path)),
    )
    assert isinstance(blocked["blocked"], LinkLost)
    free = blocked["free"]
    assert not isinstance(free, Exception)
    assert (free["alive"], free["known"], free["fence"]) == (False, False, -1)


def test_a_banner_on_stdout_does_not_disturb(tmp_path: Path) -> None:
    python = tmp_path / "chatty python"
    python.write_text(f'#!/bin/sh\necho "Welcome to {{gpu1}}!"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    opened = open_local("here", str(python))
    assert opened.call("hold_port", timeout_s=5)
    opened.close()


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false"])
def test_a_python_that_does_not_run_is_an_error_with_its_cure(python: str) -> None:
    with pytest.raises(HostError, match=r"here: its python does not run .*set `python:` to an interpreter"):
        open_local("here", python)


def test_a_link_that_is_gone_fails_its_calls_at_once(link: Link) -> None:
    os.kill(link._process._popen.pid, 9)  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(LinkLost):
        link.call("hold_port", timeout_s=30)
    assert time.monotonic() - start < 5


def test_log_lines_come_whole_and_once(link: Link, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "rank0-attempt0.0.log"
    log.write_bytes("één\nhalf".encode())
    offsets, found = link.call("logs", timeout_s=5, node_dir=str(tmp_path))
    assert found == [[log.name, "één\n"]]
    log.write_bytes("één\nhalf a line\n".encode())
    offsets, found = link.call("logs", timeout_s=5, node_dir=str(tmp_path), offsets=offsets)
    assert found == [[log.name, "half a line\n"]]
    log.write_bytes("één\nhalf a line\nlast words".encode())
    assert link.call("logs", timeout_s=5, node_dir=str(tmp_path), offsets=offsets)[1] == []
    assert link.call("logs", timeout_s=5, node_dir=str(tmp_path), offsets=offsets, final=True)[1] == [
        [log.name, "last words\n"]
    ]


def test_one_failure_hides_no_other() -> None:
    def fail(item: str) -> str:
        if item == "good":
            return "fine"
        raise HostError(item, "broken")

    found = on_all({"a": "good", "b": "bad", "c": "worse"}, fail)
    assert found["a"] == "fine"
    assert [str(found[name]) for name in ("b", "c")] == ["bad: broken", "worse: broken"]


def test_the_program_sent_needs_nothing_newer_than_python_3_8() -> None:
    import ast

    for name in ("remote", "venvs", *links.OFFERED):
        ast.parse(links.source(f"nodekit.deploy.{name}"), feature_version=(3, 8))


def test_the_spec_is_private(link: Link, tmp_path: Path) -> None:
    node_dir = tmp_path / "node"
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\nexec cat\n")
    agent.chmod(0o755)
    link.call("warm", timeout_s=5, node_dir=str(node_dir), python=str(agent), kit_dir="/none", env={})
    link.call("go", timeout_s=5, node_dir=str(node_dir), spec={"argv": ["a b", "$HOME"], "generation": 0})
    assert (node_dir / "spec.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((node_dir / "spec.json").read_text()) == {"argv": ["a b", "$HOME"], "generation": 0}
