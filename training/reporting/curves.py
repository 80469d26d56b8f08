"""TensorBoard's curves, drawn without holding up the training: importing it takes a second and more.

They go on over restarts in one curve, also where rank 0 is on another node than before: what that node's files lack
is drawn from its metrics.jsonl, and what was drawn of steps that were done again is taken out of them.
"""

import json
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.training.reporting import event_files, metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("nodekit.training")

MOST_DRAWN = 10_000
"""Lines of the history that are drawn again: each takes 50 µs and more, and TensorBoard shows 1,000 points."""
_FLUSH_EVERY_S = 5


class Curves:
    """Takes points at once, and draws them when TensorBoard has been imported; without it, a warning."""

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
            folder: for the event files; what it has of steps from ``first_step`` on is taken back.
            first_step: that of the first point to come.
            attempt: in which this is.
            history: metrics.jsonl, with what was before.
            history_bytes: how much of it that is.
        """
        self._folder = folder
        self._first_step = first_step
        self._attempt = attempt
        self._history = history
        self._history_bytes = history_bytes
        self._waiting: list[dict[str, Any]] = []
        self._writer: SummaryWriter | None = None
        self._thread = threading.Thread(target=self._open, name="nodekit-curves", daemon=True)
        self._thread.start()

    def add(self, values: dict[str, Any]) -> None:
        """A point of each curve, as a line of metrics.jsonl has them."""
        self._waiting.append(values)
        if not self._thread.is_alive():
            self._draw()

    def settle(self) -> None:
        """Wait for the import: a process that is forked meanwhile would find it half-way for ever."""
        self._thread.join()

    def close(self) -> None:
        """Write everything."""
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

            lines = metrics.read(self._history, self._history_bytes) if self._history else []
            start = self._start(lines)
            event_files.take_back(self._folder, start)
            event_files.wait_for_a_later_name(self._folder)
            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=start,  # for a TensorBoard that has already read what was taken back
                flush_secs=_FLUSH_EVERY_S,
                filename_suffix=event_files.suffix(self._attempt),
            )
            for line in metrics.thinned(metrics.from_step(lines, start), MOST_DRAWN):
                self._draw_line(json.loads(line))
        except (ImportError, OSError) as error:
            log.warning("no TensorBoard curves: %s", error)
            self._writer = None

    def _start(self, lines: list[bytes]) -> int:
        """The step from which on the folder's files do not hold the curve as it went on."""
        last = event_files.last_step(self._folder)
        if last is None:
            return 0
        # Rank 0 was elsewhere since then, and what is here of the steps it did again was never taken back.
        redone = metrics.first_after(lines, event_files.last_attempt(self._folder))
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
