"""Slurm jobs as a user runs them: `kit up` of an inventory with `slurm:`, on the real cluster of a lab."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents
import warm_kit
import yaml
from agents import until
from kit_runs import RUN_ID, held_task, slow_training
from lab_hosts import make_whole

from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.inventory.errors import KitError

TASK = held_task('os.environ["HOLD"]', held_s=0.25)
EPOCHS, STEPS = 6, 6 * 23
TRAIN = slow_training(EPOCHS)
# A script of the user's own, which needs no torch: it goes as far as its arguments say.
SCRIPT = """
import os, pathlib, sys, time
how, seconds = sys.argv[1], float(sys.argv[2])
print("it is", how, flush=True)
if how != "stuck":
    pathlib.Path(os.environ["NODEKIT_PROGRESS_FILE"]).write_text("1/2")
others = pathlib.Path(os.environ["HOLD"] + "-others-end")
if how == "fails last" and os.environ["RANK"] != "0":
    others.touch()
    sys.exit()
while how == "fails last" and not others.exists():
    time.sleep(0.05)
time.sleep(seconds)
if how == "fails last":
    raise ValueError("so it is")
"""
OURS = re.compile(
    r"nodekit\.(deploy\.agent|training|slurm)|'nodekit','exec'|submitit|srun|slurmstepd|job\.py"
)
SLURMD_PORT = 6818
STARTED = "first step "
"""What rank 0 says once each time it is started."""


IN_A_JOB = {
    "SLURM_JOB_ID": "999999",
    "SLURM_MEM_PER_CPU": "1",
    "SLURM_MEM_PER_NODE": "1",
    "SLURM_NNODES": "1",
}
"""What a user's shell has within `salloc`; srun refuses to start anything by both limits of memory at once."""


def argv_of(process: Path) -> list[str]:
    """Of a folder of /proc; [] where it has ended."""
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_text().split("\0")[:-1]
    return []


