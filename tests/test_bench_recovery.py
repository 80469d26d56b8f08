"""What bench/recovery reads out of the ranks' lines and kit's events."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAULT_S = 100.0


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    return importlib.import_module("recovery")


def world(name: int, hosts: list[str], *, at: float, step: int, num_steps: int) -> list[dict[str, Any]]:
    """A world's lines: it begins to train at a time, after a step, 20 ms each; each rank 1 ms after the one before."""
    lines: list[dict[str, Any]] = []
    for rank, host in enumerate(hosts):
        where = {"host": host, "world": name, "size": len(hosts), "rank": rank}
        times = dict.fromkeys(("first_line", "imported", "joined"), at - 0.1)
        lines.append({**where, "step": step, "pid": 7, "resumed": at, **times})
        lines += [
            {**where, "step": step + n, "time": at + 0.02 * n + 0.001 * rank} for n in range(1, num_steps + 1)
        ]
    return lines


BEFORE = world(1, ["a", "b", "c"], at=98.0, step=0, num_steps=99)


def test_it_counts_to_the_first_step_of_all_ranks_of_a_new_world(recovery: ModuleType) -> None:
    after = world(2, ["a", "c"], at=103.0, step=75, num_steps=20)
    trial = recovery.judge([*after, *BEFORE], FAULT_S)
    assert trial.seconds == pytest.approx(3.021)
    assert trial.pause_s == pytest.approx(103.02 - 99.982)
    assert (trial.lost, trial.size, trial.num_met) == (99 - 75, 2, 1)
    assert trial.phases["joined"] == pytest.approx(2.9)


def test_the_old_world_and_one_that_does_not_go_on_are_no_recovery(recovery: ModuleType) -> None:
    assert (
        recovery.judge([*BEFORE, *world(1, ["a", "b", "c"], at=101.0, step=99, num_steps=50)], FAULT_S)
        is None
    )
    short = world(2, ["a", "c"], at=103.0, step=75, num_steps=5)
    assert recovery.judge([*BEFORE, *short], FAULT_S) is None
    alone = [line for line in world(2, ["a", "c"], at=103.0, step=75, num_steps=50) if line["rank"] == 0]
    assert recovery.judge([*BEFORE, *alone], FAULT_S) is None
    good = world(3, ["a", "c"], at=105.0, step=75, num_steps=50)
    trial = recovery.judge([*BEFORE, *short, *good], FAULT_S)
    assert (trial.seconds, trial.num_met) == (pytest.approx(5.021), 2)


def test_a_node_is_back_when_it_trains_and_only_the_others_gaps_are_their_pause(recovery: ModuleType) -> None:
    two = world(2, ["a", "c"], at=99.0, step=99, num_steps=200)
    assert recovery.judge([*BEFORE, *two], FAULT_S, host="b") is None
    three = world(3, ["a", "b", "c"], at=104.0, step=275, num_steps=20)
    trial = recovery.judge([*BEFORE, *two, *three], FAULT_S, host="b")
    assert trial.seconds == pytest.approx(4.022)
    assert trial.pause_s == pytest.approx(104.02 - 103.001)
    assert trial.lost == 299 - 275


def test_kits_marks_are_of_what_happened_between_fault_and_step(recovery: ModuleType) -> None:
    kinds = [
        (99, "rendezvous"),
        (102, "membership"),
        (102.5, "store-lost"),
        (104, "rendezvous"),
        (109, "rendezvous"),
    ]
    history = [{"time": when, "kind": kind, "node": "a"} for when, kind in kinds]
    found = recovery.kit_phases(history, FAULT_S, 105.0)
    assert found == {"noticed": 2.0, "old workers ended": 2.5, "met": 4.0}
    assert "membership" in recovery.told(history, FAULT_S, 105.0)


def test_the_tables_say_what_did_not_recover(recovery: ModuleType) -> None:
    good = [
        recovery.Trial(seconds=s, lost=5, pause_s=1.0, size=2, phases={"stepped": s}) for s in (2.0, 3.5, 3.0)
    ]
    bad = recovery.Trial(seconds=None, why="not in 30 s")
    results = {"kit up": {"worker": good, "return": [*good, bad]}, "torchrun": {"worker": [bad]}}
    text = recovery.times_table(results)
    assert "3.0 (2.0–3.5) | not in 30 s" in text
    assert "3.0 (2.0–3.5), 3 of 4" in text
    assert "5 (5–5)" in recovery.lost_table(results)
    said = recovery.goals(results["kit up"])
    assert "a worker killed: recovered 3 of 3; 3.00 s, goal ≤ 3 s: met" in said
    assert "recovered 3 of 4" in said
    assert "3.00" in recovery.phases_table(results["kit up"])
    said = recovery.goals(results["kit up"], are_kept=True)
    assert "3.00 s, goal ≤ 0.15 s: MISSED; steps lost at most 5, goal ≤ 0: MISSED" in said
    assert "pause 1.00 s, goal ≤ 0.09 s: MISSED" in said


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"seconds": [0.2]}, ["NOT RECOVERED from 1 faults"]),
        ({"lost": [0, 3]}, ["3 STEPS LOST"]),
        ({"are_equal": False}, ["OTHER WEIGHTS at the end than without a fault"]),
        ({"threads": [10, 40, 12, 44]}, []),
        ({"threads": [10, 40, 12, 45]}, ["agent: threads GREW from 40 to 45"]),
    ],
)
def test_a_storm_says_what_is_not_as_it_is_to_be(
    recovery: ModuleType, changes: dict[str, Any], found: list[str]
) -> None:
    storm = recovery.storm
    values = {"num_faults": 2, "seconds": [0.2, 0.3], "lost": [0, 0], "are_equal": True, **changes}
    threads = values.pop("threads", [])
    outcome = storm.Outcome(
        **values, uses=[dict.fromkeys(("agent", "rank"), storm.Use(100.0, each, 9)) for each in threads]
    )
    assert storm.faults_of(outcome) == found
    assert ("nothing was lost" in storm.told(outcome)) is not bool(found)


def test_without_a_fault_alarms_and_the_longest_pause_are_counted(
    recovery: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_fault, now = recovery.no_fault, [100.0]

    class Session:
        """A run whose step 3 takes 2.5 s, and a node of which counts as lost in it."""

        has_ended = False
        made = ((99.5, 1), (100.4, 2), (102.9, 3), (103.3, 4))

        def __init__(self) -> None:
            self.lines: list[dict[str, Any]] = [{"time": 99.5, "step": 1}]
            self.read_to = 99.5

        def read(self) -> list[dict[str, Any]]:
            self.lines += [{"time": t, "step": n} for t, n in self.made if self.read_to < t <= now[0]]
            self.read_to = now[0]
            return self.lines

        def history(self) -> list[dict[str, Any]]:
            kinds = ((99.0, "membership"), (102.0, "membership"), (102.1, "unreachable"), (102.5, "sample"))
            return [{"kind": kind, "time": when, "names": ["node2"]} for when, kind in kinds]

    monkeypatch.setattr(no_fault.time, "time", lambda: now[0])
    monkeypatch.setattr(no_fault.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    found = no_fault._watch(Session(), 4.0)
    assert (found.num_steps, round(found.longest_s, 3)) == (3, 2.5)
    assert [each["time"] for each in found.alarms] == [102.0]
    assert "no answer from a node for 3 s 1 times\nFALSE ALARMS: 1 membership\n" in no_fault.told(found)
    assert "the longest pause between two 2.50 s" in no_fault.told(found)
