"""A task whose computing is waiting: as a GPU's, it takes no time of the cores that the network is made of here."""

import os
import time
from typing import Any

import torch
from torch import nn

LAYERS = 4
WIDTH = 512
STEP_S = 0.4
"""Of a batch, a third of it forward."""
SAMPLE = 4
"""Numbers in a sample."""


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
    """Layers of equal size and time; as many samples as ``BENCH_SAMPLES`` says."""

    def model(self) -> nn.Module:
        """4 MB of weights."""
        return nn.Sequential(nn.Linear(SAMPLE, WIDTH), *(_Layer() for _ in range(LAYERS)))

    def train_data(self) -> list[torch.Tensor]:
        """Zeros."""
        return [torch.zeros(SAMPLE)] * int(os.environ.get("BENCH_SAMPLES", "64"))

    def test_data(self) -> list[torch.Tensor]:
        """One: nothing is learnt."""
        return [torch.zeros(SAMPLE)]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Of what is sent it does not matter what it is."""
        output: torch.Tensor = model(batch)
        return output.square().mean()

    def measure(self, _model: nn.Module, _batch: torch.Tensor) -> dict[str, float]:
        """Nothing: the test sample does not wait for long."""
        return {"loss": 0.0}
