"""What a run's result says of its cost: throughput of its steps alone, and memory."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nodekit.training.reporting import node_lines
from nodekit.training.reporting.report import Report, _process_age_s
from nodekit.training.world import World


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nodekit.training.reporting.report.time", clock)
    return clock


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines whose points are drawn."""
    lines: list[dict[str, Any]] = []
    curves = SimpleNamespace(add=lines.append, close=lambda: None)
    monkeypatch.setattr("nodekit.training.reporting.report.Curves", lambda *_, **__: curves)
    return lines


def train(clock: Clock, steps_s: "list[float | str]", folder: Path, *others: tuple[Any, Any]) -> Report:
    """Steps of 64 samples that take so long, and pauses of an hour."""
    world: Any = SimpleNamespace(
        is_main=False,
        kept=None,
        generation=0,
        num_restarts=0,
        is_first_on_node=False,
        progress_file=None,
        device=torch.device("cpu"),
        gather=lambda own: [own, *others],
    )
    total = sum(not isinstance(each, str) for each in steps_s)
    report = Report(world, folder, step=0, total_steps=total, is_evaluated=True)
    step = 0
    for each in steps_s:
        if isinstance(each, str):
            clock.now_s += 3600
            if each == "evaluation":
                report.evaluation(step, epoch=1, means={}, when="at step")
            report.leave_out()
        else:
            step += 1
            clock.now_s += each
            report.step(step, epoch=1, loss=1.0, lr=0.1, num_samples=64, ended=0.0)
    return report


@pytest.mark.parametrize(
    ("steps_s", "expected"),
    [
        ([50.0, 2.0, 2.0], 32),  # the first step is left out
        ([50.0, 2.0, "snapshot", 2.0, "evaluation"], 32),
        ([50.0, 9.0, 9.0, "evaluation", 1.0, "snapshot", 3.0, "evaluation"], 32),  # and the first epoch
        (["evaluation", 50.0, "evaluation", 2.0], 32),
        ([50.0, "evaluation"], None),
        ([], None),
    ],
)
def test_throughput_is_that_of_the_steps_alone(
    steps_s: "list[float | str]", expected: float | None, clock: Clock, tmp_path: Path
) -> None:
    assert train(clock, steps_s, tmp_path).costs()["samples_per_s"] == expected


def test_throughput_is_rank_0s_and_memory_that_of_who_needed_most(clock: Clock, tmp_path: Path) -> None:
    found = train(clock, [1.0, 2.0], tmp_path, (5.0, 2**60), (7.0, None)).costs()
    assert found == {"samples_per_s": 32, "peak_memory_bytes": 2**60}
    own = train(clock, [1.0, 2.0], tmp_path).costs()["peak_memory_bytes"]
    assert own is not None
    assert 2**26 < own < 2**40  # torch alone is more than the lesser


def test_of_quick_steps_some_are_drawn_and_of_slow_ones_all_however_late_they_are_told(
    clock: Clock, tmp_path: Path, drawn: list[dict[str, Any]]
) -> None:
    ends = [*(each / 50 for each in range(1, 11)), *(float(each) for each in range(1, 6)), 5.01, 5.02]
    with Report(World.from_env({}), tmp_path, step=0, total_steps=17, is_evaluated=True) as report:
        for step, ended in enumerate(ends, start=1):
            if step <= 10:  # what comes then is told at once
                clock.now_s = 100.0 + ended
            report.step(step, epoch=1, loss=1.0, lr=0.1, num_samples=64, ended=ended)
    assert [each["step"] for each in drawn] == [1, 4, 7, 10, *range(11, 16), 17]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 17


def test_the_longer_a_training_lasts_the_fewer_of_quick_steps_are_drawn_but_two_a_second(
    clock: Clock, tmp_path: Path, drawn: list[dict[str, Any]]
) -> None:
    with Report(World.from_env({}), tmp_path, step=0, total_steps=1 << 20, is_evaluated=True) as report:
        for step in range(1, 100 * 200):
            clock.now_s = 100.0 + step / 100
            report.step(step, epoch=1, loss=1.0, lr=0.1, num_samples=64, ended=step / 100)
    in_ten_s = [sum(start <= each["time"] < start + 10 for each in drawn) for start in (0, 10, 50, 180)]
    assert in_ten_s[0] >= 100
    assert 25 <= in_ten_s[1] <= 45
    assert in_ten_s[2:] == [20, 20]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 100 * 200))


