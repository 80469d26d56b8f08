"""The task of a drill: slowed-down digits, so that the job takes as long on a GPU cluster as on a laptop."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from nodekit.training.tasks.digits import Digits

STEP_S = 0.06


class Paced(Digits):
    """At most one step every `STEP_S` seconds, whatever the world size; the same losses each time."""

    def __init__(self) -> None:
        super().__init__()
        # CUDA's fastest convolutions and matrix products add in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True
        self._next_s = 0.0

    def model(self) -> nn.Module:
        """Return a network that needs little CPU time: on a laptop, several nodes share a core."""
        convolution = nn.Conv2d(1, 8, 3, padding=1)
        return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Wait until the next step is due, and return the parent's loss."""
        now_s = time.monotonic()
        time.sleep(max(0.0, self._next_s - now_s))
        self._next_s = max(self._next_s, now_s) + STEP_S
        return super().loss(model, batch)
