"""A task that waits instead of computing: like a GPU, it uses no time of the cores, which simulate the network here."""

import os
import time
from typing import Any

import torch
from torch import nn

LAYERS = 4
WIDTH = 512
STEP_S = 0.4
"""Seconds of computing per batch, a third of it in the forward pass."""
SAMPLE = 4
"""Numbers per sample."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S / 3 / LAYERS)
        return values.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S * 2 / 3 / LAYERS)
        return gradient


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = _Wait.apply(self.linear(values))  # type: ignore[no-untyped-call]
        return waited


class Waiting:
    """Layers of equal size and time; ``BENCH_SAMPLES`` is the number of samples."""

    def model(self) -> nn.Module:
        """Return a model with 4 MB of weights."""
        return nn.Sequential(nn.Linear(SAMPLE, WIDTH), *(_Layer() for _ in range(LAYERS)))

    def train_data(self) -> list[torch.Tensor]:
        """Return zeros."""
        return [torch.zeros(SAMPLE)] * int(os.environ.get("BENCH_SAMPLES", "64"))

    def test_data(self) -> list[torch.Tensor]:
        """Return one sample: nothing is learnt."""
        return [torch.zeros(SAMPLE)]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return any loss: its value does not matter."""
        output: torch.Tensor = model(batch)
        return output.square().mean()

    def measure(self, _model: nn.Module, _batch: torch.Tensor) -> dict[str, float]:
        """Measure nothing: evaluation must not take long."""
        return {"loss": 0.0}
