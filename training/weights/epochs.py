"""Keep the weights after each epoch as ``model_EPOCH.pth``, as many training scripts do."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from nodekit.training.options.options import ALL_EPOCHS
from nodekit.training.snapshots.background import Background
from nodekit.training.snapshots.hostcopy import HostCopy
from nodekit.training.weights.export import save_weights
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")


class EpochWeights:
    """Writes a plain state dict after each epoch into each node's folder, on the node's first rank, in a thread.

    While it writes, there is a copy of the weights in host memory. A folder that cannot be written (full, missing) does
    not end the training.
    """

    def __init__(self, keep: int | None, folder: Path, world: World) -> None:
        """Keep the weights of the last ``keep`` epochs; None keeps none."""
        self.keep, self._folder, self._world = keep, folder, world
        self._writer = Background("nodekit-epoch-weights")

    def forecast(self, num_epochs: int, size_bytes: int) -> str:
        """Return a line for people on what will be written for weights of this size; "" if nothing."""
        if self.keep is None:
            return ""
        num, each_mb = min(self.keep, num_epochs), size_bytes / 1e6
        which = "after each epoch" if self.keep == ALL_EPOCHS else f"of the last {num}"
        return (
            f"model_EPOCH.pth {which}: {each_mb:.1f} MB each, {num * each_mb:.1f} MB in the end, on each node"
        )

    def look(self, epoch: int, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Write the weights of a finished epoch, counted from 1; ``weights`` is called on all ranks or on none."""
        if self.keep is None:
            return
        self.wait()
        state = weights()
        if self._world.is_first_on_node:
            self._writer.start(partial(self._write, epoch, HostCopy(pins=False).take(dict(state))))

    def wait(self) -> None:
        """Wait until the current write has succeeded or failed."""
        self._writer.wait()

    def _write(self, epoch: int, weights: Mapping[str, torch.Tensor]) -> None:
        assert self.keep is not None
        path = self._folder / f"model_{epoch}.pth"
        beside = self._folder / ".model.pth.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                save_weights(weights, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            for old in self._folder.glob("model_*.pth"):
                number = re.fullmatch(r"model_(\d+)\.pth", old.name)
                if number is not None and int(number[1]) <= epoch - self.keep:
                    old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch may raise a RuntimeError for a full disk
            log.warning("%s is not written, and going on without: %s", path, error)
        finally:
            with suppress(OSError):  # remove an incomplete file, which takes the space that snapshots need
                beside.unlink(missing_ok=True)
