"""Sharded snapshots: each rank its part, committed together or not at all, read on any number of ranks."""

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from test_training import environ, ranks, torchrun
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from nodekit.deploy.agent.replicas.replica_files import is_allowed, scan
from nodekit.training import Fenced, Snapshots, World
from nodekit.training.engine_info import ENGINES
from nodekit.training.errors import TrainingError
from nodekit.training.options.arguments import parse
from nodekit.training.snapshots import sharded as sharded_snapshots
from nodekit.training.snapshots.sharded import ShardedSnapshots
from nodekit.training.weights.digest import weights_sha256

pytestmark = pytest.mark.slow

TASK = '''
import os, resource, signal, threading
from torch import nn
from nodekit.training.snapshots import sharded
from nodekit.training.snapshots.files import commit
from nodekit.training.tasks.digits import Digits, Pixels

RANK, FAULT = os.environ.get("RANK", "0"), os.environ.get("FAULT")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if FAULT == "manifest" and RANK == "0":
    def place(temporary, file, name, *, place=commit.place, **more):
        if name.endswith("12.json"):
            die()
        place(temporary, file, name, **more)
    commit.place = place

if FAULT == "shard" and RANK == "1":
    class Stream(sharded._Stream):
        def write(self, data, calls=[]):
            calls.append(1)
            if len(calls) > 100:
                super().write(bytes(data)[:len(data) // 2])
                die()
            return super().write(data)
    sharded._Stream = Stream

class Small(Digits):
    """192 digits: 6 steps of 32, an odd number of channels, a buffer, and a fault to order."""
    calls = 0

    def train_data(self):
        data = super().train_data()
        return Pixels(data.images[:192], data.labels[:192])

    def model(self):
        norm = [] if "PLAIN" in os.environ else [nn.BatchNorm2d(5)]
        return nn.Sequential(nn.Conv2d(1, 5, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(180, 10), nn.PReLU(1))

    def loss(self, model, batch):
        self.calls += 1
        for thread in threading.enumerate():
            if thread.name == "nodekit-snapshot":
                thread.join()
        if FAULT == "step" and RANK == "1" and self.calls == 9:
            die()
        if FAULT == "disk" and RANK == "1":
            limit = 3000 if self.calls in range(3, 9) else -1
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        return super().loss(model, batch)
'''
OPTIONS = ["--snapshot-every", "3", "--batch-size", "32", "--schedule", "constant", "--warmup-steps", "0"]
SHARDED = ["--engine", "fsdp"]  # by default
WHOLE = ["--engine", "fsdp", "--snapshot-format", "whole"]


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(TASK)
    return f"{tmp_path / 'small.py'}:Small"


