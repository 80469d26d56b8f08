"""Snapshots: what is committed survives kills, damage and full disks; what is damaged is passed over."""

import errno
import io
import json
import logging
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nodekit.training import Manifest, Snapshots, World, newest_of_all
from nodekit.training.errors import TrainingError
from nodekit.training.process import rng
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.commit import HashingFile
from nodekit.training.snapshots.files.found import NoneLoads
from nodekit.training.snapshots.files.manifest import NewerKit, load_payload
from nodekit.training.weights import export


def state(step: int) -> dict[str, object]:
    return {"step": step, "weights": torch.full((1000,), float(step)), "nested": [{"lr": 0.1}, None, "x"]}


def saved(folder: Path, *steps: int, generation: int | None = None) -> Snapshots:
    snapshots = Snapshots(folder, generation=generation)
    for step in steps:
        assert snapshots.save(state(step), step=step, world_size=3)
    return snapshots


def loaded_step(folder: Path) -> int | None:
    found = Snapshots(folder).load()
    if found is None:
        return None
    assert found.state["weights"].eq(found.state["step"]).all()
    assert found.state["step"] == found.manifest.step
    return found.manifest.step


@pytest.fixture(params=["plain", "a 'quoted $HOME; folder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param / "snapshots"


def test_what_was_saved_is_loaded_and_only_the_owner_may_read_it(folder: Path) -> None:
    saved(folder, 1, 2, 3)
    found = Snapshots(folder).load()
    assert found
    assert found.state["nested"] == [{"lr": 0.1}, None, "x"]
    assert (found.manifest.age, found.manifest.world_size) == ((0, 3), 3)
    assert len(list(folder.iterdir())) == 4, "two snapshots of two files each"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_newer_generation_wins_over_a_later_step(folder: Path) -> None:
    saved(folder, 120, generation=0)
    saved(folder, 110, generation=1)
    assert loaded_step(folder) == 110
    assert [each.age for each in Snapshots(folder).manifests()] == [(1, 110), (0, 120)]


def test_without_a_generation_the_newest_one_found_is_gone_on_with(folder: Path) -> None:
    saved(folder, 5, generation=3)
    saved(folder, 6)
    assert [each.age for each in Snapshots(folder).manifests()] == [(3, 6), (3, 5)]


def flip_a_bit(payload: Path, manifest: Path) -> None:
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)


def leave_ascii(payload: Path, manifest: Path) -> None:
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 0x80
    manifest.write_bytes(data)


def change_manifest(**changes: object) -> Callable[[Path, Path], None]:
    def change(payload: Path, manifest: Path) -> None:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))

    return change


