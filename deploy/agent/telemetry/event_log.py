"""Write a node's events and its status to ``events.jsonl``. Standard library only."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.hang import hang
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.agent.telemetry import guess
from nodekit.deploy.agent.telemetry.gpu_health import GpuHealth
from nodekit.deploy.agent.telemetry.notes import Notes
from nodekit.deploy.agent.telemetry.usage import Usage
from nodekit.deploy.host import current_status, files, schema
from nodekit.deploy.host.node import fence
from nodekit.deploy.host.schema import EndCause, EventKind, NodeStatus, WorkerFailure

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of Python 3.11

STATUS_INTERVAL_S = 1.0
MAX_STATUS_INTERVAL_S = 1.5  # if `look_soon` is not called
RESERVE_BYTES = 256 * 1024  # disk space set aside for the last events once the disk is full
MAX_RESULT_BYTES = 4096


class EventLog:
    """The node's events and current status on disk, and the thread that updates them while ranks run."""

    def __init__(self, spec: AgentSpec) -> None:
        self._folder = Path(spec.node_dir)
        self.progress_dir = self._folder / "progress"
        self.told_dir = self._folder / "told"
        self.flight_dir = self._folder / "flight"
        self._lock = threading.Lock()  # guards the status
        self._looking = threading.Lock()  # guards reading the ranks' files
        self._ended = threading.Event()
        self._is_asked = threading.Event()  # asks the thread to look
        self._looked = 0.0
        self._guessed_from = ""
        """The path of rank 0's log if that rank is on this node, else ""."""
        self._guesses: set[tuple[int | None, int | None]] = set()
        """Each (epoch, step) that this log has shown."""
        self._spec = spec
        self._status: NodeStatus = {
            "version": schema.VERSION,
            "state": "starting",
            "generation": spec.generation,
            "attempt": None,
            "rank": None,
            "world_size": None,
            "workers": [],
            "failures": [],
            "progress": None,
            "progress_time": None,
            "guess": None,
            "stage": "",
            "usage": None,
            "address": spec.local_addr,
        }
        self._reserve, self._has_reserve = self._folder / "reserve", False
        self._set_aside()
        self._ranks: set[int] | None = None  # of this attempt
        self.forget_progress()
        self._events = str(self._folder / "events.jsonl")
        self._status_file = current_status.StatusFile(self._events)
        files.end_torn_line(self._events)
        self.event("agent-started", version=schema.VERSION, pid=os.getpid(), address=spec.local_addr)
        self.gpus = GpuHealth(spec.gpus, self.event)
        usage = Usage(spec.env.get("GLOO_SOCKET_IFNAME", ""), self.gpus.usage)
        self._notes = Notes(
            say=self._noted,
            told=self.told_dir,
            snapshots=self.snapshot_dir,
            usage=usage.now,
            num_nodes=len(spec.nodes),
        )
        threading.Thread(target=self._watch_progress, name="status", daemon=True).start()

    @property
    def snapshot_dir(self) -> Path:
        """The folder where this node's ranks save snapshots."""
        return Path(self._spec.env.get("NODEKIT_SNAPSHOT_DIR") or self._folder / "snapshots")

    def make_snapshot_dir(self) -> None:
        """Make the snapshot folder, so that every script finds it in every kind of run.

        Raises:
            OSError: the folder cannot be made, or its parent, which all hosts share, does not exist.
        """
        fence.make_snapshot_folder(str(self.snapshot_dir), is_shared=self._is_shared)

    @property
    def expected_snapshot(self) -> str:
        """The last snapshot of this run that this node or the supervisor has seen, in words; "" if there is none.

        Raises:
            OSError: the node's own note of it cannot be read.
        """
        told = self._spec.env.get("NODEKIT_SNAPSHOT_EXPECTED", "")
        return str((files.load(str(self._folder / "saved.json")) or {}).get("words", told))

    def _noted(self, kind: EventKind, **fields: Any) -> None:
        self.event(kind, **fields)
        if kind == "snapshot":
            words = f"step {fields['step']} of generation {fields['generation']} was committed in {self.snapshot_dir}"
            with contextlib.suppress(OSError):  # the supervisor knows it from the event
                files.write_private(str(self._folder / "saved.json"), json.dumps({"words": words}).encode())

    @property
    def _is_shared(self) -> bool:
        return self._spec.env.get("NODEKIT_SNAPSHOT_SHARED", "") not in ("", "0")

    def begin(self, attempt: str, *, ranks: Collection[int], group_rank: int, log_of_rank_0: str) -> None:
        """Begin an attempt of these ranks, and forget the progress and messages of earlier ones."""
        self.forget_progress()
        with self._looking:
            self._ranks = {*ranks}
            self._guessed_from = log_of_rank_0 if group_rank == 0 else ""
            self._guesses = set()
            self._notes.begin(attempt, sees_snapshots=group_rank == 0 or not self._is_shared)

    def forget_progress(self) -> None:
        """Remove the progress files of an earlier attempt's ranks; make the folders that are missing.

        A clean-up of old files may have removed some in mid-run.
        """
        for name in ("logs", "progress", "told", "flight", "snapshots", "output"):
            (self._folder / name).mkdir(mode=0o700, exist_ok=True)
        with self._looking:
            for stale in self.progress_dir.iterdir():
                stale.unlink(missing_ok=True)
            self._ranks = None
        self._status.update({"progress": None, "progress_time": None, "stage": ""})

    def progress(self) -> dict[int, hang.Progress]:
        """Read the progress of this node's ranks, by rank.

        Numbers of no present rank are left out: a process that goes on may write under its rank of the last attempt
        until it learns its new one.
        """
        ranks, said = self._ranks, hang.read_progress(self.progress_dir)
        return said if ranks is None else {rank: each for rank, each in said.items() if rank in ranks}

    def cannot_be_told(self) -> bool:
        """Whether the ranks' files cannot be written now, so that their silence says nothing."""
        return bool(files.unwritable(str(self._folder)))

    def update(self, **changes: Unpack[NodeStatus]) -> None:
        """Change the status, and write it to disk if it differs, or if a state is given."""
        with self._lock:
            new: NodeStatus = {**self._status, **changes}
            if new != self._status or "state" in changes:
                self._status = new
                self._write(lambda: self._status_file.write({**self._which(), **new}))

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Append an event to the log."""
        line = json.dumps({**self._which(), "kind": kind, **fields}).encode() + b"\n"
        self._write(lambda: files.append_private(self._events, line))

    def _which(self) -> dict[str, Any]:
        return {"run": self._spec.run_id, "time": time.time(), "node": self._spec.name}

    def _write(self, write: Callable[[], None]) -> None:
        """Call `write`; if it fails, free the reserve and retry. Ignore errors: a full disk must not end the job."""
        try:
            write()
            if not self._has_reserve:
                self._set_aside(RESERVE_BYTES * 64)  # only with much free, or it would undo its own freeing
        except OSError as error:
            # Free the reserve, so that the end of the run can still be recorded.
            if not descriptors.are_used_up(error):
                self._reserve.unlink(missing_ok=True)
                self._has_reserve = False
            with contextlib.suppress(OSError):
                write()

    def _set_aside(self, free_bytes: int = 0) -> None:
        """Write the reserve file, to be freed when the disk is full, if `free_bytes` are free now."""
        with contextlib.suppress(OSError):
            room = os.statvfs(self._folder)
            if room.f_bavail * room.f_frsize >= free_bytes:
                files.write_private(str(self._reserve), bytes(RESERVE_BYTES))
                self._has_reserve = True

    def failed(self, failures: list[WorkerFailure]) -> None:
        """Record failed workers, as events and in the status."""
        for failure in failures:
            self.event("worker-failed", **failure)
        self.update(failures=[*self._status["failures"], *failures][-50:])

    def end(
        self,
        state: str,
        *,
        message: str = "",
        cause: EndCause = "",
        cure: str = "",
        no_progress: bool = False,
    ) -> None:
        """Write the last event and status.

        Args:
            state: the final state, such as "succeeded".
            message: why the agent ended.
            cause: the cause as a code.
            cure: what the user can do.
            no_progress: whether restarts have brought the job no further.
        """
        self._ended.set()
        self.look(is_last=True)
        self.gpus.close()
        result = self._result() if state == "succeeded" else {}
        told = {
            "message": message,
            "cause": cause,
            "cure": cure,
            "no_progress": no_progress,
            "result": result,
        }
        self.event("agent-ended", state=state, **{name: value for name, value in told.items() if value})
        changes: NodeStatus = {"state": state, "workers": [], "no_progress": no_progress}
        if self._status.get("copying"):
            changes["copying"] = False
        if message:
            changes["message"] = message
        if cause:
            changes["cause"] = cause
        if cure:
            changes["cure"] = cure
        self.update(**changes)

    def look(self, *, is_last: bool = False) -> None:
        """Read what the ranks report, and update the status once; record events and a usage sample if they are due."""
        with self._looking:
            self._looked = time.monotonic()
            changes = self._progress()
            usage = self._notes.look(
                str(changes.get("progress", self._status["progress"]) or ""),
                is_training=self._status["state"] == "running",
                is_last=is_last,
            )
            if usage is not None:
                changes["usage"] = usage
            self.update(**changes)

    def look_soon(self) -> None:
        """Have the status thread `look` now if a second has passed; a caller that is awake saves a later wake-up."""
        if time.monotonic() - self._looked > STATUS_INTERVAL_S * 0.9:
            self._is_asked.set()

    def _progress(self) -> NodeStatus:
        """Return the status fields of the progress, taken from the rank whose report is the oldest."""
        said = self.progress().values()
        if not said:
            # A clean-up may have removed the folder: the ranks write there again.
            with contextlib.suppress(OSError):
                self.progress_dir.mkdir(mode=0o700, exist_ok=True)
            # A guess is shown to the user only: it does not count as progress.
            found = guess.of_file(self._guessed_from) if self._guessed_from else None
            if found is not None:
                self._guesses.add((found["epoch"], found["step"]))
            return {"guess": found}
        least = min(said, key=lambda each: (each.mtime, each.text))
        if least.stage:
            return {"progress": None, "progress_time": None, "guess": None, "stage": least.stage}
        return {
            "progress": least.text.strip(),
            "progress_time": least.mtime,
            "guess": None,
            "stage": "",
        }

    @property
    def seems_to_train(self) -> bool:
        """Whether rank 0's log, if it is on this node, has shown two steps or epochs in this attempt."""
        return len(self._guesses) > 1

    def _result(self) -> dict[str, Any]:
        """Return the numbers and strings of ``output/result.json``, which the training module writes at its end."""
        # Any script may write this file, with any content.
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            text = (self._folder / "output" / "result.json").read_text(encoding="utf-8")
            found = json.loads(text) if len(text) < MAX_RESULT_BYTES else {}
            return {
                name: value
                for name, value in found.items()
                if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
            }
        return {}

    @property
    def gpu_clock(self) -> float | None:
        """The clock of the slowest GPU of this node's ranks, in MHz, as of the last sample; None if it is unknown."""
        gpus = (self._status.get("usage") or {}).get("gpus") or []
        clocks = [float(clock) for each in gpus if isinstance(clock := each.get("clock"), int | float)]
        return min(clocks, default=None)

    @property
    def step(self) -> int | None:
        """The step in the node's status; None if the ranks report no number."""
        return hang.Progress.parse(str(self._status["progress"] or ""), 0.0).step

    def _watch_progress(self) -> None:
        while not self._ended.is_set():
            self._is_asked.wait(MAX_STATUS_INTERVAL_S)
            self._is_asked.clear()
            if not self._ended.is_set():
                with contextlib.suppress(OSError):  # there may be no descriptor left for a while
                    self.look()
