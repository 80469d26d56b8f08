"""User files survive their nodes: real sockets, real files, several agents' worth of Replicas in this process."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodekit.deploy.agent import agent_wire, descriptors
from nodekit.deploy.agent.agent import Agent
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.replicas import replicas
from nodekit.deploy.agent.replicas.replica_copies import Copies
from nodekit.deploy.agent.replicas.replica_files import Listing, UserFiles, Version, is_allowed, scan
from nodekit.deploy.agent.replicas.replica_gather import Gathered, agree
from nodekit.deploy.agent.replicas.replicas import Replicas, replica_holders
from nodekit.deploy.agent.snapshot_sharing import share_snapshots
from nodekit.deploy.agent.unfit import Unfit, Unreached
from nodekit.deploy.host import ports
from nodekit.inventory import hostlists
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.snapshot import Snapshots

TOKEN = "the run's token"
PATIENT_S = 60.0
"""For what comes at once, unless the machine stands still: with 5 s, a member that is here is taken for silent then."""


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

    def keeps(self, owner: str) -> dict[str, str]:
        """What this node could give back of `owner`'s files: name → content."""
        path = self.disk / "kept" / "listings" / f"{owner}.json"
        listed = json.loads(path.read_text())["files"] if path.exists() else {}
        kept = {}
        for name, (_, _, sha256, _, _) in listed.items():
            for copy in [self.disk / "kept" / "blobs" / sha256, self.folder / name]:
                if copy.is_file() and hashlib.sha256(copy.read_bytes()).hexdigest() == sha256:
                    kept[name] = copy.read_text(errors="replace")
        return kept


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
        self,
        nodes: Iterable[Node] | None = None,
        silent: dict[str, str] | None = None,
        deadline_s: float = PATIENT_S,
    ) -> list[Gathered]:
        """All given nodes enter the next attempt together; `silent` are endpoints that say nothing."""
        self.attempt += 1
        members = list(nodes if nodes is not None else self.alive)
        peers = self.peers(members) | (silent or {})
        with ThreadPoolExecutor(len(members)) as pool:
            return list(
                pool.map(lambda node: node.alive.gather(peers, (1, self.attempt), deadline_s), members)
            )

    def enter(self) -> None:
        """All living nodes enter the next attempt without giving each other anything."""
        self.attempt += 1
        for node in self.alive:
            node.alive.enter(self.peers(self.alive), (1, self.attempt))

    @staticmethod
    def peers(nodes: Iterable[Node]) -> dict[str, str]:
        """Name → endpoint."""
        return {node.name: node.alive.endpoint for node in nodes}

    def settle(self) -> None:
        """All living nodes have copied everything to their living targets."""
        dead = {node.name for node in self.nodes if node.replicas is None}
        for node in self.alive:
            pusher = node.alive._pusher
            if pusher and dead & {target.node for target in pusher._targets}:
                node.alive.finish_copying(0.3)
            else:
                assert node.alive.finish_copying(PATIENT_S), node.said


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "POLL_S", 0.02)
    monkeypatch.setattr(replicas, "STABLE_S", 0.15)
    connect = agent_wire.connect

    def patient(
        endpoint: str, token: str, timeout_s: float = PATIENT_S, announce: Callable[..., object] | None = None
    ) -> agent_wire.Wire:
        return connect(endpoint, token, timeout_s, announce)

    monkeypatch.setattr(agent_wire, "CONNECT_S", PATIENT_S)
    monkeypatch.setattr(agent_wire, "connect", patient)


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
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("replicas")] == []


