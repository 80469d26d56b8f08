"""TensorBoard's curves: one curve over restarts and a moved rank 0, and never an end or a halt to a training."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import ranks

from nodekit.training.reporting import event_files, metrics
from nodekit.training.reporting.curves import Curves


def values(step: int, loss: float, attempt: str = "0.0") -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "epoch": 1, "loss": loss, "lr": 0.1, "time": 1000.0 + step}


def evaluation(step: int, accuracy: float, attempt: str = "0.0") -> dict[str, Any]:
    return {
        "step": step,
        "attempt": attempt,
        "epoch": 1,
        "test": {"accuracy": accuracy},
        "time": 1000.0 + step,
    }


class Node:
    """What a node's first rank keeps, attempt after attempt."""

    def __init__(self, folder: Path) -> None:
        self.tensorboard, self.path = folder / "tensorboard", folder / "metrics.jsonl"
        folder.mkdir(exist_ok=True)

    def resume(self, step: int) -> None:
        metrics.take_back(self.path, step, is_evaluated=False)

    def attempt(self, said: Sequence[dict[str, Any]], *, is_main: bool) -> None:
        """Go on from what is there; without an end to it, as after a kill, the last is not drawn."""
        before = self.path.stat().st_size if self.path.exists() else 0
        with self.path.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in said)
        if is_main:
            curves = Curves(
                self.tensorboard, first_step=said[0]["step"], attempt=said[0]["attempt"],
                history=self.path, history_bytes=before,
            )  # fmt: skip
            for each in said:
                curves.add(each)
            curves.close()


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Each curve as TensorBoard has it, where no step may be there twice, nor one before another."""
    events = EventAccumulator(str(folder))
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        steps = [each.step for each in events.Scalars(tag)]
        assert steps == sorted(set(steps))
        found[tag] = {each.step: pytest.approx(each.value) for each in events.Scalars(tag)}
    return found


def raw_steps(folder: Path) -> list[int]:
    return [step for path in event_files.of(folder) for _, step in event_files.records(path) if step]


def test_points_that_came_before_tensorboard_are_drawn_too(tmp_path: Path) -> None:
    curves = Curves(tmp_path, first_step=1)
    for step in range(1, 4):
        curves.add(values(step, 1 / step))
    curves.close()
    assert read(tmp_path)["train/loss"] == {1: 1, 2: 1 / 2, 3: 1 / 3}


def test_points_are_drawn_together_and_an_evaluation_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    own = SimpleNamespace(add_scalar=lambda *point, **_: drawn.append(point[2]), close=lambda: None)
    curves = Curves(tmp_path, first_step=1)
    curves.settle()
    curves._writer = own  # type: ignore[assignment]
    for step, every_s, expected in (
        (1, 0.0, [1]),
        (2, 3600.0, [1]),
        (3, 3600.0, [1]),
        (4, 0.0, [1, 2, 3, 4]),
    ):
        monkeypatch.setattr("nodekit.training.reporting.curves._DRAW_EVERY_S", every_s)
        curves.add(values(step, 1.0))
        assert drawn == expected
    monkeypatch.setattr("nodekit.training.reporting.curves._DRAW_EVERY_S", 3600.0)
    curves.add(values(5, 1.0))
    curves.add(evaluation(5, 0.5))
    assert drawn == [1, 2, 3, 4, 5, 5]
    curves.add(values(6, 1.0))
    curves.close()
    assert drawn[-1] == 6


def test_steps_that_are_done_again_replace_the_former_ones(tmp_path: Path) -> None:
    node = Node(tmp_path)
    first = [values(step, 1.0) for step in range(1, 9)]
    node.attempt([*first[:6], evaluation(6, 0.1), *first[6:], evaluation(8, 0.2)], is_main=True)
    node.resume(5)
    node.attempt([values(step, 2.0, "0.1") for step in range(6, 8)], is_main=True)
    found = read(tmp_path / "tensorboard")
    assert found["train/loss"] == {**dict.fromkeys(range(1, 6), 1), 6: 2, 7: 2}
    assert "test/accuracy" not in found  # they were after the step that it went on from
    # Not only hidden: TensorBoard's fast reader shows all.
    assert max(raw_steps(tmp_path / "tensorboard")) == 7


def test_a_clock_that_is_set_back_hides_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, now = Node(tmp_path), time.time
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: now() + 86_400)
        node.attempt([values(step, 1.0) for step in range(1, 9)], is_main=True)
    for attempt, first in (("0.1", 6), ("0.2", 7)):
        node.resume(first - 1)
        node.attempt([values(step, float(first), attempt) for step in range(first, 12)], is_main=True)
    found = read(tmp_path / "tensorboard")["train/loss"]
    assert found == {**dict.fromkeys(range(1, 6), 1), 6: 6, **dict.fromkeys(range(7, 12), 7)}
    names = [path.name.rpartition("attempt")[2] for path in event_files.of(tmp_path / "tensorboard")]
    assert names == ["0.0", "0.1", "0.2"]


def test_what_a_kill_has_kept_from_the_disk_is_drawn_by_the_next_attempt(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.attempt([values(step, 1.0) for step in range(1, 9)], is_main=True)
    (events,) = event_files.of(node.tensorboard)
    ends = [end for end, _ in event_files.records(events)]
    with events.open("r+b") as file:
        file.truncate(ends[-5] + 7)  # torn within step 5
    node.resume(7)
    node.attempt([values(8, 2.0, "0.1")], is_main=True)
    assert read(node.tensorboard)["train/loss"] == {**dict.fromkeys(range(1, 8), 1), 8: 2}


def test_a_rank_0_that_comes_to_another_node_and_back(tmp_path: Path) -> None:
    one, two = Node(tmp_path / "one"), Node(tmp_path / "two")
    first = [*(values(step, 1.0) for step in range(1, 9)), evaluation(8, 0.1)]
    one.attempt(first, is_main=True)
    two.attempt(first, is_main=False)
    two.resume(6)
    second = [values(step, 2.0, "1.0") for step in range(7, 12)]
    two.attempt(second, is_main=True)  # the first node is lost
    assert read(two.tensorboard)["train/loss"] == {
        **dict.fromkeys(range(1, 7), 1),
        **dict.fromkeys(range(7, 12), 2),
    }

    one.resume(10)
    two.resume(10)
    assert metrics.held(two.path) > metrics.held(one.path)
    shutil.copy(two.path, one.path)  # as metrics.agree does
    third = [values(step, 3.0, "2.0") for step in range(11, 13)]
    one.attempt(third, is_main=True)
    two.attempt(third, is_main=False)
    expected = {**dict.fromkeys(range(1, 7), 1), **dict.fromkeys(range(7, 11), 2), 11: 3, 12: 3}
    assert read(one.tensorboard) == {"train/loss": expected}
    two.resume(12)
    two.attempt([values(13, 4.0, "3.0")], is_main=True)
    assert read(two.tensorboard) == {"train/loss": {**expected, 13: 4}}


def test_files_of_an_older_kit_are_drawn_anew(tmp_path: Path) -> None:
    node = Node(tmp_path)
    old = [
        {name: value for name, value in values(step, 1.0).items() if name != "attempt"} for step in (1, 2, 3)
    ]
    node.attempt([{**each, "attempt": "0.0"} for each in old], is_main=True)
    (events,) = event_files.of(node.tensorboard)
    events.rename(events.with_suffix("").with_suffix(""))
    node.path.write_text("".join(json.dumps(each) + "\n" for each in old))
    node.attempt([values(4, 2.0, "1.0")], is_main=True)
    assert read(node.tensorboard)["train/loss"] == {1: 1, 2: 1, 3: 1, 4: 2}


def test_a_long_history_is_drawn_and_sent_in_part(tmp_path: Path) -> None:
    lines = [json.dumps(values(step, 1.0)).encode() + b"\n" for step in range(1, 1001)]
    lines.insert(501, json.dumps(evaluation(501, 0.5)).encode() + b"\n")
    found = metrics.thinned(lines, 100)
    assert 90 < len(found) <= 102
    assert found[0] == lines[0]
    assert found[-1] == lines[-1]
    assert lines[501] in found
    assert metrics.thinned(lines, 100, whole=50)[-50:] == lines[-50:]


def test_a_history_is_compared_and_cut_at_its_end_alone(tmp_path: Path) -> None:
    """All ranks wait for that at the begin of each attempt, however long the run has been."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(values(step, 1.0)).encode() + b"\n" for step in range(1, 5001)]
    path.write_bytes(b"".join(lines) + b'{"step": 5001, "att')
    assert list(metrics.backwards(path))[1:] == lines[::-1]
    metrics.take_back(path, 4990, is_evaluated=True)
    assert path.read_bytes() == b"".join(lines[:4990])
    whole = metrics.held(path)
    assert (whole.last_step, whole.num_lines) == (4990, 1000)
    path.write_bytes(b"".join(metrics.thinned(lines[:4990], 2000, whole=1000)))
    assert metrics.held(path) == whole, "what was sent to a node is not sent again at the next attempt"
    path.write_bytes(b"".join([*lines[:4980], *lines[4981:4990]]))
    assert metrics.held(path) != whole
    size = path.stat().st_size
    assert metrics.from_step(path, size, 4989) == lines[4988:4990]
    assert metrics.first_after(path, size, (0, 0)) is None
    assert metrics.first_after(path, size, (-1, -1)) == 1
    metrics.take_back(path, 0, is_evaluated=False)
    assert metrics.held(path) == metrics.held(tmp_path / "none") < whole