class Site:
    """A project folder, and the cluster it runs on."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.folder, self.lab = folder, lab
        self.shared = lab.slurm.shared / 'kit\'s "folder" $HOME;'
        self.python = warm_agents.program(lab)
        """Slurm does not see that agents, their ranks below them, are its job's; `sys.executable` where it is to."""
        self.started: list[subprocess.Popen[str]] = []
        folder.mkdir(parents=True)
        (folder / "slow.py").write_text(TASK)
        (folder / "job.py").write_text(SCRIPT)

    def inventory(
        self,
        name: str,
        command: list[str],
        slurm: dict[str, Any],
        max_restarts: int | None = None,
        **changes: Any,
    ) -> Path:
        job: dict[str, Any] = {
            "command": command,
            "env": {"HOLD": str(self.hold(name)), "OMP_NUM_THREADS": "1"},
        }
        if "nodekit.training" not in command:
            job["start"] = "spawn"  # nothing that is to be forked needs torch
        if max_restarts is not None:
            job["max_restarts"] = max_restarts
        known = yaml.safe_load(self.lab.inventory.read_text())
        values = {
            **{key: known[key] for key in ("network", "identity_file", "known_hosts")},
            "python": self.python,
            "name": name,
            "slurm": {"time": 20, "shared_dir": str(self.shared), **slurm},
            "job": job,
            **changes,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def hold(self, name: str) -> Path:
        return self.lab.slurm.shared / f"hold-{name}"

    def kit(self, *args: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            warm_kit.argv(*args), cwd=self.folder, text=True, capture_output=True, stdin=subprocess.DEVNULL,
            timeout=timeout_s, check=False, env={**os.environ, **IN_A_JOB},
        )  # fmt: skip

    def start(self, log: Path, *args: str) -> subprocess.Popen[str]:
        with log.open("a") as out:
            process = subprocess.Popen(
                warm_kit.argv(*args), cwd=self.folder, text=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, env={**os.environ, **IN_A_JOB},
            )  # fmt: skip
        self.started.append(process)
        return process

    def slurm(self, *argv: str, timeout_s: float = 60) -> str:
        return self.lab.slurm.run(argv, timeout_s=timeout_s)

    def ask(self, *argv: str) -> str:
        """What a command says that changes nothing; again, where a stall has taken the 5 s that Slurm has for it."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.slurm(*argv)
            except KitError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """While slurmctld answers nobody, as while it is restarted."""
        command = ["slurmctld", "-f", str(self.lab.slurm.conf)]
        (pid,) = (int(each.name) for each in Path("/proc").glob("[0-9]*") if argv_of(each) == command)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def queue(self) -> list[str]:
        return self.ask("squeue", "--noheader", "--format=%i %T %R").splitlines()

    def left(self) -> dict[str, list[str]]:
        """What is left on each host: processes of a job, and ports that something listens at."""
        found = {}
        for host in self.lab.hosts:
            argvs = [" ".join(argv) for argv in self.lab.processes(host).values()]
            sockets = self.lab.run(host, ["ss", "-Hltn"], capture_output=True, text=True).stdout.splitlines()
            ports = {int(line.split()[3].rpartition(":")[2]) for line in sockets} - {22, SLURMD_PORT}
            found[host] = [argv for argv in argvs if OURS.search(argv)] + [f"port {each}" for each in ports]
        return {host: each for host, each in found.items() if each}

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        make_whole(self.lab)
        self.slurm("scancel", "--user=root")
        until(lambda: not self.queue(), timeout_s=60, what="an empty queue")


class Story:
    """One run, which something happens to."""

    def __init__(
        self,
        site: Site,
        name: str,
        command: list[str] | None = None,
        max_restarts: int | None = None,
        **slurm: Any,
    ) -> None:
        self.site, self.name = site, name
        self.file = site.inventory(name, command or TRAIN, slurm, max_restarts).name
        self.log = site.folder.parent / f"{name}.log"
        self.up: subprocess.Popen[str] | None = None

    def begin(self, *args: str) -> Story:
        self.up = self.site.start(self.log, "up", self.file, *args)
        return self

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, times: int = 1, *, timeout_s: float = 120) -> None:
        def there() -> bool:
            assert self.up is not None
            ended = self.up.poll() is not None
            found = self.said().count(text) >= times
            assert found or not ended, f"kit up has ended without {text!r}:\n{self.said()}"
            return found

        self._until(there, f"{text!r} × {times}", timeout_s)

    @property
    def run_id(self) -> str:
        match = RUN_ID.search(self.said())
        assert match, self.said()
        return match.group(1)

    @property
    def job_id(self) -> str:
        """Of the latest job of this run."""
        return re.findall(r"job (\d+)", self.said())[-1]

    @property
    def run_dir(self) -> Path:
        return self.site.shared / "runs" / self.run_id

    @property
    def snapshots(self) -> Path:
        return self.site.shared / "snapshots" / self.run_id

    def job(self) -> dict[str, str]:
        """What Slurm says of the job: JobState, Restarts, NodeList…"""
        text = self.site.ask("scontrol", "show", "job", "--oneliner", self.job_id)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """Node → step and loss, as often as that was trained: every node keeps the curve."""
        found: dict[str, list[tuple[int, float]]] = {}
        for path in self.run_dir.glob("*/output/metrics.jsonl"):
            node = found.setdefault(path.parent.parent.name, [])
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # it is just being written
                    if "loss" in (fields := json.loads(line)):
                        node.append((fields["step"], fields["loss"]))
        return found

    def curve(self) -> dict[int, float]:
        """The loss of each step, when it was trained last."""
        return {step: loss for node in self.losses().values() for step, loss in node}

    def step(self) -> int:
        return max(self.curve(), default=0)

    def wait_more(self, steps: int = 3, *, timeout_s: float = 60) -> int:
        """Until so many more steps were trained than now; which one it was then."""
        wanted = self.step() + steps
        self._until(lambda: self.step() >= wanted, f"step {wanted}", timeout_s)
        return self.step()

    def _until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        try:
            until(condition, timeout_s=timeout_s, what=what)
        except AssertionError as error:
            tasks = "".join(path.read_text()[-2000:] for path in self.run_dir.glob("slurm/*_log.out"))
            raise AssertionError(f"{error}; kit said:\n{self.said()}\nthe tasks said:\n{tasks}") from None

    def hold(self, step_s: float = 0.25) -> None:
        self.site.hold(self.name).write_text(str(step_s))

    def release(self) -> None:
        self.site.hold(self.name).unlink(missing_ok=True)

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Signal the watching kit up; its exit status."""
        assert self.up is not None
        os.kill(self.up.pid, number)
        return self.up.wait(90)

    def end(self, *, timeout_s: float = 150) -> int:
        """Wait for the end of kit up; its exit status."""
        self.release()
        assert self.up is not None
        try:
            return self.up.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"kit up goes on and on:\n{self.said()}") from None

    def trained_as(self, unbroken: dict[int, float], *, same_world: bool = True, once: bool = True) -> None:
        """Compare with the unbroken run: bit for bit in a world of its size, else but for rounding.

        `once`: no step was trained twice, so that every start went on at the next one.
        """
        scripts = [each.read_text() for each in self.run_dir.glob("slurm/*.sh")]
        assert {self.site.python in each for each in scripts} == {True}, "the job had another python"
        curve = self.curve()
        assert sorted(curve) == sorted(unbroken) == list(range(1, STEPS + 1))
        if once:  # by the same number of nodes, though Slurm may have given the job another one
            made = {node: [step for step, _ in losses] for node, losses in self.losses().items()}
            assert all(steps == sorted(set(steps)) for steps in made.values()), made
            times = Counter(step for steps in made.values() for step in steps)
            assert len(set(times.values())) == 1, times
        if same_world:
            assert curve == unbroken
        else:
            assert curve == pytest.approx(unbroken, rel=0.05, abs=0.02)


@pytest.fixture(scope="module")
def slurm_lab(session_labs: Path) -> Iterator[Lab]:
    """Three hosts with Slurm, for a module. Tests use `site`."""
    lab = Lab.up(3, folder=session_labs / "slurm-runs", slurm=True)
    yield lab
    lab.down()


@pytest.fixture
def site(slurm_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A project folder that a shell would take apart, and an idle cluster on which nothing may be left."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_lab.slurm.conf))
    slurm_lab.slurm.wait_idle()
    made = Site(tmp_path / "my 'project' $HOME; \"x\"", slurm_lab)
    yield made
    try:
        queue = made.queue()
    finally:
        made.close()
    # One that is completing has ended, and its nodes are cleared up.
    assert not [line for line in queue if "COMPLETING" not in line], queue
    with contextlib.suppress(AssertionError):  # what was just ended takes a moment
        until(lambda: not made.left())
    assert not made.left()
