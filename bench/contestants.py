"""The ways to start the same script on all hosts: their command lines, and the measurement of one start."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import peers
from rounds import Bench, BenchError

TIMEOUT_S = 120.0
FIRST_PORT = 29500
STAGES = ("first_line", "imported", "joined", "stepped")
SSH = "/usr/bin/ssh"
_SAID = re.compile(r"BENCH (\{[^}]*\})")

# torchrunx is a library: this is what its users write. It sends this machine's name to the hosts, and looks it up;
# names do not resolve in a bare lab, so it gets the address for both.
TORCHRUNX = """\
import json, runpy, socket, sys
import torchrunx

address, config, script, *hosts = sys.argv[1:]
socket.getfqdn = lambda name="": address
socket.gethostname = lambda: address

def train(script):
    return runpy.run_path(script, run_name="__main__")["said"]

if __name__ == "__main__":
    launcher = torchrunx.Launcher(hostnames=hosts, workers_per_host=1, ssh_config_file=config, backend=None)
    result = launcher.run(train, script)
    for rank in range(len(hosts)):  # it shows the output of the first rank only
        print("BENCH", json.dumps(result.rank(rank)))
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start; times in seconds after Enter."""

    stages: Mapping[str, float]
    """Stage of the script → when the last rank had finished it."""
    end_s: float
    """When the command returned."""
    trouble: str
    """What went wrong at the end, after every rank had made its step; else empty."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Milestones before the script's first line, in order, if this launcher records them."""

    @property
    def step_s(self) -> float:
        """Seconds to the first training step of all ranks."""
        return self.stages["stepped"]


def measure(
    bench: Bench, argvs: Sequence[Sequence[str]], *, cwd: Path, env: Mapping[str, str]
) -> tuple[Start, float, str]:
    """Run commands in parallel, and read the ranks' output; return the start, its time, and all output.

    Raises:
        BenchError: the job took too long, or the ranks' steps differ.
    """
    output = bench.folder / "output"
    begin = time.time()
    with output.open("wb") as log:
        running = [
            subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for argv in argvs
        ]
        try:
            for process in running:
                process.wait(max(0.1, begin + TIMEOUT_S - time.time()))
            end = time.time()
        except subprocess.TimeoutExpired:
            raise BenchError(f"not done after {TIMEOUT_S:.0f} s; {_tail(output)}") from None
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    text = output.read_text(errors="replace")
    said = [json.loads(match) for match in _SAID.findall(text)]
    num_hosts = len(bench.lab.hosts)
    if sorted(each["rank"] for each in said) != list(range(num_hosts)):
        raise BenchError(f"not one step on each of {num_hosts} ranks, but {said}; {_tail(output)}")
    if {each["world_size"] for each in said} != {num_hosts} or len({each["weights"] for each in said}) != 1:
        raise BenchError(f"the ranks did not make the same step: {said}")
    stages = {stage: max(each[stage] for each in said) - begin for stage in STAGES}
    statuses = [process.returncode for process in running if process.returncode != 0]
    trouble = f"exit status {statuses[0]}; {_tail(output)}" if statuses else ""
    return Start(stages=stages, end_s=end - begin, trouble=trouble), begin, text


