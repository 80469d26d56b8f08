"""Calls into the host-side server, here on this machine."""

import ast
import contextlib
import errno
import functools
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from agents import until

from nodekit.deploy import host
from nodekit.deploy.connect.channel import (
    OFFERED,
    ChannelLost,
    HostChannel,
    LocalProcess,
    RemoteError,
    on_all,
    open_local,
    program,
)
from nodekit.deploy.connect.ssh import SshConnection
from nodekit.deploy.host import current_status, errors, files, processes
from nodekit.deploy.host.logs import hostfollow
from nodekit.deploy.host.node import agents, status
from nodekit.deploy.host.node.fence import fence as set_fence
from nodekit.deploy.host.node.fence import set_voters
from nodekit.inventory.errors import HostError


@pytest.fixture
def channel() -> Iterator[HostChannel]:
    # Calls have 30 s: 5, as it once was, are less than a machine may stand still.
    opened = open_local("here", sys.executable)
    yield opened
    opened.close()


def test_what_to_do_comes_over_the_wire_as_a_field_of_its_own(channel: HostChannel) -> None:
    with pytest.raises(RemoteError) as caught:
        channel.call("hold_port", timeout_s=15, address="203.0.113.1")
    assert caught.value.problem.cure == "see `ip addr` there"
    assert caught.value.problem.found == caught.value.message
    assert str(caught.value) == f"here: {caught.value.message}; see `ip addr` there"
    with pytest.raises(RemoteError) as without:
        channel.call("hold_port", timeout_s=15, address="no address")
    assert without.value.problem.cure == ""
    older = {"type": "OSError", "message": "it is full", "traceback": ""}  # of a host that sends no cure
    assert RemoteError("gpu1", older).problem == ("it is full", "", "")


def test_of_a_folder_whose_disk_has_failed_it_is_said_what_to_see_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `kit down` says more than the error's number; but what is only not there has no such cure."""
    monkeypatch.setattr(files, "PATIENCE_S", 0.0)
    monkeypatch.setattr(os, "open", failing(os.open, tmp_path / "agent.json", errno.EIO, 99))
    with pytest.raises(OSError, match="Input/output error") as caught:
        agents.stop(str(tmp_path), grace_s=0.0)
    assert errors.cure_of(caught.value) == "see to that disk (`sudo dmesg` there tells more)"
    assert errors.cure_of(FileNotFoundError(errno.ENOENT, "none")) == ""


@pytest.mark.parametrize(
    "said", ["hello\\n", "\\033]0;title\\007", "hello ", "{ motd }\\n", '{"motd": 1}\\n']
)
def test_what_a_login_shell_prints_before_is_passed_over(said: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '{said}'\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    opened = open_local("here", str(python))
    try:
        assert opened.call("read_file", timeout_s=30, path=str(tmp_path / "none")) is None
    finally:
        opened.close()


def test_a_host_that_reads_no_more_keeps_no_call_beyond_its_deadline(tmp_path: Path) -> None:
    opened = open_local("here", sys.executable)
    os.kill(opened._process._popen.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for text in ("x" * (1 << 20), "x"):  # more than a pipe holds, and what comes after that
            call = pool.submit(opened.call, "write_file", timeout_s=1, path=str(tmp_path / "f"), text=text)
            with pytest.raises(ChannelLost, match="no answer within 1 s"):
                call.result(timeout=5)
        closing = pool.submit(opened.close)
        closing.result(timeout=15)
    assert time.monotonic() - began < 15
    assert not (tmp_path / "f").exists()


def test_facts_say_what_the_host_is(channel: HostChannel, tmp_path: Path) -> None:
    before = time.time()
    found = channel.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path / "a b"), peers=["127.0.0.1"])
    assert found["hostname"] == socket.gethostname()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"name": "lo", "up": True, "addresses": ["127.0.0.1", "::1"]} in found["interfaces"]
    assert found["routes"] == {"127.0.0.1": "127.0.0.1"}
    assert found["workdir_problem"] is None
    assert before <= found["time"] <= time.time()


