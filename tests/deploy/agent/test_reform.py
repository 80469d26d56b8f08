"""Ranks that lose another one go on in the same process, with the state that they have."""

import contextlib
import json
import os
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import ANSWER_S, LEFT_WAITING, Agents, again_if_left_waiting, until

from nodekit.deploy.agent.ranks.failures import is_secondary
from nodekit.training.group import reconfigure
from nodekit.training.process.stages import WAITING

pytestmark = pytest.mark.slow

JOB = """
import os, signal, time
import torch
from nodekit.training.tasks.digits import Digits
torch.set_num_threads(1)  # three ranks share two cores
class Task(Digits):
    def __init__(self, *args):
        super().__init__(*args)
        with open(f"read-by-{os.getpid()}", "w") as file:
            file.write(os.environ.get("NODEKIT_STANDBY", ""))
        self.batches = 0
    def model(self):
        if not os.path.exists(f"model-by-{os.getpid()}"):
            open(f"model-by-{os.getpid()}", "w").close()
        return super().model()
    def loss(self, model, batch):
        self.batches += 1
        if not os.path.exists(f"loss-by-{os.getpid()}"):
            open(f"loss-by-{os.getpid()}", "w").close()
        slow = self.batches > 20 and os.path.exists("slow")
        time.sleep(2 if os.path.exists("long") else 0.3 if slow else 0.02)
        return super().loss(model, batch)
"""
STEPS = 3 * 23
PATIENCE_S = 150.0
"""With three tests at a time there are nine ranks on two cores: then the Trainer's imports alone take them 20 s."""


class Run:
    """Some nodes on this machine that train the module's own task without any snapshot before the last step.

    From step 20 on they are slow until their end is waited for: on a busy machine they would be there before the
    test has done what it does to them.
    """

    def __init__(
        self, agents: Agents, *more: str, job: str = JOB, num_nodes: int = 3, **changes: Any
    ) -> None:
        program = ["job.py"] if "__main__" in job else ["-m", "nodekit.training"]
        command = (
            "python", "-u", *program, "--task", "job.py:Task", "--epochs", "3", "--batch-size", "63",
            "--snapshot-every", "1000", "--on-lost-rank", "reform", "--output", str(agents.folder / "output"), *more,
        )  # fmt: skip
        self.begin(agents, job, argv=command, num_nodes=num_nodes, **changes)

    def begin(self, agents: Agents, job: str, *, num_nodes: int, **changes: Any) -> None:
        """Start the nodes."""
        self.agents = agents
        # The grace as the inventory has it: while a machine stands still, 5 s are over before a rank has paused.
        self.changes = {"max_restarts": 5, "num_nodes": num_nodes, "grace_s": 30.0, **changes}
        self.slow = agents.folder / "code/slow"
        self.slow.touch()
        agents.start(job, **self.changes)
        self.names = [f"n{number}" for number in range(num_nodes)]

    def pids(self) -> dict[str, list[int]]:
        """Of each node's ranks."""
        return {
            name: [each["pid"] for each in self.agents.status(name).get("workers", [])] for name in self.names
        }

    def pids_of_all_attempts(self, name: str) -> set[int]:
        return {each["pid"] for event in self.events(name, "workers-started") for each in event["workers"]}

    def join(self, name: str, node_rank: int, **changes: Any) -> None:
        """Start a node's agent again."""
        host = self.agents.channels["n0"].call(
            "status", timeout_s=ANSWER_S, node_dir=str(self.agents.node_dir("n0"))
        )
        self.agents.start_again(
            name, node_rank=node_rank, master_port=host["port"], joins=True, **{**self.changes, **changes}
        )

    def lose_n2(self) -> None:
        """Kill its agent, and wait until the others train on."""
        os.kill(agent_of(self.pids()["n2"][0]), signal.SIGKILL)
        self.wait_world(2)
        # Before its first step a rank may not have said yet that it can pause; then it is stopped instead.
        until(lambda: len(self.events("n0", "first-step")) == 2, what="a step of two", timeout_s=PATIENCE_S)

    def lose_and_regain_n2(self) -> None:
        """Kill its agent, and start it again once the others train on."""
        self.lose_n2()
        long = self.agents.folder / "code/long"
        long.touch()  # an engine's imports may take longer than the steps that are left
        self.join("n2", 2)
        self.wait_world(3)
        long.unlink()

    def wait_world(self, size: int) -> None:
        def there() -> bool:
            return self.agents.status("n0").get("world_size") == size

        until(there, what=f"a world of {size}", timeout_s=PATIENCE_S)

    def fence(self) -> None:
        """Have the nodes refuse their generation."""
        for name in self.names:
            self.agents.channels[name].call(
                "fence", timeout_s=ANSWER_S, node_dir=str(self.agents.node_dir(name)), generation=1
            )

    def begin_generation(self, host: str) -> None:
        """As the supervisor does where the rendezvous host is lost: fence the old one, and call all into another."""
        self.fence()
        for name in self.names:
            self.agents.wait(name, "fenced")
        port = self.agents.status(host)["held_port"]
        for rank, name in enumerate(self.names):
            spec = self.agents.spec(
                name, generation=1, node_rank=rank, master_port=port, is_host=name == host, **self.changes
            )
            self.agents.channels[name].call(
                "join", timeout_s=ANSWER_S, node_dir=spec.node_dir, spec=spec.to_dict()
            )

    def step(self) -> int:
        """The last one that n0 has told."""
        told = re.match(r"\d+", self.agents.status("n0").get("progress") or "")
        return int(told[0]) if told else 0

    def wait_step(self, step: int) -> None:
        until(lambda: self.step() >= step, what=f"step {step}", timeout_s=PATIENCE_S)

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        lines = (self.agents.node_dir(name) / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def wait_succeeded(self) -> None:
        """Wait for the end of all nodes."""
        self.slow.unlink()
        for name in self.names:
            assert self.agents.wait(name, "succeeded", timeout_s=PATIENCE_S)["state"] == "succeeded", (
                self.logs()
            )

    def end(self) -> dict[int, float]:
        """Wait for the end: the loss of each step."""
        self.wait_succeeded()
        return self.losses("n0")

    def output(self, name: str) -> Path:
        folder = self.agents.folder / "output"
        return folder if name == "n0" else folder / f"node{name[1:]}"

    def history(self, name: str) -> list[dict[str, Any]]:
        """What a node has written of its steps and evaluations."""
        return [*map(json.loads, (self.output(name) / "metrics.jsonl").read_text().splitlines())]

    def steps(self, name: str) -> list[int]:
        """Those that it has written, in their order; twice what was done again."""
        return [line["step"] for line in self.history(name) if "loss" in line]

    def losses(self, name: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.history(name) if "loss" in line}

    def result(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output(name) / "result.json").read_text())
        return found

    def logs(self) -> str:
        paths = sorted(self.agents.folder.glob("n*/logs/*.log"))
        return "\n".join(f"--- {path.parent.parent.name} {path.name}\n{path.read_text()}" for path in paths)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], str]:
    """The losses, and the hash of the weights."""
    agents = Agents(tmp_path_factory.mktemp("unbroken"))
    try:
        run = Run(agents)
        return run.end(), run.result("n0")["weights_sha256"]
    finally:
        agents.close()


