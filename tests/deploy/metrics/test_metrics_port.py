"""`kit up --metrics-port`: scraped over HTTP, and read by Prometheus' own parser."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import strangers
from free_ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from nodekit.deploy.commands.cli import main
from nodekit.deploy.host import accept
from nodekit.deploy.metrics.metrics_port import MetricsPort, Place, check, serve
from nodekit.deploy.records import runs
from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError

RUN = Run(
    run_id="lab-1", name="lab", inventory_path="/lab.yaml", inventory={}, command=None, created=0.0, generation=1,
    nodes={"gpu1": {}, "gpu2": {}}, clock_offsets={"gpu1": 100.0},
)  # fmt: skip
USAGE = {
    "cpu": 0.25, "memory": 4e9, "memory_total": 8e9, "interface": "ib0", "received": 1000, "sent": None,
    "gpus": [{"index": 0, "use": 0.97, "memory": 5e9, "memory_total": 6e9, "temperature": 92, "clock": 900,
              "power": 310, "slow": ["hw_thermal_slowdown"], "uncorrectable": 0},
             {"index": 3, "use": None, "memory": 1}],
}  # fmt: skip


def scrape(place: Place) -> dict[tuple[str, ...], float]:
    """(name, the labels' values but for the run's …) → value."""
    with urllib.request.urlopen(place.url, timeout=60) as answer:  # 10 s are hardly more than a stall
        text = answer.read().decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "lab-1"
            assert sample.name.startswith("nodekit_")
            assert sample.name.endswith("_total") == (family.type == "counter")
            values = (labels[name] for name in sorted(labels, key=lambda name: name != "node"))
            found[(sample.name.removeprefix("nodekit_"), *values)] = sample.value
    return found


def test_what_the_nodes_and_the_events_say_is_served() -> None:
    place, said = Place(free_port()), list[str]()
    (observer,) = serve(RUN, place, said.append)
    assert said == [f"metrics for Prometheus at http://127.0.0.1:{place.port}/metrics"]
    try:
        now = time.time()
        status = {
            "alive": True, "state": "running", "progress": "120/500 epoch 1 loss 0.52", "snapshot": [1, 100],
            "progress_time": now + 100 - 7, "usage": USAGE,
        }  # fmt: skip
        observer.see(
            {
                "gpu1": status,
                "gpu2": {"alive": False, "state": "failed", "progress": "140/500", "usage": USAGE},
            }
        )
        kinds: list[tuple[float, str | None, str, dict[str, Any]]] = [
            (0, None, "run-started", {"generation": 0, "nodes": ["gpu1", "gpu2"]}),
            (10, "gpu1", "rendezvous", {"attempt": "0.0", "members": ["gpu1", "gpu2"]}),
            (20, "gpu1", "first-step", {"attempt": "0.0", "step": 1}),
            (50, "gpu1", "evaluation", {"attempt": "0.0", "step": 50, "metrics": {"accuracy": 0.5}}),
            (60, "gpu1", "evaluation", {"attempt": "0.0", "step": 60, "metrics": {"accuracy": 0.75}}),
            (80, "gpu1", "attempt-ended", {"attempt": "0.0", "step": 100}),
            (85, "gpu1", "rendezvous", {"attempt": "0.1", "members": ["gpu1"]}),
            (90, "gpu1", "first-step", {"attempt": "0.1", "step": 101}),
        ]
        for age, node, kind, fields in kinds:
            observer.event(Event(now - 100 + age, node, kind, fields))
        found = scrape(place)
    finally:
        observer.close()
    since_s = found.pop(("node_seconds_since_progress", "gpu1"))
    assert 6.9 <= since_s <= 7.1 + time.time() - now
    assert 0 < found.pop(("goodput_ratio",)) < 1
    assert found.pop(("lost_seconds", "start")) == pytest.approx(20, abs=1)
    assert {
        name: value for name, value in found.items() if name[0] not in ("lost_seconds", "events_total")
    } == {
        ("step",): 120,
        ("target_step",): 500,
        ("loss",): 0.52,
        ("generation",): 1,
        ("restarts_total",): 1,
        ("snapshot_step",): 100,
        ("evaluation", "accuracy"): 0.75,
        ("node_up", "gpu1"): 1,
        ("node_up", "gpu2"): 0,
        ("node_state", "gpu1", "running"): 1,
        ("node_state", "gpu2", "failed"): 1,
        ("node_cpu_ratio", "gpu1"): 0.25,
        ("node_memory_bytes", "gpu1"): 4e9,
        ("node_memory_size_bytes", "gpu1"): 8e9,
        ("node_network_receive_bytes_per_second", "gpu1", "ib0"): 1000,
        ("gpu_utilization_ratio", "gpu1", "0"): 0.97,
        ("gpu_memory_bytes", "gpu1", "0"): 5e9,
        ("gpu_memory_bytes", "gpu1", "3"): 1,
        ("gpu_memory_size_bytes", "gpu1", "0"): 6e9,
        ("gpu_temperature_celsius", "gpu1", "0"): 92,
        ("gpu_clock_megahertz", "gpu1", "0"): 900,
        ("gpu_power_watts", "gpu1", "0"): 310,
        ("gpu_ecc_uncorrectable", "gpu1", "0"): 0,
        ("gpu_slowed", "gpu1", "0", "hw_thermal_slowdown"): 1,
    }
    assert found["events_total", "evaluation"] == 2
    with pytest.raises(urllib.error.URLError):  # it is over
        urllib.request.urlopen(place.url, timeout=2)


def test_a_run_of_which_nothing_is_known_yet_is_served_too() -> None:
    place = Place(free_port())
    observer = MetricsPort(RUN, place)
    try:
        assert scrape(place)["node_up", "gpu1"] == 0
    finally:
        observer.close()


def test_strangers_who_ask_for_nothing_keep_nobody_from_an_answer() -> None:
    place = Place(free_port())
    observer = MetricsPort(RUN, place)
    try:
        with strangers.silent(place.port, 2 * accept.MOST_UNPROVEN):
            assert scrape(place)
    finally:
        observer.close()


def test_a_port_in_use_is_refused_and_hurts_nothing_later() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))  # which nobody's connection has, when it is free again
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            KitError, match=rf"--metrics-port {port}: .*Address already in use.*a port of its own"
        ):
            check(Place(port))
        said: list[str] = []
        assert serve(RUN, Place(port), said.append) == []
        assert said == [f"no metrics at http://127.0.0.1:{port}/metrics: Address already in use"]
    check(Place(port))


def test_kit_up_refuses_before_anything_starts(
    own_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["up", "local", "--metrics-port", str(taken.getsockname()[1])]) == 1
    assert "is another run's there?" in capsys.readouterr().err
    slurm = tmp_path / "slurm.yaml"
    slurm.write_text("name: c\nslurm: {nodes: 1, shared_dir: ~/n}\n")
    assert main(["up", str(slurm), "-d", "--metrics-port", "9000"]) == 1
    assert "under Slurm nothing of kit stays on this machine" in capsys.readouterr().err
    assert main(["up", str(slurm), "--metrics-port", "9000", "--sweep", "lr=1,2"]) == 1
    assert "--metrics-port serves one run, and this is a sweep" in capsys.readouterr().err
    assert main(["up", str(slurm), "--dry-run", "--metrics-port", "0"]) == 2
    assert "--metrics-port: found 0, wanted a number from 1 to 65535" in capsys.readouterr().err
    assert runs.all_runs() == []


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(9000, "192.0.2.1"), "cannot serve at 192.0.2.1"),
        (Place(9000, "all"), "--metrics-address all is no address; give an address"),
    ],
)
def test_what_cannot_be_is_refused(place: Place, words: str) -> None:
    with pytest.raises(KitError, match=words):
        check(place)
