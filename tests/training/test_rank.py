"""What becomes of a rank of the training module where an attempt ends, whatever ends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from nodekit.training import Stop, World, loop, rank
from nodekit.training.options.arguments import parse
from nodekit.training.process import stages
from nodekit.training.process.kept import Kept
from nodekit.training.process.stop import EXIT_STOPPED
from nodekit.training.snapshots.files.fence import EXIT_FENCED, Fenced

LOST = RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")
FENCED = Fenced(0, 1, "/snapshots")
OWN = ValueError("a defect of the task")
REFUSED = OSError("the state cannot be copied")


class Ending:
    """An attempt of one rank that trains to step 3 and ends there, by an error or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[str] = []
        """What was done with the step, the other ranks and the snapshot that is being written."""
        self.limits: list[int] = []
        """By which exit statuses this process would have ended after the grace."""
        self.num_closed = 0
        """How often the process group was left for good; who goes on leaves it before the next attempt."""
        self.kept_alive: list[object] = []
        self.progress_file = folder / "rank0"
        self.stop = Stop()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(Stop, "end_within_grace", lambda _, exit_code: self.limits.append(exit_code))
        monkeypatch.setattr(World, "leave_others", lambda _: self.calls.append("leaves"))
        monkeypatch.setattr(World, "close", self._close)
        monkeypatch.setattr(rank, "_KEPT_ALIVE", self.kept_alive)
        monkeypatch.setattr(rank, "_report", lambda error: self.calls.append(f"reports {error}"))

    def step(self, *, is_saved: bool = True) -> Kept:
        return Kept({"x": 1}, (0, 3), lambda: (self.calls.append("saves"), is_saved)[1])

    def __call__(
        self,
        ends_by: Exception | dict[str, Any] | None,
        newest: Kept | Exception | None = None,
        *,
        made: bool = True,
        stops: bool = False,
        is_paused: bool = False,
        parent: Any = None,
        **world: Any,
    ) -> int | Kept:
        """The exit status, or what this process goes on with; ``newest`` is the step that the loop has kept."""

        def ended(found: Any) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

        def make(_: object, own: World, *__: object, **___: object) -> Any:
            assert dist.is_initialized() == (own.kept is not None), (
                "the first attempt's group is joined before"
            )
            if stops:
                self.stop.request()
            return made_loop if made else ended(ends_by)

        made_loop = SimpleNamespace(
            run=lambda: ended(ends_by),
            keep=lambda: ended(newest),
            is_paused=is_paused,
            saver=SimpleNamespace(
                settle=lambda: self.calls.append("settles"), snapshots=SimpleNamespace(peers="its group")
            ),
        )
        self._monkeypatch.setattr(loop, "Loop", make)
        own = replace(World.from_env({}), progress_file=self.progress_file, **{"may_stay": True, **world})
        options = parse(["--output", str(self.progress_file.parent)], {})
        try:
            found = rank._attempt(options, own, cast(Any, None), self.stop, parent)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        assert self.num_closed == (not isinstance(found, Kept)), "the others may wait for this rank's end"
        return found

    def _close(self, *_: object) -> None:
        self.num_closed += 1


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ending:
    return Ending(monkeypatch, tmp_path)


@pytest.mark.parametrize("error", [LOST, FENCED])
def test_a_rank_that_has_lost_another_goes_on_with_its_step_and_lets_the_loop_go(
    error: Exception, ending: Ending
) -> None:
    """The next model needs its memory. Its agent is to wait for it, and the others are not."""
    step = ending.step()
    assert ending(error, step) is step
    assert ending.calls == ["leaves"]
    assert ending.kept_alive == ["its group"]
    assert ending.progress_file.read_text().rstrip() == f"3 {stages.KEEPING}"


