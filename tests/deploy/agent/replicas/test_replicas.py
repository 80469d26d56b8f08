"""User files survive their nodes."""

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from replica_cluster import PATIENT_S, Cluster, Node, blob_of, wait_for

from nodekit.deploy.agent import agent_wire
from nodekit.deploy.agent.replicas import replicas
from nodekit.deploy.agent.replicas.replica_copies import Copies
from nodekit.deploy.agent.replicas.replica_files import Listing, UserFiles, Version, scan
from nodekit.deploy.agent.replicas.replicas import replica_holders
from nodekit.inventory import hostlists
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.snapshot import Snapshots

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
        assert path.stat().st_nlink == 1  # writing to one in place does not change the other
        assert node.blobs() == []  # what all have needs no copies
        assert (node.disk / "kept/state.json").stat().st_mode & 0o777 == 0o600


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
    assert nodes[2].blobs() == nodes[0].blobs() == []


def test_where_nobody_has_a_file_the_first_ones_are_copied_all_the_same(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(3)
    nodes[0].write("g0001-s000000005.json", "a snapshot of kit's own")
    assert [node.alive.has_files for node in nodes.nodes] == [False] * 3
    nodes.enter()
    nodes[0].write("a.pt", "first")
    nodes.settle()
    assert nodes[1].keeps("n0") == {"a.pt": "first"}
    assert [node.alive.has_files for node in nodes.nodes] == [True, True, False]
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == nodes[2].files() == {"a.pt": "first"}
    assert [node.alive.has_files for node in nodes.alive] == [True, True]


def test_a_member_whose_workers_still_end_is_waited_for(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_REASSURE_S", 0.1)
    nodes = cluster(2)
    nodes[1].write("a.pt", "first")
    peers = nodes.peers(nodes.nodes)
    nodes[1].alive.announce((1, 1), PATIENT_S)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(nodes[0].alive.gather, peers, (1, 1), 2.0)
        time.sleep(2.5)
        nodes[1].write("b.pt", "at the end")
        nodes[1].alive.gather(peers, (1, 1), PATIENT_S)
        assert early.result().silent == {}
    assert nodes[0].files() == {"a.pt": "first", "b.pt": "at the end"}


def test_who_announces_that_it_comes_and_does_not_is_waited_for_no_longer_than_that(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_REASSURE_S", 0.1)
    nodes = cluster(2)
    peers = nodes.peers(nodes.nodes)
    nodes[1].alive.announce((1, 1), 0.5)
    assert list(nodes[0].alive.gather(peers, (1, 1), 0.5).silent) == ["n1"]


def test_who_enters_with_other_nodes_copies_to_those(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.enter()
    nodes[1].die()
    nodes.enter()
    nodes[0].write("a.pt", "first")
    nodes.settle()
    assert nodes[2].keeps("n0") == {"a.pt": "first"}


def test_a_deletion_and_a_listing_that_cannot_be_read_are_something_to_tell(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("a.pt", "first")
    nodes.settle()
    (nodes[0].folder / "a.pt").unlink()
    nodes.settle()
    assert nodes[0].alive.has_files
    nodes[1].die()
    (nodes[1].disk / "kept/listings/n0.json").write_text('{"of": "a newer kit"}')
    assert nodes[1].start().has_files


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


def test_a_save_of_a_rank_that_stays_and_a_gather_do_not_disturb_each_other(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("metrics.csv", "1,2")
    nodes.settle()
    nodes[0].die()
    left = nodes[1].folder / ".replica-0123456789abcdef"
    left.write_text("what a kill left")
    place, is_there = UserFiles.place, []

    def placing(self: UserFiles, *args: Any) -> None:
        is_there.append(half.exists())  # of a save that began before
        assert Snapshots(self.folder, generation=0).save_if_newest({"x": torch.ones(3)}, step=7)
        place(self, *args)

    monkeypatch.setattr(UserFiles, "place", placing)
    with commit.written_beside(nodes[1].folder) as (half, _):
        (gathered,) = nodes.gather()
    assert is_there == [True]
    assert gathered.missing == []
    assert nodes[1].files()["metrics.csv"] == "1,2"
    assert not left.exists()


def test_a_node_may_be_called_as_an_inventory_allows(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    nodes = cluster(0)
    nodes.nodes = [Node(tmp_path, f"gpu-{number}.".ljust(200, "x"), 2) for number in range(2)]
    assert all(hostlists.is_name(node.name) for node in nodes.nodes)
    assert not hostlists.is_name(f"{nodes[0].name}x")
    for node in nodes.nodes:
        node.start()
    nodes.gather()
    nodes[0].write("step_1.pt", "1")
    nodes.settle()
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {"step_1.pt": "1"}


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


# --- stories ------------------------------------------------------------------------------------------------

STORIES = {
    "files there before the first start are given to all": ("write 2 a A; gather", {"a": "A"}),
    "a new member gets everything": ("gather 0 1; write 0 a A; settle; gather", {"a": "A"}),
    "two of four are lost at once, three copies": (
        "gather; write 3 a A; settle; die 3; die 0; gather",
        {"a": "A"},
    ),
    "a node that restarts within the attempt is not behind": (
        "gather; write 0 a never-copied; die 0; start 0; gather",
        {"a": "never-copied"},
    ),
    "a disk that was replaced gets its files back": (
        "gather; write 0 a A; settle; die 0; wipe 0; start 0; gather",
        {"a": "A"},
    ),
    "all agents are killed": (
        "gather; write 0 a A; settle; die 0; die 1; die 2; wipe 0; start 0; start 1; start 2; gather",
        {"a": "A"},
    ),
    "an emptied folder is an accident and filled again": (
        "gather; write 0 a A; settle; gather; empty 1; settle; gather",
        {"a": "A"},
    ),
    "what was pruned while a node was away does not come back": (
        "gather; write 0 a A; write 0 b B; settle; gather; die 2; delete 0 a; settle; gather; start 2; gather",
        {"b": "B"},
    ),
    "a folder takes the place of a file": (
        "gather; write 0 k K; write 0 a A; settle; gather; delete 0 a; write 0 a/b B; settle; die 0; gather",
        {"k": "K", "a/b": "B"},
    ),
    "a file takes the place of a folder": (
        "gather; write 0 k K; write 0 a/b B; settle; gather; empty 0 a; write 0 a A; settle; die 0; gather",
        {"k": "K", "a": "A"},
    ),
    "a file and a folder of one name are written at once": (
        "gather; write 0 s file; write 1 s/x in-a-folder; gather",
        {"s/x": "in-a-folder"},
    ),
    "a renamed file is copied under its new name": (
        "gather; write 0 a A; settle; gather; delete 0 a; write 0 b A; delete 1 a; settle; die 0; gather",
        {"b": "A"},
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_story_ends_with_the_same_files_on_all(cluster: Callable[..., Cluster], story: str) -> None:
    steps, expected = STORIES[story]
    nodes = cluster(4, copies=3) if "three copies" in story else cluster(3)
    for step in steps.split("; "):
        what, *words = step.split()
        node = nodes[int(words[0])] if words else nodes[0]
        match what:
            case "gather":
                nodes.gather([nodes[int(word)] for word in words] or None)
            case "settle":
                nodes.settle()
            case "write":
                node.write(words[1], words[2])
            case "delete":
                (node.folder / words[1]).unlink()
            case "empty":
                shutil.rmtree(node.folder.joinpath(*words[1:]))
            case "wipe":
                shutil.rmtree(node.disk)
            case _:
                getattr(node, what)()
    assert [node.files() for node in nodes.alive] == [expected] * len(nodes.alive)


SHARDS = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as checkpoint
rank, folder, meeting = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
checkpoint.save({f"of rank {rank}": torch.full((4,), float(rank))}, checkpoint_id=f"{folder}/step_10.tmp")
os.rename(f"{folder}/step_10.tmp", f"{folder}/step_10")
os._exit(0)  # gloo's threads may abort an interpreter that ends by itself
"""
LOAD = """
import sys, torch, torch.distributed.checkpoint as checkpoint
state = {"of rank 0": torch.zeros(4), "of rank 1": torch.zeros(4)}
checkpoint.load(state, checkpoint_id=sys.argv[1], no_dist=True)
print([value.tolist() for value in state.values()])
"""


@pytest.mark.slow
def test_a_checkpoint_in_shards_survives_a_node_and_its_disk(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    nodes = cluster(3)
    nodes.gather()
    ranks = [
        subprocess.Popen([sys.executable, "-c", SHARDS, str(rank), node.folder, tmp_path / "meeting"])
        for rank, node in enumerate(nodes.nodes[:2])  # each on its own node
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    shards = nodes[0].files().keys() | nodes[1].files().keys()
    assert shards == {"step_10/.metadata", "step_10/__0_0.distcp", "step_10/__1_0.distcp"}
    nodes.settle()
    nodes[1].die()
    shutil.rmtree(nodes[1].disk)
    assert [each.lost + each.missing for each in nodes.gather()] == [[], []]
    assert [node.files().keys() for node in nodes.alive] == [shards] * 2
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, nodes[2].folder / "step_10"], capture_output=True, timeout=60, check=True
    )
    assert loaded.stdout.decode().splitlines()[-1] == "[[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]"


PEERS = {"a": "10.0.0.1:1", "b": "10.0.0.1:2", "c": "10.0.0.2:1", "d": "10.0.0.2:2", "e": "[fd00::1]:1"}


@pytest.mark.parametrize(("name", "peers", "copies", "expected"), [
    ("a", "abc", 2, "c"), ("b", "abc", 2, "c"), ("c", "abc", 2, "a"), ("a", "ab", 2, "b"),
    ("a", "abcde", 3, "ce"), ("a", "abcd", 3, "cb"), ("e", "abcde", 3, "ac"), ("a", "a", 2, ""),
    ("d", "abcd", 9, "abc"), ("b", "abcde", 1, ""),
])  # fmt: skip
def test_replica_holders_are_on_other_hosts_first(name: str, peers: str, copies: int, expected: str) -> None:
    found = replica_holders(name, {peer: PEERS[peer] for peer in peers}, copies)
    assert sorted(found) == sorted(expected)


# --- complete files -----------------------------------------------------------------------------------------


def test_a_renamed_file_goes_at_once_and_one_being_written_waits(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "STABLE_S", 600.0)  # it waits, however long the other one takes
    nodes = cluster(2)
    nodes.gather()
    with (nodes[0].folder / "slow.pt").open("wb", buffering=0) as slow:
        slow.write(b"half")
        draft = nodes[0].folder / "fast.pt.tmp"
        draft.write_bytes(b"all")
        time.sleep(0.03)  # the clock of files ticks every few ms
        draft.replace(nodes[0].folder / "fast.pt")
        wait_for(lambda: "fast.pt" in nodes[1].keeps("n0"))
        assert "slow.pt" not in nodes[1].keeps("n0")
        slow.write(b" and the rest")
    monkeypatch.setattr(replicas, "STABLE_S", 0.15)
    wait_for(lambda: "slow.pt" in nodes[1].keeps("n0"))
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {"slow.pt": "half and the rest", "fast.pt": "all"}


def test_a_folder_waits_for_the_file_in_it_that_is_still_written(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("step_1/a.pt", "a", mtime=1_700_000_000)
    (nodes[0].folder / "step_1/b.pt.tmp").write_text("half")
    nodes[0].write("other.pt", "other", mtime=1_700_000_000)
    wait_for(lambda: "other.pt" in nodes[1].keeps("n0"))
    time.sleep(0.3)
    assert "step_1/a.pt" not in nodes[1].keeps("n0")
    nodes[0].write("step_1/b.pt", "b", mtime=1_700_000_000)
    wait_for(lambda: len(nodes[0].kinds("replica-kept")) == 2)
    kept = nodes[0].kinds("replica-kept")[1]["files"]
    assert kept == ["step_1/a.pt", "step_1/b.pt"]


def test_what_changes_under_the_copy_is_discarded_and_copied_later(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    original, changed = agent_wire.Wire.send_bytes, []

    def change_first(self: agent_wire.Wire, file: Any, size_bytes: int) -> None:
        if not changed:
            changed.append(True)
            with (nodes[0].folder / "last.pt").open("r+b") as target:  # in place: same inode, same size
                target.write(b"B")
        original(self, file, size_bytes)

    monkeypatch.setattr(agent_wire.Wire, "send_bytes", change_first)
    nodes[0].write("last.pt", b"A" * 100_000)
    wait_for(lambda: "last.pt" in nodes[1].keeps("n0") and len(nodes[1].blobs()) == 1)
    assert changed
    assert nodes[1].blobs()[0].read_bytes() == b"B" + b"A" * 99_999


# --- deletions ----------------------------------------------------------------------------------------------


def test_a_copy_is_on_the_disk_before_a_listing_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a power failure would lose, on all nodes at once, the order of the calls shows."""
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        calls.append(
            f"sync {'blobs' if Path(f'/proc/self/fd/{descriptor}').readlink().name == 'blobs' else 'file'}"
        )
        fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        calls.append(f"rename to {target.name}")
        return replace(path, target)

    class Sends:
        def ask(self, request: Any) -> dict[str, int]:
            return {"size_bytes": 4}

        def receive_bytes(self, size_bytes: int, file: Any) -> str:
            file.write(b"good")
            return sha256

    sha256 = hashlib.sha256(b"good").hexdigest()
    copies = Copies(tmp_path / "kept")
    version = Version((0, 1), 1, sha256, "", 4)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    copies.receive(Sends(), version)  # type: ignore[arg-type]
    assert calls == ["sync file", f"rename to {sha256}"]
    copies.keep(Listing("n1", (0, 1), {"a.pt": version}, 1))
    assert calls[2:5] == ["sync blobs", "sync file", "rename to n1.json"]


class Answers:
    """The other side, which sends a content; of another size than it was asked for, if told."""

    def __init__(self, content: bytes, size_bytes: int | None = None) -> None:
        self.content = content
        self.size_bytes = len(content) if size_bytes is None else size_bytes

    def ask(self, request: Any) -> dict[str, int]:
        return {"size_bytes": self.size_bytes}

    def receive_bytes(self, size_bytes: int, file: Any) -> str:
        file.write(self.content)
        return hashlib.sha256(self.content).hexdigest()


def test_a_file_that_comes_in_another_size_than_its_listing_says_is_not_received(tmp_path: Path) -> None:
    """Blocks are taken for that size alone."""
    copies = Copies(tmp_path / "kept")
    version = Version((0, 1), 1, hashlib.sha256(b"good").hexdigest(), "", 4)
    with pytest.raises(ConnectionError, match="in another size"):
        copies.receive(Answers(b"good", 5), version)  # type: ignore[arg-type]
    assert not list((tmp_path / "kept" / "blobs").iterdir())


@pytest.mark.parametrize("is_there", [True, False])
def test_on_a_full_disk_a_copy_takes_the_room_of_what_was_set_aside(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, content = Copies(tmp_path / "kept"), b"good"
    if is_there:
        (copies.aside((0, 1)) / "last.pt").write_text("earlier")
    allocate = os.posix_fallocate

    def full(*arguments: int) -> None:
        if list(tmp_path.glob("kept/set-aside/*/*")) or not is_there:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    sha256 = hashlib.sha256(content).hexdigest()
    with contextlib.nullcontext() if is_there else pytest.raises(OSError, match="No space left"):
        copies.receive(Answers(content), Version((0, 1), 1, sha256, "", 4))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.glob("kept/blobs/*")] == [sha256] * is_there


def test_a_file_that_is_written_anew_with_the_same_content_is_as_old_as_it_was(tmp_path: Path) -> None:
    """Else it would win over what another node has written since, and has."""
    (tmp_path / "a.pt").write_text("x")
    files = UserFiles(tmp_path, tmp_path / "state.json")
    for attempt, content, written in ((1, "x", 1), (2, "x", 1), (3, "y", 3)):
        files.entered = (0, attempt)
        (tmp_path / "a.pt").write_text(content)
        os.utime(tmp_path / "a.pt", (attempt, attempt))
        files.update(scan(tmp_path))
        version = files.known["a.pt"].version
        assert (version.written, version.mtime_ns) == ((0, written), attempt * 10**9)


def test_a_copy_that_a_listing_which_cannot_be_read_may_name_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = Version((0, 1), 1, hashlib.sha256(b"good").hexdigest(), "", 4)
    before = Copies(tmp_path / "kept")
    (tmp_path / "kept/blobs" / version.sha256).write_bytes(b"good")
    for node in ("n1", "n2"):
        before.keep(Listing(node, (0, 1), {"a.pt": version}, 1))
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "n2.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    after = Copies(tmp_path / "kept")
    after.keep(Listing("n1", (0, 1), {}, 2))
    assert after.path_of(version.sha256)


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

    monkeypatch.setattr(agent_wire.Wire, "send_bytes", fail)
    (nodes[0].folder / "step_1.pt").unlink()
    nodes[0].write("step_2.pt", "2")
    assert tried.wait(PATIENT_S)
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
