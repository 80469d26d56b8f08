"""`--track`: real wandb (offline) and mlflow (a store of files): one run over a restart, and no harm by a dead one."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_curves import evaluation, values

from nodekit.deploy.plan.command import TRAINING_MODULE, refuse_options
from nodekit.inventory.errors import KitError
from nodekit.training.options.arguments import OptionsError, read
from nodekit.training.reporting import track
from nodekit.training.reporting.trackers import Tracker, lacking


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, own_home: Path, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no other store of its own


def records(path: Path) -> Iterator[bytes]:
    """Of a .wandb file: seven bytes, and then LevelDB's log format (github.com/google/leveldb, log_format.md)."""
    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # a block's trailer
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # full, last
            yield parts
            parts = b""


def wandb_steps(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Of all offline runs, in the order in which `wandb sync` would send them."""
    from wandb.proto import wandb_internal_pb2

    found: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project) == ("lab-1", "nodekit")
            items = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json)
                for each in record.history.item
            }
            step = found.setdefault(record.history.step.num, {}) if items else {}
            shown = {name: value for name, value in items.items() if not name.startswith("_")}
            assert not step.keys() & shown.keys(), "drawn twice"
            step.update(shown)
    return sorted(found.items())


def mlflow_steps(folder: Path) -> list[tuple[int, dict[str, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("nodekit")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["lr"] == "0.1"
    assert run.info.run_name == "lab-1"
    steps: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for each in client.get_metric_history(run.info.run_id, name):
            assert name not in steps.get(each.step, {}), "drawn twice"
            steps.setdefault(each.step, {})[name] = each.value
    return sorted(steps.items())


def attempt(
    service: str, folder: Path, lines: list[dict[str, Any]], *, history: int = 0, is_trained: bool = False
) -> Tracker:
    tracker = Tracker(
        service, run_id="lab-1", folder=folder, settings={"lr": 0.1, "data": None},
        history=folder / "metrics.jsonl", history_bytes=history,
    )  # fmt: skip
    for line in lines:
        tracker.add(line)
    tracker.close(is_trained=is_trained)
    return tracker


@pytest.mark.parametrize(("service", "steps"), [("wandb", wandb_steps), ("mlflow", mlflow_steps)])
@pytest.mark.slow
def test_one_run_over_a_restart(
    service: str, steps: Callable[[Path], list[tuple[int, dict[str, float]]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("nodekit.training.reporting.trackers.CLOSE_S", 100.0)
    points = [{**values(step, float(step)), "samples_per_s": 10.0} for step in range(1, 6)]
    first = attempt(service, tmp_path, [*points, evaluation(5, 0.5)])
    assert first._process.returncode == 0
    # It goes on after step 6, which was done and never sent; step 7 was not, and 4 and 5 come again.
    history = b"".join(
        json.dumps(each).encode() + b"\n" for each in [*points, {**points[0], "step": 6, "loss": 6.0}]
    )
    (tmp_path / "metrics.jsonl").write_bytes(history + b'{"step": 7, "of a later attempt": 0}\n')
    again = [{**values(step, -1.0, "0.1"), "samples_per_s": 10.0} for step in (4, 5, 6, 7)]
    second = attempt(service, tmp_path, [*again, evaluation(7, 0.7)], history=len(history), is_trained=True)
    assert second._process.returncode == 0
    more = {"train/lr": 0.1, "train/samples_per_s": 10.0}
    expected: dict[int, dict[str, float]] = {step: {"train/loss": step, **more} for step in range(1, 7)}
    expected[7] = {"train/loss": -1.0, **more}
    expected[5]["test/accuracy"], expected[7]["test/accuracy"] = 0.5, 0.7
    assert steps(tmp_path) == sorted(expected.items())


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a service that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_service_that_says_nothing_is_given_up(
    tmp_path: Path, mute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mute)
    monkeypatch.setattr("nodekit.training.reporting.trackers.CLOSE_S", 1.0)
    tracker = attempt("mlflow", tmp_path, [values(1, 1.0)] * 20_000)
    assert tracker._process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("service", "environ", "why"),
    [
        ("wandb", {"WANDB_MODE": "online"}, "Weights & Biases: nothing is tracked: .*No API key configured"),
        ("mlflow", {}, ""),
    ],
)
def test_the_training_goes_on_whatever_the_service_does(
    service: str, environ: dict[str, str], why: str, tmp_path: Path
) -> None:
    # In its own 10 s, a slow machine would hardly import the service's library.
    program = (
        "import runpy; from nodekit.training.reporting import trackers; trackers.CLOSE_S = 100.0; "
        "runpy.run_module('nodekit.training', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--epochs", "1", "--track", service, "--output", str(tmp_path / "o")],
        env={**os.environ, **environ, "NODEKIT_RUN_ID": "lab-1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if why:
        assert re.search(why, done.stderr), done.stderr
        assert done.stderr.count("nothing is tracked") == 1
        return
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("nodekit")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["test/accuracy"] > 0.5


class Flaky:
    """Refuses the first two batches."""

    def __init__(self) -> None:
        self.calls = 0
        self.sent: list[int] = []

    def reached(self) -> tuple[int, int]:
        return -1, -1

    def send(self, lines: Any) -> None:
        self.calls += 1
        if self.calls < 3:
            raise ConnectionError("no route\nto host")
        self.sent += [line["step"] for line in lines]

    def close(self, *, is_trained: bool) -> None:
        assert is_trained


def test_what_a_service_refuses_is_sent_again_and_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "_EVERY_S", 0.01)
    waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
    service = Flaky()
    sender = track._Sender(service, "MLflow", tmp_path / "note", "mlflow", (-1, -1))
    sender._take([values(1, 1.0)])
    sender._flush()
    sender._take([values(2, 1.0)])
    sender._flush()
    for line in (values(3, 1.0), {"end": True}, None):
        waiting.put(line)
    sender.run([], waiting)
    assert service.sent == [1, 2, 3]
    said = capsys.readouterr().err
    assert (
        said.count("takes no points at the moment, and the training goes on: ConnectionError: no route") == 1
    )
    assert json.loads((tmp_path / "note").read_text()) == {"mlflow": [3, -1]}


def test_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123abcd")
    error = ValueError("API request to https://me:hunter2@ml.example.org/api failed for 0123abcd\nmore")
    assert track.first_line(error) == "ValueError: API request to https://…@ml.example.org/api failed for …"


def test_bad_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="argument --track: invalid choice: 'wandbb'"):
        read(["--track", "wandbb"], {})
    assert lacking("wandb", ["mlflow"]).startswith("--track wandb needs wandb: pip install wandb on every")
    assert lacking(None, []) == lacking("mlflow", ["mlflow"]) == ""
    argv = ["python", "-u", *TRAINING_MODULE, "--track", "mlflow"]
    with pytest.raises(KitError, match="gpu2: --track mlflow needs mlflow"):
        refuse_options(argv, tmp_path, world_size=2, env={}, modules={"gpu1": ["mlflow"], "gpu2": []})


@pytest.mark.parametrize("written", ["", "[]", '{"key": 3}', '{"key": [1]}', "{}"])
def test_a_damaged_note_of_what_was_sent_counts_as_none(written: str, tmp_path: Path) -> None:
    """Then what the service itself has decides."""
    note = tmp_path / ".tracked.json"
    note.write_text(written)
    service: Any = None
    assert track._Sender(service, "service", note, "key", (4, 2))._last == [4, 2]
