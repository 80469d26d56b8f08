"""The task of a drill: digits at a walking pace, so that the job lasts as long on a cluster of GPUs as on a laptop."""

from __future__ import annotations

import time
from typing import Any

import torch

from nodekit.training.tasks.digits import Digits

STEP_S = 0.06


class Paced(Digits):
    """One step every `STEP_S` seconds and no more, whatever the world size; the losses are those of digits."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """As the parent's, when it is time for it."""
        now_s = time.monotonic()
        time.sleep(max(0.0, self._next_s - now_s))
        self._next_s = max(self._next_s, now_s) + STEP_S
        return super().loss(model, batch)
