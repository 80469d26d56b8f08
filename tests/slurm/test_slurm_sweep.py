"""Sweeps and arrays: many runs of one inventory, on a real Slurm cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from agents import until
from slurm_runs import Site

from nodekit.deploy.commands.cli import main
from nodekit.deploy.records import find_runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError
from nodekit.slurm.sweep import Variant, variants

# Writes down what it was given; one of the runs fails while a file is there, and all wait while another is.
SCRIPT = """
import json, os, pathlib, sys, time
hold = pathlib.Path(os.environ["HOLD"])
lr = sys.argv[sys.argv.index("--lr") + 1] if "--lr" in sys.argv else "0"
pathlib.Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text("1/2")
while hold.exists() and hold.read_text() == "wait":
    time.sleep(0.1)
if hold.exists() and lr == "0.3":
    raise ValueError("so it is")
told = {"argv": sys.argv[1:], "index": os.environ.get("SLURM_ARRAY_TASK_ID"), "lr": float(lr)}
result = pathlib.Path(os.environ["NODEKIT_OUTPUT_DIR"], "result.json")
result.with_suffix(".new").write_text(json.dumps(told))
result.with_suffix(".new").replace(result)  # whole or not at all: it is looked at meanwhile
print("index", told["index"])
"""


def sweep_id(text: str) -> str:
    match = re.search(r"^sweep (\S+)$", text, re.MULTILINE)
    assert match, text
    return match[1]


def told(site: Site, sweep: str) -> dict[str, dict[str, Any]]:
    """Run → what its script wrote down."""
    found = {}
    for file in (site.shared / "runs").glob(f"{sweep}.*/node?/output/result.json"):
        found[file.parents[2].name] = json.loads(file.read_text())
    return found


@pytest.mark.lab
def test_a_sweep_runs_every_value_and_only_what_failed_again(site: Site) -> None:
    (site.folder / "job.py").write_text(SCRIPT)
    login = f"root@{site.lab.hosts['node2'].address}"  # a sweep may be submitted from afar, too
    path = site.inventory("swept", ["job.py", "a b"], {"nodes": 1, "login": login}, max_restarts=0)
    site.hold("swept").touch()
    argv = ["up", path.name, "--sweep", "lr=0.1,0.3", "--sweep", "name=x;$HOME"]
    first = site.kit(*argv)
    assert first.returncode == 3, first.stdout + first.stderr
    sweep = sweep_id(first.stdout)
    rows = [line.split() for line in first.stdout.rpartition("\n\n")[2].splitlines()]
    assert rows[0] == ["run", "values", "state", "step", "result"]
    assert rows[1] == [f"{sweep}.0", "lr=0.1", "name=x;$HOME", "succeeded", "1/2", "lr=0.1"]
    assert rows[2][:5] == [f"{sweep}.1", "lr=0.3", "name=x;$HOME", "failed", "1/2"]
    assert told(site, sweep)[f"{sweep}.0"]["argv"] == ["a b", "--lr", "0.1", "--name", "x;$HOME"]
    # One array, and each of its jobs has found its own number.
    jobs = [run.slurm["job_id"] for run in find_runs.sweep(sweep)]
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_0", f"{array}_1"]

    site.hold("swept").unlink()
    second = site.kit(*argv)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"resuming {sweep}" in second.stdout
    assert "submit   1 run," in second.stdout
    assert set(told(site, sweep)) == {f"{sweep}.0", f"{sweep}.1"}
    after = [run.slurm["job_id"] for run in find_runs.sweep(sweep)]
    assert after[0] == jobs[0]
    assert after[1] not in jobs
    listed = site.kit("runs").stdout
    row = rf"{sweep}\.1 .* succeeded +lr=0\.3 name=x;\$HOME +trained to the end"
    assert re.search(row, listed), listed


@pytest.mark.lab
def test_an_array_has_its_indexes_and_down_cancels_them_all(site: Site) -> None:
    (site.folder / "job.py").write_text(SCRIPT)
    path = site.inventory("indexed", ["job.py"], {"nodes": 1, "array": "3,5-9:2%2"})
    hold = site.hold("indexed")
    hold.write_text("wait")
    started = site.kit("up", path.name, "-d")
    assert started.returncode == 0, started.stderr
    sweep = sweep_id(started.stdout)
    members = [f"{sweep}.{index}" for index in (3, 5, 7, 9)]
    assert f"{sweep} is queued: kit status {sweep} shows it" in started.stdout

    def states() -> list[str]:
        return [line.split()[2] for line in site.kit("status", sweep).stdout.splitlines()[1:]]

    until(lambda: states() == ["running", "running", "pending", "pending"], timeout_s=60, what="two at once")
    array = find_runs.find(members[0]).slurm["job_id"].partition("_")[0]
    assert "ArrayTaskThrottle=2 " in site.slurm("scontrol", "show", "job", "--oneliner", array)
    for number, member in enumerate(members):  # as where kit up was killed before it knew the array's id
        record = find_runs.find(member)
        record.slurm, record.state = {**record.slurm, "job_id": "", "task": f"_{number}"}, "starting"
        record.save()
    again = site.kit("up", path.name, "-d")
    assert f"attached to {sweep}" in again.stdout, again.stdout + again.stderr
    assert [find_runs.find(each).slurm["job_id"] for each in members] == [f"{array}_{at}" for at in range(4)]
    refused = site.kit("up", path.name, "--new")
    assert f"{sweep} of this inventory is not over; kit down {sweep} stops it" in refused.stderr
    # The first two go on to the end; the others are cancelled, one of them before it ran.
    until(lambda: len(list((site.shared / "runs").glob(f"{sweep}.*/node?/progress/*"))) >= 2, timeout_s=60)
    hold.write_text("go")
    until(lambda: set(told(site, sweep)) >= set(members[:2]), timeout_s=60, what="two results")
    hold.write_text("wait")
    assert {run: each["index"] for run, each in told(site, sweep).items() if run in members[:2]} == {
        members[0]: "3",
        members[1]: "5",
    }
    down = site.kit("down", sweep, "--fetch")
    assert down.returncode == 0, down.stderr
    assert f"{sweep} is stopped" in down.stdout.splitlines()
    assert f"logs of 1 node are in ~/.local/state/nodekit/runs/{members[0]}/" in down.stdout
    (log,) = find_runs.find(members[0]).folder.glob("logs/*/rank0*.log")
    assert log.read_text() == "index 3\n"
    assert not site.queue()
    assert site.kit("down").stdout == f"{sweep} is not running\n"
    table = json.loads(site.kit("status", sweep, "--json").stdout)
    assert [row["values"] for row in table] == [f"SLURM_ARRAY_TASK_ID={index}" for index in (3, 5, 7, 9)]
    assert {row["state"] for row in table} <= {"succeeded", "stopped"}
    assert "stopped" in {row["state"] for row in table}


# --- pure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sweep", "array", "expected"),
    [
        (["lr=1e-3"], None, [Variant(0, "lr=1e-3", ("--lr", "1e-3"))]),
        (
            ["lr=1,2", "--batch-size=3,4"],
            None,
            [
                Variant(0, "lr=1 batch-size=3", ("--lr", "1", "--batch-size", "3")),
                Variant(1, "lr=1 batch-size=4", ("--lr", "1", "--batch-size", "4")),
                Variant(2, "lr=2 batch-size=3", ("--lr", "2", "--batch-size", "3")),
                Variant(3, "lr=2 batch-size=4", ("--lr", "2", "--batch-size", "4")),
            ],
        ),
        (["a=b=c d,e"], None, [Variant(0, "a=b=c d", ("--a", "b=c d")), Variant(1, "a=e", ("--a", "e"))]),
        (
            [],
            "6,2,4-6:2%1",
            [
                Variant(each, f"SLURM_ARRAY_TASK_ID={each}", env={"SLURM_ARRAY_TASK_ID": str(each)})
                for each in (2, 4, 6)
            ],
        ),
    ],
)
def test_variants_are_every_value_with_every_other(
    sweep: list[str], array: str | None, expected: list[Variant]
) -> None:
    assert variants(sweep, array) == expected


@pytest.mark.parametrize(
    ("sweep", "array", "problem"),
    [
        (["lr"], None, "--sweep: found 'lr', wanted an option and its values"),
        (["lr="], None, "found 'lr='"),
        (["=1,2"], None, "found '=1,2'"),
        (["lr=1,,2"], None, "found 'lr=1,,2'"),
        (["lr=1,1"], None, "found 'lr=1,1'"),
        (["lr=1", "lr=2"], None, "found 'lr=2'"),
        (["lr=1"], "0-3", "--sweep and slurm.array, wanted one"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(sweep: list[str], array: str | None, problem: str) -> None:
    with pytest.raises(KitError, match=re.escape(problem)):
        variants(sweep, array)


def record(run_id: str, created: float, sweep: str = "") -> Run:
    run = Run(
        run_id=run_id, name="n", inventory_path="/i.yaml", inventory={}, command=None, created=created,
        slurm={"sweep": sweep} if sweep else {},
    )  # fmt: skip
    run.save()
    return run


def test_a_sweep_is_found_by_its_id_and_its_runs_by_theirs() -> None:
    single = record("n-0-a", 0)
    for index in (10, 2, 1):
        record(f"n-1-b.{index}", 1, "n-1-b")

    def found(run_id: str | None) -> list[str]:
        return [run.run_id for run in find_runs.sweep(run_id)]

    assert found("n-1-b") == found("n-1") == found(None) == ["n-1-b.1", "n-1-b.2", "n-1-b.10"]
    assert found("n-1-b.1") == found("n-0-a") == found("n-") == found("x") == []
    assert find_runs.find("n-1-b.1").run_id == "n-1-b.1"
    latest = find_runs.latest_of(Path("/i.yaml"))
    assert latest is not None
    assert latest.run_id == single.run_id  # kit up of one run goes on with one


@pytest.mark.parametrize(
    ("array", "options", "output", "is_refused"),
    [
        ("", ["--sweep", "lr=1,2"], "out", True),
        ("0-3", [], "/mnt/out {node}", True),
        ("0", [], "out", False),
        ("0-3", [], "out/{run_id}", False),
        ("", ["--sweep", "lr=1,2"], "{snapshot_dir}/../out", False),
        ("", ["--sweep", "output=a,b"], "out", False),
    ],
)
def test_runs_that_would_write_over_each_others_output_are_refused(
    array: str, options: list[str], output: str, is_refused: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    slurm = {"shared_dir": "/mnt", "nodes": 1, **({"array": array} if array else {})}
    (tmp_path / "big.yaml").write_text(yaml.safe_dump({"slurm": slurm}))
    command = ["-m", "nodekit.training", "--output", output]
    code = main(["up", str(tmp_path / "big.yaml"), "--dry-run", *options, "--", *command])
    said = capsys.readouterr().err
    assert (code, "is one folder for several runs, wanted one for each; leave --output out" in said) == (
        int(is_refused),
        is_refused,
    ), said


def test_a_sweep_over_ssh_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump({"hosts": {"a": None}}))
    assert main(["up", str(tmp_path / "lab.yaml"), "--sweep", "lr=1,2"]) == 1
    assert (
        "--sweep submits to Slurm's queue, and this inventory has no slurm section" in capsys.readouterr().err
    )
