"""`kit board`: real TensorBoards over what was copied from hosts, and through a tunnel over a real sshd."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from free_ports import free_port
from lab_hosts import wait_until
from test_curves import Node, evaluation, values

from nodekit.deploy.board import board_serve
from nodekit.deploy.board.board_sync import Held, Mirror, choose, held, own_name
from nodekit.deploy.connect import ssh
from nodekit.deploy.connect.channel import RemoteError
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.connect.tunnel import Tunnel
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import dump, load_inventory


def a_run(
    folder: Path, hosts: Mapping[str, Mapping[str, Any]], run_id: str = "lab-1", state: str = "running"
) -> Run:
    """On record, with a folder for each node."""
    file = folder / "lab.yaml"
    common = {"python": sys.executable}
    file.write_text(
        yaml.safe_dump({"name": "lab", "hosts": {name: {**common, **each} for name, each in hosts.items()}})
    )
    nodes = {}
    for rank, name in enumerate(hosts):
        node_dir = folder / run_id / name
        (node_dir / "output").mkdir(parents=True)
        nodes[name] = {
            "node_rank": rank, "max_nodes": len(hosts), "node_dir": str(node_dir), "python": sys.executable,
            "argv": ["python", "train.py"], "code_dir": str(folder), "kit_dir": "",
            "env": {"NODEKIT_OUTPUT_DIR": str(node_dir / "output")},
        }  # fmt: skip
    run = Run(
        run_id=run_id, name="lab", inventory_path=str(file), inventory=dump(load_inventory(file)), command=None,
        created=time.time(), nodes=nodes, state=state,
    )  # fmt: skip
    run.save()
    return run


LOCAL = {"connection": "local", "address": "127.0.0.1"}


def output(run: Run, node: str) -> Node:
    return Node(Path(run.nodes[node]["env"]["NODEKIT_OUTPUT_DIR"]))


@contextlib.contextmanager
def kit_board(
    *args: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "nodekit.deploy.commands.cli", "board", *args],
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(seen: Callable[[], Any], process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := seen()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found


def address(log: Path) -> str:
    return next((word for word in log.read_text().split() if word.startswith("http://127.0.0.1:")), "")


def curve(url: str, run: str, tag: str) -> list[tuple[int, float]]:
    try:
        with urllib.request.urlopen(
            f"{url}data/plugin/scalars/scalars?run={run}&tag={tag}",
            timeout=60,  # 10 s are hardly more than a stall
        ) as answer:
            return [(int(step), round(value, 3)) for _, step, value in json.load(answer)]
    except urllib.error.HTTPError:  # no such curve yet
        return []


def below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_two_runs_side_by_side_and_one_curve_where_rank_0_has_moved(tmp_path: Path, own_home: Path) -> None:
    going = a_run(tmp_path, {"gpu1": LOCAL, "gpu2": LOCAL})
    first = [values(step, 1.0) for step in range(1, 9)]
    output(going, "gpu1").attempt([*first, evaluation(8, 0.1)], is_main=True)
    output(going, "gpu2").attempt(first, is_main=False)
    (tmp_path / "other").mkdir()
    done = a_run(tmp_path / "other", {"solo": LOCAL}, "lab-0", state="succeeded")
    output(done, "solo").attempt([values(step, 5.0) for step in range(1, 4)], is_main=True)

    log = tmp_path / "log"
    # A port of its own: of two that begin within seconds, as another worker's may, both take TensorBoard's to be free.
    with kit_board("lab-1", "lab-0", "--port", str(free_port()), log=log) as process:
        url = until(lambda: address(log), process, log)

        def shows(run: str, tag: str, points: list[tuple[int, float]]) -> None:
            # TensorBoard shows a part of a file while it reads it.
            until(lambda: curve(url, run, tag) == points, process, log)

        shows("lab-0", "train/loss", [(step, 5.0) for step in range(1, 4)])
        shows("lab-1", "train/loss", [(step, 1.0) for step in range(1, 9)])
        shows("lab-1", "test/accuracy", [(8, 0.1)])

        output(going, "gpu2").resume(6)
        output(going, "gpu2").attempt([values(step, 2.0, "1.0") for step in range(7, 10)], is_main=True)
        expected = [*((step, 1.0) for step in range(1, 7)), *((step, 2.0) for step in range(7, 10))]
        shows("lab-1", "train/loss", expected)
        assert curve(url, "lab-1", "test/accuracy") == []
        output(going, "gpu2").resume(7)  # and on the same node, whose file gets shorter
        output(going, "gpu2").attempt([values(8, 3.0, "1.1"), evaluation(8, 0.3, "1.1")], is_main=True)
        shows("lab-1", "train/loss", [*expected[:7], (8, 3.0)])
        shows("lab-1", "test/accuracy", [(8, 0.3)])
        assert "lab-1  from gpu1 (every 3 s)" in log.read_text()
        assert "lab-1  from gpu2 (every 3 s)" in log.read_text()
        assert "lab-0  from solo (over)" in log.read_text()

        started = below(process)
        assert started
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        wait_until(lambda: not any(map(is_alive, started)), timeout_s=60, what="the end of what it started")
    copies = list((going.folder / "tensorboard").glob("*events*"))
    assert {copy.stat().st_mode & 0o777 for copy in copies} == {0o600}


def test_the_copy_is_kept_and_follows(tmp_path: Path, own_home: Path) -> None:
    run = a_run(tmp_path, {"gpu1": LOCAL})
    node = output(run, "gpu1")
    node.attempt([values(step, 1.0) for step in range(1, 100)], is_main=True)
    (theirs,) = node.tensorboard.iterdir()
    mirror = Mirror(run, SshOptions())
    mirror.sync()
    (own,) = mirror.folder.glob("*events*")
    assert own.read_bytes() == theirs.read_bytes()
    before = own.stat().st_ino
    with theirs.open("ab") as file:
        file.write(b"more")
    mirror.sync()
    assert own.read_bytes().endswith(b"more")
    os.truncate(theirs, 1000)
    mirror.sync()
    assert own.read_bytes() == theirs.read_bytes()
    assert own.stat().st_ino == before  # a reader that has it open sees it
    mirror.close()

    lost = Mirror(run, SshOptions(open=_unreachable))
    lost.sync()
    assert lost.node == "gpu1"
    assert "from gpu1, as of " in board_serve.line(lost)
    assert board_serve.line(lost).endswith("nothing newer can be had\n  gpu1: it is off")
    assert own.stat().st_size == 1000


def test_a_copy_that_finds_no_room_here_is_told_of_with_what_to_do(tmp_path: Path, own_home: Path) -> None:
    """Nothing was said, but that there are no curves yet."""
    run = a_run(tmp_path, {"gpu1": LOCAL})
    output(run, "gpu1").attempt([values(1, 1.0)], is_main=True)
    mirror = Mirror(run, SshOptions())
    mirror.folder.parent.mkdir(parents=True, exist_ok=True)
    mirror.folder.write_text("in its place")
    mirror.sync()
    told = f"{mirror.folder} cannot be written: File exists; see to the disk (df {run.folder})"
    assert board_serve.line(mirror) == f"{run.run_id}  no curves yet (running)\n  {told}"
    mirror.folder.unlink()
    mirror.folder.mkdir()
    mirror.sync()
    assert "from gpu1 (every" in board_serve.line(mirror)
    mirror.close()


def _unreachable(host: Any) -> Any:
    raise HostError(host.name, "it is off")


def a_held(attempt: tuple[int, int], newest: float) -> Held:
    return Held({"tensorboard/events": 1}, attempt, newest)


@pytest.mark.parametrize(
    ("found", "current", "expected"),
    [
        ({}, None, None),
        ({"a": a_held((0, 0), 5.0), "b": a_held((0, 1), 1.0)}, "a", "b"),
        ({"a": a_held((-1, -1), 1000.0), "b": a_held((-1, -1), 1100.0)}, None, "a"),  # every rank writes
        ({"a": a_held((-1, -1), 1000.0), "b": a_held((-1, -1), 1100.0)}, "b", "b"),
        ({"a": a_held((-1, -1), 1000.0), "b": a_held((-1, -1), 2000.0)}, "a", "b"),
    ],
)
def test_whose_files_are_taken(found: dict[str, Held], current: str | None, expected: str | None) -> None:
    assert choose(found, current) == expected


def test_what_a_host_lists_stays_below_the_copy() -> None:
    name = "a/events.out.tfevents.1.h.2.0.attempt3.1"
    listed: Sequence[Sequence[Any]] = [
        ["../../.ssh/tfevents", 1, 0.0],
        ["/etc/tfevents", 1, 0.0],
        [name, 7, 50.0],
    ]
    there = held(listed, clock_offset=10.0)
    assert there == Held({name: 7}, (3, 1), 40.0)
    assert held(listed[:2], clock_offset=0.0) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tensorboard/a/tfevents", "a/0002.tfevents"),
        ("tensorboard//tmp/tfevents", "tmp/0002.tfevents"),
        ("tensorboard/tfevents", "0002.tfevents"),
        ("other/tfevents", "other/0002.tfevents"),
        ("tensorboard", "0002.tensorboard"),
    ],
)
def test_no_name_that_a_host_lists_leads_out_of_the_copy(path: str, expected: str) -> None:
    assert own_name(path, 2) == expected


def test_a_channel_that_nodes_share_is_opened_anew_for_all_of_them_once_it_is_lost(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that answers is kept, whatever it says."""

    class Channel:
        is_lost = False
        closed = 0

        def close(self) -> None:
            self.closed += 1

    mirror = Mirror(a_run(tmp_path, {"gpu1": LOCAL}), SshOptions())
    channel: Any = Channel()
    mirror.channels = {"login": channel, "gpu1": channel}
    mirror._lose("gpu1", HostError("gpu1", "PermissionError"))
    assert (set(mirror.channels), channel.closed) == ({"login", "gpu1"}, 0)
    channel.is_lost = True
    mirror._lose("gpu1", HostError("gpu1", "the connection is gone"))
    assert (mirror.channels, channel.closed) == ({}, 1)
    mirror.channels = {"gpu1": channel}
    opened: list[str] = []
    monkeypatch.setattr(
        "nodekit.deploy.connect.cluster.open_channel", lambda host, _: opened.append(host.name)
    )
    mirror._closed_at.clear()
    mirror._open({"gpu1": SimpleNamespace(name="gpu1")})  # type: ignore[dict-item]  # nobody opens it
    assert opened == ["gpu1"], "one that was lost elsewhere is no channel"