@pytest.mark.parametrize(
    ("newest", "stops", "may_stay", "why", "saves"),
    [
        (True, True, True, "it is to stop", ["saves"]),
        (True, False, False, "there is no agent of kit's that would have it go on", ["saves"]),
        (None, False, True, "it has no whole step", []),
        (REFUSED, False, True, "it has no whole step", []),
    ],
)
def test_a_rank_that_cannot_go_on_saves_its_step_and_says_why_it_ends(
    newest: Any,
    stops: bool,
    may_stay: bool,
    why: str,
    saves: list[str],
    ending: Ending,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the step could be kept hides no error."""
    monkeypatch.setattr("nodekit.training.attempts.reform.why_not", lambda _: "" if may_stay else why)
    newest = ending.step() if newest is True else newest
    status = EXIT_STOPPED if stops else 1
    assert ending(LOST, newest, stops=stops, may_stay=may_stay) == ending.limits[-1] == status
    reports = [] if stops else [f"reports {LOST}"]
    assert ending.calls == ["leaves", *reports, *saves, "settles"]
    said = capsys.readouterr().err
    assert f"nodekit: another rank is lost, and this rank ends: {why}\n" in said
    assert "without a snapshot" not in said


@pytest.mark.parametrize("may_stay", [True, False])
def test_what_was_kept_of_the_attempt_before_is_not_lost_where_this_one_makes_no_loop(
    may_stay: bool, ending: Ending
) -> None:
    step = ending.step()
    found = ending(LOST, made=False, kept=step, may_stay=may_stay)
    assert found is step if may_stay else found == 1
    assert ending.calls == ["leaves", *([] if may_stay else [f"reports {LOST}", "saves"])]


def test_what_the_loop_has_loaded_is_kept_no_more(ending: Ending) -> None:
    """It is of an earlier step than the loop's own."""
    step = ending.step()
    assert ending({}, kept=step) == 0
    assert not step.is_held


def test_a_rank_without_a_step_whose_generation_is_over_ends_by_its_own_status(
    ending: Ending, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its agent does not take that for a failure."""
    assert ending(FENCED) == EXIT_FENCED
    assert (ending.limits, ending.calls) == ([EXIT_FENCED], ["leaves"])
    assert capsys.readouterr().err == f"nodekit: {FENCED}\n"


@pytest.mark.parametrize("may_stay", [True, False])
def test_a_step_of_a_generation_that_is_over_is_saved_where_the_rank_is_to_stop(
    may_stay: bool, ending: Ending
) -> None:
    """As where it waits for the next attempt; who would not stay may not save it."""
    assert ending(FENCED, ending.step(), stops=True, may_stay=may_stay) == EXIT_FENCED
    assert ending.calls == ["leaves", *(["saves"] if may_stay else [])]


@pytest.mark.parametrize("is_first", [True, False, None])
@pytest.mark.parametrize("stops", [True, False])
def test_an_error_of_the_tasks_own_ends_the_rank_when_its_snapshot_is_written_and_the_first_one_reports(
    stops: bool, is_first: bool | None, ending: Ending, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks without a common parent each report. To others it is no lost rank: they are not left."""
    parent = None if is_first is None else SimpleNamespace(is_first=lambda: is_first)
    status = EXIT_STOPPED if stops else 1
    assert ending(OWN, ending.step(), stops=stops, parent=parent) == ending.limits[-1] == status
    reports = is_first is not False
    assert ending.calls == [*([f"reports {OWN}"] if reports and not stops else []), "settles"]
    said = f"nodekit: stopped, but without a snapshot of this step: {OWN}\n"
    assert capsys.readouterr().err == (said if reports and stops else "")
    assert OWN in ending.kept_alive, "its traceback refers to DDP"


@pytest.mark.parametrize(
    ("result", "stops", "status"),
    [({"steps": 3}, False, 0), ({"steps": 3}, True, 0), (None, True, EXIT_STOPPED)],
)
def test_a_rank_that_has_trained_to_the_end_has_succeeded_also_where_it_was_to_stop(
    result: dict[str, Any] | None, stops: bool, status: int, ending: Ending
) -> None:
    assert ending(result, ending.step(), stops=stops) == status
    assert ending.calls == []


def test_a_pause_ends_the_attempt_with_the_step_and_without_one_the_rank(ending: Ending) -> None:
    """Its agent starts it again, then."""
    step = ending.step()
    assert ending(None, step, is_paused=True) is step
    assert step.has_paused
    assert ending.kept_alive == ["its group"]
    assert ending(None, None, is_paused=True) == EXIT_STOPPED


def test_a_node_that_comes_in_at_the_last_step_is_not_waited_for(ending: Ending) -> None:
    assert ending({"steps": 3}, ending.step(), is_paused=True) == 0
