"""A user's own training function, called again for each attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nodekit.training import Stop, World, run_attempts
from nodekit.training.attempts import reform
from nodekit.training.kept import Kept
from nodekit.training.snapshots.fence import Fenced


@pytest.mark.parametrize(
    "error",
    [Fenced(0, 1, "/snapshots"), RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")],
)
def test_what_was_kept_outlives_an_attempt_that_ends_before_its_first_step(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept({"x": 1}, (0, 3), lambda: True)

    def second(
        world: World, stop: Stop, make: object, attempt: Callable[[World], object], *_: object
    ) -> object:
        world = replace(world, may_stay=True, kept=kept)
        try:
            return attempt(world)
        finally:
            world.close()

    def train(world: World, stop: Stop) -> int:
        raise error

    monkeypatch.setattr(reform, "run", second)
    assert run_attempts(train) is kept  # type: ignore[comparison-overlap]
