"""What `kit bench` measures between lab hosts, and what it says of it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from agents import until
from kit_runs import Kit
from lab_hosts import on, processes, wait_until
from rich.console import Console

from nodekit.deploy.bench.netbench import (
    Measured,
    Pair,
    Reduced,
    rate_text,
    rounds,
    size_text,
    sizes,
    slow_links,
)
from nodekit.deploy.bench.netbench_report import heat_map, reduced_table, to_json, write_csv, write_png
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.plan.plan import NodePlan

GBIT = 1e9 / 8
NAMES = ("gpu1", "gpu2", "gpu3", "gpu4")


def pairs(
    slow: dict[tuple[str, str], float] | None = None, *, names: tuple[str, ...] = NAMES, rtt_s: float = 1e-4
) -> list[Pair]:
    """All at 9.4 Gb/s but those that are said."""
    return [
        Pair(source=a, target=b, bytes_per_s=(slow or {}).get((a, b), 9.4) * GBIT, rtt_s=rtt_s)
        for a in names
        for b in names
        if a != b
    ]


def of_node(name: str, rate: float, names: tuple[str, ...] = NAMES) -> dict[tuple[str, str], float]:
    return {(a, b): rate for a in names for b in names if a != b and name in (a, b)}


# --- pure parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 16])
def test_each_ordered_pair_has_its_turn_and_no_host_two_at_once(number: int) -> None:
    names = [f"n{i}" for i in range(number)]
    meetings = rounds(names)
    met = [pair for meeting in meetings for pair in meeting]
    assert sorted(met) == sorted((a, b) for a in names for b in names if a != b)
    for meeting in meetings:
        assert len({name for pair in meeting for name in pair}) == 2 * len(meeting)
    assert len(meetings) == 2 * (number - 1 + number % 2)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({}, []),
        ({("gpu3", "gpu1"): 6.0}, []),
        (
            {("gpu3", "gpu1"): 0.94},
            ["gpu3 → gpu1: 0.94 Gb/s; the median of the others is 9.4 Gb/s"],
        ),
        (
            of_node("gpu2", 0.94),
            ["gpu2: all its links are slow, 0.94 Gb/s in the median; the median of the others is 9.4 Gb/s"],
        ),
        (
            {("gpu2", other): 0.94 for other in NAMES if other != "gpu2"},
            [
                "gpu2: all links from it are slow, 0.94 Gb/s in the median; the median of the others is 9.4 Gb/s"
            ],
        ),
        (
            {(other, "gpu2"): 0.094 for other in NAMES if other != "gpu2"},
            ["gpu2: all links to it are slow, 94 Mb/s in the median; the median of the others is 9.4 Gb/s"],
        ),
        (
            {**of_node("gpu2", 0.94), ("gpu1", "gpu4"): 2.5},
            [
                "gpu2: all its links are slow, 0.94 Gb/s in the median; the median of the others is 9.4 Gb/s",
                "gpu1 → gpu4: 2.5 Gb/s; the median of the others is 9.4 Gb/s",
            ],
        ),
    ],
)
def test_a_slow_node_is_told_from_a_slow_link(slow: dict[tuple[str, str], float], said: list[str]) -> None:
    assert [found.text for found in slow_links(pairs(slow))] == said


def test_two_slow_nodes_are_both_named() -> None:
    names = (*NAMES, "gpu5", "gpu6")
    slow = of_node("gpu2", 0.5, names) | of_node("gpu5", 1.0, names)
    assert {found.node for found in slow_links(pairs(slow, names=names))} == {"gpu2", "gpu5"}


def test_of_two_hosts_one_way_is_compared_with_the_other() -> None:
    found = slow_links(pairs({("gpu2", "gpu1"): 0.94}, names=NAMES[:2]))
    assert [each.text for each in found] == ["gpu2 → gpu1: 0.94 Gb/s; the way back 9.4 Gb/s"]
    assert slow_links(pairs(of_node("gpu1", 0.1, NAMES[:2]), names=NAMES[:2])) == []


def test_a_node_far_from_all_others_is_named() -> None:
    found = [
        Pair(
            source=pair.source,
            target=pair.target,
            bytes_per_s=pair.bytes_per_s,
            rtt_s=0.02 if "gpu4" in (pair.source, pair.target) else 1e-4,
        )
        for pair in pairs()
    ]
    (far,) = slow_links(found)
    assert far.text == (
        "gpu4: all its links are far, 20.00 ms there and back in the median; the median of the others is "
        "0.10 ms there and back"
    )


def test_a_tenth_of_a_millisecond_more_is_not_far() -> None:
    found = [
        Pair(source=a, target=b, bytes_per_s=GBIT, rtt_s=2e-4 if a == "gpu1" else 2e-5)
        for a in NAMES
        for b in NAMES
        if a != b
    ]
    assert slow_links(found) == []


def test_bus_bandwidth_is_as_nccl_tests_define_it() -> None:
    point = Reduced(backend="gloo", num_ranks=4, size_bytes=1000, seconds=0.5)
    assert (point.algbw, point.busbw) == (2000, 3000)


def test_sizes_go_in_powers_of_four() -> None:
    assert sizes(1 << 30) == [1 << power for power in range(10, 31, 2)]
    assert sizes(100_000) == [1024, 4096, 16384, 65536]


def test_rates_and_sizes_are_read_at_a_glance() -> None:
    shown = [rate_text(bits / 8) for bits in (0.94e9, 9.412e9, 412e9, 94e6, 1.5e6, 20e3)]
    assert shown == ["0.94 Gb/s", "9.41 Gb/s", "412 Gb/s", "94 Mb/s", "1.5 Mb/s", "20 kb/s"]
    assert [size_text(size) for size in (1024, 4 << 20, 1 << 30)] == ["1 KiB", "4 MiB", "1 GiB"]


def node(name: str) -> NodePlan:
    return NodePlan(
        name=name, node_rank=0, min_nodes=1, max_nodes=1, nproc_per_node=1, master_addr="", master_port=0,
        interface="eth0", local_addr="10.0.0.1", gpus=(), max_restarts=0, env={}, secrets=(), argv=(), python="",
        code_dir="", node_dir="", kit_dir="",
    )  # fmt: skip


@pytest.fixture
def measured() -> Measured:
    found = pairs({("gpu3", "gpu1"): 0.94}, names=NAMES[:3])
    found[0] = Pair(source="gpu1", target="gpu2", problem="no connection to 10.0.0.2:4711: refused")
    points = [
        Reduced(backend="gloo", num_ranks=3, size_bytes=size, seconds=size / GBIT) for size in sizes(1 << 20)
    ]
    return Measured(nodes=tuple(node(name) for name in NAMES[:3]), pairs=tuple(found), reduced=tuple(points))


def rendered(what: Any, *, terminal: bool, width: int = 100) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system="256" if terminal else None
    )
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_heat_map_is_plain_numbers_without_a_terminal(measured: Measured) -> None:
    text = rendered(heat_map(measured, colours=False), terminal=False)
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["gpu1", "·", "×", "9.40"],
        ["gpu2", "9.40", "·", "9.40"],
        ["gpu3", "0.94", "9.40", "·"],
    ]
    assert "\x1b" not in text


def test_the_heat_map_has_colours_in_a_terminal(measured: Measured) -> None:
    text = rendered(heat_map(measured), terminal=True)
    assert "\x1b[38;5;231;48;5;54m" in text  # the slow one: white on dark violet
    assert "\x1b[38;5;16;48;5;228m" in text  # the others: black on yellow
    assert (
        max(len(line) for line in rendered(heat_map(measured, colours=False), terminal=False).splitlines())
        < 100
    )


@pytest.mark.parametrize(("number", "fits"), [(20, True), (60, False)])
def test_many_hosts_are_blocks_as_far_as_there_is_room(number: int, fits: bool) -> None:
    names = tuple(f"gpu{i}" for i in range(number))
    many = Measured(nodes=tuple(node(name) for name in names), pairs=tuple(pairs(names=names)))
    text = rendered(heat_map(many, width=100), terminal=False)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert ("--png FILE" in text) != fits


def test_the_table_of_the_all_reduce_fits(measured: Measured) -> None:
    text = rendered(reduced_table(measured.reduced), terminal=False)
    assert "1 MiB  8.39 ms   1.00   1.33  ████████████████████████" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_csv_and_json_have_every_pair(measured: Measured, tmp_path: Path) -> None:
    write_csv(measured, tmp_path / "pairs.csv")
    rows = list(csv.DictReader((tmp_path / "pairs.csv").read_text("utf-8").splitlines()))
    assert len(rows) == 6
    assert rows[0] == {
        "source": "gpu1",
        "target": "gpu2",
        "bits_per_s": "",
        "round_trip_s": "",
        "problem": "no connection to 10.0.0.2:4711: refused",
    }
    assert rows[4]["bits_per_s"] == "940000000"
    told = json.loads(json.dumps(to_json(measured)))
    assert told["slow"][0]["links"] == [["gpu3", "gpu1"]]
    assert told["all_reduce"][-1]["busbw_bytes_per_s"] == pytest.approx(GBIT * 4 / 3)


def test_a_picture_is_drawn(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_png(measured, tmp_path / "network.png") == ""
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
    alone = dataclasses.replace(measured, nodes=measured.nodes[:1], pairs=())
    assert write_png(alone, tmp_path / "curve.png") == ""
    nothing = dataclasses.replace(alone, reduced=())
    assert "is not written: one host has no pairs" in write_png(nothing, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "kit: which hosts?"),
        (["--plan", "7B", "--link", "1Gb"], "needs --step-time S"),
        (["--link", "1Gb"], "give --plan MODEL, too"),
        (["--plan", "7B", "--step-time", "-1", "--link", "1Gb"], "--step-time -1.0: wanted a number above 0"),
        (["--plan", "7B", "--step-time", "1", "--link", "fast"], "--link fast: wanted a rate"),
        (["--plan", "job", "--link", "1Gb"], "--plan job: whose?"),
        (["no-such.yaml"], "no such file"),
    ],
)
def test_what_is_asked_wrongly_is_told_in_a_line(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from nodekit.deploy.commands import cli

    assert cli.main(["bench", *args]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_forecast_needs_no_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    from nodekit.deploy.commands import cli

    asked = ["bench", "--plan", "110e6", "--step-time", "0.4", "--link", "1Gb", "--nodes", "2"]
    assert cli.main([*asked, "--batch", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "110 M parameters, 440 MB of gradients, 0.4 s a step on one node, the same batch on each of more"
    )
    assert next(line for line in lines if line.startswith("ddp")).split() == [
        "ddp", "0.4", "s", "80/s", "3.7", "s", "0.11", "17/s",
    ]  # fmt: skip
    assert lines[-1].endswith("stay on one node, or use --diloco 100: 0.92")
    assert cli.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["plan"]
    assert told["recommendation"] == lines[-1]
    assert {each["num_nodes"] for each in told["forecasts"]} == {1, 2}


# --- on hosts -----------------------------------------------------------------------------------------------


def told(kit: Kit, *args: str, status: int = 0) -> dict[str, Any]:
    done = kit.run("bench", str(kit.inventory()), "--json", *args)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.lab
def test_a_slow_host_is_found_at_its_rate(kit: Kit, lab: Lab) -> None:
    lab.slow("node3", rate_mbit=40)
    before = {host: processes(lab, host) for host in lab.hosts}
    found: dict[str, Any] = {}

    def is_as_it_is() -> bool:
        found.update(
            told(kit, "--seconds", "0.5", "--max-size", "64KiB", "--plan", "1M", "--step-time", "0.1")
        )
        assert len(found["pairs"]) == 6
        assert "node3" in [slow["node"] for slow in found["slow"]]
        assert [point["size_bytes"] for point in found["all_reduce"]] == [1 << 10, 1 << 12, 1 << 14, 1 << 16]
        is_right = [slow["node"] for slow in found["slow"]] == ["node3"]
        for pair in found["pairs"]:
            mbit = pair["bits_per_s"] / 1e6
            if "node3" in (pair["source"], pair["target"]):
                assert mbit < 60, pair
                is_right &= mbit > 15
            else:
                is_right &= mbit > 150
            is_right &= 0 < pair["round_trip_s"] < 0.5
        # No faster than the link, and no slower than a tenth of it.
        busbw = found["all_reduce"][-1]["busbw_bytes_per_s"]
        assert busbw < 10e6
        return is_right and busbw > 0.5e6

    # Where the machine has stood still meanwhile, less has arrived: then again.
    until(is_as_it_is, timeout_s=150, what="the rate of each link")
    assert {each["num_nodes"] for each in found["plan"]["forecasts"]} == {1, 2, 3}
    assert found["nodes"]["node2"]["interface"] == lab.hosts["node2"].interface
    wait_until(lambda: all(processes(lab, host) <= own for host, own in before.items()), what="nothing left")


FIREWALL = (
    "add table inet t; add chain inet t c {{ type filter hook output priority 0; }}; add rule inet t c {}"
)


@pytest.mark.lab
def test_a_link_that_is_slow_one_way_is_named(kit: Kit, lab: Lab) -> None:
    def is_named_alone() -> bool:
        found = told(kit, "--seconds", "2", "--time-limit", "0")
        assert found["all_reduce"] == []
        slow = [(each["node"], each["links"]) for each in found["slow"]]
        return slow == [(None, [["node3", "node1"]])] and found["slow"][0]["text"].startswith(
            "node3 → node1: "
        )

    over = "limit rate over 3 mbytes/second burst 500 kbytes drop"
    on(lab, "node3", "nft", FIREWALL.format(f"ip daddr {lab.hosts['node1'].address} {over}"))
    try:
        # The others carry what the cores give them, which on a busy machine may be little: then again.
        until(is_named_alone, timeout_s=150, what="no other slow link")
    finally:
        on(lab, "node3", "nft", "delete", "table", "inet", "t")


@pytest.mark.lab
def test_a_pair_without_a_connection_is_named(kit: Kit, lab: Lab) -> None:
    address = lab.hosts["node1"].address
    on(lab, "node3", "nft", FIREWALL.format(f"ip daddr {address} tcp flags & (syn|ack) == syn drop"))
    try:
        done = kit.run("bench", str(kit.inventory()), "--seconds", "0.2", "--plan", "1M", "--step-time", "1")
    finally:
        on(lab, "node3", "nft", "delete", "table", "inet", "t")
    assert done.returncode == 1
    assert f"node3 → node1: no connection to {address}:" in done.stdout
    assert "no all-reduce" in done.stdout
    assert "no forecast" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.lab
@pytest.mark.parametrize("phase", ["pairs", "all-reduce"])
def test_ctrl_c_leaves_nothing_on_the_hosts(kit: Kit, lab: Lab, phase: str) -> None:
    before = {host: processes(lab, host) for host in lab.hosts}
    seconds = "20" if phase == "pairs" else "0.1"
    kit.start("bench", str(kit.inventory()), "--seconds", seconds)
    kit.wait_for(f"measuring {phase}")
    wait_until(lambda: processes(lab, "node2") - before["node2"], what="something runs")
    kit.started[-1].send_signal(signal.SIGINT)
    assert kit.started[-1].wait(60) == 130
    wait_until(lambda: all(processes(lab, host) <= own for host, own in before.items()), what="nothing left")
    assert not kit.leftovers()


OWN_TASK = """
import torch

