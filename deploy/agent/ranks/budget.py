"""Decide whether crashed ranks are restarted, from what the attempts achieved. Pure."""

from __future__ import annotations

from nodekit.deploy.agent.ranks.failures import ends_so_again, never_starts
from nodekit.deploy.host.schema import WorkerFailure

# Attempts in a row that got nowhere, for whatever reason: more than this is no bad luck.
MAX_ATTEMPTS_WITHOUT_PROGRESS = 10
LONG_ATTEMPT_S = 120.0  # an attempt of a script that says nothing of its progress has made some after this


class Budget:
    """How often this node's workers may still crash: counted anew whenever the job gets further than ever before."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._charged = 0
        self._fruitless = 0
        self._best_step = -1
        self._last_error = ""
        self.has_progressed = False

    def took_steps(self, step: int | None, *, seconds: float) -> None:
        """What an attempt has come to: the least step its ranks here reported, and how long it went."""
        self._fruitless += 1
        if (step is not None and step > self._best_step) or (step is None and seconds > LONG_ATTEMPT_S):
            self._best_step = max(self._best_step, step or 0)
            self._fruitless = self._charged = 0
            self.has_progressed = True

    def crashed(self, failure: WorkerFailure) -> str | None:
        """Charge a crash of this node's own making; None to go on, else why not, "" if the crash says enough."""
        self._charged += 1
        error = failure["error"]
        last_line = (error.strip().splitlines() or [""])[-1]
        again, self._last_error = bool(last_line) and last_line == self._last_error, last_line
        if ends_so_again(error):
            return ""
        if self._charged > self._max_restarts:
            return f"{self._charged} crashes without progress" if self._max_restarts else ""
        if not self.has_progressed and never_starts(error, failure["exitcode"]):
            return "the command does not start"
        if not self.has_progressed and again:
            return "it failed twice in the same way before its first step"
        return None

    @property
    def is_fruitless(self) -> bool:
        """Whether restarts have brought nothing for too long."""
        return self._fruitless >= MAX_ATTEMPTS_WITHOUT_PROGRESS

    @property
    def was_restarted(self) -> bool:
        """Whether what failed had another try."""
        return self._charged > 1
