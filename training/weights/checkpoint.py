"""Read checkpoints of scripts that do not use kit: one file with the weights and the number of epochs done."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nodekit.training.errors import TrainingError
from nodekit.training.steps.optimizers import load_state
from nodekit.training.weights.export import load_weights, read_file, weights_in

_EPOCHS = {"epochs_run": 0, "start_epoch": 1, "epoch": 0}
"""Key, in lower case → what to add to its value to get the next epoch, from 0; by the conventions of tutorials."""
_OPTIMIZERS = ("optimizer_state_dict", "optimizer_state", "optimizer")
_LIKE_THE_WEIGHT = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Values in an optimizer's state that have their parameter's shape."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a script's checkpoint."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any] | None
    """The optimizer's state dict; None if the script did not save it."""
    epochs: int
    """How many epochs are done, which is also the next epoch's number, from 0."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file by ``torch.save``: a dictionary with the weights, the epoch and perhaps the optimizer's state.

    Raises:
        TrainingError: the file has no weights or no epoch.
    """
    found = read_file(path)
    weights = weights_in(found, path)
    keys = {str(key).lower(): key for key in found}
    name = next((each for each in _EPOCHS if each in keys), None)
    if name is None:
        raise TrainingError(
            f"{path} does not say which epoch is next: wanted it as {', '.join(_EPOCHS)}; --init-from takes its "
            "weights alone"
        )
    value = found[keys[name]]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TrainingError(f"{path}: {keys[name]} is {value!r}, wanted a whole number from 0")
    optimizer = next((found[keys[each]] for each in _OPTIMIZERS if each in keys), None)
    return Checkpoint(weights, optimizer, value + _EPOCHS[name])


def resume(
    path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, is_partial: bool
) -> tuple[int, list[str]]:
    """Load a checkpoint into module and optimizer.

    Returns:
        How many epochs are done, and a line for each thing in the checkpoint that was left out.

    Raises:
        TrainingError: the checkpoint does not fit; with ``is_partial``, weights that do not fit are left out instead.
    """
    found = read_checkpoint(path)
    left_out = load_weights(module, found.weights, path, ignore_mismatched_sizes=is_partial)
    if found.optimizer is None:
        left_out.append("the optimizer's state, which it does not have")
    elif left_out:
        left_out.append("the optimizer's state, since not all weights fit")
    else:
        load_optimizer(optimizer, found.optimizer, path)
    return found.epochs, left_out


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], path: Path) -> None:
    """Load a checkpoint's state into the optimizer, which keeps its own learning rates.

    Raises:
        TrainingError: the state is of another kind of optimizer, or of other parameters.
    """
    cure = "--init-from takes its weights alone"
    try:
        load_state(optimizer, state, is_kept=True)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{path}: its optimizer's state does not fit ({error}); {cure}") from error
    for parameter, values in optimizer.state.items():
        for name in _LIKE_THE_WEIGHT:
            value = values.get(name)
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise TrainingError(
                    f"{path}: its optimizer has {name} of {tuple(value.shape)} for a parameter of "
                    f"{tuple(parameter.shape)}; {cure}"
                )
