"""Sharded snapshots on nodes with folders of their own: what each keeps, loses, and is sent at a start."""

import hashlib
import json
import os
import random
import re
import shutil
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import warm_python
from free_ports import free_port
from test_training import started

from nodekit.training import Snapshots, gather
from nodekit.training.snapshots.files.found import NoneLoads
from nodekit.training.snapshots.parts import keepers
from nodekit.training.snapshots.peers import Transfer, _arriving, _turns

pytestmark = pytest.mark.slow

PROGRAM = '''
import json, logging, os, signal, sys, torch
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from nodekit.training import Snapshots, World, newest_of_all
from nodekit.training.snapshots import parts, peers, sharded
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.sharded import ShardedSnapshots
from nodekit.training.snapshots.files.shards import files_of, read_into
peers._CHUNK_BYTES, commit.RETRY_S = 1000, 0.3
logging.basicConfig()
fault, verify, place, read_part = os.environ.get("FAULT"), parts.verify, commit.place, peers.read_part
sync = commit.sync
if "HOSTS" in os.environ:
    sharded.gethostname = lambda: "host" + os.environ["GROUP_RANK"]

def verified(folder, manifest, name):
    if (folder / "cannot be read").exists():
        raise OSError(5, "Input/output error", name)
    verify(folder, manifest, name)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def placed(temporary, file, name, **more):
    if fault == "manifest" and name.endswith("3.json"):
        die()
    place(temporary, file, name, **more)

def read(part, path, start):
    if fault == "copy" and "s000000003" in str(path) and start:
        die()
    read_part(part, path, start)

def synced(path):
    if fault == "sync" and "s000000003" in str(path) or fault == "first":
        die()
    if fault == "disk" and any(f"s00000000{step}" in str(path) for step in (3, 4, 5)):
        raise OSError(5, "Input/output error", str(path))
    sync(path)

def state(step, mesh):
    weight = distribute_tensor(torch.arange(2100.0).reshape(700, 3) + step, mesh, [Shard(0)])
    return {
        "model": {"weight": weight, "buffer": torch.full((4,), float(step))},
        "optimizer": {"state": {0: {"exp_avg": weight * 2}}, "param_groups": [{"params": [0]}]},
        "step": step,
    }

def load(found, mesh):
    """As an engine does: whether all tensors are those of the step."""
    wanted, step = state(0, mesh), found.state["step"]
    tensors = {"model.weight": wanted["model"]["weight"], "model.buffer": wanted["model"]["buffer"]}
    tensors["optimizer.state.0.exp_avg"] = wanted["optimizer"]["state"][0]["exp_avg"]
    if found.shards is None:  # the state has all of them
        tensors = {**found.state["model"], **found.state["optimizer"]["state"][0]}
        return torch.equal(tensors["weight"] * 2, tensors["exp_avg"]) and tensors["weight"][0, 0] == step
    found.fetch(files_of(found.shards, tensors))
    read_into(found.shards, tensors)
    whole = torch.arange(2100.0).reshape(700, 3) + step
    pairs = [(tensors["model.weight"].full_tensor(), whole), (tensors["model.buffer"], torch.full((4,), float(step)))]
    pairs.append((tensors["optimizer.state.0.exp_avg"].full_tensor(), whole * 2))
    return all(torch.equal(*pair) for pair in pairs)

with World.from_env() as world:
    mesh = init_device_mesh("cpu", (world.world_size,))
    if world.rank == 2:
        parts.verify, commit.place, peers.read_part, sharded.sync = verified, placed, read, synced
    for scenario in sorted(Path(sys.argv[2]).iterdir()):
        snapshots = Snapshots(scenario / f"node{world.node_rank}", generation=0, leave_shards="WHOLE" not in os.environ)
        said = {"scenario": scenario.name}
        if sys.argv[1] == "save":
            snapshots = ShardedSnapshots(snapshots, world)
            steps = range(1, 1 + int(os.environ.get("STEPS", 3)))
            said["saved"] = [snapshots.save(state(step, mesh), step=step) is not None for step in steps]
        else:
            try:
                found = newest_of_all(snapshots, world)
                said |= {"step": found.state["step"], "is right": bool(load(found, mesh))}
            except OSError as error:
                said["refused"] = f"{type(error).__name__}: {error}"
            said["damaged"] = sorted(snapshots._damaged)
        print(json.dumps(said), flush=True)
'''
NODES = [0, 0, 1, 2]
"""The node of each rank."""
OWN = [["__0_0", "__1_0"], ["__2_0"], ["__3_0"]]
KEPT = [["__3_0"], ["__0_0", "__1_0"], ["__2_0"]]
"""By node: what it writes itself, and what it keeps for the one before."""


