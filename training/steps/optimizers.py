"""How a device computes an optimizer's step, whatever device its state was saved on."""

from collections.abc import Mapping
from typing import Any

import torch

from nodekit.training.options.options import Options
from nodekit.training.snapshots.hostcopy import map_tensors

_HOW = ("foreach", "fused", "capturable")
"""Settings of a parameter group that are about the device, not about the training."""
_OWN = (*_HOW, "lr", "initial_lr")
"""Those, and what follows from this run's options: with another ``--lr`` a run is to go on with that one."""


def is_fused(options: Options, device: torch.device) -> bool:
    """Whether torch's own optimizers are to be fused, one kernel for all parameters; on a CPU the curve would change.

    With fp16, a fused optimizer unscales the gradients itself, which Fabric and FSDP2 do not support.
    """
    return device.type == "cuda" and not (options.amp == "fp16" and options.engine in ("fabric", "fsdp"))


def unlike(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    """The settings that `load_state` takes from a state dict, where this optimizer has others; a line for each.

    By value, and not by which group has it: a line is for people.
    """
    found = []
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for name, value in ours.items():
            saved = theirs.get(name, value)
            if name in (*_OWN, "params") or isinstance(value, torch.Tensor):
                continue
            if saved != value and _shown(saved) != _shown(value):  # a list is as good as a tuple
                found.append(f"{name} {_shown(saved)} of the snapshot, not {_shown(value)}")
    return [f"the optimizer goes on with {each}" for each in dict.fromkeys(found)]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, is_kept: bool = False) -> None:
    """Load a state dict, as ``optimizer.load_state_dict``, but compute the steps as this optimizer did before.

    It keeps its learning rates, too.

    Args:
        optimizer: with the parameters.
        state: may be of another device, and in a file (see ``map_payload``).
        is_kept: the optimizer may keep tensors of the state, since it is soon to be replaced; else they are copied.

    Raises:
        KeyError, ValueError: it is of another optimizer or model.
    """
    own, groups = optimizer.param_groups, state["param_groups"]
    if len(groups) == len(own):  # else torch refuses them
        for ours, theirs in zip(own, groups, strict=True):  # torch takes any, and fails at the first step
            numbers = {name for name, value in ours.items() if type(value) in (int, float, tuple)}
            if lacking := sorted(numbers - {"lr", "initial_lr"} - set(theirs)):
                raise ValueError(
                    f"the saved optimizer has no {', '.join(lacking)}, so it is not the task's "
                    f"{type(optimizer).__name__}"
                )
        kept = [{name: group[name] for name in _OWN if name in group} for group in own]
        groups = [{**group, **each} for group, each in zip(groups, kept, strict=True)]
    values = state["state"]
    if not is_kept and all(each.device.type == "cpu" for group in own for each in group["params"]):
        # From the CPU to the CPU, torch keeps the tensors as they are.
        values = map_tensors(torch.clone, values)
    optimizer.load_state_dict({**state, "state": values, "param_groups": groups})
