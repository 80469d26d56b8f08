"""Read a user's DeepSpeed configuration: values of kit's options, the optimizer, and settings for DeepSpeed itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.training.engine_info import EngineError

if TYPE_CHECKING:
    import torch

OURS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("managed_gradient_accumulation", "gradient_clipping", "optimizer", "scheduler"),
    *("fp16", "bf16", "bfloat16", "amp", "torch_autocast"),
)
"""Keys that become kit's options or the optimizer, and are not passed to DeepSpeed."""

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULED = {"warmup_min_lr": 0, "warmup_min_ratio": 0, "cos_min_ratio": 0, "warmup_type": "linear"}
"""Parameters of schedulers → the only value that kit's schedules support."""
_OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam")


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one of kit's options, from the file."""

    key: str
    """The file's key."""
    value: Any
    """The option's value."""
    shown: Any
    """The value as the file has it, for messages."""


@dataclass(slots=True)
class Settings:
    """The settings of a file."""

    options: dict[str, Setting] = field(default_factory=dict)
    """Option → its value."""
    batch_size: int | None = None
    """The global batch that the file's batch per rank gives; ``--batch-size`` may set another one."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Arguments for `make_optimizer`; empty for the task's own optimizer."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings that are passed to DeepSpeed."""
    problems: list[str] = field(default_factory=list)
    """Messages on settings that kit cannot follow."""

    def defaults(self) -> dict[str, Any]:
        """Return option → value, the defaults that the file gives to kit's options."""
        batch = {} if self.batch_size is None else {"batch_size": self.batch_size}
        return batch | {name: setting.value for name, setting in self.options.items()}

    def clashes(self, given: Mapping[str, Any]) -> list[str]:
        """Return a clause for each setting that kit cannot follow, or that the command line contradicts.

        Args:
            given: option → value, parsed with `defaults` as the defaults.
        """
        found = list(self.problems)
        for name, setting in self.options.items():
            # The two options exclude each other, and --accumulate would take precedence.
            rival = {"micro_batch": "accumulate", "accumulate": "micro_batch"}.get(name, "")
            for option, clash in (
                (name, given[name] != setting.value),
                (rival, bool(rival) and given[rival] is not None),
            ):
                if clash:
                    flag = f"--{option.replace('_', '-')}"
                    said = "not given" if given[option] is None else given[option]
                    found.append(f"{setting.key} is {setting.shown}, and {flag} is {said}")
        return found


def read_settings(path: Path, num_ranks: int = 1) -> Settings:
    """Read the file; a key that is "auto", at any depth, is as if it were absent.

    Args:
        path: of a JSON object.
        num_ranks: the number of ranks, to compute the global batch from a batch per rank.

    Raises:
        EngineError: the file cannot be read.
    """
    reader = _Reader(_without_auto(read_object(path, "--deepspeed-config")))
    reader.batch(num_ranks)
    reader.precision()
    reader.optimizer()
    reader.scheduler()
    reader.others()
    return reader.found


