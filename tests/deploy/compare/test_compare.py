"""`kit compare`: what it refuses, what it shows of what was measured, and that a run's end is always its own."""

import csv
import json
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import warm_kit
import warm_python
from agents import processes_of, until
from kit_runs import Kit

from nodekit.deploy.commands.cli import main
from nodekit.deploy.compare import compare_chart, compare_plan, compare_report
from nodekit.deploy.compare.compare import conclude, last_error
from nodekit.deploy.compare.compare_plan import Machine, Run, Way
from nodekit.deploy.compare.compare_report import Row
from nodekit.inventory.errors import NotWritten, WrongUsage
from nodekit.training.engine_info import ENGINES

CPU = Machine(torch="2.13.0+cpu", gpus=(), cpu="Some CPU", num_cores=6)
GPUS = Machine(torch="2.13.0+cu129", gpus=("H200", "H200"), cpu="Some CPU", num_cores=16)
DDP = Way("ddp", ("--engine", "ddp"))
TAKEN = "accelerate"

RESULT = {
    "accuracy": 0.9611,
    "f1": 0.95999,
    "loss": 0.1761,
    "steps": 69,
    "world_size": 1,
    "first_step_s": 2.5,
    "train_seconds": 11.5,
    "samples_per_s": 800.0,
    "peak_memory_bytes": 358318080,
}
ROWS = [
    Row.of_result("single", 1, seconds=64.6, result=RESULT),
    Row.of_result("ddp", 2, seconds=40.2, result={**RESULT, "samples_per_s": 1300.0, "accuracy": None}),
    Row.of_result("fsdp", 2, seconds=3599.9, result={**RESULT, "peak_memory_bytes": 23 * 2**30}),
    Row(engine="deepspeed:3", num_ranks=2, outcome="failed", problem="ValueError: no", seconds=5.0),
    Row(engine="horovod", num_ranks=2, outcome="not here", problem="pip install it"),
]


def ways(text: str | None = None) -> list[str]:
    return [way.name for way in compare_plan.chosen(text)]


def test_all_engines_are_compared_with_single_which_is_first() -> None:
    assert ways()[0] == "single"
    assert sorted(ways()) == sorted(ENGINES)


def test_what_follows_an_engine_becomes_its_options() -> None:
    assert compare_plan.chosen("deepspeed:3, ddp:spawn:bf16,ddp,ddp") == [
        Way("deepspeed:3", ("--engine", "deepspeed", "--zero", "3")),
        Way("ddp:spawn:bf16", ("--engine", "ddp", "--launcher", "spawn", "--amp", "bf16")),
        DDP,
    ]


def test_an_engine_of_one_process_runs_once_and_the_fewest_ranks_are_first() -> None:
    plan = compare_plan.runs(compare_plan.chosen("ddp,single,fsdp"), [4, 1])
    assert [(run.way.name, run.num_ranks) for run in plan] == [
        ("single", 1),
        ("ddp", 1),
        ("fsdp", 1),
        ("ddp", 4),
        ("fsdp", 4),
    ]


def test_the_table_of_the_tutorials_has_all_their_ways_on_all_gpus() -> None:
    engines = compare_plan.named("seeds", None)
    assert ways(engines) == [
        *("single", "dp", "ddp", "ddp:spawn", "ddp:spawn:fp16"),
        *("horovod", "deepspeed", "accelerate", "fabric", "trainer"),
    ]
    assert compare_plan.named(None, "ddp") == "ddp"
    nums = compare_plan.usual_numbers(replace(GPUS, gpus=("H200",) * 4), "seeds")
    plan = compare_plan.runs(compare_plan.chosen(engines), nums)
    assert [run.num_ranks for run in plan] == [1, 1, *[4] * 8]
    for machine in (CPU, GPUS):
        reasons = {run.way.name: compare_plan.refusal(run, [], machine) for run in plan}
        assert not any("--" in (reasons[name] or "") for name in ("single", "dp", "ddp", "ddp:spawn:fp16"))
    assert compare_plan.with_task("seeds", ["--epochs", "1"]) == ("--task", "text", "--epochs", "1")
    assert compare_plan.with_task("seeds", ["--task=digits"]) == ("--task=digits",)
    assert compare_plan.with_task(None, []) == ()


def test_what_readers_of_tutorials_must_know_of_the_batch_is_said_with_several_ranks() -> None:
    options = compare_plan.parsed(["--batch-size", "64"])
    assert not isinstance(options, str)
    assert compare_plan.batch_remark(options, [Run(DDP, 1)]) == ""
    remark = compare_plan.batch_remark(options, [Run(DDP, 1), Run(DDP, 4)])
    assert "64 samples a step over all ranks" in remark
    assert "4 ranks make 1/4 of the steps: that is --batch-size 256 here" in remark


