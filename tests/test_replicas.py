"""User files survive their nodes: real sockets, real files, several agents' worth of Replicas in this process."""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodekit.deploy import replica_push, replica_wire, replicas
from nodekit.deploy.replica_files import Changed, UserFiles, mark_of, sha256_of
from nodekit.deploy.replica_kept import Kept
from nodekit.deploy.replica_merge import Source, Version, agree, refuses
from nodekit.deploy.replicas import Gathered, Replicas

TOKEN = "the run's token"


class Node:
    """One node: its disk, and its agent's Replicas while it lives."""

    def __init__(self, root: Path, name: str, copies: int) -> None:
        self.name, self.disk, self.copies = name, root / name, copies
        self.folder = self.disk / "snapshots"
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.replicas: Replicas | None = None

    def start(self) -> Replicas:
        self.replicas = Replicas(
            name=self.name,
            folder=self.folder,
            kept=self.disk / "kept",
            copies=self.copies,
            address="127.0.0.1",
            token=TOKEN,
            say=self._hear,
        )
        return self.replicas

    def _hear(self, kind: str, **fields: Any) -> None:
        # The agent's record has these itself, and its events are lines of JSON.
        assert not fields.keys() & {"run", "time", "node", "kind"}
        json.dumps(fields)
        self.said.append((kind, fields))

    @property
    def alive(self) -> Replicas:
        assert self.replicas is not None
        return self.replicas

    def die(self) -> None:
        if self.replicas is not None:
            self.replicas.close()
        self.replicas = None

    def write(self, name: str, content: str | bytes, mtime: float | None = None) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".tmp")
        draft.write_bytes(content if isinstance(content, bytes) else content.encode())
        if mtime is not None:
            os.utime(draft, (mtime, mtime))
        draft.replace(path)

    def files(self) -> dict[str, str]:
        """Name → content, or → where it points."""
        return {
            str(path.relative_to(self.folder)): f"-> {path.readlink()}"
            if path.is_symlink()
            else path.read_text(errors="replace")
            for path in self.folder.rglob("*")
            if path.is_symlink() or path.is_file()
        }

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for each, fields in self.said if each == kind]

    def aside(self) -> dict[str, str]:
        root = self.disk / "kept" / "set-aside"
        return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}

    def blobs(self) -> list[Path]:
        return sorted((self.disk / "kept" / "blobs").iterdir())


class Cluster:
    def __init__(self, root: Path, num_nodes: int, copies: int) -> None:
        self.nodes = [Node(root, f"n{i}", copies) for i in range(num_nodes)]
        self.attempt = 0
        for node in self.nodes:
            node.start()

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.replicas is not None]

    def gather(
        self, nodes: Iterable[Node] | None = None, silent: dict[str, str] | None = None, deadline_s: float = 5
    ) -> list[Gathered]:
        """All given nodes enter the next attempt together; `silent` are endpoints that say nothing."""
        self.attempt += 1
        members = list(nodes if nodes is not None else self.alive)
        peers = {node.name: node.alive.endpoint for node in members} | (silent or {})
        with ThreadPoolExecutor(len(members)) as pool:
            return list(
                pool.map(lambda node: node.alive.gather(peers, (1, self.attempt), deadline_s), members)
            )

    def settle(self) -> None:
        """All living nodes have copied everything to their living targets."""
        dead = {node.name for node in self.nodes if node.replicas is None}
        for node in self.alive:
            pusher = node.alive._pusher
            if pusher and dead & pusher.targets.keys():
                node.alive.settle(0.3)
            else:
                assert node.alive.settle(10), node.said


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_push, "POLL_S", 0.02)
    monkeypatch.setattr(replica_push, "STABLE_S", 0.15)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made = []

    def make(num_nodes: int, copies: int = 2) -> Cluster:
        made.append(Cluster(tmp_path, num_nodes, copies))
        return made[-1]

    yield make
    for each in made:
        for node in each.nodes:
            node.die()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("replicas-push")]
    assert not left


