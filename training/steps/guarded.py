"""Updates that nobody waits for, although a rank that is lost must spoil none: NCCL tells nobody of a sum cut short.

To wait for the gradients of each step before its update would leave the GPU without work meanwhile (on an H200 a step
of 38 ms took 43). So the GPU itself leaves updates out, once this process has left the others, and counts those that it
makes.
"""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from nodekit.training.group import nccl

_AHEAD = 4
"""So many updates may be launched that are not known to be made; a step's sums are read before the next but one's."""
_ABORT_ANYWAY_S = 2.0
"""A GPU that cannot be told within so long is not waited for: then no step is known."""


def can_guard(optimizer: torch.optim.Optimizer, *, scales: bool) -> bool:
    """Whether the optimizer leaves an update out by a tensor, its ``found_inf``, and nobody else uses that.

    torch's own do where they are fused. It is how a ``GradScaler``, if one ``scales``, has them leave one out. Not SGD,
    whose momentum is whatever was in memory if its first update is left out; nor a class made from them, which may do
    more in ``step``.
    """
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group.get("fused") for group in optimizer.param_groups) and not scales


class GuardedUpdates:
    """As `LastWholeStep`: which step the weights are of, known when this process has left the others."""

    is_known_late = True

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        """No step is whole yet. From now on, the optimizer's updates count."""
        self._has_left, self._left_out = (
            torch.zeros((), dtype=torch.float32, device=device) for _ in range(2)
        )
        self._num_made = torch.zeros((), device=device, dtype=torch.int64)
        self._num_begun = 0
        self._is_known = True
        # By one that neither NCCL nor a copy can have: a stream has what is before it in it.
        self._beside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers = list(module.buffers())
        self._copies = deque([[each.clone() for each in self._buffers] for _ in range(_AHEAD)])
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
        if self._done and self._buffers:
            self._copies.rotate()
            torch._foreach_copy_(self._copies[0], self._buffers)
            self._done[-1].buffers = self._copies[0]

    def update_begins(self) -> None:
        """All that the update needs has been launched before."""
        # A copy: what another thread sets must not divide an update, which takes several kernels.
        self._left_out.copy_(self._has_left)
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
                    torch._foreach_copy_(self._buffers, done.buffers)
                self.values = done.values
                return done.step
        return None

    def forget(self) -> None:
        """From now on, no step is known."""
        self._is_known = False

    def _leave_out(self) -> None:
        """Before the abort: whatever update the GPU comes to after that is left out."""
        # In a thread: with a thousand kernels waiting for the GPU, the driver may have no room for another one, and if
        # all streams are one to it (CUDA_DEVICE_MAX_CONNECTIONS=1), it comes to this after NCCL's kernel.
        told = threading.Event()

        def tell() -> None:
            device = self._has_left.device
            if self._beside is None:
                self._has_left.fill_(1)
            else:
                # The device as well: this thread's is GPU 0, where it would take memory.
                with torch.cuda.device(device), torch.cuda.stream(self._beside):
                    self._has_left.fill_(1)
                self._beside.synchronize()
            told.set()

        was_known, self._is_known = self._is_known, False  # also if no thread can be started
        threading.Thread(target=tell, name="nodekit-leaves", daemon=True).start()
        self._is_known = told.wait(_ABORT_ANYWAY_S) and was_known


class _Done:
    """A step whose update has been launched."""

    def __init__(self, step: int, num_begun: int, values: Mapping[str, Any]) -> None:
        self.step, self.num_begun, self.values = step, num_begun, values
        self.buffers: list[torch.Tensor] | None = None  # once another step has begun