def test_of_many_event_files_only_the_last_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    for number in range(4):
        first = 10 * number + 1
        steps = [values(step, 1.0, f"0.{number}") for step in range(first, first + 10)]
        node.attempt(steps, is_main=True)
    read_files: list[Path] = []
    records = event_files.records

    def counted(path: Path) -> Iterator[tuple[int, int]]:
        read_files.append(path)
        return records(path)

    monkeypatch.setattr(event_files, "records", counted)
    event_files.take_back(node.tensorboard, 25)
    assert read_files == event_files.of(node.tensorboard)[:-3:-1]
    assert max(raw_steps(node.tensorboard)) == 24


@pytest.mark.slow
def test_two_nodes_under_way_agree_on_the_history(tmp_path: Path) -> None:
    """One joins late, without a line; afterwards it has rank 0, and the whole curve."""
    program = ["-m", "nodekit.training"]
    common = ["--batch-size", 256, "--snapshot-every", 2, "--epochs", 2]
    folders = [tmp_path / "one", tmp_path / "two"]
    with ranks(1, program, *common, NODEKIT_OUTPUT_DIR=folders[0], NODEKIT_GENERATION=0) as (alone,):
        assert alone.wait(120) == 0
    common[-1] = 4
    for each in folders[1:]:
        shutil.copytree(folders[0] / "snapshots", each / "snapshots")  # as replicas are
    with ranks(2, program, *common, NODEKIT_OUTPUT_DIR=[*reversed(folders)], NODEKIT_GENERATION=1) as both:
        assert [each.wait(120) for each in both] == [0, 0]
    lines = [
        [json.loads(line) for line in (each / "metrics.jsonl").read_text().splitlines()] for each in folders
    ]
    shown = [[(each["step"], each["attempt"], each.get("test")) for each in own] for own in lines]
    assert shown[0] == shown[1]
    losses = {each["step"]: pytest.approx(each["loss"]) for each in lines[1] if "loss" in each}
    assert {each["attempt"] for each in lines[1]} == {"0.0", "1.0"}
    found = read(folders[1] / "tensorboard")
    before = [each["step"] for each in lines[1] if "loss" in each and each["attempt"] == "0.0"]
    assert found["train/loss"] == {step: losses[step] for step in found["train/loss"]}
    drawn = sorted(found["train/loss"])  # of quick steps not all are
    assert drawn[: len(before)] == before
    assert drawn[len(before)] == len(before) + 1
    assert drawn[-1] == max(losses)
    assert sorted(losses) == list(range(1, max(losses) + 1))
    accuracy = {each["step"]: pytest.approx(each["test"]["accuracy"]) for each in lines[1] if "test" in each}
    assert found["test/accuracy"] == accuracy


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    curves = Curves(tmp_path / "file" / "curves", first_step=1)
    curves.settle()
    curves.add(values(1, 1.0))
    curves.close()
    assert "no TensorBoard curves" in caplog.text


def test_a_disk_that_is_full_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    curves = Curves(tmp_path, first_step=1)
    curves.settle()
    curves._writer = SimpleNamespace(add_scalar=full, close=full)  # type: ignore[assignment]
    curves.add(values(1, 1.0))
    curves.add(values(2, 1.0))
    curves.close()
    assert caplog.text.count("is no longer written: [Errno 28]") == 1
