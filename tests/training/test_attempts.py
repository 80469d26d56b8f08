"""A user's own training function, called again for each attempt."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from nodekit.training import Stop, World, run_attempts
from nodekit.training.attempts import reform
from nodekit.training.process.kept import Kept
from nodekit.training.snapshots.files.fence import Fenced

LOST = RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")


def test_nothing_of_an_earlier_attempt_is_held_once_its_state_is_loaded() -> None:
    """Each attempt's state refers to the one before: by way of the world that it was made in."""

    class State:
        world: World

    states = []
    kept: Kept | None = None
    for number in range(4):
        state = State()
        state.world = replace(World.from_env({}), kept=kept)
        states.append(weakref.ref(state))
        kept = Kept(state, (0, number), partial(bool, state))
        kept.release()
        assert not kept.save()
        del state
    gc.collect()
    assert [each() for each in states] == [None] * 4


def second_attempt(monkeypatch: pytest.MonkeyPatch, kept: Kept | None, *, may_stay: bool) -> None:
    """Have `run_attempts` begin with an attempt for which this was kept."""

    def run(
        world: World, _stop: Stop, _make: object, attempt: Callable[[World], object], *_: object
    ) -> object:
        world = replace(world, may_stay=may_stay, kept=kept)
        try:
            return attempt(world)
        finally:
            world.close()

    monkeypatch.setattr(reform, "run", run)


@pytest.mark.parametrize("error", [Fenced(0, 1, "/snapshots"), LOST])
def test_what_was_kept_outlives_an_attempt_that_ends_before_its_first_step(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept({"x": 1}, (0, 3), lambda: True)
    second_attempt(monkeypatch, kept, may_stay=True)

    def train(world: World, stop: Stop) -> int:
        raise error

    assert run_attempts(train) is kept  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("stops", "may_stay", "is_held", "why"),
    [
        (True, True, True, "it is to stop; step 3, which it had kept, is saved"),
        (False, False, True, "there is no agent of kit's.*; step 3, which it had kept, is saved"),
        (True, True, False, "it is to stop$"),
        (False, False, False, "there is no agent of kit's.*go on$"),
        (False, True, False, "it has no step$"),
    ],
)
def test_what_was_kept_is_saved_where_this_process_ends_before_the_first_step(
    stops: bool,
    may_stay: bool,
    is_held: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved: list[int] = []

    def save() -> bool:
        saved.append(3)
        return True

    kept = Kept({"x": 1} if is_held else None, (0, 3), save)
    second_attempt(monkeypatch, kept, may_stay=may_stay)

    def train(world: World, stop: Stop) -> int:
        if stops:
            stop.request()
        raise LOST

    with pytest.raises(RuntimeError, match="closed by peer"):
        run_attempts(train)
    assert saved == [3] * is_held
    assert re.search(f"another rank is lost, and this rank ends: {why}", caplog.messages[-1])


def test_the_search_for_garbage_after_an_attempt_goes_through_no_library() -> None:
    """The others wait meanwhile, for 0.4 s where there is transformers."""

    def train(world: World, stop: Stop) -> int:
        return gc.get_freeze_count() > 10 * len(gc.get_objects())

    try:
        assert run_attempts(train) == 1
    finally:
        gc.unfreeze()
