"""The screen that a run ends with: what is named there, and what a script wrote beside its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.host.code import treefiles as tree
from nodekit.deploy.host.node import artifacts
from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.host.server import read_file
from nodekit.deploy.launch import watch
from nodekit.deploy.launch.ending import rows
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import HostError


def placed(folder: Path, **files: str) -> Path:
    """A run's code folder, as kit leaves it."""
    code = folder / "runs" / "r" / "code"
    code.mkdir(parents=True)
    for name, text in files.items():
        (code / name).write_text(text)
    (code / "data").symlink_to("/nowhere")
    stats, _ = tree.hash_files(str(code), files)
    listed: list[Any] = [[name, "f", False, len(text), stats[name][4]] for name, text in files.items()]
    tree.write_list(str(code), "digest", [*listed, ["data", "l", False, 0, "/nowhere"]], stats)
    return code


def look(code: Path) -> dict[str, Any]:
    node = code.parent / "n1"
    return artifacts.list_artifacts(
        str(node), str(code), str(node / "snapshots"), [str(node / "output" / "best")]
    )


def test_what_came_with_the_code_was_not_written_by_the_script(tmp_path: Path) -> None:
    code = placed(tmp_path, train="x", other="y")
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "m.pyc").write_text("…")
    assert artifacts.written(str(code)) == {"entries": [], "is_all": True}


def test_what_a_script_wrote_is_found_by_its_first_folder_the_largest_first(tmp_path: Path) -> None:
    code = placed(tmp_path, train="x", other="y")
    (code / "out" / "deep").mkdir(parents=True)
    (code / "out" / "ckpt.pt").write_bytes(b"0" * 500)
    (code / "out" / "deep" / "log").write_bytes(b"0" * 50)
    (code / "other").write_text("changed by the job")
    (code / "a\nb").touch()
    assert artifacts.written(str(code)) == {
        "entries": [["out/", 2, 550], ["other", 1, 18], ["a\nb", 1, 0]],
        "is_all": True,
    }


def test_nothing_is_said_of_a_folder_whose_code_is_not_known(tmp_path: Path) -> None:
    code = placed(tmp_path)
    Path(f"{code}.tree.json").unlink()
    (code / "out").touch()
    assert artifacts.written(str(code)) is None


def test_a_folder_of_very_many_files_is_looked_through_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MOST_FILES", 3)
    code = placed(tmp_path)
    (code / "out").mkdir()
    for number in range(5):
        (code / "out" / str(number)).touch()
    assert artifacts.written(str(code)) == {"entries": [["out/", 2, 0]], "is_all": False}, (
        "data is one of three"
    )


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("logs/rank0-0.0.log", "logs"),
        ("snapshots/step1.pt", "snapshots"),
        ("snapshots/fence", ""),
        ("snapshots/.step1.pt", ""),
        ("output/events.out.tfevents.1", "curves"),
        ("output/result.json", ""),
        ("output/best/weights.pt", "weights"),
    ],
)
def test_only_what_is_there_is_found(tmp_path: Path, file: str, found: str) -> None:
    code = placed(tmp_path)
    node = code.parent / "n1"
    (node / file).parent.mkdir(parents=True)
    (node / file).touch()
    told = look(code)
    assert [kind for kind in ("logs", "snapshots", "curves", "weights") if told[kind]] == [found] * bool(
        found
    )


def nodes(*names: str) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "node_rank": rank,
            "node_dir": f"/w/runs/r/{name}",
            "code_dir": "/w/runs/r/code",
            "env": {"NODEKIT_SNAPSHOT_DIR": f"/w/runs/r/{name}/snapshots"},
        }
        for rank, name in enumerate(names)
    }


def told(code: str = "", entries: list[Any] | None = None, **there: Any) -> dict[str, Any]:
    nothing = {"logs": False, "snapshots": False, "curves": False, "weights": ""}
    return {**nothing, **there, "code": code, "written": {"entries": entries or [], "is_all": True}}


def test_each_kind_is_named_on_the_first_node_that_has_it() -> None:
    found = {
        "a": told(logs=True),
        "b": told(logs=True, snapshots=True, weights="/w/best"),
        "c": told(snapshots=True),
    }
    assert rows("r", nodes("a", "b", "c"), found) == [
        ("logs", "a:/w/runs/r/a/logs   (kit logs r)"),
        ("snapshots", "b:/w/runs/r/b/snapshots"),
        ("weights", "b:/w/best   (kit test r)"),
    ]
    assert [text[0] for _, text in rows("r", nodes("a", "b", "c"), found, ["a", "b"])] == ["a", "c", "b"], (
        "what lost nodes have is old"
    )


def test_what_was_written_is_named_once_for_nodes_that_share_the_folder() -> None:
    out = [["out/", 3, 1_200_000_000], *([f"{number}.txt", 1, 1500] for number in range(5))]
    found = {"a": told("one", out), "b": told("one", out), "c": told("two", [["log", 1, 12]])}
    assert rows("r", nodes("a", "b", "c"), found) == [
        (
            "written",
            "a:/w/runs/r/code: out/ (3 files, 1.2 GB), 0.txt (1.5 kB), 1.txt (1.5 kB), 2.txt (1.5 kB), "
            "2 more (3.0 kB)",
        ),
        ("written", "c:/w/runs/r/code: log (12 bytes)"),
    ]


def test_a_node_that_could_not_be_asked_is_named() -> None:
    found: dict[str, Any] = {"b": HostError("b", "no route"), "c": told()}
    assert rows("r", nodes("a", "b", "c"), found) == [
        ("not known", "what is on a, b, which could not be asked")
    ]


def test_nodes_whose_folder_has_no_name_are_taken_for_apart(tmp_path: Path) -> None:
    code = placed(tmp_path)
    assert look(code)["code"] == ""
    (tmp_path / ".id").write_text("abcd")
    assert look(code)["code"] == hostfacts.read_folder_id(str(tmp_path)) != ""


def test_copies_of_one_folder_on_disks_of_their_own_are_taken_for_apart(tmp_path: Path) -> None:
    out = [["log", 1, 12]]
    found = {"a": told("one@a:1:2", out), "b": told("one@b:1:2", out)}
    assert [text.partition(":")[0] for _, text in rows("r", nodes("a", "b"), found)] == ["a", "b"]
    # Of a file server that is a node, too, the others have the same folder from there.
    assert len(rows("r", nodes("a", "b", "c"), {**found, "b": told("one", out), "c": told("one", out)})) == 1


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"accuracy": 0.975}', ", accuracy 97.50%"),
        ('{"accuracy": NaN, "stopped_early": "no better"}', "; it ended early: no better"),
        ("[0.975]", ""),
        ("0.975", ""),
        ("half of", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_run_that_succeeded_ends_well_whatever_its_script_has_written_as_its_result(
    tmp_path: Path, written: str, told: str
) -> None:
    """It had ended with a traceback, and exit status 1."""

    class Channel:
        def call(self, op: str, *, timeout_s: float, path: str) -> str | None:
            return read_file(path)

    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "result.json").write_text(written)
    run = Run(run_id="r", name="r", inventory_path="", inventory={}, command=None, created=0.0)
    run.nodes = {"n1": {"node_dir": str(tmp_path)}}
    assert watch._result(run, {"n1": Channel()}, "n1") == told  # type: ignore[dict-item]
