"""Sync over real sshd processes and the real channel: by rsync, by SFTP and on this machine, with one result."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import until

from nodekit.deploy.connect import ssh
from nodekit.deploy.connect.channel import HostChannel, open_local, open_ssh
from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.sync import listing, progress, sync, transfer
from nodekit.deploy.sync.sync import Progress, SyncResult, Target, list_code
from nodekit.inventory.errors import HostError, KitError

WAYS = ("rsync", "sftp", "local")
NAMES = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "; rm -rf x",
    "new\nline",
    "ä",
    "-rf",
    "#hash",
    "back\\slash",
    "a/b/c",
]


def write(file: Path, data: bytes = b"x") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def paths(folder: Path) -> list[str]:
    return [entry.path for entry in list_code(folder).entries]


def git(folder: Path, *argv: str) -> None:
    config = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *config, "-C", str(folder), *argv], check=True, capture_output=True)


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = str(path.readlink())
        elif path.is_file():
            found[str(path.relative_to(folder))] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return found


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "my code; $x's"
    for name in NAMES:
        write(folder / name, name.encode() * 3)
    write(folder / os.fsdecode(b"latin-\xe4"))
    write(folder / "empty", b"")
    write(folder / "big", os.urandom(1 << 20) * 9)
    write(folder / "run.sh", b"#!/bin/sh\n").chmod(0o755)
    (folder / "link").symlink_to("a/b")
    (folder / "secret").write_text("x")
    (folder / "secret").chmod(0o600)
    return folder


# --- list_code ----------------------------------------------------------------------------------------------


def test_git_tree_is_what_git_would_offer(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in ("kept.py", "deleted.py", "a b/ü.py"):
        write(tmp_path / name)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    (tmp_path / "deleted.py").unlink()
    write(tmp_path / "untracked.py")
    write(tmp_path / "out/model.pt")
    write(tmp_path / ".gitignore", b"out/\n")
    assert paths(tmp_path) == [".gitignore", "a b/ü.py", "kept.py", "untracked.py"]
    assert paths(tmp_path / "a b") == ["ü.py"]
    assert paths(tmp_path / "out") == ["model.pt"]  # git ignores it, the user named it


@pytest.mark.parametrize("with_git", [True, False])
def test_what_kit_keeps_on_this_machine_for_its_nodes_is_not_sent(tmp_path: Path, with_git: bool) -> None:
    """As from the home folder, after `kit up local` from another one: it has named pipes, and tokens."""
    if with_git:
        git(tmp_path, "init", "-q")
    write(tmp_path / "train.py")
    write(tmp_path / "own/.id", b"0123456789abcdef")  # another program's: there is no kit beside it
    write(tmp_path / "own/runs/1")
    workdir = tmp_path / "nodekit/local"
    workdir.mkdir(parents=True)
    hostfacts.folder_id(str(workdir))
    write(workdir / "kit/abc/nodekit/__init__.py")
    spec = write(workdir / "runs/local-1/node1/spec.json")
    write(workdir / "code/abc/train.py")
    write(workdir / "bench-1/x")
    write(workdir / "notes.txt")
    os.mkfifo(spec.with_name("agent"))
    assert paths(tmp_path) == ["nodekit/local/notes.txt", "own/.id", "own/runs/1", "train.py"]


@pytest.mark.parametrize("with_git", [False, True], ids=["no git", "git"])
def test_a_home_folder_is_sent_without_what_kit_keeps_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_git: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("train.py", ".cache/other", ".cache/nodekit/wheels/x.whl", "state/nodekit/runs/r/run.json"):
        write(tmp_path / name)
    if with_git:
        git(tmp_path, "init", "-q")
    for _ in range(2):  # the first has written its cache of hashes there
        assert paths(tmp_path) == [".cache/other", "train.py"]
    assert paths(tmp_path / "state/nodekit/runs/r") == ["run.json"]  # as named, like the code of kit selftest


def test_submodules_and_inner_repositories_are_included(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
        git(folder, "init", "-q")
        write(folder / "a.py")
        write(folder / ".gitignore", b"*.log\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "x")
    git(outer, "submodule", "add", "-q", str(inner), "sub")
    git(outer, "clone", "-q", str(inner), "loose")
    write(outer / "sub/x.log")
    write(outer / "sub/new.py")
    assert paths(outer) == [
        ".gitignore", ".gitmodules", "a.py", "loose/.gitignore", "loose/a.py",
        "sub/.gitignore", "sub/a.py", "sub/new.py",
    ]  # fmt: skip


@pytest.mark.parametrize("with_git", [False, True])
def test_ignore_files_in_any_folder(tmp_path: Path, with_git: bool) -> None:
    if with_git:
        git(tmp_path, "init", "-q")
    for name in (
        "a.py",
        "a.log",
        "keep.log",
        "data/x",
        "deep/b.py",
        "deep/c.tmp",
        "deep/keep.tmp",
        "deep/d.npy",
    ):
        write(tmp_path / name)
    write(tmp_path / ".gitignore", b"*.log\n!keep.log\n")
    write(tmp_path / "deep/.gitignore", b"*.tmp\n!keep.tmp\n")
    write(tmp_path / ".kitignore", b"/data/\n*.npy\n")
    write(tmp_path / "deep/.kitignore", b"b.py\n!d.npy\n")
    expected = {".gitignore", ".kitignore", "a.py", "keep.log"}
    expected |= {f"deep/{name}" for name in (".gitignore", ".kitignore", "d.npy", "keep.tmp")}
    assert set(paths(tmp_path)) == expected


def test_links_inside_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "real/a.py")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real/up").symlink_to("../real/a.py")
    (tmp_path / "absolute").symlink_to(tmp_path / "real/a.py")
    entries = {entry.path: entry.value for entry in list_code(tmp_path).entries if entry.kind == "l"}
    assert entries == {"folder": "real", "real/up": "../real/a.py", "absolute": "real/a.py"}


def test_everything_that_cannot_be_sent_is_told_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    write(folder / "out/x")
    write(folder / ".gitignore", b"out\n")
    (folder / "broken").symlink_to("nowhere")
    (folder / "outside").symlink_to("/etc/hosts")
    (folder / "ignored").symlink_to("out")
    os.mkfifo(folder / "pipe")
    with pytest.raises(KitError) as caught:
        list_code(folder)
    said = str(caught.value)
    assert "broken is a broken link (to nowhere)" in said
    assert "outside is a link out of the tree (to /etc/hosts)" in said
    assert "ignored is a link to out, which is ignored" in said
    assert "pipe is a named pipe" in said
    assert ".kitignore" in said
    write(folder / ".kitignore", b"broken\noutside\nignored\npipe\n")
    assert paths(folder) == [".gitignore", ".kitignore"]


@pytest.fixture
def plain_user() -> Iterator[Path]:
    """A folder anyone may use, and this process without root's rights."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