# ruff: noqa: ARG005 - each damage is done to one of the two files
DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "bit": (flip_a_bit, "SHA-256"),
    "torn": (lambda payload, manifest: os.truncate(payload, 100), "100 bytes of"),
    "no payload": (lambda payload, manifest: payload.unlink(), "No such file"),
    "a bit of the manifest": (leave_ascii, "manifest is damaged"),
    "manifest torn": (lambda payload, manifest: os.truncate(manifest, 20), "manifest is damaged"),
    "manifest empty": (lambda payload, manifest: os.truncate(manifest, 0), "manifest is damaged"),
    "manifest a list": (lambda payload, manifest: manifest.write_text("[]"), "manifest is damaged"),
    "another step": (change_manifest(step=99), "manifest is damaged"),
    "a path out": (change_manifest(sha256={"../../etc/passwd": "0"}), "manifest is damaged"),
    "no files": (change_manifest(sha256={}), "manifest is damaged"),
    "no files, no sizes": (change_manifest(sha256={}, size_bytes={}), "manifest is damaged"),
    "a bit of a key": (
        lambda payload, manifest: manifest.write_bytes(manifest.read_bytes().replace(b'"step"', b'"stdp"')),
        "manifest is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_snapshot_is_passed_over_with_the_reason(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = DAMAGE[damage]
    newest = saved(tmp_path, 1, 9).manifests()[0]
    spoil(tmp_path / newest.payload, tmp_path / newest.name)
    snapshots = Snapshots(tmp_path)
    found = snapshots.load()
    assert found
    assert found.manifest.step == 1
    assert newest.name in caplog.text
    assert reason in caplog.text

    snapshots.save(state(2), step=2)  # what is damaged makes way, and does not count as one of those kept
    snapshots.save(state(3), step=3)
    assert loaded_step(tmp_path) == 3
    assert [each.step for each in snapshots.manifests()] == [3, 2]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_step_that_is_saved_anew_after_its_snapshot_was_damaged_counts_as_any_other(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 4, 5)
    flip_a_bit(tmp_path / snapshots.manifests()[0].payload, tmp_path)
    assert snapshots.load(), "step 5 is passed over"
    for step in (5, 6):
        snapshots.save(state(step), step=step)
    assert [each.step for each in snapshots.manifests()] == [6, 5]


def test_unrelated_files_and_odd_names_are_left_alone(tmp_path: Path) -> None:
    odd = [
        "notes.json",
        "g0000-s000000009.json.bak",
        "xg0000-s000000009.json",
        "model.pt",
        ".tmp-mine",
        "g1-s2.json",
    ]
    for name in odd:
        (tmp_path / name).write_text("{}")
    saved(tmp_path, 1, 2, 3)
    assert {name for name in odd if (tmp_path / name).exists()} == set(odd)
    assert loaded_step(tmp_path) == 3


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    left = [tmp_path / ".tmp-0123456789abcdef", tmp_path / "g0000-s000000007-0123456789abcdef.pt"]
    for path in left:
        path.write_bytes(b"half")
    saved(tmp_path, 2)
    assert not any(path.exists() for path in left)
    assert loaded_step(tmp_path) == 2


def test_a_disk_that_is_full_costs_no_snapshot_and_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = saved(tmp_path, 1, 2)
    before = sorted(tmp_path.iterdir())
    (tmp_path / ".tmp-0123456789abcdef").write_bytes(b"what a killed save left, and the room it takes")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The write fails half-way, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        assert snapshots.save(state(3), step=3) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "no snapshot of step 3" in caplog.text
    assert sorted(tmp_path.iterdir()) == before
    assert loaded_step(tmp_path) == 2
    assert snapshots.save(state(4), step=4)


def test_a_write_that_fails_once_fails_the_save_even_if_the_next_ones_work(tmp_path: Path) -> None:
    class FullForOnce(io.BytesIO):
        is_full = True

        def write(self, data: object) -> int:
            if self.is_full:
                self.is_full = False
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    file = HashingFile(FullForOnce())
    torch.save(state(1), file)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left"):
        file.finish()


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert Snapshots(tmp_path / "file" / "snapshots").save(state(1), step=1) is None
    assert "no snapshot of step 1" in caplog.text


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    snapshots = Snapshots(tmp_path)
    again = snapshots.save({**state(2), "again": True}, step=2)
    assert isinstance(again, Manifest)
    found = snapshots.load()
    assert found
    assert found.state["again"]
    assert len(list(tmp_path.iterdir())) == 4


def test_what_could_not_be_loaded_safely_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="python values, not pathlib"):
        Snapshots(tmp_path).save({"path": tmp_path}, step=1)
    with pytest.raises(ValueError, match="of more than 255 bytes, for one, is to be converted to text"):
        Snapshots(tmp_path).save({"seed": 1 << 2100}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_so_is_what_a_later_save_brings_and_the_snapshots_before_it_are_kept(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for step in (1, 2):
        snapshots.save({"best": None}, step=step)
    for step in (3, 4):
        with pytest.raises(ValueError, match=r"not numpy\..*\.item\(\)"):
            snapshots.save({"best": np.float64(0.1)}, step=step)
    assert [each.step for each in snapshots.manifests()] == [2, 1]


def test_a_pickle_that_runs_code_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    snapshots = Snapshots(tmp_path)
    snapshots._refuse_what_cannot_be_loaded = Mock()  # type: ignore[method-assign]  # another writer, not ours
    snapshots.save({"evil": Evil()}, step=1)
    with pytest.raises(NoneLoads, match=r"does not load it: (?!Weights only).*mkdir"):
        Snapshots(tmp_path).load()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_bsc])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_saved_as_any_other(layout: torch.layout, is_mapped: bool, tmp_path: Path) -> None:
    """A graph's adjacency in a buffer, say: its values are no storage's, so it is copied by itself."""
    given = torch.eye(4).to_sparse(layout=layout, blocksize=(2, 2) if layout == torch.sparse_bsc else None)
    snapshots = Snapshots(tmp_path)
    assert snapshots.save({"tied": [given, given]}, step=1)
    snapshots.save_async({"tied": [given, given]}, step=2)
    given.zero_()
    snapshots.wait()
    for age in ((0, 1), (0, 2)):
        found = Snapshots(tmp_path).read_age(age, is_mapped=is_mapped)
        assert found
        assert [each.layout for each in found.state["tied"]] == [layout] * 2
        assert all(each.to_dense().equal(torch.eye(4)) for each in found.state["tied"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[math.nan, 0.0]]).to_sparse(),
        torch.tensor([complex(0, math.nan)]),
        torch.tensor([math.nan]).to(torch.float8_e5m2),
    ],
    ids=["sparse", "complex", "float8"],
)
def test_nan_is_not_saved_of_whatever_type_the_tensor_is(tensor: torch.Tensor, tmp_path: Path) -> None:
    assert Snapshots(tmp_path).save({"weights": tensor}, step=1) is None