def train(
    folder: Path, task: str, *arguments: object, num_ranks: int = 2, code: int = 0, **extra: object
) -> str:
    given = ["--task", task, "--output", folder, *OPTIONS, *arguments]
    if num_ranks == 1:
        done = subprocess.run(
            [warm_python.program(), "-m", "nodekit.training", *map(str, given)],
            env=environ(**extra),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        said, found_code = done.stdout + done.stderr, done.returncode
    else:
        with torchrun(num_ranks, *given, **extra) as process:
            said, _ = process.communicate(timeout=150)
            found_code = process.returncode
    assert found_code == code, said
    return said


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def steps(folder: Path) -> list[int]:
    return sorted(each.step for each in Snapshots(folder).manifests())


def test_kills_lose_nothing_that_was_committed(task: str, tmp_path: Path) -> None:
    """A rank killed in a step, the one that commits killed before it can, a rank killed half through its file.

    At last the newest is damaged, too.
    """
    train(tmp_path / "a", task, *SHARDED, "--epochs", 3)
    for fault, step in (("step", None), ("manifest", 6), ("shard", 9), ("", 6)):
        if not fault:
            (path,) = tmp_path.glob("b/snapshots/g0000-s000000009-*.dcp/__1_0.distcp")
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        said = train(tmp_path / "b", task, *SHARDED, "--epochs", 3, code=1 if fault else 0, FAULT=fault)
        assert re.findall(r"resumed at step (\d+) ", said) == ([str(step)] if step else []), said
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert result(tmp_path / "b")["weights_sha256"] == result(tmp_path / "a")["weights_sha256"]
    folder = tmp_path / "b/snapshots"
    assert steps(folder) == [15, 18]
    assert len(list(folder.iterdir())) == 4, "what the killed ones left is gone"
    sizes = [
        {path.name: path.stat().st_size for path in each.iterdir() if path.suffix == ".distcp"}
        for each in folder.glob("*.dcp")
    ]
    for each in sizes:  # three times the weights, in two parts, and what torch.save adds to each tensor
        assert set(each) == {"__0_0.distcp", "__1_0.distcp"}
        assert max(each.values()) < 1.5 * min(each.values())


def test_other_numbers_of_ranks_and_other_engines_go_on_from_them(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "chain"
    ways = [
        (2, SHARDED), (1, SHARDED), (3, SHARDED), (2, ["--engine", "ddp"]),
        (2, SHARDED), (1, WHOLE),
    ]  # fmt: skip
    for epoch, (num_ranks, way) in enumerate(ways, 1):
        said = train(folder, task, *way, "--epochs", epoch, num_ranks=num_ranks, PLAIN=1)
        assert epoch == 1 or f"resumed at step {6 * epoch - 6} " in said, said
        newest = Snapshots(folder / "snapshots").manifests()[0]
        assert newest.is_sharded == (way is SHARDED)
        assert len(newest.sha256) == (num_ranks + 2 if way is SHARDED else 1)
    train(tmp_path / "plain", task, "--epochs", len(ways), num_ranks=1, PLAIN=1)
    assert losses(folder) == pytest.approx(losses(tmp_path / "plain"), abs=5e-4)


def test_a_rank_that_cannot_write_keeps_all_from_it_and_training_goes_on(task: str, tmp_path: Path) -> None:
    said = train(tmp_path, task, *SHARDED, "--epochs", 2, FAULT="disk")
    for step in (3, 6):  # on both ranks; the other is told which
        assert len(re.findall(rf"no snapshot of step {step} .*File too large", said)) == 2, said
        assert len(re.findall(rf"no snapshot of step {step} .*rank 1: .*File too large", said)) == 1, said
    assert len(re.findall(r"saved in .* again: step 9, after 2", said)) == 2, said
    assert steps(tmp_path / "snapshots") == [9, 12]
    assert len(list((tmp_path / "snapshots").iterdir())) == 4
    out = tmp_path / "out.pt"
    gather = [
        warm_python.program(),
        "-m",
        "nodekit.training.gather",
        str(tmp_path / "snapshots"),
        str(out),
    ]
    env = {**os.environ, **warm_python.environment()}
    done = subprocess.run(gather, env=env, capture_output=True, text=True, timeout=60, check=True)
    weights = torch.load(out, weights_only=True)
    assert f"{len(weights)} tensors in {out.stat().st_size:,} bytes, of step 12 " in done.stdout
    assert weights_sha256(weights) == result(tmp_path)["weights_sha256"]


def on_nodes(nodes: list[Path], output: Path, task: str, *arguments: object, **extra: object) -> list[str]:
    """Train with a rank on each of these nodes, whose snapshots are in these folders; what each has said."""
    given = ["--task", task, "--output", output, *SHARDED, *OPTIONS, *arguments]
    with ranks(
        len(nodes), ["-m", "nodekit.training"], *given, NODEKIT_SNAPSHOT_DIR=[*map(str, nodes)], **extra
    ) as processes:
        said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(nodes), "\n".join(said)
    return said


def test_any_one_of_three_nodes_with_folders_of_their_own_may_be_lost(task: str, tmp_path: Path) -> None:
    """The others go on without it, or with an empty one in its place, as if nothing had been."""
    nodes = [tmp_path / f"node{number}" for number in range(3)]
    said = on_nodes(nodes, tmp_path / "a", task, "--epochs", 1, NODEKIT_SNAPSHOT_SHARED=1)
    assert "not seen by rank 1, 2: they keep snapshots of their own" in said[0]
    (tmp_path / "left").mkdir()
    two = [shutil.copytree(nodes[number], tmp_path / f"left/node{number}") for number in (1, 2)]
    shutil.rmtree(nodes[1])
    for folders, name in ((nodes, "a"), (two, "two")):
        said = on_nodes(folders, tmp_path / name, task, "--epochs", 2)
        assert "resumed at step 6 " in said[0], said
        assert [steps(folder) for folder in folders] == [[9, 12]] * len(folders)
        assert [len(list(folder.iterdir())) for folder in folders] == [4] * len(folders), (
            "all others are gone"
        )
    unbroken = [tmp_path / f"unbroken{number}" for number in range(3)]
    on_nodes(unbroken, tmp_path / "b", task, "--epochs", 2)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert result(tmp_path / "a")["weights_sha256"] == result(tmp_path / "b")["weights_sha256"]
    others = {step: loss for step, loss in losses(tmp_path / "b").items() if step > 6}
    assert losses(tmp_path / "two") == pytest.approx(others, abs=2e-2)  # batch norm of other parts of a batch


def test_two_nodes_with_one_folder_save_to_it_together(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    program = ["-m", "nodekit.training"]
    given = ["--task", task, "--output", tmp_path, "--epochs", 1, *SHARDED, *OPTIONS]
    with ranks(2, program, *given, NODEKIT_SNAPSHOT_SHARED=1, NODEKIT_SNAPSHOT_DIR=folder) as processes:
        said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    assert steps(folder) == [3, 6]
    assert len(Snapshots(folder).manifests()[0].sha256) == 4


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Of this process alone."""
    with World.from_env({}) as world:
        yield world


def sharded(folder: Path, world: World, generation: int | None = None) -> ShardedSnapshots:
    like = Snapshots(folder, generation=generation)
    return ShardedSnapshots(like, world)


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.full((7, 3), float(step)), mesh)
    return {
        "model": {"a.weight": weight, "b": torch.arange(4), "extra": "x"},
        "optimizer": {
            "state": {0: {"exp_avg": weight * 2, "step": torch.tensor(float(step)), "on": True}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "rng": [torch.ones(3)],
        "step": step,
    }


def loaded_step(folder: Path) -> int | None:
    found = Snapshots(folder).load()
    if found is None:
        return None
    step: int = found.state["step"]
    assert torch.equal(found.state["model"]["a.weight"], torch.full((7, 3), float(step)))
    assert torch.equal(found.state["optimizer"]["state"][0]["exp_avg"], torch.full((7, 3), 2.0 * step))
    assert torch.equal(found.state["model"]["b"], torch.arange(4))
    assert (found.state["model"]["extra"], found.state["optimizer"]["state"][0]["on"]) == ("x", True)
    assert found.state["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    return step


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "rest.pt"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_what_is_damaged_is_passed_over_and_then_removed(
    file: str, damage: str, world: World, tmp_path: Path
) -> None:
    snapshots = sharded(tmp_path, world)
    for step in (1, 2, 3):
        assert snapshots.save(state(step), step=step)
    assert loaded_step(tmp_path) == 3
    assert steps(tmp_path) == [2, 3]
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o600}
    (path,) = tmp_path.glob(f"g0000-s000000003-*.dcp/{file}")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert loaded_step(tmp_path) == 2
    snapshots = sharded(tmp_path, world)
    assert snapshots.load()
    assert snapshots.save(state(4), step=4)
    assert steps(tmp_path) == [2, 4]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_fenced_generation_commits_nothing(world: World, tmp_path: Path) -> None:
    assert sharded(tmp_path, world, generation=2).save(state(5), step=5)
    old = sharded(tmp_path, world, generation=1)
    old.save_async(state(9), step=9)
    with pytest.raises(Fenced):
        old.wait()
    assert loaded_step(tmp_path) == 5
    assert len(list(tmp_path.iterdir())) == 3


def test_whole_snapshots_may_be_asked_for_of_any_engine() -> None:
    """All but fsdp take no others, and had it as their default."""
    assert not any(parse(["--engine", name, "--snapshot-format", "whole"], {}).is_sharded for name in ENGINES)


def test_parts_of_tensors_that_cannot_be_saved_are_refused_before_a_snapshot_is_due(
    world: World, tmp_path: Path
) -> None:
    snapshots = sharded(tmp_path, world)
    snapshots.prepare(state(1))
    nested = state(1)
    nested["optimizer"]["state"][0]["history"] = [nested["model"]["a.weight"]]
    with pytest.raises(TrainingError, match="--snapshot-format whole"):
        snapshots.prepare(nested)


def fails(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def test_restarts_beside_a_failing_disk_remove_nothing_that_is_on_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process does not know which snapshots of the one before are on the disk."""
    for step in (1, 2):
        assert sharded(tmp_path, world).save(state(step), step=step)
    monkeypatch.setattr(sharded_snapshots, "sync", fails)
    for step in (3, 4, 5):
        snapshots = sharded(tmp_path, world)
        snapshots._is_on_two_hosts = True
        assert snapshots.save(state(step), step=step) is None
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_manifest_that_cannot_be_written_removes_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = sharded(tmp_path, world)
    assert snapshots.save(state(1), step=1)
    snapshots._is_on_two_hosts = True
    monkeypatch.setattr(sharded_snapshots, "sync", fails)
    assert snapshots.save(state(2), step=2) is None
    monkeypatch.setattr(snapshots, "_announce", fails)
    assert snapshots.save(state(3), step=3) is None
    assert steps(tmp_path) == [1, 2]


def test_all_parts_are_on_the_disk_before_the_manifest_names_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[str] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        on_disk.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    assert sharded(tmp_path, world).save(state(1), step=1)
    (folder,) = tmp_path.glob("*.dcp")
    *before, manifest, its_name = on_disk
    assert (manifest[:5], its_name) == (".tmp-", tmp_path.name)
    assert {"__0_0.distcp", ".metadata", "rest.pt", folder.name, tmp_path.name} <= set(before)


def replace_metadata(snapshots: Path, pickled: object) -> None:
    """Have the one snapshot there begin with this, with the right hash."""
    (path,) = snapshots.glob("*.dcp/.metadata")
    path.write_bytes(pickle.dumps(pickled))
    (manifest,) = snapshots.glob("*.json")
    fields = json.loads(manifest.read_text())
    name = f"{path.parent.name}/.metadata"
    fields["size_bytes"][name] = path.stat().st_size
    fields["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(fields))


class Reduced:
    """What is pickled as this call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        function, *args = self.call
        return function, tuple(args)


def test_only_what_belongs_there_is_unpickled(world: World, tmp_path: Path) -> None:
    assert sharded(tmp_path, world).save(state(1), step=1)
    replace_metadata(tmp_path, Reduced(os.mkdir, str(tmp_path / "evil")))
    with pytest.raises(ValueError, match=r"\.metadata holds posix\.mkdir"):
        Snapshots(tmp_path).load()
    assert not (tmp_path / "evil").exists()


def test_enumerations_are_read_as_python_3_11_2_writes_them(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's: by ``getattr``, which is good for nothing else here."""
    with monkeypatch.context() as patched:
        patched.setattr(Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        assert sharded(tmp_path, world).save(state(1), step=1)
    (path,) = tmp_path.glob("*.dcp/.metadata")
    assert b"getattr" in path.read_bytes()
    assert Snapshots(tmp_path).load() is not None
    for of, name in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__init__")):
        replace_metadata(tmp_path, Reduced(getattr, of, name))
        with pytest.raises(ValueError, match=r"asks for __init__ of .*, which is no member"):
            Snapshots(tmp_path).load()


def test_kit_makes_no_copies_of_them(world: World, tmp_path: Path) -> None:
    assert sharded(tmp_path, world).save(state(1), step=1)
    mine = tmp_path / "mine.dcp" / "__0_0.distcp"
    mine.parent.mkdir()
    mine.write_bytes(b"x")
    found = scan(tmp_path)
    assert set(found.files) == {"mine.dcp/__0_0.distcp"}
    assert not found.unfinished
    assert not any(is_allowed(name) for name in Snapshots(tmp_path).manifests()[0].sha256)
