"""A user's own training function, called again for each attempt."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agents import until

from nodekit.training import Stop, World, run_attempts, world
from nodekit.training.attempts import reform
from nodekit.training.attempts.standby import get_ready
from nodekit.training.group import connections
from nodekit.training.group.initmethod import InitMethod
from nodekit.training.options.arguments import parse
from nodekit.training.process import rng, stages
from nodekit.training.process.kept import AttemptOver, Kept
from nodekit.training.snapshots.files.fence import Fenced
from nodekit.training.tasks.digits import Digits

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


def second_attempt(
    monkeypatch: pytest.MonkeyPatch, kept: Kept | None, *, may_stay: bool, progress_file: Path | None = None
) -> None:
    """Have `run_attempts` begin with an attempt for which this was kept."""

    def run(
        world: World, _stop: Stop, _make: object, attempt: Callable[[World], object], *_: object
    ) -> object:
        world = replace(world, may_stay=may_stay, kept=kept, progress_file=progress_file)
        try:
            return attempt(world)
        finally:
            world.close()

    monkeypatch.setattr(reform, "run", run)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("error", [Fenced(0, 1, "/snapshots"), LOST])
def test_what_was_kept_outlives_an_attempt_that_ends_before_its_first_step(
    error: Exception, stops: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if this process is to stop: then it is saved while it waits for the next attempt. Its agent is to wait."""
    kept, file = Kept({"x": 1}, (0, 3), lambda: True), tmp_path / "rank0"
    second_attempt(monkeypatch, kept, may_stay=True, progress_file=file)
    left: list[World] = []
    monkeypatch.setattr(World, "leave_others", lambda own: left.append(own))

    def train(world: World, stop: Stop) -> int:
        if stops:
            stop.request()
        raise error

    assert run_attempts(train) is kept  # type: ignore[comparison-overlap]
    assert file.read_text().rstrip() == f"3 {stages.KEEPING}"
    assert len(left) == 1, "the others would wait for this rank"


def test_a_pause_ends_the_attempt_and_what_it_keeps_is_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept({"x": 1}, (0, 3), lambda: True, has_paused=True)
    second_attempt(monkeypatch, None, may_stay=True)

    def train(world: World, stop: Stop) -> int:
        raise AttemptOver(kept)

    assert run_attempts(train) is kept  # type: ignore[comparison-overlap]


def test_a_script_sets_how_long_a_collective_and_a_stop_may_take() -> None:
    found: list[float] = []
    assert (
        run_attempts(
            lambda *own: found.extend((own[0].timeout_s, own[1].grace_s)) or 3, grace_s=5, timeout_s=7
        )
        == 3
    )
    assert found == [7, 5]