def test_a_login_node_that_failed_to_answer_once_is_no_problem_for_ever(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [RemoteError("login", {"type": "OSError", "message": "stale", "traceback": ""})]
    run = a_run(tmp_path, {"gpu1": LOCAL}, state="succeeded")

    def record(*_: Any) -> Run:
        if answers:
            raise answers.pop()
        return run

    channel: Any = SimpleNamespace(is_lost=False, call=lambda *_, **__: [], close=lambda: None)
    backend = SimpleNamespace(hosts=lambda _: {"login": None}, record=record, nodes_at=lambda *_: ["gpu1"])
    monkeypatch.setattr("nodekit.deploy.board.board_sync.backend_of", lambda _: backend)
    mirror = Mirror(run, SshOptions())
    mirror.channels = {"login": channel}
    mirror.sync()
    assert (mirror.problems, mirror.is_over) == ({"login": "login: stale"}, False)
    mirror.sync()
    assert (mirror.problems, mirror.is_over) == ({}, True)


@pytest.fixture
def remote(start_sshd: Any, identity: Path) -> Callable[..., dict[str, Any]]:
    """A function that gives a host of an inventory, behind a real sshd."""

    def make(**settings: Any) -> dict[str, Any]:
        server = start_sshd(**settings)
        return {
            "address": "127.0.0.1", "port": server.port, "user": getpass.getuser(), "identity_file": str(identity),
        }  # fmt: skip

    return make


def test_on_a_node_through_a_tunnel(tmp_path: Path, own_home: Path, remote: Any) -> None:
    run = a_run(tmp_path, {"gpu1": remote()})
    output(run, "gpu1").attempt([values(step, 1.0) for step in range(1, 9)], is_main=True)
    log = tmp_path / "log"
    # Where there is no tensorboard on this machine, it is the node's that is taken: here, one that is hidden.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'tensorboard' else find(name, *more)\n"
    )
    path = os.pathsep.join(filter(None, [str(hidden), os.environ.get("PYTHONPATH", "")]))
    before = {each.pid for each in psutil.process_iter()}
    with kit_board("--port", str(free_port()), log=log, env={"PYTHONPATH": path}) as process:
        url = until(lambda: address(log), process, log)
        assert "lab-1  on gpu1:" in log.read_text()
        expected = [(step, 1.0) for step in range(1, 9)]
        until(lambda: curve(url, "lab-1/tensorboard", "train/loss") == expected, process, log)
        there = [
            each for each in psutil.process_iter(["cmdline"])
            if each.pid not in before and "tensorboard.main" in (each.info["cmdline"] or [])
            and str(tmp_path) in " ".join(each.info["cmdline"])  # and of no other worker's test
        ]  # fmt: skip
        assert len(there) == 1
        assert there[0].pid not in {each.pid for each in below(process)}  # it is sshd's
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        psutil.wait_procs(there, timeout=20)
        assert not there[0].is_running()
    assert not list(run.folder.glob("tensorboard/*events*"))


