"""What a person is told of a run's events."""

from __future__ import annotations

from typing import Any

import pytest

from nodekit.deploy.records.events import Event
from nodekit.deploy.story.event_text import Narrator


def told(*events: tuple[float, str | None, str, dict[str, Any]]) -> list[str]:
    narrator = Narrator()
    return [text for event in events for text in narrator.tell(Event(*event))]


def started(*nodes: str, at: float = 0.0) -> list[tuple[float, str | None, str, dict[str, Any]]]:
    """A run that has made its first step, as its nodes write it down."""
    met = {"attempt": "0.1", "members": list(nodes)}
    return [
        (at, None, "run-started", {"generation": 0, "nodes": list(nodes), "goes_on": False}),
        *((at + 1, name, "agent-started", {"pid": 7}) for name in nodes),
        *((at + 2, name, "rendezvous", met) for name in nodes),
        *(
            (at + 2, name, "workers-started", {"attempt": "0.1", "world_size": 2 * len(nodes)})
            for name in nodes
        ),
        *((at + 4, name, "first-step", {"attempt": "0.1", "step": 1}) for name in nodes),
    ]


def test_start_is_told_once_whatever_the_number_of_nodes() -> None:
    assert told(*started("a", "b", "c")) == [
        "the run starts on 3 nodes",
        "training on 3 nodes with 6 ranks; the first step after 4.0 s",
    ]


def test_a_lost_node_is_told_from_the_loss_to_the_first_step_after_it() -> None:
    rest = ("gpu0", "gpu1", "gpu2")
    after = told(
        *started(*rest, "gpu3"),
        (100.0, "gpu1", "sample", {"attempt": "0.1", "step": 4128}),
        *(
            (100.0 + number / 10, name, "membership", {"lost": 1, "waiting": 0, "names": ["gpu3"]})
            for number, name in enumerate(rest)
        ),
        *((100.3, name, "attempt-ended", {"attempt": "0.1", "step": 4128}) for name in rest),
        *((103, name, "rendezvous", {"attempt": "0.2", "members": list(rest)}) for name in rest),
        (105.0, "gpu0", "resumed", {"attempt": "0.2", "step": 4120}),
        *((105.9, name, "first-step", {"attempt": "0.2", "step": 4121}) for name in rest),
    )
    assert after[2:] == [
        "gpu3 is lost; the others re-rendezvous",
        "re-formed with 3 nodes",
        "resumed at step 4,120 after 5.9 s, 8 steps redone",
    ]


def test_what_a_drain_does_to_the_others_is_not_told_as_a_loss() -> None:
    echo = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    rest = ("b", "c")
    drained = [
        (9.0, None, "drain", {"about": "a", "generation": 0}),
        (9.1, "a", "agent-ended", {"state": "ended"}),
    ]
    failed = {"attempt": "0.1", "rank": 2, "exitcode": 1, "error": echo}
    again = {"attempt": "1.0", "members": list(rest)}
    after = told(
        *started("a", *rest),
        *drained,
        (9.2, "c", "worker-failed", failed),
        *((9.3, name, "store-lost", {"why": "Broken pipe"}) for name in rest),
        (9.4, "c", "replica-failed", {"reason": "Connection refused"}),
        *((10.0, name, "rendezvous", again) for name in rest),
        (20.0, "c", "worker-failed", {**failed, "attempt": "1.0"}),
    )
    assert after[2:] == [
        "a is drained: its ranks save, and it leaves the job",
        "the rendezvous was on a, which is drained: it moves to another node",
        "c: a copy of a snapshot could not be kept: Connection refused (a: drained)",
        "re-formed with 2 nodes",
        "rank 2 on c has lost another rank",
    ]
    left = {"lost": 1, "waiting": 0, "names": ["a"]}
    after = told(*started("a", *rest), *drained, *((9.2, name, "membership", left) for name in rest))
    assert after[3:] == ["a has left; the others re-rendezvous"]
    both = {"lost": 2, "waiting": 0, "names": ["a", "b"]}
    assert told(*started("a", *rest), *drained, (9.2, "c", "membership", both))[3:] == after[3:]


def test_what_a_node_that_is_cut_off_thinks_is_told_as_its_view() -> None:
    after = told(
        *started("a", "b", "c"),
        (10.0, "a", "membership", {"lost": 2, "waiting": 0, "names": ["b", "c"]}),
        (10.1, "b", "membership", {"lost": 1, "waiting": 0, "names": ["a"]}),
        (10.2, "c", "membership", {"lost": 1, "waiting": 0, "names": ["a"]}),
        (10.3, "b", "rendezvous", {"attempt": "0.2", "members": ["b", "c"]}),
    )
    assert after[2:] == [
        "a: nothing is heard from b, c",
        "a is lost; the others re-rendezvous",
        "re-formed with 2 nodes",
    ]


