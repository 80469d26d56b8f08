"""Updates that nobody waits for, although a rank that is lost must spoil none: NCCL tells nobody of a sum cut short.

To wait for the gradients of each step before its update would leave the GPU without work meanwhile (on an H200 a step
of 38 ms took 43). So the GPU itself leaves updates out, once this process has left the others, and counts those that it
makes.
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
"""So many updates may be launched that are not known to be made; a step's sums are read before the next but one's."""


def can_guard(optimizer: torch.optim.Optimizer, *, scales: bool) -> bool:
    """Whether the optimizer leaves an update out by a tensor, its ``found_inf``, and nobody else uses that.

    torch's own do where they are fused. It is how a ``GradScaler``, if one ``scales``, has them leave one out. Not SGD,
    whose momentum is whatever was in memory if its first update is left out; nor a class made from them, which may do
    more in ``step``.
    """
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group.get("fused") for group in optimizer.param_groups) and not scales


def shared_flag(device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a number, float32, 0, in the host's memory: as the host writes it, and as the device's kernels read it.

    So the host tells the device something without a kernel or a copy, for which the driver has no room where a
    thousand kernels wait for the device. None if the device, or this torch, cannot read the host's memory.
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
    return (flag[0], seen[0]) if seen.data_ptr() == flag.data_ptr() else None  # it may have been copied


class GuardedUpdates:
    """As `LastWholeStep`: which step the weights are of, known when this process has left the others."""

    is_known_late = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        flag: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """No step is whole yet. From now on, the optimizer's updates count; ``flag`` is a `shared_flag`."""
        self._has_left, self._seen_to_have_left = flag
        self._left_out = torch.zeros_like(flag[1])
        self._num_made = torch.zeros_like(flag[1], dtype=torch.int64)
        self._num_begun = 0
        self._is_known = True
        self._copies = deque(BufferCopies(module) for _ in range(_AHEAD))
        self._done: deque[_Done] = deque(maxlen=_AHEAD)
        self.values: Mapping[str, Any] = {}
        """Those of the step that `found` has returned."""
        optimizer.found_inf = self._left_out  # type: ignore[attr-defined]
        nccl.before_abort(self._leave_out)

    @property
    def newest(self) -> int | None:
        """The last step that may be whole."""
        return self._done[-1].step if self._done else None

    def next_begins(self) -> None:
        """The next step's forward pass will change the buffers (batch norm's means): keep them."""
        if self._done:
            self._copies.rotate()
            self._copies[0].take()
            self._done[-1].buffers = self._copies[0]

    def update_begins(self) -> None:
        """All that the update needs has been launched before."""
        # A copy: what another thread sets must not divide an update, which takes several kernels. By a kernel, which
        # reads the host's memory: for `copy_` both are tensors of the device, and it copies within that.
        torch.mul(self._seen_to_have_left, 1, out=self._left_out)
        self._num_made += 1 - self._left_out.to(torch.int64)
        self._num_begun += 1

    def is_done(self, step: int, values: Mapping[str, Any]) -> None:
        """The update that makes the weights those after ``step`` has been launched."""
        self._done.append(_Done(step, self._num_begun, values))

    def found(self) -> int | None:
        """The step, with the buffers as they were then; None if none is known. Waits for the GPU."""
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
        """From now on, no step is known."""
        self._is_known = False

    def _leave_out(self) -> None:
        """Before the abort: whatever update the GPU comes to after that is left out."""
        self._has_left.fill_(1)


class _Done:
    """A step whose update has been launched."""

    def __init__(self, step: int, num_begun: int, values: Mapping[str, Any]) -> None:
        self.step, self.num_begun, self.values = step, num_begun, values
        self.buffers: BufferCopies | None = None  # once another step has begun