def test_torchs_version_is_told_without_importing_it(channel: HostChannel, tmp_path: Path) -> None:
    import torch

    found = channel.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path))
    assert found["torch"] == torch.__version__


def test_hosts_that_share_a_folder_say_so(channel: HostChannel, tmp_path: Path) -> None:
    ids = [
        channel.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path / name))["workdir_id"]
        for name in "aab"
    ]
    assert ids[0] == ids[1] != ids[2]


def test_a_workdir_that_cannot_be_made_is_named(channel: HostChannel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = channel.call("hostfacts.facts", timeout_s=15, workdir=str(tmp_path / "file" / "x"))
    assert found["workdir_problem"] == f"{tmp_path}/file/x: Not a directory"
    found = channel.call("hostfacts.facts", timeout_s=15, workdir="~no-such-user/kit")
    assert found["workdir_problem"] == "~no-such-user/kit: there is no such user"


def test_a_held_port_is_nobody_elses(channel: HostChannel) -> None:
    port = channel.call("hold_port", timeout_s=30, address="127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))


def test_an_error_there_keeps_its_type_and_names_the_host(channel: HostChannel) -> None:
    with pytest.raises(RemoteError) as caught:
        channel.call("start", timeout_s=30, node_dir="/nonexistent", spec={})
    assert (caught.value.host, caught.value.type) == ("here", "KeyError")


def test_the_newest_committed_snapshot_is_told(channel: HostChannel, tmp_path: Path) -> None:
    def newest() -> object:
        return channel.call("status", timeout_s=30, node_dir=str(tmp_path))["snapshot"]

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


def failing(real: Callable[..., Any], path: Path, number: int, times: int) -> Callable[..., Any]:
    left = [number] * times

    def call(asked: str, *args: Any) -> Any:
        if asked == str(path) and left:
            raise OSError(left.pop(), os.strerror(number), asked)
        return real(asked, *args)

    return call


def test_what_a_program_prints_need_not_be_text(channel: HostChannel) -> None:
    found = channel.call("execute", timeout_s=30, argv=["printf", "\\377 of 5"], limit_s=20)
    assert found == {"status": 0, "out": "\ufffd of 5", "err": ""}


def test_a_file_that_cannot_be_read_is_not_missing(channel: HostChannel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    read = functools.partial(channel.call, "read_file", timeout_s=15)
    assert read(path=str(tmp_path / "file"), limit_bytes=2) == "te"
    assert read(path=str(tmp_path / "none")) is None
    assert read(path=str(tmp_path / "file/below")) is None
    with pytest.raises(RemoteError, match="Is a directory"):
        read(path=str(tmp_path))


def test_a_snapshot_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g0001-s000000020.json").touch()
    monkeypatch.setattr(files, "PATIENCE_S", 60.0)  # a busy machine takes its time to try again
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", failing(listdir, tmp_path, errno.ESTALE, 2))
    assert status.newest_snapshot(str(tmp_path)) == [1, 20], "it was tried again"
    monkeypatch.setattr(files, "PATIENCE_S", 0.2)
    monkeypatch.setattr(os, "listdir", failing(listdir, tmp_path, errno.EIO, 99))
    assert status.newest_snapshot(str(tmp_path)) == [1, 20], "for a while the last answer is good enough"
    monkeypatch.setattr(status, "HELD_S", 0.0)
    with pytest.raises(OSError, match=rf"which snapshot is the newest there is not known: '{tmp_path}'"):
        status.newest_snapshot(str(tmp_path))


@pytest.mark.parametrize("file", ["fence", "spec.json", "agent.json"])
def test_what_cannot_be_read_of_a_node_is_not_missing(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fence").write_text("4\n")
    (tmp_path / "spec.json").write_text('{"generation": 4}')
    monkeypatch.setattr(files, "PATIENCE_S", 60.0)  # a busy machine takes its time to try again
    real = os.open
    monkeypatch.setattr(os, "open", failing(real, tmp_path / file, errno.EMFILE, 2))
    found = status.status(str(tmp_path))
    assert (found["fence"], found["generation"]) == (4, 4)
    monkeypatch.setattr(files, "PATIENCE_S", 0.2)
    monkeypatch.setattr(os, "open", failing(real, tmp_path / file, errno.EIO, 99))
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / file}'"):
        status.status(str(tmp_path))


def test_a_fence_that_holds_no_number_is_not_no_fence(tmp_path: Path) -> None:
    (tmp_path / "fence").write_text("")
    with pytest.raises(OSError, match="it holds b'', and a whole number was wanted"):
        status.fence_in(str(tmp_path))


def blocked(folder: Path) -> dict[str, Any]:
    """A call that is never answered: opening a FIFO blocks."""
    (folder / "logs").mkdir()
    os.mkfifo(folder / "logs/rank0-attempt0.0.log")
    return {"op": "hostfollow.logs", "node_dir": str(folder), "timeout_s": 0.2}


def test_what_takes_too_long_is_not_waited_for(channel: HostChannel, tmp_path: Path) -> None:
    with pytest.raises(ChannelLost, match="here: no answer within 0 s"):
        channel.call(**blocked(tmp_path))
    assert channel.call("hold_port", timeout_s=30, address="127.0.0.1")  # and the channel lives on


def test_a_long_call_does_not_wait_for_a_host_that_hangs(
    channel: HostChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel keeps the connection open, for as long as an hour of sync; one that works on is waited for."""
    sleep = {"argv": ["sleep", "1"], "limit_s": 20.0}
    monkeypatch.setattr("nodekit.deploy.connect.channel.STILL_THERE_S", 0.4)
    assert channel.call("execute", timeout_s=60, **sleep)["status"] == 0
    pid = channel.call("execute", timeout_s=30, argv=["sh", "-c", "echo $PPID"], limit_s=20.0)["out"]
    os.kill(int(pid), signal.SIGSTOP)
    try:
        with pytest.raises(ChannelLost, match="no answer within 0 s"):
            channel.call("execute", timeout_s=60, **sleep)
    finally:
        os.kill(int(pid), signal.SIGCONT)


def test_calls_run_side_by_side(channel: HostChannel, tmp_path: Path) -> None:
    calls: dict[str, dict[str, Any]] = {
        "blocked": blocked(tmp_path),
        "free": {"op": "status", "node_dir": str(tmp_path / "none"), "timeout_s": 30},
    }
    found = on_all(calls, lambda call: channel.call(**call))
    assert isinstance(found["blocked"], ChannelLost)
    free = found["free"]
    assert not isinstance(free, Exception)
    assert (free["alive"], free["known"], free["fence"]) == (False, False, -1)


def test_all_that_is_sent_needs_no_nodekit_on_the_host(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I -S "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    opened = open_local("here", str(python))
    try:
        assert opened.call("status", timeout_s=15, node_dir=str(tmp_path / "none"))["alive"] is False
        for name in OFFERED:
            with pytest.raises(RemoteError, match="has no attribute 'nothing'") as caught:
                opened.call(f"{name.rpartition('.')[2]}.nothing", timeout_s=15)
            assert caught.value.type == "AttributeError"
    finally:
        opened.close()


@pytest.mark.parametrize("name", ["code.venvs", "node.agents", "probes.discovery"])
def test_a_program_has_what_its_modules_import(name: str) -> None:
    text = program((name,), "for name in full_names: module_of(name)")
    subprocess.run([sys._base_executable, "-I", "-S", "-"], input=text, check=True)  # type: ignore[attr-defined]


def test_a_banner_on_stdout_does_not_disturb(tmp_path: Path) -> None:
    python = tmp_path / "chatty python"
    python.write_text(f'#!/bin/sh\necho "Welcome to {{gpu1}}!"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    opened = open_local("here", str(python))
    assert opened.call("hold_port", timeout_s=30, address="127.0.0.1")
    opened.close()


@pytest.mark.parametrize("python", ["/nonexistent/python", "~no such user/bin/python", "/bin/false"])
def test_a_python_that_does_not_run_is_an_error_with_its_cure(python: str) -> None:
    with pytest.raises(HostError, match=r"here: its python does not run .*set `python:` to an interpreter"):
        open_local("here", python)


def test_a_python_that_is_slow_to_answer_is_not_described_as_one_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodekit.deploy.connect.channel.START_TIMEOUT_S", 1.0)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nwhile read -r _; do :; done\n")
    python.chmod(0o755)
    with pytest.raises(
        HostError, match="here: its python has not begun to answer within 1 s; is it overloaded"
    ):
        open_local("here", str(python))


def test_a_python_that_is_too_old_is_told_as_such(tmp_path: Path) -> None:
    """The `python3` of many a cluster is a 3.6: "future feature annotations is not defined" was all that was said."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys;sys.version_info=(3,6,8);$2"\n')
    python.chmod(0o755)
    told = r"here: its python does not run \(it is Python 3\.6, wanted 3\.10 or newer\); set `python:` to"
    with pytest.raises(HostError, match=told):
        open_local("here", str(python))


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        (
            "echo This account is currently not available.",
            r"\(This account .* available\.\).* login shell there",
        ),
        ("exit 1", r"\(it ended without a word\).* login shell there"),
        (
            "printf 'fish: Unknown command: nix\\nfish: \\nnix -c \"import sys;i\"\\n^~~^\\n' >&2; exit 127",
            r"\(fish: Unknown command: nix\); set `python:` to an interpreter there that has torch$",
        ),
    ],
    ids=["nologin", "false", "fish"],
)
def test_what_a_login_shell_says_in_place_of_python_is_told(shell: str, says: str) -> None:
    process = LocalProcess(["/bin/sh", "-c", shell])
    with pytest.raises(HostError, match=says):
        HostChannel("here", process, connection=cast(SshConnection, object()))


def test_a_machine_without_descriptors_is_not_told_of_as_a_bad_python() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as file:
        num_open = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 2, limits[1]))
    try:
        with pytest.raises(
            HostError, match=r"its python cannot be started: Too many open files; .*ulimit -n"
        ):
            open_local("here", sys.executable)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_link_that_is_gone_fails_its_calls_at_once(channel: HostChannel) -> None:
    os.kill(channel._process._popen.pid, 9)  # type: ignore[attr-defined]
    with pytest.raises(ChannelLost) as lost:
        channel.call("hold_port", timeout_s=30, address="127.0.0.1")
    assert ": the connection " in str(lost.value), "what has ended, for whoever reads no more than this"