def test_the_way_of_a_node_into_the_job_is_told_once() -> None:
    assert told(
        (1.0, None, "start", {"about": "a", "generation": 0}),
        (1.5, None, "join", {"about": "a", "generation": 0}),
        (20.0, None, "unreachable", {"about": "a", "why": "off; is it up?", "problems": [{"found": "off"}]}),
        (30.0, None, "reached", {"about": "a"}),
        (30.1, None, "start", {"about": "a", "generation": 0}),
        (30.6, None, "join", {"about": "a", "generation": 1}),
        (60.0, None, "join", {"about": "a", "generation": 2}),
    ) == [
        "a: starting its agent",
        "a is unreachable: off",
        "a: reached again",
        "a is called into generation 2",
    ]


def test_ranks_that_kept_their_processes_are_counted() -> None:
    again = {"attempt": "0.2", "world_size": 4}
    after = told(
        *started("a", "b"),
        (10.0, "a", "worker-failed", {"attempt": "0.1", "rank": 3, "error": "", "exitcode": -9}),
        (10.1, "b", "rendezvous", {"attempt": "0.2", "members": ["a", "b"]}),
        (10.2, "a", "workers-started", {**again, "stayed": [0, 1]}),
        (10.2, "b", "workers-started", {**again, "stayed": [2]}),
        (10.3, "a", "resumed", {"attempt": "0.2", "step": 40}),
        (10.4, "a", "first-step", {"attempt": "0.2", "step": 41}),
    )
    assert after[-1].startswith("resumed at step 40")
    assert after[-1].endswith("; 3 of 4 ranks kept their processes")


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        (
            (10.2, "b", "workers-started", {"attempt": "0.2", "world_size": 4, "stayed": [2]}),
            "3 of 4 ranks kept their",
        ),
        ((11.0, "a", "sample", {"attempt": "0.2", "step": 45}), None),
        ((13.0, "a", "sample", {"attempt": "0.2", "step": 55}), "2 of 4 ranks kept their"),
        ((11.0, None, "run-ended", {"state": "stopped"}), "2 of 4 ranks kept their"),
    ],
)
def test_what_all_nodes_say_of_their_ranks_is_waited_for_but_not_long(
    last: tuple[float, str | None, str, dict[str, Any]], kept: str | None
) -> None:
    """Each tells once a second what it has done: one of two had, and the other one's ranks were missed."""
    after = told(
        *started("a", "b"),
        (10.0, "a", "attempt-ended", {"attempt": "0.1", "step": 41}),
        *((10.1, name, "rendezvous", {"attempt": "0.2", "members": ["a", "b"]}) for name in ("a", "b")),
        (10.2, "a", "workers-started", {"attempt": "0.2", "world_size": 4, "stayed": [0, 1]}),
        (10.3, "a", "first-step", {"attempt": "0.2", "step": 41}),
        last,
    )
    said = [text for text in after if text.startswith("resumed")]
    assert [text.partition("; ")[2].removesuffix(" processes") for text in said] == ([kept] if kept else [])


def test_that_a_node_comes_in_is_not_told_after_it_has() -> None:
    """The node itself has met the others, and says so, while those still have their ranks pause."""
    comes = (10.0, "a", "membership", {"lost": 0, "waiting": 1, "names": []})
    met = (10.1, "c", "rendezvous", {"attempt": "0.2", "members": ["a", "b", "c"]})
    has_come = "c has come in; re-formed with 3 nodes"
    assert told(*started("a", "b"), comes, met)[2:] == [
        "1 node comes in: ranks finish their step, and go on with it",
        has_come,
    ]
    late = (10.2, *comes[1:])
    assert told(*started("a", "b"), met, late)[2:] == [has_come]
    is_lost = (20.0, "a", "membership", {"lost": 1, "waiting": 0, "names": ["b"]})
    assert told(*started("a", "b"), met, late, is_lost)[2:] == [
        has_come,
        "b is lost; the others re-rendezvous",
    ]


def test_a_node_that_comes_back_is_told_from_one_that_is_new() -> None:
    def met(at: float, number: int, *members: str) -> tuple[float, str | None, str, dict[str, Any]]:
        return (at, "a", "rendezvous", {"attempt": f"0.{number}", "members": list(members)})

    after = told(
        *started("a", "b"),
        met(10, 2, "a"),
        met(20, 3, "a", "b"),
        met(30, 4, "a", "b", "c"),
        met(40, 5, *"abc"),
    )
    assert after[2:] == [
        "b is out; re-formed with 1 node",
        "b is back; re-formed with 2 nodes",
        "c has come in; re-formed with 3 nodes",
        "re-formed with the same 3 nodes",
    ]


