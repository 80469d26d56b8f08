"""One `kit up` of a drill: a process of its own, which can be killed and followed by another."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nodekit.deploy.agent.ranks import worker
from nodekit.deploy.records import find_runs
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import KitError

_RUN_ID = re.compile(r"^run (\S+)", re.MULTILINE)


class Job:
    """The `kit up` of one run, and its output in a file."""

    def __init__(self, inventory: Path, command: Sequence[str], output: Path, *, new_keys: bool) -> None:
        """Prepare; nothing is started yet.

        Args:
            inventory: the file.
            command: in place of the inventory's; empty for that one.
            output: where stdout and stderr go.
            new_keys: accept the keys of hosts that are not known yet.
        """
        self.output = output
        options = ["--accept-new-host-keys"] if new_keys else []
        self._argv = [sys.executable, "-m", "nodekit.deploy.commands.cli", "up", str(inventory), *options]
        self._command = ["--", *command] if command else []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_down_on_purpose = False

    def start(self, *, new: bool) -> None:
        """Start `kit up`, for a new run or for the one that exists, from the thread that lives as long as the drill."""
        with self.output.open("ab") as output:
            # A session of its own: a Ctrl-C in the terminal is for the drill, which then ends the run.
            self._process = subprocess.Popen(
                [*self._argv, *(["--new"] if new else []), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # SIGTERM is as Ctrl-C: it ends the run.
                preexec_fn=functools.partial(worker.die_with, os.getpid(), signal.SIGTERM),
            )
        self._is_down_on_purpose = False

    def kill(self, *, on_purpose: bool = False) -> None:
        """Kill this process alone; `on_purpose`: another one will be started."""
        self._is_down_on_purpose = on_purpose
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs or is about to be started again."""
        if self._process is None or self._is_down_on_purpose:
            return None
        return self._process.poll()

    @property
    def run(self) -> Run | None:
        """The record of its run, once there is one."""
        if found := _RUN_ID.search(self._said()):
            with contextlib.suppress(KitError):
                return find_runs.find(found.group(1))
        return None

    def last_words(self, num_lines: int = 6) -> str:
        """Return how it says that the run has ended, and why; if it does not say so, the last lines of its output."""
        said = self._said()
        lines = [line for line in said.splitlines() if line.strip()]
        if found := _RUN_ID.search(said):
            ends = [place for place, line in enumerate(lines) if line.startswith(f"{found.group(1)} ")]
            lines = lines[ends[-1] :][:num_lines] if ends else lines
        return "\n".join(lines[-num_lines:])

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return self.output.read_text(encoding="utf-8", errors="replace")
        return ""
