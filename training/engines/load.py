"""Check and create the engine that the options name."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nodekit.training.engine_info import (
    ENGINES,
    LIBRARIES,
    EngineError,
    lacking,
    refused_on_gpus,
    refused_on_unproven,
)
from nodekit.training.engines import Engine
from nodekit.training.options.deepspeed_config import make_optimizer, read_settings
from nodekit.training.options.options import Options
from nodekit.training.options.trainer_args import read_arguments

if TYPE_CHECKING:  # `kit compare` checks engines without torch
    import torch

    from nodekit.training.world import World


def check_engine(options: Options, device: str) -> None:
    """Refuse an engine that cannot run on this machine, before any rank waits for another.

    Raises:
        EngineError: a library or compiler is missing, or the engine cannot do what the options ask for on this device.
    """
    name = options.engine
    if problem := lacking(name, [each for each in LIBRARIES if importlib.util.find_spec(each) is not None]):
        raise EngineError(problem)
    if device != "cpu" and (problem := refused_on_gpus(name)):
        raise EngineError(problem)
    if problem := refused_on_unproven(name, device):
        raise EngineError(problem)
    if options.compile and device == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        raise EngineError(
            "--compile needs a C++ compiler on a CPU, and there is no g++: apt install g++, or set CXX"
        )
    if options.deepspeed_config:
        read_settings(options.deepspeed_config)
    if options.training_args:
        read_arguments(options.training_args)
    if options.amp != "fp16":
        return
    if device != "cpu" and name == "deepspeed":
        raise EngineError(
            "--amp fp16: with --engine deepspeed there is bf16 alone; take that, or --engine fsdp"
        )
    if device == "cpu" and (does := ENGINES[name].fp16_on_cpu):
        raise EngineError(f"--amp fp16 without a GPU: {name} {does}; take bf16, or --engine ddp")


def begins_on_cpu(options: Options) -> bool:
    """Whether the engine gets module and optimizer on the CPU, since they may be larger than a device's memory."""
    return options.engine == "fsdp" or (options.engine == "deepspeed" and options.zero != 0)


def own_optimizer(
    options: Options, module: "torch.nn.Module", *, fused: bool
) -> "torch.optim.Optimizer | None":
    """Return the optimizer that ``--deepspeed-config`` names, in place of the task's; None if it names none."""
    path = options.deepspeed_config
    return make_optimizer(path, module, options.peak_lr, fused=fused) if path else None


def load_engine(
    options: Options,
    world: "World",
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    scaler: Mapping[str, Any] | None,
    *,
    are_alike: bool = False,
) -> Engine:
    """Create the engine that the options name, around a module.

    Args:
        options: of the command line.
        world: this rank's; its process group exists.
        module: with the initial weights, on the rank's device or on the CPU (``begins_on_cpu``); if the weights differ
            between ranks, rank 0's are used.
        optimizer: of the module's parameters, with its initial state.
        scaler: the gradient scaler's initial state, if any.
        are_alike: whether all ranks have the same weights already, as after loading a snapshot, so that rank 0 need not
            send them.
    """
    made: Engine = importlib.import_module(f"nodekit.training.engines.{options.engine}").Engine(
        options, world, module, optimizer, scaler, are_alike=are_alike
    )
    return made
