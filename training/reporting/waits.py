"""Measure how long a rank waits for other ranks and for its data: kit compares ranks to name the slowest one."""

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
"""Steps of ``_LONG_S`` seconds or more are all measured; of shorter ones one in four, at most ``_MOST_APART`` apart.

To measure a step takes 0.1 ms. Steps are chosen at random: batches from several workers come in bursts, which exactly
every fourth step would meet always or never.
"""


class Waits:
    """Adds up the seconds that this rank waits in measured steps, and writes them to a file beside its progress file.

    On a GPU, waits are measured by events around the end of the backward pass, since the CPU only sees that the GPU is
    busy.
    """

    def __init__(self, device: torch.device, progress_file: Path | None, *, rank: int) -> None:
        """Begin with sums of 0.

        Args:
            device: of this rank.
            progress_file: of this rank; None: write nothing.
            rank: this rank's number.
        """
        self._is_on_gpu = device.type != "cpu"
        self._device_module: Any = module_of(device.type)
        self._file = progress_file.with_name(f".waits{rank}") if progress_file else None
        self._events: deque[tuple[Any, Any]] = deque()
        self.is_measured = False
        """Whether the present step is measured."""
        self._num_left = 0  # steps until the next measured one
        self._apart = random.Random(0)  # noqa: S311  # the same on all ranks
        # When the measured step began, and when the last step ended.
        self._began, self._ended = 0.0, -math.inf
        self._told = 0.0
        self._steps, self._seconds, self._waited_s, self._loading_s = 0, 0.0, 0.0, 0.0
        self._pass, self._for_others = _Around(self._pass_ends), _Around(self._others_are_there)
        self._is_there: Any = None
        """When this rank had computed all gradients of the present backward pass: a time, or an event on a GPU."""
        self._waits_since = 0.0

    def loading(self, source: Iterator[T]) -> Iterator[T]:
        """Return the batches of ``source``, measuring the wait for each; call it at the beginning of a step."""
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
        """Wrap a backward pass, to measure how long the engine waits at its end for other ranks' gradients.

        If the step `is_measured`, ``loss`` must be a tensor made for this call: a hook stays on it, and has to run
        before the hooks that an engine has on the model's output.
        """
        if not self.is_measured:
            return _NOTHING
        self._is_there = None
        loss.register_hook(self._pass_begins)  # type: ignore[no-untyped-call]
        return self._pass

    def _pass_begins(self, _: torch.Tensor) -> None:
        # Callbacks run at the end of the pass, in the order of registration: engines wait in callbacks of their own.
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
        """Wrap the wait for a collective; not counted on a GPU, where the wait includes this rank's own work."""
        if not self.is_measured:
            return _NOTHING
        self._waits_since = time.monotonic()
        return self._for_others

    def _others_are_there(self) -> None:
        if not self._is_on_gpu:
            self._waited_s += time.monotonic() - self._waits_since

    def step(self) -> None:
        """End a step, choose whether to measure the next one, and write the sums if a second has passed."""
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
        # The second step is always measured, and the first never, since it does everything that is slow only once.
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
        except OSError:  # ignored: the file is for people, and nothing depends on it
            self._file = None


class _Around(AbstractContextManager[None]):
    """A context manager that calls a function at its end; `contextlib.contextmanager` would take 10 to 50 µs more."""

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends = ends

    def __exit__(self, *_: object) -> None:
        self._ends()
