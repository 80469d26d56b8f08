"""DeepSpeed's ZeRO: partitions the optimizer state (stage 1), gradients too (2), weights too (3) over the ranks.

DeepSpeed keeps flat partitions of its own. A snapshot's state is gathered from these, and the optimizer's state is put
back into them, so that a snapshot is the same as any other engine's. Some names used below are private to DeepSpeed
0.19.
"""

import copy
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from nodekit.training.engine_info import EngineError
from nodekit.training.engines import State, single
from nodekit.training.options.deepspeed_config import read_settings
from nodekit.training.snapshots.hostcopy import Gathered, on_cpu

MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine(single.Engine):
    """A deepspeed.DeepSpeedEngine that steps when the loop calls it, after any number of micro-batches."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Partition the optimizer's state, and with stage 3 the weights."""
        options, optimizer = self.options, self.optimizer
        deepspeed = importlib.import_module("deepspeed")
        config = read_settings(options.deepspeed_config).engine if options.deepspeed_config else {}
        zero = config.get("zero_optimization", {})
        self._stage = stage = 1 if options.zero is None else options.zero
        if stage and not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise EngineError(
                f"--engine deepspeed --zero {stage}: found {type(optimizer).__name__}, wanted Adam or AdamW, "
                "whose state kit can put into snapshots; take --zero 0, or --engine fsdp"
            )
        self.forwards_together = stage == 3
        before = optimizer.state_dict()["state"]
        if stage:  # so that the whole state is never moved to the device; it is restored into the partitions
            optimizer.state.clear()
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._in_partitions = {
            each for group in self._groups for each in group if each.requires_grad and each.numel()
        }
        # Unused here: on first use, DeepSpeed would compile it for half a minute, by a compiler that may be missing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # The optimizer is a torch one: with offloading, DeepSpeed would insist on one of its own.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        # By default DeepSpeed allocates 500 million gradients, 2 GB on each rank, for any size of model.
        num_parameters = sum(each.numel() for each in module.parameters())
        room = {"reduce_bucket_size": min(max(num_parameters, 1), 500_000_000)}
        config |= {
            "train_micro_batch_size_per_gpu": 1,  # used for statistics only
            "managed_gradient_accumulation": False,
            "gradient_clipping": options.clip or 0.0,
            "zero_optimization": {**room, **zero, "stage": stage},
            "torch_autocast": {"enabled": options.amp == "bf16", "dtype": "bfloat16"},
            "steps_per_print": config.get("steps_per_print", 10**9),
        }
        # DeepSpeed calls these several times a step, and torch warns each time that they have new names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # DeepSpeed requires LOCAL_RANK, which is not set without a launcher.
        os.environ.setdefault("LOCAL_RANK", str(self.world.local_rank))
        if stage == 3:
            _partition(deepspeed, module, config, self.world.device)
        self._engine = deepspeed.initialize(
            model=module, optimizer=optimizer, dist_init_required=False, config=config
        )[0]
        self.optimizer = self._engine.optimizer
        if before and self._stage:
            self._put_back(before)
        model: torch.nn.Module = self._engine
        return model

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)  # the loss is weighted already

    def update(self, clip: float | None) -> None:  # noqa: ARG002  # set in `wrap`
        self.drop_untrained()
        self._engine.step()  # which clips, and clears the gradients

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self._stage == 0:
            return super().weights()
        parts = self._parts()
        each_once = {id(part): part for part in parts.values()}
        whole = (
            (key, part.gather() if isinstance(part, Gathered) else part) for key, part in each_once.items()
        )
        weights = {key: on_cpu(each) for key, each in whole if self.world.is_first_on_node}
        return {name: weights[id(part)] for name, part in parts.items() if weights}

    def state(self) -> State:
        if self._stage == 0:
            return super().state()
        base = self._engine.optimizer.optimizer
        steps = {
            group: base.state[flat]["step"]
            for group, flat in self._flats()
            if "step" in base.state.get(flat, {})
        }
        if steps and self._stage < 3:
            self._relink()
        state: dict[int, dict[str, Any]] = {}
        groups, number = [], 0
        for index, (members, group) in enumerate(zip(self._groups, base.param_groups, strict=True)):
            numbers = range(number, number + len(members))
            groups.append({**group, "params": list(numbers)})
            for number, each in zip(numbers, members, strict=True):
                if index in steps and each in self._in_partitions:
                    moments = {name: _gathered(each, partial(self._moment, each, name)) for name in MOMENTS}
                    state[number] = {"step": torch.tensor(float(steps[index])), **moments}
            number = numbers.stop
        return {"model": self._parts(), "optimizer": {"state": state, "param_groups": groups}, "scaler": {}}

    def _parts(self) -> dict[str, Any]:
        """Return the module's state dict, with a `Gathered` for each partitioned weight."""
        values: dict[str, Any] = dict(self.module.named_buffers(remove_duplicate=False))
        parts = {each: _gathered(each, partial(self._whole, each)) for each in self.module.parameters()}
        values.update(
            (name, parts[each]) for name, each in self.module.named_parameters(remove_duplicate=False)
        )
        # The remaining values are modules' extra state.
        return {name: values.get(name, value) for name, value in self.module.state_dict().items()}

    def _whole(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        deepspeed = importlib.import_module("deepspeed")
        if parameter in self._in_partitions:
            value = deepspeed.utils.safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._stage == 3):
                value = parameter.detach().clone()
        whole: torch.Tensor = value.detach().float().view(_shape(parameter))
        return whole

    def _moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        value = importlib.import_module("deepspeed.utils").safe_get_full_optimizer_state(parameter, name)
        whole: torch.Tensor = value.detach().view(_shape(parameter))
        return whole

    def _flats(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield this rank's flat partitions, each with the number of its parameter group."""
        zero = self._engine.optimizer
        if self._stage == 3:
            for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
                yield zero.sub_group_to_group_id[number], flat
        else:
            yield from enumerate(zero.single_partition_of_fp32_groups)

    def _relink(self) -> None:
        """Link the state to the parameters of all groups: after the first step, DeepSpeed has linked the first only."""
        zero = self._engine.optimizer
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()

    def _put_back(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the optimizer's state into the partitions; the weights were in the module from the start.

        Other engines save no state for a parameter that has had no gradient yet.
        """
        utils, base = importlib.import_module("deepspeed.utils"), self._engine.optimizer.optimizer
        steps = self._steps_in(state)
        base.state.clear()
        for group, flat in self._flats():
            if group not in steps:
                continue
            is_fused = base.param_groups[group].get("fused")  # a fused optimizer counts steps on the device
            step = torch.tensor(steps[group], device=flat.device if is_fused else None)
            base.state[flat] = {"step": step, **{name: torch.zeros_like(flat) for name in MOMENTS}}
        if self._stage < 3:
            self._relink()
        for number, parameter in enumerate(each for group in self._groups for each in group):
            if number not in state or parameter not in self._in_partitions:
                continue
            for name in MOMENTS:
                value = state[number][name]
                if self._stage < 3:
                    utils.safe_set_full_optimizer_state(parameter, value, name)
                    continue
                # DeepSpeed's setter of full values fails if their size is not divisible by the world size.
                size, rank = parameter.ds_tensor.numel(), self.world.rank
                padded = functional.pad(value.flatten(), (0, size * self.world.world_size - value.numel()))
                utils.safe_set_local_optimizer_state(parameter, padded[rank * size : (rank + 1) * size], name)

    def _steps_in(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
        """Return, for each parameter group, the step count of its first member with a state."""
        steps: dict[int, float] = {}
        groups = (index for index, members in enumerate(self._groups) for _ in members)
        for number, group in enumerate(groups):
            if number in state:
                steps.setdefault(group, float(state[number]["step"]))
        return steps


def _partition(deepspeed: Any, module: torch.nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Partition the weights one by one: ``initialize`` would first move the whole module to the device."""
    deepspeed.init_distributed(dist_init_required=False)
    deepspeed.zero.Init(module=module, config_dict_or_path=copy.deepcopy(config), dtype=torch.float32)
    for owner in module.modules():  # ``initialize`` then leaves the buffers where they are
        for name, each in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, each.to(device))


def _gathered(parameter: torch.nn.Parameter, gather: Callable[[], torch.Tensor]) -> Gathered:
    return Gathered(_shape(parameter), torch.float32, parameter.device, gather)


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Return a parameter's full shape: stage 3 empties the parameter, and keeps its shape in an attribute."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
