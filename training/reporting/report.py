"""What a run tells: progress, metrics.jsonl, result.json, TensorBoard and kit's progress file."""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from nodekit.training.reporting import metrics
from nodekit.training.reporting.curves import Curves
from nodekit.training.reporting.trackers import Tracker
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

_LINE_EVERY_S = 5.0
_PROGRESS_EVERY_S = 0.5
_PROGRESS_BYTES = 80
_POINT_EVERY_S = 0.05
"""Of quicker steps not each is drawn: a point costs 50 µs, TensorBoard shows 1,000, and metrics.jsonl has all."""
_SLOW_CURVES_EVERY_S = 0.5
"""Of what changes slowly."""


class Report:
    """Rank 0 speaks and draws, each node's first rank keeps the numbers, every rank tells kit its step."""

    def __init__(
        self,
        world: World,
        folder: Path,
        *,
        step: int,
        total_steps: int,
        is_evaluated: bool,
        track: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on from ``step``: what was told of later steps is taken back, since they are done again.

        Args:
            world: who this rank is.
            folder: of this node.
            step: the last that is done.
            total_steps: of the whole training.
            is_evaluated: whether the evaluation at ``step`` is done.
            track: also tell this service (``trackers.TRACKERS``).
            settings: of the run, for it.
        """
        self._world = world
        self._folder = folder
        self._step = step
        self._total_steps = total_steps
        self._started = self._last_line = time.monotonic()
        self._last_progress = -_PROGRESS_EVERY_S
        self._num_samples = 0
        self.first_step_s: float | None = None
        """Seconds from the start of the process to the end of its first step; None if unknown."""
        self._timed_from_s: float | None = (
            None  # when the step under way began; None before the first one's end
        )
        self._timed_s = 0.0
        self._timed_samples = 0
        self._is_warm = False  # whether there was an evaluation
        self._peak_memory_bytes: int | None = None
        self._metrics: BinaryIO | None = None
        self._history_bytes = 0
        self._last_point = self._last_slow_curves = 0.0
        self._curves: Curves | None = None
        self._attempt = ""
        self._bar: Any = None
        self._progress: BinaryIO | None = None
        self._progress_text = ""
        self._open_metrics(step, is_evaluated=is_evaluated)
        self._is_trained = False
        self._tracker: Tracker | None = None
        if track is not None and world.is_main:
            self._tracker = self._track(track, settings or {})
        if world.progress_file:
            try:
                self._progress = open(  # closed with the block  # noqa: SIM115
                    world.progress_file,
                    "wb",
                    buffering=0,
                    opener=lambda path, _: os.open(path, os.O_WRONLY | os.O_CREAT, 0o600),
                )
            except OSError as error:
                log.warning("%s is not written: %s", world.progress_file, error)
        if world.is_main and sys.stderr.isatty():
            from tqdm import tqdm  # only where there is someone to look at it

            self._bar = tqdm(initial=step, total=total_steps, unit="step", dynamic_ncols=True)

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._curves is not None:
            self._curves.close()
        if self._tracker is not None:
            self._tracker.close(is_trained=self._is_trained)
        if self._metrics is not None:
            self._metrics.close()
        if self._progress is not None:
            self._progress.close()

    def say(self, text: str) -> None:
        """A line for people, from rank 0."""
        if not self._world.is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, flush=True)

    def step(self, step: int, *, epoch: int, loss: float, lr: float, num_samples: int, ended: float) -> None:
        """One step is done, of ``num_samples`` samples over all ranks, whose mean loss was ``loss``."""
        now = time.monotonic()
        if self._timed_from_s is not None:
            self._timed_s += now - self._timed_from_s
            self._timed_samples += num_samples
            self._timed_from_s = now
        if step == self._total_steps:  # here, before the state is put together for the last snapshot
            self._peak_memory_bytes = _peak_memory_bytes(self._world.device)
        if self._num_samples == 0:
            self.first_step_s = _process_age_s()
            if self.first_step_s is not None:
                self.say(f"first step {self.first_step_s:.2f} s after the start of the process")
        self._step = step
        self._num_samples += num_samples
        text = f"epoch {epoch} loss {loss:.4f}"
        self._progress_text = text
        self.alive(at_once=step == self._total_steps)
        rate = self._num_samples / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"{text} {rate:.0f} samples/s", refresh=False)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self.say(f"step {step}/{self._total_steps} {text} lr {lr:.3g} {rate:.0f} samples/s")
        if self._world.is_first_on_node:
            values = {
                "step": step,
                "attempt": self._attempt,
                "epoch": epoch,
                "loss": loss,
                "lr": lr,
                "time": ended,
            }
            if now - self._last_slow_curves >= _SLOW_CURVES_EVERY_S:
                self._last_slow_curves = now
                values["samples_per_s"] = rate
            # By when it ended: ranks that talk once a second are told many steps at once.
            is_point = abs(ended - self._last_point) >= _POINT_EVERY_S or "samples_per_s" in values
            if is_point:
                self._last_point = ended
            self._keep(values, is_drawn=is_point or step == self._total_steps)
        if self._timed_from_s is None:
            self._timed_from_s = time.monotonic()

    def leave_out(self) -> None:
        """What has passed since the last step was an evaluation or a snapshot, and no step's time."""
        if self._timed_from_s is not None:
            self._timed_from_s = time.monotonic()

    def costs(self) -> dict[str, float | None]:
        """What the training took, after the last step; all ranks call it.

        ``samples_per_s`` over all ranks, by rank 0's clock: without evaluations, the pauses for snapshots and what was
        before the first evaluation, or before the end of the first step if there was one evaluation only.
        ``peak_memory_bytes`` of the rank that needed most until the end of the last step: on a GPU what torch had in
        use there, else all of the process's memory. None for what is not known.
        """
        rate = self._timed_samples / self._timed_s if self._timed_s else None
        rates, peaks = zip(*self._world.gather((rate, self._peak_memory_bytes)), strict=True)
        return {"samples_per_s": rates[0], "peak_memory_bytes": max(filter(None, peaks), default=None)}

    def tell(self, kind: str, *, step: int, **fields: Any) -> None:
        """Tell kit, for the run's events (docs/events.md)."""
        if self._world.events_file is None:
            return
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), **fields}).encode() + b"\n"
        try:
            handle = os.open(self._world.events_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:  # it is told for people, and nothing hangs on it
            log.warning("%s is not written: %s", self._world.events_file, error)

    def alive(self, *, at_once: bool = False) -> None:
        """Tell kit the step, and by that that this rank is at work; at most twice a second."""
        now = time.monotonic()
        if self._progress is None or not (at_once or now - self._last_progress >= _PROGRESS_EVERY_S):
            return
        self._last_progress = now
        # One write over the whole line: who reads meanwhile finds the old one or the new one.
        line = f"{self._step}/{self._total_steps} {self._progress_text}".ljust(_PROGRESS_BYTES - 1) + "\n"
        try:
            self._progress.seek(0)
            self._progress.write(line.encode())
        except OSError as error:
            log.warning("%s is no longer written: %s", self._world.progress_file, error)
            self._progress.close()
            self._progress = None

    def settle(self) -> None:
        """Wait for what is done behind the loop's back, before processes are forked."""
        if self._curves is not None:
            self._curves.settle()

    def evaluation(self, step: int, *, epoch: int, means: dict[str, float], when: str) -> None:
        """The means over all test samples; ``when`` is said before the step's number."""
        if (
            not self._is_warm and step < self._total_steps
        ):  # until here an import shared the cores with the steps
            self._timed_s, self._timed_samples = 0.0, 0
        self._is_warm = True
        if self._world.is_first_on_node:
            told = {
                "step": step,
                "attempt": self._attempt,
                "epoch": epoch,
                "test": means,
                "time": time.time(),
            }
            self._keep(told)
        if self._world.is_main:
            self.tell("evaluation", step=step, epoch=epoch, metrics=means)
        shown = " ".join(f"{name} {value:.4f}" for name, value in means.items())
        self.say(f"{when} {step}/{self._total_steps}: test {shown}")

    def result(self, values: dict[str, Any]) -> None:
        """The run is trained to its end."""
        self._is_trained = True
        if self._world.is_first_on_node:
            beside = self._folder / ".result.json.tmp"
            try:
                beside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
                beside.replace(self._folder / "result.json")
            except OSError as error:  # what was trained is in the last snapshot
                log.warning("%s is not written: %s", self._folder / "result.json", error)

    def _open_metrics(self, step: int, *, is_evaluated: bool) -> None:
        """Go on in metrics.jsonl where ``step`` leaves it, with all nodes' the same; all ranks call it."""
        path = self._folder / "metrics.jsonl"
        kept: list[bytes] = []
        is_there = False
        if self._world.is_first_on_node:
            self._attempt = metrics.attempt_of(self._world)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                kept = metrics.take_back(path, step, is_evaluated=is_evaluated)
                is_there = True
            except OSError as error:  # a full disk must not end the training
                log.warning("%s is not written: %s", path, error)
        try:
            if step and self._world.world_size > 1:
                metrics.agree(path, kept, self._world)
            if is_there:
                self._metrics = path.open("ab", buffering=0)
                self._history_bytes = self._metrics.seek(0, os.SEEK_END)
        except OSError as error:
            log.warning("%s is not written: %s", path, error)

    def _keep(self, values: dict[str, Any], *, is_drawn: bool = True) -> None:
        """A line of metrics.jsonl, and its points."""
        if self._metrics is not None:
            try:  # not buffered: a kill may come at any time
                self._metrics.write(json.dumps(values).encode() + b"\n")
            except OSError as error:  # a full disk must not end the training
                log.warning("%s is no longer written: %s", self._metrics.name, error)
                self._metrics = None
        if not self._world.is_main or not is_drawn:
            return
        if self._curves is None:  # here, after the first step, since the import is slow
            self._curves = Curves(
                self._folder / "tensorboard",
                first_step=values["step"],
                attempt=self._attempt,
                history=self._folder / "metrics.jsonl",
                history_bytes=self._history_bytes,
            )
        self._curves.add(values)
        if self._tracker is not None and ("test" in values or "samples_per_s" in values):
            self._tracker.add(values)  # two points a second are enough for a service

    def _track(self, service: str, settings: Mapping[str, Any]) -> Tracker | None:
        try:
            return Tracker(
                service,
                run_id=self._world.run_id or self._folder.resolve().name,
                folder=self._folder,
                settings=settings,
                history=self._folder / "metrics.jsonl",
                history_bytes=self._history_bytes,
            )
        except OSError as error:  # no process to be had must not end the training
            log.warning("nothing is tracked: %s", error)
            return None


def _process_age_s() -> float | None:
    """Seconds since this process was started, where there is a /proc to tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return None


def _peak_memory_bytes(device: torch.device) -> int | None:
    """The most that torch has had in use on one GPU, or this process altogether, where there is a /proc to tell."""
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    # Not getrusage's: that counts what the process was forked from, before it became this program.
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024
