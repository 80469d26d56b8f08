"""The transformers Trainer: it has the loop of an epoch, and we are called for a step's gradients and at its end."""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nodekit.training import rng
from nodekit.training.engines import single
from nodekit.training.engines.ddp import compress


class Engine(single.Engine):
    """transformers.Trainer with an item of data for each step, which the loop then has its own data for."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module: what it wraps that in is known when it calls us."""
        options, world = self.options, self.world
        transformers = importlib.import_module("transformers")
        self._folder = tempfile.TemporaryDirectory(
            prefix="nodekit-trainer-"
        )  # it wants one, and leaves it empty
        arguments = transformers.TrainingArguments(
            output_dir=self._folder.name,
            max_steps=1,
            max_grad_norm=options.clip or 0.0,
            use_cpu=world.device.type == "cpu",
            ddp_backend=world.backend,
            ddp_find_unused_parameters=options.find_unused,
            average_tokens_across_devices=False,
            remove_unused_columns=False,
            bf16=options.amp == "bf16",
            fp16=options.amp == "fp16",
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        before = rng.capture(world.device)
        self._trainer = _trainer(transformers)(
            self,
            model=module,
            args=arguments,
            optimizers=(self.optimizer, None),
            callbacks=[_at_step_end(transformers, self)],
        )
        rng.restore(before, world.device)  # it seeds all generators
        self._trainer.remove_callback(transformers.PrinterCallback)
        self.scaler = getattr(self._trainer.accelerator, "scaler", None) or self.scaler
        self._compute: Callable[[], None] = lambda: None
        self._edge: Callable[[], bool] = lambda: False
        self._is_stopped = False
        return module

    def drive(self, num_steps: int, compute: Callable[[], None], edge: Callable[[], bool]) -> bool:
        """So many steps of its own loop; False if it was stopped."""
        self._compute, self._edge, self._is_stopped = compute, edge, False
        self._trainer.args.max_steps = num_steps
        self._trainer.train()
        return not self._is_stopped

    def gradients(self, model: torch.nn.Module) -> None:
        """What the Trainer calls in each step: the loop's own data, loss and weights."""
        if model is not self.model:  # its DDP, since the first step
            compress(model, self.options.compress)
        self.model = model
        self._compute()

    def step_has_ended(self) -> bool:
        """What it calls at the end of each; whether to stop."""
        self._is_stopped = self._edge()
        return self._is_stopped

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP's, through its accelerator."""
        return nullcontext() if is_last else self._trainer.accelerator.no_sync(self.model)

    def autocast(self) -> AbstractContextManager[Any]:
        """Its accelerator's."""
        context: AbstractContextManager[Any] = self._trainer.accelerator.autocast()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Scaled, where there is a scaler."""
        self._trainer.accelerator.backward(loss)

    def update(self, clip: float | None) -> None:  # noqa: ARG002
        """The Trainer does that."""
        raise AssertionError("the Trainer steps by itself")


def _trainer(transformers: Any) -> Any:
    """The Trainer, with those of its methods replaced by which it would have its own data, loss and learning rate."""

    class Driven(transformers.Trainer):  # type: ignore[misc]  # a class that is known when it runs
        def __init__(self, engine: Engine, **given: Any) -> None:
            self.engine = engine
            super().__init__(**given)

        def get_train_dataloader(self) -> "_Steps":
            return _Steps(self.args.max_steps)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
            self.lr_scheduler = _AsItIs(self.optimizer)
            return self.lr_scheduler

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:  # noqa: ARG002
            self.engine.gradients(model)
            return torch.zeros((), device=self.args.device)

    return Driven


def _at_step_end(transformers: Any, engine: Engine) -> Any:
    class AtStepEnd(transformers.TrainerCallback):  # type: ignore[misc]  # likewise
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
            if engine.step_has_ended():
                control.should_training_stop = True
            return control

    return AtStepEnd()


class _Steps:
    """A stand-in for a data loader: the number of a step for each."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"step": step} for step in range(self._num_steps))


class _AsItIs(torch.optim.lr_scheduler.LRScheduler):
    """Leaves the learning rate to the loop."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: Any = None) -> None:
        """Nothing."""

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """As the loop has set it."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""
