"""Read what the supervisor has left for an agent in its node's folder: another spec, a fence, other voters."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.host import files
from nodekit.deploy.host.node import status

FENCE_S = 10.0  # how long a fence that cannot be read is tried again before ranks are started
_FOLDER_S = 1.0  # until what is in the node's folder is read, though it does not seem to have changed


class Superseded(Exception):
    """The supervisor has called this node into another generation."""


class Fenced(Exception):
    """This generation is over; what comes next is the supervisor's to say."""


class Orders:
    """Reads them again and again, at little cost while nothing changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._spec_changed = self._folder_changed = 0
        self._read_at = 0.0

    def check(self, spec: AgentSpec) -> None:
        """Raise Superseded or Fenced if `spec` is over; a fence that cannot be read ends nothing that runs."""
        self.check_spec(spec)
        with contextlib.suppress(OSError):
            self._check_fence(spec)

    def check_spec(self, spec: AgentSpec) -> None:
        """Raise Superseded if there is a spec of a later generation, or a later call into this one."""
        with contextlib.suppress(OSError, ValueError):
            path = f"{self._folder}/spec.json"
            changed = os.stat(path).st_mtime_ns  # noqa: PTH116  # often, while it waits
            if changed != self._spec_changed:
                self._spec_changed = changed
                later = json.loads(files.read(path))
                if (later["generation"], later["call"]) > (spec.generation, spec.call):
                    raise Superseded

    def check_fence(self, spec: AgentSpec, pause: Callable[[], None]) -> None:
        """Raise Fenced if `spec` is over, before ranks are started; `pause` is called while that cannot be read.

        Raises:
            OSError: it could not be read for `FENCE_S`.
        """
        files.retried(lambda: self._check_fence(spec), FENCE_S, pause)

    def _check_fence(self, spec: AgentSpec) -> None:
        if status.fence_in(self._folder) > spec.generation:
            raise Fenced

    def may_have_changed(self) -> bool:
        """Whether it is time to check: the folder has changed since it was asked last, or a second has passed."""
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116  # twice a second
        except OSError:
            changed = 0
        # A change within the same tick of the file system's clock as the last check is seen by the next one.
        if changed == self._folder_changed and time.monotonic() <= self._read_at + _FOLDER_S:
            return False
        self._folder_changed, self._read_at = changed, time.monotonic()
        return True

    def voters(self, known: Voters) -> Voters:
        """The voters of a generation: those known, or newer ones that the supervisor has set since."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = Voters.of(json.loads(files.read(f"{self._folder}/electorate.json")))
            if found.generation == known.generation:
                return max(known, found)
        return known
