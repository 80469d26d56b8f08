"""The supervisor's judgement in simulated runs: what must never be is not, and once faults stop the job goes on.

A failing run says how to see it again: ``python tests/simulation.py --seed N --nodes M``.
"""

import itertools
import os
import random
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import TESTS
from simulation import Simulation

SEED = int(
    os.environ.get("NODEKIT_SIMULATION_SEED")
    or (1 if settings.default.derandomize else random.SystemRandom().randrange(1 << 40))
)
"""The same each time, but for `make fuzz`, which looks where none has looked before; a failure's message has it."""

decided = 0


def simulate(seed: int, num_nodes: int, faults_s: float | None = None) -> Simulation:
    global decided
    simulation = Simulation(seed, num_nodes, faults_s=faults_s)
    try:
        return simulation.run()
    finally:
        decided += simulation.decisions


@settings(max_examples=130)
@given(seed=st.integers(0, 1 << 40), num_nodes=st.integers(3, 8))
@example(seed=18823, num_nodes=6)  # a new supervisor sees but the node that was replaced
@example(seed=877, num_nodes=3)  # a node's pause begins when the supervisor sees again, after the last fault
@example(seed=305316821428, num_nodes=6)  # a strike just before the faults stop
@example(seed=1174, num_nodes=4)  # a node with a broken GPU is taken back late
@example(seed=320, num_nodes=3)  # one trains alone, that met by the voters before, and is out of sight
def test_small_clusters_survive_what_they_can(seed: int, num_nodes: int) -> None:
    simulate(seed, num_nodes)


@pytest.mark.hypothesis  # for `make fuzz`
@pytest.mark.parametrize("number", range(6))
def test_clusters_of_dozens_survive_what_they_can(number: int) -> None:
    seed = SEED + number
    simulate(seed, random.Random(seed).randint(20, 100))


@pytest.mark.hypothesis
def test_a_thousand_nodes_survive_what_they_can() -> None:
    simulate(SEED, 1000, faults_s=25)


def test_a_run_is_the_same_run_again() -> None:
    command = [sys.executable, str(TESTS / "simulation.py"), "--seed", "5", "--nodes", "5"]
    runs = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": number}, capture_output=True, text=True, check=True
        )
        for number in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert "train from" in runs[0].stdout


def test_a_flapping_node_is_left_out_for_longer_and_longer() -> None:
    simulation = Simulation(1, 5, faults_s=0)
    simulation.flappers.add("n3")
    simulation.until(3000)
    starts = simulation.all_starts["n3"]
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert len(starts) <= 13
    assert pauses[-2] > 600
    assert pauses[2:8] == sorted(pauses[2:8])
    assert simulation.group is not None
    assert simulation.now - simulation.group.progress_at < 10


def test_out_of_sight_of_the_control_machine_nothing_is_done() -> None:
    simulation = Simulation(1, 5, faults_s=0)
    simulation.until(60)
    before = simulation.counts.copy()
    simulation.hide_all(for_s=600)
    simulation.until(700)
    done = simulation.counts - before
    assert set(done) <= {"Notice"}
    assert done["Notice"] <= 2
    assert simulation.group is not None
    assert simulation.now - simulation.group.progress_since > 600


def test_a_hundred_thousand_decisions_were_looked_at() -> None:
    if decided == 0:
        pytest.skip("the simulations were not run")
    assert decided >= 100_000
