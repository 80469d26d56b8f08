"""Each rank keeps its part of weights, gradients and optimizer state, and gathers a layer's weights to use it."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nodekit.training.engines import State, single


class Engine(single.Engine):
    """FSDP2."""

    forwards_together = True

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard the members of each ModuleList (a transformer's layers) by themselves, and what is left as one."""
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)  # it would put parts of different models together
        before = copy.deepcopy(self.optimizer.state_dict())
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [[names[each] for each in group["params"]] for group in self.optimizer.param_groups]
        mesh = init_device_mesh(self.world.device.type, (self.world.world_size,))
        for layers in module.modules():
            for layer in layers if isinstance(layers, torch.nn.ModuleList) else ():
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        # The parameters are new ones now.
        parameters = dict(module.named_parameters())
        for group, members in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in members]
        self.optimizer.state.clear()
        flat = [each for group in self.optimizer.param_groups for each in group["params"]]
        state = {
            number: {name: _as_shard(value, flat[number]) for name, value in values.items()}
            for number, values in before["state"].items()
        }
        self.optimizer.load_state_dict({**before, "state": state})
        return module

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """FSDP is told, for this micro-batch and those after it."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def state(self) -> State:
        """Gathered, a tensor at a time."""
        state = super().state()
        return {**state, **{name: _map(state[name], _whole) for name in ("model", "optimizer")}}


def _as_shard(value: Any, parameter: torch.nn.Parameter) -> Any:
    """This rank's part of what the optimizer knows of a parameter; its count of steps is the same everywhere."""
    if not (
        isinstance(parameter, DTensor)
        and torch.is_tensor(value)
        and value.shape == parameter.shape
        and value.ndim
    ):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    if isinstance(value, list):
        return [_map(each, function) for each in value]
    return function(value)
