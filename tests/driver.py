"""A process that stands in for the agent, and has workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents import processes_of, until

# The stand-in: one JSON call per line on stdin, its result on stdout.
DRIVER = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
preload = json.loads(sys.argv[1])
if "torch" in (preload or []):
    import torch
from nodekit.deploy.agent.ranks import children
children.STUCK_S = float(os.environ.get("TEST_STUCK_S", children.STUCK_S))
from nodekit.deploy.agent.ranks.forkserver import ForkServer
server = ForkServer.start(preload) if preload is not None else None
from nodekit.deploy.agent.ranks.workers import Workers, WorkerStart
workers = Workers(server)
from nodekit.deploy.agent import descriptors
assert descriptors.raise_limit() == 1000  # as an agent does; its workers keep what they would have had
print(json.dumps(server and server.pid), flush=True)
for line in sys.stdin:
    name, args = json.loads(line)
    if name in ("start", "start_soon"):
        starts = [WorkerStart(**{**start, "argv": tuple(start["argv"])}) for start in args]
        result = getattr(workers, name)(starts)
    elif name == "stop_all_but_one_that_says_late_that_it_stays":
        looks = iter([[]])
        result = workers.stop(0, staying=lambda: next(looks, [0]))
    elif name == "stop_without_waiting":
        result = workers.stop(0, waits=False)
    elif name == "warm_up":
        looks = []
        workers.warm_up(lambda: looks.append(1))
        result = len(looks)
    else:
        result = getattr(workers, name)
        result = result(*args) if callable(result) else result
    print(json.dumps(result, default=str), flush=True)
"""


class Driver:
    """A process that has Workers, and what its workers wrote."""

    def __init__(
        self, folder: Path, preload: Sequence[str] | None, *, unbuffered: bool = True, **env: str
    ) -> None:
        self.folder = folder
        folder.mkdir()
        self.code = folder.parent / "code 'x\" $HOME;"  # the same for all drivers of a test
        self.code.mkdir(exist_ok=True)
        self.marker = f"NODEKIT_TEST_DRIVER={folder}"
        self.env = {
            **os.environ,
            **env,
            "NODEKIT_TEST_DRIVER": str(folder),
            "PYTHONUNBUFFERED": "1" if unbuffered else "",
        }
        program = folder / "driver.py"
        program.write_text(DRIVER)
        log = os.open(folder / "driver.log", os.O_WRONLY | os.O_CREAT)
        self.process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(preload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self.env,
            text=True,
            start_new_session=True,
        )
        os.close(log)
        self._count = 0
        self.logs: dict[int, Path] = {}
        self.server: int | None = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "driver.log").read_text()
        return json.loads(line)

    def call(self, name: str, *args: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, args]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def script(self, text: str, name: str = "job.py") -> tuple[str, str]:
        (self.code / name).parent.mkdir(parents=True, exist_ok=True)
        (self.code / name).write_text(text)
        return ("python", name)

    def start(
        self,
        *argvs: Sequence[str],
        env: dict[str, str | None] | None = None,
        log: Path | None = None,
        how: str = "start",
    ) -> dict[int, int]:
        """Start one worker per argv; `env` are changes of the environment."""
        self._count += 1
        starts = []
        for local_rank, argv in enumerate(argvs):
            changed = {**self.env, "LOCAL_RANK": str(local_rank), **(env or {})}
            self.logs[local_rank] = log or self.folder / f"log{self._count}.{local_rank}"
            starts.append(
                {
                    "local_rank": local_rank,
                    "argv": list(argv),
                    "env": {name: value for name, value in changed.items() if value is not None},
                    "cwd": str(self.code),
                    "log": str(self.logs[local_rank]),
                }
            )
        return {int(rank): pid for rank, pid in (self.call(how, *starts) or {}).items()}

    def log(self, local_rank: int = 0) -> str:
        path = self.logs[local_rank]
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    def said(self, text: str, local_rank: int = 0) -> None:
        until(lambda: text in self.log(local_rank), what=f"{text!r} in {self.log(local_rank)!r}")

    def end(self) -> list[int]:
        """Wait for all workers to end; their exit codes."""
        count = len(self.call("pids"))
        # Workers that import torch anew, and have others do so after them, may take a minute on a slow machine.
        codes = until(
            lambda: len(found := self.call("poll")) == count and found, timeout_s=150, what="their end"
        )
        self.call("stop", 0)
        return [codes[str(rank)] for rank in range(count)]

    def run(self, *argvs: Sequence[str], **changes: Any) -> list[tuple[int, str]]:
        """Workers from start to end: exit code and log of each."""
        self.start(*argvs, **changes)
        return [(code, self.log(local_rank)) for local_rank, code in enumerate(self.end())]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        with contextlib.suppress(AssertionError):
            until(lambda: not processes_of(self.marker), timeout_s=30)  # as `Agents` has it
        left = processes_of(self.marker)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, left
