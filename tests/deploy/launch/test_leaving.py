"""Who leaves a run to a process in the background where a key has a passphrase: nobody can be asked for it there."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_nodes import FakeChannel, Nodes
from sshd import Sshd, keygen

from nodekit.deploy.commands.cli import main
from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.ssh import SshConnection
from nodekit.deploy.launch import watch
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.interrupts import Interrupts
from nodekit.deploy.records import events, runs
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.screen.full_screen import Doing, FullScreen
from nodekit.deploy.screen.view_model import ViewModel
from nodekit.deploy.ssh_backend.backend import SshBackend
from nodekit.deploy.supervise.observer import Left


def test_detached_a_key_that_can_only_be_asked_for_is_refused_before_anything_starts(
    own_home: Path,
    tmp_path: Path,
    start_sshd: Callable[..., Sshd],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = keygen(own_home / "locked", passphrase="x")
    port = start_sshd(authorized=key.with_suffix(".pub")).port
    (tmp_path / "job.py").touch()
    (tmp_path / "lab.yaml").write_text(
        f"user: {getpass.getuser()}\nidentity_file: {str(key)!r}\nport: {port}\n"
        "hosts: {gpu1: {address: 127.0.0.1}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(getpass, "getpass", lambda _: pytest.fail("somebody was asked"))
    assert main(["up", "lab.yaml", "-d", "--", "job.py"]) == 1
    said = capsys.readouterr().err
    assert "there is nobody to ask for its passphrase (kit up -d, and what it leaves" in said
    assert f"`ssh-add {key}`; or take a key without a passphrase" in said
    assert runs.all_runs() == []


def test_who_supervises_in_the_background_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, monkeypatch)
    asked: list[bool] = []

    def supervise(_: Any, __: runs.Run, options: Options) -> int:
        asked.append(options.ssh.may_ask)
        return 0

    monkeypatch.setattr(SshBackend, "supervise", supervise)
    assert main(["supervise", nodes.run.run_id]) == 0
    assert asked == [False]
    passed: list[Any] = []
    monkeypatch.setattr("nodekit.deploy.connect.ssh.connect", lambda *_, **given: passed.append(given))
    for may_ask in (False, True):
        options = cluster.SshOptions(may_ask=may_ask)
        cluster._connect(nodes.inventory.hosts[0], options, timeout_s=1)
    assert [given["ask_passphrase"] is None for given in passed] == [True, False]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Nodes whose channels went over SSH, by a key that somebody typed the passphrase of."""
    monkeypatch.setattr(FakeChannel, "connection", SimpleNamespace(was_asked=True), raising=False)
    return Nodes(tmp_path, monkeypatch)


def test_q_leaves_a_run_only_to_who_can_supervise_it(opened: Nodes) -> None:
    doing = Doing(leaves="", interrupts="", stays=lambda: watch._locked_out(opened.client))
    view = FullScreen(ViewModel("r", ["a"]), doing)
    view._press("q")
    assert view._notice[1].startswith(
        "a supervisor in the background needs ssh-agent (ssh-add before kit up)"
    )
    for name in opened.client.channels:
        opened.client.channels[name].connection = cast(SshConnection, SimpleNamespace(was_asked=False))
    with pytest.raises(Left):
        view._press("q")


def test_a_closed_terminal_leaves_nobody_who_would_hold_the_lock_and_reach_no_node(
    opened: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    monkeypatch.setattr(watch, "leave_a_supervisor", lambda run, _: left.append(run.run_id))

    def leave() -> int:
        options = Options(inventory=tmp_path / "lab.yaml")
        return watch._leave(opened.client, options, SupervisorLock(opened.run), Interrupts())

    assert (leave(), left) == (0, [])
    assert "needs ssh-agent" in events.read(opened.run.folder)[-1].fields["text"]
    monkeypatch.setattr(FakeChannel, "connection", None)
    assert (leave(), left) == (0, [opened.run.run_id])


def test_a_supervisor_that_ends_at_once_is_told_of(
    opened: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    opened.run.state = "running"
    opened.run.save()
    watch.leave_a_supervisor(opened.run, Options(inventory=tmp_path / "lab.yaml"))
    said = capsys.readouterr().out
    assert re.match(
        rf"warning: nobody supervises {opened.run.run_id}: .*supervisor\.log says why; kit up ", said
    )
    opened.run.finish_stopped()
    watch.leave_a_supervisor(opened.run, Options(inventory=tmp_path / "lab.yaml"))
    assert not capsys.readouterr().out, "it had nothing to do"