def wait_for(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENT_S
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
    assert sorted(gathered.set_aside) == ["last.pt", "step_900.pt"]
    assert nodes[0].aside() == {
        "0001.0004/last.pt": "newest by its time",
        "0001.0004/step_900.pt": "of a future that was not",
    }
    assert nodes[1].aside() == nodes[2].aside() == {}


def test_what_cannot_be_set_aside_keeps_a_node_out_and_does_not_win(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("step_1.pt", "same")
    nodes.settle()
    nodes.gather()
    nodes[0].die()
    nodes[0].write("step_900.pt", "of a future that was not")
    nodes.gather()
    nodes[1].write("step_2.pt", "new")
    nodes.settle()
    for _ in range(2):
        nodes[0].start()
        (nodes[0].disk / "kept" / "set-aside").write_text("")  # no folder can be made here, as on a full disk
        with pytest.raises(OSError, match="set-aside"):
            nodes.gather()
        nodes[0].die()
    (nodes[0].disk / "kept" / "set-aside").unlink()
    nodes[0].start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"step_1.pt": "same", "step_2.pt": "new"}] * 3
    assert list(nodes[0].aside().values()) == ["of a future that was not"]


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
    assert nodes[0].kinds("replicas-gathered")[-1]["set_aside"] == ["last.pt"]


