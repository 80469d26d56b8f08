"""Settings of optimizers that depend on the device, and loading an optimizer's state on another device."""

from collections.abc import Mapping
from typing import Any

import torch

from nodekit.training.options.options import Options
from nodekit.training.snapshots.hostcopy import map_tensors

_HOW = ("foreach", "fused", "capturable")
"""Settings of a parameter group that depend on the device, not on the training."""
_OWN = (*_HOW, "lr", "initial_lr")
"""Settings that `load_state` does not load: `_HOW`, and the learning rates, which follow from this run's ``--lr``."""


def is_fused(options: Options, device: torch.device) -> bool:
    """Whether torch's own optimizers are to be fused (one kernel for all parameters): on CUDA only.

    On a CPU, fused optimizers would change the loss curve. With fp16, they unscale the gradients themselves, which
    Fabric and FSDP2 do not support.
    """
    return device.type == "cuda" and not (options.amp == "fp16" and options.engine in ("fabric", "fsdp"))


def unlike(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting in which a state dict for `load_state` differs from this optimizer.

    Lines are for people: equal ones, from several parameter groups, are listed once.
    """
    found = []
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for name, value in ours.items():
            saved = theirs.get(name, value)
            if name in (*_OWN, "params") or isinstance(value, torch.Tensor):
                continue
            # A list and a tuple of equal values are the same.
            if saved != value and _shown(saved) != _shown(value):
                found.append(f"{name} {_shown(saved)} of the snapshot, not {_shown(value)}")
    return [f"the optimizer goes on with {each}" for each in dict.fromkeys(found)]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, is_kept: bool = False) -> None:
    """As ``optimizer.load_state_dict``, but keep this optimizer's learning rates and settings for its device.

    Args:
        optimizer: with the parameters.
        state: may be from another device, or mapped from a file (see ``map_payload``).
        is_kept: let the optimizer keep tensors of ``state``, which the caller does not use again; otherwise copy them.

    Raises:
        KeyError, ValueError: the state is of another optimizer or model.
    """
    own, groups = optimizer.param_groups, state["param_groups"]
    if len(groups) == len(own):  # otherwise torch refuses the state
        # Torch accepts any keys, and fails at the first step.
        for ours, theirs in zip(own, groups, strict=True):
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
        # From CPU to CPU, torch keeps the state's own tensors.
        values = map_tensors(torch.clone, values)
    optimizer.load_state_dict({**state, "state": values, "param_groups": groups})
