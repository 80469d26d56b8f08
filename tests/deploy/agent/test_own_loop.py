"""A user's own loop, the one of docs/snapshots.md: its ranks stay, too, when another one is lost."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import Agents, again_if_left_waiting
from places import ROOT
from test_reform import BEHIND, LEAVES_SLOWLY, Run

from nodekit.training.snapshots.snapshot import Snapshots

pytestmark = pytest.mark.slow

SCRIPT = re.findall(
    r'^```python title="train.py"\n(.*?)^```$', (ROOT / "docs/snapshots.md").read_text(), re.M | re.S
)[0]
JOB = """
import glob, os, runpy, signal, time
import torch.distributed as dist
from nodekit.training import Snapshots
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

updates = 0

def slow(*_):
    global updates
    updates += 1
    time.sleep(0.3 if updates > 20 and os.path.exists("slow") else 0.02)
    if os.path.exists(f"kill{os.environ['RANK']}") and updates > 25:
        while os.path.exists("together") and not glob.glob("../n*/snapshots/g*-s000000020.json"):
            time.sleep(0.01)  # it is written beside the steps
        os.unlink(f"kill{os.environ['RANK']}")
        os.kill(os.getpid(), signal.SIGKILL)  # within an update

def meet(*_):
    if os.path.exists("together"):
        dist.barrier()  # the weights are new, and the step is not over

register_optimizer_step_pre_hook(slow)
register_optimizer_step_post_hook(meet)
save = Snapshots.save_async
# Nothing is on a disk before the last step, or step 20.
saved = (20, 192) if os.path.exists("together") else (192,)
Snapshots.save_async = lambda self, state, *, step, **more: step in saved and save(self, state, step=step, **more)
runpy.run_path("train.py", run_name="__main__")
"""
STEPS = 192


class OwnLoop(Run):
    """Some nodes that run the loop of the page, with a snapshot of the last step alone, and these files."""

    def __init__(
        self,
        agents: Agents,
        *files: str,
        job: str = JOB,
        script: str = SCRIPT,
        num_nodes: int = 3,
        **changes: Any,
    ) -> None:
        (agents.folder / "code/train.py").write_text(script)
        for name in files:
            (agents.folder / "code" / name).touch()
        self.begin(agents, job, num_nodes=num_nodes, **changes)

    def ended(self) -> dict[str, Any]:
        """The state after the last step."""
        self.wait_succeeded()
        found = Snapshots(self.agents.folder / "n0/snapshots").load()
        assert found is not None
        assert found.manifest.step == STEPS
        state: dict[str, Any] = found.state
        return state

    def goes_on(self) -> list[tuple[int, str]]:
        """Where rank 0 has gone on, attempt by attempt, and from what."""
        paths = sorted(self.agents.folder.glob("n*/logs/rank0-attempt*.log"), key=lambda path: path.name)
        found = [re.findall(r"^goes on at step (\d+) from (.*)$", path.read_text(), re.M) for path in paths]
        return [(int(step), source) for each in found for step, source in each]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    agents = Agents(tmp_path_factory.mktemp("unbroken"))
    try:
        return OwnLoop(agents).ended()
    finally:
        agents.close()


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.newer_torch
@pytest.mark.parametrize("killed", [0, 1])
@again_if_left_waiting
def test_the_others_stay_and_no_step_is_lost(agents: Agents, unbroken: dict[str, Any], killed: int) -> None:
    run = OwnLoop(agents)
    run.wait_step(20)
    before = run.pids()
    os.kill(before[f"n{killed}"][0], signal.SIGKILL)
    assert equal(run.ended(), unbroken)
    for name in run.names:
        _, second = run.events(name, "workers-started")
        stay = name != f"n{killed}"
        assert bool(second["stayed"]) == stay
        assert ([each["pid"] for each in second["workers"]] == before[name]) == stay
    ((step, source),) = run.goes_on()
    assert step >= 20
    assert "in memory" in source


WITH_BATCH_NORM = SCRIPT.replace(
    "torch.nn.ReLU()", "torch.nn.BatchNorm1d(64, momentum=0.01), torch.nn.ReLU()"
).replace("step, optimizer)", "step, optimizer, module=net)")


@again_if_left_waiting
def test_the_means_of_batch_norm_are_those_of_the_lost_rank_0(agents: Agents, tmp_path: Path) -> None:
    """Only rank 0's are of the batches that it has seen; the others have them before a step is theirs."""
    apart = Agents(tmp_path / "apart")
    try:
        wanted = OwnLoop(apart, script=WITH_BATCH_NORM).ended()
    finally:
        apart.close()
    run = OwnLoop(agents, script=WITH_BATCH_NORM)
    run.wait_step(20)
    os.kill(run.pids()["n0"][0], signal.SIGKILL)
    assert "1.running_mean" in wanted["model"]
    assert equal(run.ended(), wanted)
    ((_, source),) = run.goes_on()
    assert "in memory" in source