class Task:
    def model(self):
        return torch.nn.Linear(30, 10)
    def train_data(self):
        return [torch.randn(30) for _ in range(64)]
    test_data = train_data
    def loss(self, model, batch):
        return model(batch).square().mean()
    def measure(self, model, batch):
        return {"loss": 0.0}
"""


@pytest.mark.lab
def test_the_jobs_own_model_is_counted_and_its_step_timed(kit: Kit, lab: Lab) -> None:
    (kit.folder / "own.py").write_text(OWN_TASK)
    command = ["-m", "nodekit.training", "--task", "own.py:Task", "--batch-size", "32"]
    inventory = kit.inventory(job={"command": command})
    asked = ["--json", "--seconds", "0.1", "--max-size", "4KiB", "--plan", "job"]
    done = kit.run("bench", str(inventory), *asked)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)["plan"]
    assert planned["num_parameters"] == 310
    assert planned["step_s"] > 0
    (one,) = {each["samples_per_s"] for each in planned["forecasts"] if each["num_nodes"] == 1}
    assert one == pytest.approx(11 / planned["step_s"])  # a third of the batch, on each of three nodes
    assert "bench-" not in on(lab, "node1", "ls", "/root/nodekit")
    (kit.folder / "own.py").write_text("import no_such_module")
    done = kit.run("bench", str(inventory), *asked, "--time-limit", "0")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert len(told["pairs"]) == 6
    assert "node1: the job's steps could not be tried" in told["problems"][0]
    assert "bench-" not in on(lab, "node1", "ls", "/root/nodekit")


@pytest.mark.slow
def test_without_hosts_the_step_is_timed_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nodekit.deploy.commands import cli

    (tmp_path / "own.py").write_text(OWN_TASK)
    command = ["-m", "nodekit.training", "--task", "own.py:Task", "--accumulate", "4"]
    hosts = {name: {"connection": "local"} for name in ("a", "b")}
    inventory = {"name": "x", "hosts": hosts, "job": {"command": command, "code": str(tmp_path)}}
    (tmp_path / "x.yaml").write_text(json.dumps(inventory))
    asked = ["bench", str(tmp_path / "x.yaml"), "--plan", "job", "--link", "1Gb", "--json"]
    assert cli.main(asked) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    assert planned["num_parameters"] == 310
    powersgd = next(
        each for each in planned["forecasts"] if "powersgd" in each["way"] and each["num_nodes"] == 2
    )
    # 40 numbers of the matrix and 10 of the bias, of 4 bytes; three messages, each of two stations
    assert powersgd["exchange_s"] == pytest.approx(3 * 2e-4 + 200 / 125e6, rel=1e-3)
    (tmp_path / "own.py").write_text("import no_such_module")
    assert cli.main(asked) == 1
    assert "this machine: the job's steps could not be tried: " in capsys.readouterr().err


def test_a_job_that_only_its_script_knows_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nodekit.deploy.commands import cli

    inventory = {
        "name": "x",
        "hosts": {"a": {"connection": "local"}},
        "job": {"command": ["train.py"], "code": str(tmp_path)},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(inventory))
    assert cli.main(["bench", str(tmp_path / "x.yaml"), "--plan", "job", "--link", "1Gb"]) == 1
    assert "only that knows its model; give the number of parameters" in capsys.readouterr().err