def test_unreadable_files_are_all_named(plain_user: Path) -> None:
    for name in ("a", "b", "c"):
        write(plain_user / name)
    (plain_user / "a").chmod(0)
    (plain_user / "c").chmod(0)
    with pytest.raises(KitError, match=r"a: Permission denied\n  c: Permission denied\n"):
        list_code(plain_user)


@pytest.mark.parametrize("with_git", [False, True])
def test_unreadable_folder_is_named(plain_user: Path, with_git: bool) -> None:
    if with_git:
        git(plain_user, "init", "-q")
    write(plain_user / "a")
    write(plain_user / "closed/b")
    (plain_user / "closed").chmod(0)
    with pytest.raises(KitError, match=r"closed.*Permission denied"):
        list_code(plain_user)
    (plain_user / "closed").chmod(0o700)


def test_digest_tells_names_modes_and_contents_apart(tmp_path: Path) -> None:
    write(tmp_path / "a", b"1")
    digests = {list_code(tmp_path).digest}
    write(tmp_path / "a", b"2")
    digests.add(list_code(tmp_path).digest)
    (tmp_path / "a").chmod(0o755)
    digests.add(list_code(tmp_path).digest)
    (tmp_path / "a").rename(tmp_path / "b")
    digests.add(list_code(tmp_path).digest)
    (tmp_path / "a").symlink_to("b")
    digests.add(list_code(tmp_path).digest)
    assert len(digests) == 5
    (tmp_path / "b").touch()  # another time of change is not another content
    assert list_code(tmp_path).digest in digests


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[str]] = []
    real = listing.host.hash_files

    def hash_files(root: str, names: Any) -> Any:
        read.append(sorted(names))
        return real(root, names)

    monkeypatch.setattr(listing.host, "hash_files", hash_files)
    write(tmp_path / "old")
    monkeypatch.setattr(listing, "_RACY_NS", -10_000_000_000)  # as if time had passed
    first = list_code(tmp_path)
    write(tmp_path / "new")
    read.clear()
    assert list_code(tmp_path).stats["old"] == first.stats["old"]
    assert read[0] == ["new"]


