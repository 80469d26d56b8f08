"""Weights & Biases and MLflow, by ``--track``: rank 0 tells a process of its own, and never waits for it."""

import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("nodekit.training")

TRACKERS = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
"""The name of the service, of its library and of nodekit's extra → what people call it."""
CLOSE_S = 10.0
"""For the last points; within the grace that a stop has."""
_MOST_WAITING = 10_000


def lacking(name: str | None, found: Collection[str]) -> str:
    """What ``--track`` lacks where there are only these libraries, and how to get it; "" where there is all."""
    if name is None or name in found:
        return ""
    return f"--track {name} needs {name}: pip install 'nodekit[{name}]' on every node, since rank 0 may come to any"


class Tracker:
    """The process that sends what rank 0 tells; if it ends, or falls behind, the training does not notice."""

    def __init__(
        self,
        service: str,
        *,
        run_id: str,
        folder: Path,
        settings: Mapping[str, Any],
        history: Path,
        history_bytes: int,
    ) -> None:
        """Start it; the import and the service's answer are waited for over there.

        Args:
            service: one of `TRACKERS`.
            run_id: the same after a restart, so that the service goes on with the same run.
            folder: for what the service's library writes.
            settings: of the run, for people.
            history: metrics.jsonl: what the service lacks of it is sent first.
            history_bytes: how much of it was there before.
        """
        self._service = service
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._told = False
        first = {
            "service": service,
            "run_id": run_id,
            "folder": str(folder),
            "settings": {name: str(value) for name, value in settings.items() if value is not None},
            "history": str(history),
            "history_bytes": history_bytes,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nodekit.training.reporting.track"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self._queue.put(json.dumps(first).encode() + b"\n")
        # A thread, since a pipe whose reader is stuck takes nothing more.
        self._thread = threading.Thread(target=self._write, name="nodekit-tracker", daemon=True)
        self._thread.start()

    def add(self, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self._put(json.dumps(values).encode() + b"\n")

    def close(self, *, is_trained: bool) -> None:
        """Let it send the rest, for a while, and end it."""
        if is_trained:
            self._put(b'{"end": true}\n')
        self._put(None)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            log.warning("%s did not take the last points within %.0f s", TRACKERS[self._service], CLOSE_S)

    def _put(self, line: bytes | None) -> None:
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            if not self._told:
                self._told = True
                log.warning("%s is too slow: points are left out", TRACKERS[self._service])

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._queue.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except OSError:  # it has ended, and said why
            while self._queue.get() is not None:
                pass