@pytest.mark.newer_torch
@pytest.mark.parametrize("killed", [0, 1])
@again_if_left_waiting
def test_the_others_stay_and_no_step_is_lost(
    agents: Agents, unbroken: tuple[dict[int, float], str], killed: int
) -> None:
    run = Run(agents)
    run.wait_step(20)
    before = run.pids()
    os.kill(before[f"n{killed}"][0], signal.SIGKILL)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    for name in run.names:
        first, second = run.events(name, "workers-started")
        stay = name != f"n{killed}"
        assert bool(second["stayed"]) == stay
        assert ([each["pid"] for each in second["workers"]] == before[name]) == stay
        assert first["stayed"] == []
        # Who replaces a lost rank has read its data before the nodes have met again.
        read = run.agents.folder / f"code/read-by-{second['workers'][0]['pid']}"
        assert read.read_text() == ("" if stay else "0")
    assert "in memory" in run.result("n0")["resumed_from"]
    assert run.result("n0")["resumed_at_step"] >= 20


WITH_BATCH_NORM = """
class Task(Task):
    def model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm2d(1), super().model())
"""


@again_if_left_waiting
def test_the_means_of_batch_norm_are_those_of_the_lost_rank_0(agents: Agents, tmp_path: Path) -> None:
    """Only rank 0's are of the batches that it has seen; the others have them before a step is theirs."""
    apart = Agents(tmp_path / "apart")
    try:
        unbroken = Run(apart, job=JOB + WITH_BATCH_NORM)
        wanted = unbroken.end(), unbroken.result("n0")["weights_sha256"]
    finally:
        apart.close()
    run = Run(agents, job=JOB + WITH_BATCH_NORM)
    run.wait_step(20)
    os.kill(run.pids()["n0"][0], signal.SIGKILL)
    assert (run.end(), run.result("n0")["weights_sha256"]) == wanted
    assert run.result("n0")["resumed_from"].startswith("what rank")
    assert run.events("n0", "workers-started")[1]["stayed"] == []


