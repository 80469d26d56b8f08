"""How long a rank waits for others and for its data: kit compares the ranks, and names the one that others wait for."""

import json
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from nodekit.training.process.devices import module_of

T = TypeVar("T")

_NOTHING = nullcontext()
_TELL_EVERY_S = 1.0
_BYTES = 160
_LONG_S, _MOST_APART = 0.25, 7
"""Of steps that are shorter, one in four is measured, since that takes 0.1 ms; the next is at most so many steps later.

They are drawn at random: what several workers load comes in bursts, which every fourth step would meet always or never.
"""


class Waits:
    """Adds up the seconds in which this rank waits in the steps that are measured, and writes them beside its progress.

    On a GPU waiting is measured there, by events around the end of the backward pass: the CPU only sees that the GPU
    is not done.
    """

    def __init__(self, device: torch.device, progress_file: Path | None, *, rank: int) -> None:
        """Nothing is waited for yet.

        Args:
            device: of this rank.
            progress_file: this rank's; None: nothing is written.
            rank: this one's number.
        """
        self._is_on_gpu = device.type != "cpu"
        self._device_module: Any = module_of(device.type)
        self._file = progress_file.with_name(f".waits{rank}") if progress_file else None
        self._events: deque[tuple[Any, Any]] = deque()
        self.is_measured = False
        """Whether the present step is."""
        self._num_left = 0  # steps until the next one that is
        self._apart = random.Random(0)  # noqa: S311  # the same on all ranks
        self._began, self._ended = 0.0, -math.inf  # when the measured step did, and the last one
        self._told = 0.0
        self._steps, self._seconds, self._waited_s, self._loading_s = 0, 0.0, 0.0, 0.0
        self._pass, self._for_others = _Around(self._pass_ends), _Around(self._others_are_there)
        self._is_there: Any = None
        """When all gradients of this rank were there, in the present backward pass."""
        self._waits_since = 0.0

    def loading(self, source: Iterator[T]) -> Iterator[T]:
        """The same, with the time that each takes to come added up; a step begins with it."""
        if not self.is_measured:
            return source
        self._began = time.monotonic()
        return self._timed(source)

    def _timed(self, source: Iterator[T]) -> Iterator[T]:
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

        If the step `is_measured`, the loss is to be a tensor that was made for this: a hook stays on it, and is to come
        before those that an engine has on what the model returns.
        """
        if not self.is_measured:
            return _NOTHING
        self._is_there = None
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
        if not self.is_measured:
            return _NOTHING
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
        if self.is_measured:
            self._steps += 1
            self._seconds += now - self._began
        if self._num_left == 0:
            self._num_left = self._apart.randint(1, _MOST_APART)
        self._num_left -= 1
        # The second step is measured in any case, and the first never: it has all that is slow only once.
        self.is_measured = self._num_left == 0 or now - self._ended >= _LONG_S
        self._ended = now
        if self._file is None or not self._steps or now - self._told < _TELL_EVERY_S:
            return
        self._told = now
        sums = {
            "steps": self._steps,
            "seconds": round(self._seconds, 3),
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
