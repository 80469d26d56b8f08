"""The weights that a run leaves for use: the best ones by a measure, and the last ones."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nodekit.training.errors import TrainingError
from nodekit.training.measures import is_least_best
from nodekit.training.snapshots.background import Background
from nodekit.training.snapshots.hostcopy import HostCopy
from nodekit.training.weights.export import read_facts, write_weights
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")


def no_such_measure(name: str, measures: Iterable[str]) -> str:
    """The error of ``--best NAME``, where the task measures others."""
    return f"--best {name}: the task measures {', '.join(measures)}; wanted one of these, or off"


def _is_better(measure: str, value: float, than: float | None) -> bool:
    sign = -1 if is_least_best(measure) else 1
    return than is None or math.isnan(than) or sign * value > sign * than


class Best:
    """Writes ``best`` and ``last`` in each node's folder, on the node's first rank and in a thread.

    A folder that cannot be written (full, gone) does not end the training: writing the best weights is tried again
    after each evaluation, and at the end.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        world: World,
        task: object,
        facts: Mapping[str, Any],
        *,
        stops_early: bool = False,
    ) -> None:
        """No weights are kept yet.

        Args:
            name: of the measure; ``auto`` for accuracy, or else loss; ``off`` for none.
            folder: this node's, of the run.
            world: this rank's.
            task: whose weights they are.
            facts: about the run, for ``nodekit.json``.
            stops_early: whether `why_stop` is asked, which needs a measure.
        """
        self._name, self._folder, self._world, self._task = name, folder, world, task
        self._facts, self._stops_early = facts, stops_early
        self._value: float | None = None
        self._written: float | None = None  # of what is in ``best``: after a crash, perhaps not the best
        self._seeks_written = False  # whether that is not known
        self._measure = name
        self._num_since = 0  # evaluations since the best one
        self.step: int | None = None
        """Of the last evaluation, if there was one."""
        self._host_copy, self._writer = HostCopy(), Background("nodekit-weights")
        self._unwritten: Callable[[], None] | None = None  # the best weights, where writing them has failed

    def state(self) -> dict[str, Any]:
        """The best value, for a snapshot, and what `why_stop` needs."""
        return {
            "name": self._name,
            "measure": self._measure,
            "value": self._value,
            "num_since": self._num_since,
            "step": self.step,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the best value from a snapshot, if it is of the same measure."""
        self.step = state.get("step")
        if state.get("name") == self._name:
            self._value, self._num_since = state["value"], state.get("num_since", 0)
            self._measure = state.get("measure", self._name)
        # If there was none, the first one is the best, and written. Else it is looked for when it is needed: here the
        # training waits.
        self._seeks_written = self._value is not None

    def _find_written(self) -> float | None:
        """The value of the weights in ``best``, on the node with the best ones; all ranks call it."""
        own = None
        if self._world.is_first_on_node:
            try:
                means = read_facts(self._folder / "best").get("means")
                value = means.get(self._measure) if isinstance(means, dict) else None
                own = value if isinstance(value, float | int) else None
            except TrainingError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    own = self._value  # they may be the best ones all the same
                    log.warning(
                        "%s; the weights beside it are kept until %s is better than %.4f",
                        error,
                        self._measure,
                        self._value,
                    )
        found = self._world.gather(own) if self._world.world_size > 1 else [own]
        written = None
        for each in found:
            if each is not None and _is_better(self._measure, each, written):
                written = each
        return written

    def why_stop(self, patience: int | None) -> str:
        """Return why ``--early-stop`` ends the training; "" if it does not, or is None."""
        if patience is None or self._num_since < patience:
            return ""
        num = f"{self._num_since} evaluation{'s' if self._num_since > 1 else ''}"
        was = "not a number" if self._value is None else f"no better than {self._value:.4f}"
        return f"{self._measure} was {was} in {num} (--early-stop {patience})"

    def improved(self, means: Mapping[str, float]) -> str:
        """The measure by which these means are the best so far; "" if they are not.

        Raises:
            TrainingError: there is no such measure.
        """
        name = self._measure_in(means)
        if name == "off" or math.isnan(means[name]):
            return ""
        return name if _is_better(name, means[name], self._value) else ""

    def _measure_in(self, means: Mapping[str, float]) -> str:
        name = self._name
        if name == "auto":
            name = next((each for each in ("accuracy", "loss") if each in means), "off")
            if name == "off" and self._stops_early:
                raise TrainingError(
                    f"--early-stop goes by the measure of --best, and that is auto: the task measures "
                    f"{', '.join(means)}, neither accuracy nor loss; name one with --best"
                )
        if name != "off" and name not in means:
            raise TrainingError(no_such_measure(name, means))
        return name

    def look(
        self,
        means: Mapping[str, float],
        weights: Callable[[], Mapping[str, torch.Tensor]],
        *,
        step: int,
        **facts: Any,
    ) -> None:
        """Keep these weights if they are the best so far; ``weights`` is called on all ranks or on none.

        Raises:
            ValueError: there is no such measure.
        """
        was_evaluated, self.step = self.step == step, step
        self._measure = self._measure_in(means)
        name = self.improved(means)
        self.wait()
        if name:
            self._value, self._num_since = means[name], 0
        elif not was_evaluated:  # it was, if the training was stopped right here
            self._num_since += 1
        value = means.get(self._measure, math.nan)
        if self._seeks_written and not name:
            self._written = self._find_written()
        self._seeks_written = False
        if name or (not math.isnan(value) and _is_better(self._measure, value, self._written)):
            self._written = value
            best = weights()
            if self._world.is_first_on_node:
                write = self._writing("best", best, means=dict(means), step=step, **facts)
                self._writer.start(partial(self._try, write))
            return
        if self._unwritten:
            self._writer.start(partial(self._try, self._unwritten))

    def write_last(self, weights: Mapping[str, torch.Tensor], **facts: Any) -> None:
        """Write the last weights, and the best ones if that has failed before."""
        self.wait()
        if self._unwritten:
            self._try(self._unwritten)
        if self._world.is_first_on_node:
            self._is_written("last", self._writing("last", weights, **facts))

    def wait(self) -> None:
        """Wait until writing the best weights has succeeded or failed."""
        self._writer.wait()

    def _writing(self, kind: str, weights: Mapping[str, torch.Tensor], **facts: Any) -> Callable[[], None]:
        copied = self._host_copy.take(dict(weights))
        return partial(write_weights, self._folder / kind, copied, self._task, {**self._facts, **facts})

    def _try(self, write: Callable[[], None]) -> None:
        self._unwritten = write
        if self._is_written("best", write):
            self._unwritten = None

    def _is_written(self, kind: str, write: Callable[[], None]) -> bool:
        try:
            write()
        except Exception as error:  # a library's ``export`` raises classes of its own for a full disk
            log.warning(
                "the %s weights are not written to %s, and going on without: %s",
                kind,
                self._folder / kind,
                error,
            )
            return False
        return True
