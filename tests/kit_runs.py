"""`kit` as a user runs it: a process of its own, from a control folder of its own, against the lab's hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents
import warm_kit
import yaml
from agents import until

from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.records import runs

RUN_ID = re.compile(r"^(?:run|resuming) (\S+?);?(?: |$)", re.MULTILINE)


def slow_training(epochs: int) -> list[str]:
    """The training module on a task that goes as slowly as a story wants, with a snapshot every 20 steps."""
    argv = ["-m", "nodekit.training", "--task", "slow.py:Task"]
    return [*argv, "--epochs", str(epochs), "--snapshot-every", "20"]


def held_task(hold: str, *, held_s: float, step_s: float = 0) -> str:
    """The digits as ``slow.py``, whose steps are slow while there is a file, so that a fault can be aimed at one.

    Of what a story trains, only the order is of interest: its model costs a tenth of the task's own.

    Args:
        hold: a Python expression, the file's path; in it may be how long a step takes then.
        held_s: how long, if nothing is in it.
        step_s: how long a step waits without the file.
    """
    # What is to be seen meanwhile takes longer on a busy machine; no story waits for more than 40 steps at one pace.
    return f"""
import os, time
from torch import nn
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    held, pace = 0, None
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    def loss(self, model, batch):
        try:
            with open({hold}) as file:
                pace = file.read()
            self.held, self.pace = self.held + 1 if pace == self.pace else 1, pace
            step_s = float(pace or {held_s})
            time.sleep(step_s if self.held < 40 else 5 * step_s)
        except FileNotFoundError:
            time.sleep({step_s})
        return super().loss(model, batch)
"""


class Kit:
    """Runs kit in one project folder."""

    def __init__(self, folder: Path, lab: Lab | None) -> None:
        self.folder = folder
        self.lab = lab
        self.started: list[subprocess.Popen[str]] = []
        self.env: dict[str, str] = {}
        """More for its environment."""
        folder.mkdir(parents=True)

    def inventory(self, file: str = "lab.yaml", /, *, num_hosts: int | None = None, **changes: Any) -> Path:
        """The lab's inventory, of its first hosts if need be, changed at its top level, in the project folder."""
        assert self.lab is not None
        values = yaml.safe_load(self.lab.inventory.read_text())
        values["hosts"] = dict(list(values["hosts"].items())[:num_hosts])
        values.pop("nodes", None)  # a story says itself how few will do
        values["python"] = warm_agents.program(self.lab)
        values.update(changes)
        (self.folder / file).write_text(yaml.safe_dump(values, allow_unicode=True))
        return self.folder / file

    def argv(self, *args: str) -> list[str]:
        """Of a kit that is no fork: with a terminal, or a pid of its own."""
        return [sys.executable, "-m", "nodekit.deploy.commands.cli", *args]

    def run(
        self, *args: str, timeout_s: float = 120, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            warm_kit.argv(*args),
            cwd=self.folder,
            env={**os.environ, **self.env, **(env or {})},
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Kit in the background; its output goes to ``kit.log`` in the project's parent folder."""
        with self.log_path.open("a") as log:
            process = subprocess.Popen(
                warm_kit.argv(*args),
                cwd=self.folder,
                env={**os.environ, **self.env, **(env or {})},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    @property
    def log_path(self) -> Path:
        return self.folder.parent / "kit.log"

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for(self, text: str, *, timeout_s: float = 60) -> None:
        """Until kit says so; nobody gives it less than a minute, which a busy machine needs for what takes seconds."""

        def there() -> bool:
            return text in self.log()

        try:
            until(there, timeout_s=timeout_s, what=f"{text!r} in kit's output")
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.log()}") from None

    def leftovers(self) -> dict[str, dict[int, str]]:
        """What kit left on each host: a process that carries its name or the job's, a port that is listened at."""
        assert self.lab is not None
        found = self._processes()
        # Who was killed needs a moment to end: looks are counted, and no seconds, for the machine may stand still.
        for _ in range(40):
            if not any(found.values()):
                break
            time.sleep(0.05)
            found = self._processes()
        if not any(found.values()):
            # A connection's far end closes its ports a moment later: 3 s, as it once was, are less than a stall.
            with contextlib.suppress(AssertionError):
                until(lambda: not any(self._ports(host) for host in self.lab.hosts), timeout_s=30)
        return {
            host: {**processes, **dict.fromkeys(self._ports(host), "listens")}
            for host, processes in found.items()
            if processes or self._ports(host)
        }

    def _processes(self) -> dict[str, dict[int, str]]:
        assert self.lab is not None
        return {
            host: {
                pid: " ".join(argv)
                for pid, argv in self.lab.processes(host).items()
                if re.search(
                    r"nodekit\.deploy\.agent|nodekit\.training|worker\.py|job\.py|rsync", " ".join(argv)
                )
            }
            for host in self.lab.hosts
        }

    def _ports(self, host: str) -> set[int]:
        assert self.lab is not None
        if not self.lab.is_alive(host):
            return set()
        lines = self.on_host(host, "ss", "-Hltn").splitlines()
        return {int(line.split()[3].rpartition(":")[2]) for line in lines} - {22}

    def on_host(self, host: str, *argv: str) -> str:
        assert self.lab is not None
        done = self.lab.run(host, argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def metrics(self, host: str, run_id: str) -> list[dict[str, Any]]:
        text = self.on_host(host, "cat", f"/root/nodekit/runs/{run_id}/{host}/output/metrics.jsonl")
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def run_id(output: str) -> str:
    match = RUN_ID.search(output)
    assert match, output
    return match.group(1)


@pytest.fixture
def kit(lab: Lab, tmp_path: Path) -> Iterator[Kit]:
    """Kit in a project folder that a shell would take apart, and the lab's hosts free of it afterwards."""
    started = Kit(tmp_path / "my 'project' $HOME; \"x\"", lab)
    yield started
    started.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        for each in runs.all_runs():
            if each.state not in runs.ENDED:
                started.run("down", each.run_id, "--force", timeout_s=60)
    assert not started.leftovers()
