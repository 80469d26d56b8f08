"""Record what happens on a node while its ranks train: usage samples, first steps, snapshots, the ranks' own events.

Standard library only. The longer a run, the less often it is sampled (see `pause_s`), and snapshots between two events
are summed up, so that a run's events stay small.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nodekit.deploy.agent.hang import hang
from nodekit.deploy.host.schema import Say, Usage
from nodekit.training.measures import is_least_best

SAMPLE_S = 2.0
SAMPLES_A_WEEK = 20_000
"""The most samples in a week, roughly, of all nodes together: each takes half a kilobyte."""
SLOWER = 0.03  # the pause between two samples, as a share of the time since the agent began
MAX_TOLD_BYTES = 4096  # of one line that a rank writes; longer ones are ignored
MAX_TOLD_AGE_S = 60.0  # how old a rank's time may be to be used for the event
_READ_BYTES = 1 << 20  # of one rank's file at a time
_MAX_VALUE = 1e300  # a larger int could not become a float
_LOSS = re.compile(r"\bloss[ =:]+([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
_TOTAL = re.compile(r"\s*\d+\s*/\s*(\d+)")
_MANIFEST = re.compile(r"g(\d{4,})-s(\d{9,})\.json", re.ASCII)


def pause_s(elapsed_s: float, num_nodes: int) -> float:
    """Return the seconds between two samples of a node, `elapsed_s` after its agent began."""
    return min(max(SAMPLE_S, elapsed_s * SLOWER), 7 * 86_400 / SAMPLES_A_WEEK * max(1, num_nodes))


class Told(TypedDict):
    """The numbers in a rank's progress report; None for those that it lacks."""

    step: int | None
    total_steps: int | None
    loss: float | None


def parse_progress(text: str) -> Told:
    """Parse the text of a rank's progress report."""
    total, loss = _TOTAL.match(text), _LOSS.search(text)
    value = float(loss[1]) if loss else None
    return {
        "step": hang.Progress.parse(text, 0.0).step,
        "total_steps": int(total[1]) if total else None,
        "loss": value if value is not None and math.isfinite(value) else None,
    }


def _without_what_stays(sample: Usage) -> dict[str, Any]:
    """Return a sample for an event: without the constants of each GPU, which only the status has, and empty lists."""
    gpus = [
        {
            name: value
            for name, value in gpu.items()
            if name not in ("clock_max", "power_limit") and value not in ([],)
        }
        for gpu in sample.get("gpus", ())
    ]
    return {**sample, "gpus": gpus} if gpus else {**sample}