def test_a_schedulers_milestones_are_after_a_resume_what_they_were(tmp_path: Path) -> None:
    """They are a Counter, whose `update` adds: the rate was cut twice at each, and four times after two resumes."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80])
    with World.from_env({}) as world:
        for step in (1, 2):
            snapshots = Snapshots(tmp_path)
            if found := newest_of_all(snapshots, world):
                scheduler.load_state_dict(found.state["scheduler"])
            assert scheduler.milestones == {30: 1, 80: 1}
            snapshots.save_async({"scheduler": scheduler.state_dict()}, step=step)
            snapshots.wait()
        found = newest_of_all(Snapshots(tmp_path), world)
    assert found
    assert found.state["scheduler"]["milestones"] == {30: 1, 80: 1}


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)])
def test_a_step_may_be_a_number_of_numpys_or_torchs(step: Any, tmp_path: Path) -> None:
    assert Snapshots(tmp_path).save({}, step=step)
    found = Snapshots(tmp_path).load()
    assert found
    assert found.manifest.age == (0, 7)


@pytest.mark.parametrize("step", [-1, 7.0, None])
def test_a_step_under_which_nothing_would_be_found_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"step is {step}: a whole number from 0 was wanted"):
        Snapshots(tmp_path).save({}, step=step)
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_changes_its_folder_saves_where_it_will_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snapshots = Snapshots("snapshots")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    snapshots.save(state(1), step=1)
    assert loaded_step(tmp_path / "snapshots") == 1


def test_one_that_this_torch_does_not_load_is_passed_over_and_kept(tmp_path: Path) -> None:
    """On one rank alone it would be a traceback, and the others would wait for that rank."""
    saved(tmp_path, 1, 2)
    other = Snapshots(tmp_path, keep=9)
    other._refuse_what_cannot_be_loaded = Mock()  # type: ignore[method-assign]  # an older kit, or another torch
    other.save({"best": np.float64(0)}, step=3)
    snapshots = Snapshots(tmp_path)
    found = snapshots.load()
    assert found
    assert found.manifest.step == 2
    snapshots.save(state(4), step=4)
    assert [each.step for each in snapshots.manifests()] == [4, 3, 2]


def test_one_snapshot_is_too_few_to_keep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Snapshots(tmp_path, keep=1)


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        import random

        import numpy as np

        return [random.random(), float(np.random.standard_normal()), float(torch.rand(()))]

    rng.seed_all(1, rank=0)
    draw()
    Snapshots(tmp_path).save(rng.capture(torch.device("cpu")), step=1)
    first = draw()
    rng.seed_all(1, rank=1)
    assert draw() != first
    found = Snapshots(tmp_path).load()
    assert found
    rng.restore(found.state, torch.device("cpu"))
    assert draw() == first


KILLER = """
import os, random, signal, sys, time
import torch
from nodekit.training.snapshots.snapshot import Snapshots

