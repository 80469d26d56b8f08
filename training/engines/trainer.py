"""The transformers Trainer: runs the loop of an epoch, and calls the engine for a step's gradients and at its end."""

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from nodekit.training.engine_info import EngineError
from nodekit.training.engines import accelerate
from nodekit.training.engines.ddp import set_up
from nodekit.training.options.trainer_args import read_arguments
from nodekit.training.process import rng

CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
CHECKPOINTING_METHOD = "gradient_checkpointing_enable"


class Engine(accelerate.Engine):
    """A transformers.Trainer on a data set that only counts steps; kit's loop provides the samples and the loss.

    Synchronization, autocast and scaling are done by the Trainer's own Accelerator.
    """

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module itself: the Trainer's DDP around it is known at the first call of `gradients`."""
        options, world = self.options, self.world
        transformers = importlib.import_module("transformers")
        accelerate.forget_ranks(world)
        # The Trainer requires an output folder, and leaves it empty.
        self._folder = tempfile.TemporaryDirectory(prefix="nodekit-trainer-")
        own = read_arguments(options.training_args) if options.training_args else {}
        settings: dict[str, Any] = {
            "output_dir": self._folder.name,
            "max_steps": 1,
            "max_grad_norm": options.clip or 0.0,
            "use_cpu": world.device.type == "cpu",
            "ddp_backend": world.backend,
            "ddp_find_unused_parameters": options.find_unused,
            "average_tokens_across_devices": False,
            "remove_unused_columns": False,
            "bf16": options.amp == "bf16",
            "fp16": options.amp == "fp16",
            "save_strategy": "no",
            "eval_strategy": "no",
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,  # the filter would wait for the GPU in each step
            "report_to": "none",
            "disable_tqdm": own.pop("disable_tqdm", True),
        }
        if any(own.get(name) for name in CHECKPOINTING) and not hasattr(module, CHECKPOINTING_METHOD):
            raise EngineError(
                f"--training-args {options.training_args}: the task's model, a {type(module).__name__}, has no "
                f"{CHECKPOINTING_METHOD}(): leave {' and '.join(CHECKPOINTING)} out"
            )
        before = rng.capture(world.device)
        try:
            arguments = transformers.TrainingArguments(**settings, **own)
            self._trainer = _trainer(transformers, self, module, arguments)
        except Exception as error:  # a wrong value raises errors of many classes
            if not own:
                raise
            raise EngineError(
                f"--training-args {options.training_args}: {type(error).__name__}: {error}"
            ) from error
        rng.restore(before, world.device)  # the Trainer seeds all generators
        self._trainer.remove_callback(transformers.PrinterCallback)
        self.accelerator = self._trainer.accelerator
        self.scaler = getattr(self.accelerator, "scaler", None) or self.scaler
        return module

    def drive(self, num_steps: int, compute: Callable[[], None], end_step: Callable[[], bool]) -> bool:
        """Train for ``num_steps`` steps in the Trainer's loop; return False if ``end_step`` has stopped it."""
        self._compute, self._end_step, self._is_stopped = compute, end_step, False
        self._trainer.args.max_steps = num_steps
        self._trainer.train()
        return not self._is_stopped

    def gradients(self, model: torch.nn.Module) -> None:
        """Compute a step's gradients by kit's loop; the Trainer calls this, with the module or its DDP around it."""
        if model is not self.model:  # in the first step: the Trainer has wrapped the module in DDP
            set_up(model, self.options.compress)
        self.model = model
        self._compute()
        self.drop_untrained()

    def step_has_ended(self) -> bool:
        """End the step in kit's loop, and return whether to stop; the Trainer calls this at the end of each step."""
        self._is_stopped = self._end_step()
        return self._is_stopped

    def update(self, clip: float | None) -> None:  # noqa: ARG002
        raise AssertionError("the Trainer steps by itself")


def _trainer(transformers: Any, engine: Engine, module: torch.nn.Module, arguments: Any) -> Any:
    """Return a Trainer that takes steps from the engine, without data, loss and schedule of its own."""

    class Driven(transformers.Trainer):  # type: ignore[misc]  # the base class is known at run time only
        def get_train_dataloader(self) -> list[dict[str, int]]:
            return [{"step": step} for step in range(self.args.max_steps)]

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
            self.lr_scheduler = _FixedLr(self.optimizer)
            return self.lr_scheduler

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:  # noqa: ARG002
            engine.gradients(model)
            return torch.zeros((), device=self.args.device)

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
            """Return None: the norm is for logs only, and reading it would wait for the GPU in each step."""

    class AtStepEnd(transformers.TrainerCallback):  # type: ignore[misc]  # likewise
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
            if engine.step_has_ended():
                control.should_training_stop = True
            return control

    return Driven(model=module, args=arguments, optimizers=(engine.optimizer, None), callbacks=[AtStepEnd()])


class _FixedLr(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that does nothing, since kit's loop sets the learning rate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: Any = None) -> None:
        pass

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
