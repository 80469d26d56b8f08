"""How a run ended, by what its nodes said, and what the judge gets to see of a node's status."""

import pytest

from nodekit.deploy.failures import Failure
from nodekit.deploy.judge import Seen
from nodekit.deploy.quorum import Electorate
from nodekit.deploy.supervise import seen_of
from nodekit.deploy.verdict import Told, verdict

DONE = Told(state="succeeded")
STOPPED = Told(state="stopped")
GONE = Told(state="running")


def failure(node: str, rank: int, attempt: str, error: str, when: float = 0.0) -> Failure:
    return Failure(
        node=node, rank=rank, world_size=2, attempt=attempt, exitcode=1, when=when, log="/l", error=error
    )


def test_all_succeeded_is_success() -> None:
    assert verdict({"a": DONE, "b": DONE}, max_restarts=3).outcome == "succeeded"


def test_the_last_attempts_first_failure_is_the_verdict() -> None:
    nodes = {
        "a": Told(
            state="failed",
            failures=(
                failure("a", 0, "0.0", "Connection reset by peer"),
                failure("a", 0, "0.1", "Connection reset by peer"),
            ),
        ),
        "b": Told(
            state="failed",
            failures=(failure("b", 1, "0.0", "ValueError: old"), failure("b", 1, "0.1", "ValueError: new")),
            message="2 crashes without progress",
            no_progress=True,
        ),
    }
    found = verdict(nodes, max_restarts=1)
    assert found.outcome == "failed"
    assert found.text.startswith("rank 1 on b failed first (exit status 1), in the last of 2 attempts")
    assert found.first is not None
    assert found.first.error == "ValueError: new"
    assert found.others == "1 other rank ended because of it: lost its connection to b, at once"
    assert found.notes == ("b: 2 crashes without progress",)
    assert found.no_progress


def test_attempts_are_ordered_as_numbers() -> None:
    nodes = {
        "a": Told(
            state="failed",
            failures=(failure("a", 0, "0.9", "ValueError: old"), failure("a", 0, "0.10", "ValueError: new")),
        )
    }
    first = verdict(nodes, max_restarts=1).first
    assert first is not None
    assert first.error == "ValueError: new"


def test_a_node_that_is_gone_is_named_rather_than_those_who_lost_it() -> None:
    echo = Told(state="failed", failures=(failure("a", 0, "0.0", "Connection reset by peer"),))
    found = verdict({"a": echo, "b": GONE}, max_restarts=0)
    assert found.outcome == "failed"
    assert found.text.startswith("b was lost: its agent is gone without a word")


@pytest.mark.parametrize("other", [GONE, STOPPED], ids=["gone", "stopped, for it had missed the end"])
def test_survivors_that_trained_to_the_end_are_a_success_that_names_the_others(other: Told) -> None:
    found = verdict({"a": DONE, "b": other}, max_restarts=0)
    assert (found.outcome, found.text) == ("succeeded", "trained to the end without b")


def test_stopped_everywhere_is_stopped() -> None:
    assert verdict({"a": STOPPED, "b": STOPPED}, max_restarts=0).outcome == "stopped"


def test_a_wait_that_was_given_up_is_a_failure_with_its_reason() -> None:
    found = verdict({"a": STOPPED, "b": GONE}, max_restarts=0, also="waited 60 s for enough nodes")
    why = "waited 60 s for enough nodes: b was lost: its agent is gone without a word"
    assert (found.outcome, found.text) == ("failed", why)


STATUS = {
    "alive": True,
    "agent": "12.34",
    "state": "running",
    "generation": 1,
    "workers": [{"pid": 7}],
    "members": ["a", "b"],
    "fence": 1,
    "port": 4711,
    "electorate": {"generation": 1, "version": 0, "nodes": ["a", "b"]},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {"fence": 1, "port": 4711, "members": ("a", "b")}, id="as it is"),
        pytest.param({"fence": 2}, {"fence": 1}, id="workers of the old generation still run"),
        pytest.param({"fence": 2, "workers": []}, {"fence": 2}, id="they have ended"),
        pytest.param({"fence": 2, "alive": False}, {"fence": 2, "alive": False}, id="no agent is left"),
        pytest.param({"fence": -1, "alive": False}, {"fence": -1}, id="no folder of the run"),
        pytest.param({"snapshot": [2, 40]}, {"held": (2, 40)}, id="the newest snapshot it holds"),
        pytest.param({"no_quorum": True}, {"blocked": True}, id="it waits for a majority"),
        pytest.param(
            {"granted": {"generation": 1, "version": 3, "nodes": ["a"]}},
            {"electorate": Electorate(1, 3, ("a",))},
            id="the newer electorate",
        ),
        pytest.param(
            {"granted": {"generation": 0, "version": 3, "nodes": ["a"]}},
            {"electorate": Electorate(1, 0, ("a", "b"))},
            id="one of an older generation does not count",
        ),
    ],
)
def test_what_the_judge_sees_of_a_status(changes: dict[str, object], expected: dict[str, object]) -> None:
    seen: Seen = seen_of({**STATUS, **changes})
    assert {name: getattr(seen, name) for name in expected} == expected