def test_hash_of_a_file_just_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A minute: a busy machine may take more than 0.1 s to come to read it.
    monkeypatch.setattr(listing, "_RACY_NS", 60_000_000_000)
    file = write(tmp_path / "a", b"1")
    before = file.stat()
    first = list_code(tmp_path).digest
    file.write_bytes(b"2")
    # What a clock that ticks slower than we write would show: the same stat for another content.
    cached = next(Path.home().glob(".cache/nodekit/hashes/*.json"), None)
    assert cached is None or "a" not in cached.read_text()
    os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert list_code(tmp_path).digest != first


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("of another user, as after `sudo pip`: root may write to any")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "code/a")
    monkeypatch.setattr(listing, "_RACY_NS", -10_000_000_000)  # there is something to remember
    assert list(list_code(tmp_path / "code").stats) == ["a"]


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    assert list_code(tmp_path).entries == ()
    with pytest.raises(KitError, match="not a folder"):
        list_code(tmp_path / "none")


# --- send ---------------------------------------------------------------------------------------------------

Opener = Callable[..., HostChannel]


@pytest.fixture
def open_way(start_sshd: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """A function that opens a channel whose files travel one of the `WAYS`."""
    opened: list[HostChannel] = []

    def open_(way: str, name: str = "gpu1", **options: Any) -> HostChannel:
        if way == "local":
            opened.append(open_local(name, sys.executable))
            return opened[-1]
        connection = ssh.connect(target(start_sshd(**options), name=name))
        if way == "sftp":
            monkeypatch.setattr(connection, "rsync_rsh", lambda: None)
        opened.append(open_ssh(connection, name, sys.executable))
        return opened[-1]

    yield open_
    for channel in opened:
        channel.close()


def goal(channel: HostChannel, work: Path, run: str = "run 1; $x") -> Target:
    return Target(channel, dest=str(work / "runs" / run / "code"), cache=str(work / "code's" / "my project"))


def send(code: Path, target: Target, **options: Any) -> SyncResult:
    result = sync.send(list_code(code), {"gpu1": target}, timeout_s=20, **options)["gpu1"]
    if isinstance(result, Exception):
        raise result
    return result


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_tree(
    code: Path, tmp_path: Path, open_way: Opener, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    for name in ("_rsync", "_sftp", "_copy"):
        real = getattr(transfer, name)
        monkeypatch.setattr(transfer, name, lambda *args, n=name, real=real: (used.append(n), real(*args))[1])
    target = goal(open_way(way), tmp_path / "host")
    result = send(code, target)
    assert used == [{"rsync": "_rsync", "sftp": "_sftp", "local": "_copy"}[way]]
    expected = content(code)
    expected["secret"] = (b"x", 0o644)
    assert content(Path(target.dest)) == expected
    assert result.digest == list_code(code).digest
    assert result.files_sent == len(expected) - 1  # the link is made from the list
    times = {path: (code / path).stat().st_mtime_ns for path in expected if path != "link"}
    assert {path: (Path(target.dest) / path).stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("way", WAYS)
def test_edit_after_the_first_run(code: Path, tmp_path: Path, open_way: Opener, way: str) -> None:
    channel = open_way(way)
    first, second = goal(channel, tmp_path / "host"), goal(channel, tmp_path / "host", "run2")
    send(code, first)
    before = content(Path(first.dest))
    write(code / "ä", b"edited")
    write(code / "new/file")
    (code / "big").unlink()
    assert send(code, second).files_sent == 2
    after = content(Path(second.dest))
    assert after["ä"][0] == b"edited"
    assert "new/file" in after
    assert "big" not in after
    assert content(Path(first.dest)) == before


def test_unchanged_tree_costs_one_round_trip(code: Path, tmp_path: Path, open_way: Opener) -> None:
    channel = open_way("rsync")
    send(code, goal(channel, tmp_path / "host"))
    sync.finish_caching({"gpu1": goal(channel, tmp_path / "host")}, timeout_s=10)
    calls: list[str] = []

    class Counted:
        host, connection = channel.host, channel.connection

        def call(self, op: str, *, timeout_s: float, **args: Any) -> Any:
            calls.append(op)
            return channel.call(op, timeout_s=timeout_s, **args)

    target = Target(Counted(), dest=str(tmp_path / "host/run2"), cache=goal(channel, tmp_path / "host").cache)
    assert send(code, target).files_sent == 0
    assert calls == ["tree.place"]
    assert (tmp_path / "host/run2/ä").exists()


def test_host_without_rsync_gets_it_by_sftp(
    code: Path, tmp_path: Path, open_way: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write(tmp_path / "bin/rsync", b"#!/bin/sh\nexit 127\n")
    tool.chmod(0o755)
    channel = open_way("rsync")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    target = goal(channel, tmp_path / "host")
    send(code, target)
    assert content(Path(target.dest)).keys() == content(code).keys()


def test_a_login_shell_that_prints_is_named_where_neither_rsync_nor_sftp_takes_it(
    code: Path, tmp_path: Path, open_way: Opener
) -> None:
    # As ~/.bashrc does, also before the SFTP server that sshd_config of most distributions names.
    noisy = 'ForceCommand echo hi there; exec sh -c "$SSH_ORIGINAL_COMMAND"'
    channel = open_way("rsync", options=noisy)
    with pytest.raises(HostError, match=r"its login shell prints 'hi there' before a command.*bashrc"):
        send(code, goal(channel, tmp_path / "host"))


def test_hosts_do_not_wait_for_nor_hide_each_other(code: Path, tmp_path: Path, open_way: Opener) -> None:
    channels = {name: open_way("rsync", name) for name in ("g1", "g2", "g3")}
    write(tmp_path / "g2", b"a file where the host's folder should be")
    results = sync.send(
        list_code(code),
        {name: goal(channel, tmp_path / name) for name, channel in channels.items()},
        timeout_s=20,
    )
    assert isinstance(results["g2"], HostError)
    assert "g2: " in str(results["g2"])
    for name in ("g1", "g3"):
        result = results[name]
        assert isinstance(result, SyncResult), result
        assert (tmp_path / name / "runs").exists()


@pytest.mark.parametrize("way", WAYS)
def test_full_disk_is_told_and_leaves_no_run(code: Path, tmp_path: Path, open_way: Opener, way: str) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], check=False).returncode:
        pytest.skip("needs root to mount a tmpfs")
    try:
        target = goal(open_way(way), disk)
        with pytest.raises(HostError, match="gpu1: its disk is full"):
            send(code, target)
        assert not Path(target.dest).exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("way", WAYS)
def test_disk_that_fills_up_meanwhile(
    code: Path, tmp_path: Path, open_way: Opener, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(disk)], check=False).returncode:
        pytest.skip("needs root to mount a tmpfs")
    real = sync.bring

    def bring(delivery: Any) -> None:
        write(disk / "somebody else's", b"x" * (8 << 20))
        real(delivery)

    monkeypatch.setattr(sync, "bring", bring)
    try:
        target = goal(open_way(way), disk)
        with pytest.raises(HostError, match="gpu1: its disk is full"):
            send(code, target)
        assert not Path(target.dest).exists()
        (disk / "somebody else's").unlink()
        monkeypatch.undo()
        monkeypatch.setenv("HOME", str(tmp_path))
        send(code, target)
        assert content(Path(target.dest)).keys() == content(code).keys()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["vanish", "shrink", "grow", "edit"])