def test_how_many_ranks() -> None:
    assert compare_plan.numbers("4, 1,4") == [4, 1]
    assert compare_plan.usual_numbers(CPU) == [1, 2]
    assert compare_plan.usual_numbers(GPUS) == [1, 2]
    assert compare_plan.usual_numbers(replace(GPUS, gpus=("H200",))) == [1]


def test_commands_are_torchruns_or_with_spawn_our_own() -> None:
    shared = compare_plan.shared_arguments(["--epochs", "2"])
    always = ("--epochs", "2", "--snapshot-seconds", "1000000000.0", "--grace", "5.0")
    assert shared == always
    assert compare_plan.shared_arguments(["--snapshot-every=3", "--grace", "9"]) == (
        "--snapshot-every=3",
        "--grace",
        "9",
    )
    output = Path("/a b/$HOME")
    assert compare_plan.argv(Run(DDP, 2), shared, output) == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "nodekit.training", *always, "--engine", "ddp", "--output", "/a b/$HOME"),
    ]
    (spawned,) = compare_plan.chosen("ddp:spawn")
    assert compare_plan.argv(Run(spawned, 2), shared, output) == [
        *(sys.executable, "-m", "nodekit.training", *always, "--engine", "ddp", "--launcher", "spawn"),
        *("--output", "/a b/$HOME", "--nproc-per-node", "2"),
    ]


def test_runs_share_the_cores_and_nothing_of_a_job_that_we_run_in() -> None:
    ours = {"PATH": "/bin", "OMP_NUM_THREADS": "9", "RANK": "3", "NODEKIT_SNAPSHOT_DIR": "/old"}
    found = [compare_plan.environment(Run(DDP, num), CPU, ours) for num in (1, 4, 7)]
    assert found == [{"PATH": "/bin", "OMP_NUM_THREADS": threads} for threads in ("6", "1", "1")]


@pytest.mark.parametrize(
    ("name", "num_ranks", "arguments", "machine", "expected"),
    [
        ("ddp", 2, [], CPU, None),
        ("ddp", 2, [], GPUS, None),
        ("ddp", 3, [], GPUS, "3 ranks need as many GPUs, and here they are 2"),
        ("ddp", 3, ["--batch-size", "2"], CPU, "--batch-size 2 is less than a sample for each of 3 ranks"),
        ("fsdp", 1, ["--find-unused"], CPU, "--find-unused: the engine fsdp finds them without being told"),
        ("deepspeed:fp16", 1, [], GPUS, "there is bf16 alone"),
        (TAKEN, 1, [], CPU, "pip install "),
    ],
)
def test_a_run_that_is_not_possible_here_has_a_reason(
    name: str,
    num_ranks: int,
    arguments: list[str],
    machine: Machine,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module == TAKEN else module)
    (way,) = compare_plan.chosen(name)
    found = compare_plan.refusal(Run(way, num_ranks), arguments, machine)
    assert (found is None) if expected is None else (found is not None and expected in found), found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--engines", "ddpp"],
            "--engines ddpp: there is no engine 'ddpp'; did you mean ddp? (they are: ddp, ",
        ),
        (["--engines", "ddp:4"], "there is no variant '4' (they are: 0, 1, 2, 3, "),
        (["--engines", "ddp:3", "--nproc", "1"], "--zero: the engine ddp has no stages of ZeRO"),
        (["--table", "seeds", "--engines", "ddp"], "--table seeds names its engines itself"),
        (["--nproc", "1,x"], "--nproc 1,x: 'x' is not a number of ranks"),
        (["--nproc", "0"], "'0' is not a number of ranks"),
        (["--timeout", "0"], "--timeout 0: seconds above 0"),
        (["--task", "text", "--", "--data", "/nowhere"], "/nowhere"),
        (["--", "--epoch", "2"], "unrecognized arguments: --epoch 2 (did you mean --epochs?)"),
        (
            ["--", "--engine", "ddp"],
            "--engine after the -- would be the same for all: name engines by --engines",
        ),
        (["--", "--output=x"], "give -o, before the --"),
        (["-o", "taken"], "-o taken is there and not empty"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "compare.csv").touch()
    assert main(["compare", *arguments]) == WrongUsage.exit_code
    said = capsys.readouterr()
    assert expected in said.err
    assert not said.out
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_table_has_every_row_in_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conclude(ROWS, tmp_path, what="digits", where="here", remark="the batch is global")
    said = capsys.readouterr().out
    assert [line.rstrip() for line in said.splitlines()[1:7]] == [
        "engine      ranks  time training samples/s speed-up   memory accuracy     F1",
        "single          1  1:05     0:12       800   1.00 ×  342 MiB   96.11% 0.9600",
        "ddp             2  0:40     0:12     1,300   1.62 ×  342 MiB        – 0.9600",
        "fsdp            2 60:00     0:12       800   1.00 × 23.0 GiB   96.11% 0.9600",
        "deepspeed:3     2  0:05        –    failed        –        –        –      –",
        "horovod         2     –        –  not here        –        –        –      –",
    ]
    assert "deepspeed:3, 2 ranks: failed: ValueError: no" in said
    assert "horovod: not here: pip install it" in said
    assert "training is without imports\nthe batch is global\n" in said


