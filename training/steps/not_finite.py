"""Losses or weights that are not finite (nan, inf): the error that names the ranks, and a check for your own loop."""

import math
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nodekit.training.errors import TrainingError
from nodekit.training.process.devices import sum_dtype
from nodekit.training.reporting.tell import tell
from nodekit.training.world import World

Batch = tuple[int, int]
"""The epoch and the offset of a global batch (see `ElasticSampler`)."""
ENDS = "training ends here"
"""Part of the error's message if a restart would fail at the same step: kit's agents then do not restart the ranks."""
_NAMED = 4
_CURE = (
    "a lower --lr, --clip, more --warmup-steps or --amp bf16 in place of fp16 may help; or look at the samples of that "
    "step"
)


class NotFinite(TrainingError):
    """The loss of a step, or the weights after the step, are not finite; raised on all ranks alike."""

    def __init__(self, what: str, step: int, found: Sequence[tuple[int, float, str]]) -> None:
        """``what`` is ``loss`` or ``weights``; ``found`` has rank, value and host for each value that is not finite."""
        self.what, self.step = what, step
        self.ranks = tuple(rank for rank, _, _ in found)
        """The ranks on which the loss or weights are not finite."""
        self.value = found[0][1]
        """The value on the first of these ranks: nan, inf or -inf."""
        self.batches: tuple[Batch, ...] = ()
        """The batches that may be the cause; set by kit's own loop only."""
        where = ", ".join(f"rank {rank} ({host})" for rank, _, host in found[:_NAMED])
        where += f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        value = f"is {self.value}" if what == "loss" else f"are not finite ({self.value})"
        when = f"of step {step}" if what == "loss" else f"after step {step}"
        super().__init__(f"the {what} {when} {value} on {where}, and a finite number was wanted")

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the event ``not-finite``."""
        return {"what": self.what, "ranks": list(self.ranks), "value": str(self.value)}

    def final(self, why: str) -> "NotFinite":
        """Add to the message why training ends here, and what may help; return the error itself."""
        self.args = (f"{self.args[0]}: {ENDS} ({why}), and no snapshot holds it; {_CURE}",)
        return self


def check_ranks(world: World, what: str, step: int, own: float) -> None:
    """Raise `NotFinite` on all ranks if the value of any rank is not finite; all ranks call it."""
    told = world.gather((own, socket.gethostname()))
    if found := [(rank, value, host) for rank, (value, host) in enumerate(told) if not math.isfinite(value)]:
        raise NotFinite(what, step, found)


def check_loss(
    world: World,
    step: int,
    total: float,
    own: float | torch.Tensor,
    batches: tuple[Batch, Batch | None],
    *,
    weights_differ: bool = False,
) -> None:
    """Raise `NotFinite` on all ranks if the sum of their losses is not finite; all ranks call it.

    Args:
        world: of these ranks.
        step: of which the losses are.
        total: the sum of the losses, the same on all ranks.
        own: this rank's part of the sum, a scalar.
        batches: of the step, and of the step before. If no rank's loss is finite, the earlier batch may be the cause
            too: its update may have broken the weights.
        weights_differ: whether the ranks began the step with different weights, as with local SGD: then the earlier
            batch may be the cause even if only some ranks' losses are not finite.
    """
    if math.isfinite(total):
        return
    try:
        check_ranks(world, "loss", step, float(own))
    except NotFinite as error:
        this, before = batches
        is_by_weights = weights_differ or len(error.ranks) == world.world_size
        error.batches = (this, before) if before and is_by_weights else (this,)
        raise


def check_weights(world: World, step: int, module: torch.nn.Module, batch: Batch | None) -> None:
    """Raise `NotFinite` on all ranks if weights are not finite, before the next loss shows it; all ranks call it."""
    try:
        check_ranks(world, "weights", step, _greatest(module.parameters()))
    except NotFinite as error:
        error.batches = (batch,) if batch else ()
        raise


def _greatest(parameters: Iterable[torch.Tensor]) -> float:
    """Return the greatest absolute value in this rank's part of the parameters; wait for the device only once."""
    own = [_local(each).detach() for each in parameters]
    own = [each for each in own if each.is_floating_point() and each.numel()]
    return float(torch.nn.utils.get_total_norm(own, norm_type=math.inf)) if own else 0.0


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter: FSDP's DTensor has a method for it, DeepSpeed's stage 3 an attribute.

    DeepSpeed's parts all have the same size, so the last ones end with uninitialized memory, which is cut off.
    """
    own: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    part: torch.Tensor | None = getattr(own, "ds_tensor", None)
    if part is None:
        return own
    return part.flatten()[: max(0, own.ds_numel - dist.get_rank() * part.numel())]  # type: ignore[attr-defined]


class LossWatch:
    """Notices, in a training loop of your own, that a rank's loss is not finite, without waiting for the device.

    ::

        watch = LossWatch(world)
        for step in ...:
            ...
            optimizer.step()
            watch.look(loss, step=step)
        watch.wait()

    All ranks call it. Each call starts a sum over the ranks and reads the sum of the call before, so `NotFinite` comes
    one step late, on all ranks in the same call. Nothing bad is saved meanwhile: `Snapshots` refuses a state with nan.
    """

    def __init__(self, world: World, *, on_nan: str | None = None) -> None:
        """Begin with no loss.

        Args:
            world: its process group must exist.
            on_nan: in place of ``job.on_nan`` of the inventory. ``stop``: kit does not restart ranks that end with the
                error. ``rollback``: kit restarts them, as after a crash, unless the caller catches the error.
        """
        self._world, self._on_nan = world, on_nan or world.on_nan
        self._pending: tuple[int, torch.Tensor, Callable[[], list[float]]] | None = None

    def look(self, loss: torch.Tensor, *, step: int) -> None:
        """Start to check this rank's loss of a step (any shape), and finish the check of the call before.

        Raises:
            NotFinite: on all ranks, if a rank's loss in the call before was not finite.
        """
        self.wait()
        # NaN and infinity times 0 are NaN, so the sum is 0 or NaN.
        own = loss.detach().to(sum_dtype(loss.device)).sum()
        self._pending = step, own, self._world.start_sum((own * 0).reshape(1))

    def wait(self) -> None:
        """Finish the check of the last call; call it at the end of the training.

        Raises:
            NotFinite: on all ranks, if a rank's loss in the last call was not finite.
        """
        if self._pending is None:
            return
        (step, own, sums), self._pending = self._pending, None
        try:
            if not math.isfinite(sums()[0]):
                check_ranks(self._world, "loss", step, float(own))
        except NotFinite as error:
            if self._world.is_main:
                tell(self._world, "not-finite", step=step, action=self._on_nan, **error.fields)
            if self._on_nan == "stop":
                error.final("on_nan: stop")
            raise
