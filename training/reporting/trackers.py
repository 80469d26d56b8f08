"""``--track`` for Weights & Biases and MLflow: rank 0 writes to a process that sends, and never waits for it."""

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
"""Name for ``--track``, which is also the library's → the service's full name."""
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
CLOSE_S = 10.0
"""Seconds to send the last points; less than the default ``--grace``."""
_MOST_WAITING = 10_000


def lacking(name: str | None, found: Collection[str]) -> str:
    """Return how to install the library that ``--track`` needs if it is not in ``found``; otherwise ""."""
    if name is None or name in found:
        return ""
    return f"--track {name} needs {name}: pip install {PACKAGES[name]} on every node, since rank 0 may come to any"


class Tracker:
    """The process that sends rank 0's metrics; the training goes on if the process ends or falls behind."""

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
        """Start the process, which imports the library and connects to the service.

        Args:
            service: one of `TRACKERS`.
            run_id: the same after a restart, so that the service continues the same run.
            folder: for files of the service's library.
            settings: of the run, for people.
            history: metrics.jsonl; lines of it that the service lacks are sent first.
            history_bytes: the size of its part from before this attempt.
        """
        self._service = service
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._has_warned = False
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
        # In a thread, since writing to a full pipe blocks.
        self._thread = threading.Thread(target=self._write, name="nodekit-tracker", daemon=True)
        self._thread.start()

    def add(self, values: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        self._put(json.dumps(values).encode() + b"\n")

    def close(self, *, is_trained: bool) -> None:
        """Let the process send the rest within `CLOSE_S`, and end it."""
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
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s is too slow: points are left out", TRACKERS[self._service])

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._queue.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except OSError:  # the process has ended, and printed why
            while self._queue.get() is not None:
                pass