NET = "    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))\n"
MADE_ONCE = SCRIPT.replace(NET, "").replace("\n\ndef train(", f"\n{NET.strip()}\n\n\ndef train(")


@again_if_left_waiting
def test_a_model_made_outside_of_the_function_costs_no_step(agents: Agents, unbroken: dict[str, Any]) -> None:
    """The next DDP sends it the weights of rank 0, which is a step behind: not into what the others have kept."""
    run = OwnLoop(agents, script=MADE_ONCE, job=f"import os, time\n{BEHIND}{JOB}")
    assert equal(run.ended(), unbroken)
    assert run.goes_on() == [(30, "what rank 1 has kept in memory")]


@again_if_left_waiting
def test_a_rank_that_takes_long_to_leave_the_others_stays(agents: Agents, unbroken: dict[str, Any]) -> None:
    run = OwnLoop(agents, job=f"import time\n{LEAVES_SLOWLY}{JOB}")
    run.wait_step(20)
    os.kill(run.pids()["n1"][0], signal.SIGKILL)
    assert equal(run.ended(), unbroken)
    assert all(run.events(name, "workers-started")[1]["stayed"] for name in ("n0", "n2"))


@pytest.mark.newer_torch
@again_if_left_waiting
def test_a_node_is_lost_and_another_comes_in(agents: Agents) -> None:
    """The others keep their processes both times; for the one that comes in they pause."""
    run = OwnLoop(agents, min_nodes=2)
    run.wait_step(10)
    before = run.pids()
    run.lose_and_regain_n2()
    run.ended()
    for name in ("n0", "n1"):
        started = run.events(name, "workers-started")
        assert [(each["world_size"], len(each["stayed"])) for each in started] == [(3, 0), (2, 1), (3, 1)]
        assert {each["pid"] for event in started for each in event["workers"]} == {*before[name]}
    assert all("in memory" in source for _, source in run.goes_on())
    assert "another node comes in" not in run.logs(), "it is no error"


def test_a_rank_that_dies_within_its_update_costs_no_step(agents: Agents, unbroken: dict[str, Any]) -> None:
    run = OwnLoop(agents, "kill1")
    assert equal(run.ended(), unbroken)
    assert not (agents.folder / "code/kill1").exists(), "it has died"
    ((step, source),) = run.goes_on()
    assert step >= 25
    assert "in memory" in source


def test_weights_of_no_step_are_not_kept(agents: Agents, unbroken: dict[str, Any]) -> None:
    """The others, too, are within their updates: all start again, from the newest snapshot."""
    run = OwnLoop(agents, "kill1", "together")
    assert equal(run.ended(), unbroken)
    ((step, source),) = run.goes_on()
    assert step == 20
    assert "in memory" not in source
    assert not any(run.events(name, "workers-started")[1]["stayed"] for name in run.names)


SLOW_TO_IMPORT = """
import os, time
time.sleep(3.0 if os.path.exists("slow-to-import") else 0.0)
with open(f"imported-by-{os.getpid()}", "w") as file:
    file.write(os.environ.get("NODEKIT_STANDBY", "as in an attempt"))
"""


@again_if_left_waiting
def test_nobody_waits_for_the_imports_of_a_script_that_comes_in(agents: Agents) -> None:
    """Its ranks can be started before their attempt is known: the supervisor knows by those that have stayed."""
    run = OwnLoop(agents, job=SLOW_TO_IMPORT + JOB, min_nodes=2)
    run.wait_step(10)
    before = run.pids()
    run.lose_n2()
    assert agents.status("n0")["stayed"] == [0]
    (agents.folder / "code/slow-to-import").touch()
    run.join("n2", 2, stands_by=True)
    run.wait_world(3)
    run.ended()
    (new,) = run.events("n2", "workers-started")[-1]["workers"]
    imported = (agents.folder / f"code/imported-by-{new['pid']}").stat().st_mtime
    pauses = [
        each["time"] for name in ("n0", "n1") for each in run.events(name, "membership") if not each["lost"]
    ]
    assert imported < min(pauses)
    for name in ("n0", "n1"):
        assert run.pids_of_all_attempts(name) == {*before[name]}
    assert all("in memory" in source for _, source in run.goes_on())


@again_if_left_waiting
def test_a_rank_beside_one_that_stays_is_replaced_before_the_nodes_have_met(agents: Agents) -> None:
    """Its agent knows by the other that the script can wait for its attempt."""
    run = OwnLoop(agents, job=SLOW_TO_IMPORT + JOB, num_nodes=2, nproc_per_node=2)
    run.wait_step(10)
    before = run.pids()["n1"]
    os.kill(before[1], signal.SIGKILL)
    run.ended()
    second = run.events("n1", "workers-started")[1]
    (new,) = {each["pid"] for each in second["workers"]}.difference(before)
    how = {pid: (agents.folder / f"code/imported-by-{pid}").read_text() for pid in (*before, new)}
    assert how == {**dict.fromkeys(before, "as in an attempt"), new: "0"}
    assert "in memory" in run.goes_on()[0][1]
