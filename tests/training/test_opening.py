"""A machine's snapshots from when it was another node, in folders that are named by the node's number."""

from pathlib import Path

import pytest
import torch

from nodekit.training.errors import TrainingError
from nodekit.training.snapshots.opening import bring_newer
from nodekit.training.snapshots.snapshot import Snapshots


def saved(node: Path, *steps: int) -> list[str]:
    for step in steps:
        Snapshots(node / "snapshots").save({"step": torch.tensor(step)}, step=step)
    return names(node)


def names(node: Path) -> list[str]:
    return sorted(path.name for path in (node / "snapshots").iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_the_newest_of_all_numbers_is_brought_and_stays_where_it_was(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    saved(tmp_path / "node1", 4, 8)
    before = saved(tmp_path / "node2", 8, 12)
    saved(tmp_path / "node10 of something else", 20)
    saved(tmp_path, 6)
    bring_newer(tmp_path, tmp_path)
    assert names(tmp_path / "node2") == before
    found = Snapshots(tmp_path / "snapshots").load()
    assert found is not None
    assert found.state["step"] == 12
    assert [each.step for each in Snapshots(tmp_path / "snapshots").manifests()] == [12, 8, 6]
    assert capsys.readouterr().out == (
        f"nodekit: the newest snapshot is in {tmp_path / 'node2' / 'snapshots'}: {tmp_path} goes on from there\n"
    )


def test_where_none_is_newer_nothing_is_brought(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 4, 8)
    own = saved(tmp_path / "node1", 4, 8)
    bring_newer(tmp_path / "node1", tmp_path)
    assert names(tmp_path / "node1") == own
    assert not capsys.readouterr().out


def test_parts_of_a_sharded_one_are_gathered_from_all_numbers(tmp_path: Path) -> None:
    name = "g0000-s000000008"
    for node, parts in ((tmp_path, ["__0_0", "__1_0"]), (tmp_path / "node1", ["__1_0", "__2_0"])):
        payload = node / "snapshots" / f"{name}-0123456789abcdef.dcp"
        payload.mkdir(parents=True)
        for part in parts:
            (payload / f"{part}.distcp").write_text(part)
        (node / "snapshots" / f"{name}.json").write_text("")
    for own in (tmp_path, tmp_path / "node2"):  # also where it has no part of it yet
        bring_newer(own, tmp_path)
        found = (own / "snapshots" / f"{name}-0123456789abcdef.dcp").iterdir()
        assert {path.name: path.read_text() for path in found} == {
            f"{part}.distcp": part for part in ("__0_0", "__1_0", "__2_0")
        }


def test_training_does_not_begin_at_step_0_where_a_folder_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "snapshots").symlink_to("snapshots")  # a loop
    with pytest.raises(
        TrainingError, match=r"whether the newest snapshot is in .*node1/snapshots is not known"
    ):
        bring_newer(tmp_path, tmp_path)
    saved(tmp_path, 4)
    bring_newer(tmp_path, tmp_path)
    assert "whether a newer snapshot is in" in caplog.text


@pytest.mark.parametrize("has", [True, False])
def test_what_belongs_to_the_newest_snapshot_is_brought_with_it(has: bool, tmp_path: Path) -> None:
    """Its state refers to the curve so far and to the best weights. The other number keeps its own."""
    saved(tmp_path, 4)
    saved(tmp_path / "node1", 8)
    written = [(tmp_path / "node1", "of step 8"), *([(tmp_path, "of step 4")] if has else [])]
    for node, text in written:
        (node / "best").mkdir()
        for file in (node / "metrics.jsonl", node / "best" / "weights"):
            file.write_text(text)
    bring_newer(tmp_path, tmp_path)
    for node in (tmp_path, tmp_path / "node1"):
        assert (node / "metrics.jsonl").read_text() == (node / "best" / "weights").read_text() == "of step 8"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "metrics.jsonl", "node1", "snapshots"]


def test_a_snapshot_is_brought_also_where_no_curve_and_no_best_weights_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Into a folder that is not there yet, too."""
    saved(tmp_path / "node1", 8)
    bring_newer(tmp_path / "node2", tmp_path)
    assert [each.step for each in Snapshots(tmp_path / "node2" / "snapshots").manifests()] == [8]
    assert not caplog.text
