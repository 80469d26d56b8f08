"""FSDP2: each rank keeps a part of weights, gradients and optimizer state, and gathers a layer's weights on use."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from nodekit.training.engines import State, single
from nodekit.training.errors import TrainingError
from nodekit.training.group.collectives import broadcast_from_first
from nodekit.training.snapshots.files.manifest import Loaded
from nodekit.training.snapshots.files.shards import assemble, files_of, read_into, shapes
from nodekit.training.snapshots.hostcopy import Gathered, map_tensors, on_cpu
from nodekit.training.steps.optimizers import load_state


class Engine(single.Engine):
    """Shards the module by torch's ``fully_shard``."""

    forwards_together = True
    _syncs = True  # FSDP's default

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard each member of a ModuleList (a transformer's layers) by itself, and all other parameters together.

        A member that occurs twice, or shares a weight with a module outside, is sharded with the other parameters:
        FSDP2 would untie such weights.

        Module and optimizer state are on the CPU: only one layer or tensor at a time is moved to the device.
        """
        # Without this, the ranks' shards would be of different models.
        broadcast_from_first(module.state_dict().values(), self.world.device)
        before = self.optimizer.state_dict()
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [[names[each] for each in group["params"]] for group in self.optimizer.param_groups]
        mesh = init_device_mesh(self.world.device.type, (self.world.world_size,))
        for layer in _separate_layers(module):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        # `fully_shard` has replaced the parameters.
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
        assert isinstance(self.model, FSDPModule)
        if is_last != self._syncs:  # FSDP keeps the setting for the micro-batches that follow
            self._syncs = is_last
            self.model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def shards(self) -> State:
        model, tied = self.module.state_dict(), _tied(self.module)
        for name in tied:
            del model[name]
        return {"model": model, "tied": tied, **self._others()}

    def load_shards(self, found: Loaded) -> None:
        assert found.shards
        flat = [each for group in self._plain.param_groups for each in group["params"]]
        tied = found.state.get("tied", {})
        weights = {
            f"model.{name}": each
            for name, each in self.module.state_dict().items()
            if name not in tied and isinstance(each, torch.Tensor)  # not a module's extra state
        }
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
            if found.fetch:
                found.fetch(files_of(found.shards, weights | tensors))
            read_into(found.shards, weights | tensors)
            state = assemble(found.state, tensors)
            self.module.load_state_dict(state["model"])
            load_state(self._plain, state["optimizer"], is_kept=True)
        except (LookupError, ValueError, RuntimeError) as error:
            raise TrainingError(
                f"the snapshot {found.source} is not of this task or model: {error}"
            ) from error

    def _others(self) -> State:
        return {"optimizer": self._plain.state_dict(), "scaler": self.scaler.state_dict()}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Gather one tensor at a time; only the first rank of each node keeps and returns them."""
        parts, tied = self.module.state_dict(), _tied(self.module)
        whole = ((name, _whole(each)) for name, each in parts.items() if name not in tied)
        weights = {name: on_cpu(each) for name, each in whole if self.world.is_first_on_node}
        return {name: weights[tied.get(name, name)] for name in parts if weights}

    def state(self) -> State:
        model: dict[str, Any] = map_tensors(_gathered, self.module.state_dict())
        model.update((name, model[first]) for name, first in _tied(self.module).items())
        state: State = {**map_tensors(_gathered, self._others()), "model": model}
        return state


def _separate_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of the module's ModuleLists that share no parameter with a module outside them."""

    def uses(part: torch.nn.Module) -> Counter[torch.nn.Parameter]:
        return Counter(each for _, each in part.named_parameters(remove_duplicate=False))

    everywhere = uses(module)
    lists = (each for each in module.modules() if isinstance(each, torch.nn.ModuleList))
    return [
        layer
        for layers in lists
        for layer in layers
        if all(everywhere[each] == number for each, number in uses(layer).items())
    ]


def _tied(module: torch.nn.Module) -> dict[str, str]:
    """Return, for parameters with several names, each further name → the first one."""
    first: dict[torch.nn.Parameter, str] = {}
    names = (
        (name, first.setdefault(each, name)) for name, each in module.named_parameters(remove_duplicate=False)
    )
    return {name: other for name, other in names if name != other}


def _as_shard(value: Any, parameter: torch.nn.Parameter) -> Any:
    """Return this rank's part of a value in a parameter's optimizer state; the step count stays whole."""
    if not (
        isinstance(parameter, DTensor)
        and torch.is_tensor(value)
        and value.shape == parameter.shape
        and value.ndim
    ):
        return value
    own = torch.empty_like(parameter.to_local(), dtype=value.dtype, requires_grad=False)
    parts = value.chunk(parameter.device_mesh.size())  # as FSDP2 does: along the first dimension
    if own.numel():
        own.copy_(parts[parameter.device_mesh.get_local_rank()])
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _empty_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor like the one that `_as_shard` would return."""
    if isinstance(parameter, DTensor) and whole.shape == parameter.shape and whole.ndim:
        return torch.empty_like(parameter.detach(), dtype=whole.dtype)
    return torch.empty_like(whole, device="cpu")


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gathered(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return Gathered(value.shape, value.dtype, value.device, value.full_tensor)
