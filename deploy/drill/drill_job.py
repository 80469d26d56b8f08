"""One `kit up` of a drill, as a process that can be killed, and replaced by another one."""

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
    """The `kit up` process of one run, whose output goes to a file."""

    def __init__(self, inventory: Path, command: Sequence[str], output: Path, *, new_keys: bool) -> None:
        """Prepare the command line; start nothing yet.

        Args:
            inventory: path of the inventory file.
            command: replaces the inventory's command; empty: keep that.
            output: file for stdout and stderr.
            new_keys: accept the SSH keys of unknown hosts.
        """
        self.output = output
        options = ["--accept-new-host-keys"] if new_keys else []
        self._argv = [sys.executable, "-m", "nodekit.deploy.commands.cli", "up", str(inventory), *options]
        self._command = ["--", *command] if command else []
        self._process: subprocess.Popen[bytes] | None = None
        self._is_down_on_purpose = False

    def start(self, *, new: bool) -> None:
        """Start `kit up`, for a new run or to resume, in a thread that lives as long as the drill (PDEATHSIG)."""
        with self.output.open("ab") as output:
            # A session of its own: Ctrl-C in the terminal must reach only the drill, which then ends the run.
            self._process = subprocess.Popen(
                [*self._argv, *(["--new"] if new else []), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # If the drill dies, kit up gets SIGTERM and ends the run, as on Ctrl-C.
                preexec_fn=functools.partial(worker.die_with, os.getpid(), signal.SIGTERM),
            )
        self._is_down_on_purpose = False

    def kill(self, *, on_purpose: bool = False) -> None:
        """Kill this process only; `on_purpose`: another one will be started."""
        self._is_down_on_purpose = on_purpose
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """The exit status; None while the process runs, or is about to be replaced."""
        if self._process is None or self._is_down_on_purpose:
            return None
        return self._process.poll()

    @property
    def run(self) -> Run | None:
        """The record of the run, once kit up has printed its id."""
        if found := _RUN_ID.search(self._said()):
            with contextlib.suppress(KitError):
                return find_runs.find(found.group(1))
        return None

    def last_words(self, num_lines: int = 6) -> str:
        """Return the lines in which kit up says how the run ended, and why; if there are none, its last lines."""
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
