"""The engine for one process on one device; also the base class of the other engines."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nodekit.training.engines import State
from nodekit.training.options.options import Options
from nodekit.training.world import World

AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(options: Options, device: torch.device) -> AbstractContextManager[Any]:
    """Return torch's autocast for ``--amp``, or a null context for float32."""
    dtype = AMP_DTYPES[options.amp]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


class Engine:
    """Plain torch: autocast, a gradient scaler for fp16, and the optimizer.

    An engine that uses a library replaces `optimizer` and, for fp16, `scaler` in `wrap`.
    """

    forwards_together = False

    def __init__(
        self,
        options: Options,
        world: World,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Mapping[str, Any] | None,
        *,
        are_alike: bool = False,
    ) -> None:
        self.options, self.world, self.module = options, world, module
        self.are_alike = are_alike
        self.optimizer = self._plain = optimizer
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.amp == "fp16")
        untrained = _outside(module, optimizer)
        self.model = self.wrap(module)
        parameters = dict(module.named_parameters())  # some engines replace them
        self._untrained = [parameters[name] for name in untrained]
        if self.scaler.is_enabled() and scaler:
            self.scaler.load_state_dict(dict(scaler))

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module that the task's loss is to call; engines wrap the plain one here."""
        return module

    def sync(self, *, is_last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002  # no other ranks
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.options, self.world.device)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def average(self) -> None:
        pass

    def drop_untrained(self) -> None:
        """Drop the gradients of parameters that the optimizer does not train, before the others are clipped.

        These gradients would count in the norm, and add up over the steps, since the optimizer does not clear them.
        """
        for each in self._untrained:
            each.grad = None

    def update(self, clip: float | None) -> None:
        self.drop_untrained()
        if clip is not None:
            self.scaler.unscale_(self.optimizer)  # `clip` limits the norm of the unscaled gradients
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        self.scaler.step(self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.module.state_dict()

    def state(self) -> State:
        return {
            "model": self.weights(),
            "optimizer": self._plain.state_dict(),
            "scaler": self.scaler.state_dict(),
        }


def _outside(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of a module's parameters that an optimizer does not train."""
    trained = {each for group in optimizer.param_groups for each in group["params"]}
    return [name for name, each in module.named_parameters() if each not in trained]
