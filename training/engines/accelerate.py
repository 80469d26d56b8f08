"""Hugging Face Accelerate: it prepares the model (DDP on more than one rank), autocasts, scales and clips."""

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nodekit.training.engines import State
from nodekit.training.options import Options
from nodekit.training.world import World

PRECISIONS = {"off": "no", "bf16": "bf16", "fp16": "fp16"}


class Engine:
    """accelerate.Accelerator, whose `end_training` is not called: it would end our process group."""

    forwards_together = False

    def __init__(
        self,
        options: Options,
        world: World,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Mapping[str, Any] | None,
    ) -> None:
        accelerate = importlib.import_module("accelerate")
        # Its own accumulation stays at 1: `backward` would divide the loss by it, and our weights do that.
        self._accelerator = accelerate.Accelerator(
            cpu=world.device.type == "cpu",
            mixed_precision=PRECISIONS[options.amp],
            step_scheduler_with_optimizer=False,
        )
        self._module = module
        self.model, self.optimizer = self._accelerator.prepare(module, optimizer)
        if self._accelerator.scaler is not None and scaler:
            self._accelerator.scaler.load_state_dict(dict(scaler))

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP's, through it."""
        return nullcontext() if is_last else self._accelerator.no_sync(self.model)

    def autocast(self) -> AbstractContextManager[Any]:
        """Its own."""
        context: AbstractContextManager[Any] = self._accelerator.autocast()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Scaled, where there is a scaler."""
        self._accelerator.backward(loss)

    def update(self, clip: float | None) -> None:
        """It unscales before it clips."""
        if clip is not None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """Of what it has wrapped."""
        scaler = self._accelerator.scaler
        return {
            "model": self._module.state_dict(),
            "optimizer": self.optimizer.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else {},
        }