def wait_for(is_so: Callable[[], object], timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, "it did not come to that in time"
        time.sleep(0.01)


def blob_of(node: Node, content: bytes) -> Path:
    (path,) = [each for each in node.blobs() if each.name == hashlib.sha256(content).hexdigest()]
    return path


# --- the plain course ---------------------------------------------------------------------------------------


def test_a_finished_file_is_copied_verified_and_private(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    content = os.urandom(3_000_000)
    nodes[0].write("step 5'0.pt", content)
    wait_for(lambda: nodes[0].kinds("replica-kept"))
    assert nodes[0].kinds("replica-kept")[0]["peer"] == "n1"
    assert nodes[0].kinds("replica-kept")[0]["size_bytes"] == len(content)
    copy = blob_of(nodes[1], content)
    assert copy.read_bytes() == content
    assert copy.stat().st_mode & 0o777 == 0o600
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    assert nodes[2].blobs() == []
    assert nodes[0].alive.status() == {"step 5'0.pt": ["n0", "n1"]}


def test_rank_0s_files_are_there_when_it_died(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("run/step_1/model.pt", "one", mtime=1_700_000_000)
    nodes[0].write("last.pt", "one")
    nodes.settle()
    nodes[0].die()
    for gathered in nodes.gather():
        assert (gathered.num_files, gathered.num_fetched, gathered.lost) == (2, 2, [])
    for node in nodes.alive:
        assert node.files() == {"run/step_1/model.pt": "one", "last.pt": "one"}
        path = node.folder / "run/step_1/model.pt"
        assert path.stat().st_mtime == 1_700_000_000
        assert path.stat().st_mode & 0o777 == 0o600
        assert node.blobs() == []  # what all have needs no copies
        assert (node.disk / "kept/state.json").stat().st_mode & 0o777 == 0o600


def test_two_of_four_may_die_at_once_with_three_copies(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(4, copies=3)
    nodes.gather()
    nodes[3].write("last.pt", "by 3")
    nodes.settle()
    nodes[3].die()
    nodes[0].die()  # the first of its two holders
    nodes.gather()
    assert [node.files() for node in nodes.alive] == [{"last.pt": "by 3"}] * 2


def test_files_there_before_the_first_start_are_given_to_all(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes[2].write("pretrained.pt", "weights")
    nodes.gather()
    assert [node.files() for node in nodes.alive] == [{"pretrained.pt": "weights"}] * 3


def test_a_new_member_gets_everything(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather(nodes.nodes[:2])
    nodes[0].write("a.pt", "a")
    nodes.settle()
    nodes.gather()
    assert nodes[2].files() == {"a.pt": "a"}


def test_after_a_gather_nothing_is_sent_again(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("a.pt", "a" * 1000)
    nodes.settle()
    nodes.gather([nodes[2], nodes[0], nodes[1]])  # another ring
    for node in nodes.nodes:
        node.said.clear()
    nodes.settle()
    assert all(node.kinds("replica-kept") == [] for node in nodes.nodes)
    assert nodes[1].alive.status()["a.pt"] == ["n1", "n0", "n2"]


def test_with_no_files_a_gather_costs_next_to_nothing(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    fastest = min(max(each.seconds for each in nodes.gather()) for _ in range(10))
    assert fastest < 0.05  # 5 ms here; the bound is for a machine that does other things too
    assert all(node.said == [] for node in nodes.nodes)


def test_kits_own_snapshots_and_unfinished_files_are_left_alone(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    alone = [
        "g0001-s000000005.json",
        "g0001-s000000005-00112233aabbccdd.pt",
        "fence",
        ".hidden",
        "a.part",
        "b.partial",
        "c.tmp",
        "d~",
        "e.tmp/model.pt",
        ".tmp-0011223344556677x",
    ]
    for name in [*alone, "step_5/.metadata", "x/fence"]:
        path = nodes[0].folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    nodes.settle()
    nodes.gather()
    assert nodes[1].files() == {"step_5/.metadata": "step_5/.metadata", "x/fence": "x/fence"}
    assert nodes[0].files().keys() >= set(alone)


def test_names_that_would_trouble_a_shell_or_a_decoder_go_through(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    names = ["a b", "q'uo\"te", "$HOME;x", "new\nline", "ü/ü.pt", os.fsdecode(b"\xff.pt"), "-rf"]
    for name in names:
        nodes[0].write(name, repr(name))
    nodes.settle()
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {name: repr(name) for name in names}


def test_many_members_get_a_large_file_from_each_other(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_LARGE_BYTES", 1)
    monkeypatch.setattr(replicas, "_MAX_LARGE_SENDS", 1)
    nodes = cluster(5)
    nodes[0].write("big.pt", b"b" * 1_000_000)
    original = replica_wire.Wire.send_bytes
    served: list[int] = []

    def slowly(self: replica_wire.Wire, file: Any, size_bytes: int) -> None:
        served.append(self._sock.getsockname()[1])
        time.sleep(0.2)
        original(self, file, size_bytes)

    monkeypatch.setattr(replica_wire.Wire, "send_bytes", slowly)
    nodes.gather()
    assert all(node.files() == {"big.pt": "b" * 1_000_000} for node in nodes.nodes)
    assert len(served) == 4
    assert len(set(served)) >= 2, "the first holder had to serve them all"


def test_agents_talk_over_ipv6_too() -> None:
    with replica_wire.listen("::1") as listener, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(lambda: replica_wire.accept(listener.accept()[0], TOKEN))
        with contextlib.closing(replica_wire.connect(replica_wire.endpoint_of(listener), TOKEN)) as wire:
            wire.send({"a": 1})
            with contextlib.closing(accepting.result()) as server:
                assert server.receive() == {"a": 1}


# --- complete files -----------------------------------------------------------------------------------------


def test_a_renamed_file_goes_at_once_and_one_being_written_waits(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_push, "STABLE_S", 1.0)
    nodes = cluster(2)
    nodes.gather()
    with (nodes[0].folder / "slow.pt").open("wb", buffering=0) as slow:
        slow.write(b"half")
        draft = nodes[0].folder / "fast.pt.tmp"
        draft.write_bytes(b"all")
        time.sleep(0.03)  # the clock of files ticks every few ms
        draft.replace(nodes[0].folder / "fast.pt")
        wait_for(lambda: "n1" in nodes[0].alive.status().get("fast.pt", []), timeout_s=0.9)
        assert "slow.pt" not in nodes[0].alive.status()
        slow.write(b" and the rest")
    wait_for(lambda: "n1" in nodes[0].alive.status().get("slow.pt", []))
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {"slow.pt": "half and the rest", "fast.pt": "all"}


def test_a_folder_waits_for_the_file_in_it_that_is_still_written(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("step_1/a.pt", "a", mtime=1_700_000_000)
    (nodes[0].folder / "step_1/b.pt.tmp").write_text("half")
    nodes[0].write("other.pt", "other", mtime=1_700_000_000)
    wait_for(lambda: "n1" in nodes[0].alive.status().get("other.pt", []))
    time.sleep(0.3)
    assert "step_1/a.pt" not in nodes[0].alive.status()
    nodes[0].write("step_1/b.pt", "b", mtime=1_700_000_000)
    wait_for(lambda: "n1" in nodes[0].alive.status().get("step_1/a.pt", []))
    (kept,) = [
        fields["files"] for fields in nodes[0].kinds("replica-kept") if "step_1/a.pt" in fields["files"]
    ]
    assert kept == ["step_1/a.pt", "step_1/b.pt"]


def test_what_changes_under_the_copy_is_discarded_and_copied_later(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    original, changed = replica_wire.Wire.send_bytes, []

    def change_first(self: replica_wire.Wire, file: Any, size_bytes: int) -> None:
        if not changed:
            changed.append(True)
            with (nodes[0].folder / "last.pt").open("r+b") as target:  # in place: same inode, same size
                target.write(b"B")
        original(self, file, size_bytes)

    monkeypatch.setattr(replica_wire.Wire, "send_bytes", change_first)
    nodes[0].write("last.pt", b"A" * 100_000)
    wait_for(lambda: "n1" in nodes[0].alive.status().get("last.pt", []) and len(nodes[1].blobs()) == 1)
    assert changed
    assert nodes[1].blobs()[0].read_bytes() == b"B" + b"A" * 99_999


def test_a_file_that_changes_while_it_is_hashed_is_not_taken_for_either(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"a" * 3_000_000)
    before = mark_of(path.lstat())
    assert sha256_of(path, before) == hashlib.sha256(b"a" * 3_000_000).hexdigest()

    def change() -> bool:
        path.write_bytes(b"b" * 3_000_001)
        return False

    with pytest.raises(Changed):
        sha256_of(path, before, change)
    with pytest.raises(Changed):
        sha256_of(path, before)


def test_what_does_not_arrive_is_not_reported_as_kept(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    original = Kept.receive
    tried = []

    def lose(self: Kept, *args: Any) -> str:
        tried.append(original(self, *args))
        self.discard(tried[-1])
        return tried[-1]

    monkeypatch.setattr(Kept, "receive", lose)
    nodes[0].write("last.pt", "v")
    assert not nodes[0].alive.settle(0.5)
    assert tried
    assert nodes[0].alive.status() == {"last.pt": ["n0"]}
    assert nodes[0].kinds("replica-kept") == []


# --- deletions ----------------------------------------------------------------------------------------------


def test_pruning_is_followed_by_holders_and_by_everyone_at_the_next_start(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("step_1.pt", "1")
    nodes.settle()
    nodes.gather()  # all have it
    nodes[0].write("step_2.pt", "2")
    nodes.settle()
    nodes[0].write("step_3.pt", "3")
    (nodes[0].folder / "step_1.pt").unlink()
    (nodes[0].folder / "step_2.pt").unlink()
    nodes.settle()
    assert [path.read_text() for path in nodes[1].blobs()] == ["3"]
    nodes[0].die()
    nodes.gather()
    assert [node.files() for node in nodes.alive] == [{"step_3.pt": "3"}] * 2
    assert nodes[1].aside() == nodes[2].aside() == {}


def test_the_old_copy_goes_only_when_the_new_one_is_there(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("keep.pt", "k")
    nodes[0].write("step_1.pt", "1")
    nodes.settle()
    tried = threading.Event()

    def fail(*_: object) -> None:
        tried.set()
        raise ConnectionResetError("cut in the middle")

    monkeypatch.setattr(replica_wire.Wire, "send_bytes", fail)
    (nodes[0].folder / "step_1.pt").unlink()
    nodes[0].write("step_2.pt", "2")
    assert tried.wait(5)
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {"keep.pt": "k", "step_1.pt": "1"}


def test_a_folder_that_cannot_be_read_deletes_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("a.pt", "a")
    nodes[0].write("sub/b.pt", "b")
    nodes.settle()
    nodes.gather()
    original = os.scandir

    def deny(path: Any) -> Any:
        if str(path) == str(nodes[1].folder / "sub"):
            raise PermissionError(13, "Permission denied", path)
        return original(path)

    monkeypatch.setattr(os, "scandir", deny)
    nodes.settle()
    nodes.gather()
    monkeypatch.undo()
    assert [node.files() for node in nodes.nodes] == [{"a.pt": "a", "sub/b.pt": "b"}] * 2


def test_an_emptied_folder_is_an_accident_and_filled_again(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("a.pt", "a")
    nodes.settle()
    nodes.gather()
    shutil.rmtree(nodes[1].folder)
    nodes.settle()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"a.pt": "a"}] * 2


# --- nodes that come back -----------------------------------------------------------------------------------


def test_a_node_that_was_away_does_not_win(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("last.pt", "old")
    nodes[0].write("step_1.pt", "same")
    nodes.settle()
    nodes.gather()
    nodes[0].die()
    # Nobody saw these; the clock of that node is far ahead, too.
    nodes[0].write("last.pt", "newest by its time", mtime=time.time() + 1e6)
    nodes[0].write("step_900.pt", "of a future that was not")
    nodes.gather()
    nodes[1].write("last.pt", "new")
    nodes.settle()
    nodes[0].start()
    gathered = nodes.gather()[0]
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "new", "step_1.pt": "same"}] * 3
    assert gathered.num_set_aside == 2
    assert nodes[0].aside() == {
        "0001.0004/last.pt": "newest by its time",
        "0001.0004/step_900.pt": "of a future that was not",
    }
    assert nodes[1].aside() == nodes[2].aside() == {}


def test_what_a_returning_node_pruned_too_late_does_not_come_back(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("step_1.pt", "1")
    nodes[0].write("step_2.pt", "2")
    nodes.settle()
    nodes.gather()
    nodes[2].die()
    (nodes[0].folder / "step_1.pt").unlink()
    nodes.settle()
    nodes.gather()
    nodes[2].start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"step_2.pt": "2"}] * 3


def test_only_the_last_two_folders_of_what_was_set_aside_are_left(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    for number in range(4):
        nodes[1].die()
        nodes[1].write(f"stale_{number}.pt", str(number))
        nodes.gather()
        nodes[1].start()
        nodes.gather()
    assert sorted(nodes[1].aside().values()) == ["2", "3"]


def test_a_node_that_restarts_within_the_attempt_is_not_behind(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "never copied")
    nodes[0].die()
    nodes[0].start()
    nodes.gather()
    assert nodes[1].files() == {"last.pt": "never copied"}


def test_a_disk_that_was_replaced_gets_its_files_back(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "copied")
    nodes.settle()
    nodes[0].die()
    shutil.rmtree(nodes[0].disk)
    nodes[0].start()
    nodes.gather()
    assert nodes[0].files() == {"last.pt": "copied"}


def test_two_nodes_that_write_the_same_name_agree_on_the_later_and_keep_both(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "earlier", mtime=1_700_000_000)
    nodes[1].write("last.pt", "later", mtime=1_700_000_001)
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "later"}] * 2
    assert nodes[0].aside() == {"0001.0002/last.pt": "earlier"}
    assert nodes[0].kinds("replica-conflict") == [{"file": "last.pt", "nodes": ["n0", "n1"]}]


def test_a_file_and_a_folder_of_one_name_do_not_both_stay(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("step", "a file", mtime=1_700_000_000)
    nodes[1].write("step/model.pt", "in a folder", mtime=1_700_000_001)
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"step/model.pt": "in a folder"}] * 2


# --- damage -------------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_and_another_holder_used(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(4, copies=3)
    nodes.gather()
    content = b"x" * 300_000
    nodes[0].write("last.pt", content)
    nodes.settle()
    nodes[0].die()
    flip_a_bit(blob_of(nodes[1], content))
    gathered = nodes.gather()
    assert [node.files()["last.pt"] for node in nodes.alive] == [content.decode()] * 3
    assert [each.lost for each in gathered] == [[], [], []]
    assert nodes[1].kinds("replica-damaged")


def test_with_every_copy_damaged_the_older_version_is_used_and_the_loss_told(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "v1")
    nodes[0].write("other.pt", "o")
    nodes.settle()
    nodes.gather()
    nodes[0].write("last.pt", "v2, longer")
    nodes[0].write("new.pt", "only in the new round")
    nodes.settle()
    nodes[0].die()
    for blob in nodes[1].blobs():
        flip_a_bit(blob)
    (gathered,) = nodes.gather()
    assert nodes[1].files() == {"last.pt": "v1", "other.pt": "o"}
    assert sorted(gathered.lost) == ["last.pt", "new.pt"]
    assert len(nodes[1].kinds("replica-lost")) == 2


def test_after_a_reboot_a_torn_file_is_taken_for_damaged_not_for_new(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "whole")
    nodes.settle()
    nodes[0].die()
    path = nodes[0].folder / "last.pt"
    before = path.stat()
    path.write_text("")  # what a power failure leaves of a file whose content was not on the disk yet
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr("nodekit.deploy.hostfacts.boot_id", lambda: "another boot")
    nodes[0].start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "whole"}] * 2


def test_a_transfer_cut_in_the_middle_leaves_nothing_visible(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    cut = threading.Event()

    def send_half(self: replica_wire.Wire, file: Any, size_bytes: int) -> None:
        self._sock.sendfile(file, 0, size_bytes // 2)
        cut.set()
        raise ConnectionResetError("killed")

    monkeypatch.setattr(replica_wire.Wire, "send_bytes", send_half)
    nodes[0].write("last.pt", b"z" * 5_000_000)
    assert cut.wait(5)
    nodes[0].die()
    wait_for(lambda: not list((nodes[1].disk / "kept/incoming").iterdir()))
    assert nodes[1].blobs() == []
    nodes.gather()
    assert nodes[1].files() == {}


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5, 6])
def test_a_kill_at_any_point_of_a_gather_loses_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[2].write("mine.pt", "left behind")
    nodes.settle()
    nodes.gather()
    nodes[2].die()
    (nodes[0].folder / "mine.pt").unlink()
    for name in ("a.pt", "b/c.pt"):
        nodes[0].write(name, name)
    assert nodes[0].alive.settle(5)
    nodes.gather()
    nodes[0].write("a.pt", "a, newer")
    nodes.settle()
    nodes[0].die()
    nodes[2].write("a.pt", "stale")
    nodes[2].start()
    seen = []

    class Killed(BaseException):
        pass

    def dying(name: str) -> None:
        original = getattr(UserFiles, name)

        def call(self: UserFiles, *args: Any) -> Any:
            if self.folder == nodes[2].folder:
                seen.append(name)
                if len(seen) == moment:
                    raise Killed
            return original(self, *args)

        monkeypatch.setattr(UserFiles, name, call)

    for name in ("place", "remove", "save"):
        dying(name)
    try:
        nodes.gather(deadline_s=1)
    except Killed:
        assert len(seen) == moment
    nodes[2].die()
    nodes[2].start()
    nodes.gather()
    assert len(seen) >= moment, "it was not killed"
    assert [node.files() for node in nodes.alive] == [{"a.pt": "a, newer", "b/c.pt": "b/c.pt"}] * 2
    assert "stale" in nodes[2].aside().values()


def test_what_was_moved_aside_before_a_kill_is_not_a_deletion(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes[0].write("anchor", "x")
    nodes.gather()
    nodes[0].write("last.pt", "earlier", mtime=1_700_000_000)
    nodes[1].write("last.pt", "later", mtime=1_700_000_001)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(UserFiles, "place", die)  # node 0, after it moved its own away
        patched.setattr(UserFiles, "forget_deletions", die)  # node 1, before it knows of the attempt
        with pytest.raises(Killed):
            nodes.gather()
    for node in nodes.nodes:
        node.die()
        node.start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"anchor": "x", "last.pt": "later"}] * 2


def test_a_copy_that_became_the_users_file_is_no_copy_any_more(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("a.pt", "a")
    nodes[0].write("b.pt", "b")
    nodes.settle()
    nodes[0].die()
    original = UserFiles.place

    def place(self: UserFiles, name: str, *args: Any) -> None:
        if name == "b.pt":
            raise OSError(5, "Input/output error")
        original(self, name, *args)

    with monkeypatch.context() as patched:
        patched.setattr(UserFiles, "place", place)
        assert [each.missing for each in nodes.gather()] == [["b.pt"], ["b.pt"]]
    assert nodes[1].files() == nodes[2].files() == {"a.pt": "a"}
    assert [path.read_text() for path in nodes[1].blobs()] == ["b"]  # kept, since nobody else has it
    nodes.settle()  # nothing is asked for that nobody could write
    nodes.gather()
    assert nodes[1].files() == nodes[2].files() == {"a.pt": "a", "b.pt": "b"}
    assert nodes[1].blobs() == []


# --- hostile and broken company -----------------------------------------------------------------------------


def test_who_does_not_know_the_token_gets_nothing(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(1)
    with pytest.raises(replica_wire.WrongToken):
        replica_wire.connect(nodes[0].alive.endpoint, "another token")
    wait_for(lambda: nodes[0].kinds("replica-refused"))
    replica_wire.connect(nodes[0].alive.endpoint, TOKEN).close()


def test_a_server_that_does_not_know_the_token_is_refused_too() -> None:
    with replica_wire.listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(b"kit-replicas-1\n" + b"n" * 32)
                sock.recv(64)
                sock.sendall(b"p" * 32)

        served = pool.submit(serve)
        with pytest.raises(replica_wire.WrongToken, match="does not know"):
            replica_wire.connect(replica_wire.endpoint_of(listener), TOKEN)
        served.result()


def test_the_token_does_not_travel_and_a_changed_frame_is_refused() -> None:
    heard = bytearray()
    with replica_wire.listen("127.0.0.1") as back, replica_wire.listen("127.0.0.1") as front:

        def relay(change: bool) -> None:
            client, _ = front.accept()
            host, _, port = replica_wire.endpoint_of(back).rpartition(":")
            with client, socket.create_connection((host, int(port))) as server:

                def pump(source: socket.socket, sink: socket.socket) -> None:
                    with contextlib.suppress(OSError):
                        while data := source.recv(65536):
                            heard.extend(data)
                            sink.sendall(data.replace(b"fetch", b"fetcH"))
                        sink.shutdown(socket.SHUT_RDWR)

                one = threading.Thread(target=pump, args=(server, client))
                one.start()
                pump(client, server)
                one.join()

        with ThreadPoolExecutor(2) as pool:
            relaying = pool.submit(relay, True)
            accepting = pool.submit(lambda: replica_wire.accept(back.accept()[0], TOKEN))
            wire = replica_wire.connect(replica_wire.endpoint_of(front), TOKEN)
            server = accepting.result()
            wire.send({"op": "list"})
            assert server.receive() == {"op": "list"}
            wire.send({"op": "fetch"})
            with pytest.raises(replica_wire.WireError, match="changed on its way"):
                server.receive()
            wire.close()
            server.close()
            relaying.result()
    assert b"list" in heard
    assert TOKEN.encode() not in heard


HOSTILE = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a//b",
    "",
    ".",
    "..",
    "a/.",
    "a\0b",
    "x" * 300,
    "fence",
    ".tmp",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_refused(cluster: Callable[..., Cluster], tmp_path: Path, name: str) -> None:
    assert refuses(name)
    nodes = cluster(2)
    nodes.gather()
    data = b"owned"
    sha256 = hashlib.sha256(data).hexdigest()
    wire = replica_wire.connect(nodes[1].alive.endpoint, TOKEN)
    assert wire.ask({"op": "put", "sha256": sha256, "size_bytes": len(data), "attempt": [1, 1]}) == {}
    wire._sock.sendall(data)
    assert wire.receive() == {"sha256": sha256}
    good = Source("n0", (1, 1), (1, 1), 9, {"good.pt": Version(sha256, len(data), 1, (1, 1))}).to_dict()
    evil = json.loads(json.dumps(good))
    evil["files"] = {name: evil["files"]["good.pt"]}
    wire.send({"op": "keep", "source": evil})
    with pytest.raises(ConnectionError):
        wire.receive()
    wire.close()
    with contextlib.closing(replica_wire.connect(nodes[1].alive.endpoint, TOKEN)) as again:
        assert again.ask({"op": "keep", "source": good}) == {"lacking": []}  # so it was the name alone
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {"good.pt": "owned"}


@pytest.mark.parametrize("request_", [
    {"op": "fetch", "sha256": "../state.json"},
    {"op": "fetch", "sha256": "listings/n0.json"},
    {"op": "put", "sha256": "../../x", "size_bytes": 1, "attempt": [1, 1]},
    {"op": "put", "sha256": "0" * 64, "size_bytes": -1, "attempt": [1, 1]},
    {"op": "exec"},
    {"op": "keep", "source": {"node": "../../x" * 20, "attempt": [1, 1], "base": [1, 1], "number": 1, "files": {}}},
    {"op": "keep", "source": {"node": "n0", "attempt": [1, 1], "base": [1, 1], "number": 1,
                              "files": {"a": ["", 0, 0, 1, 1, "../../etc/passwd"]}}},
])  # fmt: skip
def test_a_hostile_request_ends_the_connection(
    cluster: Callable[..., Cluster], request_: dict[str, Any]
) -> None:
    nodes = cluster(2)
    nodes.gather()
    with (
        contextlib.closing(replica_wire.connect(nodes[0].alive.endpoint, TOKEN)) as wire,
        pytest.raises(ConnectionError),
    ):
        wire.ask(request_)
    with contextlib.closing(replica_wire.connect(nodes[0].alive.endpoint, TOKEN)) as wire:
        assert wire.ask({"op": "fetch", "sha256": "0" * 64}) == {}  # and it still serves


def test_a_node_name_cannot_lead_out_of_the_folder(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    nodes = cluster(2)
    nodes.gather()
    source = Source("../../../escaped", (1, 1), (1, 1), 1, {})
    with contextlib.closing(replica_wire.connect(nodes[0].alive.endpoint, TOKEN)) as wire:
        assert wire.ask({"op": "keep", "source": source.to_dict()}) == {"lacking": []}
    assert [path for path in tmp_path.rglob("*escaped*") if path.parent.name != "listings"] == []


def test_content_that_is_not_what_it_says_is_not_kept(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(1)
    nodes.gather()
    with contextlib.closing(replica_wire.connect(nodes[0].alive.endpoint, TOKEN)) as wire:
        assert wire.ask({"op": "put", "sha256": "0" * 64, "size_bytes": 4, "attempt": [1, 1]}) == {}
        wire._sock.sendall(b"evil")
        assert wire.receive() == {"sha256": hashlib.sha256(b"evil").hexdigest()}
    assert nodes[0].blobs() == []


def test_nothing_is_promised_for_an_attempt_that_is_over(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(1)
    nodes.gather()
    nodes.gather()
    old = Source("n9", (1, 1), (1, 1), 1, {}).to_dict()
    with contextlib.closing(replica_wire.connect(nodes[0].alive.endpoint, TOKEN)) as wire:
        assert "over" in wire.ask({"op": "keep", "source": old})["error"]
        assert wire.ask({"op": "keep", "source": {**old, "attempt": [1, 2]}}) == {"lacking": []}


def test_a_zombie_of_an_older_attempt_is_refused(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes.gather([nodes[1]])
    nodes[0].write("last.pt", "by the zombie")
    wait_for(lambda: nodes[0].kinds("replica-failed"))
    assert "over" in nodes[0].kinds("replica-failed")[0]["reason"]
    assert nodes[1].blobs() == []


@pytest.mark.parametrize("accepts", [True, False])
def test_a_member_that_says_nothing_costs_the_deadline_at_most(
    cluster: Callable[..., Cluster], accepts: bool
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("a.pt", "a")
    nodes.settle()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if accepts:
            mute.listen()
        started = time.monotonic()
        gathered = nodes.gather(silent={"mute": f"127.0.0.1:{mute.getsockname()[1]}"}, deadline_s=1)
        assert time.monotonic() - started < 2.5
    assert [list(each.silent) for each in gathered] == [["mute"], ["mute"]]
    assert [node.files() for node in nodes.nodes] == [{"a.pt": "a"}] * 2


def test_a_member_that_comes_late_is_waited_for(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes[1].write("a.pt", "a")
    peers = {node.name: node.alive.endpoint for node in nodes.nodes}
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(nodes[0].alive.gather, peers, (1, 1), 5.0)
        time.sleep(1.2)
        nodes[1].alive.gather(peers, (1, 1), 5.0)
        assert early.result().silent == {}
    assert nodes[0].files() == {"a.pt": "a"}


def test_a_node_that_hears_nobody_does_not_pass_for_the_newest(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("last.pt", "v1")
    nodes.settle()
    nodes.gather()
    nodes[2].die()
    nodes[0].write("last.pt", "v2")
    nodes.settle()
    nodes.gather()
    nodes[2].start()
    nodes[2].write("step_900.pt", "stale")
    # In this attempt, node 2 reaches nobody and the others do not reach it.
    nodes.attempt += 1
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        both = {node.name: node.alive.endpoint for node in nodes.nodes[:2]} | {"n2": dead}
        alone = {"n0": dead, "n1": dead, "n2": nodes[2].alive.endpoint}
        with ThreadPoolExecutor(3) as pool:
            for work in [
                pool.submit(node.alive.gather, peers, (1, nodes.attempt), 1.0)
                for node, peers in ((nodes[0], both), (nodes[1], both), (nodes[2], alone))
            ]:
                work.result()
    nodes[2].write("by_rank_2.pt", "written in this attempt")
    nodes.gather()
    expected = {"last.pt": "v2", "by_rank_2.pt": "written in this attempt"}
    assert [node.files() for node in nodes.nodes] == [expected] * 3
    assert "stale" in nodes[2].aside().values()


# --- links, disks -------------------------------------------------------------------------------------------


def test_links_inside_stay_links_and_others_are_told_once(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("step_1/model.pt", "m")
    (nodes[0].folder / "latest").symlink_to("step_1")
    (nodes[0].folder / "last.pt").symlink_to(nodes[0].folder / "step_1" / "model.pt")
    (nodes[0].folder / "step_1" / "up").symlink_to("../latest/model.pt")
    (nodes[0].folder / "out").symlink_to("../../secret")
    (nodes[0].folder / "etc").symlink_to("/etc")
    os.mkfifo(nodes[0].folder / "pipe")
    nodes.settle()
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {
        "step_1/model.pt": "m",
        "latest": "-> step_1",
        "last.pt": "-> step_1/model.pt",
        "step_1/up": "-> ../latest/model.pt",
    }
    refused = [fields["file"] for fields in nodes[0].kinds("replica-refused")]
    assert sorted(refused) == ["etc", "out", "pipe"]


def test_a_folder_that_is_a_link_elsewhere_is_not_written_through(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    nodes = cluster(2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (nodes[1].folder / "step_1").symlink_to(outside)
    nodes[0].write("step_1/model.pt", "m")
    nodes.gather()
    assert list(outside.iterdir()) == []
    assert nodes[1].files() == {"step_1/model.pt": "m"}


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_holder_that_cannot_write_is_told_of_once_and_asked_again(
    cluster: Callable[..., Cluster], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    monkeypatch.setattr(replica_push, "_RETRY_S", (0.05, 0.05))
    disk = tmp_path / "n1"
    disk.mkdir()
    size = "1m" if kind == "full" else "8m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        nodes = cluster(2)
        nodes.gather()
        nodes[0].write("small.pt", "s")
        nodes.settle()
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        nodes[0].write("big.pt", b"b" * 3_000_000)
        assert not nodes[0].alive.settle(1)
        assert len(nodes[0].kinds("replica-failed")) == len(nodes[1].kinds("replica-failed")) == 1
        assert nodes[0].alive.status() == {"small.pt": ["n0", "n1"], "big.pt": ["n0"]}
        gathered = nodes.gather()
        missing = ["big.pt"] if kind == "full" else ["big.pt", "small.pt"]
        assert [sorted(each.missing) for each in gathered] == [[], missing]
        assert nodes[0].files().keys() == {"small.pt", "big.pt"}
        assert nodes[1].files().keys() == {"small.pt", "big.pt"} - set(missing)
        subprocess.run(["mount", "-o", "remount,rw,size=16m", str(disk)], check=True)
        nodes.settle()
        assert nodes[0].alive.status()["big.pt"] == ["n0", "n1"]
        nodes.gather()
        assert nodes[1].files() == nodes[0].files()
        nodes[1].die()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_limit_on_file_sizes_is_told_as_well(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    nodes[0].write("big.pt", b"b" * 3_000_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        wait_for(lambda: nodes[1].kinds("replica-failed"))
        assert not nodes[0].kinds("replica-kept")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    nodes.settle()
    assert nodes[0].alive.status()["big.pt"] == ["n0", "n1"]


def test_room_is_made_from_what_was_set_aside(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "n1"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        nodes = cluster(2)
        nodes.gather()
        nodes[1].die()
        nodes[1].write("stale.pt", b"s" * 3_000_000)
        nodes.gather()
        nodes[1].start()
        nodes.gather()
        assert len(nodes[1].aside()) == 1
        nodes[0].write("big.pt", b"b" * 3_000_000)
        nodes.settle()
        assert nodes[0].alive.status()["big.pt"] == ["n0", "n1"]
        assert nodes[1].aside() == {}
        nodes[1].die()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- who has a say ------------------------------------------------------------------------------------------


def version(text: str, written: int, mtime: int = 0) -> Version:
    return Version(hashlib.sha256(text.encode()).hexdigest() if text else "", len(text), mtime, (1, written))


def source(node: str, attempt: int, base: int, number: int = 0, **files: Version) -> Source:
    return Source(node, (1, attempt), (1, base), number, files)


AGREEMENTS = {
    "the attempt a version is written in counts more than its time": (
        [source("a", 5, 5, x=version("new", 5, mtime=1)), source("b", 5, 5, x=version("old", 4, mtime=9))],
        [],
        {"x": "new"},
    ),
    "within an attempt the later wins": (
        [source("a", 5, 5, x=version("early", 5, 1)), source("b", 5, 5, x=version("late", 5, 2))],
        [],
        {"x": "late"},
    ),
    "a node that was away has no say, though it agreed with the base": (
        [source("a", 6, 5, x=version("v", 6)), source("b", 5, 5, y=version("stale", 5))],
        [],
        {"x": "v"},
    ),
    "copies for a node that is absent count like the node": (
        [source("b", 5, 5)],
        [source("a", 5, 5, x=version("v", 5))],
        {"x": "v"},
    ),
    "copies from an older attempt do not": (
        [source("b", 5, 5)],
        [source("a", 4, 4, x=version("v", 4))],
        {},
    ),
    "a member's own word counts more than what others keep of it": (
        [source("a", 5, 5, x=version("", 5), y=version("v", 5))],
        [source("a", 5, 5, 99, x=version("v", 5), y=version("v", 5))],
        {"y": "v"},
    ),
    "unless it came back with less": (
        [source("a", -1, -1, y=version("leftover", -1)), source("b", 5, 5)],
        [source("a", 5, 5, x=version("v", 5))],
        {"x": "v"},
    ),
    "of several listings kept for a node the last": (
        [source("b", 5, 5), source("c", 5, 5)],
        [source("a", 5, 5, 2, x=version("new", 5, 1)), source("a", 5, 5, 1, x=version("old", 5, 2))],
        {"x": "new"},
    ),
    "who missed the last agreement speaks of this attempt alone": (
        [source("a", 6, 6, x=version("v", 5)),
         source("b", 6, 3, x=version("w", 3, 9), y=version("mine", 6), z=version("s", 3))],
        [],
        {"x": "v", "y": "mine"},
    ),
    "a deletion counts until the file is written again": (
        [source("a", 5, 5, x=version("", 5, 3), y=version("", 5, 3), k=version("k", 1)),
         source("b", 5, 5, x=version("v", 2, 9), y=version("again", 5, 4))],
        [],
        {"y": "again", "k": "k"},
    ),
    "nothing older than a deletion is there to fall back to": (
        [source("a", 5, 5, y=version("again", 5, 4)), source("b", 5, 5, y=version("", 5, 3), k=version("k", 1)),
         source("c", 5, 5, y=version("first", 2))],
        [],
        {"y": "again", "k": "k"},
    ),
    "of a file and a folder of one name the newer stays": (
        [source("a", 5, 5, s=version("file", 5, 1), t=version("file", 5, 2)),
         source("b", 5, 5, **{"s/x": version("in", 5, 2), "t/x": version("in", 5, 1)})],
        [],
        {"s/x": "in", "t": "file"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", AGREEMENTS)
def test_agreement(story: str) -> None:
    own, kept, wanted = AGREEMENTS[story]
    agreed = agree(own, kept)
    contents = {name: [each.sha256 for each in versions] for name, versions in agreed.wanted.items()}
    assert {name: shas[0] for name, shas in contents.items()} == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in wanted.items()
    }
    assert agree(reversed(own), reversed(kept)) == agreed
    if "fall back" in story:
        assert len(contents["y"]) == 1


# --- whatever happens ---------------------------------------------------------------------------------------

NAMES = ["last.pt", "step_1/a.pt", "step_1/b.pt", "x y"]
STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 4), st.sampled_from(NAMES)),
    st.tuples(st.just("delete"), st.integers(0, 4), st.sampled_from(NAMES)),
    st.tuples(st.just("settle"), st.just(0), st.just("")),
    st.tuples(st.just("crash"), st.integers(0, 4), st.just("")),
    st.tuples(st.just("return"), st.integers(0, 4), st.just("")),
    st.tuples(st.just("gather"), st.just(0), st.just("")),
)


class Truth:
    """What must be true of a name: the last thing a script did to it, and the nodes that know."""

    def __init__(self, content: str | None, known_to: set[str], by: str, attempt: int) -> None:
        self.content, self.known_to, self.by, self.attempt = content, known_to, by, attempt


def play(root: Path, num_nodes: int, copies: int, steps: list[tuple[str, int, str]]) -> list[str]:
    """Returns which of the promises were put to the test."""
    nodes = Cluster(root, num_nodes, copies)
    truths: dict[str, Truth] = {}
    members = [node.name for node in nodes.nodes]
    tested = []

    def meet() -> None:
        nonlocal members
        alive = nodes.alive
        if not alive:
            return
        in_last_round = {node.name for node in alive} & set(members)
        for gathered in nodes.gather():
            assert gathered.silent == {}
            assert gathered.lost == gathered.missing == []
        found = [node.files() for node in alive]
        assert all(each == found[0] for each in found), found
        for name, truth in truths.items():
            if in_last_round & truth.known_to:
                assert found[0].get(name) == truth.content, (name, truth.__dict__, found[0])
                tested.append("deleted" if truth.content is None else "kept")
                if truth.by and truth.by not in in_last_round:
                    tested.append("writer gone")
        members = [node.name for node in alive]
        for name in [*truths, *found[0]]:
            truths[name] = Truth(found[0].get(name), set(members), "", nodes.attempt)

    def settle() -> None:
        for node in nodes.alive:
            if node.name not in members:
                continue
            ring = members.index(node.name)
            targets = [members[(ring + i) % len(members)] for i in range(1, min(copies, len(members)))]
            is_done = node.alive.settle(5 if all(nodes[int(each[1:])].replicas for each in targets) else 0.3)
            for name, truth in truths.items():
                if truth.by == node.name and truth.attempt == nodes.attempt:
                    truth.known_to |= set(node.alive.status().get(name, []))
                    if truth.content is None and is_done:
                        truth.known_to |= set(targets)

    try:
        nodes[0].write("anchor", "a folder that is emptied is taken for an accident")
        meet()
        for number, (what, index, name) in enumerate(steps):
            node = nodes[index % num_nodes]
            is_member = node.replicas is not None and node.name in members
            truth = truths.get(name)
            is_free = truth is None or truth.attempt != nodes.attempt or truth.by in (node.name, "")
            if what == "write" and is_member and is_free:
                node.write(name, f"{number} by {node.name}", mtime=1_700_000_000 + number)
                truths[name] = Truth(f"{number} by {node.name}", {node.name}, node.name, nodes.attempt)
            elif what == "delete" and is_member and is_free and (node.folder / name).exists():
                (node.folder / name).unlink()
                truths[name] = Truth(None, {node.name}, node.name, nodes.attempt)
            elif what == "settle":
                settle()
            elif what == "crash":
                node.die()
            elif what == "return" and node.replicas is None:
                node.start()
                # It is up again, but takes part only from the next attempt on.
            elif what == "gather":
                meet()
        meet()
        return tested
    finally:
        for node in nodes.nodes:
            node.die()


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(3, 5), st.integers(2, 3), st.lists(STEPS, min_size=4, max_size=25))
def test_whatever_happens_members_agree_and_what_was_kept_is_there(
    tmp_path_factory: pytest.TempPathFactory, num_nodes: int, copies: int, steps: list[tuple[str, int, str]]
) -> None:
    root = tmp_path_factory.mktemp("play")
    try:
        play(root, num_nodes, copies, steps)
    finally:
        shutil.rmtree(root)


def test_the_play_puts_every_promise_to_the_test(tmp_path: Path) -> None:
    steps = [
        ("write", 0, "last.pt"), ("write", 0, "x y"), ("settle", 0, ""), ("gather", 0, ""),
        ("delete", 1, "x y"), ("write", 1, "last.pt"), ("settle", 0, ""), ("crash", 1, ""), ("gather", 0, ""),
    ]  # fmt: skip
    assert set(play(tmp_path, 3, 2, steps)) == {"kept", "deleted", "writer gone"}
