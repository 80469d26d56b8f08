"""Time to the first step, and from a lost node to the next one, on a real Slurm cluster: kit and plain sbatch."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from contestants import Start, measure
from rounds import Bench, BenchError, bench, interleave, machine, median, note, spread, table
from sessions import Session, wait_for

NUM_HOSTS = 3
KIT, BY_HAND = "kit up", "sbatch, srun torchrun"
GOAL_RATIO, GOAL_INSIDE_S, GOAL_REQUEUED_S = 1.15, 10.0, 20.0
START_S, RECOVER_S = 90.0, 150.0
TRAIN_S = 2.0
PORT = 29500
DESCRIPTION = """\
On three hosts of a lab on this machine with a Slurm cluster of their own (kit lab up 3 --slurm), idle:

  starts     from Enter to the first training step done on all ranks, one worker each, the same small DDP script:
             `kit up slurm.yaml` (python's start, checks, sync and submitit included) against `sbatch` of a
             hand-written script with `srun torchrun`, the code there already. They take turns, after a warm-up.
  losses     from a host's crash to the next step of all who are left or came. Another host than the first, which
             is made up for inside the allocation, or, where all are needed, through Slurm's requeue; and the first
             one, through the requeue, too. Slurm's delay, from the moment it is asked to queue the job again to its
             start, is told apart; the rest is kit's. The crashed host comes back at once: there are no others.
"""
EPILOG = """\
examples:
  bench/slurm
  bench/slurm --rounds 2 --only starts

It needs root (for the lab). Exit status: 0 unless something broke; no time is an error.
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --time=5
#SBATCH --chdir={job}
#SBATCH --output={output}
export MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'GLOO_SOCKET_IFNAME=$(ip -o -4 addr show to 198.18.0.0/15 | cut -d" " -f2) exec {torchrun} \\
  --nnodes {nodes} --nproc-per-node 1 \\
  --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $MASTER:{port} train.py'
"""


class Starts:
    """The two ways to start the same script: kit and sbatch."""

    def __init__(self, lab: Bench, project: Path) -> None:
        self._bench = lab
        self._project = project
        self._shared = lab.lab.slurm.shared
        self._job = self._shared / "job"
        shutil.copytree(project, self._job)
        self._ports = itertools.count(PORT)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands use the lab's cluster."""
        return self._bench.env(SLURM_CONF=str(self._bench.lab.slurm.conf))

    def kit(self, _: int) -> Start:
        """Start a new run of unchanged code."""
        inventory = inventory_file(self._bench, "starts", nodes=str(NUM_HOSTS), env={})
        argv = [
            sys.executable,
            "-m",
            "nodekit.deploy.commands.cli",
            "up",
            str(inventory),
            "--new",
            "--",
            "train.py",
        ]
        return measure(self._bench, [argv], cwd=self._project, env=self.env)[0]

    def by_hand(self, number: int) -> Start:
        """Start the job by a batch script as users write it."""
        script, output = self._shared / f"by-hand-{number}.sh", self._shared / f"by-hand-{number}.out"
        script.write_text(
            SCRIPT.format(
                nodes=NUM_HOSTS, job=self._job, output=output, port=next(self._ports),
                torchrun=Path(sys.executable).with_name("torchrun"),
            )
        )  # fmt: skip
        line = f"sbatch --wait {shlex.quote(str(script))} && cat {shlex.quote(str(output))}"
        return measure(self._bench, [["sh", "-c", line]], cwd=self._project, env=self.env)[0]


def inventory_file(lab: Bench, name: str, *, nodes: str, env: Mapping[str, str]) -> Path:
    """Write a `slurm:` inventory for the lab's cluster."""
    path = lab.folder / f"{name}.yaml"
    slurm = {"nodes": nodes, "time": 20, "shared_dir": str(lab.lab.slurm.shared / "kit")}
    path.write_text(yaml.safe_dump({"name": name, "slurm": slurm, "job": {"env": dict(env)}}))
    return path


class KitOnSlurm(Session):
    """An endless job of kit's on the cluster."""

    nodes = f"2:{NUM_HOSTS}"

    def start(self) -> None:
        """Submit the job."""
        inventory = inventory_file(
            self.bench, f"trial{self.number}", nodes=self.nodes, env={"BENCH_FOLDER": self.folder}
        )
        argv = [
            sys.executable,
            "-m",
            "nodekit.deploy.commands.cli",
            "up",
            str(inventory),
            "--new",
            "--",
            "recovery_job.py",
        ]
        env = self.bench.env(SLURM_CONF=str(self.bench.lab.slurm.conf))
        self._run("kit", argv, cwd=self.job, env=env)

    def end(self) -> None:
        """Cancel the job, and boot the hosts again."""
        with_slurm = self.bench.lab.slurm
        with_slurm.run(["scancel", "--user=root"])
        wait_for(lambda: with_slurm.run(["squeue", "--noheader"]) == "", timeout_s=60)
        super().end()
        with_slurm.wait_idle()


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A crashed host, and how the job recovered."""

    seconds: float
    """Seconds to the next step of all ranks of a new world."""
    delay_s: float
    """Seconds of these from the request to start the job again until it started; 0 inside the allocation."""
    asked_s: float
    """Seconds from the crash to that request."""
    size: int


def lose(lab: Bench, victim: str, *, nodes: str = KitOnSlurm.nodes) -> Loss:
    """Crash a host of a running job of kit's."""
    job = KitOnSlurm(lab, lab.folder / "project")
    job.nodes = nodes
    job.start()
    try:
        if not wait_for(lambda: _stepped(job, old=set(), after=0.0) is not None, timeout_s=START_S):
            raise BenchError(f"the job did not begin; {job.output.read_text()[-2000:]}")
        time.sleep(TRAIN_S)
        old = {line["world"] for line in job.read()}
        fault_s = time.time()
        lab.lab.crash(victim)
        if nodes == str(NUM_HOSTS) or victim == next(iter(lab.lab.hosts)):
            lab.lab.revive(victim)  # the job is queued for as many nodes as before, and there are no others
        if not wait_for(lambda: _stepped(job, old=old, after=fault_s) is not None, timeout_s=RECOVER_S):
            raise BenchError(f"it did not go on within {RECOVER_S:.0f} s; {job.output.read_text()[-2000:]}")
        found = _stepped(job, old=old, after=fault_s)
        assert found is not None
        shown = lab.lab.slurm.run(["squeue", "--noheader", "--format=%V %S"]).split()
        asked_s, started_s = (datetime.fromisoformat(each).timestamp() for each in shown)
        is_inside = asked_s < fault_s - 1
        return Loss(
            seconds=found[0] - fault_s,
            delay_s=0.0 if is_inside else started_s - asked_s,
            asked_s=0.0 if is_inside else asked_s - fault_s,
            size=found[1],
        )
    finally:
        job.end()


def _stepped(job: Session, *, old: set[Any], after: float) -> tuple[float, int] | None:
    """Return when all ranks of a world not in `old` had made a step after `after`, and the size of that world."""
    worlds: dict[Any, dict[int, float]] = {}
    sizes: dict[Any, int] = {}
    for line in job.read():
        if line["world"] not in old and line.get("time", 0.0) > after:
            first = worlds.setdefault(line["world"], {})
            first[line["rank"]] = min(first.get(line["rank"], line["time"]), line["time"])
            sizes[line["world"]] = line["size"]
    done = [
        (max(ranks.values()), sizes[world]) for world, ranks in worlds.items() if len(ranks) == sizes[world]
    ]
    return min(done, default=None)


def main() -> int:
    """Run the benchmark, and print the tables."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/slurm: the lab needs root")
    broken = False
    with bench(NUM_HOSTS, slurm=True) as lab:
        project = lab.folder / "project"
        project.mkdir()
        here = Path(__file__).parent
        shutil.copyfile(here / "job.py", project / "train.py")
        shutil.copyfile(here / "recovery_job.py", project / "recovery_job.py")
        (project / "bytes").write_text("0")
        if "starts" in args.only:
            broken |= print_starts(Starts(lab, project), lab, args.rounds)
        if "losses" in args.only:
            broken |= print_losses(lab, args.rounds)
    return int(broken)


def print_starts(starts: Starts, lab: Bench, rounds: int) -> bool:
    """Print the table of starts; return whether kit broke."""
    measured, broken = interleave(
        {BY_HAND: starts.by_hand, KIT: starts.kit},
        rounds=rounds,
        shown=lambda start: f"{start.step_s:6.2f} s",
        between=lambda: (lab.wait_quiet(), lab.lab.slurm.wait_idle())[0],
    )
    print(f"Enter to first step on {NUM_HOSTS} nodes, seconds; {rounds} rounds, interleaved; {machine()}.\n")
    rows = []
    for name, found in measured.items():
        times = [start.step_s for start in found]
        ratio = (
            f"{median(times) / median([each.step_s for each in measured[BY_HAND]]):.2f} ×"
            if BY_HAND in measured
            else "–"
        )
        rows.append([name, f"{median(times):.2f}", spread(times), ratio])
    rows += [[f"{name}: {why.splitlines()[0]}", "–", "–", "–"] for name, why in broken.items()]
    print(table(["", "median", "range", "to sbatch"], rows))
    print(f"\nThe goal is {GOAL_RATIO} ×.\n")
    return KIT in broken


def print_losses(lab: Bench, rounds: int) -> bool:
    """Print the table of lost nodes; return whether kit failed to go on."""
    first, *_, last = lab.lab.hosts
    stories: dict[str, Callable[[int], Loss]] = {
        "another host crashes": lambda _: lose(lab, last),
        "another, and all are needed": lambda _: lose(lab, last, nodes=str(NUM_HOSTS)),
        "the first host crashes": lambda _: lose(lab, first),
    }
    measured: dict[str, list[Loss]] = {name: [] for name in stories}
    broken = False
    for number, (name, story) in itertools.product(range(1, rounds + 1), stories.items()):
        try:
            found = story(number)
        except BenchError as error:
            broken = True
            note(f"{name}: {error}")
            continue
        note(
            f"round {number}  {name:<28} {found.seconds:6.2f} s: Slurm was asked after {found.asked_s:.0f} s "
            f"and took {found.delay_s:.0f} s"
        )
        measured[name].append(found)
    print(f"Crash to the next step, seconds; {rounds} rounds; {machine()}.\n")
    rows = [
        [name, *_told([each.seconds for each in found]), *_told([each.delay_s for each in found]),
         *_told([each.seconds - each.delay_s for each in found]), str(found[0].size)]
        for name, found in measured.items() if found
    ]  # fmt: skip
    header = ["", "median", "range", "Slurm's delay", "range", "kit's part", "range", "nodes"]
    print(table(header, rows))
    print(
        f"\nThe goals are {GOAL_INSIDE_S:.0f} s inside the allocation, "
        f"and {GOAL_REQUEUED_S:.0f} s beyond Slurm's requeue delay, which it tells in whole seconds."
    )
    return broken


def _told(values: Sequence[float]) -> tuple[str, str]:
    return f"{median(values):.2f}", spread(values)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/slurm",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each (3)")
    parser.add_argument("--only", default="starts,losses", metavar="A,B", help="of starts and losses")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