def test_of_failed_ranks_only_the_cause_is_named() -> None:
    def failed(at: float, node: str, rank: int, error: str, exitcode: int = 1) -> Any:
        return (
            at,
            node,
            "worker-failed",
            {"attempt": "0.1", "rank": rank, "exitcode": exitcode, "error": error},
        )

    echo = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    after = told(
        *started("a", "b"), failed(9, "b", 1, "Traceback …\nValueError: NaN"), failed(9.1, "a", 0, echo)
    )
    assert after[2:] == ["rank 1 on b failed (exit status 1): ValueError: NaN"]
    left = (9.2, "a", "membership", {"lost": 1, "waiting": 0, "names": ["b"]})
    again = (9.9, "a", "rendezvous", {"attempt": "0.2", "members": ["a", "b"]})
    after = told(*started("a", "b"), failed(9, "b", 1, "ValueError: NaN"), left, again)
    assert after[2:] == [
        "rank 1 on b failed (exit status 1): ValueError: NaN",
        "re-formed with the same 2 nodes",
    ]
    after = told(*started("a", "b"), failed(9, "b", 1, echo), failed(9.1, "a", 0, echo))
    assert after[2:] == ["rank 1 on b has lost another rank"]
    after = told(*started("a", "b"), failed(9, "b", 1, "", exitcode=-11))
    assert after[2:] == ["rank 1 on b failed (killed by SIGSEGV): it wrote nothing"]


def test_only_an_evaluation_that_is_better_is_told() -> None:
    def evaluated(step: int, **metrics: float) -> Any:
        return (step, "a", "evaluation", {"attempt": "0.1", "step": step, "metrics": metrics})

    assert told(
        evaluated(1000, accuracy=0.5, loss=1.25),
        evaluated(2000, accuracy=0.4, loss=1.5),
        evaluated(3000, accuracy=0.975, loss=0.125),
    ) == [
        "evaluated at step 1,000: accuracy 50.00%, loss 1.25",
        "evaluated at step 3,000: accuracy 97.50%, loss 0.125, the best so far",
    ]
    assert told(evaluated(1, loss=2.0), evaluated(2, loss=3.0), evaluated(3, loss=1.0))[1:] == [
        "evaluated at step 3: loss 1, the best so far"
    ]


def test_a_loss_that_is_not_finite_is_told_with_its_ranks_and_what_follows() -> None:
    loss = {"step": 4120, "what": "loss", "value": "nan", "ranks": [3], "action": "stop"}
    weights = {"step": 7, "what": "weights", "value": "inf", "ranks": [0, 1], "action": "rollback"}
    assert told((1.0, "gpu1", "not-finite", loss), (2.0, "gpu1", "not-finite", weights)) == [
        "the loss of step 4,120 is nan on rank 3: training stops",
        "the weights after step 7 are not finite on ranks 0, 1: back to the newest snapshot",
    ]


def test_what_the_supervisor_says_and_does_is_told() -> None:
    assert told(
        (0, None, "said", {"text": "generation 1: a, b; the rendezvous is on a now"}),
        (1, None, "unreachable", {"about": "c", "why": "no route to host"}),
        (2, None, "reached", {"about": "c", "why": ""}),
        (3, None, "problem", {"about": "c", "why": "its disk is full"}),
        (4, None, "join", {"about": "c", "generation": 1}),
        (5, None, "join", {"about": "c", "generation": 1}),
        (6, None, "run-ended", {"state": "failed", "verdict": "rank 1 on a failed first\nand more"}),
    ) == [
        "generation 1: a, b; the rendezvous is on a now",
        "c is unreachable: no route to host",
        "c: reached again",
        "c: not started: its disk is full",
        "the run has failed: rank 1 on a failed first",
    ]


def test_events_that_are_not_known_are_left_out() -> None:
    assert told((0, "a", "something-new", {"x": 1}), (0, "a", "node-state", {}), (0, None, "phase", {})) == []


def test_a_gpu_that_breaks_is_told_from_the_first_sign_to_the_node_that_leaves() -> None:
    broken = "GPU 3: Xid 79 (it has fallen off the bus)"
    slow = {"gpu": 3, "reasons": ["hw_thermal_slowdown"], "temperature": 92, "clock": 900, "clock_max": 1980}
    after = told(
        *started("gpu1", "gpu2"),
        (50.0, "gpu2", "gpu-slow", {**slow, "power": None}),
        (80.0, "gpu2", "gpu-slow", {"gpu": 3, "over": True, "seconds": 30.0}),
        (
            100.0,
            "gpu2",
            "gpu-error",
            {"gpu": 3, "what": "xid", "number": 79, "text": broken[7:], "fatal": True},
        ),
        (101.0, "gpu2", "gpu-error", {"gpu": None, "what": "silent", "text": "no answer", "fatal": False}),
        (110.0, "gpu2", "unkillable", {"rank": 7, "pid": 4711, "state": "D", "wchan": "os_acquire_mutex"}),
        (110.1, "gpu2", "agent-ended", {"state": "ended", "cause": "broken", "message": broken}),
        (110.2, None, "drain", {"about": "gpu2", "why": broken}),
    )
    assert after[2:] == [
        "gpu2: GPU 3 is slowed down: hw_thermal_slowdown (92 °C, 900 MHz of 1980 MHz)",
        "gpu2: GPU 3 is at its full clock again after 30 s",
        f"gpu2: {broken}",
        "gpu2: its GPUs: no answer",
        "gpu2: SIGKILL does not end rank 7 (pid 4711, state D in os_acquire_mutex)",
        f"gpu2 leaves the job: {broken}",
        f"gpu2 is drained: {broken}; after the repair, kit clean --forgive lets runs use it again",
    ]
