"""Lightning Fabric: it wraps model and optimizer (DDP on more than one rank), autocasts, scales and clips."""

import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from nodekit.training.engines import single
from nodekit.training.engines.ddp import compress

PRECISIONS = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Engine(single.Engine):
    """lightning_fabric.Fabric, which takes over the process group it finds."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """What it sets up."""
        world = self.world
        fabric = importlib.import_module("lightning_fabric")
        strategies = importlib.import_module("lightning_fabric.strategies")
        strategy = (
            strategies.DDPStrategy(find_unused_parameters=self.options.find_unused)
            if world.world_size > 1
            else "auto"
        )
        self._fabric = fabric.Fabric(
            accelerator=world.device.type,
            devices=world.local_world_size,
            num_nodes=world.world_size // world.local_world_size,
            strategy=strategy,
            precision=PRECISIONS[self.options.amp],
        )
        self._fabric.launch()
        model: torch.nn.Module
        model, self.optimizer = self._fabric.setup(module, self.optimizer)
        compress(model._forward_module, self.options.compress)  # type: ignore[arg-type]  # private: its DDP
        self.scaler = getattr(self._fabric.strategy.precision, "scaler", None) or self.scaler
        return model

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
