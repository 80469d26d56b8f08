"""Lightning Fabric: wraps model and optimizer (in DDP if there are several ranks), autocasts, scales and clips."""

import importlib
from typing import Any

import torch

from nodekit.training.engines import single
from nodekit.training.engines.ddp import set_up
from nodekit.training.world import World

PRECISIONS = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Engine(single.Engine):
    """A lightning_fabric.Fabric that uses the existing process group."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        world = self.world
        strategies = importlib.import_module("lightning_fabric.strategies")
        # Fabric reads RANK on import, which may have been in the process that this one was forked from.
        ranks = importlib.import_module("lightning_fabric.utilities.rank_zero")
        ranks.rank_zero_only.rank = world.rank
        ddp = strategies.DDPStrategy(find_unused_parameters=self.options.find_unused)
        self._fabric = importlib.import_module("lightning_fabric").Fabric(
            accelerator=world.device.type,
            devices=world.local_world_size,
            num_nodes=max(1, world.world_size // world.local_world_size),
            plugins=[_environment(world)],
            strategy=ddp if world.world_size > 1 else "auto",
            precision=PRECISIONS[self.options.amp],
        )
        self._fabric.launch()
        model: torch.nn.Module
        model, self.optimizer = self._fabric.setup(module, self.optimizer)
        set_up(model._forward_module, self.options.compress)  # type: ignore[arg-type]  # private: its DDP
        self.scaler = getattr(self._fabric.strategy.precision, "scaler", None) or self.scaler
        return model

    def sync(self, *, is_last: bool) -> Any:
        return self._fabric.no_backward_sync(self.model, enabled=not is_last)

    def autocast(self) -> Any:
        return self._fabric.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)

    def update(self, clip: float | None) -> None:
        self.drop_untrained()
        if clip is not None:
            # Fabric unscales first. If the norm is not finite, the scaler skips the step.
            self._fabric.clip_gradients(self.model, self.optimizer, max_norm=clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _environment(world: World) -> Any:
    """Return a ClusterEnvironment with the actual ranks: Fabric itself assumes equally many ranks on each node."""
    base: Any = importlib.import_module("lightning_fabric.plugins.environments").ClusterEnvironment

    class Environment(base):  # type: ignore[misc]  # the base class is known at run time only
        creates_processes_externally = True
        main_address, main_port = "", 0  # not needed: the process group exists already

        @staticmethod
        def detect() -> bool:
            return True

        def world_size(self) -> int:
            return world.world_size

        def global_rank(self) -> int:
            return world.rank

        def local_rank(self) -> int:
            return world.local_rank

        def node_rank(self) -> int:
            return world.node_rank

        def set_world_size(self, size: int) -> None:
            pass

        def set_global_rank(self, rank: int) -> None:
            pass

        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            pass

    return Environment()