def read_object(path: Path, option: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        EngineError: the file cannot be read, or is not a JSON object; the message names ``option``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise EngineError(f"{option} {path}: {error.strerror}, from {Path.cwd()}") from error
    except ValueError as error:
        raise EngineError(f"{option} {path}: {error}; wanted JSON") from error
    if not isinstance(found, dict):
        raise EngineError(f"{option} {path}: found a {type(found).__name__}, wanted an object, {{…}}")
    return found


def make_optimizer(
    path: Path, module: "torch.nn.Module", lr: float, *, fused: bool = False
) -> "torch.optim.Optimizer | None":
    """Return torch's optimizer for the one that the file names; None if it names none."""
    if not (arguments := read_settings(path).optimizer):
        return None
    import torch

    kind = torch.optim.AdamW if arguments.pop("is_decoupled") else torch.optim.Adam
    made: torch.optim.Optimizer = kind(module.parameters(), lr=lr, fused=fused or None, **arguments)
    return made


class _Reader:
    """Reads the file's sections one after the other into `found`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.found = Settings(engine={name: each for name, each in config.items() if name not in OURS})

    def batch(self, num_ranks: int) -> None:
        whole = self._number("train_batch_size", is_whole=True)
        micro = self._number("train_micro_batch_size_per_gpu", is_whole=True)
        parts = self._number("gradient_accumulation_steps", is_whole=True)
        if whole:
            self._take("batch_size", "train_batch_size", whole)
        if micro:
            self._take("micro_batch", "train_micro_batch_size_per_gpu", micro)
            self.found.batch_size = int(micro * (parts or 1) * num_ranks)
        elif parts:  # with a micro-batch, the number of parts follows from the batch
            self._take("accumulate", "gradient_accumulation_steps", parts)

    def precision(self) -> None:
        for name in ("bf16", "bfloat16", "fp16", "amp", "torch_autocast"):
            section = self._section(name)
            enabled = section.get("enabled", False)
            kind = section.get("dtype", "bfloat16") if name == "torch_autocast" else name
            if not isinstance(enabled, bool):
                self._refuse(f"{name}.enabled", enabled, 'true, false or "auto"')
            elif enabled and str(kind).removeprefix("torch.") in ("bf16", "bfloat16"):
                self._take("amp", f"{name}.enabled", "bf16", shown="true")
            elif enabled:
                self._refuse(f"{name}.enabled", "true", "false: in mixed precision there is bf16 alone")

    def optimizer(self) -> None:
        kind, params = self._kind_and_params("optimizer")
        if kind is None:
            return
        if kind not in ("Adam", "AdamW"):
            self._refuse("optimizer.type", kind, "Adam or AdamW, or no optimizer, for the task's own")
            return
        for name in params.keys() - set(_OPTIMIZER_PARAMS):
            self._refuse(f"optimizer.params.{name}", params[name], f"only {', '.join(_OPTIMIZER_PARAMS)}")
        if lr := self._number("optimizer.params.lr"):
            self._take("lr", "optimizer.params.lr", lr)
        # DeepSpeed's Adam decays weights as AdamW does, and by 0 by default.
        own = {"weight_decay": 0.0, "is_decoupled": kind == "AdamW" or params.get("adam_w_mode", True)}
        self.found.optimizer = own | {
            name: params[name] for name in ("betas", "eps", "weight_decay") if name in params
        }

    def scheduler(self) -> None:
        kind, params = self._kind_and_params("scheduler")
        if kind is None:
            return
        if kind not in _SCHEDULES:
            self._refuse("scheduler.type", kind, f"{', '.join(_SCHEDULES)}, or no scheduler, for --schedule")
            return
        self._take("schedule", "scheduler.type", _SCHEDULES[kind], shown=kind)
        for name, value in params.items():
            key = f"scheduler.params.{name}"
            if name == "warmup_num_steps":
                self._take("warmup_steps", key, self._number(key, is_whole=True))
            elif name == "warmup_max_lr":
                self._take("lr", key, self._number(key))
            elif name == "total_num_steps":
                self._refuse(key, value, 'none, or "auto": it follows from --epochs')
            elif value != _SCHEDULED.get(name, value):
                self._refuse(key, value, f"{_SCHEDULED[name]}, as --schedule does")
            elif name not in _SCHEDULED:
                self._refuse(key, value, "no such parameter")

    def others(self) -> None:
        if (clip := self._number("gradient_clipping", least=0)) is not None:
            self._take("clip", "gradient_clipping", clip or None, shown=clip)
        if "managed_gradient_accumulation" in self.config:
            name = "managed_gradient_accumulation"
            self._refuse(name, self.config[name], "none: kit accumulates by itself")
        stage = self._section("zero_optimization").get("stage")
        if isinstance(stage, bool) or stage not in (None, 0, 1, 2, 3):
            self._refuse("zero_optimization.stage", stage, "0 to 3")
        elif stage is not None:
            self._take("zero", "zero_optimization.stage", stage)

    def _kind_and_params(self, name: str) -> tuple[str | None, Mapping[str, Any]]:
        """Return a section's ``type``, or None if there is none, and its ``params``."""
        section = self._section(name)
        if section and "type" not in section:
            self._refuse(name, "without a type", f"its type, or no {name}")
        return section.get("type"), self._section(f"{name}.params")

    def _section(self, key: str) -> Mapping[str, Any]:
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        if not isinstance(found, Mapping):
            self._refuse(key, json.dumps(found), "an object, {…}")
            return {}
        return found

    def _number(self, key: str, *, is_whole: bool = False, least: float | None = None) -> Any:
        """Return the number at a key; None if there is none, or, with a problem noted, if it is invalid."""
        section, _, name = key.rpartition(".")
        value = (self._section(section) if section else self.config).get(name)
        is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
        if value is None or (is_number and (value > 0 or value == least)):
            return value
        self._refuse(key, json.dumps(value), f"a {'whole ' if is_whole else ''}number above 0")
        return None

    def _take(self, option: str, key: str, value: Any, shown: Any = None) -> None:
        """Set an option's value; note a problem if another key has set a different one."""
        setting = Setting(key, value, value if shown is None else shown)
        before = self.found.options.setdefault(option, setting)
        if before.value != value:
            self.found.problems.append(f"{before.key} is {before.shown}, and {key} is {setting.shown}")

    def _refuse(self, key: str, found: Any, wanted: str) -> None:
        self.found.problems.append(f"{key} is {found}; wanted {wanted}")


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }
