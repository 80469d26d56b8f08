"""Whether crashed and hung ranks are restarted, by what the attempts achieved."""

from pathlib import Path

import pytest

from nodekit.deploy.agent.ranks.budget import A_HANG, MAX_ATTEMPTS_WITHOUT_PROGRESS, Budget
from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.host.schema import WorkerFailure


def failure(error: str = "ValueError: boom", exitcode: int = 1) -> WorkerFailure:
    return {
        "attempt": "0.0", "rank": 0, "local_rank": 0, "world_size": 2, "exitcode": exitcode, "when": 0.0,
        "log": "", "error": error, "kernel": [],
    }  # fmt: skip


def test_what_fails_twice_alike_at_once_is_not_started_a_third_time() -> None:
    budget = Budget(3)
    budget.took_steps(None, seconds=20, ended_by="ValueError: boom")
    assert budget.crashed(failure()) is None
    budget.took_steps(None, seconds=20, ended_by="ValueError: boom")
    assert budget.crashed(failure()) == "it failed twice in the same way, each time within two minutes"


def test_what_is_printed_after_an_error_does_not_make_it_another() -> None:
    budget = Budget(3)
    error = 'Traceback (most recent call last):\n  File "t.py", line 6, in f\nValueError: boom\n'
    budget.took_steps(None, seconds=20, ended_by=f"{error}saved in 3.2 s")
    assert budget.crashed(failure()) is None
    budget.took_steps(None, seconds=20, ended_by=f"{error}saved in 3.4 s")
    assert budget.crashed(failure()) == "it failed twice in the same way, each time within two minutes"


def test_what_its_log_shows_to_have_trained_has_all_restarts() -> None:
    budget = Budget(3)
    said = []
    for _ in range(4):
        budget.took_steps(None, seconds=20, seems_trained=True)
        said.append(budget.crashed(failure("ModuleNotFoundError: No module named 'metrics'")))
    assert said == [None, None, None, "4 crashes without progress"]
    assert budget.was_restarted


@pytest.mark.parametrize(
    ("text", "advances"),
    [
        ("epoch 0 loss 1.5\nepoch 1 loss 1.2\nValueError: boom\n", True),
        ("epoch 1 loss 1.5\nValueError: boom\n", False),
        ("epoch 1 of 3\nepoch 1 of 3: loss 0.4\nValueError: boom\n", False),
        ("  0%|   | 0/9 [00:00<?]\r 11%|#  | 1/9 [00:01<00:08]\rBoom\n", True),
        ("Traceback (most recent call last):\nValueError: boom\n", False),
    ],
)
def test_a_log_with_two_steps_or_epochs_is_one_of_a_training(
    tmp_path: Path, text: str, advances: bool
) -> None:
    log = tmp_path / "rank0.log"
    log.write_text(text)
    assert guess.advances(str(log)) == advances
    assert not guess.advances(str(tmp_path / "none"))


def test_hangs_without_a_step_count_as_crashes_do() -> None:
    assert Budget(0).hung() == "it hung, and job.max_restarts is 0"
    budget = Budget(2)
    said = []
    for _ in range(3):
        budget.took_steps(None, seconds=5)
        said.append(budget.hung())
    assert said == [None, None, "3 hangs without progress"]
    budget = Budget(1)
    budget.took_steps(None, seconds=5)
    assert budget.crashed(failure()) is None
    budget.took_steps(None, seconds=5)
    assert budget.hung() == "1 crash and 1 hang without progress"


def test_a_hang_after_more_steps_than_ever_before_begins_the_count_anew() -> None:
    budget = Budget(1)
    for step in range(1, 50):
        budget.took_steps(step, seconds=500)
        assert budget.hung() is None
        assert not budget.is_fruitless


def test_what_fails_at_the_same_step_each_time_is_no_progress() -> None:
    budget = Budget(3)
    said = []
    for _ in range(4):
        budget.took_steps(100, seconds=600, ended_by="ValueError: boom")
        said.append(budget.crashed(failure()))
    assert said == [None, None, None, "4 crashes without progress"]


def test_what_would_end_so_again_is_not_restarted_however_far_it_came() -> None:
    budget = Budget(3)
    budget.took_steps(100, seconds=600)
    error = "python -m nodekit.training: the loss of step 101 is nan: training ends here (--on-nan stop)"
    assert budget.crashed(failure(error)) == ""


def test_what_was_killed_twice_without_a_word_did_not_fail_in_the_same_way() -> None:
    """As by a kernel without memory: it says nothing of the command, and has all restarts."""
    budget = Budget(3)
    for _ in range(3):
        budget.took_steps(None, seconds=20, ended_by="killed by SIGKILL")
        assert budget.crashed(failure("", -9)) is None


def test_of_what_tells_no_step_the_time_until_it_fell_silent_counts() -> None:
    budget = Budget(3)
    for _ in range(MAX_ATTEMPTS_WITHOUT_PROGRESS):
        assert not budget.is_fruitless
        budget.took_steps(None, seconds=1)  # and then it hung, for as long as timings.hang says
    assert budget.is_fruitless
    budget.took_steps(None, seconds=3600)
    assert not budget.is_fruitless


def test_what_tells_no_step_and_fails_at_the_same_place_again_and_again_is_given_up() -> None:
    """Each attempt of ten minutes alone would count as progress, and the job would never end."""
    budget = Budget(3)
    for _ in range(3):
        budget.took_steps(None, seconds=600, ended_by="Traceback …\nValueError: boom")
        assert budget.crashed(failure()) is None
    # Another node is lost: that is no failure, and begins the count anew.
    budget.took_steps(None, seconds=600)
    for _ in range(3):
        budget.took_steps(None, seconds=600, ended_by="Traceback …\nValueError: boom")
        assert budget.crashed(failure()) is None
    budget.took_steps(None, seconds=600, ended_by="ValueError: boom")
    assert budget.crashed(failure()) == "4 crashes without progress"


def test_a_node_that_is_lost_in_between_does_not_make_the_same_end_another() -> None:
    budget = Budget(2)
    said = []
    for _ in range(3):
        budget.took_steps(None, seconds=600, ended_by="ValueError: boom")
        said.append(budget.crashed(failure()))
        budget.took_steps(None, seconds=20)
    assert said == [None, None, "3 crashes without progress"]


def test_what_tells_no_step_and_hangs_at_the_same_place_again_and_again_is_given_up() -> None:
    budget = Budget(1)
    said = []
    for seconds in (600, 600, 4000, 600):
        budget.took_steps(None, seconds=seconds, ended_by=A_HANG)
        said.append(budget.hung())
    assert said == [None, "2 hangs without progress", None, "2 hangs without progress"]


def test_failures_of_different_kinds_after_long_attempts_go_on_for_ever() -> None:
    budget = Budget(1)
    for number in range(20):
        budget.took_steps(None, seconds=600, ended_by=f"ValueError: {number}")
        assert budget.crashed(failure(f"ValueError: {number}")) is None