@pytest.mark.parametrize("num_ranks", ["", "0", "4"])
def test_who_is_started_before_its_attempt_is_known_waits_for_it(
    num_ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the others wait for it (0). A pause until its function runs does not end it."""
    monkeypatch.setenv("NODEKIT_STANDBY", num_ranks)
    waited: list[str] = []
    monkeypatch.setattr(reform, "attempt_of", lambda world, _: (waited.append("for an attempt"), world)[1])
    monkeypatch.setattr(reform, "pause_later", lambda _: waited.append("with a pause"))
    monkeypatch.setattr(reform, "run", lambda *_: 0)
    assert run_attempts(lambda *_: 0) == 0
    assert waited == (["for an attempt", "with a pause"] if num_ranks else [])


@pytest.mark.parametrize(
    ("stops", "may_stay", "is_held", "why"),
    [
        (False, False, True, "there is no agent of kit's.*; step 3 is saved"),
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

    limited: list[int] = []
    monkeypatch.setattr(Stop, "end_within_grace", lambda _, exit_code: limited.append(exit_code))
    kept = Kept({"x": 1} if is_held else None, (0, 3), save)
    second_attempt(monkeypatch, kept, may_stay=may_stay)

    def train(world: World, stop: Stop) -> int:
        if stops:
            stop.request()
        raise LOST

    with pytest.raises(RuntimeError, match="closed by peer"):
        run_attempts(train)
    assert saved == [3] * is_held
    assert limited[-1] == 1, "a lost rank may keep the process group from closing"
    assert re.search(f"another rank is lost, and this rank ends: {why}", caplog.messages[-1])


class Agent:
    """What this process hears from its agent, one answer after the other; what it has said to it."""

    def __init__(self, *answers: object, is_over: bool = False) -> None:
        self.answers, self.is_over = list(answers), is_over
        self.said: list[bool] = []
        self.handlers: dict[object, Callable[[], object]] = {}

    def say_waiting(self, *, has_paused: bool) -> None:
        self.said.append(has_paused)

    def next_attempt(self, _: float) -> Any:
        return self.answers.pop(0)

    def when(self, kind: object, handler: Callable[[], object], **_: object) -> None:
        self.handlers[kind] = handler

    def ignore(self) -> None:
        pass


WorldOf = Callable[..., World]


@pytest.fixture
def world_of(monkeypatch: pytest.MonkeyPatch) -> WorldOf:
    """A world of one rank that has an agent."""
    monkeypatch.setattr(world, "messages_from", lambda agent: agent)
    monkeypatch.setattr(reform, "_take_on", lambda _: None)
    return lambda agent, **more: replace(World.from_env({}), agent_pipe=agent, **more)


def test_what_is_kept_is_saved_once_where_the_next_attempt_is_waited_for_long(
    world_of: WorldOf, tmp_path: Path
) -> None:
    """This host may be lost as well. To its agent this rank waits again then, and keeps its step no more."""
    saved: list[int] = []
    file = tmp_path / "rank0"

    def save() -> bool:
        own.stage(stages.KEEPING, step=3)
        return not saved.append(3)

    kept = Kept({"x": 1}, (0, 3), save, has_paused=True)
    stop: Any = SimpleNamespace(requested=False)
    following = World.from_env({})
    for answers, num_saved in ((["next"], 0), ([None, None, None, "next"], 1)):
        agent = Agent(*answers)
        file.unlink(missing_ok=True)
        own = world_of(agent, progress_file=file)
        assert reform.next_world(kept, own, stop, lambda: following) is following
        assert (len(saved), agent.said) == (num_saved, [not num_saved]), "only once it has paused for a node"
        assert file.read_text().rstrip() == f"3 {stages.WAITING}"


def test_a_process_that_waits_with_a_step_and_is_to_stop_saves_it(world_of: WorldOf) -> None:
    saved: list[int] = []
    kept = Kept({"x": 1}, (0, 3), lambda: not saved.append(3))
    stop: Any = SimpleNamespace(requested=True, exit_code=143)
    attempts: list[World] = []

    def attempt(world: World) -> Kept:
        attempts.append(world)
        return kept

    first = world_of(Agent(None))
    assert reform.run(first, stop, lambda: first, attempt, lambda _: True) == 143
    assert (saved, len(attempts)) == ([3], 1)


def test_an_attempt_that_is_over_before_it_is_joined_is_passed_over(world_of: WorldOf) -> None:
    """Nobody would come to meet it. Groups are numbered from 0 in each, as those of new processes are."""
    kept = Kept({"x": 1}, (0, 3), lambda: True)
    open_ = world_of(Agent())
    following = [world_of(Agent("the one after it", is_over=True)), open_]
    joined: list[object] = []

    def attempt(world: World) -> int | Kept:
        joined.append(world.messages)
        torch.distributed.distributed_c10d._world.group_count += 5
        return 0 if world.messages is open_.messages else kept

    stop: Any = SimpleNamespace(requested=False)
    first = world_of(Agent("one"))
    assert reform.run(first, stop, lambda: following.pop(0), attempt, lambda _: True) == 0
    assert joined == [first.messages, open_.messages]
    assert torch.distributed.distributed_c10d._world.group_count == 5
    torch.distributed.distributed_c10d._world.group_count = 0


@pytest.mark.parametrize("stdout", ["sys.stdout.close()", "sys.stdout = None", "sys.stdout = object()"])
def test_a_script_without_a_stdout_goes_on_in_the_next_attempt(stdout: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom nodekit.training.attempts import reform\n"
        "from nodekit.training.group.agent_messages import NextAttempt\n"
        f"{stdout}\nreform._take_on(NextAttempt({{'RANK': '7'}}, sys.argv[1]))\n"
        "os.write(2, os.environb[b'RANK'])\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "log"], check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "7"


def test_what_is_kept_is_saved_as_of_the_generation_that_this_process_was_told_of(world_of: WorldOf) -> None:
    """Its own can commit nothing any more."""
    entered: list[int] = []
    kept = Kept({"x": 1}, (0, 3), lambda: True, enters=entered.append)
    with Stop() as stop, reform.guarded(world_of(Agent(), kept=kept, generation=2), stop):
        assert entered == [2]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit statuses by which this process would have ended."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


def guards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nodekit-guard"]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("asked", "status"), [("by the agent", 1), ("by a signal", 143)])
def test_who_never_comes_to_join_the_others_saves_what_it_has_kept_and_ends(
    asked: str,
    status: int,
    joins: bool,
    world_of: WorldOf,
    ended: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[int] = []
    kept = Kept({"x": 1}, (0, 3), lambda: not saved.append(3))
    waited = threading.Event()
    monkeypatch.setattr(connections, "is_idle", lambda *_: waited.wait(60))
    agent, file = Agent(), tmp_path / "rank0"
    with Stop() as stop:
        with reform.guarded(world_of(agent, kept=kept, progress_file=file), stop):
            ask = agent.handlers["lost"] if asked == "by the agent" else stop.request
            ask()
            assert file.read_text().rstrip() == f"3 {stages.KEEPING}"
            if not joins:
                waited.set()
                until(lambda: not guards())
        waited.set()
        until(lambda: not guards())
    assert (saved, ended) == (([], []) if joins else ([3], [status]))


@pytest.mark.parametrize("joins", [False, True])
def test_who_cannot_save_what_it_has_kept_still_has_a_while_to_join_the_others(
    joins: bool, world_of: WorldOf, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is in its memory alone, and lost with it."""
    saves = threading.Event()

    def save() -> bool:
        saves.set()
        return False

    monkeypatch.setattr(connections, "is_idle", lambda *_: True)
    monkeypatch.setattr(reform, "_UNSAVED_S", 60.0 if joins else 0.1)
    agent, kept = Agent(), Kept({"x": 1}, (0, 3), save)
    with Stop() as stop, reform.guarded(world_of(agent, kept=kept), stop):
        agent.handlers["lost"]()
        assert saves.wait(60)
        if not joins:
            until(lambda: ended)
    until(lambda: not guards())
    assert ended == ([] if joins else [1])


def test_who_joins_the_others_leaves_them_at_a_loss_and_puts_off_a_pause(
    world_of: WorldOf, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their collectives would wait for it; and a SIGTERM, as for a rank that cannot pause, would end it here."""
    left: list[World] = []
    monkeypatch.setattr(World, "leave_others", lambda own: left.append(own))
    agent, kept = Agent(), Kept({"x": 1}, (0, 3), lambda: True)
    own = world_of(agent, kept=kept)
    with Stop() as stop, reform.guarded(own, stop):
        kept.release()
        agent.handlers["pause"]()
        assert not stop.requested
        assert not left
        agent.handlers["lost"]()
    assert left == [own]
    assert not ended


def test_who_has_joined_the_others_hears_a_signal_by_its_own_loop_alone(
    world_of: WorldOf, ended: list[int], tmp_path: Path
) -> None:
    kept, file = Kept({"x": 1}, (0, 3), lambda: True), tmp_path / "rank0"
    with Stop() as stop:
        with reform.guarded(world_of(Agent(), kept=kept, progress_file=file), stop):
            pass
        stop.request()
        assert not guards()
    assert not file.exists()
    assert not ended


def test_who_has_loaded_what_it_had_kept_trains_and_keeps_nothing(
    world_of: WorldOf, ended: list[int], tmp_path: Path
) -> None:
    kept = Kept({"x": 1}, (0, 3), lambda: True)
    agent, file = Agent(), tmp_path / "rank0"
    with Stop() as stop, reform.guarded(world_of(agent, kept=kept, progress_file=file), stop):
        kept.release()
        agent.handlers["lost"]()
        assert not guards()
        assert not file.exists(), "its agent would wait for it"
    assert not ended


def test_who_stands_by_passes_over_an_attempt_that_is_over(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODEKIT_STANDBY", "2")
    following = [world_of(Agent("two")), world_of(Agent())]
    last = following[-1]
    first = world_of(Agent(None, None, "one", is_over=True))
    assert reform.attempt_of(first, lambda: following.pop(0)) is last
    assert not following
    assert "NODEKIT_STANDBY" not in os.environ


def test_a_process_goes_on_in_so_many_attempts_and_no_more(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leaves threads behind."""
    own = world_of(Agent())
    monkeypatch.setattr(reform, "_abandoned", [None] * (reform.MOST_ATTEMPTS - 1))
    assert not reform.why_not(own)
    reform._abandoned.append(None)
    assert reform.why_not(own) == "it has left 50 process groups behind"


@pytest.mark.parametrize(
    ("argv", "of_world", "why"),
    [
        ("", {}, ""),
        ("--on-lost-rank restart", {}, "--on-lost-rank restart"),
        ("--local-sgd 4", {}, "with local SGD each rank has weights of its own"),
        ("--engine fsdp", {}, "--engine fsdp does not go on without a lost rank"),
        ("", {"backend": "mpi"}, "the ranks are joined by mpi, and not by gloo or nccl"),
        ("", {"agent_pipe": None}, "there is no agent of kit's that would have it go on"),
        # The next attempt's address is in the environment, where such ranks do not look.
        (
            "",
            {"init_method": InitMethod.parse("tcp://gpu1:29500")},
            "there is no agent of kit's that would have it go on",
        ),
    ],
)
def test_a_process_that_cannot_go_on_in_another_attempt_says_why(
    argv: str, of_world: dict[str, Any], why: str, world_of: WorldOf
) -> None:
    own = replace(world_of(Agent()), **of_world)
    assert reform.why_ends(parse(argv.split()), own) == why
    assert reform.can_go_on(parse(argv.split()), own) == (not why)


def test_the_search_for_garbage_after_an_attempt_goes_through_no_library() -> None:
    """The others wait meanwhile, for 0.4 s where there is transformers."""

    def train(world: World, stop: Stop) -> int:
        return gc.get_freeze_count() > 10 * len(gc.get_objects())

    gc.unfreeze()
    assert run_attempts(train) == 1
    assert not gc.get_freeze_count(), "the script's end looks for what is open"


def test_nor_does_the_end_of_a_fork_whose_libraries_are_frozen() -> None:
    """The search writes to all that it has in common with the others."""
    gc.freeze()
    assert run_attempts(lambda *_: 0) == 0
    assert gc.get_freeze_count() > 10 * len(gc.get_objects())


def test_what_an_attempt_has_made_is_garbage_after_it_though_it_is_in_a_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reform, "leave", lambda _: None)
    monkeypatch.setattr(reform, "next_world", lambda _, world, *__: world)
    models: list[weakref.ref[Any]] = []

    class Model:
        def __init__(self) -> None:
            self.own = self

    def attempt(world: World) -> int | Kept:
        models.append(weakref.ref(Model()))
        return Kept({}, (0, len(models)), bool) if len(models) < 3 else 0

    with Stop() as stop:
        assert reform.run(World.from_env({}), stop, lambda: World.from_env({}), attempt, lambda _: True) == 0
    gc.collect()
    gc.unfreeze()
    assert [each() for each in models] == [None] * 3


class Splitting(Digits):
    """It splits its data at random when it is first asked, and counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.split: float | None = None
        self.losses: list[int] = []
        self.count = 0
        self.kept = super().model()

    def model(self) -> torch.nn.Module:
        return self.kept

    def train_data(self) -> Any:
        if self.split is None:
            self.split = float(torch.rand(()))
        return super().train_data()

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.losses.append(len(batch[1]))
        self.count += 1
        return super().loss(model, batch)


def test_to_get_ready_changes_nothing_of_the_task(caplog: pytest.LogCaptureFixture) -> None:
    options, world = parse(["--batch-size", "64"]), World.from_env({"NODEKIT_STANDBY": "4"})
    task = Splitting()
    before = [each.clone() for each in task.kept.parameters()]
    torch.rand(7)
    get_ready(options, world, task)
    assert not caplog.messages
    assert task.losses == [16], "one step was computed, with a rank's part of the samples"
    assert not task.count
    assert all(torch.equal(*pair) for pair in zip(before, task.kept.parameters(), strict=True))
    rng.seed_all(options.seed, rank=0)  # as the other ranks do before they make the model and read the data
    assert task.split == float(torch.rand(()))


def test_a_rank_for_which_the_others_wait_computes_no_step_before() -> None:
    """Who replaces a lost one is started before the attempt is known, and is not to be late for it."""
    assert World.from_env({}).standby_world_size is None
    world = World.from_env({"NODEKIT_STANDBY": "0"})
    assert world.standby_world_size == 0
    task = Splitting()
    get_ready(parse([]), world, task)
    assert not task.losses
    assert task.split is None


LEAVES = """
import os, sys
rank = 0 if os.fork() else 1
import torch, torch.distributed as dist
from nodekit.training.attempts import reform
from types import SimpleNamespace
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
if rank:
    sys.stdin.read()
    os._exit(0)
waits = dist.all_reduce(torch.ones(1), async_op=True)
reform.leave(SimpleNamespace(close=lambda goes_on: dist.destroy_process_group()))
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_ends_although_a_collective_of_an_earlier_attempt_does_not(tmp_path: Path) -> None:
    """Python's shutdown would free the group, and so wait for it: ten minutes, unless the script wants another time."""
    argv = [sys.executable, "-c", LEAVES, str(tmp_path / "store")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env={"GLOO_SOCKET_IFNAME": "lo"}) as process:
        try:
            assert process.wait(timeout=60) == 3
        finally:
            process.kill()
