"""The contestants of bench/recovery: endless jobs on three hosts, to be hit by faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peers
import yaml
from contestants import FIRST_PORT, SSH
from rounds import Bench, BenchError

from nodekit.deploy.lab.lab_process import ProcessRecord, kill
from nodekit.deploy.records import events

MIN_NODES = 2
JOB, TASK = "recovery_job.py", "recovery_task.py"
TUNED_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TUNED_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
ATTEMPTS_JOB, TORCHFT_JOB = "recovery_attempts_job.py", "recovery_torchft_job.py"
RESILIENT = "nvidia-resiliency-ext"
# Its keep-alive interval is fixed. Its ranks report every step, and one that reports nothing for 3 s is killed.
RESILIENT_OPTIONS = (
    "--rdzv-conf last_call_timeout=1 --ft-initial-rank-heartbeat-timeout 30 --ft-rank-heartbeat-timeout 3 "
    "--ft-workload-check-interval 1 --ft-enable-nic-monitor false"
)
# A replica is lost after the same time as a node of kit's; one that is alive but late gets as long as in the others.
LIGHTHOUSE_OPTIONS = (
    f"--min_replicas {MIN_NODES} --join_timeout_ms 1000 --quorum_tick_ms 50 --heartbeat_timeout_ms 2500"
)
_numbers = iter(range(1, 10**6))


class Session:
    """One job of a contestant, from its start until it is ended."""

    def __init__(self, bench: Bench, job: Path) -> None:
        self.bench = bench
        self.job = job
        """The folder of the script; all hosts have it already."""
        self.number = next(_numbers)
        self.folder = f"{bench.shared}/trials/{self.number}"
        """The folder that the ranks write to, on each host's own disk."""
        self.output = bench.folder / f"output-{self.number}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._offsets = dict.fromkeys(bench.lab.hosts, 0)
        self.lines: list[dict[str, Any]] = []
        """The lines that the ranks have written so far, each with its ``host``."""

    @property
    def rendezvous_host(self) -> str:
        """The host of the rendezvous at this moment."""
        return next(iter(self.bench.lab.hosts))

    def start(self) -> None:
        """Start the job."""
        raise NotImplementedError

    def came_back(self, host: str) -> None:
        """Do what a user has to do by hand once a host answers again."""

    def history(self) -> list[dict[str, Any]]:
        """Return the events of the job, by time."""
        return []

    @property
    def has_ended(self) -> bool:
        """Whether all processes started from here have ended."""
        return all(process.poll() is not None for process in self._running.values())

    def read(self) -> list[dict[str, Any]]:
        """Read the ranks' new lines, and return all lines."""
        for host, offset in self._offsets.items():
            with contextlib.suppress(FileNotFoundError):
                with self.bench.upper(host, f"{self.folder}/steps.jsonl").open("rb") as file:
                    file.seek(offset)
                    whole, _, _ = file.read().rpartition(b"\n")
                if whole:
                    self._offsets[host] = offset + len(whole) + 1
                    self.lines += [{"host": host, **json.loads(line)} for line in whole.splitlines()]
        return self.lines

    def kill_worker(self, host: str) -> float:
        """Kill the worker on this host that began to train last; return when."""
        worker = self._worker(host)
        when = time.time()
        kill(worker)
        return when

    def have_others_wait_as_in_nccl(self, host: str) -> None:
        """Make the workers of the other hosts wait, from the next fault on, as ranks in NCCL's kernels do."""
        for other in self.bench.lab.hosts:
            if other != host:
                os.kill(self._worker(other).pid, signal.SIGUSR1)
        time.sleep(0.1)  # python runs signal handlers between two steps

    def _worker(self, host: str) -> ProcessRecord:
        own = max((line for line in self.read() if line["host"] == host and "pid" in line), key=_when)["pid"]
        for pid in self.bench.lab.processes(host):
            status = Path(f"/proc/{pid}/status").read_text()
            if re.search(rf"^NSpid:.*\s{own}$", status, re.MULTILINE):
                return ProcessRecord.of(pid)
        raise BenchError(f"no worker with pid {own} on {host}")

    def end(self) -> None:
        """End all processes, here and on the hosts, and boot the hosts again."""
        for process in self._running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.bench.boot_all()

    def _run(self, name: str, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        with self.output.open("ab") as log:
            self._running[name] = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _when(line: Mapping[str, Any]) -> float:
    return float(line["time"] if "time" in line else line["resumed"])


class ByHand(Session):
    """One ``ssh HOST 'cd … && torchrun …'`` per host, started again by hand on a host that is back."""

    launcher = str(Path(sys.executable).with_name("torchrun"))
    options = ""
    environment: Mapping[str, str] = {}

    def start(self) -> None:
        """Start the job on all hosts at once."""
        for host in self.bench.lab.hosts:
            self._start_on(host)

    def came_back(self, host: str) -> None:
        """Start the job again as soon as sshd answers: the user is assumed to be quick."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running[host].pid, signal.SIGKILL)  # the SSH login that was cut off
        self._running[host].wait()
        self._start_on(host)

    def _start_on(self, name: str) -> None:
        variables = {
            "BENCH_FOLDER": self.folder,
            "GLOO_SOCKET_IFNAME": self.bench.lab.hosts[name].interface,
            **self.environment,
        }
        given = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        self._log_in(name, name, f"cd {shlex.quote(str(self.job))} && {given} {self._command(name)}")

    def _command(self, _host: str) -> str:
        return (
            f"{self.launcher} --nnodes {MIN_NODES}:{len(self.bench.lab.hosts)} --nproc-per-node 1 "
            f"--max-restarts 10 --rdzv-backend c10d --rdzv-id bench{self.number} "
            f"--rdzv-endpoint {self.rendezvous_host}:{self._port} {self.options} {JOB}"
        )

    @property
    def _port(self) -> int:
        return FIRST_PORT + self.number

    def _log_in(self, key: str, host: str, line: str) -> None:
        argv = [SSH, "-F", str(self.bench.ssh_config), host, line]
        self._run(key, argv, cwd=self.job, env=self.bench.env())


class Tuned(ByHand):
    """torchrun with every option that can be set from outside."""

    options = f"--rdzv-conf {TUNED_CONF}"
    environment = TUNED_ENV


class Resilient(ByHand):
    """NVIDIA's ft_launcher, with heartbeats from the script."""

    launcher = str(peers.RESILIENT_VENV / "bin/ft_launcher")
    options = RESILIENT_OPTIONS


class TorchFT(ByHand):
    """torchft: its lighthouse on the first host, and a separate torchrun on each host, as its documentation says."""

    launcher = str(peers.RESILIENT_VENV / "bin/python") + " -m torch.distributed.run"

    def start(self) -> None:
        """Start the lighthouse, and then the replicas."""
        lighthouse = (
            f"{peers.RESILIENT_VENV / 'bin/torchft_lighthouse'} --bind [::]:{self._port} {LIGHTHOUSE_OPTIONS}"
        )
        self._log_in("lighthouse", self.rendezvous_host, lighthouse)
        super().start()

    def _command(self, host: str) -> str:
        return (
            f"TORCHFT_LIGHTHOUSE=http://{self.rendezvous_host}:{self._port} BENCH_HOST={host} "
            f"BENCH_MIN_NODES={MIN_NODES} {self.launcher} --nnodes 1 --nproc-per-node 1 --max-restarts 10 "
            f"--master-addr {host} --master-port {self._port + 1000} {TORCHFT_JOB}"
        )


class Kit(Session):
    """``kit up``, which needs nothing else."""

    env: Mapping[str, str] = {}
    """Environment variables for the script."""
    command: Sequence[str] = (JOB,)

    def start(self) -> None:
        """Start the job from a folder that contains only the script."""
        inventory = self.bench.folder / f"trial{self.number}.yaml"
        values = yaml.safe_load(self.bench.lab.inventory.read_text())
        values["name"] = inventory.stem
        values["nodes"] = f"{MIN_NODES}:{len(self.bench.lab.hosts)}"
        values["job"] = {"env": {"BENCH_FOLDER": self.folder, **self.env}}
        inventory.write_text(yaml.safe_dump(values))
        argv = [sys.executable, "-m", "nodekit.deploy.commands.cli", "up", str(inventory), "--new", "--"]
        argv += self.command
        self._run("kit", argv, cwd=self.job, env=self.bench.env())

    @property
    def _run_folder(self) -> Path:
        runs = Path(self.bench.env()["XDG_STATE_HOME"]) / "nodekit/runs"
        return next(runs.glob(f"trial{self.number}-*"))

    @property
    def rendezvous_host(self) -> str:
        """The host of the rendezvous, which may move; the supervisor records where to."""
        return str(json.loads((self._run_folder / "run.json").read_text())["judgement"]["host"])

    def history(self) -> list[dict[str, Any]]:
        """Return the supervisor's events (without a ``node``), and every node's."""
        run = json.loads((self._run_folder / "run.json").read_text())
        files = [self._run_folder / "events.jsonl"]
        files += [
            self.bench.upper(name, f"{node['node_dir']}/events.jsonl") for name, node in run["nodes"].items()
        ]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return sorted(events.objects(lines), key=lambda event: float(event["time"]))


class KitAttempts(Kit):
    """The same training loop in `run_attempts`, whose ranks keep their processes."""

    command: Sequence[str] = (ATTEMPTS_JOB,)


class KitModule(Kit):
    """kit's training module, whose ranks keep their processes."""

    command: Sequence[str] = (
        "python", "-m", "nodekit.training", "--task", f"{TASK}:Task", "--epochs", "1000", "--batch-size", "96",
        "--snapshot-every", "25",
    )  # fmt: skip


class KitModuleRestarted(KitModule):
    """kit's training module, with all ranks restarted."""

    command: Sequence[str] = (*KitModule.command, "--on-lost-rank", "restart")


def wait_for(condition: Any, *, timeout_s: float) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
