"""A program that sends the metrics that rank 0 writes to its stdin to W&B or MLflow (see `trackers.py`).

All restarts are one run: this asks the service for its last step and sends the later lines of metrics.jsonl. For steps
that are done again, the service keeps the first values, since neither service can replace any. Errors are printed once.
"""

import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from nodekit.training.reporting import metrics
from nodekit.training.reporting.trackers import TRACKERS

INIT_S = 60.0
MOST_SENT_LATER = 2_000
"""About the most lines of the history that a service gets at the start."""
_EVERY_S = 1.0
_MOST_KEPT = 50_000
_NOTE = ".tracked.json"


class Service(Protocol):
    """A run that is open at a service."""

    def reached(self) -> tuple[int, int]:
        """Return the last step and the last evaluation's step at the service; -1 if it has none or does not know."""

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """Send points, in the order of steps."""

    def close(self, *, is_trained: bool) -> None:
        """Close the run: as finished if ``is_trained``, otherwise so that it can be resumed later."""


class Wandb:
    """Weights & Biases, configured by its own variables (``WANDB_API_KEY``, ``WANDB_PROJECT``, ``WANDB_MODE`` …)."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            id=asked["run_id"],
            name=asked["run_id"],
            resume="allow",
            project=os.environ.get("WANDB_PROJECT") or "nodekit",
            dir=asked["folder"],
            config=asked["settings"],
            settings=wandb.Settings(init_timeout=INIT_S, silent=True, console="off", disable_git=True),
        )

    def reached(self) -> tuple[int, int]:
        # Offline, W&B does not know its last step. It ignores further values of a step that it has.
        step = int(getattr(self._run, "starting_step", 0) or 0) - 1
        return step, step

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:  # W&B sends in a process of its own, which retries
            self._run.log(metrics.scalars(line), step=line["step"])

    def close(self, *, is_trained: bool) -> None:
        # A run that is not finished is resumed by its id.
        self._run.finish(exit_code=0 if is_trained else 1)


class Mlflow:
    """MLflow, configured by its own variables (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME`` …)."""

    def __init__(self, asked: dict[str, Any]) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ValueError(
                "MLFLOW_TRACKING_URI is not set; name it in the inventory's job.secrets or job.env"
            )
        # By default, MLflow retries for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "nodekit"
        experiment = self._client.get_experiment_by_name(name)
        known = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tag = "nodekit.run_id"
        found = self._client.search_runs([known], f"tags.`{tag}` = '{asked['run_id']}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(known, run_name=asked["run_id"], tags={tag: asked["run_id"]})
            self._id = run.info.run_id
            settings = [Param(key, value[:500]) for key, value in asked["settings"].items()]
            self._client.log_batch(self._id, params=settings)

    def reached(self) -> tuple[int, int]:
        reached = [-1, -1]
        for name in self._client.get_run(self._id).data.metrics:
            kind = 1 if name.startswith("test/") else 0
            steps = [point.step for point in self._client.get_metric_history(self._id, name)]
            reached[kind] = max([reached[kind], *steps])
        return reached[0], reached[1]

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        points = [
            Metric(name, value, int(line["time"] * 1000), line["step"])
            for line in lines
            for name, value in metrics.scalars(line).items()
        ]
        for start in range(0, len(points), 1000):  # MLflow accepts at most 1,000 at once
            self._client.log_batch(self._id, metrics=points[start : start + 1000])

    def close(self, *, is_trained: bool) -> None:
        if is_trained:  # otherwise the run stays open
            self._client.set_terminated(self._id, "FINISHED")


_SERVICES: dict[str, Callable[[dict[str, Any]], Service]] = {"wandb": Wandb, "mlflow": Mlflow}


def main() -> int:
    """Send until stdin ends; the exit status is 1 if the service cannot be reached."""
    # Move stdin away, so that the services' libraries do not read it, nor ask questions there.
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    asked = json.loads(source.readline())
    name = TRACKERS[asked["service"]]
    waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(source, waiting), daemon=True).start()
    late = threading.Timer(INIT_S + 5, _give_up, args=(f"{name} did not answer within {INIT_S:.0f} s",))
    late.daemon = True
    late.start()
    try:
        service = _SERVICES[asked["service"]](asked)
        reached = service.reached()
    except Exception as error:  # the libraries have exception classes of their own
        _say(f"{name}: nothing is tracked: {first_line(error)}")
        return 1
    late.cancel()
    _Sender(service, name, Path(asked["folder"]) / _NOTE, asked["service"], reached).run(
        _history(asked), waiting
    )
    return 0


class _Sender:
    """Sends lines from a queue to a service, each step once."""

    def __init__(self, service: Service, name: str, note: Path, key: str, reached: tuple[int, int]) -> None:
        self._service = service
        self._name = name
        self._note = note
        self._key = key
        self._has_warned = False
        # W&B offline does not know its last step, but an earlier process on this node has noted it.
        self._last = list(map(max, reached, self._noted()))  # the last step, and the last evaluation's step
        self._kept: list[dict[str, Any]] = []

    def run(self, history: Sequence[dict[str, Any]], waiting: "queue.Queue[dict[str, Any] | None]") -> None:
        """Send the history, and then lines from ``waiting`` until a ``None`` comes."""
        self._take(history)
        is_trained = is_over = False
        while not is_over:
            self._flush()
            deadline = time.monotonic() + _EVERY_S
            while not is_over and (left_s := deadline - time.monotonic()) > 0:
                try:
                    line = waiting.get(timeout=left_s)
                except queue.Empty:
                    break
                if line is None:
                    is_over = True
                elif "end" in line:
                    is_trained = True
                else:
                    self._take([line])
        self._flush()
        try:
            self._service.close(is_trained=is_trained)
        except Exception as error:
            self._say(error)

    def _take(self, lines: Sequence[dict[str, Any]]) -> None:
        """Queue the lines whose steps were not sent yet."""
        for line in lines:
            kind = 1 if "test" in line else 0
            if line["step"] > self._last[kind]:
                self._last[kind] = line["step"]
                self._kept.append(line)
        del self._kept[:-_MOST_KEPT]

    def _flush(self) -> None:
        if not self._kept:
            return
        try:
            self._service.send(self._kept)
        # The service may come back: these points are sent again with the next ones.
        except Exception as error:
            self._say(error)
            return
        self._kept = []
        try:
            self._note.write_text(json.dumps({self._key: self._last}), encoding="utf-8")
        except OSError as error:
            self._say(error)

    def _noted(self) -> list[int]:
        try:
            step, evaluated = json.loads(self._note.read_text(encoding="utf-8"))[self._key]
            return [step, evaluated]
        except (OSError, ValueError, KeyError, TypeError):
            return [-1, -1]

    def _say(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _say(f"{self._name} takes no points at the moment, and the training goes on: {first_line(error)}")


def _history(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return lines from before this start: evaluations, and the steps that have all curves."""
    path = Path(asked["history"])
    lines = metrics.read(path, asked["history_bytes"]) if asked["history_bytes"] else []
    points = [line for line in lines if b'"samples_per_s": ' in line or b'"test": ' in line]
    return [json.loads(line) for line in metrics.thinned(points, MOST_SENT_LATER)]


def _read(source: IO[bytes], waiting: "queue.Queue[dict[str, Any] | None]") -> None:
    for line in source:
        try:
            waiting.put(json.loads(line))
        except ValueError:  # truncated by a kill
            break
    waiting.put(None)


def first_line(error: Exception) -> str:
    """Return an error in one line, without API keys and without the password that a service's URL may contain."""
    text = (str(error).strip().splitlines() or [""])[0]
    text = re.sub(r"//[^/@\s]*@", "//…@", text)
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        if secret := os.environ.get(name):
            text = text.replace(secret, "…")
    return f"{type(error).__name__}: {text[:300]}"


def _say(text: str) -> None:
    print(f"nodekit: {text}", file=sys.stderr, flush=True)


def _give_up(text: str) -> None:
    _say(f"nothing is tracked: {text}")
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