def run(
    program: Path, what: str, folder: Path, nodes: list[int], code: int | None = 0, **extra: Any
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """What each rank has found by scenario, and all that it has said."""
    port = free_port()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(
                    [warm_python.program(), str(program), what, str(folder)],
                    RANK=rank, WORLD_SIZE=len(nodes), LOCAL_RANK=rank - nodes.index(node),
                    LOCAL_WORLD_SIZE=nodes.count(node), GROUP_RANK=node, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                    **extra,
                )
            )
            for rank, node in enumerate(nodes)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert code is None or {process.returncode for process in processes} == {code}, "\n".join(outputs)
    said: dict[str, list[dict[str, Any]]] = {}
    for line in (line for output in outputs for line in output.splitlines() if line.startswith("{")):
        values = json.loads(line)
        said.setdefault(values["scenario"], []).append(values)
    return said, outputs


def files(node: Path, step: int = 3) -> set[str]:
    """The names of the files of a snapshot that a node has."""
    return {path.name for path in node.glob(f"g0000-s{step:09d}-*.dcp/*")}


def part(node: Path, name: str, step: int = 3) -> Path:
    (path,) = node.glob(f"g0000-s{step:09d}-*.dcp/{name}.distcp")
    return path


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nodes, of two ranks, one and one, have saved steps 1 to 3: their folders, below the program's."""
    folder = tmp_path_factory.mktemp("parts") / "it's; $HOME"
    (folder / "saved/base").mkdir(parents=True)
    (folder / "program.py").write_text(PROGRAM)
    said, _ = run(folder / "program.py", "save", folder / "saved", NODES)
    assert [each["saved"] for each in said["base"]] == [[True] * 3] * 4
    return folder / "saved/base"