def test_of_what_a_node_has_told_the_last_counts_also_where_its_clock_is_set_back(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", PATIENT_S)
    nodes = cluster(3, copies=3)
    nodes.gather()
    nodes[0].write("step_1.pt", "1")
    nodes.settle()
    nodes[1].die()
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
    nodes[0].write("step_2.pt", "2")
    wait_for(lambda: "step_2.pt" in nodes[2].keeps("n0"))
    nodes[0].die()
    nodes[1].start()
    nodes.gather()
    assert [node.files() for node in nodes.alive] == [{"step_1.pt": "1", "step_2.pt": "2"}] * 2


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


Fails = Callable[..., None]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Makes reading a file of a name, or listing a folder of that name, fail so many times."""
    monkeypatch.setattr(commit, "_PAUSE_S", 0.1)
    left: dict[str, list[int]] = {}

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int):
                for name, numbers in left.items():
                    if Path(path).name.startswith(name) and numbers:
                        raise OSError(numbers[0], os.strerror(numbers.pop()), str(path))
            return real(path, *args, **kwargs)

        return call

    for owner, name in ((os, "open"), (os, "scandir"), (Path, "read_bytes"), (Path, "iterdir")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))

    def fail(name: str, times: int, number: int = errno.EIO) -> None:
        # What fails a few times is waited for, however long the machine stands still meanwhile.
        monkeypatch.setattr(commit, "RETRY_S", PATIENT_S if times < 10 else 1.0)
        left[name] = [number] * times

    return fail


@pytest.mark.parametrize("what", ["n0.json", "listings"])
def test_listings_that_cannot_be_read_cost_no_copy(
    cluster: Callable[..., Cluster], fails: Fails, what: str
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("ckpt.pt", "the only copy of a lost node's")
    nodes.settle()
    nodes[0].die()
    shutil.rmtree(nodes[0].disk)
    nodes[1].die()
    fails(what, 3)
    nodes[1].start()
    nodes[0].start()
    gathered = nodes.gather()
    assert [each.lost + each.missing for each in gathered] == [[], []]
    assert nodes[0].files() == {"ckpt.pt": "the only copy of a lost node's"}


@pytest.mark.parametrize("what", ["n0.json", "snapshots", "state.json"])
def test_what_cannot_be_read_keeps_a_node_out_and_changes_nothing(
    cluster: Callable[..., Cluster], fails: Fails, what: str
) -> None:
    nodes = cluster(2)
    nodes.gather()
    for node in nodes.nodes:
        node.write(f"{node.name}.pt", node.name)
    nodes.settle()
    before = sorted(nodes[1].disk.rglob("*"))
    nodes[1].die()
    fails(what, 999)
    with pytest.raises(OSError, match=what):
        nodes[1].start().gather({"n1": nodes[1].alive.endpoint}, (1, 9), 1)
    fails(what, 0)
    assert sorted(nodes[1].disk.rglob("*")) == before
    nodes[1].die()
    nodes[1].start()
    nodes.attempt = 9
    nodes.gather()
    assert nodes[0].files() == nodes[1].files() == {"n0.pt": "n0", "n1.pt": "n1"}


def test_a_new_file_that_cannot_be_read_is_not_passed_over(
    cluster: Callable[..., Cluster], fails: Fails
) -> None:
    (node,) = (nodes := cluster(1)).nodes
    nodes.gather()
    node.write("new.pt", "new")
    fails("new.pt", 3)
    nodes.gather()
    assert node.files() == {"new.pt": "new"}
    node.die()
    node.start()
    node.write("newer.pt", "newer")
    fails("newer.pt", 999)
    with pytest.raises(OSError, match=r"newer\.pt: Input/output error"):
        nodes.gather()
    fails("newer.pt", 0)
    nodes.gather()
    assert node.files() == {"new.pt": "new", "newer.pt": "newer"}


def test_a_copy_that_cannot_be_read_for_a_moment_is_not_removed(
    cluster: Callable[..., Cluster], fails: Fails
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("ckpt.pt", "x")
    nodes.settle()
    nodes[0].die()
    (blob,) = (nodes[1].disk / "kept" / "blobs").iterdir()
    (nodes[1].folder / "ckpt.pt").unlink(missing_ok=True)
    fails(blob.name, 999)
    (gathered,) = nodes.gather([nodes[1]], {"n0": "127.0.0.1:1"}, deadline_s=0.5)
    assert gathered.lost == ["ckpt.pt"]
    fails(blob.name, 0)
    assert blob.exists()
    (gathered,) = nodes.gather([nodes[1]], {"n0": "127.0.0.1:1"}, deadline_s=0.5)
    assert nodes[1].files() == {"ckpt.pt": "x"}


def test_a_newer_kits_listing_is_refused_by_name_and_its_copies_are_kept(
    cluster: Callable[..., Cluster], fails: Fails
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("ckpt.pt", "x")
    nodes.settle()
    nodes[1].die()
    (listing,) = (nodes[1].disk / "kept" / "listings").iterdir()
    (blob,) = (nodes[1].disk / "kept" / "blobs").iterdir()
    fields = json.loads(listing.read_bytes())
    fields["files"]["ckpt.pt"].append("what it is compressed with")
    listing.write_text(json.dumps(fields))
    with pytest.raises(OSError, match=f"{listing} is no listing of copies that this version of kit knows"):
        nodes[1].start().gather({"n1": nodes[1].alive.endpoint}, (1, 9), 1)
    assert blob.exists()


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
    monkeypatch.setattr("nodekit.deploy.host.processes.boot_id", lambda: "another boot")
    nodes[0].start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "whole"}] * 2


def test_a_transfer_cut_in_the_middle_leaves_nothing_visible(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    cut = threading.Event()

    def send_half(self: agent_wire.Wire, file: Any, size_bytes: int) -> None:
        self._sock.sendfile(file, 0, size_bytes // 2)
        cut.set()
        raise ConnectionResetError("killed")

    monkeypatch.setattr(agent_wire.Wire, "send_bytes", send_half)
    nodes[0].write("last.pt", b"z" * 5_000_000)
    assert cut.wait(PATIENT_S)
    nodes[0].die()
    wait_for(lambda: nodes[1].blobs() == [])
    nodes.gather()
    assert nodes[1].files() == {}


@pytest.mark.parametrize("kind", ["once", "always in one file", "for good"])
def test_a_connection_that_breaks_in_a_gather_leaves_no_file_behind(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    nodes = cluster(2)
    nodes.gather([nodes[0]])
    for name in "abc":
        nodes[0].write(name, name * 1000)
    send, connect = agent_wire.Wire.send_bytes, agent_wire.connect
    cuts = []

    def cut(self: agent_wire.Wire, file: Any, size_bytes: int) -> None:
        is_b = os.pread(file.fileno(), 1, 0) == b"b"
        if is_b if kind == "always in one file" else not cuts:
            cuts.append(self)
            self._sock.sendfile(file, 0, size_bytes // 2)
            raise ConnectionResetError("cut")
        send(self, file, size_bytes)

    def connecting(*args: Any) -> agent_wire.Wire:
        if cuts and kind == "for good":
            raise ConnectionRefusedError("the host is gone")
        return connect(*args)

    monkeypatch.setattr(agent_wire.Wire, "send_bytes", cut)
    monkeypatch.setattr(agent_wire, "connect", connecting)
    gathered = nodes.gather()[1]
    assert cuts
    wanted = {"once": "abc", "always in one file": "ac", "for good": ""}[kind]
    assert sorted(nodes[1].files()) == list(wanted)
    assert gathered.lost == (["b"] if kind == "always in one file" else [])
    assert sorted(gathered.missing) == (list("abc") if kind == "for good" else [])
    assert gathered.gone == (["n0"] if kind == "for good" else [])


@pytest.mark.parametrize("gone", [[], ["n0"]])
def test_a_node_that_cannot_have_what_others_saved_says_whether_they_may_be_lost(
    tmp_path: Path, gone: list[str]
) -> None:
    found = Gathered(missing=["step_1.pt"], silent={"n0": "Connection refused"}, gone=gone)
    here = Mock(spec=Replicas, gather=Mock(return_value=found))
    members = tuple({"name": name, "replicas": name, "has_files": True} for name in ("n0", "n1"))
    formed = Formed(
        round=1, group_rank=1, members=members, store=Mock(), master_addr="127.0.0.1", master_port=1
    )
    with pytest.raises(Unfit, match=r"step_1\.pt could not be written") as raised:
        share_snapshots(here, tmp_path, formed, 0)
    assert (
        isinstance(raised.value, Unreached) == ("n0 (Connection refused)" in str(raised.value)) == bool(gone)
    )


@pytest.mark.parametrize("lost_at", [3, None])
def test_a_member_that_cannot_be_reached_is_waited_for_until_it_is_missed_or_not(
    monkeypatch: pytest.MonkeyPatch, lost_at: int | None
) -> None:
    monkeypatch.setattr("nodekit.deploy.agent.agent.LOST_S", 0.0)
    asked = itertools.count(1)
    rendezvous = Mock(has_lost=lambda _: next(asked) == lost_at)
    here = Mock(_spec=Mock(keep_alive_s=0.1, lost_after=3))
    began = time.monotonic()
    assert Agent._loses_one(here, rendezvous, Mock()) == (lost_at is not None)
    assert (time.monotonic() - began >= 0.3) == (lost_at is None)
    assert here._pause_briefly.called  # a stop is heard meanwhile


@pytest.mark.parametrize("what", ["call", "draft", "look"])
def test_a_node_without_descriptors_takes_nobody_for_silent(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    nodes = cluster(2)
    nodes.gather([nodes[0]])
    nodes[0].write("step_1.pt", "1")
    used_up = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    connect = agent_wire.connect

    def calling(endpoint: str, *args: Any) -> agent_wire.Wire:
        if endpoint == nodes[0].alive.endpoint:
            raise used_up
        return connect(endpoint, *args)

    with monkeypatch.context() as patch:
        if what == "call":
            patch.setattr(agent_wire, "connect", calling)
        elif what == "draft":
            patch.setattr(Copies, "room_for", Mock(side_effect=used_up))
        else:
            patch.setattr(os, "scandir", Mock(side_effect=used_up))
        with pytest.raises(OSError, match="Too many open files") as raised:
            nodes.gather()
        assert descriptors.are_used_up(raised.value)  # that is waited out
    nodes.gather()
    assert nodes[1].files() == {"step_1.pt": "1"}


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
    assert nodes[0].alive.finish_copying(PATIENT_S)
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

        def call(self: UserFiles, *args: Any, **how: Any) -> Any:
            if self.folder == nodes[2].folder:
                seen.append(name)
                if len(seen) == moment:
                    raise Killed
            return original(self, *args, **how)

        monkeypatch.setattr(UserFiles, name, call)

    for name in ("place", "remove", "save"):
        dying(name)
    try:
        nodes.gather()
    except Killed:
        assert len(seen) == moment
    nodes[2].die()
    nodes[2].start()
    nodes.gather()
    assert len(seen) >= moment, "it was not killed"
    assert [node.files() for node in nodes.alive] == [{"a.pt": "a, newer", "b/c.pt": "b/c.pt"}] * 2
    assert "stale" in nodes[2].aside().values()


# --- hostile and broken company -----------------------------------------------------------------------------


def test_who_does_not_know_the_token_gets_nothing(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(1)
    with pytest.raises(agent_wire.WrongToken):
        agent_wire.connect(nodes[0].alive.endpoint, "another token")
    wait_for(lambda: nodes[0].kinds("replica-refused"))
    agent_wire.connect(nodes[0].alive.endpoint, TOKEN).close()


def test_the_token_does_not_travel_and_a_changed_frame_is_refused() -> None:
    heard = bytearray()

    def pair() -> tuple[socket.socket, socket.socket]:
        with ports.listen("127.0.0.1") as listener:
            return socket.create_connection(listener.getsockname()), listener.accept()[0]

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        (a, b), (c, d) = pair(), pair()  # a says something to d, by way of b and c
        client, server = (stack.enter_context(agent_wire.Wire(each)) for each in (a, d))
        for each in (b, c):
            stack.enter_context(each)
        proving = [pool.submit(w.prove, TOKEN, is_client=w is client) for w in (client, server)]
        for source, sink in [(b, c), (c, b), (b, c), (c, b)]:
            heard += (said := source.recv(64))
            sink.sendall(said)
        for each in proving:
            each.result()
        for op, is_changed in [("list", False), ("fetch", True)]:
            client.send({"op": op})
            heard += (said := b.recv(1024))
            c.sendall(said.replace(b"fetch", b"fetcH"))
            if is_changed:
                with pytest.raises(ConnectionError, match="changed on its way"):
                    server.receive()
            else:
                assert server.receive() == {"op": op}
    assert b"list" in heard
    assert TOKEN.encode() not in heard


def test_a_call_to_a_lost_host_is_not_waited_for(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    with contextlib.ExitStack() as stack:
        lost = stack.enter_context(socket.socket())
        lost.bind(("127.0.0.1", 0))
        lost.listen(0)
        for _ in range(3):  # with its queue full, it drops what comes, as a host does whose cable was pulled
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(lost.getsockname())
        pusher = nodes[0].alive._pusher
        assert pusher is not None
        pusher._targets[0].endpoint = f"127.0.0.1:{lost.getsockname()[1]}"
        nodes[0].write("a.pt", "a")  # only now: it goes at once
        wait_for(lambda: pusher._wire is not None)
        time.sleep(0.1)
        assert pusher._wire is not None, "it is refused instead"
        started = time.monotonic()
        nodes[0].die()
        assert time.monotonic() - started < PATIENT_S / 2, "the call itself would last for twice as long"
        assert not pusher._thread.is_alive()


def test_a_large_file_goes_in_pieces(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    with (nodes[0].folder / "big.pt").open("wb") as file:
        file.truncate(48 << 20)
    tracemalloc.start()
    try:
        nodes.settle()
        nodes[0].die()
        nodes.gather()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (nodes[1].folder / "big.pt").stat().st_size == 48 << 20


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
    "\ud800",
    "fence",
    ".tmp",
]


def keep(name: str, data: bytes, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    """What a node that keeps to no rules might ask another to keep for it."""
    version = [[1, attempt], 1, hashlib.sha256(data).hexdigest(), "", len(data)]
    listing = {"node": "n0", "attempt": [1, attempt], "told_ns": time.time_ns(), "files": {name: version}}
    return {"op": "keep", "attempt": [1, attempt], "listing": listing | changes}


def call(node: Node) -> agent_wire.Wire:
    return agent_wire.connect(node.alive.endpoint, TOKEN)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_refused(cluster: Callable[..., Cluster], name: str) -> None:
    nodes = cluster(2)
    nodes.gather()
    with call(nodes[1]) as wire, pytest.raises(ConnectionError):
        wire.ask(keep(name, b"owned"))
    with contextlib.suppress(ValueError):
        assert not is_allowed(name)
    assert nodes[1].keeps("n0") == {}


@pytest.mark.parametrize("request_", [
    {"op": "fetch", "sha256": "../state.json"},
    {"op": "fetch", "sha256": "listings/n0.json"},
    {"op": "fetch"},
    {"op": "exec"},
    keep("a", b"x", node="../../x" * 40),
    keep("a", b"x", files={"a": [[1, 1], 0, "../../x", "", 1]}),
    keep("a", b"x", files={"a": [[1, 1], 0, "0" * 64, "", -1]}),
    keep("a", b"x", files={"a": [[1, 1], 0, "0" * 64, "", 1 << 70]}),
    keep("a", b"x", files={"a": [[1, 1], 0, "", "../../etc/passwd", 0]}),
])  # fmt: skip
def test_a_hostile_request_ends_the_connection(
    cluster: Callable[..., Cluster], request_: dict[str, Any]
) -> None:
    nodes = cluster(2)
    nodes.gather()
    with call(nodes[0]) as wire, pytest.raises(ConnectionError):
        wire.ask(request_)
    with call(nodes[0]) as wire:
        assert wire.ask({"op": "fetch", "sha256": "0" * 64}) == {}  # and it still serves


@pytest.mark.parametrize(("node", "sent", "is_kept"), [
    ("n0", b"good", True), ("../../../escaped", b"good", True), ("n0", b"evil", False),
])  # fmt: skip
def test_only_the_content_that_was_named_is_kept_and_only_where_copies_are(
    cluster: Callable[..., Cluster], tmp_path: Path, node: str, sent: bytes, is_kept: bool
) -> None:
    nodes = cluster(2)
    nodes.gather()
    with call(nodes[1]) as wire:
        asked = wire.ask(keep("a.pt", b"good", node=node))
        assert asked == {"op": "fetch", "sha256": hashlib.sha256(b"good").hexdigest()}
        wire.send({"size_bytes": len(sent)})
        wire._sock.sendall(sent)
        assert wire.receive() == {"is_kept": is_kept}
    assert [path.read_bytes() for path in nodes[1].blobs()] == [sent] * is_kept
    assert [path for path in tmp_path.rglob("*escaped*") if path.parent.name != "listings"] == []


def test_a_zombie_of_an_older_attempt_is_refused(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes.gather([nodes[1]])
    nodes[0].write("last.pt", "by the zombie")
    wait_for(lambda: any("over" in each["reason"] for each in nodes[0].kinds("replica-failed")))
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
        for _ in range(3):  # of which the machine may stand still in one
            started = time.monotonic()
            gathered = nodes.gather(silent={"mute": f"127.0.0.1:{mute.getsockname()[1]}"}, deadline_s=1)
            took_s = time.monotonic() - started
            if took_s < 5 and [list(each.silent) for each in gathered] == [["mute"], ["mute"]]:
                break
        assert took_s < 5, "nobody else would end it"
    assert [list(each.silent) for each in gathered] == [["mute"], ["mute"]]
    assert [node.files() for node in nodes.nodes] == [{"a.pt": "a"}] * 2


@pytest.mark.parametrize("num_attempts_before", [0, 1])
def test_a_member_that_comes_late_is_waited_for(
    cluster: Callable[..., Cluster], num_attempts_before: int
) -> None:
    nodes = cluster(2, copies=1)  # what is new is on the late one alone
    for _ in range(num_attempts_before):
        nodes.gather()
    nodes[1].write("a.pt", "a")
    peers = nodes.peers(nodes.nodes)
    attempt = (1, nodes.attempt + 1)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(nodes[0].alive.gather, peers, attempt, PATIENT_S)
        time.sleep(1.2)
        nodes[1].alive.gather(peers, attempt, PATIENT_S)
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
                pool.submit(node.alive.gather, peers, (1, nodes.attempt), PATIENT_S)
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
    monkeypatch.setattr(replicas, "RETRY_S", 0.05)
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
        assert not nodes[0].alive.finish_copying(1)
        assert len(nodes[0].kinds("replica-failed")) == len(nodes[1].kinds("replica-failed")) == 1
        assert nodes[1].keeps("n0") == {"small.pt": "s"}
        gathered = nodes.gather()
        missing = ["big.pt"] if kind == "full" else ["big.pt", "small.pt"]
        assert [sorted(each.missing) for each in gathered] == [[], missing]
        assert nodes[0].files().keys() == {"small.pt", "big.pt"}
        assert nodes[1].files().keys() == {"small.pt", "big.pt"} - set(missing)
        subprocess.run(["mount", "-o", "remount,rw,size=16m", str(disk)], check=True)
        nodes.settle()
        assert nodes[1].keeps("n0").keys() == {"small.pt", "big.pt"}
        nodes.gather()
        assert nodes[1].files() == nodes[0].files()
        nodes[1].die()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- who has a say ------------------------------------------------------------------------------------------


def version(text: str, written: int, mtime: int = 0) -> Version:
    return Version((1, written), mtime, hashlib.sha256(text.encode()).hexdigest() if text else "")


def source(node: str, attempt: int, number: int = 0, **files: Version) -> Listing:
    return Listing(node, (1, attempt), files, number)


AGREEMENTS = {
    "the attempt a version is written in counts more than its time": (
        [source("a", 5, x=version("new", 5, mtime=1)), source("b", 5, x=version("old", 4, mtime=9))],
        [],
        {"x": "new"},
    ),
    "a node that was away has no say": (
        [source("a", 6, x=version("v", 6)), source("b", 5, y=version("stale", 5, 9))],
        [],
        {"x": "v"},
    ),
    "copies for a node that is absent count like the node": (
        [source("b", 5)],
        [source("a", 5, x=version("v", 5))],
        {"x": "v"},
    ),
    "a member's own word counts more than what others keep of it": (
        [source("a", 5, x=version("", 5), y=version("v", 5))],
        [source("a", 5, 99, x=version("v", 5), y=version("v", 5))],
        {"y": "v"},
    ),
    "unless it came back with less": (
        [source("a", -1, y=version("leftover", -1)), source("b", 5)],
        [source("a", 5, x=version("v", 5))],
        {"x": "v"},
    ),
    "of several listings kept for a node the last": (
        [source("b", 5), source("c", 5)],
        [source("a", 5, 2, x=version("new", 5, 1)), source("a", 5, 1, x=version("old", 5, 2))],
        {"x": "new"},
    ),
    "who missed the last agreement speaks of this attempt alone": (
        [source("a", 6, x=version("v", 5)),
         source("b", 3, x=version("w", 3, 9), y=version("mine", 6), z=version("s", 3))],
        [],
        {"x": "v", "y": "mine"},
    ),
    "a deletion counts until the file is written again": (
        [source("a", 5, x=version("", 5, 3), y=version("", 5, 3), k=version("k", 1)),
         source("b", 5, x=version("v", 2, 9), y=version("again", 5, 4))],
        [],
        {"y": "again", "k": "k"},
    ),
    "nothing older than a deletion is there to fall back to": (
        [source("a", 5, y=version("again", 5, 4)), source("b", 5, y=version("", 5, 3), k=version("k", 1)),
         source("c", 5, y=version("first", 2))],
        [],
        {"y": "again", "k": "k"},
    ),
    "of a file and a folder of one name the folder stays": (
        [source("a", 5, s=version("file", 5, 2)), source("b", 5, **{"s/x": version("in", 5, 1)})],
        [],
        {"s/x": "in"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", AGREEMENTS)
def test_agreement(story: str) -> None:
    own, kept, wanted = AGREEMENTS[story]
    agreed = agree(own, kept)[1]
    contents = {
        name: [each.sha256 for each in versions] for name, versions in agreed.items() if versions[0].sha256
    }
    assert {name: shas[0] for name, shas in contents.items()} == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in wanted.items()
    }
    assert agree(reversed(own), reversed(kept))[1] == agreed
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


def play(
    root: Path, num_nodes: int, copies: int, steps: list[tuple[str, int, str]], *, settle_s: float = 5.0
) -> list[str]:
    """Returns which of the promises were put to the test.

    A node that has returned is waited for in vain: after `settle_s`, what has not been copied is not counted on.
    """
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
            is_done = node.alive.finish_copying(
                settle_s if all(nodes[int(each[1:])].replicas for each in targets) else 0.3
            )
            for name, truth in truths.items():
                if truth.by == node.name and truth.attempt == nodes.attempt:
                    keeping = [
                        each for each in nodes.alive if each.keeps(node.name).get(name) == truth.content
                    ]
                    truth.known_to |= {each.name for each in keeping if truth.content is not None}
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


@settings(max_examples=30)
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
    assert set(play(tmp_path, 3, 2, steps, settle_s=PATIENT_S)) == {"kept", "deleted", "writer gone"}
