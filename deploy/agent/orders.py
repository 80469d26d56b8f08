"""Read the supervisor's orders to an agent from its node's folder: a new spec, a fence, new voters."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from nodekit.deploy.agent.quorum import Voters
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.host import files
from nodekit.deploy.host.node import fence, status

FENCE_S = 10.0  # how long to retry reading the fence before ranks are started
GONE_S = 5.0  # how long the node's folder must be missing before the agent counts as disowned
_FOLDER_S = 1.0  # how soon the node's folder is read again even if its modification time is the same


class Superseded(Exception):
    """The supervisor has called this node into another generation."""


class Fenced(Exception):
    """This generation is over; the supervisor decides what comes next."""


class Disowned(Exception):
    """The node's folder was removed, or is another agent's: nobody can find or stop this agent by it any more."""


class Orders:
    """The orders in a node's folder; checking them again is cheap while nothing changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._own = status.agent_record(self._folder)
        self._own_file = f"{self._folder}/agent.json"
        self._gone_since = math.inf
        self._own_changed = self._spec_changed = self._folder_changed = 0
        self._read_at = 0.0

    def check(self, spec: AgentSpec) -> None:
        """Raise Superseded or Fenced if the generation of `spec` is over; ignore a fence that cannot be read.

        Raises:
            Disowned: see `check_spec`.
        """
        self.check_spec(spec)
        with contextlib.suppress(OSError):
            self._check_fence(spec)

    def check_spec(self, spec: AgentSpec) -> None:
        """Raise Superseded if there is a spec of a later generation, or a later call into this one.

        Raises:
            Disowned: the folder is gone or another agent's, so that no order would ever reach this agent.
        """
        self._check_own()
        with contextlib.suppress(OSError, ValueError):
            path = f"{self._folder}/spec.json"
            changed = os.stat(path).st_mtime_ns  # noqa: PTH116  # often, while it waits
            if changed != self._spec_changed:
                self._spec_changed = changed
                later = json.loads(files.read(path))
                if (later["generation"], later["call"]) > (spec.generation, spec.call):
                    raise Superseded

    def _check_own(self) -> None:
        if self._own is None:
            return
        with contextlib.suppress(OSError, ValueError):  # unreadable for now, and perhaps unchanged
            try:
                changed = os.stat(self._own_file).st_mtime_ns  # noqa: PTH116  # often, while it waits
                if changed == self._own_changed:
                    return
                found = json.loads(files.read(self._own_file))
            except files.NOT_FOUND:
                self._own_changed = 0
                self._mend_own()
                return
            self._own_changed, self._gone_since = changed, math.inf
            if found != self._own:
                raise Disowned(f"{self._folder} is another agent's: nobody could stop this one")

    def _mend_own(self) -> None:
        """Write ``agent.json`` again if a clean-up of old files removed it; raise Disowned if the folder is gone."""
        folder, now = Path(self._folder), time.monotonic()
        if folder.is_dir():
            with fence.locked(self._folder):  # so that no other agent is started meanwhile
                if not os.path.exists(self._own_file):  # noqa: PTH110
                    files.write_private(self._own_file, json.dumps(self._own).encode())
        elif folder.parent.parent.is_dir():  # else a mount may be missing for a while
            self._gone_since = min(self._gone_since, now)
            if now - self._gone_since >= GONE_S:
                raise Disowned(f"{self._folder} was removed: nobody could stop this agent")

    def check_fence(self, spec: AgentSpec, pause: Callable[[], None]) -> None:
        """Raise Fenced if the generation of `spec` is over; to be called before ranks are started.

        Raises:
            OSError: the fence could not be read for `FENCE_S`; `pause` is called meanwhile.
        """
        files.retried(lambda: self._check_fence(spec), FENCE_S, pause)

    def _check_fence(self, spec: AgentSpec) -> None:
        if status.fence_in(self._folder) > spec.generation:
            raise Fenced

    def may_have_changed(self) -> bool:
        """Whether it is time to check: the folder has changed since the last True, or `_FOLDER_S` has passed."""
        try:
            changed = os.stat(self._folder).st_mtime_ns  # noqa: PTH116  # twice a second
        except OSError:
            changed = 0
        # A change within the same tick of the file system's clock as the last check is found after `_FOLDER_S`.
        if changed == self._folder_changed and time.monotonic() <= self._read_at + _FOLDER_S:
            return False
        self._folder_changed, self._read_at = changed, time.monotonic()
        return True

    def voters(self, known: Voters) -> Voters:
        """Return the voters of this generation: `known`, or newer ones that the supervisor has set since."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = Voters.of(json.loads(files.read(f"{self._folder}/electorate.json")))
            if found.generation == known.generation:
                return max(known, found)
        return known