HANGS = """
class Task(Task):
    def loss(self, model, batch):
        if self.batches == 25 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            open("hangs", "w").close()
            time.sleep(3600)
        return super().loss(model, batch)
"""


@again_if_left_waiting
def test_the_others_of_a_rank_that_hangs_stay(agents: Agents, unbroken: tuple[dict[int, float], str]) -> None:
    """It is ended at once: it would keep its step, and never come to the next collective."""
    run = Run(agents, job=JOB + HANGS, hang=10.0)
    until((agents.folder / "code/hangs").exists, what="step 25", timeout_s=PATIENCE_S)
    before = run.pids()
    until(lambda: len(run.events("n1", "workers-started")) == 2, what="another one", timeout_s=PATIENCE_S)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert run.result("n0")["resumed_at_step"] == 25
    ended, started = run.events("n1", "hang")[0]["time"], run.events("n1", "workers-started")[1]["time"]
    assert started - ended < 25.0, "nobody waits for what it keeps, for which there would be 30 s"
    for name in run.names:
        second = run.events(name, "workers-started")[1]
        assert ([each["pid"] for each in second["workers"]] == before[name]) == (name != "n1")
        assert bool(second["stayed"]) == (name != "n1")


HANGS_IN_THE_JOIN = """
class Task(Task):
    def model(self):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            time.sleep(3600)
        return super().model()
"""


