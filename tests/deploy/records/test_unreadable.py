"""A record that nobody can read is not one that is not there: nothing is started, ended or removed on that doubt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.commands import cli
from nodekit.deploy.commands.prepare import completion
from nodekit.deploy.host import files
from nodekit.deploy.launch import start
from nodekit.deploy.records import events, find_runs, record_files
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError, NotWritten
from nodekit.inventory.load import dump, load_inventory

ID, OTHER = "lab-1122-060115-77ab", "lab-1122-060116-88cd"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.0)


def record(folder: Path, run_id: str = ID, *, name: str = "lab", **changes: Any) -> Run:
    """A run on record, of an inventory of its name."""
    file = folder / f"{name}.yaml"
    file.write_text(f"connection: local\nworkdir: {folder}/work\nhosts: {{a: , b: }}\n")
    fields: dict[str, Any] = {"state": "failed", "nodes": {}, "created": 1.7e9, **changes}
    run = Run(
        run_id=run_id, name=name, inventory_path=str(file), inventory=dump(load_inventory(file)), command=None, **fields
    )  # fmt: skip
    run.save()
    return run


def link_to_itself(path: Path) -> None:
    """As a server that is gone: reading is an error, and not that nothing is there."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


UNREADABLE = [
    (link_to_itself, "Too many levels of symbolic links"),
    (folder_in_place, "Is a directory"),
    (fifo, "it is no regular file"),
    (torn, "it is damaged"),
    (nested, "it is nested too deeply"),
    (changed(run_id="../.."), "it is the record of '../..'"),
    (changed(run_id=5), "its run_id is not what kit writes there"),
    (changed(slurm=None), "its slurm is not what kit writes there"),
    (changed(nodes=[]), "its nodes is not what kit writes there"),
    (changed(created=1e300), "its created is not what kit writes there"),
    (changed(created=float("nan")), "its created is not what kit writes there"),
    (changed(ended="x"), "its ended is not what kit writes there"),
    (changed(state="paused"), "its state 'paused' is none that this kit knows"),
]


@pytest.mark.parametrize(("damage", "why"), UNREADABLE)
def test_a_record_that_cannot_be_read_is_told_and_never_taken_for_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], why: str
) -> None:
    path = record(tmp_path, state="running").folder / "run.json"
    record(tmp_path, OTHER, name="other")
    damage(path)
    for argv in (
        ["status"],
        ["down"],
        ["status", ID],
        ["rm", "--yes", ID],
        ["up", str(tmp_path / "lab.yaml")],
    ):
        assert cli.main(argv) == 1, argv
        told = capsys.readouterr().err
        assert f"{path} cannot be read: {why}" in told, argv
        assert f"move {path.parent} to another place" in told
    assert os.path.lexists(path)

    assert cli.main(["runs"]) == 0
    said = capsys.readouterr()
    assert OTHER in said.out
    assert f"{path} cannot be read: {why}" in said.err
    assert find_runs.find(OTHER).run_id == OTHER
    assert OTHER in completion.runs_on_record()
    assert cli.main(["rm", "--yes", "--older-than", "1d"]) == 0
    assert f"{ID} stays" in capsys.readouterr().out
    assert os.path.lexists(path)