def test_file_that_changes_meanwhile_is_taken_again(
    code: Path, tmp_path: Path, open_way: Opener, monkeypatch: pytest.MonkeyPatch, way: str, change: str
) -> None:
    real, fired = sync.bring, []

    def bring(delivery: Any) -> None:
        if not fired:
            fired.append(change)
            if change == "vanish":
                (code / "ä").unlink()
            else:
                data = {"shrink": b"", "grow": b"x" * 100, "edit": b"x" * len("ä" * 3 * 2)}[change]
                write(code / "ä", data)
        real(delivery)

    monkeypatch.setattr(sync, "bring", bring)
    target = goal(open_way(way), tmp_path / "host")
    result = send(code, target)
    assert fired == [change]
    assert result.digest == list_code(code).digest
    expected = content(code)
    expected["secret"] = (b"x", 0o644)
    assert content(Path(target.dest)) == expected


def test_file_that_never_rests_is_named(
    code: Path, tmp_path: Path, open_way: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []

    def take_and_write(folder: Path) -> sync.Tree:
        times.append(1)
        write(code / "ä", b"before" * len(times))
        tree = list_code(folder)
        write(code / "ä", b"after" * len(times))
        return tree

    monkeypatch.setattr(sync, "list_code", take_and_write)
    target = goal(open_way("rsync"), tmp_path / "host")
    result = sync.send(sync.list_code(code), {"gpu1": target}, timeout_s=20)["gpu1"]
    assert isinstance(result, KitError)
    assert "ä changed while the code was being sent, twice" in str(result)
    assert len(times) == 2
    assert not Path(target.dest).exists()


def test_wrong_content_is_mended_once_then_told(
    code: Path, tmp_path: Path, open_way: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, spoil = sync.bring, [True]
    seen = []

    def bring(delivery: Any) -> None:
        seen.append(delivery.whole)
        real(delivery)
        if spoil[0] or not delivery.whole:
            file = Path(delivery.cache, "ä")
            before = file.stat()
            file.write_bytes(b"?" * before.st_size)
            os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))

    monkeypatch.setattr(sync, "bring", bring)
    target = goal(open_way("rsync"), tmp_path / "host")
    with pytest.raises(HostError, match="gpu1: ä has another content there than here"):
        send(code, target)
    assert not Path(target.dest).exists()
    spoil[0] = False
    assert send(code, target).files_sent == 1
    assert seen == [False, True, False, True]