def test_a_table_that_finds_no_room_on_the_disk_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare.csv").symlink_to("/dev/full")
    with pytest.raises(NotWritten, match=r"/compare\.csv cannot be written: No space left on device.*df "):
        conclude(ROWS, tmp_path, what="digits", where="here")
    assert "deepspeed:3, 2 ranks: failed: ValueError: no" in capsys.readouterr().out


def test_the_csv_has_the_numbers_as_they_were_measured(tmp_path: Path) -> None:
    compare_report.write_csv(ROWS, tmp_path / "found.csv")
    with (tmp_path / "found.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == compare_report.CSV_COLUMNS
    assert float(found[1]["speedup"]) == pytest.approx(1.625)
    assert {**found[0], "problem": None} == {
        **{name: str(RESULT[name]) for name in compare_report.CSV_COLUMNS if name in RESULT},
        "engine": "single",
        "ranks": "1",
        "outcome": "trained",
        "seconds": "64.6",
        "speedup": "1.0",
        "problem": None,
    }
    assert (found[4]["outcome"], found[4]["seconds"], found[4]["problem"]) == (
        "not here",
        "",
        "pip install it",
    )


def test_without_single_there_is_no_speed_up_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conclude(ROWS[1:], tmp_path, what="digits", where="here")
    assert "no speed-up, since single has not trained" in capsys.readouterr().out


def test_the_chart_has_a_bar_for_each_run_and_loads_nothing(tmp_path: Path) -> None:
    conclude(ROWS, tmp_path, what="digits & <letters>", where="here " * 50)
    assert {path.name for path in tmp_path.iterdir()} == {"compare.csv", "compare.svg"}
    drawing = ElementTree.fromstring((tmp_path / "compare.svg").read_text(encoding="utf-8"))
    said = list(drawing.itertext())
    assert "digits & <letters>" in said
    for text in ("1 rank", "2 ranks", "0:40 (0:12) · 1,300 samples/s · 1.62 × single", "failed", "not here"):
        assert text in said
    widths = [
        int(each.get("width", ""))
        for each in drawing.iter("{http://www.w3.org/2000/svg}rect")
        if each.get("x")
    ]
    assert max(widths) < 960 - 360
    _ground, *bars = widths
    assert bars[-4:] == [1, 0, 0, 0]  # failed after 5 s of an hour, not here
    assert "href" not in compare_chart.svg(ROWS, title="digits", subtitle="here")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("python -m nodekit.training: no task\nFoo\ntorch.x.ChildFailedError: \n====\n", "no task"),
        (
            "Traceback:\nValueError: first\n[rank1]: torch.OutOfMemoryError: CUDA\nx.errors.ChildFailedError: \n==\n",
            "torch.OutOfMemoryError: CUDA",
        ),
        ("killed\n", ""),
    ],
)
def test_the_error_is_the_runs_and_not_torchruns(log: str, expected: str) -> None:
    assert last_error(log) == expected


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    started = Kit(tmp_path / "my 'project' $HOME; \"x\"", None)
    yield started
    started.close()
    # Who is killed ends a moment later.
    until(lambda: not processes_of("NODEKIT_COMPARE="), what="the end of all")


TWO_ARE_TOO_MANY = """
import os, time
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def loss(self, model, batch):
        if os.environ["WORLD_SIZE"] == "2":
            {what}
        return super().loss(model, batch)
"""
# While other work is going on, threads would wait for each other, spinning.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
# In one thread for the same reason.
RUNS_ARE_FORKS = """#!/bin/sh
case "$1 $2" in "-m nodekit.training" | "-m torch.distributed.run")
  export OMP_NUM_THREADS=1 PYTHON_EXEC='{warm}'
  exec '{warm}' "$@"
esac
exec '{python}' "$@"
"""


