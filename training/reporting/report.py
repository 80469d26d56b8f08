"""The reports of a run: printed lines, metrics.jsonl, result.json, TensorBoard and kit's progress file."""

import contextlib
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from nodekit.training.process.devices import module_of
from nodekit.training.reporting import metrics
from nodekit.training.reporting.curves import Curves
from nodekit.training.reporting.tell import tell
from nodekit.training.reporting.trackers import Tracker
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")

_LINE_EVERY_S = 5.0
_PROGRESS_EVERY_S = 0.5
_PROGRESS_BYTES = 80
_POINT_EVERY_S, _POINT_EVERY = 0.05, 1 / 50
"""The least seconds from one drawn step to the next, and the same as a fraction of the attempt's duration so far.

Two points a second are always drawn. A point costs 50 to 200 µs, TensorBoard shows 1,000, and metrics.jsonl has all.
"""
_SLOW_CURVES_EVERY_S = 0.5
"""Seconds between points of values that change slowly: learning rate and throughput."""


class Report:
    """Prints and draws on rank 0, writes metrics on each node's first rank, and reports every rank's step to kit."""

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
        """Continue after ``step``: lines about later steps are removed, since these steps are done again.

        Args:
            world: which rank this is.
            folder: this node's output folder.
            step: the last step that is done.
            total_steps: of the whole training.
            is_evaluated: whether the evaluation at ``step`` is done.
            track: a service that also gets the metrics (``trackers.TRACKERS``).
            settings: of the run, for that service.
        """
        self._world = world
        self._folder = folder
        self._history = folder / "metrics.jsonl"
        self._step = step
        self._total_steps = total_steps
        self._started = self._last_line = time.monotonic()
        self._last_progress = -_PROGRESS_EVERY_S
        self._num_samples = 0
        self.first_step_s: float | None = None
        """Seconds from the start of the process to the end of its first step; None if unknown or in a later attempt."""
        self._timed_from_s: float | None = None  # when the current step began; None in the first step
        self._timed_s = 0.0
        self._timed_samples = 0
        self._is_warm = False  # whether there was an evaluation
        self._is_trained = False
        self._peak_memory_bytes: int | None = None
        self._metrics: BinaryIO | None = None
        self._history_bytes = 0
        self._last_point = self._last_slow_curves = 0.0
        self._curves: Curves | None = None
        self._attempt = ""
        self._epoch_and_loss: tuple[int, float] | None = None  # of the last step; None before the first one
        self._open_metrics(step, is_evaluated=is_evaluated)
        self._tracker = self._start_tracker(track, settings or {}) if track and world.is_main else None
        self._is_closed = self._is_progress_warned = False
        self._progress = self._open_progress()
        self._bar: Any = None
        if world.is_main and sys.stderr.isatty():
            from tqdm import tqdm  # for a terminal only

            self._bar = tqdm(initial=step, total=total_steps, unit="step", dynamic_ncols=True)

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._bar, self._curves, self._metrics):
            if each is not None:
                each.close()
        # A failed rank that still waits for its snapshot may call `alive`.
        self._is_closed = True
        self._close_progress()
        if self._tracker is not None:
            self._tracker.close(is_trained=self._is_trained)

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if not self._world.is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, flush=True)

    def step(self, step: int, *, epoch: int, loss: float, lr: float, num_samples: int, ended: float) -> None:
        """Report a step.

        Args:
            step: its number.
            epoch: from 1.
            loss: the mean over the step's samples.
            lr: the learning rate.
            num_samples: over all ranks.
            ended: when the step ended, in seconds since 1970.
        """
        now = time.monotonic()
        if self._timed_from_s is not None:
            self._timed_s += now - self._timed_from_s
            self._timed_samples += num_samples
            self._timed_from_s = now
        if step == self._total_steps:  # measure before the last snapshot, which needs memory of its own
            self._peak_memory_bytes = _peak_memory_bytes(self._world.device)
        if self._num_samples == 0:
            if self._world.is_first_on_node:
                self.tell("first-step", step=step, total_steps=self._total_steps, time=ended)
            if self._world.kept is not None:  # the process began before this attempt, so its age says nothing
                self.say(f"first step {now - self._started:.2f} s after all ranks were ready")
            elif (age_s := _process_age_s()) is not None:
                self.first_step_s = age_s
                self.say(f"first step {age_s:.2f} s after the start of the process")
        self._step = step
        self._num_samples += num_samples
        self._epoch_and_loss = epoch, loss
        self.alive(at_once=step == self._total_steps)
        rate = self._num_samples / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"{self._progress_text} {rate:.0f} samples/s", refresh=False)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self.say(
                f"step {step}/{self._total_steps} {self._progress_text} lr {lr:.3g} {rate:.0f} samples/s"
            )
        if self._world.is_first_on_node:
            # Use the time at which the step ended: with local SGD, many steps are reported at once.
            point_every_s = max(
                _POINT_EVERY_S, min(_SLOW_CURVES_EVERY_S, (now - self._started) * _POINT_EVERY)
            )
            has_rate = now - self._last_slow_curves >= _SLOW_CURVES_EVERY_S
            if has_rate or abs(ended - self._last_point) >= point_every_s or step == self._total_steps:
                self._last_point = ended
                values: dict[str, Any] = {"step": step, "attempt": self._attempt, "epoch": epoch}
                values |= {"loss": loss, "lr": lr, "time": ended}
                if has_rate:
                    self._last_slow_curves = now
                    values["samples_per_s"] = rate
                self._keep(values)
            else:  # write JSON without its encoder, which is slower: these are plain text and finite numbers
                self._write(
                    f'{{"step": {step}, "attempt": "{self._attempt}", "epoch": {epoch}, "loss": {loss!r}, '
                    f'"lr": {lr!r}, "time": {ended!r}}}'
                )
        if self._timed_from_s is None:
            self._timed_from_s = time.monotonic()

    @property
    def _progress_text(self) -> str:
        return "" if self._epoch_and_loss is None else "epoch {} loss {:.4f}".format(*self._epoch_and_loss)

    def leave_out(self) -> None:
        """Leave the time since the last step, an evaluation or a snapshot, out of the throughput."""
        if self._timed_from_s is not None:
            self._timed_from_s = time.monotonic()

    def costs(self) -> dict[str, float | None]:
        """Return throughput and memory of the training, after the last step; all ranks call it.

        ``samples_per_s`` is over all ranks, by rank 0's clock, without evaluations and pauses for snapshots, and
        without the time before the first evaluation, or before the end of the first step if there was one evaluation
        only. ``peak_memory_bytes`` is the largest of all ranks until the end of the last step: on a GPU the memory that
        torch used there, otherwise the process's memory. A value is None if unknown.
        """
        rate = self._timed_samples / self._timed_s if self._timed_s else None
        # Measured now if it ended early.
        peak = self._peak_memory_bytes or _peak_memory_bytes(self._world.device)
        rates, peaks = zip(*self._world.gather((rate, peak)), strict=True)
        return {"samples_per_s": rates[0], "peak_memory_bytes": max(filter(None, peaks), default=None)}

    def tell(self, kind: str, *, step: int, **fields: Any) -> None:
        """Write an event for kit (docs/events.md)."""
        tell(self._world, kind, step=step, **fields)

    def alive(self, *, at_once: bool = False) -> None:
        """Report the step to kit, which shows that this rank is not hanging; at most twice a second."""
        now = time.monotonic()
        if self._is_closed or not (at_once or now - self._last_progress >= _PROGRESS_EVERY_S):
            return
        self._last_progress = now
        # One write for the whole line: a concurrent reader finds the old one or the new one.
        line = f"{self._step}/{self._total_steps} {self._progress_text}".ljust(_PROGRESS_BYTES - 1) + "\n"
        try:
            if self._progress is not None and not os.fstat(self._progress.fileno()).st_nlink:
                self._close_progress()  # a clean-up has removed the file: nobody would read what is written to it
            if self._progress is None:
                self._progress = self._open_progress()
            if self._progress is not None:
                self._progress.seek(0)
                self._progress.write(line.encode())
        except OSError as error:
            self._warn_of_progress(error)
            self._close_progress()  # and try again: a rank that stays silent would be taken for one that hangs

    def settle(self) -> None:
        """Wait for imports in threads; call it before processes are forked."""
        if self._curves is not None:
            self._curves.settle()

    def evaluation(
        self, step: int, *, epoch: int, means: dict[str, float], when: str, best: str = ""
    ) -> None:
        """Report the means over all test samples.

        Args:
            step: the last step before the evaluation.
            epoch: from 1.
            means: by the measure's name.
            when: printed before the step's number.
            best: the measure by which the means are the best so far; "" if they are not.
        """
        if not self._is_warm and step < self._total_steps:
            # Measure throughput from here: until now, TensorBoard's import may have competed for the cores.
            self._timed_s, self._timed_samples = 0.0, 0
        self._is_warm = True
        if self._world.is_first_on_node:
            own = {"step": step, "attempt": self._attempt, "epoch": epoch, "test": means}
            self._keep({**own, "time": time.time()})
        if self._world.is_main:
            self.tell("evaluation", step=step, epoch=epoch, metrics=means)
        shown = " ".join(f"{name} {value:.4f}" for name, value in means.items())
        mark = f" (best {best} so far)" if best else ""
        self.say(f"{when} {step}/{self._total_steps}: test {shown}{mark}")

    def result(self, values: dict[str, Any]) -> None:
        """Write result.json at the end of the training; if this start made no step, keep an existing result."""
        self._is_trained = True
        made_steps = values["steps"] > values["resumed_at_step"]
        if self._world.is_first_on_node and (made_steps or self._steps_of_result() != values["steps"]):
            beside = self._folder / ".result.json.tmp"
            try:
                text = json.dumps(metrics.finite(values), indent=1)
                beside.write_text(f"{text}\n", encoding="utf-8")
                beside.replace(self._folder / "result.json")
            except OSError as error:  # only logged: the weights are in the last snapshot
                log.warning("%s is not written: %s", self._folder / "result.json", error)

    def _steps_of_result(self) -> int | None:
        """Return the number of steps in result.json; None if there is no such file."""
        try:
            found = json.loads((self._folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found.get("steps") if isinstance(found, dict) else None

    def _open_metrics(self, step: int, *, is_evaluated: bool) -> None:
        """Open metrics.jsonl to continue after ``step``, with the same lines on all nodes; all ranks call it."""
        path = self._history
        is_there = False
        self._attempt = metrics.attempt_of(self._world)
        if self._world.is_first_on_node:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                metrics.take_back(path, step, is_evaluated=is_evaluated)
                is_there = True
            except OSError as error:  # a full disk must not end the training
                log.warning("%s is not written: %s", path, error)
        try:
            if step and self._world.world_size > 1:
                metrics.agree(path, self._world)
            if is_there:
                self._metrics = path.open("ab", buffering=0)
                self._history_bytes = self._metrics.seek(0, os.SEEK_END)
        except OSError as error:
            log.warning("%s is not written: %s", path, error)

    def _write(self, line: str) -> None:
        """Write a line of metrics.jsonl."""
        if self._metrics is not None:
            try:  # unbuffered, since a kill may come at any time
                self._metrics.write(f"{line}\n".encode())
            except OSError as error:  # a full disk must not end the training
                log.warning("%s is no longer written: %s", self._metrics.name, error)
                self._metrics = None

    def _keep(self, values: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and draw its points."""
        self._write(json.dumps(metrics.finite(values)))
        if not self._world.is_main:
            return
        if self._curves is None:  # after the first step, since the import is slow
            self._curves = Curves(
                self._folder / "tensorboard",
                first_step=values["step"],
                attempt=self._attempt,
                history=self._history,
                history_bytes=self._history_bytes,
            )
        self._curves.add(values)
        if self._tracker is not None and ("test" in values or "samples_per_s" in values):
            self._tracker.add(values)  # at most two steps a second, which is enough for a service

    def _start_tracker(self, service: str, settings: Mapping[str, Any]) -> Tracker | None:
        try:
            return Tracker(
                service,
                run_id=self._tracked_id(),
                folder=self._folder,
                settings=settings,
                history=self._history,
                history_bytes=self._history_bytes,
            )
        except OSError as error:  # a process that cannot be started must not end the training
            log.warning("nothing is tracked: %s", error)
            return None

    def _tracked_id(self) -> str:
        """Return the run's id for a service: kit's, or one made for this folder, whose name is not unique."""
        if self._world.is_by_kit and self._world.run_id:
            return self._world.run_id
        path = self._folder / ".track-id"
        if not path.exists():
            path.write_text(f"{self._folder.resolve().name}-{secrets.token_hex(4)}", encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def _open_progress(self) -> BinaryIO | None:
        path = self._world.progress_file
        if path is None:
            return None
        try:
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0)
        except OSError as error:
            self._warn_of_progress(error)
            return None

    def _close_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            with contextlib.suppress(OSError):  # of a file server, told only now
                progress.close()

    def _warn_of_progress(self, error: OSError) -> None:
        if not self._is_progress_warned:
            self._is_progress_warned = True
            log.warning("%s cannot be written, and is tried again: %s", self._world.progress_file, error)


def _process_age_s() -> float | None:
    """Return the seconds since this process was started; None on a system without /proc."""
    try:
        # kit may have forked this process before the rank's start.
        if by_kit := os.environ.get("NODEKIT_STARTED"):
            return time.clock_gettime(time.CLOCK_BOOTTIME) - float(by_kit)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def _peak_memory_bytes(device: torch.device) -> int | None:
    """Return the peak memory of torch on one device, or of this process on a CPU; None on a system without /proc."""
    if device.type != "cpu":
        module = module_of(device.type)
        return int(max(map(module.max_memory_allocated, range(module.device_count()))))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    # Not by getrusage, whose peak includes that of the process that this one was forked from.
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024
