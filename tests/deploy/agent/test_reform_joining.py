"""What ranks hold in memory alone, while they join each other or are to pause for a node: none of it is lost."""

import os
import signal
import threading

import pytest
from agents import ANSWER_S, Agents, again_if_left_waiting, until
from test_reform import JOB, PATIENCE_S, Alone, Run, agent_of

pytestmark = pytest.mark.slow

SLOW_EVALUATION = """
class Task(Task):
    def predict(self, model, batch):
        if not model.training and os.path.exists("slow-evaluation"):
            open("evaluates", "w").close()
            time.sleep(0.2)
        return super().predict(model, batch)
"""
SLOW_DISK = """
from pathlib import Path
from nodekit.training.snapshots.files import commit
place = commit.place
def place_slowly(temporary, file, name, **more):
    if os.path.exists("slow-disk") and name.endswith(".pt"):
        open("saves", "w").close()
        while os.path.exists("slow-disk"):
            time.sleep(0.05)
    return place(temporary, file, name, **more)
commit.place = place_slowly
"""
SLOW_REPLACEMENT = """
class Task(Task):
    def __init__(self, *args):
        while os.environ.get("NODEKIT_STANDBY") == "0" and os.path.exists("slow-replacement"):
            time.sleep(0.05)
        super().__init__(*args)
"""
SLOW_MODEL = """
class Task(Task):
    def model(self):
        if os.path.exists("slow-model"):
            open(f"models{os.environ['NODEKIT_GENERATION']}", "w").close()
        while os.path.exists("slow-model"):
            time.sleep(0.05)
        return super().model()
"""

FAILS_WHILE_IT_PAUSES = """
import os, queue
from pathlib import Path
from nodekit.training.group.agent_messages import AgentMessages
from nodekit.training.process.stages import PAUSING
messages, told = AgentMessages(Path(os.environ["NODEKIT_AGENT_PIPE"])), queue.SimpleQueue()
for kind in ("lost", "pause"):
    messages.when(kind, lambda kind=kind: told.put(kind))
print("began", flush=True)
kind = told.get()
print("told:", kind, flush=True)
if kind == "pause":
    Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text(f"3 {PAUSING}")
    if os.environ["RANK"] == "1":
        os._exit(1)
    print("told:", told.get(), flush=True)
os._exit(143)
"""


def ends_having_resumed_after(run: Run, step: int) -> None:
    """Let the run end; no node had gone back to before a step."""
    run.slow.unlink()
    for name in run.names:
        run.agents.wait(name, "succeeded", timeout_s=PATIENCE_S)
    assert run.result("n0")["resumed_at_step"] >= step


def waits_for(run: Run, file: str) -> None:
    until((run.agents.folder / "code" / file).exists, what=file, timeout_s=PATIENCE_S)


@again_if_left_waiting
@pytest.mark.parametrize(
    ("more", "job", "begins"),
    [
        (("--eval-every", "30", "--eval-batch-size", "3"), SLOW_EVALUATION, "evaluates"),
        (("--snapshot-every", "25"), SLOW_DISK, "saves"),
    ],
    ids=["while they evaluate", "while a snapshot is written"],
)
def test_a_node_comes_in_for_which_ranks_cannot_pause_within_the_grace(
    agents: Agents, more: tuple[str, ...], job: str, begins: str
) -> None:
    """They train on until they can, or go on beside what is being written: nobody is lost, so nothing need be."""
    what = {"evaluates": "slow-evaluation", "saves": "slow-disk"}[begins]
    run = Run(agents, *more, job=JOB + job, min_nodes=2, grace_s=2.0)
    run.wait_step(10)
    run.lose_n2()
    before = run.pids()
    (agents.folder / "code" / what).touch()
    waits_for(run, begins)
    run.join("n2", 2)
    run.wait_world(3)
    (agents.folder / "code" / what).unlink()
    assert run.pids()["n0"] == before["n0"], "its process has stayed"
    ends_having_resumed_after(run, 25)