class Notes:
    """Looks at a node's ranks when called, every second or so, and records events for what is new."""

    def __init__(
        self,
        *,
        say: Say,
        told: Path,
        snapshots: Path,
        usage: Callable[[], Usage],
        num_nodes: int,
    ) -> None:
        """Begin without an attempt.

        Args:
            say: called as ``say(kind, **fields)`` to record an event.
            told: the folder of the files in which ranks write events (``$NODEKIT_EVENTS_FILE``).
            snapshots: the folder where snapshots are committed.
            usage: returns a sample of the node's usage.
            num_nodes: of the run.
        """
        self._say = say
        self._told = told
        self._snapshots = snapshots
        self._usage = usage
        self._num_nodes = num_nodes
        self._began = self._measured = time.monotonic()
        self._due = {"sample": 0.0, "snapshot": 0.0, "evaluation": 0.0}
        self._attempt = ""
        self._has_stepped, self._sees_snapshots = True, False
        self._offsets: dict[str, int] = {}
        self._known: set[str] = set()
        self._known = self._manifests()
        self._num_saved, self._paused_s, self._newest = 0, 0.0, ""
        self._best: dict[str, tuple[float, float]] = {}

    def begin(self, attempt: str, *, sees_snapshots: bool) -> None:
        """Begin an attempt, and remove what ranks of an earlier one have written.

        Args:
            attempt: its name in events.
            sees_snapshots: whether this node reports snapshots; of nodes that share the folder, only one must.
        """
        self._attempt, self._has_stepped, self._sees_snapshots = attempt, False, sees_snapshots
        self._known = self._manifests()
        self._offsets = {}
        with contextlib.suppress(OSError):
            for stale in self._told.iterdir():
                stale.unlink(missing_ok=True)

    def look(self, progress: str, *, is_training: bool, is_last: bool = False) -> Usage | None:
        """Record what is new; return a usage sample if `SAMPLE_S` has passed since the last one, else None.

        Args:
            progress: the text of the node's progress.
            is_training: whether usage samples are to be recorded as events.
            is_last: whether the agent ends: then also record snapshots that would wait for a later look.
        """
        said = parse_progress(progress)
        for fields in self._new_lines():
            self._take(fields)
        if not hang.Progress.parse(progress, 0.0).is_start:
            self._steps(said["step"], said["total_steps"])
        if self._sees_snapshots:
            self._look_for_snapshots(is_last=is_last)
        now = time.monotonic()
        is_only = is_last and not self._due["sample"]  # a run that ends before its first sample has this one
        if now - self._measured < SAMPLE_S and not is_only:
            return None
        self._measured = now
        sample = self._usage()
        if is_training and self._is_due("sample"):
            self._say("sample", attempt=self._attempt, **said, **_without_what_stays(sample))
        return sample

    def _steps(self, step: int | None, total_steps: int | None, **at: float) -> None:
        """Record the first step of an attempt, once; `at` is its time if a rank has reported that, as kit's own do."""
        if not self._has_stepped:
            self._has_stepped = True
            self._say("first-step", attempt=self._attempt, step=step, total_steps=total_steps, **at)

    def _is_due(self, kind: str) -> bool:
        """Whether an event of this kind may be recorded again; if so, put the next one off by `pause_s`."""
        now = time.monotonic()
        if now < self._due[kind]:
            return False
        self._due[kind] = now + pause_s(now - self._began, self._num_nodes) * 0.95
        return True

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(OSError):
            for path in sorted(self._told.iterdir()):
                data = b""
                with contextlib.suppress(OSError), path.open("rb") as file:
                    file.seek(self._offsets.get(path.name, 0))
                    data = file.read(_READ_BYTES)
                whole = data.rfind(b"\n") + 1
                if not whole and len(data) == _READ_BYTES:
                    whole = len(data)  # skip it: no valid line is so long
                self._offsets[path.name] = self._offsets.get(path.name, 0) + whole
                for line in data[:whole].splitlines():
                    with contextlib.suppress(ValueError, RecursionError):
                        fields = json.loads(line) if len(line) <= MAX_TOLD_BYTES else None
                        if isinstance(fields, dict):
                            yield fields

    def _take(self, told: Mapping[str, Any]) -> None:
        """Record one event of a rank; ignore an unknown kind."""
        kind, step = told.get("kind"), told.get("step")
        if not isinstance(step, int):
            return
        when, now = told.get("time"), time.time()
        # Ranks use the same host's clock: ignore a time that is in the future or too old.
        at = {"time": when} if isinstance(when, int | float) and now - MAX_TOLD_AGE_S < when <= now else {}
        if kind == "resumed":
            self._say("resumed", attempt=self._attempt, step=step, **at)
        elif kind == "first-step":
            total_steps = told.get("total_steps")
            self._steps(step, total_steps if isinstance(total_steps, int) else None, **at)
        elif kind == "not-finite" and isinstance(told.get("ranks"), list):
            fields = {name: str(told.get(name, "")) for name in ("what", "value", "action")}
            ranks = [rank for rank in told["ranks"] if isinstance(rank, int)]
            self._say("not-finite", attempt=self._attempt, step=step, ranks=ranks, **fields, **at)
        elif (
            kind == "pause"
            and isinstance(seconds := told.get("seconds"), int | float)
            and 0 <= seconds < _MAX_VALUE
        ):
            self._paused_s += seconds
        elif kind == "evaluation" and isinstance(told.get("metrics"), dict):
            metrics = {
                str(name): value
                for name, value in told["metrics"].items()
                if isinstance(value, int | float) and abs(value) < _MAX_VALUE
            }
            # Record each new best, which is what people ask for later, and only some of the others.
            if metrics and (self._is_best(metrics) or self._is_due("evaluation")):
                self._say(
                    "evaluation",
                    attempt=self._attempt,
                    step=step,
                    epoch=told.get("epoch"),
                    metrics=metrics,
                    **at,
                )

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        is_best = False
        for name, value in metrics.items():
            least, most = self._best.get(name, (math.inf, -math.inf))
            is_best |= value < least if is_least_best(name) else value > most
            self._best[name] = (min(least, value), max(most, value))
        return is_best

    def _manifests(self) -> set[str]:
        try:
            return {path.name for path in self._snapshots.iterdir() if _MANIFEST.fullmatch(path.name)}
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError:  # keep the known ones, or they would be reported as new next time
            return self._known

    def _look_for_snapshots(self, *, is_last: bool) -> None:
        there = self._manifests()
        self._num_saved += len(there - self._known)
        self._newest = max([self._newest, *(there - self._known)])
        self._known = there
        if not self._num_saved or not (is_last or self._is_due("snapshot")):
            return
        found = _MANIFEST.fullmatch(self._newest)
        assert found is not None
        size = None
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            manifest = json.loads((self._snapshots / self._newest).read_text(encoding="utf-8"))
            size = sum(manifest["size_bytes"].values())
        self._say(
            "snapshot",
            generation=int(found[1]),
            step=int(found[2]),
            bytes=size,
            pause_s=round(self._paused_s, 4),
            count=self._num_saved,
        )
        self._num_saved, self._paused_s, self._newest = 0, 0.0, ""