@pytest.fixture
def forked(tmp_path: Path) -> dict[str, str]:
    """The environment in which kit has its runs be forks: what they import takes longer than all that they do.

    Those of the test with Ctrl-C are none.
    """
    python = tmp_path / "python"
    python.write_text(RUNS_ARE_FORKS.format(warm=warm_python.program(), python=sys.executable))
    python.chmod(0o700)
    return {warm_kit.EXECUTABLE: str(python)}


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine, twelve processes took so long when each imported torch
def test_engines_are_run_measured_and_compared(kit: Kit, forked: dict[str, str]) -> None:
    arguments = ["--engines", "ddp,single", "-o", "the results", "--", "--epochs", "2", "--lr", "0.01"]
    done = kit.run("compare", *arguments, env=forked, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = kit.folder / "the results"
    with (folder / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["engine"], row["ranks"], row["outcome"]) for row in rows] == [
        ("single", "1", "trained"),
        ("ddp", "1", "trained"),
        ("ddp", "2", "trained"),
    ]
    for row in rows:
        assert float(row["accuracy"]) > 0.85
        assert float(row["speedup"]) == pytest.approx(
            float(row["samples_per_s"]) / float(rows[0]["samples_per_s"])
        )
        # The second epoch's samples in some part of the whole training's time; torch alone is more than this memory.
        assert float(row["samples_per_s"]) > 1437 / float(row["train_seconds"])
        assert float(row["seconds"]) > float(row["train_seconds"])
        assert 100 * 2**20 < int(row["peak_memory_bytes"]) < 4 * 2**30
        name = f"{row['engine']}-{row['ranks']}"
        assert json.loads((folder / f"{name}.json").read_text())["world_size"] == int(row["ranks"])
        assert len((folder / f"{name}.jsonl").read_text().splitlines()) == 2 * 23 + 2
        assert (folder / f"{name}.log").read_text().startswith("$ OMP_NUM_THREADS=")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_fails_or_hangs_is_a_row_and_the_others_go_on(kit: Kit, forked: dict[str, str]) -> None:
    kit.folder.joinpath("task.py").write_text(
        TWO_ARE_TOO_MANY.format(what='raise RuntimeError("two are too many")')
    )
    shared = ["--nproc", "2", "-o", "out", "--", "--task", "task.py:Task", "--epochs", "1"]
    done = kit.run("compare", "--engines", "ddp,single", *shared, env=forked, timeout_s=300)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (
        "ddp, 2 ranks: failed: RuntimeError: two are too many (all that it said: out/ddp-2.log)"
        in done.stdout
    )
    assert re.search(r"^single +1 .* 1\.00 ×", done.stdout, re.MULTILINE)
    kit.folder.joinpath("task.py").write_text(TWO_ARE_TOO_MANY.format(what="time.sleep(600)"))
    hangs = ["--engines", "ddp", "--timeout", "4", *shared[:3], "out2", *shared[4:], "--grace", "1"]
    done = kit.run("compare", *hangs, env=forked, timeout_s=300)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (
        "ddp, 2 ranks: failed: not at its end after 4 s (--timeout), and it had not made a step"
        in done.stdout
    )


@pytest.mark.slow
def test_ctrl_c_ends_the_run_under_way_and_shows_those_that_are_over(kit: Kit) -> None:
    kit.folder.joinpath("task.py").write_text(
        TWO_ARE_TOO_MANY.format(what="open('there', 'w').close(); time.sleep(600)")
    )
    compare = kit.start(
        *("compare", "--engines", "ddp,single", "--nproc", "2", "-o", "out"),
        *("--", "--task", "task.py:Task", "--epochs", "1", "--grace", "1"),
        env=PASSIVE,
    )
    # By then six processes have imported torch, most of them one after the other: 90 s are few on a busy machine.
    until(lambda: (kit.folder / "there").exists(), timeout_s=200, what="the second run")
    assert len(processes_of("NODEKIT_COMPARE=")) == 3  # torchrun and two ranks
    compare.send_signal(signal.SIGINT)
    assert compare.wait(60) == 130, kit.log()
    until(lambda: not processes_of("NODEKIT_COMPARE="), what="the end of all")
    assert re.search(r"^single +1 .* 1\.00 ×", kit.log(), re.MULTILINE)
    assert "kit: stopped; nothing is left running" in kit.log()
    assert not [path for path in (kit.folder / "out").iterdir() if path.name.startswith(".")]