def test_slow_steps_are_all_drawn_however_long_a_training_lasts_and_however_late_they_are_told(
    clock: Clock, tmp_path: Path, drawn: list[dict[str, Any]]
) -> None:
    with Report(World.from_env({}), tmp_path, step=0, total_steps=99, is_evaluated=True) as report:
        clock.now_s += 8000
        for step in range(1, 21):  # at once, as with local SGD
            report.step(step, epoch=1, loss=1.0, lr=0.1, num_samples=64, ended=float(step))
    assert [each["step"] for each in drawn] == list(range(1, 21))


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_a_node_tells_when_its_first_step_ended(tmp_path: Path, local_rank: int) -> None:
    """Which may be read later: on a GPU, a step is reported while the next one runs."""
    told = tmp_path / "told"
    launched = {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "3"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODEKIT_GENERATION": "0"}
    world = World.from_env({**launched, **where, "NODEKIT_EVENTS_FILE": str(told)})
    with Report(world, tmp_path, step=0, total_steps=9, is_evaluated=True) as report:
        for step in (1, 2):
            report.step(step, epoch=1, loss=1.0, lr=0.1, num_samples=64, ended=100.0 + step)
    if local_rank:
        assert not told.exists()
        return
    assert json.loads(told.read_text()) == {"kind": "first-step", "step": 1, "total_steps": 9, "time": 101.0}


@pytest.mark.usefixtures("drawn")
def test_what_is_said_is_in_the_log_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    report = Report(World.from_env({}), tmp_path, step=0, total_steps=1, is_evaluated=True)
    with path.open("w") as log, report:
        monkeypatch.setattr("sys.stdout", log)
        report.say("first step")
        assert path.read_text() == "first step\n"


def test_a_process_that_has_waited_for_its_start_is_as_old_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    own_s = _process_age_s()
    assert own_s is not None
    monkeypatch.setenv("NODEKIT_STARTED", f"{time.clock_gettime(time.CLOCK_BOOTTIME) - own_s - 5:.3f}")
    found_s = _process_age_s()
    assert found_s is not None
    assert own_s + 5 <= found_s + 0.011 < own_s + 60  # the kernel counts in hundredths


@pytest.mark.parametrize("there", ["[1, 2]", "null", "3", "no JSON"])
def test_a_result_of_somebody_else_is_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / "result.json").write_text(there)
    world: Any = SimpleNamespace(is_main=False, is_first_on_node=True)
    report = Report.__new__(Report)
    report._world, report._folder = world, tmp_path
    report.result({"steps": 4, "resumed_at_step": 4})
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("exit_status", "said"),
    [
        (143, ": the same command goes on"),
        (1, ": when what is said above is mended, the same command goes on"),
    ],
)
def test_the_same_command_is_not_said_to_go_on_where_it_was_refused(
    tmp_path: Path, exit_status: int, said: str
) -> None:
    (tmp_path / "g0000-s000000001.json").touch()
    world: Any = SimpleNamespace(node_rank=0, snapshot_dir=tmp_path)
    assert f"{tmp_path}{said} from there" in node_lines.end(world, tmp_path, exit_status=exit_status)


def test_a_progress_file_that_was_removed_or_not_writable_for_a_while_is_written_again(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that is silent from then on would be taken for one that hangs."""
    file = tmp_path / "progress" / "rank0"
    file.parent.mkdir()
    world = World.from_env({"NODEKIT_PROGRESS_FILE": str(file)})
    with Report(world, tmp_path, step=0, total_steps=9, is_evaluated=True) as report:
        report.alive(at_once=True)
        file.unlink()
        report.alive(at_once=True)
        assert file.read_text().startswith("0/9")
        file.unlink()
        file.parent.rmdir()
        report.alive(at_once=True)
        report.alive(at_once=True)
        assert caplog.text.count("cannot be written, and is tried again") == 1
        file.parent.mkdir()
        report.alive(at_once=True)
        assert file.read_text().startswith("0/9")
