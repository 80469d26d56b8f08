"""The supervisor's judgement: what to do next, and how it ended."""

import pytest

from nodekit.deploy.failures import Failure
from nodekit.deploy.supervise import Seen, decide, verdict

RUNNING = Seen(state="running")
DONE = Seen(state="succeeded", ended_at=100.0)
FAILED = Seen(state="failed", ended_at=100.0)
STOPPED = Seen(state="stopped", ended_at=100.0)
GONE = Seen(state="running", ended_at=100.0)


@pytest.mark.parametrize(
    ("nodes", "min_nodes", "now", "action"),
    [
        pytest.param([RUNNING, RUNNING], 2, 100, "watch", id="all run"),
        pytest.param([DONE, RUNNING], 2, 999, "watch", id="one has finished early"),
        pytest.param([DONE, DONE], 2, 100, "done", id="all have finished"),
        pytest.param([FAILED, RUNNING], 2, 101, "watch", id="the others may say their last words"),
        pytest.param([FAILED, RUNNING], 2, 104, "stop", id="and are stopped then"),
        pytest.param([FAILED, STOPPED], 2, 104, "done", id="failed and stopped"),
        pytest.param([GONE, RUNNING], 2, 104, "stop", id="a node is gone and both are needed"),
        pytest.param([GONE, RUNNING], 1, 999, "watch", id="a node is gone and one will do"),
        pytest.param([FAILED, RUNNING], 1, 999, "stop", id="a failed job does not go on with fewer"),
        pytest.param(
            [Seen(state="running", reachable=False), RUNNING], 2, 999, "watch", id="out of sight only"
        ),
    ],
)
def test_what_is_done_next(nodes: list[Seen], min_nodes: int, now: float, action: str) -> None:
    assert decide(dict(zip("abc", nodes, strict=False)), min_nodes=min_nodes, now=now) == action


def failure(node: str, rank: int, attempt: str, error: str, when: float = 0.0) -> Failure:
    return Failure(node=node, rank=rank, attempt=attempt, exitcode=1, when=when, log="/l", error=error)


def test_all_succeeded_is_success() -> None:
    assert verdict({"a": DONE, "b": DONE}, max_restarts=3).outcome == "succeeded"


def test_the_last_attempts_first_failure_is_the_verdict() -> None:
    nodes = {
        "a": Seen(
            state="failed",
            ended_at=1.0,
            failures=(
                failure("a", 0, "0.0", "Connection reset by peer"),
                failure("a", 0, "0.1", "Connection reset by peer"),
            ),
        ),
        "b": Seen(
            state="failed",
            ended_at=1.0,
            failures=(failure("b", 1, "0.0", "ValueError: old"), failure("b", 1, "0.1", "ValueError: new")),
        ),
    }
    found = verdict(nodes, max_restarts=1)
    assert found.outcome == "failed"
    assert found.text.startswith("rank 1 on b failed first (exit status 1), in the last of 2 attempts")
    assert "ValueError: new" in found.text
    assert "old" not in found.text
    assert "1 other rank(s) ended because of it" in found.text


def test_a_node_that_is_gone_is_named_rather_than_those_who_lost_it() -> None:
    echo = Seen(state="failed", ended_at=1.0, failures=(failure("a", 0, "0.0", "Connection reset by peer"),))
    found = verdict({"a": echo, "b": GONE}, max_restarts=0)
    assert found.outcome == "failed"
    assert found.text.startswith("the agent on b is gone without a word")


def test_survivors_that_trained_to_the_end_are_a_success_that_names_the_lost() -> None:
    found = verdict({"a": DONE, "b": GONE}, max_restarts=0)
    assert (found.outcome, found.text) == ("succeeded", "trained to the end without b")


def test_stopped_everywhere_is_stopped() -> None:
    assert verdict({"a": STOPPED, "b": STOPPED}, max_restarts=0).outcome == "stopped"