def test_log_lines_come_whole_and_once(channel: HostChannel, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "rank0-attempt0.0.log"
    log.write_bytes("één\nhalf".encode())
    offsets, found = channel.call("hostfollow.logs", timeout_s=30, node_dir=str(tmp_path))
    assert found == [[log.name, "één\n"]]
    log.write_bytes("één\nhalf a line\n".encode())
    offsets, found = channel.call("hostfollow.logs", timeout_s=30, node_dir=str(tmp_path), offsets=offsets)
    assert found == [[log.name, "half a line\n"]]
    log.write_bytes("één\nhalf a line\nlast words".encode())
    assert channel.call("hostfollow.logs", timeout_s=30, node_dir=str(tmp_path), offsets=offsets)[1] == []
    _, found = channel.call(
        "hostfollow.logs", timeout_s=30, node_dir=str(tmp_path), offsets=offsets, final=True
    )
    assert found == [[log.name, "last words\n"]]


STATUS = {"run": "r", "node": "n0", "time": 2.5}


class Enough(Exception):
    """Ends `hostfollow.follow`, where it would rest."""


def followed(
    node_dir: Path, monkeypatch: pytest.MonkeyPatch, *meanwhile: Callable[[], object]
) -> list[list[dict[str, Any]]]:
    """What `hostfollow.follow` sends before each rest, of a node whose agent is this process; changes alone wake it."""
    own = {
        "pid": os.getpid(),
        "start_time": processes.start_time(os.getpid()),
        "boot_id": processes.boot_id(),
    }
    (node_dir / "logs").mkdir(parents=True)
    (node_dir / "agent.json").write_text(json.dumps(own))
    (node_dir / "events.jsonl").write_text('{"time": 1.5}\n')
    current_status.of(str(node_dir)).write({**STATUS, "state": "running"})
    (node_dir / "logs/rank0-attempt0.0.log").write_text("begun\n" + 1_000 * (999 * "x" + "\n"))
    rests = iter(meanwhile)
    sent: list[list[dict[str, Any]]] = [[]]
    clock = node_dir.with_name("clock")

    def tick_ns() -> int:
        clock.touch()
        return clock.stat().st_mtime_ns

    def rest(alarm: object, agent: object, status: dict[str, Any]) -> set[str]:
        assert (agent, status["state"]) == (own, "running")
        sent.append([])
        last_ns = tick_ns()
        until(lambda: tick_ns() > last_ns, what="a tick of the file system's clock")
        if (change := next(rests, None)) is None:
            raise Enough
        change()
        return set()

    monkeypatch.setattr(hostfollow._Alarm, "wait", rest)
    for name in ("_BEAT_S", "_SWEEP_S"):
        monkeypatch.setattr(hostfollow, name, 1e9)
    with pytest.raises(Enough):
        hostfollow.follow(str(node_dir), lambda part: sent[-1].append(part), events_at=["", 0])
    return sent[:-1]


def test_a_long_log_is_sent_without_a_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sent,) = followed(tmp_path / "n0", monkeypatch)
    text = "".join(text for part in sent for _, text in part["logs"])
    assert (len(sent) > 3, len(text)) == (True, 6 + 1_000_000)


