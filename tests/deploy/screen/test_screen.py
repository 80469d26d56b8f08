"""The live view, without a terminal: what is shown in windows of all sizes, and what is kept of a run for it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from nodekit.deploy.launch import watch
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.keys import decode
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run
from nodekit.deploy.screen import view as view_file
from nodekit.deploy.screen.full_screen import Doing, FullScreen
from nodekit.deploy.screen.screen import Model, Node, closing, lines, render
from nodekit.deploy.screen.screen_text import spark, wrapped
from nodekit.deploy.screen.view_model import ViewModel
from nodekit.deploy.supervise.state import Rules

GIB = 2**30
NOW = 1_795_327_283.0
GPU = {"index": 0, "use": 0.97, "memory": 61 * GIB, "memory_total": 80 * GIB}
USAGE = {"cpu": 0.4, "memory": 12 * GIB, "memory_total": 125 * GIB, "received": 1.24e9, "sent": 35e3}
SIZES = [(200, 60), (120, 30), (80, 24), (60, 20), (60, 12), (40, 12), (30, 6), (20, 3)]


def model(num_nodes: int = 4, **changes: Any) -> Model:
    nodes = [
        Node(
            name=f"gpu{number}",
            state="running",
            generation=1,
            restarts=2,
            usage={**USAGE, "gpus": [GPU, {**GPU, "use": 0.1}]},
            step=4128,
            rate=12.4,
            quiet_s=0.4,
        )
        for number in range(num_nodes)
    ]
    values: dict[str, Any] = {
        "run_id": "lab-1122-060115-3f",
        "state": "running",
        "now": NOW,
        "nodes": nodes,
        "started": NOW - 700,
        "generation": 1,
        "restarts": 2,
        "step": 4128,
        "total_steps": 8000,
        "rate": 12.4,
        "losses": [(step, 0.4 + 2 * math.exp(-step / 900)) for step in range(1, 4128)],
        "events": [(NOW - number, f"sentence {number} of what happened") for number in range(20, 0, -1)],
        "chosen": "gpu1",
        "keys": [("q", "leave"), ("s", "stop")],
    }
    return Model(**{**values, **changes})


def shown(found: Model, width: int, height: int | None) -> list[str]:
    return [line.plain.rstrip() for line in lines(found, width, height)]


def test_a_node_has_all_of_its_numbers_in_a_wide_window() -> None:
    text = shown(model(), 120, 30)
    assert text[0].startswith(
        "lab-1122-060115-3f  running · 4 of 4 nodes · generation 1 · 2 restarts · for 11 min 40 s"
    )
    assert text[1].endswith("52 % · 4,128 of 8,000 steps · 5 min 12 s left · 12.4 steps/s")
    head = "NODE STATE GEN RESTARTS GPU MEMORY IN OUT STEP STEPS/S QUIET"
    assert text[3].split() == head.split()
    row = "▸ gpu1 running 1 2 ▇▂ 54 % 61/80 GiB 1.2 GB/s 35.0 kB/s 4,128 12.4 0.4 s"
    assert text[5].split() == row.split()
    assert text[-1] == "q leave   s stop"


def test_without_gpus_it_is_the_processor_and_the_host_s_memory() -> None:
    text = shown(model(nodes=[Node(name="a", state="running", usage=USAGE)]), 120, 30)
    assert "CPU" in text[3].split()
    assert " ".join(text[4].split()) == "a running – 0 40 % 12/125 GiB 1.2 GB/s 35.0 kB/s – – –"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_nodes", [1, 4, 64])
@pytest.mark.parametrize(
    "changes", [{}, {"losses": []}, {"events": []}, {"step": None}, {"asks": "Stop it? " * 9}]
)
def test_whatever_the_window_nothing_sticks_out(
    size: tuple[int, int], num_nodes: int, changes: dict[str, Any]
) -> None:
    width, height = size
    text = shown(model(num_nodes, **changes), width, height)
    assert len(text) == height
    assert max(map(len, text)) <= width
    assert text[0].startswith("lab-1122-060115-3f"[:width])
    if height >= 6:
        assert any(line.strip().startswith(("gpu", "▸ gpu")) for line in text), text


def test_a_narrow_window_keeps_the_columns_that_matter_most() -> None:
    assert " ".join(shown(model(), 60, 20)[3].split()) == "NODE STATE GPU MEMORY STEP STEPS/S QUIET"
    assert " ".join(shown(model(), 40, 12)[2].split()) == "NODE STATE GPU STEP QUIET"


def test_the_temperature_of_the_hottest_gpu_is_shown_and_that_it_is_slowed_down() -> None:
    def of(*gpus: dict[str, Any]) -> str:
        node = Node(name="a", state="running", usage={**USAGE, "gpus": [{**GPU, **each} for each in gpus]})
        return " ".join(shown(model(nodes=[node]), 120, 30))

    assert "TEMP" not in of({})
    assert " 71 °C " in of({"temperature": 64, "slow": ["sw_power_cap"]}, {"temperature": 71})
    assert " 92 °C slow " in of({"temperature": 64}, {"temperature": 92, "slow": ["hw_thermal_slowdown"]})


def test_nodes_that_do_not_fit_are_counted_and_the_marked_one_is_shown() -> None:
    nodes = [Node(name=f"n{number}", state="gone" if number == 2 else "running") for number in range(64)]
    text = shown(model(nodes=nodes, chosen="n40"), 100, 24)
    assert any(line.startswith("▸ n40 ") for line in text)
    (rest,) = [line for line in text if " more: " in line]
    num_shown = sum(line.strip(" ▸").startswith("n") for line in text)
    assert rest == f"  + {64 - num_shown} more: 1 gone, {63 - num_shown} running"


def test_a_low_window_still_has_the_last_event() -> None:
    assert "sentence 1 of what happened" in "\n".join(shown(model(64), 80, 12))
    assert len([line for line in shown(model(2), 80, 40) if "sentence" in line]) == 12


def test_why_a_node_waits_stands_behind_its_row() -> None:
    nodes = [Node(name="a", state="unreachable", why="no route to host")]
    assert shown(model(nodes=nodes), 120, 20)[4].endswith("no route to host")


def test_the_log_of_a_node_fills_the_window_and_long_lines_go_on() -> None:
    text = shown(model(log=["first", "x" * 100, "\x1b[31mlast\x1b[0m"]), 60, 8)
    assert text[1].startswith("── log of gpu1 ──")
    assert text[2:6] == ["first", "x" * 60, "x" * 40, "last"]


def test_before_any_host_has_answered_nothing_is_said_of_the_nodes_and_the_step() -> None:
    found = model(2, state="connecting", step=None, said="")
    found = dataclasses.replace(
        found, nodes=[dataclasses.replace(node, state="connecting") for node in found.nodes]
    )
    title, progress, *_ = shown(found, 80, None)
    assert "0 of 2" not in title
    assert progress == "not known yet"
    found = dataclasses.replace(
        found, nodes=[found.nodes[0], dataclasses.replace(found.nodes[1], state="starting")]
    )
    title, progress, *_ = shown(found, 80, None)
    assert "0 of 2" in title
    assert progress == "no step yet"


def test_what_is_left_of_a_closed_screen_is_broken_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = (
        "rank 0 on node1 failed (exit status 1): it failed twice in the same way, in the last of 2 attempts"
    )
    Console(width=60, color_system=None).print(
        closing(model(events=[(0.0, sentence)]), 5, 60), soft_wrap=True
    )
    first, second, last = capsys.readouterr().out.splitlines()
    assert len(first) <= 60
    assert f"{first[10:]} {second[10:]}" == sentence
    assert second.startswith(" " * 10)
    assert last.startswith("lab")
    assert wrapped("see /a/path/that/is/longer/than/all/of/the/window/is/wide now", 30).splitlines() == [
        "see", "  /a/path/that/is/longer/than/all/of/the/window/is/wide", "  now",
    ]  # fmt: skip


def test_kit_s_own_frames_in_what_a_hung_rank_leaves_are_not_shown() -> None:
    watched = ViewModel("r", ["a"])
    kits = "/x/nodekit/deploy/agent/ranks/forkserver.py"
    dump = [
        "Fatal Python error: Aborted", "", "Current thread 0x00007f (most recent call first):",
        '  File "/runs/r/code/train.py", line 41 in main', '  File "/runs/r/code/train.py", line 60 in <module>',
        '  File "<frozen runpy>", line 88 in _run_code', f'  File "{kits}", line 402 in _run', "",
        "Extension modules: numpy._core._multiarray_umath, torch._C (total: 90)",
    ]  # fmt: skip
    watched.log("a", "0", [*dump, f'  File "{kits}", line 402, in _run'])
    assert watched.log_of("a") == [
        *dump[:5],
        "",
        f'  File "{kits}", line 402, in _run',
    ]  # a traceback has all


def test_of_what_torch_says_of_a_lost_rank_the_stacks_are_not_shown() -> None:
    watched = ViewModel("r", ["a"])
    said = [
        "[rank1]:[E1127 03:38:16.18 ProcessGroupNCCL.cpp:612] [Rank 1] Collective WorkNCCL(SeqNum=87) raised: error",
        "frame #1: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0xa84 (0x7f43a9f07294 in /torch/lib/libtorch_cuda.so)",
        "#0 all_reduce from /torch/distributed/distributed_c10d.py:3068", "#7 <lambda> from /runs/r/code/train.py:278",
        "#1 in the list from top to bottom",
    ]  # fmt: skip
    watched.log("a", "0", said)
    assert watched.log_of("a") == [said[0], said[4]]


def test_the_list_of_keys_goes_on_below_where_the_window_is_narrow() -> None:
    found = shown(model(help=[("d", "drain the node " * 6), ("any key", "closes this list")]), 60, 20)
    assert found[2:6] == [
        "  d         drain the node drain the node drain the node",
        "            drain the node drain the node drain the node",
        "  any key   closes this list",
        "",
    ]


def test_a_question_takes_the_place_of_the_keys() -> None:
    assert shown(model(asks="Stop the job?  y: yes"), 80, 20)[-1] == "Stop the job?  y: yes"


def test_without_colour_nothing_is_lost() -> None:
    coloured, plain = (
        Console(width=100, height=24, force_terminal=True, no_color=no_color, record=True, quiet=True)
        for no_color in (False, True)
    )
    for console in (coloured, plain):
        console.quiet = False
    with coloured.capture() as bright:
        coloured.print(render(model(), 100, 24))
    with plain.capture() as dull:
        plain.print(render(model(), 100, 24))
    assert "\x1b[32m" in bright.get()
    assert "\x1b[32m" not in dull.get()
    assert "\x1b[1m" in dull.get()


def test_a_curve_falls_where_its_values_do() -> None:
    assert spark([(0, 8.0), (7, 1.0)], 8, 1) == ["█▇▆▅▄▃▂▁"]
    assert spark([(0, 2.0), (1, 1.0)], 2, 2) == ["█ ", "█▁"]
    assert spark([(5, 3.0), (6, 3.0)], 3, 1) == ["▁▁▁"]


# --- what is kept ---------------------------------------------------------------------------------------------


def status(step: int, when: float, **more: Any) -> dict[str, Any]:
    told = {"progress": f"{step}/100 epoch 1 loss {5 / (step + 1):.4f}", "progress_time": when}
    return {"state": "running", "attempt": "0.1", "generation": 0, "rank": 0, "alive": True, **told, **more}


def test_steps_per_second_are_those_of_the_last_seconds() -> None:
    watched = ViewModel("r", ["a"])
    watched.lines({"a": "running  rank 0 of 1"})
    for second in range(60):
        watched.see({"a": status(second if second < 30 else 30 + 2 * (second - 30), NOW + second)})
    node = watched.model(NOW + 60).nodes[0]
    assert node.rate == pytest.approx(2.0)
    assert (node.step, node.quiet_s) == (88, pytest.approx(1.0))


def test_a_clock_that_is_off_does_not_make_a_node_late() -> None:
    watched = ViewModel("r", ["a"], {"a": 100.0})
    watched.lines({"a": "running"})
    watched.see({"a": status(1, NOW + 100)})
    assert watched.model(NOW + 2).nodes[0].quiet_s == pytest.approx(2.0)


def test_redone_steps_are_not_in_the_curve_twice() -> None:
    watched = ViewModel("r", ["a"])
    for step in (1, 2, 3, 4):
        watched.see({"a": status(step, NOW + step)})
    watched.see({"a": status(3, NOW + 9, attempt="0.2", progress="3/100 loss 9.0")})
    watched.see({"a": status(2, NOW + 9, attempt="0.1", progress="2/100 loss 7.0")})  # told late
    assert watched.model(NOW).losses == [(1, 2.5), (2, pytest.approx(1.6667)), (3, 9.0)]


def test_a_run_that_is_over_is_told_from_its_events() -> None:
    watched = ViewModel("r", ["a", "b"])
    found: list[tuple[float, str | None, str, dict[str, Any]]] = [
        (NOW, None, "run-started", {"nodes": ["a", "b"], "generation": 0}),
        *((NOW + 1, name, "workers-started", {"attempt": "0.1", "world_size": 2}) for name in "ab"),
        (NOW + 2, "a", "sample", {"attempt": "0.1", "step": 10, "total_steps": 20, "loss": 2.0, **USAGE}),
        *((NOW + 3, name, "workers-started", {"attempt": "0.2", "world_size": 2}) for name in "ab"),
        (NOW + 4, "a", "evaluation", {"step": 20, "metrics": {"accuracy": 0.5}}),
        (NOW + 5, "a", "attempt-ended", {"attempt": "0.2", "step": 20}),
        *((NOW + 6, name, "agent-ended", {"state": "succeeded"}) for name in "ab"),
        (NOW + 7, None, "run-ended", {"state": "succeeded", "verdict": "trained to the end"}),
    ]
    for event in found:
        watched.event(Event(*event))
    last = watched.model(NOW + 1000)
    assert (last.state, last.now, last.restarts) == ("succeeded", NOW + 7, 1)
    assert [node.state for node in last.nodes] == ["succeeded", "succeeded"]
    assert (last.step, last.total_steps, last.best) == (20, 20, {"accuracy": 0.5})
    assert last.events[-1] == (NOW + 7, "the run is over: trained to the end")


def test_the_nodes_of_a_run_that_did_not_start_are_not_connecting_for_ever() -> None:
    watched = ViewModel("r", ["a", "b"])
    watched.event(Event(NOW, None, "run-started", {"nodes": ["a", "b"], "generation": 0}))
    assert [node.state for node in watched.model(NOW + 1).nodes] == ["connecting"] * 2
    watched.event(Event(NOW + 2, None, "run-ended", {"state": "failed", "verdict": "it did not start"}))
    last = watched.model(NOW + 3)
    assert [node.state for node in last.nodes] == ["not started"] * 2
    assert shown(last, 80, None)[1] == "no step"


def test_what_comes_in_late_stands_where_it_belongs() -> None:
    watched = ViewModel("r", ["a"])
    for when in (1.0, 3.0, 2.0):
        watched.say(f"at {when:.0f}", when)
    assert [text for _, text in watched.sentences] == ["at 1", "at 2", "at 3"]


def test_of_many_evaluations_in_a_row_the_last_is_told() -> None:
    watched = ViewModel("r", ["a"])
    for step in (1, 2, 3):
        watched.event(Event(NOW, "a", "evaluation", {"step": step, "metrics": {"accuracy": step / 10}}))
    assert [text for _, text in watched.sentences] == [
        "evaluated at step 3: accuracy 30.00%, the best so far"
    ]


def test_a_mistake_in_the_view_leaves_lines(capsys: pytest.CaptureFixture[str]) -> None:
    class Wrong(ViewModel):
        def event(self, event: Event) -> None:
            raise ValueError(event.kind)

    view = FullScreen(Wrong("r", ["a"]), Doing(leaves="", interrupts=""))
    view.event(Event(NOW, "a", "sample", {}))
    view.status({"a": "running  step 1"})
    assert capsys.readouterr().out.splitlines() == [
        "the live view failed, lines follow: ValueError: sample",
        "a  running  step 1",
    ]


@pytest.mark.parametrize(
    ("is_asked", "num_lines"), [(True, 3), (False, 2)], ids=["followed", "in the background"]
)
def test_without_a_terminal_statuses_are_repeated_only_where_somebody_follows(
    is_asked: bool, num_lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_file, "PLAIN_STATUS_S", -1.0)
    rules = Rules(nodes=("a",), min_nodes=1, max_nodes=1)
    options = Options(inventory=Path("lab.yaml"), quiet=True)
    view = watch._view(cast(Run, None), rules, options, is_asked=is_asked)
    for line in ("running  step 1", "running  step 2", "orphaned"):
        view.status({"a": line})
    assert len(capsys.readouterr().out.splitlines()) == num_lines


def test_keys_are_told_from_what_a_terminal_sends() -> None:
    assert decode(b"q\x1b[A\x1bOB\r\x1b") == ["q", "up", "down", "enter", "esc"]
    assert decode(b"\x1b[1;5C12") == ["1", "2"], "one that is not known is left out whole"
    assert decode("é\x1b[5~".encode()) == ["é", "pageup"]
