"""Write the weights that a run leaves for use: the best by a measure, and the last."""

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
    """Return the error message for a ``--best NAME`` that the task does not measure."""
    return f"--best {name}: the task measures {', '.join(measures)}; wanted one of these, or off"


def _is_better(measure: str, value: float, than: float | None) -> bool:
    sign = -1 if is_least_best(measure) else 1
    return than is None or math.isnan(than) or sign * value > sign * than


class Best:
    """Writes the folders ``best`` and ``last`` on each node, on the node's first rank; the best ones in a thread.

    A folder that cannot be written (full, missing) does not end the training: the best weights are tried again after
    each evaluation, and at the end.
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
        """Begin without any best weights.

        Args:
            name: of the measure; ``auto`` for accuracy, otherwise loss; ``off`` for none.
            folder: this node's output folder.
            world: this rank's.
            task: the task that is trained.
            facts: about the run, for ``nodekit.json``.
            stops_early: whether `why_stop` is used, which needs a measure.
        """
        self._name, self._folder, self._world, self._task = name, folder, world, task
        self._facts, self._stops_early = facts, stops_early
        self._value: float | None = None
        # The value of the weights in ``best``; after a crash, perhaps not the best.
        self._written: float | None = None
        self._seeks_written = False  # whether `_written` has still to be read from the folder
        self._measure = name
        self._num_since = 0  # evaluations since the best one
        self.step: int | None = None
        """The step of the last evaluation; None before the first one."""
        self._host_copy, self._writer = HostCopy(), Background("nodekit-weights")
        # Writes the best weights again, after that has failed.
        self._unwritten: Callable[[], None] | None = None

    def state(self) -> dict[str, Any]:
        """Return the best value, and the counts for `why_stop`, for a snapshot."""
        return {
            "name": self._name,
            "measure": self._measure,
            "value": self._value,
            "num_since": self._num_since,
            "step": self.step,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the best value from a snapshot that was taken with the same ``--best``."""
        self.step = state.get("step")
        if state.get("name") == self._name:
            self._value, self._num_since = state["value"], state.get("num_since", 0)
            self._measure = state.get("measure", self._name)
        # Without a best value, the first evaluation is the best, and its weights are written. Otherwise `_written` is
        # read when it is needed, not here, where the training would wait for it.
        self._seeks_written = self._value is not None

    def _find_written(self) -> float | None:
        """Return the best value of the weights in any node's ``best``, or None; all ranks call it."""
        own = None
        if self._world.is_first_on_node:
            try:
                means = read_facts(self._folder / "best").get("means")
                value = means.get(self._measure) if isinstance(means, dict) else None
                own = value if isinstance(value, float | int) else None
            except TrainingError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    own = self._value  # the weights may be the best all the same, so do not replace them
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
        """Return why ``--early-stop`` (``patience``) ends the training; "" if it does not, or is None."""
        if patience is None or self._num_since < patience:
            return ""
        num = f"{self._num_since} evaluation{'s' if self._num_since > 1 else ''}"
        was = "not a number" if self._value is None else f"no better than {self._value:.4f}"
        return f"{self._measure} was {was} in {num} (--early-stop {patience})"

    def improved(self, means: Mapping[str, float]) -> str:
        """Return the measure by which these means are the best so far; "" if they are not.

        Raises:
            TrainingError: the task does not measure what ``--best`` names.
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
        """Keep the weights of an evaluation if they are the best so far.

        Args:
            means: of the evaluation, by the measure's name.
            weights: returns the full state dict; called on all ranks or on none.
            step: of the evaluation.
            facts: further facts for ``nodekit.json``.

        Raises:
            TrainingError: the task does not measure what ``--best`` names.
        """
        was_evaluated, self.step = self.step == step, step
        self._measure = self._measure_in(means)
        name = self.improved(means)
        self.wait()
        if name:
            self._value, self._num_since = means[name], 0
        # Do not count an evaluation again that came right before a stop and its restart.
        elif not was_evaluated:
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
        """Write the last weights, and the best weights if writing these has failed before."""
        self.wait()
        if self._unwritten:
            self._try(self._unwritten)
        if self._world.is_first_on_node:
            self._is_written("last", self._writing("last", weights, **facts))

    def wait(self) -> None:
        """Wait until the current write of the best weights has succeeded or failed."""
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
        # For a full disk, a library in the task's ``export`` may raise classes of its own.
        except Exception as error:
            log.warning(
                "the %s weights are not written to %s, and going on without: %s",
                kind,
                self._folder / kind,
                error,
            )
            return False
        return True
