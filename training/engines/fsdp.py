"""Each rank keeps its part of weights, gradients and optimizer state, and gathers a layer's weights to use it."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nodekit.training.engines import State, single
from nodekit.training.snapshots.manifest import Loaded
from nodekit.training.snapshots.shards import assemble, read_into, shapes


class Engine(single.Engine):
    """FSDP2."""

    forwards_together = True
    _syncs = True  # as FSDP has it at first

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
        """FSDP is told, for this micro-batch and those after it, and so only when it changes."""
        assert isinstance(self.model, FSDPModule)
        if is_last != self._syncs:
            self._syncs = is_last
            self.model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def shards(self) -> State:
        """As it is."""
        plain = self._plain.state_dict()
        return {
            "model": self.module.state_dict(),
            "optimizer": plain,
            "scaler": self.scaler.state_dict(),
        }

    def load_shards(self, found: Loaded) -> None:
        """By the names that the whole would have; no rank waits for another."""
        assert found.shards
        flat = [each for group in self._plain.param_groups for each in group["params"]]
        weights = {f"model.{name}": each for name, each in self.module.state_dict().items()}
        try:
            wholes = shapes(found.shards)
            if foreign := [name for name in wholes if name.startswith("model.") and name not in weights]:
                raise ValueError(f"it has {foreign[0]}, which the model lacks")
            tensors = {
                name: weights[name]
                if name in weights
                else _empty_part(whole, flat[int(name.split(".", 3)[2])])
                for name, whole in wholes.items()
            }
            read_into(found.shards, weights | tensors)
            state = assemble(found.state, tensors)
            self.module.load_state_dict(state["model"])
            self._plain.load_state_dict(state["optimizer"])
        except (LookupError, ValueError, RuntimeError) as error:
            raise ValueError(f"the snapshot {found.source} is not of this task or model: {error}") from error

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Gathered, a tensor at a time, and kept by the first rank of each node."""
        whole = ((name, _whole(each)) for name, each in self.module.state_dict().items())
        return {name: each.cpu() for name, each in whole if self.world.is_first_on_node}

    def state(self) -> State:
        """Gathered, a tensor at a time."""
        return {name: _map(each, _whole) for name, each in self.shards().items()}


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


def _empty_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Room for what `_as_shard` would give."""
    if isinstance(parameter, DTensor) and whole.shape == parameter.shape and whole.ndim:
        return torch.empty_like(parameter.detach(), dtype=whole.dtype)
    return torch.empty_like(whole, device="cpu")


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(each, function) for key, each in value.items()}
    if isinstance(value, list):
        return [_map(each, function) for each in value]
    return function(value)
