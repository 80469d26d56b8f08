"""Decide whether crashed or hung ranks are restarted, from what the attempts achieved. Pure."""

from __future__ import annotations

from nodekit.deploy.agent.ranks.failures import ends_so_again, line_of, never_starts
from nodekit.deploy.host.schema import WorkerFailure

# Attempts in a row that got nowhere, for whatever reason: more than this is no bad luck.
MAX_ATTEMPTS_WITHOUT_PROGRESS = 10
# An attempt of a script that says nothing of its progress has made some after this; where it ended as the one before,
# it may have come to the same place again, and only a much longer one has.
LONG_ATTEMPT_S = 120.0
LONG_ATTEMPT_THAT_ENDED_ALIKE_S = 3600.0
A_HANG = "a hang"


class Budget:
    """How often this node's workers may still crash or hang; reset whenever the job makes progress."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._charged = 0
        self._hangs = 0
        self._fruitless = 0
        self._best_step = -1
        self._ended_by = ""
        self._ended_alike = False
        self._has_trained = False
        """Whether some attempt got past its start, also where that is no progress."""

    def took_steps(
        self, step: int | None, *, seconds: float, seems_trained: bool = False, ended_by: str = ""
    ) -> None:
        """Count the progress of an attempt; to be called before `crashed` or `hung`.

        Args:
            step: the lowest of the last steps that its ranks here reported.
            seconds: how long it ran; if it hung, until it fell silent.
            seems_trained: whether the output of a rank looks like training. Each attempt may print that, so it does not
                count as progress.
            ended_by: the error of this node's own rank that failed, or how it ended where there is none, or A_HANG;
                "" where the attempt ended otherwise.
        """
        self._fruitless += 1
        self._has_trained |= seems_trained
        line = line_of(ended_by)
        self._ended_alike = bool(line) and line == self._ended_by
        self._ended_by = line or self._ended_by
        long_s = LONG_ATTEMPT_THAT_ENDED_ALIKE_S if self._ended_alike else LONG_ATTEMPT_S
        if (step is not None and step > self._best_step) or (step is None and seconds > long_s):
            self._best_step = max(self._best_step, step or 0)
            self._fruitless = self._charged = self._hangs = 0
            self._has_trained = True

    def crashed(self, failure: WorkerFailure, *, seems_trained: bool = False) -> str | None:
        """Charge a crash of this node's own ranks; None to go on, else why not, "" if the crash says enough.

        `seems_trained`: whether rank 0, on another node, has printed something that looks like training.
        """
        self._charged += 1
        self._has_trained |= seems_trained
        error = failure["error"]
        if ends_so_again(error):
            return ""
        if self._charged > self._max_restarts:
            return self._used_up() if self._max_restarts else ""
        if not self._has_trained and never_starts(error, failure["exitcode"]):
            return "the command does not start"
        if not self._has_trained and self._ended_alike and error.strip():
            return "it failed twice in the same way, each time within two minutes"  # LONG_ATTEMPT_S
        return None

    def hung(self) -> str | None:
        """Charge a hang before the first step of any rank of the attempt; None to go on, else why not."""
        self._charged += 1
        self._hangs += 1
        if self._charged <= self._max_restarts:
            return None
        return self._used_up() if self._max_restarts else "it hung, and job.max_restarts is 0"

    def _used_up(self) -> str:
        crashes = self._charged - self._hangs
        told = [
            f"{number} {word}{'s' if number > 1 and word == 'hang' else 'es' if number > 1 else ''}"
            for number, word in ((crashes, "crash"), (self._hangs, "hang"))
            if number
        ]
        return f"{' and '.join(told)} without progress"

    @property
    def is_fruitless(self) -> bool:
        """Whether too many attempts in a row have made no progress."""
        return self._fruitless >= MAX_ATTEMPTS_WITHOUT_PROGRESS

    @property
    def was_restarted(self) -> bool:
        """Whether the ranks were restarted after an earlier failure."""
        return self._charged > 1
