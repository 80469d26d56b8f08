"""Files that options name: DeepSpeed's configuration and TrainingArguments, taken or refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nodekit.training.engine_info import EngineError
from nodekit.training.options.arguments import OptionsError, read
from nodekit.training.options.deepspeed_config import make_optimizer, read_settings
from nodekit.training.options.options import Options
from nodekit.training.options.trainer_args import _DECIDED_BY, TAKEN, read_arguments

TUTORIAL = {
    "train_micro_batch_size_per_gpu": 32,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
}
"""As it stands in the tutorial for DeepSpeed."""
AUTO = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""As transformers' documentation has it."""


def options(
    folder: Path, config: Mapping[str, Any], *arguments: str, environ: Mapping[str, str] | None = None
) -> Options:
    (folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    given = ["--engine", "deepspeed", "--deepspeed-config", "ds.json", *arguments]
    return read(given, environ or {}, folder=folder)


def changed(found: Options) -> dict[str, Any]:
    """The options that are not their defaults."""
    return {
        each.name: getattr(found, each.name)
        for each in dataclasses.fields(Options)
        if getattr(found, each.name) != each.default and each.name not in ("engine", "deepspeed_config")
    }


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        (TUTORIAL, [], {"batch_size": 128, "micro_batch": 32, "lr": 1e-4}),
        (TUTORIAL, ["--batch-size", "64", "--lr", "1e-4"], {"micro_batch": 32, "lr": 1e-4}),
        (AUTO, [], {"schedule": "constant", "zero": 2}),
        (AUTO, ["--amp", "bf16", "--clip", "1"], {"schedule": "constant", "zero": 2, "amp": "bf16", "clip": 1.0}),
        ({"optimizer": "auto", "scheduler": "auto", "zero_optimization": "auto", "bf16": "auto"}, [], {}),
        (
            {"train_batch_size": 256, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5},
            [],
            {"batch_size": 256, "accumulate": 4, "clip": 0.5},
        ),
        (
            {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4},
            [],
            {"batch_size": 256, "micro_batch": 16},
        ),
        (
            {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2},
            [],
            {"batch_size": 128, "micro_batch": 16},
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, [], {"amp": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, [], {"amp": "bf16"}),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 7, "total_num_steps": "auto"},
                }
            },
            [],
            {"schedule": "linear", "lr": 0.01, "warmup_steps": 7},
        ),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}}}, [], {}),
        ({"gradient_clipping": 0.0}, [], {}),
    ],
)  # fmt: skip
def test_what_deepspeeds_file_says_is_taken(
    config: Mapping[str, Any], arguments: list[str], expected: Mapping[str, Any], tmp_path: Path
) -> None:
    assert changed(options(tmp_path, config, *arguments, environ={"WORLD_SIZE": "4"})) == expected