@pytest.fixture(scope="module")
def outcome(base: Path) -> tuple[Path, dict[str, list[dict[str, Any]]], str]:
    """The nodes start again after all sorts of losses: their folders, what each rank found, and all output."""
    folder = base.parent.parent / "scenarios"

    def scenario(name: str) -> list[Path]:
        shutil.copytree(base, folder / name)
        return [folder / name / f"node{number}" for number in range(3)]

    scenario("nothing is lost")
    shutil.rmtree(scenario("one is empty")[1])
    damage(part(scenario("its own is damaged")[1], "__2_0"))
    nodes = scenario("both are damaged")
    damage(part(nodes[1], "__2_0"))
    part(nodes[2], "__2_0").write_bytes(b"")
    nodes = scenario("two are lost")
    shutil.rmtree(nodes[0])
    shutil.rmtree(nodes[1])
    nodes = scenario("two are lost, and an older one is whole")
    for number, name in ((0, "__0_0"), (0, "__1_0")):
        shutil.copy(part(nodes[number], name, 2), part(nodes[2], "__3_0", 2).parent)
    shutil.rmtree(nodes[0])
    shutil.rmtree(nodes[1])
    nodes = scenario("one is stale")
    shutil.rmtree(part(nodes[1], "__2_0").parent)
    (nodes[1] / "g0000-s000000003.json").unlink()
    (scenario("one has no manifest")[1] / "g0000-s000000003.json").unlink()
    nodes = scenario("one cannot be read")
    (nodes[1] / "cannot be read").touch()
    part(nodes[2], "__2_0").unlink()
    nodes = scenario("one cannot be written")
    shutil.rmtree(nodes[1])
    nodes[1].write_text("a file")
    path = part(scenario("a copy cannot be written")[1], "__1_0")
    path.unlink()
    path.mkdir()
    for name, fault, extra in (
        ("killed: copy", "copy", {}),
        ("killed: manifest", "manifest", {}),
        ("killed: sync", "sync", {}),
        ("killed: sync, two hosts", "sync", {"HOSTS": 1}),
    ):
        killed = folder.parent / "killed" / name
        killed.mkdir(parents=True)
        run(folder.parent / "program.py", "save", killed.parent, NODES, code=None, FAULT=fault, **extra)
        assert files(killed / "node1", 3)
        committed = [each.step for each in Snapshots(killed / "node1").manifests()]
        assert committed == ([3, 2, 1] if extra else [2, 1])
        shutil.move(killed, folder)
    shutil.copytree(folder / "killed: sync, two hosts", folder / "both hosts lost their power then")
    for path in (folder / "both hosts lost their power then").rglob("*s000000003-*.dcp/*.distcp"):
        path.write_bytes(b"")
    said, outputs = run(folder.parent / "program.py", "load", folder, NODES)
    assert {name: len(ranks) for name, ranks in said.items()} == {each.name: 4 for each in folder.iterdir()}
    return folder, said, "".join(outputs)


Outcome = tuple[Path, dict[str, list[dict[str, Any]]], str]


def test_every_part_is_on_two_nodes_and_no_node_has_all(base: Path) -> None:
    manifests = {(base / f"node{number}/g0000-s000000003.json").read_text() for number in range(3)}
    assert len(manifests) == 1, "the same on all nodes"
    for number in range(3):
        node = base / f"node{number}"
        assert [each.step for each in Snapshots(node).manifests()] == [3, 2]
        assert len(list(node.iterdir())) == 4, "two manifests with their folders"
        parts = {f"{name}.distcp" for name in OWN[number] + KEPT[number]}
        assert files(node) == {*parts, ".metadata", "rest.pt"}
        assert {path.stat().st_mode & 0o777 for path in node.rglob("*") if path.is_file()} == {0o600}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("nothing is lost", 3),
        ("one is empty", 3),
        ("its own is damaged", 3),
        ("both are damaged", 2),
        ("two are lost, and an older one is whole", 2),
        ("one is stale", 3),
        ("one has no manifest", 3),
        ("one cannot be read", 2),
        ("a copy cannot be written", 3),
        ("killed: copy", 2),
        ("killed: manifest", 3),
        ("killed: sync", 2),
        ("killed: sync, two hosts", 3),
        ("both hosts lost their power then", 2),
    ],
)
def test_the_newest_of_which_all_parts_are_left_is_found(outcome: Outcome, name: str, step: int) -> None:
    folder, said, _ = outcome
    ranks = said[name]
    assert [(rank.get("step"), rank.get("is right")) for rank in ranks] == [(step, True)] * 4, ranks
    nodes = [folder / name / f"node{number}" for number in range(3)]
    for each in chain(*OWN):
        assert sum(f"{each}.distcp" in files(node, step) for node in nodes) >= 2, "one more may be lost"
    manifest = f"g0000-s{step:09d}.json"
    assert len({(node / manifest).read_text() for node in nodes}) == 1
    assert not list((folder / name).rglob(".tmp-*")) or name.startswith("killed")


def test_a_disk_that_fails_after_a_snapshot_counts_costs_none(base: Path, tmp_path: Path) -> None:
    """It is in the memory of two hosts, and those on the disks are kept beside it; it counts for none of these."""
    (tmp_path / "disk").mkdir()
    program = base.parent.parent / "program.py"
    said, outputs = run(program, "save", tmp_path, NODES, FAULT="disk", HOSTS=1)
    assert [each["saved"] for each in said["disk"]] == [[True, True, False]] * 4
    for output in outputs:
        assert re.search(
            r"no snapshot of step 3 .*: it is in the memory of two hosts, and not on all", output
        )
    nodes = [Snapshots(tmp_path / f"disk/node{number}") for number in range(3)]
    assert [[each.step for each in node.manifests()] for node in nodes] == [[3, 2, 1]] * 3
    said, _ = run(program, "load", tmp_path, NODES)
    assert [(rank["step"], rank["is right"]) for rank in said["disk"]] == [(3, True)] * 4


def test_a_disk_that_goes_on_failing_is_not_filled(base: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "meanwhile/disk").mkdir(parents=True)
    program = base.parent.parent / "program.py"
    run(program, "save", tmp_path / "meanwhile", NODES, FAULT="disk", STEPS=5, HOSTS=1)
    for number in range(3):
        node = Snapshots(tmp_path / f"meanwhile/disk/node{number}")
        assert [each.step for each in node.manifests()] == [5, 2, 1], "of those that failed the last alone"
    said, _ = run(program, "save", tmp_path, NODES, FAULT="disk", STEPS=6, HOSTS=1)
    saved = [True, True, False, False, False, True]
    assert [each["saved"] for each in said["disk"]] == [saved] * 4
    for number in range(3):
        node = Snapshots(tmp_path / f"disk/node{number}")
        assert [each.step for each in node.manifests()] == [6, 2], "none of those that failed"
        assert len(list(node.folder.iterdir())) == 4


def test_the_first_snapshot_counts_when_it_is_on_the_disks(base: Path, tmp_path: Path) -> None:
    """If all hosts lost their power before, the run would have no snapshot, and be known to have had one."""
    (tmp_path / "killed").mkdir()
    program = base.parent.parent / "program.py"
    run(program, "save", tmp_path, NODES, code=None, FAULT="first", HOSTS=1)
    assert files(tmp_path / "killed/node1", 1)
    assert not Snapshots(tmp_path / "killed/node1").manifests()


def test_only_what_ranks_read_is_sent(outcome: Outcome) -> None:
    """Node 2 reads its own part, and what all ranks have, which is in that of rank 0."""
    folder, _, _ = outcome
    assert files(folder / "nothing is lost/node2") == {
        *(f"{name}.distcp" for name in ("__0_0", "__2_0", "__3_0")), ".metadata", "rest.pt",
    }  # fmt: skip


def test_what_is_lost_is_named_with_the_nodes_that_kept_it(outcome: Outcome) -> None:
    _, said, output = outcome
    for rank in said["two are lost"]:
        assert re.match(
            r"NoneLoads: .*g0000-s000000003.json: no node that is here has __0_0.distcp \(kept by node 0 \(.+\) and "
            r"node 1 \(.+\)\), __1_0.distcp .*g0000-s000000002.json: ",
            rank["refused"],
        ), rank["refused"]
    assert re.search(r"snapshot .*/both are damaged/node2/g.*3.json is passed over: no node that is", output)


def test_only_what_is_certainly_lost_may_be_removed(outcome: Outcome) -> None:
    _, said, output = outcome
    damaged = {name: [rank["damaged"] for rank in ranks] for name, ranks in said.items()}
    assert damaged["both are damaged"] == [["g0000-s000000003.json"], [], *[["g0000-s000000003.json"]] * 2]
    assert damaged["one cannot be read"] == [[]] * 4
    assert re.search(r"one cannot be read/node0/g.*3.json is passed over: .*Input/output error", output)


def test_a_node_that_cannot_store_what_it_lacks_is_named(outcome: Outcome) -> None:
    _, said, output = outcome
    assert re.search(r"g.*3.json is not on two nodes again: node 1 \(.*__1_0.distcp: .*directory", output)
    for rank in said["one cannot be written"]:
        assert re.match(r"NoneLoads: the snapshot g.*3.json is there, .* node 1 \(", rank["refused"]), rank


