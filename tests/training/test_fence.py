"""The fence: what is left of an old generation can neither commit nor damage what a newer one did."""

import json
from pathlib import Path

import pytest
import torch

from nodekit.training import Fenced, Snapshots
from nodekit.training.snapshots.files import commit
from nodekit.training.snapshots.files.commit import place
from nodekit.training.snapshots.files.fence import Fence


def saved(folder: Path, *, generation: int | None, step: int) -> Snapshots:
    snapshots = Snapshots(folder, generation=generation)
    assert snapshots.save({"weights": torch.zeros(100)}, step=step)
    return snapshots


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_generation_below_the_fence_commits_nothing_and_touches_nothing(tmp_path: Path) -> None:
    stale = saved(tmp_path, generation=1, step=5)
    (tmp_path / "fence").write_text("2\n")
    before = contents(tmp_path)
    with pytest.raises(Fenced, match=r"generation 1 is over: .* is fenced for generation 2 and later"):
        stale.save({"weights": torch.ones(100)}, step=6)
    stale.save_async({"weights": torch.ones(100)}, step=7)
    with pytest.raises(Fenced) as refused:
        stale.wait()
    assert (refused.value.generation, refused.value.fence) == (1, 2)
    assert contents(tmp_path) == before
    saved(tmp_path, generation=2, step=6)
    found = Snapshots(tmp_path).load()
    assert found
    assert found.manifest.age == (2, 6)


def test_a_fence_that_goes_up_while_the_payload_is_written_keeps_the_manifest_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = saved(tmp_path, generation=1, step=5)
    num_placed = 0

    def placed(temporary: Path, file: object, name: str, **more: object) -> None:
        nonlocal num_placed
        if name.endswith(".json"):
            (tmp_path / "fence").write_text("3\n")  # the last moment at which it can come
        num_placed += 1
        place(temporary, file, name, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "place", placed)
    with pytest.raises(Fenced):
        stale.save({"weights": torch.ones(100)}, step=6)
    assert num_placed == 2, "the payload and the manifest"
    assert [each.age for each in Snapshots(tmp_path).manifests()] == [(1, 5)]
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_first_commit_of_a_newer_generation_raises_the_fence(tmp_path: Path) -> None:
    stale = saved(tmp_path, generation=0, step=9)
    assert not (tmp_path / "fence").exists()
    newer = saved(tmp_path, generation=4, step=3)
    assert (tmp_path / "fence").read_text() == "4\n"
    with pytest.raises(Fenced):
        stale.save({}, step=10)
    Fence(tmp_path).raise_to(2)
    assert (tmp_path / "fence").read_text() == "4\n", "a fence only goes up"
    assert newer.save({}, step=4)


def test_a_fence_that_cannot_be_read_lets_nobody_commit_and_ends_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = saved(tmp_path, generation=1, step=5)
    (tmp_path / "fence").write_text("two\n")
    assert snapshots.save({}, step=6) is None
    assert "holds b'two': a whole number was wanted" in caplog.text
    assert [each.age for each in snapshots.manifests()] == [(1, 5)]


def test_without_a_generation_that_of_the_fence_is_gone_on_with(tmp_path: Path) -> None:
    saved(tmp_path, generation=2, step=5)
    (tmp_path / "fence").write_text("7\n")
    saved(tmp_path, generation=None, step=6)
    assert [each.age for each in Snapshots(tmp_path).manifests()] == [(7, 6), (2, 5)]


def test_an_older_generation_clears_up_nothing_of_a_newer_one(tmp_path: Path) -> None:
    newer = tmp_path / "g0002-s000000009-0123456789abcdef.pt"  # placed; its manifest is about to be
    older = saved(tmp_path, generation=1, step=5)
    newer.write_bytes(b"whole")
    assert older.save({}, step=6)
    assert newer.read_bytes() == b"whole"
    manifest = json.loads((tmp_path / "g0001-s000000006.json").read_text())
    assert manifest["generation"] == 1