def test_lost_connection_is_told(
    code: Path, tmp_path: Path, start_sshd: Any, target: Any, monkeypatch: Any
) -> None:
    server = start_sshd()
    channel = open_ssh(ssh.connect(target(server)), "gpu1", sys.executable)
    real = sync.bring

    def bring(delivery: Any) -> None:
        for session in subprocess.run(
            ["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True
        ).stdout.split():
            with contextlib.suppress(ProcessLookupError):  # of the look whether sshd is there, and just ended
                os.kill(int(session), 9)
        server.process.terminate()
        server.process.wait(10)
        real(delivery)

    monkeypatch.setattr(sync, "bring", bring)
    goal_ = goal(channel, tmp_path / "host")
    # What is said when it is not found out in time is another thing.
    with pytest.raises(HostError, match=r"gpu1: .*(lost|cannot be|closed|gone)"):
        send(code, goal_)
    channel.close()
    assert not Path(goal_.dest).exists()


def test_deadline_is_kept(
    code: Path, tmp_path: Path, open_way: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = write(tmp_path / "bin/rsync", b"#!/bin/sh\nexec sleep 3600\n")  # longer than a test may take
    tool.chmod(0o755)
    channel = open_way("rsync")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")

    def is_told() -> bool:
        result = sync.send(list_code(code), {"gpu1": goal(channel, tmp_path / "host")}, timeout_s=1.0)["gpu1"]
        assert isinstance(result, HostError)
        return "could not be sent in time" in str(result)

    until(is_told)  # on a busy machine the time may be over before rsync is begun


def test_nothing_is_copied_back_before_it_is_asked_for(code: Path, tmp_path: Path, open_way: Opener) -> None:
    target = goal(open_way("rsync"), tmp_path / "host")
    sync.send(list_code(code), {"gpu1": target}, timeout_s=20)
    assert not Path(target.cache).exists()
    sync.finish_caching({"gpu1": target}, timeout_s=20)
    assert content(Path(target.cache)).keys() == content(code).keys()


def test_two_syncs_at_once_take_turns(code: Path, tmp_path: Path, open_way: Opener) -> None:
    channels = [open_way("rsync"), open_way("sftp")]
    targets = [goal(channel, tmp_path / "host", f"run{number}") for number, channel in enumerate(channels)]
    results: list[Any] = []
    tree = list_code(code)

    def send(target: sync.Target) -> None:
        results.append(sync.send(tree, {"gpu1": target}, timeout_s=20)["gpu1"])
        sync.begin_caching({"gpu1": target})  # until then it has its turn

    threads = [threading.Thread(target=send, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.digest for result in results] == [tree.digest] * 2
    for target in targets:
        assert content(Path(target.dest)).keys() == content(code).keys()
    assert sorted(result.files_sent for result in results)[0] == 0


def test_two_syncs_each_first_on_one_of_the_hosts_do_not_wait_for_each_other(
    code: Path, tmp_path: Path, open_way: Opener
) -> None:
    tree = list_code(code)
    hosts = {name: tmp_path / name for name in ("gpu1", "gpu2")}
    mine = {name: goal(open_way("local", name), work, "mine") for name, work in hosts.items()}
    theirs = {name: goal(open_way("local", name), work, "theirs") for name, work in hosts.items()}
    sync.send(tree, {"gpu1": mine["gpu1"]}, timeout_s=20)  # neither is asked to keep before it has both
    sync.send(tree, {"gpu2": theirs["gpu2"]}, timeout_s=20)
    sync.send(tree, {"gpu2": mine["gpu2"]}, timeout_s=20)
    sync.send(tree, {"gpu1": theirs["gpu1"]}, timeout_s=20)
    for target in [*mine.values(), *theirs.values()]:
        assert content(Path(target.dest)).keys() == content(code).keys()
        assert not Path(target.cache + ".wanted").exists()


def test_lock_that_stays_taken_names_its_holder(code: Path, tmp_path: Path, open_way: Opener) -> None:
    first, second = open_way("rsync"), open_way("rsync")
    target = goal(second, tmp_path / "host")
    # It never comes back.
    first.call(
        "tree.place", timeout_s=30, cache=target.cache, dest=target.dest, digest="?", owner="ann, process 7"
    )

    def is_told() -> bool:
        result = sync.send(list_code(code), {"gpu1": target}, timeout_s=1.0)["gpu1"]
        assert isinstance(result, HostError)
        return "another kit is syncing" in str(result) and "ann, process 7" in str(result)

    until(is_told)  # on a busy machine the host may be late with its answer, for which it has half a second
    first.close()
    assert send(code, target).files_sent > 0


# --- small parts --------------------------------------------------------------------------------------------


def test_rsh_option_survives_rsyncs_own_quoting(code: Path, tmp_path: Path) -> None:
    spy = write(
        tmp_path / "s p'y",
        f"#!{sys.executable}\nimport sys, json\n"
        f"json.dump(sys.argv[1:], open({str(tmp_path / 'seen')!r}, 'w'))\nsys.exit(3)\n".encode(),
    )
    spy.chmod(0o755)
    words = [str(spy), "a b", "it's", 'say "x"', "$HOME", "b\\c", "''"]
    argv = transfer.rsync_argv(words, str(code), "/nowhere", whole=False)
    subprocess.run(argv, input=b"ok\0", capture_output=True, check=False)
    import json

    assert json.loads((tmp_path / "seen").read_text())[: len(words)] == [*words[1:], "host"]


def test_packs_are_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PACK_BYTES", 100)
    sizes = [10, 250, 60, 60, 100, 0, 99]
    made = transfer.packs(
        [sync.Entry(str(number), "f", False, size, "") for number, size in enumerate(sizes)]
    )
    assert [[entry.size for entry in pack] for pack in made] == [[100], [250], [10, 60], [60, 0], [99]]
    assert transfer.packs([]) == []


def test_progress_is_reported(code: Path, tmp_path: Path, open_way: Opener) -> None:
    for way in WAYS:
        states: list[Progress] = []
        send(code, goal(open_way(way, "gpu1"), tmp_path / way), progress=states.append)
        assert [states[0].phase, states[-1].phase] == ["checking", "done"]
        sending = [state for state in states if state.phase == "sending"]
        assert sending[-1].bytes_done == sending[-1].bytes_total == list_code(code).size_bytes
        assert sending[-1].files_done == sending[-1].files_total
        assert all(state.host == "gpu1" for state in states)


def test_progress_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress_bars(file=out) as show:
        for tenth in range(71):
            now[0] = tenth / 10
            state = {"files_done": tenth, "files_total": 70, "bytes_done": tenth * 100_000}
            show(Progress(host="g1", phase="sending", bytes_total=7_000_000, **state))
    assert out.getvalue().splitlines() == [
        "  g1: 30/70 files, 3.0 of 7.0 MB, 1.0 MB/s",
        "  g1: 60/70 files, 6.0 of 7.0 MB, 1.0 MB/s",
    ]


def test_progress_bars_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress.progress_bars(file=out) as show:
        show(Progress(host="g1", phase="checking"))
        show(Progress(host="g1", phase="sending", files_done=1, files_total=2, bytes_done=10, bytes_total=20))
        show(Progress(host="g1", phase="done"))
        show(Progress(host="g2", phase="done"))
    assert "g1" in out.getvalue()
    assert "1/2 files" in out.getvalue()


def test_silent_progress_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bars(silent=True) as show:
        show(Progress(host="g1", phase="done"))
    assert capsys.readouterr().out == ""


# --- kit's own package --------------------------------------------------------------------------------------


def test_package_is_importable_where_it_was_placed(tmp_path: Path, open_way: Opener) -> None:
    package = sync.package()
    assert "nodekit/deploy/sync/sync.py" in package.files
    assert "nodekit/training/__init__.py" in package.files
    assert "nodekit/training/tasks/emotions/train.tsv" in package.files
    assert not any("__pycache__" in path or path.endswith(".pyc") for path in package.files)
    channels = {"gpu1": open_way("rsync"), "me": open_way("local", "me")}
    workdirs = {name: str(tmp_path / "a b" / name) for name in channels}
    for _ in range(2):
        sync.send_package(package, channels, workdirs, timeout_s=20)
    for workdir in workdirs.values():
        folder = Path(workdir, "kit", package.digest)
        script = "import nodekit.inventory.errors as e; print(e.__file__)"
        done = subprocess.run(
            [sys.executable, "-S", "-c", script],
            env={"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(folder / "nodekit/inventory/errors.py")
        assert next(folder.rglob("*.pyc"), None)


def test_nodes_that_share_a_workdir_on_this_machine_place_the_package_once(
    tmp_path: Path, open_way: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def call(channel: HostChannel, op: str, *, timeout_s: float, **args: object) -> object:
        sent.extend([channel.host] if "files" in args else [])
        return real(channel, op, timeout_s=timeout_s, **args)

    real = HostChannel.call
    monkeypatch.setattr(HostChannel, "call", call)
    channels = {name: open_way("local", name) for name in ("a", "b", "c")}
    package = sync.package()
    workdirs = {"a": str(tmp_path / "one"), "b": str(tmp_path / "one"), "c": str(tmp_path / "other")}
    sync.send_package(package, channels, workdirs, timeout_s=20)
    assert len(sent) == 2
    assert {*sent} > {"c"}
    for workdir in workdirs.values():
        assert Path(workdir, "kit", package.digest, "nodekit/training/loop.py").is_file()


def test_package_failures_name_their_hosts(tmp_path: Path, open_way: Opener) -> None:
    channels = {name: open_way("local", name) for name in ("g1", "g2")}
    blocked = write(tmp_path / "file")
    with pytest.raises(KitError, match=r"(?s)g1: .*\ng2: "):
        sync.send_package(sync.package(), channels, dict.fromkeys(channels, str(blocked)), timeout_s=20)


def test_project_key_is_of_the_place(tmp_path: Path) -> None:
    key = sync.project_key(tmp_path / "a b; $x")
    assert key == sync.project_key(tmp_path / "y/../a b; $x")
    assert key.startswith("a-b---x-")
    assert key != sync.project_key(tmp_path / "other/a b; $x")