def test_all_that_clashes_is_told_at_once(tmp_path: Path) -> None:
    config = {
        **TUTORIAL,
        "gradient_clipping": 1.0,
        "train_batch_size": "many",
        "fp16": {"enabled": True},
        "bf16": {"enabled": "yes"},
        "amp": 3,
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_max_lr": 0.01,
                "warmup_type": "log",
                "total_num_steps": 100,
                "warmup_steps": 3,
            },
        },
        "zero_optimization": {"stage": 3},
        "managed_gradient_accumulation": True,
    }
    given = ("--zero", "1", "--clip", "0.5", "--lr", "0.1", "--schedule", "cosine", "--accumulate", "2")
    with pytest.raises(OptionsError) as refused:
        options(tmp_path, config, *given)
    said = str(refused.value)
    assert said.startswith(f"python -m nodekit.training: --deepspeed-config {tmp_path / 'ds.json'}: ")
    assert "\n" not in said
    for clause in (
        'train_batch_size is "many"; wanted a whole number above 0',
        "fp16.enabled is true; wanted false: in mixed precision there is bf16 alone",
        'bf16.enabled is yes; wanted true, false or "auto"',
        "amp is 3; wanted an object, {…}",
        "optimizer.params.lr is 0.0001, and scheduler.params.warmup_max_lr is 0.01",
        "scheduler.params.warmup_type is log; wanted linear, as --schedule does",
        'scheduler.params.total_num_steps is 100; wanted none, or "auto": it follows from --epochs',
        "scheduler.params.warmup_steps is 3; wanted no such parameter",
        "managed_gradient_accumulation is True; wanted none",
        "train_micro_batch_size_per_gpu is 32, and --accumulate is 2",
        "optimizer.params.lr is 0.0001, and --lr is 0.1",
        "scheduler.type is WarmupLR, and --schedule is cosine",
        "gradient_clipping is 1.0, and --clip is 0.5",
        "zero_optimization.stage is 3, and --zero is 1",
    ):
        assert clause in said, clause


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4; wanted 0 to 3"),
        ('{"zero_optimization": true}', "zero_optimization is true; wanted an object"),
        ('{"optimizer": {"type": "Lamb"}}', "optimizer.type is Lamb; wanted Adam or AdamW, or no optimizer"),
        (
            '{"optimizer": {"params": {"lr": 1}}}',
            "optimizer is without a type; wanted its type, or no optimizer",
        ),
        ('{"optimizer": {"type": "Adam", "params": {"amsgrad": true}}}', "optimizer.params.amsgrad is True; wanted"),
        ('{"scheduler": {"type": "OneCycle"}}', "scheduler.type is OneCycle; wanted WarmupLR, WarmupDecayLR"),
        ('{"gradient_clipping": -1}', "gradient_clipping is -1; wanted a number above 0"),
        ("[]", "found a list, wanted an object"),
        ("{", "wanted JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    given = ["--engine", "deepspeed", "--deepspeed-config", "ds.json"]
    with pytest.raises(OptionsError, match=re.escape(expected)):
        read(given, {}, folder=tmp_path)


def test_deepspeed_itself_gets_what_is_no_option_without_auto(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    assert read_settings(tmp_path / "ds.json").engine == {
        "zero_optimization": {
            name: value
            for name, value in AUTO["zero_optimization"].items()
            if value != "auto"  # type: ignore[attr-defined]
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


@pytest.mark.parametrize(
    ("optimizer", "kind", "expected"),
    [
        ({"type": "Adam", "params": {"lr": 1e-4}}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "eps": 1e-6}}, torch.optim.Adam, {"eps": 1e-6}),
        (
            {"type": "AdamW", "params": {"betas": [0.8, 0.99], "weight_decay": 0.1, "lr": "auto"}},
            torch.optim.AdamW,
            {"betas": (0.8, 0.99), "weight_decay": 0.1},
        ),
    ],
)
def test_the_optimizer_is_the_one_that_deepspeed_would_make(
    optimizer: Mapping[str, Any],
    kind: type[torch.optim.Optimizer],
    expected: Mapping[str, Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": optimizer}))
    made = make_optimizer(tmp_path / "ds.json", nn.Linear(2, 2), 0.25)
    assert type(made) is kind
    (group,) = made.param_groups
    assert {name: group[name] for name in expected} == expected
    assert group["lr"] == 0.25
    (tmp_path / "ds.json").write_text("{}")
    assert make_optimizer(tmp_path / "ds.json", nn.Linear(2, 2), 0.25) is None


def test_a_file_that_is_not_there_is_left_to_who_runs_the_command(tmp_path: Path) -> None:
    given = ["--engine", "deepspeed", "--deepspeed-config"]
    (tmp_path / "here.json").write_text("[]")
    for path, folder in (
        ("none.json", tmp_path),
        (str(tmp_path / "here.json"), tmp_path),
        ("here.json", None),
    ):
        assert read([*given, path], {}, folder=folder).deepspeed_config == Path(path)
    with pytest.raises(
        EngineError, match=r"--deepspeed-config none\.json: No such file or directory, from /"
    ):
        read_settings(Path("none.json"))


def test_training_arguments_that_kit_decides_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"gradient_checkpointing": True, "ddp_bucket_cap_mb": 8}))
    given = ["--engine", "trainer", "--training-args", "args.json"]
    assert read(given, {}, folder=tmp_path).training_args == Path("args.json")
    assert read_arguments(path) == {"gradient_checkpointing": True, "ddp_bucket_cap_mb": 8}
    path.write_text(
        '{"learning_rate": 3e-5, "evaluation_strategy": "epoch", "gradient_checkpoint": true, "qqq": 1, "tf32": true}'
    )
    with pytest.raises(OptionsError) as refused:
        read(given, {}, folder=tmp_path)
    assert str(refused.value) == (
        f"python -m nodekit.training: --training-args {path}: learning_rate is decided by --lr; evaluation_strategy "
        "is decided by --eval-every; there is no gradient_checkpoint (did you mean gradient_checkpointing?); there "
        f"is no qqq; left to you are {', '.join(TAKEN)}"
    )
    with pytest.raises(
        OptionsError, match="--training-args: the engine ddp has none; it is for --engine trainer"
    ):
        read(["--training-args", "args.json"], {}, folder=tmp_path)


def test_every_training_argument_of_transformers_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    known = {each.name for each in dataclasses.fields(transformers.TrainingArguments) if each.init}
    assert known - {*TAKEN, *_DECIDED_BY} == set()
    assert not set(TAKEN) & set(_DECIDED_BY)
