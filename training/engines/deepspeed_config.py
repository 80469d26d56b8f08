"""The user's own DeepSpeed configuration, for settings that are no options here."""

import json
from pathlib import Path
from typing import Any

from nodekit.training.engine_info import EngineError
from nodekit.training.options import Options

OWNED = {
    "train_batch_size": "--batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch",
    "gradient_accumulation_steps": "--accumulate",
    "managed_gradient_accumulation": "--accumulate",
    "gradient_clipping": "--clip",
    "optimizer": "the task's optimizer",
    "scheduler": "--schedule",
    "fp16": "--amp",
    "bf16": "--amp",
    "amp": "--amp",
    "torch_autocast": "--amp",
}
"""Key of a DeepSpeed configuration → the option, or part of the task, that sets it."""


def read_config(options: Options) -> dict[str, Any]:
    """The user's configuration, without keys that an option sets: these may be "auto" in the file.

    Raises:
        EngineError: the file cannot be read, or sets what an option sets, or another stage than ``--zero``.
    """
    path = options.deepspeed_config
    if path is None:
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineError(f"--deepspeed-config {path}: {error.strerror}, from {Path.cwd()}") from error
    except ValueError as error:
        raise EngineError(f"--deepspeed-config {path}: {error}; wanted JSON") from error
    if not isinstance(config, dict):
        raise EngineError(
            f"--deepspeed-config {path}: found a {type(config).__name__}, wanted an object, {{…}}"
        )
    for name, option in OWNED.items():
        if config.pop(name, "auto") != "auto":
            raise EngineError(
                f'--deepspeed-config {path}: {name} is said by {option}; leave it out, or "auto"'
            )
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", "auto") if isinstance(zero, dict) else zero
    if stage not in ("auto", 0, 1, 2, 3):
        raise EngineError(f"--deepspeed-config {path}: zero_optimization.stage is {stage!r}; wanted 0 to 3")
    if stage != "auto" and options.zero not in (None, stage):
        raise EngineError(f"--zero {options.zero}, but {path} has stage {stage}; leave one of them out")
    return config
