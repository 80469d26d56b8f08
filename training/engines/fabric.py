"""Lightning Fabric: it wraps model and optimizer (DDP on more than one rank), autocasts, scales and clips."""

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from nodekit.training.engines import State
from nodekit.training.options import Options
from nodekit.training.world import World

PRECISIONS = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Engine:
    """lightning_fabric.Fabric, which takes over the process group it finds."""

    forwards_together = False

    def __init__(
        self,
        options: Options,
        world: World,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Mapping[str, Any] | None,
    ) -> None:
        fabric = importlib.import_module("lightning_fabric")
        self._fabric = fabric.Fabric(
            accelerator=world.device.type,
            devices=world.local_world_size,
            num_nodes=world.world_size // world.local_world_size,
            strategy="ddp" if world.world_size > 1 else "auto",
            precision=PRECISIONS[options.amp],
        )
        self._fabric.launch()
        self._module = module
        self.model, self.optimizer = self._fabric.setup(module, optimizer)
        self._scaler = getattr(self._fabric.strategy.precision, "scaler", None)
        if self._scaler is not None and scaler:
            self._scaler.load_state_dict(dict(scaler))

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP's, through it."""
        context: AbstractContextManager[Any] = self._fabric.no_backward_sync(self.model, enabled=not is_last)
        return context

    def autocast(self) -> AbstractContextManager[Any]:
        """Its own."""
        context: AbstractContextManager[Any] = self._fabric.autocast()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Scaled, where there is a scaler."""
        self._fabric.backward(loss)

    def update(self, clip: float | None) -> None:
        """It unscales before it clips; of what is not finite the scaler takes care."""
        if clip is not None:
            self._fabric.clip_gradients(self.model, self.optimizer, max_norm=clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """Of what it has wrapped."""
        return {
            "model": self._module.state_dict(),
            "optimizer": self.optimizer.optimizer.state_dict(),
            "scaler": self._scaler.state_dict() if self._scaler is not None else {},
        }
