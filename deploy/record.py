"""What an agent writes down: ``status.json`` (the present, replaced in one step), ``events.jsonl`` (the past).

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from nodekit.deploy import hang, remote
from nodekit.deploy.spec import AgentSpec

STATUS_INTERVAL_S = 0.5
RESERVE_BYTES = 256 * 1024


class Record:
    """The node's status and events on disk."""

    def __init__(self, spec: AgentSpec) -> None:
        self._folder = Path(spec.node_dir)
        self.progress_dir = self._folder / "progress"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._spec = spec
        self._status: dict[str, Any] = {
            "state": "starting",
            "generation": spec.generation,
            "attempt": None,
            "rank": None,
            "world_size": None,
            "workers": [],
            "failures": [],
            "progress": None,
            "progress_time": None,
        }
        self._reserve = self._folder / "reserve"
        with contextlib.suppress(OSError):
            remote.write_private(str(self._reserve), bytes(RESERVE_BYTES))
        for name in ("logs", "progress", "snapshots", "output"):
            (self._folder / name).mkdir(mode=0o700, exist_ok=True)
        self.forget_progress()
        self.event("agent-started", pid=os.getpid())
        threading.Thread(target=self._watch_progress, daemon=True).start()

    def forget_progress(self) -> None:
        """Remove what ranks of an earlier attempt said of theirs."""
        for stale in self.progress_dir.iterdir():
            stale.unlink(missing_ok=True)
        self._status.update(progress=None, progress_time=None)

    def update(self, **changes: Any) -> None:
        """Change the status; what did not change is not written."""
        with self._lock:
            new = {**self._status, **changes}
            if new != self._status or "state" in changes:
                self._status = new
                self._write(json.dumps({**new, "time": time.time()}).encode())

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        line = {
            "run": self._spec.run_id,
            "time": time.time(),
            "node": self._spec.name,
            "kind": kind,
            **fields,
        }
        with contextlib.suppress(OSError):  # a full disk must not end the job
            remote.append_private(str(self._folder / "events.jsonl"), json.dumps(line).encode() + b"\n")

    def failed(self, failures: list[dict[str, Any]]) -> None:
        """Record failures of workers."""
        for failure in failures:
            self.event("worker-failed", **failure)
        self.update(failures=[*self._status["failures"], *failures][-50:])

    def end(self, state: str, **changes: Any) -> None:
        """The last status."""
        self._ended.set()
        self.read_progress()
        self.event("agent-ended", state=state)
        self.update(state=state, **changes)

    def read_progress(self) -> None:
        """Take over what the ranks say of their progress: the least advanced one speaks for the node."""
        said = hang.read_progress(self.progress_dir).values()
        if said:
            changed, text = min((each.mtime, each.text.strip()) for each in said)
            self.update(progress=text, progress_time=changed)

    @property
    def step(self) -> int | None:
        """The step the node's least advanced rank has told of; None: it tells no number."""
        return hang.Progress.parse(str(self._status["progress"] or ""), 0.0).step

    def _write(self, data: bytes) -> None:
        path = str(self._folder / "status.json")
        try:
            remote.write_private(path, data)
        except OSError:
            # The disk is full: what was set aside for this is given up, so that the end can still be told.
            self._reserve.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                remote.write_private(path, data)

    def _watch_progress(self) -> None:
        while not self._ended.wait(STATUS_INTERVAL_S):
            self.read_progress()
