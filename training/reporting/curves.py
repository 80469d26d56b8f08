"""TensorBoard's curves, written without delaying the training: importing TensorBoard takes a second or more.

Curves continue across restarts, even if rank 0 moves to another node: points that this node's files lack are drawn from
its metrics.jsonl, and points of steps that are done again are removed.
"""

import json
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.training.reporting import event_files, metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("nodekit.training")

MOST_DRAWN = 10_000
"""About the most lines of the history to draw again: each takes 50 µs or more, and TensorBoard shows 1,000 points."""
_DRAW_EVERY_S = 1.0
"""Seconds between draws: points drawn together take 40 µs each, one by one between steps up to 150 µs."""
_FLUSH_EVERY_S = 5


class Curves:
    """Queues points until TensorBoard is imported, then draws them; if it is not installed, logs a warning."""

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        attempt: str = "0.0",
        history: Path | None = None,
        history_bytes: int = 0,
    ) -> None:
        """Start the import.

        Args:
            folder: for the event files; their records from ``first_step`` on are removed.
            first_step: the step of the first new point.
            attempt: the current one, ``GENERATION.ROUND``.
            history: metrics.jsonl, with earlier points.
            history_bytes: the size of its part from before this attempt.
        """
        self._folder = folder
        self._first_step = first_step
        self._attempt = attempt
        self._history = history
        self._history_bytes = history_bytes
        self._waiting: list[dict[str, Any]] = []
        self._drawn_s = 0.0
        self._writer: SummaryWriter | None = None
        self._thread = threading.Thread(target=self._open, name="nodekit-curves", daemon=True)
        self._thread.start()

    def add(self, values: dict[str, Any]) -> None:
        """Draw the points of a line of metrics.jsonl: an evaluation's at once, a step's together with later ones."""
        self._waiting.append(values)
        now_s = time.monotonic()
        is_time = now_s - self._drawn_s >= _DRAW_EVERY_S or "test" in values
        if is_time and not self._thread.is_alive():
            self._drawn_s = now_s
            self._draw()

    def settle(self) -> None:
        """Wait for the import; call it before a fork, in which a running import would never be completed."""
        self._thread.join()

    def close(self) -> None:
        """Draw all queued points and close the file."""
        self.settle()
        self._draw()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                log.warning("%s is not complete: %s", self._folder, error)

    def _open(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter

            start = self._start()
            event_files.take_back(self._folder, start)
            event_files.see_to_a_later_name(self._folder)
            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=start,  # for a running TensorBoard, which has read the removed points already
                flush_secs=_FLUSH_EVERY_S,
                filename_suffix=f".attempt{self._attempt}",
            )
            lines = metrics.from_step(self._history, self._history_bytes, start) if self._history else []
            for line in metrics.thinned(lines, MOST_DRAWN):
                self._draw_line(json.loads(line))
        except (ImportError, OSError) as error:
            log.warning("no TensorBoard curves: %s", error)
            self._writer = None

    def _start(self) -> int:
        """Return the first step from which the folder's files may differ from the history."""
        last = event_files.last_step(self._folder)
        if last is None:
            return 0
        # If rank 0 has been on another node since, points of steps that were done again there were not removed here.
        redone = None
        if self._history:
            last_attempt = event_files.last_attempt(self._folder)
            redone = metrics.first_after(self._history, self._history_bytes, last_attempt)
        return min(self._first_step, last, self._first_step if redone is None else redone)

    def _draw(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._writer is None:
            return
        try:
            for values in waiting:
                self._draw_line(values)
        except OSError as error:  # a full disk must not end the training
            log.warning("%s is no longer written: %s", self._folder, error)
            self._writer = None

    def _draw_line(self, values: dict[str, Any]) -> None:
        assert self._writer is not None
        for name, value in metrics.scalars(values).items():
            self._writer.add_scalar(name, value, values["step"], walltime=values["time"])
