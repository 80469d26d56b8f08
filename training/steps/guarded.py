"""Optimizer updates that are launched before their gradients are known to be whole, and skipped if a rank was lost.

NCCL does not report an all-reduce that was cut short. To wait for the gradients of each step before its update would
leave the GPU idle meanwhile (on an H200 a step of 38 ms took 43). So the GPU itself skips updates once this process has
left the process group, and counts the updates that it makes.
"""

import logging
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from nodekit.training.group import nccl
from nodekit.training.snapshots.emergency import BufferCopies

log = logging.getLogger("nodekit.training")

_AHEAD = 4
"""The most updates that may be launched but not known to be made: a step's sums are read two steps later at most."""


def can_guard(optimizer: torch.optim.Optimizer, *, scales: bool) -> bool:
    """Whether a tensor, ``found_inf``, can make the optimizer skip updates, and no ``GradScaler`` (``scales``) uses it.

    That holds for torch's fused Adam and AdamW. It does not for SGD, whose momentum is uninitialized memory if its
    first update is skipped, nor for derived classes, which may do more in ``step``.
    """
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group.get("fused") for group in optimizer.param_groups) and not scales


def shared_flag(device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a float32 scalar, 0, in host memory twice: for the host to write, and for the device's kernels to read.

    The host can then set it without a kernel or a copy, for which the driver has no room while a thousand kernels are
    queued. Return None if the device, or this torch, cannot read host memory.
    """
    if device.type == "cpu":
        flag = torch.zeros((), dtype=torch.float32, device="cpu")
        return flag, flag
    try:
        with torch.cuda.device(device):
            flag = torch.zeros(1, dtype=torch.float32, device="cpu", pin_memory=True)
            # Pinned memory has the same address on the device ("unified addressing" in CUDA's Programming Guide).
            place = {"data": (flag.data_ptr(), False), "shape": (1,), "typestr": "<f4", "version": 3}
            seen = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=place), device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        log.warning("%s cannot read the host's memory: %s", device, error)
        return None
    return (flag[0], seen[0]) if seen.data_ptr() == flag.data_ptr() else None  # torch may have made a copy


class GuardedUpdates:
    """As `LastWholeStep`, for launched updates: the step of the weights is found after the process group was left."""

    is_known_late = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        flag: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Begin with no whole step, and count the optimizer's updates from now on; ``flag`` is a `shared_flag`."""
        self._has_left, self._seen_to_have_left = flag
        self._left_out = torch.zeros_like(flag[1])
        self._num_made = torch.zeros_like(flag[1], dtype=torch.int64)
        self._num_begun = 0
        self._is_known = True
        self._copies = deque(BufferCopies(module) for _ in range(_AHEAD))
        self._done: deque[_Done] = deque(maxlen=_AHEAD)
        self.values: Mapping[str, Any] = {}
        """The values given with the step that `found` has returned."""
        optimizer.found_inf = self._left_out  # type: ignore[attr-defined]
        nccl.before_abort(self._leave_out)

    @property
    def newest(self) -> int | None:
        """The last step whose update has been launched; None if there is none."""
        return self._done[-1].step if self._done else None

    def next_begins(self) -> None:
        """Copy the buffers (batch norm's means): the next step's forward pass will change them."""
        if self._done:
            self._copies.rotate()
            self._copies[0].take()
            self._done[-1].buffers = self._copies[0]

    def update_begins(self) -> None:
        """Launch the kernels that decide whether the update is skipped; its gradients must be launched before."""
        # Read the flag once per update, since another thread may set it between the update's kernels. Use `mul`, a
        # kernel that reads host memory: `copy_` takes both for memory of the device.
        torch.mul(self._seen_to_have_left, 1, out=self._left_out)
        self._num_made += 1 - self._left_out.to(torch.int64)
        self._num_begun += 1

    def is_done(self, step: int, values: Mapping[str, Any]) -> None:
        """Note that the update for ``step`` has been launched, and the values that belong to the step."""
        self._done.append(_Done(step, self._num_begun, values))

    def found(self) -> int | None:
        """Return the step of the weights, and restore its buffers; None if it is not known. Wait for the GPU."""
        if not self._is_known:
            return None
        num_made = int(self._num_made)
        for done in self._done:
            if done.num_begun == num_made:
                if done.buffers:
                    done.buffers.restore()
                self.values = done.values
                return done.step
        return None

    def forget(self) -> None:
        """Forget all steps: `found` returns None from now on."""
        self._is_known = False

    def _leave_out(self) -> None:
        """Make the GPU skip all updates that it has not begun; called before NCCL is aborted."""
        self._has_left.fill_(1)


class _Done:
    """A step whose update has been launched."""

    def __init__(self, step: int, num_begun: int, values: Mapping[str, Any]) -> None:
        self.step, self.num_begun, self.values = step, num_begun, values
        self.buffers: BufferCopies | None = None  # set once the next step has begun