def test_of_many_logs_only_those_are_told_that_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of weeks has thousands, and a message is sent every second."""
    folder = tmp_path / "n0"

    def grow() -> None:
        (folder / "logs/rank1-attempt0.0.log").write_text("begun\n")

    parts = [part["offsets"] for sent in followed(folder, monkeypatch, grow) for part in sent]
    first = "rank0-attempt0.0.log"
    assert parts.pop() == {"rank1-attempt0.0.log": 6}
    assert [set(each) for each in parts] == [{first}] * len(parts)
    assert parts[-1][first] == (folder / "logs" / first).stat().st_size


def test_what_has_come_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = [mock.Mock(wraps=hostfollow.logs), mock.Mock(wraps=hostfollow.events)]
    for name, reader in zip(("logs", "events"), readers, strict=True):
        monkeypatch.setattr(hostfollow, name, reader)

    def add() -> None:
        for name, reader in zip(("logs/rank0-attempt0.0.log", "events.jsonl"), readers, strict=True):
            reader.reset_mock()
            with (tmp_path / "n0" / name).open("a") as file:
                file.write('{"time": 2.5}\n')

    followed(tmp_path / "n0", monkeypatch, add)
    assert [reader.call_count for reader in readers] == [1, 1]


def test_of_a_new_status_no_more_is_read_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes its share of a core from the ranks."""
    folder, reader = tmp_path / "n0", mock.Mock(wraps=status.status)
    monkeypatch.setattr(status, "status", reader)
    counts: list[int] = []

    def then(change: Callable[[], object]) -> Callable[[], None]:
        def do() -> None:
            counts.append(reader.call_count)
            change()

        return do

    sent = followed(
        folder,
        monkeypatch,
        then(lambda: current_status.of(str(folder)).write({**STATUS, "state": "running", "step": 7})),
        then(lambda: files.write_private(str(folder / "fence"), b"3")),
        then(lambda: None),
    )
    (_, *seen) = [(part["status"].get("step"), part["status"]["fence"]) for parts in sent for part in parts]
    assert seen[-2:] == [(7, -1), (7, 3)]
    assert [after - before for before, after in itertools.pairwise(counts)] == [0, 1]