@pytest.mark.parametrize("damage", [link_to_itself, folder_in_place, fifo])
def test_a_word_to_stop_that_cannot_be_read_is_one(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Else who supervises the run would start what `kit down` is stopping."""
    run = record(tmp_path, state="running")
    assert run.stopped_by == ""
    run.say_stop("kit down")
    assert run.stopped_by == "kit down"
    damage(run.folder / "stop")
    assert run.stopped_by == f"somebody ({run.folder / 'stop'} cannot be read)"


def test_a_folder_in_place_of_the_word_to_stop_is_refused_in_words(tmp_path: Path) -> None:
    run = record(tmp_path, state="running")
    run.say_stop("kit down")
    folder_in_place(run.folder / "stop")
    run.say_stop("kit down")
    with pytest.raises(
        KitError, match=rf"stop cannot be removed: .*; while it is there, {run.run_id} counts as"
    ):
        run.say_stop("")


def test_a_run_of_another_inventory_does_not_keep_one_from_starting(tmp_path: Path) -> None:
    run = record(tmp_path)
    changed(state="paused")(run.folder / "run.json")
    assert find_runs.latest_of(tmp_path / "other.yaml") is None
    with pytest.raises(KitError, match="paused"):
        find_runs.current(tmp_path / "lab.yaml", None, is_new=True)


def test_fields_of_a_newer_kit_are_no_damage_and_are_kept(tmp_path: Path) -> None:
    path = record(tmp_path).folder / "run.json"
    changed(new_field={"a": 1})(path)
    run = find_runs.find(None)
    with run.changing():
        run.generation = 7
    assert (find_runs.find(ID).generation, json.loads(path.read_text())["new_field"]) == (7, {"a": 1})


def test_a_copy_of_a_record_is_no_second_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path)
    copy = run.folder.with_name(f"{ID}.bak")
    copy.mkdir()
    (copy / "run.json").write_bytes((run.folder / "run.json").read_bytes())

    assert find_runs.find(ID).folder == run.folder
    assert cli.main(["rm", f"{ID}.bak", "--yes"]) == 1
    assert f"it is the record of '{ID}'" in capsys.readouterr().err
    assert run.folder.exists()


@pytest.mark.parametrize(
    "argv", [["rm", "--yes", ""], ["down", ""], ["status", ""], ["runs", ""], ["why", " "]]
)
def test_an_empty_id_is_no_beginning_of_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    run = record(tmp_path)
    assert cli.main(argv) == 1
    assert "found an empty id, wanted that of a run; kit runs lists them" in capsys.readouterr().err
    assert run.folder.exists()


def test_a_sweep_one_of_whose_runs_cannot_be_read_is_not_one_without_it(tmp_path: Path) -> None:
    slurm = {"sweep": ID, "values": "lr=1"}
    for number in (0, 1):
        record(tmp_path, f"{ID}.{number}", slurm=slurm)
    link_to_itself(record_files.folder() / f"{ID}.1/run.json")
    for name in (ID, ID[:12], f"{ID}.1"):
        with pytest.raises(KitError, match=r"1/run\.json cannot be read"):
            find_runs.sweep(name) or find_runs.find(name)
    assert find_runs.sweep(f"{ID}.0") == []
    assert find_runs.find(f"{ID}.0").run_id == f"{ID}.0"


def test_what_cannot_be_read_is_not_written_over_but_by_who_supervises(tmp_path: Path) -> None:
    run = record(tmp_path, state="running", token="x")
    path = run.folder / "run.json"
    torn(path)
    with pytest.raises(NotWritten, match="it is damaged"), run.changing():
        run.generation = 1
    with pytest.raises(KitError, match="it is damaged"):
        run.reload()
    with run.changing(mends=True):
        run.generation = 2
    assert (find_runs.find(ID).generation, find_runs.find(ID).token) == (2, "x")
    link_to_itself(path)
    with pytest.raises(NotWritten, match="Too many levels"), run.changing(mends=True):
        run.generation = 3
    assert run.generation == 2


@pytest.mark.parametrize("damage", [link_to_itself, folder_in_place, fifo])
def test_events_that_cannot_be_read_are_told_and_no_reason_to_begin_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    run = record(tmp_path)
    run.event("said", text="x")
    damage(run.folder / "events.jsonl")
    assert cli.main(["runs"]) == 0
    assert "events.jsonl cannot be read" in capsys.readouterr().out
    assert not (run.folder / "summary.json").exists()
    for read in (events.read, events.now):
        with pytest.raises(KitError, match="so what has happened in this run is not known"):
            read(run.folder)
    assert events.Follower(run.folder).more() == []
    events.Gatherer(run.folder)
    assert start.events.read is events.read, "a run that goes on asks it for its snapshots"


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    run = record(tmp_path)
    run.event("said", text="x")
    with (run.folder / "events.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
        file.writelines(
            json.dumps({"time": 1.0, "node": "a", "kind": "said", **each}) + "\n"
            for each in (
                {"time": float("nan")},
                {"node": []},
                {"kind": {}},
                {"at": "x"},
                {"at": [1, 2]},
                {"at": 5},
            )
        )
    assert [event.kind for event in events.read(run.folder)] == ["said"]
    assert cli.main(["runs"]) == 0


@pytest.mark.parametrize(
    "kept", ["[" * 100_000, "5", '{"version": 2, "events_bytes": SIZE, "summary": {"best": 5}}',
             '{"version": 2, "events_bytes": SIZE, "summary": {"best": {}, "goodput": "x"}}'],
)  # fmt: skip
def test_a_damaged_summary_is_made_anew(tmp_path: Path, kept: str) -> None:
    run = record(tmp_path)
    run.event("said", text="x")
    size = (run.folder / "events.jsonl").stat().st_size
    (run.folder / "summary.json").write_text(kept.replace("SIZE", str(size)))
    assert cli.main(["runs"]) == 0
    assert json.loads((run.folder / "summary.json").read_text())["events_bytes"] == size


def test_an_inventory_that_is_a_fifo_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "lab.yaml")
    assert cli.main(["up", str(tmp_path / "lab.yaml")]) == 1
    assert "lab.yaml: found a FIFO, wanted a file" in capsys.readouterr().err
