"""What a run's record comes to: of its end, of its stop, and of nodes that are to be out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.records import runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError, NotWritten

ID = "lab-1122-060115-77ab"


def record(folder: Path, run_id: str = ID, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "state": "running",
        "created": 1.7e9,
        "inventory": {},
        "command": None,
        **changes,
    }
    run = Run(run_id=run_id, name="lab", inventory_path=str(folder / "lab.yaml"), **fields)
    run.save()
    return run


def on_disk(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "run.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("state", "ended", "goes_until"),
    [("failed", 5.0, 5.0), ("failed", None, None), ("running", 5.0, None), ("stopped", 7.0, 7.0)],
)
def test_the_history_of_a_run_goes_to_its_end_and_of_one_that_was_resumed_to_now(
    state: str, ended: float | None, goes_until: float | None, tmp_path: Path
) -> None:
    found = record(tmp_path, state=state, ended=ended).end_or_now()
    assert found == (goes_until or pytest.approx(time.time(), abs=60))


def test_what_was_started_goes_on_until_it_ends_or_is_started_anew(tmp_path: Path) -> None:
    run = record(tmp_path, started=5.0)
    assert run.is_still(5.0)
    assert not run.is_still(4.0)
    run.state = "starting"
    assert run.is_still(5.0)
    run.state = "stopped"
    assert not run.is_still(5.0)


def test_the_end_of_a_run_is_its_last_unless_it_succeeded_or_was_started_anew(tmp_path: Path) -> None:
    run = record(tmp_path, started=5.0)
    other, late = (runs.parse((run.folder / "run.json").read_bytes(), ID) for _ in range(2))
    run.say_stop("kit down")
    run.finish_stopped()
    assert (on_disk(run)["state"], on_disk(run)["verdict"]) == ("stopped", "stopped by kit down")
    run.say_stop("")
    run.finish_stopped()
    assert on_disk(run)["verdict"] == "stopped"
    other.finish("succeeded", "trained to the end")
    assert (other.state, on_disk(run)["state"]) == ("succeeded", "succeeded")
    run.finish("failed", "a node was lost")
    assert (run.state, on_disk(run)["verdict"]) == ("succeeded", "trained to the end")
    run.started, run.state = 6.0, "running"
    run.save()
    late.finish("failed", "of the start before")
    assert on_disk(run)["state"] == "running"
    told = [json.loads(line)["kind"] for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert told == ["run-ended"] * 3
    last = json.loads((run.folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["state"], last["verdict"]) == ("succeeded", "trained to the end")


def test_an_end_that_cannot_be_written_down_is_known_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "write_private", full)
    with pytest.raises(NotWritten):
        run.finish("failed", "a node was lost", {"name": "oom"})
    assert (run.state, run.verdict, run.cause) == ("failed", "a node was lost", {"name": "oom"})
    assert on_disk(run)["state"] == "running"


def test_what_another_process_has_written_stays_and_an_error_changes_nothing(tmp_path: Path) -> None:
    run = record(tmp_path)
    other = runs.parse((run.folder / "run.json").read_bytes(), ID)
    with other.changing() as is_damaged:
        other.code_digest = "abc"
    assert not is_damaged
    with pytest.raises(ZeroDivisionError), run.changing():  # noqa: PT012
        run.verdict = "?"
        raise ZeroDivisionError
    assert (run.verdict, on_disk(run)["verdict"]) == ("", "")
    with run.changing():
        run.verdict = "mine"
    assert (on_disk(run)["code_digest"], on_disk(run)["verdict"]) == ("abc", "mine")


def test_who_supervises_mends_a_damaged_record_and_keeps_it(tmp_path: Path) -> None:
    run = record(tmp_path)
    (run.folder / "run.json").write_text("{")
    with pytest.raises(NotWritten), run.changing():
        pass
    with run.changing(mends=True) as is_damaged:
        assert is_damaged
    assert (run.folder / "run.json.damaged").read_text() == "{"
    assert on_disk(run)["run_id"] == ID


def test_nodes_that_are_out_are_known_with_why(tmp_path: Path) -> None:
    run = record(tmp_path)
    assert run.drained == frozenset()
    run.drain({"gpu2": "", "gpu1": "GPU 3 is lost"})
    assert run.drained_because == {"gpu1": "GPU 3 is lost", "gpu2": ""}
    (run.folder / "drained").write_text('["gpu7"]')  # as an older kit wrote it
    assert run.drained_because == {"gpu7": ""}
    for text in ("{", "5", "[[]]"):
        (run.folder / "drained").write_text(text)
        with pytest.raises(KitError, match="is damaged: it names no nodes") as raised:
            _ = run.drained
        assert raised.value.problem.cure == "remove it, then kit drain again what is to stay out"
    (run.folder / "drained").unlink()
    (run.folder / "drained").mkdir()
    with pytest.raises(KitError, match="cannot be read") as raised:
        _ = run.drained
    assert raised.value.problem.cure


def test_runs_are_numbered_in_the_order_of_their_start_whatever_the_clock_says(tmp_path: Path) -> None:
    first = record(tmp_path, created=9.0)
    second = record(tmp_path, f"{ID[:-1]}c", created=1.0)
    assert (first.number, second.number) == (1, 2)
    first.save()
    assert first.number == 1
    counted = runs.folder().parent / "runs.count"
    assert counted.read_text() == "2"
    counted.write_text("no number")
    third = record(tmp_path, f"{ID[:-1]}d")
    assert (third.number, counted.read_text()) == (3, "3")
    first.number = 0  # as of a kit that gave none: it stays older than those that have one
    first.save()
    assert on_disk(first)["number"] == 0
    found, unreadable = runs.on_record()
    assert ([each.number for each in found], unreadable) == ([0, 2, 3], [])


def test_a_folder_without_a_record_is_no_run_and_one_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    run = record(tmp_path)
    (runs.folder() / "empty").mkdir()
    (runs.folder() / "torn").mkdir()
    (runs.folder() / "torn" / "run.json").write_text("{")
    found, unreadable = runs.on_record()
    assert [each.run_id for each in found] == [run.run_id]
    assert [each.run_id for each in unreadable] == ["torn"]