def test_each_change_is_seen_and_nothing_else_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "n0"

    def add(name: str, text: str) -> None:
        with (folder / name).open("a") as file:
            file.write(text)

    sent = followed(
        folder,
        monkeypatch,
        lambda: add("logs/rank0-attempt0.0.log", "more\n"),
        lambda: None,
        lambda: add("logs/rank1-attempt0.0.log", "another\n"),
        lambda: current_status.of(str(folder)).write({**STATUS, "state": "running", "step": 7}),
        lambda: add("events.jsonl", '{"time": 2.5}\n'),
        lambda: files.write_private(str(folder / "fence"), b"3"),
        lambda: add("events.jsonl", '{"time": 3.5'),
        lambda: add("events.jsonl", "}\n"),
    )
    found = [
        (
            part["logs"],
            [line for _, _, line in part["events"]],
            part["status"].get("step"),
            part["status"]["fence"],
        )
        for parts in sent[1:]
        for part in parts
    ]
    assert found == [
        ([("rank0-attempt0.0.log", "more\n")], [], None, -1),
        ([("rank1-attempt0.0.log", "another\n")], [], None, -1),
        ([], [], 7, -1),
        ([], ['{"time": 2.5}\n'], 7, -1),
        ([], [], 7, 3),
        ([], ['{"time": 3.5}\n'], 7, 3),
    ]


