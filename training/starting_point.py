"""Where a training begins: at the newest snapshot, at weights or a checkpoint that the options name, or at step 0."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nodekit.training.data.sampler import ElasticSampler
from nodekit.training.engines.load import begins_on_cpu
from nodekit.training.errors import TrainingError
from nodekit.training.options.options import Options
from nodekit.training.snapshots.files.manifest import Loaded
from nodekit.training.steps.optimizers import load_state, unlike
from nodekit.training.weights import checkpoint
from nodekit.training.weights.export import load_weights, read_weights

_ANEW = "To train anew, give another folder with --output, or a new run with kit up --new"


@dataclass(frozen=True)
class StartingPoint:
    """The step that a training goes on from; by default, step 0."""

    step: int = 0
    trained_s: float = 0.0
    """How many seconds the job has trained until that step, restarts included."""
    resumed_from: str | None = None
    """The snapshot or checkpoint, as text for people; None if neither was loaded."""
    notes: Sequence[str] = ()
    """Remarks for the user, a line each: weights that were left out, or optimizer settings that differ."""


def load(
    found: Loaded | None,
    options: Options,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: ElasticSampler,
) -> StartingPoint:
    """Load a snapshot, or the files that the options name, into model, optimizer and sampler.

    The tensors of a sharded snapshot are left to the engine.

    Raises:
        TrainingError: the snapshot or file is of another task or model, or trained to the end already.
    """
    if found:
        return _snapshot(found, options, module, optimizer, sampler)
    is_partial = options.ignore_mismatched_sizes
    if path := options.init_from:
        left_out = load_weights(module, read_weights(path), path, ignore_mismatched_sizes=is_partial)
        return StartingPoint(notes=_without(left_out, path))
    if path := options.resume_from:
        return _checkpoint(path, options, module, optimizer, sampler)
    return StartingPoint()


def _snapshot(
    found: Loaded,
    options: Options,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: ElasticSampler,
) -> StartingPoint:
    state = found.state
    try:
        notes = unlike(optimizer, state["optimizer"])
        if not found.shards:  # otherwise the engine reads the tensors, each rank its own part
            module.load_state_dict(state["model"])
            load_state(optimizer, state["optimizer"], is_kept=begins_on_cpu(options))
        sampler.load_state_dict(state["sampler"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise TrainingError(
            f"the snapshot {found.source} is not of this task or model: {error}. {_ANEW}"
        ) from error
    _refuse_if_over(found.source, options, sampler)
    return StartingPoint(state["step"], state.get("trained_s", 0.0), found.source, notes)


def _checkpoint(
    path: Path,
    options: Options,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: ElasticSampler,
) -> StartingPoint:
    """Load a script's own checkpoint, and continue at its epoch."""
    is_partial = options.ignore_mismatched_sizes
    sampler.epoch, left_out = checkpoint.resume(path, module, optimizer, is_partial=is_partial)
    _refuse_if_over(str(path), options, sampler)
    step = sampler.epoch * sampler.steps_per_epoch
    return StartingPoint(step, resumed_from=str(path), notes=_without(left_out, path))


def _without(left_out: Sequence[str], path: Path) -> list[str]:
    return [f"left out of {path}: {each}" for each in left_out]


def _refuse_if_over(source: str, options: Options, sampler: ElasticSampler) -> None:
    if sampler.epoch >= options.epochs:
        raise TrainingError(
            f"{source} is in epoch {sampler.epoch + 1} already and --epochs is {options.epochs}: give more epochs. "
            f"{_ANEW}"
        )
