"""`kit drill`: what it makes of what it saw, what it refuses, and real drills on this machine and on a lab."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_agents
import warm_kit
import yaml
from agents import until
from kit_runs import Kit
from rich.console import Console

from nodekit.deploy.commands.cli import main
from nodekit.deploy.drill.drill import chosen, conclude, table
from nodekit.deploy.drill.drill_report import (
    Curve,
    Result,
    Step,
    Trace,
    are_survived,
    compare,
    detected,
    judge,
    resumed,
    sentence,
    steps_lost,
    verdict,
    world_sizes,
)
from nodekit.deploy.drill.drill_task import Paced
from nodekit.deploy.drill.faults import FAULTS
from nodekit.deploy.host import current_status, processes
from nodekit.deploy.host.node import agents
from nodekit.inventory.errors import NotWritten, WrongUsage
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory

# --- what was seen, told ------------------------------------------------------------------------------------


def attempt(name: str, started: float, *members: str) -> list[dict[str, Any]]:
    return [
        {"kind": "rendezvous", "time": started - 0.1, "attempt": name, "members": list(members)},
        *({"kind": "workers-started", "time": started, "attempt": name, "node": each} for each in members),
    ]


def curve(first: int, last: int, began: float, *, factor: float = 1.0) -> list[Step]:
    """A step every tenth of a second."""
    return [
        Step(began + 0.1 * (step - first + 1), step, factor * 10.0 / step) for step in range(first, last + 1)
    ]


NPROC = {"a": 1, "b": 1, "c": 2}
UNBROKEN = Trace(events=attempt("0.0", 0.0, "a", "b", "c"), steps=curve(1, 100, 0.0), nproc=NPROC)


def broken(*members: str, factor: float = 1.0, resumed_at: int = 41, last: int = 100) -> Trace:
    """Struck at 5.0 after step 50; the second attempt begins at 7.0."""
    return Trace(
        events=[
            *attempt("0.0", 0.0, "a", "b", "c"),
            {"kind": "phase", "time": 5.01, "phase": "start"},
            {"kind": "sample", "time": 5.01, "node": "a"},
            {"kind": "snapshot", "time": 5.01, "node": "b", "step": 50},
            {"kind": "node-state", "time": 5.02, "about": "a", "state": "waiting"},
            {"kind": "membership", "time": 5.3, "node": "a"},
            *attempt("0.1", 7.0, *members),
        ],
        steps=[*curve(1, 50, 0.0), *curve(resumed_at, last, 7.0, factor=factor)],
        nproc=NPROC,
    )


def test_a_fault_is_timed_from_the_strike_to_the_first_sign_and_to_the_first_step_of_a_later_attempt() -> (
    None
):
    trace = broken("a", "b")
    assert detected(trace, 5.0) == (5.3, "another node was missed on a")
    again = resumed(trace, 5.0)
    assert again is not None
    assert (again.time, again.step) == (7.1, 41)
    assert steps_lost(trace) == 10
    assert world_sizes(trace) == (4, 2)


def test_a_node_that_is_cut_off_is_detected_by_the_others() -> None:
    """Its own events come when it is reached again: the table would have another time than was told before."""
    trace = broken("a", "b")
    trace.events.append({"kind": "store-lost", "time": 5.2, "node": "c"})
    assert detected(trace, 5.0) == (5.2, "the rendezvous host was missed on c")
    trace.events.append({"kind": "unreachable", "time": 5.9, "about": "c"})
    assert detected(trace, 5.0) == (5.3, "another node was missed on a")


def test_a_job_that_went_on_was_not_resumed_and_its_end_is_no_sign_of_a_fault() -> None:
    end = [
        {"kind": "node-state", "time": 9.0, "about": "a", "state": "succeeded"},
        {"kind": "agent-ended", "time": 9.0, "node": "a", "state": "succeeded"},
        {"kind": "run-ended", "time": 9.5, "state": "succeeded"},
    ]
    trace = Trace(events=[*UNBROKEN.events, *end], steps=UNBROKEN.steps, nproc=NPROC)
    result = judge("slow", where="c", at=5.0, unbroken=UNBROKEN, trace=trace, problem="")
    assert (result.detected_s, result.resumed_s, result.went_on, result.steps_lost) == (None, None, True, 0)
    assert result.outcome == "survived"


def test_a_save_that_fails_is_a_sign() -> None:
    said = [(4.0, "no snapshot of step 1"), (6.0, "node1:0 | *** NO SNAPSHOT FOR 3 s on node 2")]
    assert detected(Trace(said=said), 5.0) == (6.0, "a save that failed")


def test_a_script_that_tells_no_steps_is_resumed_when_its_workers_are() -> None:
    trace = Trace(events=broken("a", "b").events, nproc=NPROC)
    again = resumed(trace, 5.0)
    assert again is not None
    assert (again.time, again.step) == (7.0, -1)
    assert steps_lost(trace) is None
    assert world_sizes(trace) == (4, 2)
    assert compare(trace, trace).sameness == "unknown"


@pytest.mark.parametrize(
    ("trace", "sameness", "says"),
    [
        pytest.param(broken("a", "b", "c"), "equal", "equal", id="bit for bit"),
        pytest.param(broken("a", "b", "c", factor=1.0 + 1e-6), "same", "±5e-07", id="rounded as by GPUs"),
        pytest.param(broken("a", "b", "c", factor=1.1), "different", "step 41", id="as many ranks, too far"),
        pytest.param(broken("a", "b", factor=1.0 + 1e-6), "same", "±", id="rounded by another world size"),
        pytest.param(broken("a", "b", factor=1.1), "near", "±5%", id="too far for rounding"),
        pytest.param(broken("a", "b", factor=6.0), "different", "step 41", id="much is forgotten"),
        pytest.param(broken("a", "b", factor=float("nan")), "different", "step 41", id="nan"),
        pytest.param(
            broken("a", "b", resumed_at=61), "different", "lacks 10 steps from 51", id="steps left out"
        ),
        pytest.param(broken("a", "b", last=99), "different", "lacks 1 steps from 100", id="ended early"),
        pytest.param(broken("a", "b", last=101), "different", "1 steps more", id="ended late"),
    ],
)
def test_a_curve_is_compared_step_by_step(trace: Trace, sameness: str, says: str) -> None:
    found = compare(UNBROKEN, trace)
    assert found.sameness == sameness
    assert says in found.text
    json.dumps(asdict(found), allow_nan=False)


def test_what_a_job_that_learns_nothing_has_lost_is_not_known() -> None:
    flat = [Step(each.time, each.step, 1.0) for each in UNBROKEN.steps]
    trace = Trace(events=broken("a", "b").events, steps=curve(1, 100, 0.0, factor=1.1), nproc=NPROC)
    found = compare(Trace(events=UNBROKEN.events, steps=flat, nproc=NPROC), trace)
    assert found.sameness == "different"


def test_a_curve_of_another_number_of_ranks_may_be_near() -> None:
    result = judge(
        "node", where="c", at=5.0, unbroken=UNBROKEN, trace=broken("a", "b", factor=1.1), problem=""
    )
    assert sentence(result) == (
        "survived; the curve is near the unbroken run's (±5%), as it is to be if there is dropout: with another number "
        "of ranks it draws other numbers"
    )


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (1.0, "survived; the curve equals the unbroken run's, bit for bit"),
        (1.0 + 1e-6, "survived; the curve is the unbroken run's to rounding (±5e-07)"),
    ],
)
def test_with_as_many_ranks_a_curve_need_not_be_equal_bit_for_bit(factor: float, says: str) -> None:
    trace = broken("a", "b", "c", factor=factor)
    result = judge("worker", where="c", at=5.0, unbroken=UNBROKEN, trace=trace, problem="")
    assert sentence(result) == says


def test_a_curve_that_differs_is_not_survived_however_well_the_job_ended() -> None:
    trace = broken("a", "b", "c", factor=2.0)
    result = judge("worker", where="c", at=5.0, unbroken=UNBROKEN, trace=trace, problem="")
    assert (result.outcome, result.problem) == ("not survived", "its loss curve differs from step 41 on")


# --- what is shown ------------------------------------------------------------------------------------------

RESULTS = [
    Result(
        fault="rendezvous-power",
        where="node1",
        outcome="survived",
        detected_s=2.81,
        detected_by="store-lost on node2",
        resumed_s=120.3,
        steps_lost=15,
        world_sizes=(3, 2, 3),
        curve=Curve("same", "±3e-05", 3e-5),
    ),
    Result(fault="slow", where="node3", outcome="survived", went_on=True, steps_lost=0, world_sizes=(3,)),
    Result(fault="hang", where="node3", outcome="not survived", problem="no step in 120 s, after step 75"),
    Result(fault="mid-save", outcome="not tried", problem="node3 saved nothing to its snapshot folder"),
]


def shown(width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table(RESULTS))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_has_one_line_per_fault_also_in_a_narrow_terminal(width: int) -> None:
    lines = shown(width)
    assert len(lines) == 5
    assert lines[0].split() == ["fault", "on", "detected", "resumed", "lost", "world", "curve"]
    assert lines[1].split() == [
        *("rendezvous-power", "node1", "2.8", "s", "120.3", "s", "15", "3→2→3", "±3e-05", "survived"),
    ]
    assert "went on" in lines[2]
    assert lines[3].endswith("not survived")
    assert lines[4].endswith("not tried")


def test_a_state_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("of another user: root may write to any")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "two.yaml"
    file.write_text(f"connection: local\nworkdir: {tmp_path}/work\nhosts: {{a: , b: }}\n")
    for command in ("drill", "selftest"):
        assert main([command, str(file)]) == 1
        assert re.search(rf"/{command}s/.* cannot be written: Not a directory", capsys.readouterr().err)


def test_the_verdict_names_what_was_not_survived(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = "2 of 4 faults survived, 15 steps lost; not survived: hang; not tried: mid-save"
    assert verdict(RESULTS) == said
    conclude(RESULTS, tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert said in out
    assert "hang: not survived: no step in 120 s, after step 75" in out
    assert json.loads((tmp_path / "results.json").read_text())[2]["outcome"] == "not survived"


def test_json_has_numbers_and_nothing_else_is_on_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    conclude(RESULTS, tmp_path, as_json=True)
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["fault"], first["detected_s"], first["world_sizes"]) == (
        "rendezvous-power",
        2.81,
        [3, 2, 3],
    )
    assert first["curve"] == {"sameness": "same", "text": "±3e-05", "greatest_difference": 3e-5}


@pytest.mark.parametrize("as_json", [False, True])
def test_results_that_find_no_room_on_the_disk_are_printed_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *, as_json: bool
) -> None:
    """A drill takes many minutes, and its results were lost in a traceback."""
    (tmp_path / "results.json").symlink_to("/dev/full")
    with pytest.raises(NotWritten, match=r"/results\.json cannot be written: No space left on device.*df "):
        conclude(RESULTS, tmp_path, as_json=as_json)
    assert "no step in 120 s, after step 75" in capsys.readouterr().out


def test_what_could_not_be_tried_counts_when_it_was_asked_for() -> None:
    assert are_survived(RESULTS[:2], asked_for=True)
    assert not are_survived(RESULTS[:3], asked_for=False)
    assert are_survived([RESULTS[3]], asked_for=False)
    assert not are_survived([RESULTS[3]], asked_for=True)


# --- what is refused ----------------------------------------------------------------------------------------


def inventory_of(tmp_path: Path, num_nodes: int = 2, **values: Any) -> Inventory:
    path = tmp_path / "mine.yaml"
    hosts = {f"n{number}": None for number in range(num_nodes)}
    path.write_text(yaml.safe_dump({"connection": "local", "hosts": hosts, **values}))
    return load_inventory(path)


ANYWHERE = ["worker", "rank0", "mid-save", "hang", "agent", "node", "preempt", "rendezvous", "control"]


def test_without_names_all_that_is_possible_is_tried(tmp_path: Path) -> None:
    assert [fault.name for fault in chosen([], inventory_of(tmp_path), None)] == ANYWHERE


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ANYWHERE])
def test_a_fault_that_needs_a_lab_is_refused_elsewhere_with_the_reason_and_what_is_possible(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(WrongUsage) as raised:
        chosen(["worker", name], inventory_of(tmp_path), None)
    assert raised.value.exit_code == 2
    reason, possible = str(raised.value).splitlines()
    assert reason.startswith(f"{name}: not on ")
    assert "lab" in reason
    assert possible == "possible there: " + ", ".join(ANYWHERE)


def test_an_unknown_fault_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="wroker: no such fault; did you mean worker"):
        chosen(["wroker"], inventory_of(tmp_path), None)


def test_a_refusal_comes_before_anything_is_started(tmp_path: Path) -> None:
    kit = Kit(tmp_path / "project", None)
    done = kit.run("drill", "local", "power")
    assert (done.returncode, done.stdout) == (2, "")
    assert "kit: power: not on " in done.stderr
    assert kit.run("runs").stdout.startswith("no run on record")


def test_list_tells_what_each_fault_is_and_why_it_is_not_possible(tmp_path: Path) -> None:
    said = Kit(tmp_path / "project", None).run("drill", "local", "--list").stdout
    for fault in FAULTS.values():
        assert f"{fault.name.ljust(16)}  {fault.text}\n" in said
    assert said.count("not here: ") == len(FAULTS) - len(ANYWHERE)


# --- its parts ----------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def node_dir_with(tmp_path: Path, worker: subprocess.Popen[bytes], *, is_it: bool) -> str:
    started = processes.start_time(worker.pid)
    assert started is not None
    recorded = {"rank": 3, "pid": worker.pid, "start_time": started if is_it else started - 1}
    (tmp_path / "events.jsonl").write_text('{"time": 1.5}\n')
    agent = {"pid": 1, "start_time": -1, "boot_id": processes.boot_id()}  # of this boot, and not alive
    (tmp_path / "agent.json").write_text(json.dumps(agent))
    current_status.of(str(tmp_path)).write({"node": tmp_path.name, "time": 2.5, "workers": [recorded]})
    return str(tmp_path)


def test_a_signal_goes_to_the_recorded_process_and_to_nobody_who_has_its_pid_now(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    other = node_dir_with(tmp_path, sleeper, is_it=False)
    for target in ("worker", "workers", "agent", "node"):
        assert agents.inject(other, target, signal.SIGKILL)["pids"] == []
    assert sleeper.poll() is None
    own = node_dir_with(tmp_path, sleeper, is_it=True)
    assert agents.inject(own, "agent", signal.SIGKILL)["pids"] == []
    assert agents.inject(own, "worker", signal.SIGKILL, rank=0)["pids"] == []
    assert sleeper.poll() is None
    assert agents.inject(own, "worker", signal.SIGKILL, rank=3)["pids"] == [sleeper.pid]
    assert sleeper.wait(5) == -signal.SIGKILL


KILLED_DRILL = """
import os, pathlib, signal, sys
from nodekit.deploy.drill.drill_job import Job
job = Job(pathlib.Path("lab.yaml"), [], pathlib.Path(sys.argv[1]), new_keys=False)
job._argv = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"]
job.start(new=False)
print(job._process.pid, flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_drill_that_is_killed_leaves_no_kit_up(tmp_path: Path) -> None:
    output = tmp_path / "output"
    drill = subprocess.Popen(
        [sys.executable, "-c", KILLED_DRILL, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert drill.stdin is not None
    assert drill.stdout is not None
    pid = int(drill.stdout.readline())
    until(lambda: output.exists() and output.read_text() == "up\n")
    assert Path(f"/proc/{pid}").exists()
    drill.stdin.close()
    assert drill.wait(30) == -signal.SIGKILL
    until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())
    drill.stdout.close()


def test_mid_save_waits_for_a_file_that_grows_and_sends_nothing_if_none_does(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    node_dir = node_dir_with(tmp_path, sleeper, is_it=True)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/old.pt").write_bytes(b"old")
    assert agents.inject(node_dir, "workers", signal.SIGKILL, saving_s=0.2)["pids"] == []
    assert sleeper.poll() is None
    # Again and again, since a busy machine may write before it is looked at.
    grow = f"while sleep 0.1; do echo more >>'{tmp_path}/snapshots/old.pt'; done"
    writer = subprocess.Popen(["sh", "-c", grow], start_new_session=True)
    try:
        assert agents.inject(node_dir, "workers", signal.SIGKILL, saving_s=60)["pids"] == [sleeper.pid]
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.wait()


# --- real ones ----------------------------------------------------------------------------------------------

# How the jobs below pause. One whose unbroken run is over goes slowly from where it is to be struck until it has been:
# at its own pace, of three seconds in all, it might end before.
PACE = """
import os, time
WHOLE = os.environ.get("WHOLE", "")
may_be_struck = os.path.exists(WHOLE) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
def pause(step):
    time.sleep(1 if step > 22 and may_be_struck else 0.05)
    if step == 60 and WHOLE:
        open(WHOLE, "w").close()
"""
# Without torch, so that it starts soon; its ranks need no meeting.
COUNTER = """
import json, sys
restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
output, snapshots = os.environ["NODEKIT_OUTPUT_DIR"], os.environ["NODEKIT_SNAPSHOT_DIR"]
os.makedirs(output, exist_ok=True)
done = 0
if os.path.exists(snapshots + "/step"):
    done = int(open(snapshots + "/step").read())
with open(output + "/metrics.jsonl", "a") as metrics:
    for step in range(done + 1, 61):
        pause(step)
        loss = 1.0 / step + (restarted and "forgets" in sys.argv)
        metrics.write(json.dumps({"step": step, "loss": loss, "time": time.time()}) + "\\n")
        metrics.flush()
        open(os.environ["NODEKIT_PROGRESS_FILE"], "w").write(str(step))
        if step % 10 == 0:
            open(snapshots + "/new", "w").write(str(step))
            os.replace(snapshots + "/new", snapshots + "/step")
"""


@pytest.fixture
def project(tmp_path: Path) -> Kit:
    """A project with a job of its own and two nodes on this machine."""
    kit = Kit(tmp_path / "my 'project' $HOME; \"x\"", None)
    kit.env = warm_kit.own_kits()
    (kit.folder / "job.py").write_text(PACE + COUNTER)
    values = {
        "connection": "local",
        "python": warm_agents.program(),
        "workdir": str(tmp_path / "work"),
        "hosts": {"n1": None, "n2": None},
        "job": {"env": {"WHOLE": str(tmp_path / "whole")}},
    }
    (kit.folder / "mine.yaml").write_text(yaml.safe_dump(values))
    return kit


@pytest.mark.slow
def test_a_job_that_forgets_is_found_out_and_one_that_does_not_survives(project: Kit) -> None:
    done = project.run("drill", "mine.yaml", "worker", "--json", "--", "job.py", "forgets")
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["outcome"], result["where"]) == ("not survived", "n2")
    assert result["problem"].startswith("its loss curve differs from step ")
    (project.folder.parent / "whole").unlink()
    done = project.run("drill", "mine.yaml", "worker", "--", "job.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"1 of 1 faults survived, \d+ steps? lost", done.stdout), done.stdout
    assert "survived; the curve equals the unbroken run's" in done.stdout
    # The inventory's own runs are left alone: the drill's are of another inventory and under another name.
    listed = json.loads(project.run("runs", "--json").stdout)
    assert len(listed) == 4
    assert all(run["run_id"].startswith("mine-drill-") for run in listed)
    assert {Path(run["inventory"]).name for run in listed} == {"inventory.yaml"}


# As users have it: torch's own checkpoint, written by rank 0. With every release of torch that kit runs scripts with.
DDP = """
import json
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
path = os.environ["NODEKIT_SNAPSHOT_DIR"] + "/checkpoint.pt"
done = 0
if os.path.exists(path):
    saved = torch.load(path, weights_only=True)
    done = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
wrapped = DistributedDataParallel(model)
output = os.environ["NODEKIT_OUTPUT_DIR"]
os.makedirs(output, exist_ok=True)
for step in range(done + 1, 61):
    x = torch.rand(16, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss := loss.detach())
    pause(step)
    if dist.get_rank() == 0:
        with open(output + "/metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"step": step, "loss": loss.item(), "time": time.time()}) + "\\n")
        if step % 10 == 0:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path + ".tmp")
            os.replace(path + ".tmp", path)
    with open(os.environ["NODEKIT_PROGRESS_FILE"], "w") as progress:
        progress.write(str(step))
dist.barrier()
os._exit(0)  # gloo's threads may abort an interpreter that ends by itself
"""


@pytest.mark.slow
def test_a_script_with_ddp_goes_on_from_its_own_checkpoint(project: Kit) -> None:
    (project.folder / "job.py").write_text(PACE + DDP)
    done = project.run("drill", "mine.yaml", "worker", "--json", "--", "job.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["outcome"], result["curve"]["sameness"]) == ("survived", "equal")
    assert result["steps_lost"] < 40


@pytest.mark.slow
def test_a_job_that_fails_unbroken_is_not_struck(project: Kit) -> None:
    (project.folder / "job.py").write_text("raise SystemExit('no such luck')")
    done = project.run("drill", "mine.yaml", "worker", "--", "job.py")
    assert done.returncode == 1
    assert re.search("the job fails even unbroken.*failed: .*no such luck", done.stderr, re.DOTALL), (
        done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_that_is_under_way(project: Kit, number: signal.Signals) -> None:
    # At its own pace of three seconds in all, the next run might be under way by then.
    (project.folder / "job.py").write_text(PACE.replace("0.05", "0.5") + COUNTER)
    drill = project.start("drill", "mine.yaml", "worker", "--", "job.py")
    state = Path(os.environ["XDG_STATE_HOME"]) / "nodekit"

    def agents() -> list[Path]:
        return list(Path(project.folder.parent / "work").glob("runs/*/n*/progress/*"))

    until(agents, what="a step")
    drill.send_signal(number)
    assert drill.wait(60) == 130, project.log()
    (run,) = json.loads(project.run("runs", "--json").stdout)
    assert run["state"] == "stopped"
    found = project.run("status").stdout
    assert "running" not in found, found
    assert list(state.glob("drills/*/unbroken.log"))


@pytest.mark.lab
@pytest.mark.timeout(900)  # three runs: minutes, on a busy machine
def test_a_lab_is_drilled_and_whole_again_afterwards(kit: Kit) -> None:
    kit.env = warm_kit.own_kits()
    kit.inventory()
    # From the step at which it is struck, a third of the way, there are to be more than the seconds of a busy machine.
    training = ["-m", "nodekit.training", "--task", "nodekit.deploy.drill.drill_task:Paced", "--epochs", "8"]
    done = kit.run(
        *("drill", "lab.yaml", "power", "worker", "--json", "--", *training, "--snapshot-every", "10"),
        timeout_s=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    power, worker = json.loads(done.stdout)
    assert (power["outcome"], power["where"], power["curve"]["sameness"]) == ("survived", "node3", "equal")
    assert 0 < power["detected_s"] < power["resumed_s"]
    assert (worker["outcome"], worker["where"], worker["world_sizes"]) == ("survived", "node3", [3])
    assert 0 < worker["detected_s"] < worker["resumed_s"]
    assert worker["steps_lost"] == 0, "the ranks that were left have saved the last step"
    assert kit.lab is not None
    assert [kit.lab.status(host) for host in kit.lab.hosts] == ["up"] * 3
    assert not kit.leftovers()


@pytest.mark.lab
def test_ctrl_c_while_a_host_is_down_leaves_the_lab_whole_and_nothing_running(kit: Kit) -> None:
    kit.env = warm_kit.own_kits()
    kit.inventory()
    (kit.folder / "job.py").write_text(PACE.replace("0.05", "0.2") + COUNTER)
    drill = kit.start("drill", "lab.yaml", "power", "--", "job.py")
    kit.wait_for("its power is gone", timeout_s=120)
    assert kit.lab is not None
    assert kit.lab.status("node3") == "crashed, cut"
    drill.send_signal(signal.SIGINT)
    assert drill.wait(60) == 130, kit.log()
    assert [kit.lab.status(host) for host in kit.lab.hosts] == ["up"] * 3
    assert not kit.leftovers()


def test_the_drills_own_task_is_deterministic_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    Paced()
    assert torch.backends.cudnn.deterministic
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
