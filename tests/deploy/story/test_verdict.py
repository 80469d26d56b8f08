"""The verdict on recorded failures: who is blamed, what for, and that who only lost a peer never is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import RECORDED

from nodekit.deploy.agent.ranks.failures import (
    Failure,
    blames_another,
    first_cause,
    last_words,
    message_of,
    never_starts,
)
from nodekit.deploy.records.events import Event, parse_all
from nodekit.deploy.screen.verdict_screen import screen, trace
from nodekit.deploy.story.cause import Cause
from nodekit.deploy.story.causes import BY_SLURM_STATE, DISK_CURE, TOO_FEW_NODES, recognise
from nodekit.deploy.story.verdict import Told, Verdict, explain, told_in, verdict, verdict_of

CASES = sorted((RECORDED / "failures").glob("*.json"))
REPORTED = json.loads((RECORDED / "reported.json").read_text(encoding="utf-8"))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def recorded(case: dict[str, Any], *, ahead_s: Sequence[float] = (0.0, 0.0)) -> dict[str, Told]:
    """What the nodes of a recorded run told, their last words taken from the logs anew.

    `ahead_s`: the nodes' clocks were off by so much more, and kit knew that.
    """
    told = {}
    for (name, node), ahead in zip(case["nodes"].items(), ahead_s, strict=True):
        offset = case["clock_offsets"].get(name, 0.0) + ahead
        failures = [
            Failure(
                node=name,
                rank=each["rank"],
                world_size=each["world_size"],
                attempt=each["attempt"],
                exitcode=each["exitcode"],
                when=each["when"] + ahead - offset,
                log=each["log"],
                error=last_words(node["logs"][Path(each["log"]).name], each["exitcode"]),
                kernel=tuple(each["kernel"]),
            )
            for each in node["failures"]
        ]
        ranks = tuple(int(re.findall(r"\d+", log)[0]) for log in node["logs"])
        told[name] = Told(
            state=node["state"],
            failures=tuple(failures),
            message=node["message"],
            cause=node.get("cause", ""),
            ranks=ranks,
        )
    return told


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
@pytest.mark.parametrize("ahead_s", [(0.0, 0.0), (7.0, -3.0), (-7.0, 3.0)], ids=str)
def test_a_recorded_failure_is_blamed_on_who_began_it(path: Path, ahead_s: tuple[float, float]) -> None:
    case = load(path)
    found = verdict(recorded(case, ahead_s=ahead_s), max_restarts=0)
    expected = case["expected"]
    assert found.outcome == "failed"
    assert found.first is not None
    if expected["rank"] is not None:
        blamed = [rank for rank, _ in found.awaited] or [found.first.rank]
        assert blamed == [expected["rank"]], found.text
    assert (found.cause.name if found.cause else None) == expected["cause"], found.first.error


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_clocks_that_lie_blame_no_bystander(path: Path) -> None:
    case = load(path)
    told = recorded(case)
    first = verdict(told, max_restarts=0).first
    assert first is not None
    own = [each for each in told[first.node].failures if not blames_another(each)]
    others = [
        each
        for node in told.values()
        for each in node.failures
        if not blames_another(each) and each not in own
    ]
    if not own or others:
        return  # all are echoes, or several failed by themselves: only the clock can tell
    for ahead in (-5.0, 5.0):
        moved = {
            name: dataclasses.replace(
                node,
                failures=tuple(
                    dataclasses.replace(each, when=each.when + ahead * (name == first.node))
                    for each in node.failures
                ),
            )
            for name, node in told.items()
        }
        again = verdict(moved, max_restarts=0).first
        assert again is not None
        assert again.rank == first.rank


def as_failure(report: dict[str, Any], *, rank: int, when: float) -> Failure:
    return Failure(
        node=f"gpu{rank}",
        rank=rank,
        world_size=2,
        attempt="0.0",
        exitcode=report["exitcode"],
        when=when,
        log="/l",
        error=last_words(report["text"], report["exitcode"]),
        kernel=tuple(report.get("kernel", ())),
    )


@pytest.mark.parametrize("report", REPORTED, ids=lambda report: report["cause"])
def test_an_error_that_others_have_reported_is_recognised(report: dict[str, Any]) -> None:
    failure = as_failure(report, rank=0, when=0.0)
    assert blames_another(failure) == report["echo"], failure.error
    cause = recognise(failure.error, failure.exitcode, failure.kernel)
    assert cause is not None, failure.error
    assert cause.name == report["cause"]
    assert "{" not in cause.what
    assert not re.search(r"[:,]\s*$|: [,;:]| {2}", cause.what), cause.what


def test_an_echo_is_never_blamed_while_another_has_a_reason_of_its_own() -> None:
    own = [each for each in REPORTED if not each["echo"]]
    echoes = [each for each in REPORTED if each["echo"]]
    assert len(own) > 30
    assert len(echoes) > 6
    for cause, echo in itertools.product(own, echoes):
        # Even where the echo seems to have come first: its node's clock may be wrong.
        found = first_cause([as_failure(echo, rank=0, when=1.0), as_failure(cause, rank=1, when=2.0)])
        assert found is not None
        assert found.rank == 1, (cause["text"], echo["text"])


def test_numbers_of_a_full_gpu_are_told() -> None:
    cause = recognise(REPORTED[0]["text"])
    assert cause is not None
    assert cause.what == (
        "the memory of GPU 0 is full: of 23.65 GiB, 11.06 MiB was free, this process has 23.60 GiB; 22.00 MiB more "
        "wanted"
    )
    assert "--micro-batch" in cause.cure
    assert "expandable_segments" in cause.cure


@pytest.mark.parametrize(
    ("said", "exitcode", "name", "again"),
    [
        ("/v/bin/python3.11: can't open file '/c/x.py': [Errno 2] No such file", 2, "no-such-script", False),
        ("python: can't find '__main__' module in 'src'", 1, "no-such-script", False),
        ("bash: run.sh: No such file or directory", 127, "no-such-script", False),
        ("/bin/sh: 0: cannot open run.sh: No such file", 2, "no-such-script", True),
        ("kit: cannot run './run.sh' in /c: No such file or directory", 127, "no-such-script", False),
        ("kit: cannot run 'nope' in /c: No such file or directory", 127, "no-such-command", False),
        ("kit: cannot run './run.sh' in /c: Permission denied", 126, "not-executable", False),
        ("python: can't open file '/c/x.py': [Errno 13] Permission denied", 2, "permission-denied", False),
        ("usage: x.py [-h]\nx.py: error: unrecognized arguments: --y", 2, "wrong-usage", False),
        ("[--a A]\n" * 40 + "x.py: error: the following arguments are required: --y", 2, "wrong-usage", False),
        ("x.py: error: the following arguments are required: --local_rank", 2, "no-local-rank-option", False),
        ("Usage: x.py [OPTIONS]\n\nError: No such option: --y", 2, "wrong-usage", False),
        ("python -m nodekit.training: /data/train is not there: is it mounted?", 2, "", True),
        ("a.c:1:1: error: argument\nmake: *** [all] Error 1", 2, "", True),
        ("Traceback\nNameError: name 'get_ipython' is not defined", 1, "notebook-command", False),
        ("run.sh: line 3: syntax error near unexpected token", 2, "", True),
        ("Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nError: usage: x", 2, "", True),
    ],
)  # fmt: skip
def test_an_exit_status_of_2_is_wrong_usage_only_where_that_is_said(
    said: str, exitcode: int, name: str, again: bool
) -> None:
    words = last_words(said, exitcode)
    cause = recognise(words, exitcode)
    assert (cause.name if cause else "") == name
    assert never_starts(words, exitcode) is not again


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (
            "/root/nodekit/runs/lab-1122-060100-aaaa/gpu 1/snapshots/step-20/__1_0.distcp",
            "no-such-snapshot-file",
        ),
        ("/root/nodekit/runs/lab-1122-060100-aaaa/code/data.bin", "no-such-file"),
        ("/data/snapshots/part.bin", "no-such-file"),
    ],
)
def test_part_of_a_snapshot_that_is_missing_is_not_taken_for_data_that_nobody_sent(
    path: str, name: str
) -> None:
    """The node that wrote it may have been lost before another one had a copy."""
    cause = recognise(f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'")
    assert cause is not None
    assert cause.name == name
    assert path in cause.what
    assert ("job.code" in cause.cure) == (name == "no-such-file")


def test_nodes_that_are_counted_in_the_script_are_told_where_one_was_lost() -> None:
    cause = recognise(
        'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nValueError: You set `devices=1` and '
        "`num_nodes=2` in Lightning, but the product (1 * 2) does not match the world size (1)."
    )
    assert cause is not None
    assert cause.name == "lightning-num-nodes"
    assert "num_nodes=2 by the script, and this attempt has a world size of 1" in cause.what
    assert 'num_nodes=int(os.environ["GROUP_WORLD_SIZE"])' in cause.cure


QUOTED = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
    "    raise OSError('Address already in use') if taken else KeyError(1)\nKeyError: 1"
)


@pytest.mark.parametrize(
    ("error", "exitcode", "kernel"),
    [
        ("ValueError: boom", 1, ()),
        (QUOTED, 1, ()),
        ("", 3, ()),
    ],
    ids=["the user's own", "words in the code above the message", "nothing"],
)  # fmt: skip
def test_what_is_not_known_is_not_guessed(error: str, exitcode: int, kernel: tuple[str, ...]) -> None:
    assert recognise(error, exitcode, kernel) is None


BOOM = 'Traceback (most recent call last):\n  File "job.py", line 6, in <module>\n    f()\nValueError: boom'
LOST = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:38275."


def failure(
    rank: int, when: float, error: str, exitcode: int = 1, world_size: int = 4, **more: Any
) -> Failure:
    return Failure(
        node=f"gpu{rank}",
        rank=rank,
        world_size=world_size,
        attempt=more.pop("attempt", "0.0"),
        exitcode=exitcode,
        when=when,
        log=f"/work/rank{rank}.log",
        error=error,
        **more,
    )


def told(*failures: Failure, **nodes: Told) -> dict[str, Told]:
    return {**{each.node: Told(state="failed", failures=(each,)) for each in failures}, **nodes}


def test_a_node_that_is_stopped_after_its_ranks_have_ended_well_was_there_at_the_end() -> None:
    well = Told(state="succeeded", attempt="0.1", ranks=(1,), ended=(1,))
    waited = Told(state="stopped", attempt="0.1", ranks=(0,), ended=(0,))
    assert verdict({"gpu1": waited, "gpu2": well}, max_restarts=3).without == ()
    for left in (
        Told(state="stopped", attempt="0.1", ranks=(0, 2), ended=(0,)),
        Told(state="gone", attempt="0.0", ranks=(0,), ended=(0,)),
    ):
        assert verdict({"gpu1": left, "gpu2": well}, max_restarts=3).without == ("gpu1",)


@pytest.mark.parametrize(
    ("nodes", "others"),
    [
        pytest.param(
            told(failure(1, 5.0, BOOM), failure(0, 6.3, LOST), failure(2, 5.4, LOST), failure(3, 6.0, LOST)),
            "3 other ranks ended because of it: lost their connection to gpu1, within 1.3 s",
            id="all say that they lost it",
        ),
        pytest.param(
            told(failure(1, 5.0, BOOM), failure(0, 6.3, LOST)),
            "3 other ranks ended because of it: 1 lost its connection to gpu1, within 1.3 s, 2 were ended with it",
            id="some were ended before they could",
        ),
        pytest.param(told(failure(1, 5.0, BOOM)), "3 other ranks ended because of it", id="none could"),
        pytest.param(
            told(failure(1, 5.0, BOOM), *(failure(rank, 5.2, BOOM) for rank in (0, 2, 3))),
            "the 3 other ranks ended in the same way, within 0.2 s",
            id="all in the same way",
        ),
        pytest.param(told(failure(0, 5.0, BOOM, world_size=1)), "", id="alone"),
    ],
)
def test_what_it_did_to_the_others(nodes: dict[str, Told], others: str) -> None:
    assert verdict(nodes, max_restarts=1).others == others


def test_another_error_of_its_own_is_named_too() -> None:
    found = verdict(
        told(failure(1, 5.0, BOOM), failure(3, 5.4, BOOM.replace("ValueError", "KeyError"))), max_restarts=1
    )
    assert found.notes == ("rank 3 on gpu3 failed too, 0.4 s later: KeyError: boom",)


def test_a_node_that_is_gone_is_the_cause_and_not_who_lost_it() -> None:
    nccl = REPORTED[3]["text"]  # says what a network's fault says: no echo for certain
    gone = Told(state="running", silent_since=1_700_000_000.0)
    found = verdict(told(failure(0, 5.0, LOST), failure(1, 4.0, nccl), gpu2=gone), max_restarts=0)
    assert found.first is None
    assert re.fullmatch(r"gpu2 was lost: it has not been reached since \d\d:\d\d:\d\d", found.text)
    assert found.others == "2 ranks on gpu0, gpu1 lost their connection to gpu2"


def test_an_own_error_is_the_cause_whoever_is_gone_besides() -> None:
    found = verdict(told(failure(0, 5.0, BOOM), gpu2=Told(state="running")), max_restarts=0)
    assert found.first is not None
    assert found.first.rank == 0


@pytest.mark.parametrize(
    "cause", ["port-in-use", "nccl-duplicate-gpu", "nccl-no-interface", "gloo-interface"]
)
def test_what_only_a_rank_itself_can_have_done_is_blamed_though_it_speaks_of_the_network(cause: str) -> None:
    report = next(each for each in REPORTED if each["cause"] == cause)
    later = BOOM.replace("ValueError: boom", "RuntimeError: training failed")
    found = verdict(told(as_failure(report, rank=1, when=5.0), failure(0, 6.0, later)), max_restarts=1)
    assert found.first is not None
    assert found.first.rank == 1


def test_a_crash_that_was_recovered_from_is_not_blamed_for_a_node_that_is_lost_later() -> None:
    nodes = {
        "gpu0": Told(state="failed", failures=(failure(0, 5.0, BOOM),), attempt="0.3", message="waited 60 s"),
        "gpu1": Told(state="running", attempt="0.3"),
    }
    found = verdict(nodes, max_restarts=3)
    assert found.first is None
    assert found.text == "gpu1 was lost: its agent is gone without a word"


def test_what_an_agent_says_of_its_own_end_is_the_cause_not_its_words() -> None:
    events = [
        *STARTED,
        failed("gpu0", 0, 5.3, LOST),
        event("agent-ended", "gpu0", 6.0, state="failed", cause="ended-elsewhere"),
        event("agent-ended", "gpu1", 5.0, state="ended", message="no rank is started here", cure="make room"),
    ]
    found = verdict(told_in(events), max_restarts=1)
    assert found.cause == Cause("node-unfit", "no rank is started here", "make room")
    assert found.text == "gpu1 was lost: its agent could not go on"
    alone = verdict({"gpu0": Told(state="failed", message="waited", cause="too-few-nodes")}, max_restarts=1)
    assert alone.cause == TOO_FEW_NODES
    older = verdict({"gpu0": Told(state="failed", message="waited 60 s for 2 nodes")}, max_restarts=1)
    assert (older.text, older.cause) == ("gpu0: waited 60 s for 2 nodes", None)


def test_of_a_lost_connection_it_is_told_to_which_node() -> None:
    lost = "[pair.cc:553] Connection closed by peer [198.18.0.3]:4321"
    nodes = told(failure(0, 5.0, LOST), failure(1, 4.0, lost))
    here = {
        name: replace(each, address=f"198.18.0.{10 + number}")
        for number, (name, each) in enumerate(nodes.items())
    }
    others = {name: Told(state="failed", address=f"198.18.0.{n}") for name, n in (("gpu3", 3), ("gpu4", 30))}
    assert verdict({**here, **others}, max_restarts=1).notes == ("198.18.0.3, of which it speaks, is gpu3",)
    alone = {name: replace(each, address="198.18.0.3") for name, each in {**here, **others}.items()}
    assert verdict(alone, max_restarts=1).notes == ()


def test_when_all_only_lost_each_other_none_is_called_the_one_that_failed() -> None:
    found = verdict(told(failure(0, 5.0, LOST), failure(1, 4.0, LOST)), max_restarts=0)
    assert found.text == "the ranks lost each other; rank 1 on gpu1 was the first to notice (exit status 1)"
    assert found.cause is not None
    assert found.cause.name == "peer-lost"


def test_where_ranks_that_stay_could_not_connect_the_node_that_they_speak_of_is_named() -> None:
    ten = "10 attempts in a row without progress"
    said = f"{ten}: rank 2: connectFullMesh failed with [gloo/pair.cc:152] timed out connecting, remote=[10.0.0.2]"
    found = verdict(
        {
            "n1": Told(
                state="failed", message=ten, address="10.0.0.1", notice="all wait\n    train (a.py:3)"
            ),
            "n2": Told(state="failed", message=ten, address="10.0.0.2"),
            "n3": Told(state="failed", message=said, address="10.0.0.3"),
        },
        max_restarts=3,
    )
    assert found.cause is not None
    assert found.cause.name == "gloo-connect"
    assert found.notes == (f"n3: {said}", "10.0.0.2, of which it speaks, is n2", "all wait")


# --- the screen ---


def shown(found: Verdict, **more: Any) -> list[str]:
    return screen(found, run_id="lab-1122-060115-3f", resume="kit up lab.yaml", **more)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_recorded_verdict_fits_a_screen(path: Path) -> None:
    case = load(path)
    found = verdict(recorded(case), max_restarts=1)
    lines = shown(found)
    assert len(lines) <= 24, "\n".join(lines)
    wide = [line for line in lines if len(line) > 80 and "/" not in line]
    assert not wide
    text = "\n".join(lines)
    assert "kit up lab.yaml" in text
    assert found.first is not None
    assert f"{found.first.node}:{found.first.log}" in text
    if found.first.error.startswith("Traceback"):
        assert "Traceback (most recent call last):" in text
        assert message_of(found.first.error).partition(":")[0] in text


def test_the_screen_of_a_recorded_kill_has_the_kernels_own_line() -> None:
    found = verdict(recorded(load(RECORDED / "failures" / "cgroup-out-of-memory.json")), max_restarts=1)
    text = " ".join(" ".join(shown(found)).split())
    assert re.search(r"kernel Memory cgroup out of memory: Killed process \d+ \(python\) total-vm:", text)
    assert "killed by SIGKILL" in text


def test_of_a_deep_traceback_the_callers_own_frames_and_the_message_are_shown() -> None:
    library = (
        '  File "/venv/lib/python3.11/site-packages/torch/nn/m.py", line 1, in call\n'
        "    return f(x)\n           ^^^^\n"
    )
    own = '  File "/work/runs/lab-3f/code/train.py", line 7, in step\n    loss = net(x)\n'
    found = trace(f"Traceback (most recent call last):\n{own}{library * 9}RuntimeError: bad\n", 76, 12)
    assert found == [
        "Traceback (most recent call last):",
        '  File "train.py", line 7, in step',
        "    loss = net(x)",
        "  … 8 calls in libraries",
        '  File "/venv/lib/python3.11/site-packages/torch/nn/m.py", line 1, in call',
        "    return f(x)",
        "RuntimeError: bad",
    ]


def test_of_a_dataloader_worker_that_raised_its_own_traceback_is_shown() -> None:
    found = verdict(recorded(load(RECORDED / "failures" / "dataloader-exception.json")), max_restarts=1)
    lines = "\n".join(shown(found))
    assert "in DataLoader worker process 0:" in lines
    assert "def bad(): raise KeyError('label of image 2')" in lines
    assert "KeyError: 'label of image 2'" in lines


# --- from events ---


def event(kind: str, node: str | None, time: float, **fields: Any) -> Event:
    return Event(time, node, kind, fields)


def failed(node: str, rank: int, when: float, error: str, attempt: str = "0.0") -> Event:
    return event(
        "worker-failed", node, when + 0.5, attempt=attempt, rank=rank, local_rank=0, world_size=2, exitcode=1,
        when=when, log="/l", error=error, kernel=[],
    )  # fmt: skip


STARTED = [
    event("run-started", None, 0.0),
    event("agent-started", "gpu0", 1.0, pid=1),
    event("agent-started", "gpu1", 1.0, pid=1),
]


def test_events_alone_tell_the_same_as_the_nodes() -> None:
    events = [
        event("run-started", None, -9.0),
        failed("gpu0", 0, -5.0, BOOM.replace("boom", "of the run before it was started again")),
        *STARTED,
        failed("gpu0", 0, 5.3, LOST),
        failed("gpu1", 1, 5.0, BOOM),
        event("agent-ended", "gpu1", 6.0, state="failed", message="crashed twice", no_progress=True),
        event("agent-ended", "gpu0", 6.0, state="failed", cause="ended-elsewhere"),
    ]
    found = verdict_of(events, max_restarts=0, state="failed", reason="x")
    assert found is not None
    assert found.first is not None
    assert (found.first.node, found.text) == ("gpu1", "rank 1 on gpu1 failed first (exit status 1)")
    assert found.no_progress
    assert "gpu1: crashed twice" in found.notes
    assert found == verdict(told_in(events), max_restarts=0)


def test_a_node_that_never_came_back_into_sight_is_told_from_events() -> None:
    events = [*STARTED, event("unreachable", None, 4.0, about="gpu1"), failed("gpu0", 0, 5.3, LOST)]
    events.append(event("agent-ended", "gpu0", 6.0, state="failed", message="waited 1800 s"))
    found = verdict_of(events, max_restarts=0, state="failed", reason="gpu1 was lost")
    assert found is not None
    assert found.text.startswith("gpu1 was lost")


def test_what_slurm_decided_is_a_verdict_with_its_cure() -> None:
    known = dataclasses.asdict(BY_SLURM_STATE["TIMEOUT"])
    found = verdict_of(
        STARTED, max_restarts=0, state="failed", reason="Slurm ended the job: timeout", known=known
    )
    assert found is not None
    assert (found.text, found.cause and found.cause.name) == ("Slurm ended the job: timeout", "time-limit")


def test_of_a_run_that_goes_on_the_last_failure_is_told_and_none_of_a_good_one() -> None:
    events = [*STARTED, failed("gpu1", 1, 5.0, BOOM), failed("gpu0", 0, 7.0, BOOM, attempt="0.1")]
    found = verdict_of(events, max_restarts=3, state="running", reason="")
    assert found is not None
    assert found.first is not None
    assert found.first.node == "gpu0"
    assert verdict_of(STARTED, max_restarts=3, state="running", reason="") is None


def met(attempt: str, at: float, *members: str) -> list[Event]:
    return [event("rendezvous", name, at, attempt=attempt, members=list(members)) for name in members]


THREE = [event("run-started", None, 0.0), *met("0.0", 1.0, "n1", "n2", "n3")]
CRASH = [
    *THREE,
    event("membership", "n1", 20.0, lost=1, waiting=0, names=["n2"]),
    # By then n1 has left the round, to meet anew.
    event("membership", "n3", 20.2, lost=2, waiting=1, names=["n1", "n2"]),
    failed("n3", 2, 20.1, LOST),
]
CUT = [
    *THREE,
    event("unreachable", None, 20.4, about="n1"),
    event("store-lost", "n3", 20.4, why="Failed to recv"),
    event("store-lost", "n2", 20.5, why="Failed to recv"),
    *met("1.0", 21.0, "n2", "n3"),
    event("reached", None, 60.0, about="n1"),
    # What it has told the whole time, of itself all others were lost.
    event("membership", "n1", 20.0, lost=2, waiting=0, names=["n2", "n3"]),
    event("membership", "n2", 61.0, lost=0, waiting=1, names=[]),
    event("membership", "n3", 61.2, lost=1, waiting=2, names=["n2"]),
    *met("1.1", 62.0, "n1", "n2", "n3"),
]
CAME_BACK = [event("agent-started", "n2", 50.0, pid=9), *met("0.2", 60.0, "n1", "n2", "n3")]
DRAINED = [
    *THREE,
    event("drain", None, 20.0, about="n1", generation=0),
    event("agent-ended", "n1", 20.1, state="ended"),
    event("store-lost", "n2", 20.3, why="Broken pipe"),
    failed("n3", 2, 20.2, LOST),
    *met("1.0", 21.0, "n2", "n3"),
]
OWN = failed("n1", 0, 70.0, BOOM, attempt="0.1")


WITHOUT_N2 = met("0.1", 21.0, "n1", "n3")
IS_SILENT = event("unreachable", None, 23.0, about="n2")
ECHO = "1 rank on n3 lost its connection to n2"
ENDED = "1 other rank ended because of it"


@pytest.mark.parametrize(
    ("events", "text", "others", "cause"),
    [
        (CRASH, "n2 was lost at TIME, and is not back in the job", ECHO, "node-lost"),
        ([*CRASH, IS_SILENT, *WITHOUT_N2],
         "n2 was lost at TIME: it has not been reached since TIME", ECHO, "node-lost"),
        ([*CRASH, *WITHOUT_N2, *CAME_BACK],
         "n2 was lost at TIME, and is back in the job since TIME", ECHO, "node-lost"),
        ([*CRASH, *WITHOUT_N2, OWN], "rank 0 on n1 failed first (exit status 1), in the last of 2 attempts", ENDED, ""),
        (CUT, "n1 was lost at TIME, and is back in the job since TIME", "", "node-lost"),
        (CUT[:7], "n1 was lost at TIME: it has not been reached since TIME", "", "node-lost"),
        (DRAINED, None, "", ""),
        ([*THREE, event("unreachable", None, 20.0, about="n2")], None, "", ""),
        ([*THREE, failed("n3", 2, 20.1, LOST)],
         "the ranks lost each other; rank 2 on n3 was the first to notice (exit status 1)", ENDED, "peer-lost"),
    ],
)  # fmt: skip
def test_of_a_run_that_goes_on_the_nodes_are_lost_that_the_others_have_missed(
    events: list[Event], text: str | None, others: str, cause: str
) -> None:
    found = verdict_of(events, max_restarts=3, state="running", reason="")
    if text is None:
        assert found is None
        return
    assert found is not None
    assert re.sub(r"\d\d:\d\d:\d\d", "TIME", found.text) == text
    assert found.others == others
    assert (found.cause.name if found.cause else "") == cause
    assert found.when
    assert found.is_recovered == (events[-1].kind == "rendezvous")


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_node_that_left_because_nothing_could_be_written_there_is_not_put_down_to_power(state: str) -> None:
    why = "nothing can be written to /r/n2: Read-only file system"
    disk = event("said", None, 15.0, about="n2", text=f"warning: n2: {why}; see to it", unwritable=why)
    ran = event("node-state", None, 2.0, about="n2", state="running")
    ends = [event("agent-ended", each, 90.0, state="failed") for each in ("n1", "n3")]

    def found(*events: Event) -> Verdict:
        told = verdict_of(
            [*events, *(ends if state == "failed" else [])], max_restarts=3, state=state, reason=""
        )
        assert told is not None
        return told

    lost = found(*THREE, ran, disk, *CRASH[len(THREE) :])
    assert lost.cause == Cause("disk-unwritable", f"on n2 {why}", DISK_CURE)
    own = found(*THREE, ran, disk, failed("n1", 0, 20.0, BOOM))
    assert own.first is not None
    assert f"on n2 {why}" in own.notes
    # It could be written to again, and was lost later.
    again = [
        *met("0.1", 16.0, "n1", "n2", "n3"),
        event("workers-started", "n2", 16.5, attempt="0.1", workers=[]),
    ]
    mended = found(*THREE, ran, disk, *again, *CRASH[len(THREE) : -1], failed("n3", 2, 20.1, LOST, "0.1"))
    assert mended.cause is not None
    assert mended.cause.name == "node-lost"


def test_a_nodes_clock_is_taken_out_of_when_it_failed(tmp_path: Path) -> None:
    from nodekit.deploy.records.events import Gatherer, read

    line = json.dumps({"run": "r", "time": 105.5, "node": "gpu1", "kind": "worker-failed", "when": 105.0})
    Gatherer(tmp_path).add_of_node("gpu1", [("1", 10, line)], clock_offset=100.0)
    assert (read(tmp_path)[0].time, read(tmp_path)[0].get("when")) == (5.5, 5.0)
    assert parse_all([b"{torn"]) == []


def test_an_attempt_is_explained_without_a_final_state() -> None:
    found = explain({"gpu1": Told(state="failed", failures=(failure(1, 5.0, BOOM),))})
    assert found.text == "rank 1 on gpu1 failed first (exit status 1)"


@pytest.mark.parametrize("shift_s", [100.0, -7200.0], ids=["the clock goes on", "the clock was set back"])
def test_a_failure_of_an_earlier_start_is_not_that_of_this_one(shift_s: float) -> None:
    nodes = ("n1", "n2")

    def line(time: float, kind: str, node: str | None = None, **fields: Any) -> str:
        return json.dumps({"run": "r", "time": time, "node": node, "kind": kind, **fields})

    def start(at: float, generation: int, *, error: str = "") -> list[str]:
        attempt = f"{generation}.0"
        lines = [line(at, "run-started", generation=generation, nodes=nodes)]
        for rank, node in enumerate(nodes):
            lines += [
                line(at + 1, "agent-started", node, version=1),
                line(at + 2, "rendezvous", node, attempt=attempt, members=nodes),
                line(
                    at + 3, "workers-started", node, attempt=attempt, world_size=2, workers=[{"rank": rank}]
                ),
            ]
        failure = {"rank": 1, "local_rank": 0, "world_size": 2, "exitcode": 1, "log": "x", "kernel": []}
        failed = line(at + 60, "worker-failed", "n2", attempt=attempt, when=at + 60, error=error, **failure)
        return [*lines, failed] if error else lines

    def found(*lines: str) -> Verdict | None:
        return verdict_of(parse_all(lines), max_restarts=3, state="running", reason="")

    first, second_s = start(1e5, 0, error="ValueError: boom"), 1e5 + shift_s
    assert found(*first, *start(second_s, 1)) is None
    again = found(*first, *start(second_s, 1, error="KeyError: other"))
    assert again is not None
    assert again.first is not None
    assert again.first.error == "KeyError: other"


def test_the_failures_of_weeks_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event("run-started", None, 0.0)]
    for number in range(200):
        at = f"0.{number}"
        events += [event("workers-started", "a", 10.0 * number, attempt=at, world_size=1, workers=[])]
        events += [failed("a", 0, 10.0 * number + 5, "ValueError: boom", at)]
    compared, equal = list[Failure](), Failure.__eq__
    monkeypatch.setattr(Failure, "__eq__", lambda one, other: compared.append(one) or equal(one, other))
    found = verdict_of(events, max_restarts=3, state="running", reason="")
    assert found is not None
    assert found.first is not None
    assert found.first.attempt == "0.199"
    assert len(compared) < 1000