@again_if_left_waiting
def test_ranks_that_hang_when_they_join_save_the_step_that_they_have(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """As where a cut between two nodes has ended an attempt: they are begun anew, and nobody else has that step."""
    run = Run(agents, job=JOB + HANGS_IN_THE_JOIN, hang=2.0)
    run.wait_step(20)
    os.kill(run.pids()["n2"][0], signal.SIGKILL)
    until(lambda: len(run.events("n1", "workers-started")) == 3, what="a third attempt", timeout_s=PATIENCE_S)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert run.result("n0")["resumed_at_step"] >= 20
    assert run.events("n0", "workers-started")[1]["stayed"]
    assert run.events("n0", "workers-started")[2]["stayed"] == []


WITHIN_AN_ACCUMULATION = """
import functools
from nodekit.training.engines import single
single.torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=64.0, growth_interval=7)
class Task(Task):
    def loss(self, model, batch):
        is_second = self.batches == 2 * 25 + 1
        if is_second and os.environ["RANK"] == "1" and os.path.exists("kill"):
            os.unlink("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


@again_if_left_waiting
def test_no_step_is_lost_within_an_accumulation_in_fp16_with_two_ranks_per_node(
    agents: Agents, tmp_path: Path
) -> None:
    """What the second of two micro-batches has added to the gradients is gone, and the scale is as it was."""
    more = ("--micro-batch", "8", "--amp", "fp16", "--clip", "1.0")
    two: dict[str, Any] = {"num_nodes": 2, "nproc_per_node": 2, "job": JOB + WITHIN_AN_ACCUMULATION}
    apart = Agents(tmp_path / "apart")
    try:
        unbroken = Run(apart, *more, **two)
        wanted = unbroken.end(), unbroken.result("n0")["weights_sha256"]
    finally:
        apart.close()
    (agents.folder / "code/kill").touch()
    run = Run(agents, *more, **two)
    assert (run.end(), run.result("n0")["weights_sha256"]) == wanted
    assert run.result("n0")["resumed_at_step"] == 25
    assert [run.events(name, "workers-started")[1]["stayed"] for name in run.names] == [[0], [2, 3]]


BEHIND = """
from nodekit.training.snapshots.emergency import LastWholeStep
update_begins = LastWholeStep.update_begins
def begins(self):
    if os.environ["RANK"] == "0" and self.newest == 29 and not os.path.exists("behind"):
        open("behind", "w").close()
        time.sleep(0.5)
        raise RuntimeError("gloo/pair.cc: as if the sum had arrived at all ranks but this one")
    update_begins(self)
LastWholeStep.update_begins = begins
"""


@again_if_left_waiting
def test_who_is_a_step_behind_takes_the_state_of_the_others(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    run = Run(agents, job=JOB + BEHIND)
    losses = run.end()
    assert (agents.folder / "code/behind").exists()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert run.result("n0")["resumed_at_step"] == 30
    assert run.result("n0")["resumed_from"] == "what rank 1 has kept in memory"
    for name in run.names:
        assert run.events(name, "workers-started")[1]["stayed"]
        assert run.steps(name) == [*range(1, STEPS + 1)]


@again_if_left_waiting
def test_who_waits_for_a_node_saves_its_step_too(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """Its own host may be lost meanwhile. It goes on with what is in its memory all the same."""
    run = Run(agents)
    run.wait_step(20)
    before = run.pids()
    os.kill(agent_of(before["n2"][0]), signal.SIGKILL)

    def saved() -> list[str]:
        return [
            each.name for name in ("n0", "n1") for each in agents.node_dir(name).glob("snapshots/g*.json")
        ]

    until(lambda: len(saved()) == 2, what="both have saved", timeout_s=PATIENCE_S)
    run.join("n2", 2)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert "in memory" in run.result("n0")["resumed_from"]
    for name in ("n0", "n1"):
        assert run.pids_of_all_attempts(name) == {*before[name]}


LEAVES_ONE_GROUP_AT_MOST = """
from nodekit.training.attempts import reform
reform.MOST_ATTEMPTS = 1
"""


@pytest.mark.newer_torch
@again_if_left_waiting
def test_who_has_left_too_many_groups_saves_its_step_and_is_started_again(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """With a newer torch they are kept, and nobody ever has."""
    run = Run(agents, job=JOB + LEAVES_ONE_GROUP_AT_MOST)
    for number, step in enumerate((10, 20)):
        run.wait_step(step)
        os.kill(run.pids()["n1"][0], signal.SIGKILL)
        until(
            lambda number=number: len(run.events("n0", "workers-started")) == number + 2,  # type: ignore[misc]
            what="another attempt",
            timeout_s=PATIENCE_S,
        )
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    keeps = reconfigure.is_available()
    for name in ("n0", "n2"):
        assert [len(each["stayed"]) for each in run.events(name, "workers-started")] == [0, 1, int(keeps)]
    assert ("and this rank ends: it has left 1 process groups behind" in run.logs()) is not keeps
    assert ("in memory" in run.result("n0")["resumed_from"]) is keeps
    assert run.result("n0")["resumed_at_step"] >= 20, "the steps since the last snapshot are not done again"


DIES_ONCE = """
    def __new__(cls, *args):
        if "NODEKIT_STANDBY" in os.environ and not os.path.exists("died"):
            open("died", "w").close()
            raise SystemExit("there is no room for it yet")
        return super().__new__(cls)
"""


def test_a_rank_that_fails_before_its_attempt_is_known_is_started_again(agents: Agents) -> None:
    """At once, or, where the attempt is known by the time it has ended, in the one after; its words are in a log."""
    run = Run(agents, job=JOB + DIES_ONCE, num_nodes=1)
    run.wait_step(20)
    os.kill(run.pids()["n0"][0], signal.SIGKILL)
    run.end()
    assert (agents.folder / "code/died").exists()
    assert "there is no room for it yet" in run.logs()


# gloo in place of NCCL, and a CPU in place of the GPU: its connections are shut where a communicator would be aborted.
OVER_NCCL = """
if __name__ == "__main__":
    import sys
    import torch.distributed as dist
    from nodekit.training import __main__, loop, world
    from nodekit.training.group import connections, nccl
    from nodekit.training.steps import step_sums
    world._backend = lambda *_: "nccl"
    begin = dist.init_process_group
    dist.init_process_group = lambda backend, device_id, **more: begin("gloo", **more)
    world.World.settle = lambda self: nccl.check()
    nccl._end_in_thread = lambda _: connections.shut_down()
    nccl.make_room = lambda _: None
    nccl.close = dist.destroy_process_group
    if os.path.exists("ahead"):
        step_sums.LATE_ON.add("cpu")
        loop.is_fused = lambda *_: True
    sys.exit(__main__.main())
"""


@pytest.mark.parametrize("is_ahead", [False, True], ids=["which waits", "which works ahead"])
@again_if_left_waiting
def test_over_nccl_no_step_is_lost_either(
    agents: Agents, unbroken: tuple[dict[int, float], str], is_ahead: bool
) -> None:
    """On a GPU which works ahead of its process, a fused optimizer leaves out what comes after the loss."""
    if is_ahead:
        (agents.folder / "code/ahead").touch()
    run = Run(agents, job=JOB + OVER_NCCL)
    run.wait_step(25)  # in the middle of an epoch, where the sums of a step are not read at once
    before = run.pids()
    os.kill(before["n1"][0], signal.SIGKILL)
    losses = run.end()
    assert losses == pytest.approx(unbroken[0], rel=1e-4 if is_ahead else 0.0)
    for name in ("n0", "n2"):
        assert run.events(name, "workers-started")[1]["stayed"]
        assert run.pids_of_all_attempts(name) == {*before[name]}
        assert run.steps(name) == [*range(1, STEPS + 1)]
    assert "in memory" in run.result("n0")["resumed_from"]


@again_if_left_waiting
def test_a_rank_in_the_middle_of_a_long_step_stays(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """It is in no collective, and would be ended long before it comes to the next one."""
    run = Run(agents)
    run.wait_step(20)
    before = run.pids()
    (agents.folder / "code/long").touch()
    time.sleep(0.5)
    (agents.folder / "code/long").unlink()
    os.kill(before["n1"][0], signal.SIGKILL)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert all(run.events(name, "workers-started")[1]["stayed"] for name in ("n0", "n2"))


LEAVES_SLOWLY = """
from nodekit.training.attempts import reform
from nodekit.training.group.agent_messages import AgentMessages
leave = reform.leave
def leave_slowly(world):
    time.sleep(1.5)
    leave(world)
reform.leave = leave_slowly
AgentMessages.when = lambda *_, **__: None
"""


@again_if_left_waiting
def test_a_rank_that_takes_long_to_leave_the_others_stays(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """As with NCCL on a busy host: it has found out by itself that one is lost, and hears no more that it is told."""
    main = f"import sys\nfrom nodekit.training import __main__\n{LEAVES_SLOWLY}sys.exit(__main__.main())\n"
    run = Run(agents, job=f'{JOB}if __name__ == "__main__":\n{textwrap.indent(main, "    ")}')
    run.wait_step(20)
    os.kill(run.pids()["n1"][0], signal.SIGKILL)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert all(run.events(name, "workers-started")[1]["stayed"] for name in ("n0", "n2"))


LOST_IN_AN_EVALUATION = """
import os
from nodekit.training.world import World
gather = World.gather
def gather_once(self, value):
    found = gather(self, value)
    lost = "lost"
    if isinstance(value, dict) and self.rank == 1 and not os.path.exists(lost):
        open(lost, "w").close()
        raise RuntimeError("gloo/pair.cc: as if a rank were lost while this one waits, and the others have it all")
    return found
World.gather = gather_once
"""


@pytest.mark.newer_torch
@pytest.mark.parametrize(
    "evaluates", [[], ["--eval-every", "8"]], ids=["at the end of an epoch", "within one"]
)
@again_if_left_waiting
def test_a_rank_is_lost_when_some_have_ended_an_evaluation_and_some_have_not(
    agents: Agents, unbroken: tuple[dict[int, float], str], evaluates: list[str]
) -> None:
    """All have the same step, and yet some would train and some would evaluate."""
    run = Run(agents, *evaluates, job=JOB + LOST_IN_AN_EVALUATION)
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    for name in run.names:
        first, second = run.events(name, "workers-started")
        assert second["stayed"]
        assert second["workers"] == first["workers"]
        measured = [line["step"] for line in run.history(name) if "test" in line]
        assert measured == sorted({*range(23, 70, 23), *(range(8, 70, 8) if evaluates else ())})


KILLED_WITHIN_A_MESSAGE = """
import signal
import torch.distributed as dist
class Task(Task):
    def loss(self, model, batch):
        if self.batches == 23 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            large = torch.full((60_000_000,), float(dist.get_rank() == 0))
            sent = dist.broadcast(large, src=0, async_op=True)
            while dist.get_rank() == 1:
                if large[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
            sent.wait()
        return super().loss(model, batch)
"""


@pytest.mark.newer_torch
def test_a_rank_that_gloo_leaves_waiting_ends_with_its_step_saved(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """Half of what it sends has gone, and nobody takes the other half: gloo does not tell it so."""
    run = Run(agents, job=JOB + KILLED_WITHIN_A_MESSAGE, num_nodes=2, grace_s=60.0)
    assert run.end() == pytest.approx(unbroken[0], rel=1e-3, abs=1e-3)
    assert f"{LEFT_WAITING}: saving step 23 alone" in agents.log(0)
    assert run.result("n0")["resumed_at_step"] == 23
    # On a busy machine its agent may have ended the attempt before it ends by itself: there is no failure then.
    for failed in run.events("n0", "worker-failed"):
        assert failed["exitcode"] == 1
        assert is_secondary(failed["error"], 1), "its script is not charged for it"


@pytest.mark.newer_torch
@pytest.mark.parametrize("first", ["agents", "ranks"])
@again_if_left_waiting
def test_ranks_of_a_fenced_generation_go_on_in_the_next_one(
    agents: Agents, unbroken: tuple[dict[int, float], str], first: str
) -> None:
    """What they keep could not be committed: the next generation has it from their memory, or not at all.

    Ranks look at the fence of their snapshots once a second, and may see it before their agent tells them.
    """
    run = Run(agents)
    run.wait_step(20)
    before = run.pids()
    if first == "ranks":
        with stopped([agent_of(pid) for (pid,) in before.values()]):
            run.fence()
            until(
                lambda: run.logs().count("its generation is over") == 3, what="all wait", timeout_s=PATIENCE_S
            )
    run.begin_generation("n1")
    losses = run.end()
    assert (losses, run.result("n0")["weights_sha256"]) == unbroken
    assert run.result("n0")["resumed_at_step"] >= 20
    for name in run.names:
        started = run.events(name, "workers-started")[-1]
        assert [each["pid"] for each in started["workers"]] == before[name]


DYING = """
import os, threading
from pathlib import Path
from nodekit.training.group.agent_messages import AgentMessages
lost = threading.Event()
AgentMessages(Path(os.environ["NODEKIT_AGENT_PIPE"])).when("lost", lost.set)
print("listens", flush=True)
if os.environ["NODEKIT_GENERATION"] == "0":
    lost.wait()
    os._exit(1)
"""


class Alone(Run):
    """One node, or more, with a program of its own."""

    def __init__(self, agents: Agents, job: str, *, num_nodes: int = 1, **changes: Any) -> None:
        self.begin(agents, job, num_nodes=num_nodes, **changes)


def test_a_rank_that_has_said_that_it_waits_and_is_gone_is_started_again(agents: Agents) -> None:
    """As one that said so just when it was ended: its progress file is what a later look finds."""
    run = Alone(agents, DYING)
    until(lambda: "listens" in run.logs(), what="the rank")
    run.fence()
    agents.wait("n0", "fenced")
    (agents.node_dir("n0") / "progress/rank0").write_text(f"3 {WAITING}\n")
    run.begin_generation("n0")
    run.wait_succeeded()


SLOW_TO_BEGIN = """
import os, sys, threading, time
from pathlib import Path
from nodekit.training.group.agent_messages import AgentMessages
from nodekit.training.process.stages import WAITING
first = os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["LOCAL_RANK"] == "1":
    if "NODEKIT_STANDBY" in os.environ:  # the other one stays, so this one may be started before its attempt is known
        following = AgentMessages(Path(os.environ["NODEKIT_AGENT_PIPE"])).next_attempt(60)
        first = following.env["TORCHELASTIC_RESTART_COUNT"]
    while first == "0" and not Path("listens").exists():
        time.sleep(0.01)
    sys.exit(int(first) < 2)
messages = AgentMessages(Path(os.environ["NODEKIT_AGENT_PIPE"]))
lost = threading.Event()
messages.when("lost", lost.set)
Path("listens").touch()
lost.wait()
messages.ignore()
for _ in range(2):
    Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text(f"3 {WAITING}")
    messages.say_waiting(has_paused=False)
    messages.next_attempt(60)
    time.sleep(2)
"""


def test_a_rank_that_stays_and_has_not_begun_yet_is_not_ended_for_the_next_loss(agents: Agents) -> None:
    """It has a step. On a busy machine it may not have run at all since it was told to go on."""
    run = Alone(agents, SLOW_TO_BEGIN, nproc_per_node=2, grace_s=30.0)
    run.wait_succeeded()
    pids = [event["workers"][0]["pid"] for event in run.events("n0", "workers-started")]
    assert len(pids) == 3
    assert len({*pids}) == 1, run.logs()


SLOW_TO_HEAR = """
import os, select, sys, time
from pathlib import Path
from nodekit.training.process.stages import KEEPING
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit()
if os.environ["LOCAL_RANK"] == "1":
    while not Path("listens").exists():
        time.sleep(0.01)
    sys.exit(1)
pipe = open(os.environ["NODEKIT_AGENT_PIPE"], "r+b", buffering=0)
Path("listens").touch()
select.select([pipe], [], [])
time.sleep(1)
pipe.read(4096)
Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text(f"3 {KEEPING}")
time.sleep(1)
Path("kept").touch()
"""


def test_a_rank_that_has_no_core_to_hear_of_the_loss_is_waited_for(agents: Agents) -> None:
    """As on a machine that stands still for a second: it had been ended half a second later, with its step."""
    run = Alone(agents, SLOW_TO_HEAR, nproc_per_node=2)
    run.wait_succeeded()
    assert (agents.folder / "code/kept").exists(), run.logs()


KEEPS_FOR_A_WHILE = """
import os, sys, threading, time
from pathlib import Path
from nodekit.training.group.agent_messages import AgentMessages
from nodekit.training.process.stages import KEEPING
if os.environ["NODEKIT_GENERATION"] == "1":
    sys.exit()
lost = threading.Event()
def hear():
    Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text(f"3 {KEEPING}")
    lost.set()
AgentMessages(Path(os.environ["NODEKIT_AGENT_PIPE"])).when("lost", hear)
print("listens", flush=True)
lost.wait()
time.sleep(1)
Path("kept").touch()
os._exit(1)
"""


def test_a_rank_on_a_gpu_that_keeps_its_step_is_waited_for(agents: Agents) -> None:
    """Those that wait in NCCL and keep nothing are killed at once; it had been killed with them."""
    run = Alone(agents, KEEPS_FOR_A_WHILE, gpus=(0,))
    until(lambda: "listens" in run.logs(), what="the rank")
    run.fence()
    agents.wait("n0", "fenced")
    assert (agents.folder / "code/kept").exists(), run.logs()
    run.begin_generation("n0")
    run.wait_succeeded()


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)


def agent_of(rank: int) -> int:
    """The agent that has started this rank: the fork server is between them."""
    return parent(parent(rank))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.newer_torch
@again_if_left_waiting
def test_a_node_that_falls_silent_while_all_pause_for_another_does_not_cost_the_step(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """Who has paused waits for it in a collective, until it is told."""
    run = Run(agents, min_nodes=2)
    run.wait_step(10)
    run.lose_n2()
    before = run.pids()
    long = agents.folder / "code/long"
    long.touch()
    run.join("n2", 2)

    def pauses() -> bool:
        # The other of the two may hear of it by its rank, which is paused already.
        return any(not each["lost"] for name in ("n0", "n1") for each in run.events(name, "membership"))

    until(pauses, what="the pause", timeout_s=PATIENCE_S)
    (rank,) = before["n1"]
    with stopped([parent(rank), rank]):  # its connections stay open, as those of a host whose cable is cut
        os.kill(agent_of(rank), signal.SIGKILL)
        long.unlink()
        until(lambda: len(run.events("n0", "workers-started")) >= 3, what="n0 with n2", timeout_s=PATIENCE_S)
    run.names = ["n0", "n2"]
    assert run.end() == pytest.approx(unbroken[0], rel=1e-3, abs=1e-3)
    last = run.events("n0", "workers-started")[-1]
    assert ([each["pid"] for each in last["workers"]], last["world_size"]) == (before["n0"], 2)


@again_if_left_waiting
def test_horovod_does_not_wait_for_a_silent_node(
    agents: Agents, unbroken: tuple[dict[int, float], str]
) -> None:
    """The connections of its own are ended, too."""
    run = Run(agents, "--engine", "horovod", min_nodes=2)
    run.wait_step(10)
    before = run.pids()
    (rank,) = before["n1"]
    with stopped([parent(rank), rank]):
        os.kill(agent_of(rank), signal.SIGKILL)
        until(lambda: len(run.events("n0", "workers-started")) == 2, what="n0 with n2", timeout_s=PATIENCE_S)
    run.names = ["n0", "n2"]
    losses = run.end()
    # A step that only n2 had ended is in the folder that it wrote to as node 2. They differ by one at most.
    assert len(unbroken[0].keys() - losses.keys()) <= 1
    assert {**run.losses("n2"), **losses} == pytest.approx(unbroken[0], rel=1e-3, abs=1e-3)
    for name in run.names:
        assert [each["pid"] for each in run.events(name, "workers-started")[-1]["workers"]] == before[name]
    assert (run.output("n1") / "result.json").exists(), "n2 is node 1 now"
    assert not (run.output("n2") / "result.json").exists()


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("ddp", marks=pytest.mark.newer_torch),
        pytest.param("accelerate", marks=pytest.mark.newer_torch),
        *("fabric", "trainer", "horovod"),
    ],
)
@again_if_left_waiting
def test_a_node_is_lost_and_another_comes_in(
    agents: Agents, unbroken: tuple[dict[int, float], str], engine: str
) -> None:
    """The others keep their processes both times, and who comes in gets its state from one of them."""
    run = Run(agents, "--engine", engine, min_nodes=2)
    run.wait_step(10)
    before = run.pids()
    run.lose_and_regain_n2()
    losses = run.end()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(unbroken[0], rel=1e-3, abs=1e-3)
    for name in ("n0", "n1"):
        started = run.events(name, "workers-started")
        assert [(each["world_size"], len(each["stayed"])) for each in started] == [(3, 0), (2, 1), (3, 1)]
        assert {each["pid"] for event in started for each in event["workers"]} == {*before[name]}
    assert "what rank 0 has kept in memory" in run.result("n2")["resumed_from"]
    (new,) = run.events("n2", "workers-started")[-1]["workers"]
    # Whoever of the two sees it first has its rank leave the group; the other may hear of that alone.
    interrupted = [
        e["time"] for name in ("n0", "n1") for e in run.events(name, "membership") if not e["lost"]
    ]
    for what in ("read", "model", "loss"):
        made = (agents.folder / f"code/{what}-by-{new['pid']}").stat().st_mtime
        assert made < min(interrupted), "who comes in has read its data before, and computed a step"
    assert run.events("n2", "workers-started")[-1]["stayed"] == []


@pytest.mark.parametrize("is_killed", [False, True])
@again_if_left_waiting
def test_ranks_train_on_until_all_agents_have_met_who_comes_in(
    agents: Agents, unbroken: tuple[dict[int, float], str], is_killed: bool
) -> None:
    """However long one of them takes; and where a rank fails meanwhile, it alone is started again."""
    run = Run(agents, min_nodes=2)
    run.wait_step(5)
    before = run.pids()
    run.lose_n2()
    with stopped([agent_of(*before["n1"])]):
        run.join("n2", 2)
        until(lambda: agents.status("n2").get("state") == "rendezvous", what="n2", timeout_s=PATIENCE_S)
        run.wait_step(run.step() + 8)
        assert len(run.events("n0", "workers-started")) == 2, "n1's agent has not met them"
        if is_killed:
            os.kill(*before["n0"], signal.SIGKILL)
            until(lambda: run.events("n0", "worker-failed"), what="the failure", timeout_s=PATIENCE_S)
    run.wait_world(3)
    assert run.end() == pytest.approx(unbroken[0], rel=1e-3, abs=1e-3)
    stayed = {
        name: [len(each["stayed"]) for each in run.events(name, "workers-started")] for name in ("n0", "n1")
    }
    assert stayed == {"n0": [0, 1, 0 if is_killed else 1], "n1": [0, 1, 1]}


DEAF = """
import os, queue
from pathlib import Path
from nodekit.training.group.agent_messages import AgentMessages
messages, told = AgentMessages(Path(os.environ["NODEKIT_AGENT_PIPE"])), queue.SimpleQueue()
for kind in ("lost", "pause"):
    messages.when(kind, lambda kind=kind: told.put(kind))
print("told:", told.get(), flush=True)
os._exit(143)
"""


@pytest.mark.newer_torch
def test_who_is_lost_while_the_others_meet_and_comes_back_at_once_is_missed(agents: Agents) -> None:
    """Ranks that wait for it in NCCL notice nothing by themselves, and cannot pause."""
    run = Alone(agents, DEAF, num_nodes=4, min_nodes=2)
    until(lambda: all(run.pids().values()), what="all ranks")
    slow, lost, away = (agent_of(run.pids()[name][0]) for name in ("n1", "n2", "n3"))
    os.kill(away, signal.SIGKILL)
    run.wait_world(3)
    with stopped([slow]):
        run.join("n3", 3)
        until(lambda: agents.status("n3").get("state") == "rendezvous", what="n3", timeout_s=PATIENCE_S)
        time.sleep(1.0)  # n0 looks every half second, and leaves to meet n3
        os.kill(lost, signal.SIGKILL)
        until(lambda: not agents.status("n2")["alive"], what="its end")
        run.join("n2", 2)
        until(lambda: agents.status("n2").get("state") == "rendezvous", what="n2", timeout_s=PATIENCE_S)
    run.wait_world(4)
    assert agents.log(0, "0.1") == "told: lost\n"
