"""What a run's events add up to: attempts, where the nodes were, what the time went into."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodekit.deploy.records.events import Event
from nodekit.deploy.story import timeline
from nodekit.deploy.story.history import CAUSES, Goodput, History, Point, standing

NODES = ["gpu1", "gpu2", "gpu3"]


def said(time: float, node: str | None, kind: str, **fields: Any) -> Event:
    return Event(time, node, kind, fields)


def attempt(
    name: str,
    members: list[str],
    *,
    at: float,
    first: int,
    last: int,
    rate: float = 1.0,
    every_s: float = 10.0,
) -> list[Event]:
    """An attempt that begins 2 s after the meeting at `at`, and gets on at `rate` steps a second to `last`."""
    told = []
    begin, end = at + 2, at + 2 + (last - first) / rate
    for rank, node in enumerate(members):
        workers = [{"rank": rank, "local_rank": 0, "pid": 7, "start_time": 1}]
        told += [
            said(
                at, node, "rendezvous", attempt=name, group_rank=rank, num_nodes=len(members), members=members
            ),
            said(at, node, "workers-started", attempt=name, world_size=len(members), workers=workers),
            said(begin, node, "first-step", attempt=name, step=first),
        ]
        time = begin + every_s
        while time < end:
            step = first + int((time - begin) * rate)
            told.append(said(time, node, "sample", attempt=name, step=step, total_steps=500, loss=9.0 / step))
            time += every_s
    return told


def ended(time: float, name: str, members: list[str], *, step: int, why: str) -> list[Event]:
    return [
        said(time, node, "attempt-ended", attempt=name, step=step, seconds=1.0, why=why) for node in members
    ]


def history(events: list[Event], *, now: float = 0.0, min_nodes: int | None = None) -> History:
    found = History.of(sorted(events, key=lambda event: event.time), now=now, min_nodes=min_nodes)
    assert_adds_up(found.goodput)
    return found


def assert_adds_up(goodput: Goodput) -> None:
    assert set(goodput.lost) == set(CAUSES)
    assert min(goodput.trained_s, goodput.untold_s, *goodput.lost.values()) >= -1e-6
    assert (goodput.untold_s if goodput.is_told else goodput.trained_s) == 0
    assert goodput.trained_s + goodput.untold_s + sum(goodput.lost.values()) == pytest.approx(
        goodput.total_s, abs=1e-6
    )


def lost(found: History) -> dict[str, float]:
    return {
        cause: pytest.approx(seconds, abs=0.01)
        for cause, seconds in found.goodput.lost.items()
        if seconds > 0.01
    }


def start(time: float, *, generation: int = 0, goes_on: bool = False) -> list[Event]:
    told = [
        said(time, None, "run-started", generation=generation, nodes=NODES, command=None, goes_on=goes_on)
    ]
    return [*told, *(said(time + 1, node, "agent-started", pid=1) for node in NODES)]


def over(time: float, state: str, members: list[str] = NODES) -> list[Event]:
    told = [said(time - 0.5, node, "agent-ended", state=state) for node in members]
    return [*told, said(time, None, "run-ended", state=state, verdict="so it ended")]


HEALTHY = [
    *start(100),
    *attempt("0.0", NODES, at=103, first=1, last=101),
    said(160, "gpu1", "snapshot", generation=0, step=50, bytes=10, pause_s=0.5, count=3),
    said(160, "gpu2", "snapshot", generation=0, step=50, bytes=10, pause_s=0.75, count=3),
    said(150, "gpu1", "evaluation", attempt="0.0", step=45, epoch=1, metrics={"accuracy": 0.5, "loss": 1.5}),
    said(200, "gpu1", "evaluation", attempt="0.0", step=95, epoch=2, metrics={"accuracy": 0.8, "loss": 1.7}),
    *ended(205, "0.0", NODES, step=101, why="done"),
    *over(207, "succeeded"),
]

GPU2_LOST = [
    *start(100),
    *attempt("0.0", NODES, at=103, first=1, last=101),
    # gpu2 is silent from 205 on; the others notice after 3 s, and go on from step 93.
    said(208, "gpu1", "membership", lost=1, waiting=0),
    said(208.5, None, "unreachable", about="gpu2", why="no answer"),
    *ended(209, "0.0", ["gpu1", "gpu3"], step=101, why="a node was lost"),
    *attempt("0.1", ["gpu1", "gpu3"], at=211, first=94, last=194),
    *ended(313, "0.1", ["gpu1", "gpu3"], step=194, why="done"),
    *over(314, "succeeded", ["gpu1", "gpu3"]),
]


def test_a_healthy_run_has_trained_but_for_its_start_and_its_snapshots() -> None:
    found = history(HEALTHY)
    assert (found.state, found.started, found.ended, found.verdict) == (
        "succeeded",
        100,
        206.5,
        "so it ended",
    )
    assert (found.step, found.total_steps, found.restarts) == (101, 500, 0)
    assert found.best == {"accuracy": (0.8, 95), "loss": (1.5, 45)}
    # All nodes are held up together: the pause counts once, and as long as the slowest one's.
    assert lost(found) == {"start": 5.0, "snapshots": 0.75, "end": 1.5}
    assert found.goodput.share == pytest.approx((100 - 0.75) / 106.5)
    [only] = found.attempts
    assert (only.members, only.world_size, only.first_step, only.last_step) == (tuple(NODES), 3, 1, 101)
    assert [(span.state, span.start, span.end) for span in found.spans["gpu2"]] == [
        ("starting", 100, 105),
        ("training", 105, 205),
        ("waiting", 205, 206.5),
    ]


def plain(name: str, members: list[str], *, at: float) -> list[Event]:
    """An attempt of a script that writes no progress file."""
    return [each for each in attempt(name, members, at=at, first=1, last=1) if each.kind != "first-step"]


def test_of_a_script_that_tells_no_step_the_goodput_is_not_known() -> None:
    going = [*start(100), *plain("0.0", NODES, at=103)]
    found = history(going, now=163)
    assert (found.state, found.step, found.goodput.share) == ("running", None, None)
    assert found.goodput.untold_s == pytest.approx(60)
    assert lost(found) == {"start": 3.0}
    assert [(span.state, span.start, span.end) for span in found.spans["gpu2"]] == [
        ("starting", 100, 103),
        ("running", 103, 163),
    ]
    again = [
        *going,
        *(said(170, node, "attempt-ended", attempt="0.0", step=None, why="a rank failed") for node in NODES),
        *plain("0.1", NODES, at=172),
        *(said(200, node, "attempt-ended", attempt="0.1", step=None, why="done") for node in NODES),
        *over(203, "succeeded"),
    ]
    found = history(again)
    assert (found.state, found.goodput.share, found.restarts) == ("succeeded", None, 1)
    assert found.goodput.untold_s == pytest.approx(67 + 28)
    assert lost(found) == {"start": 3.0, "restart": 2.0, "end": 2.5}
    assert [span.state for span in found.spans["gpu1"]] == [
        "starting", "running", "starting", "running", "waiting",
    ]  # fmt: skip


def test_of_a_lost_node_the_silence_the_restart_and_the_redone_steps_are_told_apart() -> None:
    found = history(GPU2_LOST)
    first, second = found.attempts
    assert first.trained_until == pytest.approx(205)  # not 209: its steps had ended with gpu2
    assert (second.resumed_at, second.redone_steps, second.members) == (93, 8, ("gpu1", "gpu3"))
    assert (found.restarts, found.step) == (1, 194)
    # At 213 it has done step 94 again; at 220 it is where it was.
    assert lost(found) == {"start": 5.0, "restart": 8.0, "redone": 7.0, "end": 1.0}
    assert [(span.state, span.start, span.end) for span in found.spans["gpu2"]][1:] == [
        ("training", 105, 209),
        ("away", 209, 314),
    ]
    assert found.spans["gpu2"][-1].why == "a node was lost"


def test_a_node_that_was_cut_off_does_not_say_why_the_others_went_on_without_it() -> None:
    cut_off = [
        *ended(207, "0.0", ["gpu2"], step=101, why="the rendezvous host is lost"),
        said(207, "gpu2", "store-lost", why="Connection was likely closed"),
    ]
    lost_it = said(208, "gpu3", "membership", lost=1, waiting=0, names=["gpu2"])
    assert history([*GPU2_LOST[:-1], *cut_off]).attempts[0].why == "the rendezvous host was lost"
    assert history([*GPU2_LOST, *cut_off, lost_it]).attempts[0].why == "a node was lost"


def test_a_curve_has_each_step_once() -> None:
    found = history(GPU2_LOST)
    steps = [point.step for point in found.losses()]
    assert steps == sorted(set(steps))
    assert {point.attempt for point in found.losses()} == {"0.0", "0.1"}
    assert max(point.step for point in found.losses() if point.attempt == "0.0") < 94
    assert [point.value for point in found.speeds()] == pytest.approx([1.0] * 16)
    redone = standing([[Point(1, 5, 0, "0.0"), Point(3, 4, 1, "0.0")], [Point(2, 3, 2, "0.1")]])
    assert [(point.step, point.value) for point in redone] == [(1, 5), (2, 3)]


def test_a_lost_rendezvous_host_is_another_generation() -> None:
    found = history(
        [
            *start(100),
            *attempt("0.0", NODES, at=103, first=1, last=51),
            *ended(156, "0.0", ["gpu2", "gpu3"], step=51, why="the rendezvous host was lost"),
            said(156, "gpu2", "store-lost", why="Connection reset by peer"),
            said(156, "gpu3", "store-lost", why="Connection reset by peer"),
            said(157, None, "unreachable", about="gpu1", why="no answer"),
            said(159, "gpu2", "generation", generation=1, host="10.0.0.2"),
            said(159, "gpu3", "generation", generation=1, host="10.0.0.2"),
            *attempt("1.0", ["gpu2", "gpu3"], at=160, first=51, last=151),
            said(170, None, "reached", about="gpu1"),
            said(171, "gpu1", "agent-started", pid=8),
        ],
        now=200,
    )
    assert [(each.attempt, each.generation) for each in found.attempts] == [("0.0", 0), ("1.0", 1)]
    assert (found.state, found.ended) == ("running", None)
    assert found.attempts[1].ended is None
    assert found.attempts[0].why == "the rendezvous host was lost"
    assert [span.state for span in found.spans["gpu1"]] == ["starting", "training", "away", "starting"]
    assert [span.state for span in found.spans["gpu2"]] == [
        "starting",
        "training",
        "waiting",
        "starting",
        "training",
    ]
    assert lost(found) == {"start": 5.0, "restart": 7.0}


def test_the_time_between_a_stop_and_going_on_is_not_the_runs() -> None:
    found = history(
        [
            *start(100),
            *attempt("0.0", NODES, at=103, first=1, last=101),
            *ended(206, "0.0", NODES, step=101, why="stop"),
            *over(207, "stopped"),
            *start(5000, generation=1, goes_on=True),
            *attempt("1.0", NODES, at=5003, first=102, last=202),
            *ended(5106, "1.0", NODES, step=202, why="done"),
            *over(5107, "succeeded"),
        ]
    )
    assert found.sessions == ((100, 206.5), (5000, 5106.5))
    assert found.goodput.total_s == pytest.approx(213.0)
    assert lost(found) == {"start": 10.0, "end": 1.0}
    assert found.restarts == 0
    assert [span.state for span in found.spans["gpu1"]][-4:] == ["ended", "starting", "training", "waiting"]


def test_of_an_end_that_two_have_recorded_the_later_word_holds_and_the_earlier_time() -> None:
    """A leader in a Slurm job knows that Slurm stops it; the machine with the record knows who has cancelled it."""
    events = [*start(100), *attempt("0.0", NODES, at=103, first=1, last=101), *over(200, "stopped")]
    events += [said(207, None, "run-ended", state="stopped", verdict="stopped by kit down")]
    found = history(events, now=300)
    assert (found.verdict, found.sessions) == ("stopped by kit down", ((100, 199.5),))


@pytest.mark.parametrize("has_run_ended", [True, False])
def test_a_torn_end_is_taken_from_what_is_there(has_run_ended: bool) -> None:
    """The power fails on all hosts: no word of an end, and `kit up` finds out days later."""
    events = [*start(100), *attempt("0.0", NODES, at=103, first=1, last=101)]
    events += [*start(90_000, generation=1, goes_on=True)]
    if has_run_ended:
        events += [said(80_000, None, "run-ended", state="failed", verdict="ended while nobody watched")]
    found = history(events, now=90_010)
    assert found.attempts[0].ended == pytest.approx(195)  # the last that was heard
    assert found.goodput.trained_s == pytest.approx(90)
    if not has_run_ended:
        assert found.sessions[0] == (100, 195)


def test_waiting_for_enough_nodes_is_told_apart_from_a_restart() -> None:
    events = [
        *start(100),
        *attempt("0.0", NODES, at=103, first=1, last=101),
        said(208, "gpu1", "membership", lost=1, waiting=0),
        *ended(209, "0.0", ["gpu1", "gpu3"], step=101, why="a node was lost"),
        said(300, "gpu2", "agent-started", pid=9),
        *attempt("0.1", NODES, at=303, first=102, last=202),
    ]
    assert lost(history(events, now=310)) == {"start": 5.0, "waiting": 91.0, "restart": 9.0}
    # Two would have been enough: that the third came meanwhile is not what took so long.
    assert lost(history(events, now=310, min_nodes=2)) == {"start": 5.0, "restart": 100.0}


def test_a_run_that_still_waits_is_waiting_until_now() -> None:
    found = history(
        [
            *start(100),
            *attempt("0.0", NODES, at=103, first=1, last=101),
            *ended(209, "0.0", ["gpu1"], step=101, why="a node was lost"),
            said(210, "gpu1", "no-quorum", members=["gpu1"], electorate={}),
        ],
        now=310,
    )
    assert found.goodput.lost["waiting"] == pytest.approx(101)
    assert found.spans["gpu1"][-1].state == "waiting"


def test_a_run_without_a_step_has_only_started() -> None:
    found = history([*start(100), *attempt("0.0", NODES, at=103, first=1, last=1)[:1]], now=110)
    assert (found.state, found.step, lost(found)) == ("starting", None, {"start": 10.0})
    assert history([], now=5.0).goodput.share is None


def test_a_job_that_tells_no_steps_has_a_history_too() -> None:
    found = history(
        [
            *start(100),
            said(103, "gpu1", "rendezvous", attempt="0.0", members=["gpu1"]),
            said(105, "gpu1", "first-step", attempt="0.0", step=None),
            said(115, "gpu1", "sample", attempt="0.0", step=None, total_steps=None, loss=None, cpu=0.5),
            *over(125, "succeeded", ["gpu1"]),
        ]
    )
    assert found.goodput.trained_s == pytest.approx(19.5)
    assert found.losses() == found.speeds() == []


_ODD = st.one_of(
    st.none(), st.integers(-5, 300), st.floats(), st.text(max_size=3), st.lists(st.text(max_size=3))
)
_EVENT = st.builds(
    Event,
    st.one_of(st.floats(0, 1000), st.just(math.nan)),
    st.sampled_from([None, *NODES]),
    st.sampled_from(
        [
            "run-started",
            "run-ended",
            "agent-started",
            "generation",
            "rendezvous",
            "workers-started",
            "first-step",
            "resumed",
            "sample",
            "snapshot",
            "worker-failed",
            "hang",
            "membership",
            "no-quorum",
            "store-lost",
            "attempt-ended",
            "agent-ended",
            "evaluation",
            "unreachable",
            "reached",
            "node-state",
            "start",
            "join",
        ]
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "attempt": st.one_of(st.sampled_from(["0.0", "0.1", "1.0", "1.10"]), _ODD),
            "step": st.one_of(st.integers(0, 300), _ODD),
            "total_steps": _ODD,
            "loss": _ODD,
            "members": st.one_of(st.lists(st.sampled_from(NODES)), _ODD),
            "nodes": st.one_of(st.just(NODES), _ODD),
            "about": st.sampled_from([None, *NODES]),
            "pause_s": _ODD,
            "workers": _ODD,
            "world_size": _ODD,
            "metrics": st.one_of(st.dictionaries(st.text(max_size=3), _ODD, max_size=2), _ODD),
            "result": _ODD,
            "why": _ODD,
            "error": _ODD,
            "state": st.one_of(st.sampled_from(["succeeded", "failed", "stopped", "ended"]), _ODD),
        },
    ),
)


@settings(max_examples=400)
@given(st.lists(_EVENT, max_size=40), st.one_of(st.none(), st.integers(1, 3)))
def test_whatever_was_written_down_the_causes_add_up_to_the_runs_time(
    events: list[Event], least: int | None
) -> None:
    found = History.of(events, now=500.0, min_nodes=least)
    assert_adds_up(found.goodput)
    assert found.goodput.share is None or 0 <= found.goodput.share <= 1 + 1e-9
    for spans in found.spans.values():
        assert all(span.start < span.end for span in spans)
        assert all(a.end == b.start and a.state != b.state for a, b in itertools.pairwise(spans))
    for name in ("losses", "speeds"):
        assert all(math.isfinite(point.value) for point in getattr(found, name)())
    steps = [point.step for point in found.losses()]
    assert steps == sorted(steps)
    for name in found.metrics:
        found.metric(name)


def test_a_clock_that_was_set_back_between_two_starts_leaves_them_in_their_order() -> None:
    def session(at: float, generation: int, last: int, state: str) -> list[Event]:
        return [
            said(at, None, "run-started", generation=generation, nodes=["gpu1"]),
            *attempt(f"{generation}.0", ["gpu1"], at=at + 2, first=last - 99, last=last),
            said(at + 110, None, "run-ended", state=state),
        ]

    first = session(10_000, 0, 100, "failed")
    found = History.of([*first, *session(7_000, 1, 200, "succeeded")], now=7_110)
    wanted = History.of([*first, *session(10_200, 1, 200, "succeeded")], now=10_310)
    assert (found.state, found.step) == (wanted.state, wanted.step)
    assert found.state == "succeeded"
    assert found.goodput.total_s == pytest.approx(wanted.goodput.total_s)
    assert found.goodput.trained_s == pytest.approx(wanted.goodput.trained_s)


def test_an_event_of_a_run_of_weeks_is_not_compared_with_all_of_its_attempts() -> None:
    class Attempts(dict[str, Any]):
        def values(self) -> Any:
            pytest.fail("all attempts are looked through")

    told = {"attempt": "0.7", "step": 3, "why": "a rank failed"}
    for kind in ("sample", "snapshot", "worker-failed", "rendezvous", "workers-started", "first-step"):
        timeline._mark(Event(5.0, "a", kind, told), Attempts(), "")  # type: ignore[arg-type]
    ended = Event(5.0, "a", "attempt-ended", told)
    assert timeline._mark(ended, Attempts(), "") == ("starting", "a rank failed")
