"""`kit runs`: the table, what it says of each run, and how runs compare; from records that are made up."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from disks import full, small_disk

from nodekit.deploy.commands import cli
from nodekit.deploy.host import current_status
from nodekit.deploy.output import plot
from nodekit.deploy.output.plot import Curve
from nodekit.deploy.records import find_runs, locks, record_files, runs
from nodekit.deploy.records.locks import SupervisorLock, starting
from nodekit.deploy.records.runs import Run
from nodekit.deploy.runs import runs_compare, runs_table
from nodekit.deploy.story import summary
from nodekit.deploy.story.summary import Summary
from nodekit.inventory.errors import KitError, NotWritten

START = time.mktime((2026, 11, 22, 6, 1, 0, 0, 0, -1))


def record(run_id: str, *, state: str = "succeeded", losses: tuple[float, ...] = (), **changes: Any) -> Run:
    """A run on record, with events as of one that trained ten steps between two samples."""
    fields: dict[str, Any] = {
        "name": run_id.partition("-")[0],
        "inventory_path": f"/labs/{run_id.partition('-')[0]}.yaml",
        "inventory": {"job": {"env": {}}},
        "command": None,
        "created": START,
        "started": START,
        "state": state,
        "verdict": "trained to the end" if state == "succeeded" else "",
        "nodes": {"gpu1": {}, "gpu2": {}},
        **changes,
    }
    run = Run(run_id=run_id, **fields)
    run.save()
    told: list[dict[str, Any]] = [
        {"time": START, "node": None, "kind": "run-started", "nodes": ["gpu1", "gpu2"], "command": []}
    ]
    if losses:
        told += [
            {"time": START + 2, "node": "gpu1", "kind": "rendezvous", "attempt": "0.0", "members": ["gpu1", "gpu2"]},
            {"time": START + 3, "node": "gpu1", "kind": "workers-started", "attempt": "0.0", "world_size": 4},
            {"time": START + 10, "node": "gpu1", "kind": "first-step", "attempt": "0.0", "step": 1},
        ]  # fmt: skip
    for number, loss in enumerate(losses, start=1):
        at, step = START + 10 + 10 * number, 10 * number
        common = {"node": "gpu1", "attempt": "0.0", "step": step}
        told.append({**common, "time": at, "kind": "sample", "total_steps": 10 * len(losses), "loss": loss})
        metrics = {"loss": loss, "accuracy": 1 - loss / 4}
        told.append({**common, "time": at, "kind": "evaluation", "epoch": number, "metrics": metrics})
    if state in ("succeeded", "failed", "stopped"):
        told.append(
            {
                "time": told[-1]["time"] + 1,
                "node": None,
                "kind": "run-ended",
                "state": state,
                "verdict": run.verdict,
            }
        )
    lines = [json.dumps({"run": run_id, **each}) + "\n" for each in told]
    (run.folder / "events.jsonl").write_text("".join(lines))
    return run


def table(capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    assert cli.main(["runs", *args]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_says_how_far_and_how_well(capsys: pytest.CaptureFixture[str]) -> None:
    record("lab-1122-060100-aaaa", losses=(2.0, 1.0, 0.5))
    record("big-1122-060200-bbbb", state="failed", verdict="gpu2: CUDA out of memory", created=START + 60)

    assert table(capsys) == [
        "run                   started           took  nodes  step   best             goodput  state      verdict",
        "lab-1122-060100-aaaa  2026-11-22 06:01  41 s  2      30/30  accuracy 87.50%  73%      succeeded  "
        "trained to the end",
        "big-1122-060200-bbbb  2026-11-22 06:02  1 s   2      –      –                –        failed     "
        "gpu2: CUDA out of memory",
    ]


def test_of_a_run_that_goes_on_the_step_is_that_of_now(capsys: pytest.CaptureFixture[str]) -> None:
    run = record("lab-1122-060100-aaaa", state="running", losses=(2.0, 1.0))
    for node, state, progress in (
        ("gpu1", "running", "17/20"),
        ("gpu2", "running", "16/20"),
        ("gpu3", "starting", ""),
        ("gpu4", "fenced", "12/20"),
    ):
        current_status.of(str(run.folder)).write(
            {"run": run.run_id, "time": START, "node": node, "state": state, "progress": progress}
        )
    assert " 16/20 " in table(capsys)[1]

    run.finish("stopped", "")
    assert " 20/20 " in table(capsys)[1], "as its events have it"


@pytest.mark.parametrize(
    ("guess", "shown"),
    [
        ({"step": 37, "total_steps": 100, "epoch": 3, "loss": 0.5}, "~37/100"),
        ({"step": 37, "total_steps": None, "epoch": None, "loss": None}, "~37"),
        ({"step": None, "total_steps": None, "epoch": 3, "loss": None}, "~epoch 3"),
        (None, "–"),
    ],
)
def test_where_a_script_tells_no_step_it_is_guessed_and_called_so(
    guess: dict[str, Any] | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record("lab-1122-060100-aaaa", state="running")
    status = {"run": run.run_id, "time": START, "state": "running", "progress": None}
    current_status.of(str(run.folder)).write({**status, "node": "gpu1", "guess": guess})
    current_status.of(str(run.folder)).write({**status, "node": "gpu2", "guess": None})
    for state in ("running", "succeeded"):  # and is kept in its summary
        if state == "succeeded":
            run.finish(state, "")
        for _ in range(2):
            assert cli.main(["runs"]) == 0
            said = capsys.readouterr()
            assert f" {shown} " in said.out.splitlines()[1]
            assert ("guessed from what rank 0 printed" in said.err) == (guess is not None)
    (told,) = json.loads("\n".join(table(capsys, "--json")))
    assert (told["step"], told["guess"]) == (None, guess)


@pytest.mark.parametrize(
    ("columns", "head"),
    [
        (150, "run started took nodes step best goodput state verdict"),
        (100, "run started nodes step state verdict"),
        (70, "run step state verdict"),
    ],
)
def test_a_narrow_terminal_does_without_some_columns(
    columns: int, head: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record("lab-1122-060100-aaaa", state="failed", losses=(2.0, 1.0), verdict="gpu2: " + "long " * 20)
    monkeypatch.setenv("COLUMNS", str(columns))

    runs_table.show([runs_table.row(run)])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == head.split()
    assert len(lines) == 2, "nothing is wrapped"
    assert all(len(line) <= columns for line in lines)
    assert lines[1].rstrip().endswith("…")


def test_json_has_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    record("lab-1122-060100-aaaa", losses=(2.0, 1.0, 0.5))

    (told,) = json.loads("\n".join(table(capsys, "--json")))

    assert (told["state"], told["step"], told["total_steps"], told["world_size"]) == ("succeeded", 30, 30, 4)
    assert told["best"] == {"accuracy": [0.875, 30], "loss": [0.5, 30]}
    assert told["goodput"] == pytest.approx(30 / 41)
    assert (told["seconds"], told["restarts"]) == (41.0, 0)


def test_some_are_chosen_by_name_and_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        record(
            f"lab-1122-06010{number}-aaaa", created=START + number, inventory_path=str(tmp_path / "a b.yaml")
        )
    record("big-1122-060200-bbbb")

    def ids(*args: str) -> list[str]:
        return [line.split()[0] for line in table(capsys, *args)[1:]]

    assert len(ids()) == 5
    assert ids("lab", "--last", "1") == ["lab-1122-060103-aaaa"]
    assert ids("a b.yaml", "--last", "2") == ["lab-1122-060102-aaaa", "lab-1122-060103-aaaa"]
    assert ids("big-1122") == ["big-1122-060200-bbbb"]
    assert cli.main(["runs", "nobody"]) == 1
    assert "no run of 'nobody' on record: wanted an inventory file" in capsys.readouterr().err


def test_a_run_that_nobody_looks_after_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    run = record("lab-1122-060100-aaaa", state="running")
    assert not runs_table.is_left(record("sl-1122-060100-cccc", state="running", slurm={"job_id": "1"}))

    assert runs_table.is_left(run)
    left = table(capsys, "lab")[1]
    assert (
        "  left   nobody looks after it: kit up /labs/lab.yaml does again, kit down lab-1122-060100-aaaa"
        in left
    )
    with starting(Path(run.inventory_path)):  # a kit up is about to
        assert not runs_table.is_left(run)
    lock = SupervisorLock(run)
    assert lock.acquire()
    assert not runs_table.is_left(run)
    assert "  running" in table(capsys, "lab")[1]
    lock.release()
    assert lock.acquire(), "looking has not taken it"
    lock.release()


def test_an_ended_runs_numbers_are_kept_and_read_anew_when_its_events_have_grown() -> None:
    run = record("lab-1122-060100-aaaa", losses=(2.0, 1.0))
    first = summary.summary(run)
    events = run.folder / "events.jsonl"
    whole = events.read_text()

    events.write_text("x" * len(whole))  # as long as before: nobody reads it
    assert summary.summary(run) == first
    better = {"time": START + 30.5, "node": "gpu1", "kind": "evaluation", "attempt": "0.0", "step": 20}
    events.write_text(whole + json.dumps({**better, "metrics": {"f1": 0.9}}) + "\n")
    assert summary.summary(run).best["f1"] == (0.9, 20)
    (run.folder / summary.FILE).write_text('{"version": 1')  # torn
    assert summary.summary(run).step == 20


def test_an_ended_run_whose_last_event_is_lost_took_no_longer_than_its_record_says() -> None:
    run = record("lab-1122-060100-aaaa", losses=(2.0, 1.0), ended=START + 31)
    events = run.folder / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))
    assert summary.summary(run).seconds == 31


def test_a_result_that_is_no_number_is_no_best_value(capsys: pytest.CaptureFixture[str]) -> None:
    run = record("lab-1122-060100-aaaa", state="running", losses=())
    told = [
        {"time": START + 2, "node": "gpu1", "kind": "rendezvous", "attempt": "0.0", "members": ["gpu1"]},
        {
            "time": START + 9,
            "node": "gpu1",
            "kind": "agent-ended",
            "result": {"loss": math.nan, "accuracy": 1},
        },
    ]
    with (run.folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in told)
    assert cli.main(["runs", "--json"]) == 0
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert json.loads(out)[0]["best"] == {"accuracy": [1.0, None]}


def test_of_a_running_run_nothing_is_kept() -> None:
    run = record("lab-1122-060100-aaaa", state="running", losses=(2.0,))

    assert summary.summary(run).step == 10
    assert not (run.folder / summary.FILE).exists()


@pytest.mark.parametrize(
    ("best", "headline"),
    [
        ({}, None),
        ({"loss": (0.1, 1)}, ("loss", 0.1)),
        ({"loss": (0.1, 1), "f1": (0.8, 2)}, ("f1", 0.8)),
        ({"f1": (0.8, 2), "accuracy": (0.9, 3)}, ("accuracy", 0.9)),
    ],
)
def test_the_headline_is_the_metric_that_says_most(best: dict[str, Any], headline: Any) -> None:
    assert Summary(best=best).headline == headline


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (99, "99 s"), (100, "2 min"), (7200, "2.0 h"), (864000, "10.0 d")]
)
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert runs_table.duration(seconds) == text


# --- compared ---


def test_options_are_told_from_the_rest_of_a_command() -> None:
    argv = ["train.py", "--lr", "-1e-3", "--amp", "--betas", "0.9", "0.99", "--tag=a b", "-v"]

    assert runs_compare.options_of(argv) == {
        "command": "train.py",
        "--lr": "-1e-3",
        "--amp": "yes",
        "--betas": "0.9 0.99",
        "--tag": "a b",
        "-v": "yes",
    }


def test_curves_are_drawn_with_a_mark_each_where_there_are_no_colours() -> None:
    rising, falling = Curve("a", [(0, 0.0), (100, 1.0)]), Curve("b", [(0, 1.0), (100, 0.0)])

    lines = [
        "".join(cell.text for cell in line)
        for line in plot.plot([rising, falling], width=20, height=5, colour=False)
    ]

    assert lines == [
        "  1 ┤xx          oo",
        "    │  xxx    ooo  ",
        "0.5 ┤     xoxo     ",
        "    │  ooo    xxx  ",
        "  0 ┤oo          xx",
        "    └──────────────",
        "     0          100",
    ]


def test_in_colours_each_cell_knows_its_curve() -> None:
    rising, falling = Curve("a", [(0, 0.0), (100, 1.0)]), Curve("b", [(0, 1.0), (100, 0.0)])

    lines = plot.plot([rising, falling], width=40, height=6, colour=True)

    assert (lines[0][1].curve, lines[0][-1].curve) == (1, 0)
    assert (lines[5][1].curve, lines[5][-1].curve) == (0, 1)
    assert all(
        0x2800 < ord(cell.text) < 0x2900 for line in lines[:6] for cell in line if cell.curve is not None
    )
    assert plot.plot([Curve("none", [])], width=40, height=6, colour=True) == []
    assert plot.plot([Curve("one", [(5, 5.0)])], width=40, height=6, colour=True)


@pytest.fixture
def two() -> list[str]:
    record("lab-1122-060100-aaaa", losses=(2.0, 1.0, 0.5), command=["train.py", "--lr", "0.1"])
    record("lab-1122-060200-bbbb", losses=(2.0, 1.5), command=["train.py", "--lr", "<b>", "--amp"])
    return ["runs", "--compare", "lab-1122-0601", "lab-1122-0602"]


def test_compared_runs_are_drawn_and_told_apart(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(two) == 0

    output = capsys.readouterr().out
    assert output.startswith("training loss\n")
    assert "\naccuracy\n" in output
    assert "  o lab-1122-060100-aaaa\n  x lab-1122-060200-bbbb\n" in output
    rows = dict(
        re.split(r"  +", line, maxsplit=1) for line in map(str.strip, output.splitlines()) if "  " in line
    )
    assert rows["--lr"].split() == ["0.1", "<b>"]
    assert rows["--amp"].split() == ["–", "yes"]
    assert rows["steps"].split() == ["30", "20"]
    assert rows["best accuracy"].split("  ")[0] == "0.875 (step 30)"
    assert "\x1b" not in output


def test_compared_runs_are_told_to_programs(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*two, "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["runs"][0]["curves"]["training loss"] == [[10, 2.0], [20, 1.0], [30, 0.5]]
    assert told["differences"]["--lr"] == {"lab-1122-060100-aaaa": "0.1", "lab-1122-060200-bbbb": "<b>"}
    assert "command" not in told["differences"]


def test_a_page_of_compared_runs_needs_nothing_else(two: list[str], tmp_path: Path) -> None:
    assert cli.main([*two, "--html", str(tmp_path / "c d.html")]) == 0

    page = (tmp_path / "c d.html").read_text()
    assert "<td>&lt;b&gt;</td>" in page
    assert "<b>" not in page
    assert not re.search(r"""(src|href)=|url\(|@import|https?:""", page)
    assert page.count("<figure>") == 3
    shown = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            f"file://{tmp_path}/c d.html",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert shown.count('class="curve"') == 2 + 3 * 2


def test_too_few_are_not_compared(capsys: pytest.CaptureFixture[str], two: list[str]) -> None:
    assert cli.main([*two[:-1], "lab-1122-0601"]) == 1
    assert "found 1 run, wanted 2 to 6" in capsys.readouterr().err


def test_runs_that_have_ended_are_listed_without_their_events() -> None:
    for number in range(60):
        run = record(f"lab-1122-{number:06d}-aaaa")
        summary.summary(run)
    code = (
        "import sys, nodekit.deploy.records.events as events\n"
        "def read(folder): raise AssertionError(folder)\n"
        "events.read = read\n"
        "from nodekit.deploy.commands.cli import main\n"
        "sys.exit(main(['runs']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 61), done.stderr


# --- the record itself ---


def test_who_only_watches_writes_down_the_end_and_nothing_else() -> None:
    record("lab-1122-060100-aaaa", state="running", token="secret")
    watcher, supervisor = find_runs.find(None), find_runs.find(None)
    with supervisor.changing():
        supervisor.generation, supervisor.judgement = 3, {"generation": 3}
        supervisor.nodes = {**supervisor.nodes, "spare": {}}

    watcher.finish_stopped()

    now = find_runs.find(None)
    assert (now.state, now.generation, now.judgement) == ("stopped", 3, {"generation": 3})
    assert list(now.nodes) == ["gpu1", "gpu2", "spare"]
    assert (watcher.generation, watcher.state) == (3, "stopped")


def test_an_end_is_not_written_over_a_success_nor_over_another_start() -> None:
    record("lab-1122-060100-aaaa", state="running")
    watcher, supervisor = find_runs.find(None), find_runs.find(None)
    supervisor.finish("succeeded", "trained to the end")
    watcher.finish_stopped()
    assert find_runs.find(None).state == watcher.state == "succeeded"

    late, next_one = find_runs.find(None), find_runs.find(None)
    with next_one.changing():
        next_one.started, next_one.state, next_one.generation = START + 100, "running", 1
    late.finish("failed", "gpu1 was lost")
    assert (find_runs.find(None).state, find_runs.find(None).verdict) == ("running", "trained to the end")


def test_what_many_change_at_once_is_all_there() -> None:
    record("lab-1122-060100-aaaa", state="running", nodes={})
    code = (
        "import sys; from nodekit.deploy.records import find_runs\n"
        "for each in range(20):\n"
        "    run = find_runs.find(None)\n"
        "    with run.changing(): run.nodes = {**run.nodes, f'{sys.argv[1]}-{each}': {}}\n"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b")]

    def add(name: str) -> None:
        run = find_runs.find(None)
        for each in range(20):
            with run.changing():
                run.nodes = {**run.nodes, f"{name}-{each}": {}}

    threads = [threading.Thread(target=add, args=(name,)) for name in ("c", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [other.wait(60) for other in others] == [0, 0]
    assert set(find_runs.find(None).nodes) == {f"{name}-{each}" for name in "abcd" for each in range(20)}


def test_a_change_that_fails_leaves_the_record_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "small"))
    with small_disk(tmp_path / "small"):
        run = record("lab-1122-060100-aaaa", state="running", nodes={"gpu1": {"env": "x" * 5000}})
        with contextlib.suppress(ZeroDivisionError), run.changing():
            run.generation = 1
            run.started = 1 / 0
        with full(tmp_path / "small"):
            with pytest.raises(NotWritten) as raised, run.changing():
                run.generation = 2
            assert "run.json cannot be written: No space left on device; see to the disk" in str(raised.value)
            run.say_stop("kit down")  # what stops a run asks no room
        assert (run.generation, find_runs.find(None).generation) == (0, 0)
        with run.changing():
            run.generation = 3
        assert find_runs.find(None).generation == 3


def test_the_latest_run_is_the_one_begun_last_whatever_the_clock_said(tmp_path: Path) -> None:
    path = str(tmp_path / "lab.yaml")
    record("lab-1122-060100-aaaa", state="failed", created=START + 7200, inventory_path=path)
    record("lab-1122-060101-bbbb", state="failed", created=START, inventory_path=path)

    assert [run.run_id[-4:] for run in runs.all_runs()] == ["aaaa", "bbbb"]
    latest = find_runs.latest_of(tmp_path / "lab.yaml")
    assert latest is not None
    assert latest.run_id == find_runs.find(None).run_id == "lab-1122-060101-bbbb"


@pytest.mark.parametrize("given", ["below/../lab.yaml", "link.yaml", "linked/lab.yaml"])
def test_an_inventory_is_the_same_however_its_path_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    """Else `kit up ../lab.yaml` would never go on with a run, and start a second one beside one that is not over."""
    (tmp_path / "below").mkdir()
    (tmp_path / "link.yaml").symlink_to("lab.yaml")
    (tmp_path / "linked").symlink_to(".")
    written = str(tmp_path / given)  # an inventory's path is made absolute, and no more
    record("lab-1122-060100-aaaa", state="running", inventory_path=written)
    record("lab-1122-060101-bbbb", inventory_path=str(tmp_path / "other.yaml"))

    for path in (written, str(tmp_path / "lab.yaml")):
        found = find_runs.current(Path(path), None, is_new=False)
        assert found is not None
        assert found.run_id == "lab-1122-060100-aaaa"
        with pytest.raises(KitError, match="is not over"):
            find_runs.current(Path(path), None, is_new=True)
        assert "bbbb" not in "".join(table(capsys, path))
    assert find_runs.find(None).run_id == "lab-1122-060101-bbbb"


@pytest.mark.parametrize("tried", ["drills", "selftests"])
def test_what_a_drill_has_run_is_not_the_latest_run_beside_others(tried: str) -> None:
    """A bare `kit test` would measure a drill's weights."""
    own = record_files.folder().parent / tried / "lab-1122-060000" / "inventory.yaml"
    record("lab-drill-1122-060100-aaaa", inventory_path=str(own))
    assert find_runs.find(None).run_id == "lab-drill-1122-060100-aaaa", "there is no other"
    record("lab-1122-060101-bbbb")
    record("lab-drill-1122-060102-cccc", inventory_path=str(own))
    assert find_runs.find(None).run_id == "lab-1122-060101-bbbb"
    assert find_runs.find("lab-drill-1122-060102").run_id == "lab-drill-1122-060102-cccc"
    record("lab-1122-060103.0", slurm={"sweep": "lab-1122-060103"})
    record("lab-drill-1122-060104-dddd", inventory_path=str(own))
    assert [run.run_id for run in find_runs.sweep(None)] == ["lab-1122-060103.0"]


def test_of_many_runs_with_one_beginning_the_last_ones_are_named_and_that_there_are_more() -> None:
    for number in range(9):
        record(f"lab-1122-06010{number}-aaaa")
        if number == 7:
            with pytest.raises(KitError, match=r"'lab' begins the ids of 8 runs: lab-1122-060100-aaaa, "):
                find_runs.find("lab")
    with pytest.raises(KitError, match=r"'lab' begins the ids of 9 runs: …, lab-1122-060101-aaaa, "):
        find_runs.find("lab")
    with pytest.raises(KitError, match=r"no run 'x' on record; the latest are …, lab-1122-060101-aaaa, "):
        find_runs.find("x")


def test_a_run_that_is_not_over_comes_before_those_that_are(tmp_path: Path) -> None:
    path = str(tmp_path / "lab.yaml")
    for number, state in enumerate(("failed", "running", "stopped")):
        record(f"lab-1122-06010{number}-aaaa", state=state, created=START, inventory_path=path)
    record("lab-1122-060103-aaaa.0", state="running", inventory_path=path, slurm={"sweep": "lab-1122-060103"})

    latest = find_runs.latest_of(tmp_path / "lab.yaml")
    assert latest is not None
    assert latest.run_id == "lab-1122-060101-aaaa"
    assert find_runs.find(None).run_id == "lab-1122-060103-aaaa.0", (
        "a sweep's runs are not asked for by inventory"
    )


def test_runs_of_before_they_were_counted_come_first_by_their_time(tmp_path: Path) -> None:
    for name, created in (("b", START + 9999), ("a", START)):
        old = record(f"lab-1122-060100-{name}", created=created)
        fields = json.loads((old.folder / "run.json").read_text())
        del fields["number"]  # as it was written then
        (old.folder / "run.json").write_text(json.dumps(fields))
    (record_files.folder().parent / "runs.count").unlink()
    record("lab-1122-060100-c", created=START - 1)

    assert [(run.run_id[-1], run.number) for run in runs.all_runs()] == [("a", 0), ("b", 0), ("c", 1)]
    with find_runs.find("lab-1122-060100-a").changing():
        pass
    assert find_runs.find("lab-1122-060100-a").number == 0, "it stays where it is"


def test_the_count_of_runs_goes_on_where_its_file_was_torn() -> None:
    record("lab-1122-060100-aaaa")
    record("lab-1122-060100-bbbb")
    (record_files.folder().parent / "runs.count").write_text("")
    assert record("lab-1122-060100-cccc").number == 3


def test_a_supervisor_acts_though_its_name_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "small"))
    with small_disk(tmp_path / "small"):
        run = record("lab-1122-060100-aaaa", state="running")
        lock = SupervisorLock(run)
        assert lock.acquire()
        lock.release()
        (run.folder / "supervisor.lock").write_text("")
        with full(tmp_path / "small"):
            assert lock.acquire()
            assert not SupervisorLock(run).acquire()
            lock.release()