def test_a_rest_ends_when_the_folder_has_changed_or_the_agent_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = subprocess.Popen(["sleep", "900"])
    alarm = hostfollow._Alarm(str(tmp_path))

    def rest(most_s: float) -> set[str]:
        monkeypatch.setattr(hostfollow, "_CALM_S", most_s)
        return alarm.wait({"pid": agent.pid}, {"state": "running"})

    events = tmp_path / "events.jsonl"
    events.write_text('{"time": 1.5}\n')
    (tmp_path / "logs").mkdir()
    forever_s = 600.0  # longer than a test may take
    try:
        assert rest(forever_s) == {"folder"}, "what was there before"
        assert rest(0.1) == set()
        (tmp_path / "logs/rank0-attempt0.0.log").write_text("x")
        events.write_text('{"time": 1.5}\n{"time": 2.0}\n')
        assert rest(0.1) == set(), "what grows is looked at in its turn"
        current_status.of(str(tmp_path)).write(STATUS)
        assert rest(forever_s) == {"status"}
        assert rest(0.1) == set(), "once"
        threading.Timer(0.1, current_status.of(str(tmp_path)).write, [{**STATUS, "time": 3.5}]).start()
        assert rest(forever_s) == {"status"}, "rewritten where it stands"
        threading.Timer(0.1, files.write_private, [str(tmp_path / "fence"), b"3"]).start()
        assert rest(forever_s) == {"folder"}, "replaced"
        threading.Timer(0.1, agent.kill).start()
        assert rest(forever_s) == set()
    finally:
        alarm.close()
        agent.kill()
        agent.wait()


def test_one_failure_hides_no_other() -> None:
    def fail(item: str) -> str:
        if item == "good":
            return "fine"
        raise HostError(item, "broken")

    found = on_all({"a": "good", "b": "bad", "c": "worse"}, fail)
    assert found["a"] == "fine"
    assert [str(found[name]) for name in ("b", "c")] == ["bad: broken", "worse: broken"]


def test_hosts_that_take_long_are_named_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodekit.deploy.connect.channel.WAITS_S", 0.05)
    monkeypatch.setattr("nodekit.deploy.connect.channel.WAITS_AGAIN_S", 0.05)
    told: list[list[str]] = []
    is_told_twice = threading.Event()

    def waits(left: list[str], waited_s: float) -> None:
        assert waited_s >= 0.05
        told.append(left)
        if told[-2:] == [["slow"]] * 2:
            is_told_twice.set()

    def call(name: str) -> bool:
        return name == "fast" or is_told_twice.wait(60)

    assert on_all({"slow": "slow", "fast": "fast"}, call, waits=waits) == {"slow": True, "fast": True}