@pytest.mark.parametrize("whole", [{}, {"WHOLE": 1}], ids=["each rank its part", "each rank all"])
def test_two_of_three_nodes_go_on(base: Path, whole: dict[str, int], tmp_path: Path) -> None:
    """In the second case with an engine that takes the whole state, and so is sent all files."""
    nodes = [
        shutil.copytree(base / f"node{old}", tmp_path / f"two/node{new}") for new, old in enumerate((0, 2))
    ]
    said, outputs = run(base.parent.parent / "program.py", "load", tmp_path, [0, 1], **whole)
    assert [(rank.get("step"), rank.get("is right")) for rank in said["two"]] == [(3, True)] * 2, outputs
    assert not whole or [len(files(node)) for node in nodes] == [6, 6]


def test_gather_names_what_a_node_lacks_and_takes_it_when_it_is_there(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = shutil.copytree(base / "node0", tmp_path / "node0"), tmp_path / "out.pt"
    monkeypatch.setattr("sys.argv", ["gather", str(folder), str(out)])
    assert gather.main() == 1
    said = capsys.readouterr().err
    assert re.search(
        r"only a part of it, and not __2_0.distcp \(kept by node 1 \(.+\) and node 2 \(.+\)\): copy", said
    )
    with pytest.raises(NoneLoads):
        Snapshots(folder).load()
    for step in (2, 3):
        shutil.copy(part(base / "node1", "__2_0", step), part(folder, "__0_0", step).parent)
    assert gather.main() == 0
    assert "of step 3 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("places", "hosts", "wanted"),
    [
        ([0, 0], "aa", [None, None]),
        ([0, 1, 2], "abc", [1, 2, 0]),
        ([0, 0, 2, 2], "aabb", [2, 3, 0, 1]),
        ([0, 0, 2], "aab", [2, 2, 0]),
        ([0, 1, 2], "aab", [2, 2, 0]),  # two nodes on one host
        ([0, 1], "aa", [1, 0]),
    ],
)
def test_the_next_node_on_another_host_keeps_a_part(
    places: list[int], hosts: str, wanted: list[int | None]
) -> None:
    assert keepers(places, list(hosts)) == wanted


def test_a_part_that_arrives_damaged_is_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its source could not read it, and has sent what was in memory."""
    num_synced, fsync = [0], os.fsync

    def sync(descriptor: int) -> None:
        num_synced[0] += 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    transfer = Transfer("a", hashlib.sha256(b"good").hexdigest(), 4, 2, 0)
    for data, problem in (
        (b"evil", f"{tmp_path / 'parts/a'}: rank 2 has sent something else"),
        (b"good", ""),
    ):
        problems: list[str] = []
        with _arriving(tmp_path / "parts", transfer, problems, True) as file:
            file.write(data)
        assert "".join(problems).startswith(problem) if problem else not problems
        assert [path.name for path in (tmp_path / "parts").iterdir()] == ([] if problem else ["a"])
    assert num_synced == [2], "the file and its name"


def test_no_ranks_wait_for_each_other_in_a_circle() -> None:
    chance = random.Random(0)
    for _ in range(200):
        pairs = [tuple(chance.sample(range(5), 2)) for _ in range(chance.randrange(30))]
        transfers = [Transfer(str(number), "", 1, *pair) for number, pair in enumerate(pairs)]
        left = [list(_turns(transfers, rank)) for rank in range(5)]
        done: set[str] = set()
        while any(left):
            now = [turns[0] if turns else (None, None) for turns in left]
            ready = [
                rank
                for rank, (outgoing, incoming) in enumerate(now)
                if left[rank]
                and (outgoing is None or outgoing.name in done or now[outgoing.target][1] == outgoing)
                and (incoming is None or incoming.name in done or now[incoming.source][0] == incoming)
            ]
            assert ready, "all wait"
            for rank in ready:
                done |= {each.name for each in left[rank].pop(0) if each}
        assert len(done) == len(transfers)