def test_a_lock_on_a_disk_that_has_become_read_only_is_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").touch()

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refused)
    first = locks.locked(tmp_path / "lock")
    assert first is not None
    assert locks.locked(tmp_path / "lock") is None
    first.close()
    second = locks.locked(tmp_path / "lock")
    assert second is not None
    second.close()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("/srv/state", "/srv/state/nodekit/runs"),
        ("state", "/root/.local/state/nodekit/runs"),
        ("", "/root/.local/state/nodekit/runs"),
        (None, "/root/.local/state/nodekit/runs"),
    ],
)
def test_records_are_where_xdg_says(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a relative path each folder in which kit is called would have runs of its own."""
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.delenv("XDG_STATE_HOME")
    if given is not None:
        monkeypatch.setenv("XDG_STATE_HOME", given)
    assert str(record_files.folder()) == found


@pytest.mark.parametrize(
    ("code", "cure"),
    [(errno.EACCES, "see whose it is (ls -ld /state)"), (errno.EIO, "see to the disk (df /state)")],
)
def test_what_is_another_users_is_not_told_of_as_a_full_disk(code: int, cure: str) -> None:
    with pytest.raises(NotWritten) as raised, record_files.told(Path("/state/file")):
        raise OSError(code, os.strerror(code))
    assert raised.value.problem.cure.startswith(cure)