def test_a_node_that_has_no_tensorboard_says_so(tmp_path: Path, own_home: Path) -> None:
    run = a_run(tmp_path, {"gpu1": LOCAL})
    output(run, "gpu1").attempt([values(1, 1.0)], is_main=True)
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\necho 'No module named tensorboard' >&2\nexit 1\n")
    without.chmod(0o755)
    run.nodes["gpu1"]["python"] = str(without)
    run.save()
    log = tmp_path / "log"
    with kit_board("--on", "gpu1", log=log) as process:
        assert process.wait(60) == 1
    assert (
        f"kit: gpu1: {without} has no tensorboard; pip install tensorboard there, or here" in log.read_text()
    )
    with kit_board("--on", "gpu9", log=log) as process:
        assert process.wait(60) == 1
    assert "kit board --on gpu9: the nodes are gpu1" in log.read_text()


def test_a_host_that_forwards_nothing_is_named(start_sshd: Any, target: Any) -> None:
    connection = ssh.connect(target(start_sshd(options="AllowTcpForwarding no")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        tunnel = Tunnel(connection, here=0, there=server.getsockname()[1])
        try:
            port = tunnel.port
            with socket.create_connection(("127.0.0.1", port), timeout=10) as through:
                assert through.recv(1) == b""
            assert "does not forward" in str(tunnel.refused)
            assert "AllowTcpForwarding" in str(tunnel.refused)
        finally:
            tunnel.close()
            connection.close()


def test_a_port_in_use_and_a_run_without_curves_are_refused(tmp_path: Path, own_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(KitError, match=f"kit board --port {port}: Address already in use"):
            board_serve.free_port(port)
        assert board_serve.free_port(None) != port
    run = a_run(tmp_path, {"gpu1": LOCAL}, state="failed")
    log = tmp_path / "log"
    with kit_board(log=log) as process:
        assert process.wait(60) == 1
    assert "kit: no curves: no event files in gpu1:" in log.read_text()
    assert run.run_id in log.read_text()


def test_folders_that_tensorboard_cannot_be_told_are_refused() -> None:
    assert board_serve.logdir({"a": "/x,y"}) == ["--logdir", "/x,y"]
    assert board_serve.logdir({"a": "/x", "b": "/y"}) == ["--logdir_spec", "a:/x,b:/y"]
    with pytest.raises(KitError, match="/x,y: TensorBoard takes no folder with a comma"):
        board_serve.logdir({"a": "/x,y", "b": "/y"})