folder, rounds = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
pick, count, torn = random.Random(0), 0, 0
for _ in range(rounds):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        snapshots = Snapshots(folder)
        while True:
            count += 1
            state = {"count": count, "weights": torch.full((50_000,), float(count))}
            assert snapshots.save(state, step=count // 3)  # each step thrice, as after a resume
            os.write(tell, count.to_bytes(8, "big"))
    os.close(tell)
    committed = int.from_bytes(os.read(told, 8), "big")
    time.sleep(pick.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while said := os.read(told, 8):
        committed = int.from_bytes(said, "big")
    os.close(told)
    torn += any(name.startswith(".tmp-") for name in os.listdir(folder))
    found = Snapshots(folder).load()
    assert found.state["count"] in (committed, committed + 1), (found.manifest, committed)
    assert found.state["weights"].eq(found.state["count"]).all()
    assert Snapshots(folder).manifests()[0] == found.manifest, "the newest one had to be passed over"
    count = found.state["count"]
print(torn)
"""


@pytest.mark.slow
def test_whenever_a_save_is_killed_the_newest_committed_snapshot_loads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), "60"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no kill hit a save half-way"


def test_what_gets_its_name_is_on_the_disk_before_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a power failure would lose, no kill shows: the order of the calls does."""
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        calls.append(f"sync {'folder' if Path(f'/proc/self/fd/{descriptor}').is_dir() else 'file'}")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append(f"rename to {target.suffix}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    saved(tmp_path, 1)
    assert calls == [
        *("sync file", "rename to .pt", "sync folder"),
        *("sync file", "rename to .json", "sync folder"),
    ]


def test_what_was_sent_and_is_not_what_was_announced_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = saved(tmp_path / "theirs", 4)
    (manifest,) = theirs.manifests()
    data = bytearray((theirs.folder / manifest.payload).read_bytes())
    ours = Snapshots(tmp_path / "ours")
    for is_whole in (False, True):
        data[-1] ^= not is_whole
        with ours.receiving(manifest) as file:
            file.write(data)
        data[-1] ^= not is_whole
        assert ours.manifests() == ([manifest] if is_whole else [])
    assert "what was sent has another SHA-256 than its manifest says" in caplog.text


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is tried again only once."""
    monkeypatch.setattr(commit, "RETRY_S", 0.1)
    monkeypatch.setattr(commit, "_PAUSE_S", 0.1)


Fails = Callable[[str, int, int], None]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Makes what reads files or folders of a name fail, so many times."""
    left: dict[str, list[int]] = {}

    def failing(real: Any) -> Any:
        def call(path: Path, *args: Any, **kwargs: Any) -> Any:
            for name, numbers in left.items():
                if path.name.endswith(name) and numbers:
                    raise OSError(numbers[0], os.strerror(numbers.pop()), str(path))
            return real(path, *args, **kwargs)

        return call

    for method in ("iterdir", "read_bytes", "open"):
        monkeypatch.setattr(Path, method, failing(getattr(Path, method)))

    def fail(name: str, number: int, times: int) -> None:
        left[name] = [number] * times

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["000200.json", "000100.json", "snapshots"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("does_save", [False, True])
def test_who_could_not_read_everything_removes_nothing(
    tmp_path: Path, what: str, number: int, does_save: bool, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = saved(folder := tmp_path / "snapshots", 100, 200, generation=0)
    before = {path.name for path in folder.iterdir()}
    if not does_save:
        monkeypatch.setattr(torch, "save", Mock(side_effect=FULL))
    for times in (1, 2, 3, 9):
        fails(what, number, times)
        snapshots.save(state(300), step=300)
        fails(what, number, 0)
        assert before <= {path.name for path in folder.iterdir()} or loaded_step(folder) == 300
        assert loaded_step(folder) in ((300, 200) if does_save else (200,))
    assert snapshots.save(state(400), step=400) or not does_save
    assert len(list(folder.iterdir())) == 4, "what was put off is done at the next save"


def test_what_cannot_be_removed_is_not_in_the_way_of_the_rest(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "snapshots", tmp_path / "elsewhere"
    elsewhere.mkdir()
    snapshots = saved(folder, 1, 2, generation=0)
    for number in range(20):  # folders that were moved to another disk, of snapshots that are gone
        (folder / f"g0000-s000000001-{number:016x}.dcp").symlink_to(elsewhere)
    for step in range(3, 9):
        assert snapshots.save(state(step), step=step)
    assert len(list(folder.iterdir())) == 4
    assert elsewhere.exists()


def test_an_older_manifest_that_cannot_be_read_keeps_no_step_from_being_saved(
    tmp_path: Path, fails: Fails
) -> None:
    snapshots = saved(folder := tmp_path / "snapshots", 100, 200, generation=0)
    fails("000100.json", errno.EIO, 99)
    assert snapshots.save_if_newest(state(300), step=300)
    assert snapshots.save_if_newest(state(300), step=300) is None, "it is there"
    assert loaded_step(folder) == 300


def test_a_save_that_cannot_list_the_folder_commits_and_is_no_failure(tmp_path: Path, fails: Fails) -> None:
    snapshots = saved(folder := tmp_path / "snapshots", 1, 2, generation=0)
    fails("snapshots", errno.EIO, 99)
    assert snapshots.save(state(3), step=3)
    fails("snapshots", errno.EIO, 0)
    assert snapshots.num_failed == 0
    assert [each.step for each in snapshots.manifests()] == [3, 2, 1]
    assert loaded_step(folder) == 3


@pytest.mark.parametrize("what", ["000200.json", "000100.json", "snapshots", ".pt"])
def test_what_could_not_be_read_once_is_read_again(
    tmp_path: Path, what: str, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "RETRY_S", 60.0)  # a machine may stand still for longer than 5 s
    saved(folder := tmp_path / "snapshots", 100, 200)
    fails(what, errno.ESTALE, 3)
    assert loaded_step(folder) == 200


@pytest.mark.usefixtures("at_once")
def test_an_older_one_is_gone_on_with_where_the_newest_cannot_be_read(tmp_path: Path, fails: Fails) -> None:
    saved(folder := tmp_path / "snapshots", 100, 200)
    fails("000200.json", errno.EIO, 99)
    assert loaded_step(folder) == 100


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("what", ["000200.json", "snapshots", ".pt"])
def test_what_cannot_be_read_is_not_taken_for_nothing(tmp_path: Path, what: str, fails: Fails) -> None:
    saved(folder := tmp_path / "snapshots", 200)
    fails(what, errno.EIO, 99)
    wanted = (
        rf"does not begin at step 0 instead: {folder}.*Input/output error.* or bring back the nodes that have it, and "
        "start again: nothing was removed"
    )
    with pytest.raises(NoneLoads, match=wanted):
        Snapshots(folder).load()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_newer_one_that_was_of_no_use_keeps_no_step_from_being_saved(
    tmp_path: Path, is_damaged: bool, fails: Fails
) -> None:
    snapshots = saved(folder := tmp_path / "snapshots", 100, 200, generation=0)
    payload = folder / snapshots.manifests()[0].payload
    if is_damaged:
        flip_a_bit(payload, payload)
    else:
        fails(payload.name, errno.EIO, 99)
    snapshots = Snapshots(folder, generation=0)
    assert (found := snapshots.load())
    assert found.manifest.step == 100
    assert snapshots.save_if_newest(state(120), step=120), "a rank that is left alone"
    assert snapshots.save(state(130), step=130)
    assert [each.step for each in snapshots.manifests() if each.step < 200] == [130, 120], "two that are good"
    assert loaded_step(folder) == 130


@pytest.mark.usefixtures("at_once")
def test_what_could_not_be_read_stays_until_as_many_are_there_as_are_kept(
    tmp_path: Path, fails: Fails
) -> None:
    saved(folder := tmp_path / "snapshots", 100, 200)
    fails(".pt", errno.EIO, 99)
    snapshots = Snapshots(folder)
    with pytest.raises(NoneLoads):
        snapshots.load()
    fails(".pt", errno.EIO, 0)
    assert snapshots.save(state(300), step=300)
    assert [each.step for each in snapshots.manifests()] == [300, 200, 100]
    assert snapshots.save(state(400), step=400)
    assert [each.step for each in snapshots.manifests()] == [400, 300]


def test_where_all_are_damaged_for_good_that_is_an_error_too(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for path in tmp_path.glob("*.pt"):
        flip_a_bit(path, path)
    with pytest.raises(NoneLoads, match=r"s000000002\.json: its payload's SHA-256 .*s000000001\.json"):
        Snapshots(tmp_path).load()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_newer_kits_snapshot_is_refused_by_name_and_kept(tmp_path: Path) -> None:
    snapshots = saved(tmp_path, 1, 2)
    newest = snapshots.manifests()[0]
    change_manifest(engine="fsdp")(tmp_path / newest.payload, tmp_path / newest.name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wanted = rf"{newest.name}: a newer nodekit wrote it \(unknown: engine\): go on with that nodekit"
    with pytest.raises(NewerKit, match=wanted):
        Snapshots(tmp_path).load()
    older_kit = saved(tmp_path, 3, 4, 5)
    assert (
        before.items()
        >= {path.name: path.read_bytes() for path in tmp_path.iterdir() if "-s000000002" in path.name}.items()
    )
    assert {newest.name, newest.payload} <= {path.name for path in tmp_path.iterdir()}
    assert [each.step for each in older_kit.manifests()] == [5, 4]
    assert loaded_step(tmp_path) == 5, "this one is newer"


def test_what_was_committed_and_is_not_there_is_missed(tmp_path: Path, at_once: None) -> None:
    found = Snapshots(tmp_path / "not mounted").look(expected="step 200 was committed")
    assert found.loaded is None
    assert found.problems == (
        f"{tmp_path}/not mounted: no snapshot is here, though step 200 was committed: is a file system not mounted?",
    )
    saved(tmp_path, 1)
    assert Snapshots(tmp_path).look(expected="step 200 was committed").loaded


def test_logging_is_a_warning_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = saved(tmp_path, 1, 2).manifests()[0]
    (tmp_path / newest.payload).unlink()
    Snapshots(tmp_path).load()
    assert [(record.name, record.levelno) for record in caplog.records] == [
        ("nodekit.training", logging.WARNING)
    ]


def test_with_a_torch_that_loads_unsafe_files_there_are_no_snapshots_and_no_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, 1)
    torch.save({}, folder / "weights.pt")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    calls: list[Callable[[], object]] = [
        lambda: Snapshots(folder),
        lambda: load_payload(io.BytesIO()),
        lambda: export.read_file(folder / "weights.pt"),
    ]
    for call in calls:
        with pytest.raises(TrainingError, match=r"torch 2\.9\.1.*wanted 2\.10 or newer"):
            call()