def test_the_program_sent_needs_nothing_newer_than_python_3_8() -> None:
    files = list(Path(host.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        ast.parse(file.read_text(), feature_version=(3, 8))


def test_the_spec_is_private(channel: HostChannel, tmp_path: Path) -> None:
    node_dir = tmp_path / "node"
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\nexec cat\n")
    agent.chmod(0o755)
    channel.call("prestart", timeout_s=30, node_dir=str(node_dir), python=str(agent), kit_dir="/none", env={})
    channel.call(
        "start", timeout_s=30, node_dir=str(node_dir), spec={"argv": ["a b", "$HOME"], "generation": 0}
    )
    assert (node_dir / "spec.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((node_dir / "spec.json").read_text()) == {"argv": ["a b", "$HOME"], "generation": 0}


def test_a_fence_stands_with_the_node_and_where_its_ranks_save_and_only_goes_up(
    channel: HostChannel, tmp_path: Path
) -> None:
    node_dir, saved = tmp_path / "node", tmp_path / "shared snapshots"
    node_dir.mkdir()
    spec = {"generation": 0, "env": {"NODEKIT_SNAPSHOT_DIR": str(saved)}}
    (node_dir / "spec.json").write_text(json.dumps(spec))
    for generation, fence in ((2, 2), (1, 2), (3, 3)):
        told = channel.call("fence", timeout_s=30, node_dir=str(node_dir), generation=generation)
        assert told["fence"] == fence
        assert [(folder / "fence").read_text() for folder in (node_dir, saved)] == [f"{fence}\n"] * 2


@pytest.mark.parametrize(
    ("own", "fence", "called_off", "generation", "over"),
    [
        pytest.param(0, 1, -1, 1, "", id="the one that it was fenced for"),
        pytest.param(0, 1, -1, 2, "", id="a later one, which fences off those before"),
        pytest.param(0, 2, 2, 1, "", id="one before a fencing that was called off"),
        pytest.param(0, 2, 1, 1, "generation 1 is over: this node is in 2", id="one that is fenced off"),
        pytest.param(
            2, 0, 3, 1, "generation 1 is over: this node is in 2", id="one before that which is here"
        ),
    ],
)
def test_a_node_lets_in_no_generation_that_is_over(
    channel: HostChannel, tmp_path: Path, own: int, fence: int, called_off: int, generation: int, over: str
) -> None:
    (tmp_path / "agent").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "agent").chmod(0o755)
    node = {"node_dir": str(tmp_path / "node")}
    channel.call("prestart", timeout_s=30, python=str(tmp_path / "agent"), kit_dir="/none", env={}, **node)
    (tmp_path / "node/spec.json").write_text(json.dumps({"generation": own}))
    channel.call("fence", timeout_s=30, generation=fence, **node)
    with pytest.raises(RemoteError, match=over) if over else contextlib.nullcontext():
        channel.call("start", timeout_s=30, spec={"generation": generation}, called_off=called_off, **node)
    assert channel.call("status", timeout_s=30, **node)["fence"] == (fence if over else generation)
    assert json.loads((tmp_path / "node/spec.json").read_text())["generation"] == (
        own if over else generation
    )


def test_a_rendezvous_is_not_opened_twice_in_one_generation(channel: HostChannel, tmp_path: Path) -> None:
    """Its other nodes may know the first one, and two groups could form."""
    (tmp_path / "agent").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "agent").chmod(0o755)
    node = {"node_dir": str(tmp_path / "node")}
    channel.call("prestart", timeout_s=30, python=str(tmp_path / "agent"), kit_dir="/none", env={}, **node)
    (tmp_path / "node/spec.json").write_text(json.dumps({"generation": 0, "is_host": True}))
    with pytest.raises(RemoteError, match="the rendezvous of generation 0 was here and is lost"):
        channel.call("start", timeout_s=30, spec={"generation": 0, "is_host": True}, **node)
    assert channel.call("status", timeout_s=30, **node)["agent"] == ""


def test_only_an_agent_that_waits_for_its_go_and_has_the_socket_is_started(
    channel: HostChannel, tmp_path: Path
) -> None:
    """Of two requests under way, one is late: its agent was started, or cannot listen on the port that it names."""
    (tmp_path / "agent").write_text("#!/bin/sh\nread go\n")
    (tmp_path / "agent").chmod(0o755)
    node = {"node_dir": str(tmp_path / "node")}
    prestart = {"python": str(tmp_path / "agent"), "kit_dir": "/none", "env": {}, **node}
    refused = "another request has started an agent here meanwhile$"
    channel.call("prestart", timeout_s=30, **prestart)
    port = channel.call("hold_port", timeout_s=30, address="127.0.0.1")
    with pytest.raises(RemoteError, match=refused):
        channel.call("start", timeout_s=30, spec={"generation": 0, "is_host": True}, port=port, **node)
    assert not (tmp_path / "node" / "spec.json").exists()
    channel.call("start", timeout_s=30, spec={"generation": 0, "is_host": False}, **node)
    until(lambda: not channel.call("status", timeout_s=30, **node)["alive"], what="its end")
    with pytest.raises(RemoteError, match=refused):
        channel.call("start", timeout_s=30, spec={"generation": 1, "is_host": False}, **node)
    assert json.loads((tmp_path / "node" / "spec.json").read_text())["generation"] == 0


@pytest.mark.parametrize("is_host", [False, True])
def test_a_start_that_comes_late_over_a_lost_connection_makes_no_second_agent(
    channel: HostChannel, tmp_path: Path, is_host: bool
) -> None:
    """A cable was cut while kit asked for the agent, and kit has asked again, over another connection."""
    (tmp_path / "agent").write_text("#!/bin/sh\nread go\n[ -z $go ] || exec sleep 60\n")
    (tmp_path / "agent").chmod(0o755)
    node = {"node_dir": str(tmp_path / "node")}
    again = open_local("again", sys.executable)
    try:
        pids = [
            each.call(
                "prestart", timeout_s=30, python=str(tmp_path / "agent"), kit_dir="/none", env={}, **node
            )["pid"]
            for each in (channel, again)
        ]
        spec = {"generation": 0, "is_host": is_host}
        again.call("start", timeout_s=30, spec=spec, **node)
        with pytest.raises(RemoteError, match=rf"another request has started an agent .* \(pid {pids[1]}\)"):
            channel.call("start", timeout_s=30, spec=spec, **node)
        assert again.call("status", timeout_s=30, **node)["agent"].startswith(f"{pids[1]}.")
        until(lambda: not Path(f"/proc/{pids[0]}/exe").exists(), what="the end of the first one")
    finally:
        again.call("stop", timeout_s=30, grace_s=0.0, force=True, **node)
        again.close()


def test_what_must_outlive_a_power_failure_is_on_the_disk_before_it_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append(f"sync {'folder' if Path(f'/proc/self/fd/{descriptor}').is_dir() else 'file'}")
        fsync(descriptor)

    def renamed(draft: str, path: str) -> None:
        calls.append(f"rename to {Path(path).name}")
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    set_fence(str(tmp_path), 1)
    one = ["sync file", "rename to fence", "sync folder"]
    assert calls == one * 2, "in the folder of the snapshots, and in the node's"
    for name, writes in (
        ("spec.json", lambda: agents._take_spec(str(tmp_path), {"generation": 1})),
        (
            "electorate.json",
            lambda: set_voters(str(tmp_path), {"generation": 1, "version": 1, "nodes": ["a"]}),
        ),
    ):
        calls.clear()
        writes()
        assert calls == ["sync file", f"rename to {name}", "sync folder"]
    assert (tmp_path / "fence").stat().st_mode & 0o777 == 0o600