@again_if_left_waiting
def test_a_run_is_stopped_while_its_ranks_wait_for_another_to_join(agents: Agents) -> None:
    run = Run(agents, job=JOB + SLOW_REPLACEMENT, grace_s=10.0)
    run.wait_step(12)
    (agents.folder / "code/slow-replacement").touch()
    os.kill(run.pids()["n2"][0], signal.SIGKILL)
    until(
        lambda: len(run.events("n0", "workers-started")) == 2, what="the next attempt", timeout_s=PATIENCE_S
    )

    def stop(name: str) -> None:
        node_dir = str(agents.node_dir(name))
        agents.channels[name].call("stop", timeout_s=ANSWER_S + 60, node_dir=node_dir, grace_s=60.0)

    stopping = [threading.Thread(target=stop, args=(name,)) for name in run.names]
    for each in stopping:
        each.start()
    for each in stopping:
        each.join()
    saved = [
        path.name for name in ("n0", "n1") for path in (agents.node_dir(name) / "snapshots").glob("*.json")
    ]
    assert any(int(name[1:].partition("-s")[2][:9]) >= 12 for name in saved), saved


@again_if_left_waiting
def test_a_node_comes_in_while_ranks_wait_for_another_to_join(agents: Agents) -> None:
    """It is met once they have made a step: who ends in the join has the others wait for it."""
    run = Run(agents, job=JOB + SLOW_REPLACEMENT, num_nodes=4, min_nodes=2)
    run.wait_step(8)
    os.kill(agent_of(run.pids()["n3"][0]), signal.SIGKILL)
    run.wait_world(3)
    until(lambda: len(run.events("n0", "first-step")) == 2, what="a step of three", timeout_s=PATIENCE_S)
    before = run.pids()
    (agents.folder / "code/slow-replacement").touch()
    os.kill(before["n2"][0], signal.SIGKILL)
    until(
        lambda: len(run.events("n0", "workers-started")) == 3, what="the next attempt", timeout_s=PATIENCE_S
    )
    run.join("n3", 3)

    until(
        lambda: agents.status("n3").get("state") == "rendezvous", what="n3 at the door", timeout_s=PATIENCE_S
    )
    (agents.folder / "code/slow-replacement").unlink()
    run.wait_world(4)
    assert run.pids()["n0"] == before["n0"], "its process has stayed"
    ends_having_resumed_after(run, 8)


@again_if_left_waiting
@pytest.mark.parametrize("begins_a_generation", [True, False])
def test_another_is_lost_while_ranks_make_their_model(agents: Agents, begins_a_generation: bool) -> None:
    """What they hold is saved, also where its own generation can commit nothing any more."""
    run = Run(agents, job=JOB + SLOW_MODEL, min_nodes=2)
    run.wait_step(20)
    before = run.pids()
    (agents.folder / "code/slow-model").touch()
    if begins_a_generation:
        run.begin_generation("n1")
    else:
        os.kill(before["n1"][0], signal.SIGKILL)
    waits_for(run, f"models{int(begins_a_generation)}")
    os.kill(agent_of(run.pids()["n2"][0]), signal.SIGKILL)
    until(lambda: run.events("n0", "membership"), what="n2 is missed", timeout_s=PATIENCE_S)
    (agents.folder / "code/slow-model").unlink()
    run.names = ["n0", "n1"]
    ends_having_resumed_after(run, 20)


@again_if_left_waiting
def test_what_a_rank_tells_by_the_number_that_it_had_is_not_its_nodes_progress(agents: Agents) -> None:
    run = Run(agents, min_nodes=2)
    run.wait_step(10)
    os.kill(agent_of(run.pids()["n1"][0]), signal.SIGKILL)
    run.wait_world(2)
    (agents.node_dir("n2") / "progress/rank2").write_text("starting: waiting with the newest step")
    until(lambda: agents.status("n2").get("progress"), what="n2's own progress", timeout_s=PATIENCE_S)
    run.names = ["n0", "n2"]
    ends_having_resumed_after(run, 10)


def test_a_rank_fails_while_all_pause_for_a_node(agents: Agents) -> None:
    """As over NCCL, where the others cannot notice, and wait for it to pause."""
    run = Alone(agents, FAILS_WHILE_IT_PAUSES, num_nodes=3, min_nodes=2)
    until(lambda: run.logs().count("began") == 3, what="three ranks", timeout_s=PATIENCE_S)
    os.kill(agent_of(run.pids()["n2"][0]), signal.SIGKILL)
    run.wait_world(2)
    until(lambda: run.logs().count("began") == 5, what="two ranks", timeout_s=PATIENCE_S)
    run.join("n2", 2)
    until(lambda: run.events("n1", "worker-failed"), what="the failure is recorded", timeout_s=PATIENCE_S)
    run.wait_world(3)
    assert "told: lost" in agents.log(0, "0.1"), "it need not wait for who is gone"
