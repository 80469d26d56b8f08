"""TensorBoard's curves, drawn without holding up the training: importing it takes a second and more."""

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("nodekit.training")


class Curves:
    """Takes points at once, and draws them when TensorBoard has been imported; without it, a warning."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Start the import. What ``folder`` has of steps from ``first_step`` on is not shown any more."""
        self._folder = folder
        self._first_step = first_step
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._writer: SummaryWriter | None = None
        self._thread = threading.Thread(target=self._open, name="nodekit-curves", daemon=True)
        self._thread.start()

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """A point of each curve."""
        self._waiting.append((step, scalars))
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

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        except (ImportError, OSError) as error:
            log.warning("no TensorBoard curves: %s", error)

    def _draw(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._writer is None:
            return
        try:
            for step, scalars in waiting:
                for name, value in scalars.items():
                    self._writer.add_scalar(name, value, step)
        except OSError as error:  # a full disk must not end the training
            log.warning("%s is no longer written: %s", self._folder, error)
            self._writer = None
