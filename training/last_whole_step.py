"""The last step that this rank has made whole, should the next one be broken off: it can still be saved."""

import torch


class LastWholeStep:
    """Which step the weights are of, between one update of them and the next; a forward pass changes buffers alone."""

    def __init__(self, module: torch.nn.Module) -> None:
        """No step is whole yet."""
        self._buffers = list(module.buffers())
        self._copies = [each.clone() for each in self._buffers]
        self._is_within_step = False
        self._step: int | None = None

    def next_begins(self) -> None:
        """The next step's forward pass will change the buffers (batch norm's means): keep them."""
        self._is_within_step = True
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def update_begins(self) -> None:
        """From here on, the weights are of no step."""
        self._step = None

    def is_done(self, step: int) -> None:
        """The weights are those after ``step``."""
        self._is_within_step = False
        self._step = step

    def found(self) -> int | None:
        """The step, with the buffers as they were then; None while the weights are of no step."""
        if self._step is not None and self._is_within_step and self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
        return self._step
