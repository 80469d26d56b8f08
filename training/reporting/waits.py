"""How long a rank waits for others and for its data: kit compares the ranks, and names the one that others wait for."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch

from nodekit.training.process.devices import module_of

T = TypeVar("T")

_TELL_EVERY_S = 1.0
_BYTES = 160


class Waits:
    """Adds up the seconds in which this rank waits, and writes the sums beside its progress file.

    On a GPU waiting is measured there, by events around the end of the backward pass: the CPU only sees that the GPU
    is not done.
    """

    def __init__(
        self,
        device: torch.device,
        progress_file: Path | None,
        *,
        rank: int,
        always_trained: torch.nn.Parameter | None = None,
    ) -> None:
        """Nothing is waited for yet.

        Args:
            device: of this rank.
            progress_file: this rank's; None: nothing is written.
            rank: this one's number.
            always_trained: a parameter that has a part in every backward pass, if one is known: a hook for each pass
                would take 50 µs.
        """
        self._is_on_gpu = device.type != "cpu"
        self._device_module: Any = module_of(device.type)
        self._file = progress_file.with_name(f".waits{rank}") if progress_file else None
        self._events: deque[tuple[Any, Any]] = deque()
        self._began: float | None = None
        self._told = 0.0
        self._steps, self._waited_s, self._loading_s = 0, 0.0, 0.0
        self._pass, self._for_others = _Around(self._pass_ends), _Around(self._others_are_there)
        self._is_there: Any = None
        """When all gradients of this rank were there, in the present backward pass."""
        self._waits_since = 0.0
        self.takes_any_loss = always_trained is not None
        """Whether the loss gets no hook."""
        if always_trained is not None:
            always_trained.register_hook(self._pass_begins)  # type: ignore[no-untyped-call]

    def loading(self, source: Iterator[T]) -> Iterator[T]:
        """The same, with the time that each takes to come added up."""
        while True:
            begin = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._loading_s += time.monotonic() - begin
            yield batch

    def backward(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Around a backward pass: what engines wait for at its end, when all gradients of this rank are there.

        Unless `takes_any_loss`, the loss is to be a tensor that was made for this: a hook stays on it, and is to come
        before those that an engine has on what the model returns.
        """
        self._is_there = None
        if not self.takes_any_loss:
            loss.register_hook(self._pass_begins)  # type: ignore[no-untyped-call]
        return self._pass

    def _pass_begins(self, _: torch.Tensor) -> None:
        # Callbacks run at the end, in the order in which they came: the engines' waiting is in theirs.
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients_are_there)

    def _gradients_are_there(self) -> None:
        self._is_there = self._now()

    def _pass_ends(self) -> None:
        if self._is_there is None:
            return
        if self._is_on_gpu:
            self._events.append((self._is_there, self._now()))
        else:
            self._waited_s += self._now() - self._is_there

    def _now(self) -> Any:
        if not self._is_on_gpu:
            return time.monotonic()
        event = self._device_module.Event(enable_timing=True)
        event.record()
        return event

    def for_others(self) -> AbstractContextManager[None]:
        """Around waiting for a collective; on a GPU what is waited for is its own work too, and does not count."""
        self._waits_since = time.monotonic()
        return self._for_others

    def _others_are_there(self) -> None:
        if not self._is_on_gpu:
            self._waited_s += time.monotonic() - self._waits_since

    def step(self) -> None:
        """A step is done; it is told if it is time to."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._waited_s += begin.elapsed_time(end) / 1000
        now = time.monotonic()
        if self._began is None:  # the first step has all that is slow only once
            self._began, self._steps, self._waited_s, self._loading_s = now, 0, 0.0, 0.0
            return
        self._steps += 1
        if self._file is None or now - self._told < _TELL_EVERY_S:
            return
        self._told = now
        sums = {
            "steps": self._steps,
            "seconds": round(now - self._began, 3),
            "waited_s": round(self._waited_s, 3),
            "loading_s": round(self._loading_s, 3),
        }
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(handle, json.dumps(sums).ljust(_BYTES).encode())
            finally:
                os.close(handle)
        except OSError:  # it is for people, and nothing depends on it
            self._file = None


class _Around(AbstractContextManager[None]):
    """Calls something at the end; a generator for each time would take 10 to 50 µs more."""

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends = ends

    def __exit__(self, *_: object) -> None:
        self._ends()
