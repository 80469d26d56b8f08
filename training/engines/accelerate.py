"""Hugging Face Accelerate: prepares the model (in DDP if there are several ranks), autocasts, scales and clips."""

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nodekit.training.engines import single
from nodekit.training.engines.ddp import set_up
from nodekit.training.world import World

PRECISIONS = {"off": "no", "bf16": "bf16", "fp16": "fp16"}


def forget_ranks(world: World) -> None:
    """Make Accelerate read the ranks from the process group again: it caches those of this process's first group."""
    # On the CPUs of several nodes, Accelerate refuses to start without an address, though the process group exists.
    os.environ.setdefault("MASTER_ADDR", world.init_method.host or "localhost")
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


class Engine(single.Engine):
    """An accelerate.Accelerator; its `end_training` is not called, since it would destroy the process group."""

    accelerator: Any

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        accelerate = importlib.import_module("accelerate")
        forget_ranks(self.world)
        # Accelerate's own accumulation stays at 1: its `backward` would divide a loss that is weighted already.
        self.accelerator = accelerate.Accelerator(
            cpu=self.world.device.type == "cpu",
            mixed_precision=PRECISIONS[self.options.amp],
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                accelerate.DistributedDataParallelKwargs(find_unused_parameters=self.options.find_unused)
            ],
        )
        model: torch.nn.Module
        model, self.optimizer = self.accelerator.prepare(module, self.optimizer)
        self.scaler = self.accelerator.scaler or self.scaler
        set_up(model, self.options.compress)
        return model

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.accelerator.no_sync(self.model)

    def autocast(self) -> Any:
        return self.accelerator.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def update(self, clip: float | None) -> None:
        self.drop_untrained()
        if clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), clip)  # unscales first
        self.optimizer.step()
        self.optimizer.zero_grad()