def _tail(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()[-15:]
    return "its last words:\n" + "\n".join(f"    {line}" for line in lines)


class Starts:
    """The ways to start, each a method that takes the round's number."""

    def __init__(self, bench: Bench, project: Path, job: Path) -> None:
        self._bench = bench
        self._project = project
        """The user's folder on this machine, which kit sends."""
        self._job = job
        """The same code, which all hosts have already."""
        self._port = FIRST_PORT
        self._hosts = list(bench.lab.hosts.values())
        self._hostfile = bench.folder / "hostfile"
        self._hostfile.write_text("".join(f"{host.name} slots=1\n" for host in self._hosts))
        self._driver = bench.folder / "torchrunx_driver.py"
        self._driver.write_text(TORCHRUNX)

    def available(self) -> tuple[dict[str, Callable[[int], Start]], dict[str, str]]:
        """Return name → how to start, and name → why a contestant is not available."""
        found: dict[str, Callable[[int], Start]] = {
            "ssh + torchrun, c10d": self.by_hand_c10d,
            "ssh + torchrun, static": self.by_hand_static,
            "kit up": self.kit,
        }
        absent: dict[str, str] = {}
        for package, start in (("deepspeed", self.deepspeed), ("torchrunx", self.torchrunx)):
            if (version := peers.version(package)) is None:
                absent[package] = "not installed (--install-peers)"
            else:
                found[f"{package} {version}"] = start
        return found, absent

    def by_hand_c10d(self, _: int) -> Start:
        """Start as one pastes a command into a terminal for each host; the code is there already."""
        end = f"--rdzv-backend c10d --rdzv-endpoint {self._hosts[0].name}:{self._next_port()} --rdzv-id bench"
        return self._by_hand([end] * len(self._hosts))

    def by_hand_static(self, _: int) -> Start:
        """Start by hand with a fixed node rank for each host."""
        master = f"--master-addr {self._hosts[0].name} --master-port {self._next_port()}"
        return self._by_hand([f"--node-rank {rank} {master}" for rank in range(len(self._hosts))])

    def _by_hand(self, options: Sequence[str]) -> Start:
        torchrun = Path(sys.executable).with_name("torchrun")
        argvs = []
        for host, option in zip(self._hosts, options, strict=True):
            line = (
                f"cd {shlex.quote(str(self._job))} && date +LOGIN=%s.%N && GLOO_SOCKET_IFNAME={host.interface} "
                f"{torchrun} --nnodes {len(self._hosts)} --nproc-per-node 1 {option} train.py"
            )
            argvs.append([SSH, "-F", str(self._bench.ssh_config), host.name, line])
        start, begin, text = measure(self._bench, argvs, cwd=self._job, env=self._bench.env())
        logins = [float(found) for found in re.findall(r"LOGIN=([\d.]+)", text)]
        return replace(start, more={"connect": max(logins) - begin})

    def kit(self, _: int) -> Start:
        """Start a new run of unchanged code with kit; includes its own start, checks and sync."""
        argv = [
            sys.executable,
            "-m",
            "nodekit.deploy.commands.cli",
            "up",
            str(self._bench.lab.inventory),
            "--new",
        ]
        env = self._bench.env()
        start, begin, _text = measure(self._bench, [[*argv, "--", "train.py"]], cwd=self._project, env=env)
        return replace(start, more=self._kit_moments(Path(env["XDG_STATE_HOME"]), begin))

    def _kit_moments(self, state: Path, begin: float) -> dict[str, float]:
        """Return when each phase of kit was over, from the run's records here and on the hosts."""
        folder = max((state / "nodekit/runs").iterdir(), key=lambda path: path.stat().st_mtime)
        run = json.loads((folder / "run.json").read_text())
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        phases = {event["phase"]: event["seconds"] for event in events if event["kind"] == "phase"}
        checked = run["started"] - begin
        moments = {
            "python": checked - phases["connect"] - phases["check"],
            "connect": checked - phases["check"],
            "check": checked,
            "sync": checked + phases["sync"],
        }
        for name, node in run["nodes"].items():
            path = f"{node['node_dir']}/events.jsonl"
            done = self._bench.lab.run(name, ["cat", path], capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                event = json.loads(line)
                if event["kind"] in ("agent-started", "rendezvous", "workers-started"):
                    moments[event["kind"]] = max(moments.get(event["kind"], 0.0), event["time"] - begin)
        return moments

    def deepspeed(self, _: int) -> Start:
        """Start with DeepSpeed's launcher and its default, pdsh; the code is there already."""
        argv = [str(peers.VENV / "bin/deepspeed"), "--hostfile", str(self._hostfile)]
        argv += ["--master_addr", self._hosts[0].address, "--master_port", str(self._next_port())]
        argv += ["--no_local_rank", "train.py"]
        return measure(self._bench, [argv], cwd=self._job, env=self._bench.env(DS_ACCELERATOR="cpu"))[0]

    def torchrunx(self, _: int) -> Start:
        """Start with torchrunx, from a user's program; the code is there already."""
        control = str(self._bench.control_address)
        argv = [str(peers.PYTHON), str(self._driver), control, str(self._bench.ssh_config)]
        argv += [str(self._job / "train.py"), *(host.address for host in self._hosts)]
        env = self._bench.env(GLOO_SOCKET_IFNAME=self._bench.lab.control_interface)
        return measure(self._bench, [argv], cwd=self._job, env=env)[0]

    def _next_port(self) -> int:
        self._port += 1
        return self._port
