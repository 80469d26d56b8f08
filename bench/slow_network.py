"""Scaling efficiency of two hosts, mode by mode, on a network as slow as gigabit Ethernet is for BERT-base."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rounds import Bench, BenchError, bench, interleave, machine, median, note, spread, table

import nodekit.training
from nodekit.training.tasks import load_task

RATIO = 9.0
"""Seconds to send the gradients, divided by the seconds of a step's computing on one host.

BERT-base has 110 M parameters, so 440 MB of gradients in fp32, and in a ring of two hosts each sends as much:
3.5 s at 1 Gb/s. A step of 32 sequences takes about 0.4 s on a GPU like the V100: 9 times less.
"""
BATCH = 16
"""Samples per step and host."""
APART = (("--local-sgd", 128), ("--local-sgd", 256), ("--diloco", 128))
"""Each with H: an exchange costs as much as 9 steps, so the efficiency of two hosts is at most H / (H + 9)."""
COUNTED = 256
"""Steps in a run for speed."""
ALONE = "one host"
EACH_ALONE = "two hosts, each alone"
"""The speed without communication on this machine: the hosts' cores share its memory bandwidth, and perhaps more."""
DDP = "ddp"
NUM_STEPS = 512
"""Steps of an accuracy run on two hosts: 15 passes through the sentences."""
LR = "0.001"
"""With the default, 0.003, some seeds learn nothing from batches as small as these."""
GOAL_EFFICIENCY = 0.9
GOAL_LOSS = 0.01
TIMEOUT_S = 240
DESCRIPTION = f"""\
Two hosts of a lab on this machine (network namespaces), each pinned to one core, train the small BERT of the task
text. The link between them is shaped so that the gradients take {RATIO:g} times as long through it as a step takes to
compute, which is measured first: BERT-base has 110 M parameters, 440 MB of gradients, and a ring of two hosts sends
as much each way, 3.5 s at 1 Gb/s; a step takes a GPU of the V100's class some 0.4 s.

Speed: samples/s in the steady state on that link, modes in turn, round by round. Efficiency is that of two hosts
over twice that of one, with the same batch per host. Accuracy: after the same number of samples, over several seeds,
on dev and test together; the link is whole then, since how slow it is changes no number. For --local-sgd and
--diloco the speed is that of whole periods, each with its exchange.
"""
EPILOG = """\
examples:
  bench/slow_network                     2 rounds, 2 seeds: some 10 minutes
  bench/slow_network --seeds 0           speed alone
  bench/slow_network --rounds 1 --seeds 1 --only ddp,local

It needs root (for the lab). Exit status: 0 unless something broke; a goal that is missed is no error.
"""


@dataclass(frozen=True)
class Mode:
    """A way to train, with the settings of its runs."""

    options: Sequence[str] = ()
    num_hosts: int = 2
    together: bool = True
    """Whether both hosts train one model."""
    batch: int = BATCH
    """Samples per step and host."""
    period: int = 1
    """Steps from one exchange to the next."""
    num_steps: int = 96
    """Steps of a run for speed."""
    from_step: int = 32
    """The step at which counting begins, or soon after."""


def modes() -> dict[str, Mode]:
    """Return name → mode."""
    found = {
        ALONE: Mode(num_hosts=1),
        EACH_ALONE: Mode(together=False),
        DDP: Mode(num_steps=40, from_step=10),
    }
    for name in ("fp16", "bf16", "powersgd"):
        found[f"--compress {name}"] = Mode(["--compress", name], num_steps=64, from_step=24)
    for name, every in APART:
        # Count from the middle of a period, so that no exchange is at either end.
        found[f"{name} {every}"] = Mode(
            [name, str(every)], period=every, num_steps=every // 2 + COUNTED + 1, from_step=every // 2
        )
    return found


class Runs:
    """Runs the modes on the hosts."""

    def __init__(self, lab: Bench, task: str = "slow_network_job.py:Text") -> None:
        self.lab = lab
        self.task = task
        self.cores = sorted(os.sched_getaffinity(0))
        self._numbers = itertools.count()

    def speed(self, mode: Mode) -> float:
        """Return the samples per second of all hosts together."""
        folders = self.train(mode, num_steps=mode.num_steps, seed=0)
        if not mode.together:
            return sum(self._speed(mode, folder, mode.batch) for folder in folders)
        return self._speed(mode, folders[0], mode.batch * mode.num_hosts)

    def _speed(self, mode: Mode, folder: Path, batch: int) -> float:
        times = [line["time"] for line in lines(folder) if "loss" in line]
        assert len(times) == mode.num_steps
        first = mode.from_step
        num_steps = (len(times) - 1 - first) // mode.period * mode.period
        return num_steps * batch / (times[first + num_steps] - times[first])

    def accuracy(self, mode: Mode, seed: int) -> float:
        """Return the final accuracy, after the same number of samples in every mode."""
        folder, *_ = self.train(mode, num_steps=NUM_STEPS * 2 // mode.num_hosts, seed=seed)
        return float(json.loads((folder / "result.json").read_text())["accuracy"])

    def train(self, mode: Mode, *, num_steps: int, seed: int) -> list[Path]:
        """Train, and return the output folders of the hosts' ranks."""
        number = next(self._numbers)
        hosts = list(self.lab.lab.hosts.values())[: mode.num_hosts]
        batch = mode.batch * (mode.num_hosts if mode.together else 1)
        started, logs = [], []
        for place, host in enumerate(hosts):
            rank, first = (place, hosts[0]) if mode.together else (0, host)
            env = {
                **self.lab.lab.host_environment,
                "PYTHONPATH": str(self.lab.shared),
                "BENCH_SAMPLES": str(num_steps * batch),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "GROUP_RANK": str(rank),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "WORLD_SIZE": str(len(hosts) if mode.together else 1),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(29500 + number % 1000),
                "GLOO_SOCKET_IFNAME": host.interface,
                "TOKENIZERS_PARALLELISM": "false",
            }
            argv = ["taskset", "--cpu-list", str(self.cores[place % len(self.cores)]), sys.executable]
            argv += ["-m", "nodekit.training", "--task", str(self.lab.shared / self.task)]
            argv += [
                "--epochs",
                "1",
                "--batch-size",
                str(batch),
                "--seed",
                str(seed),
                "--lr",
                LR,
                *mode.options,
            ]
            argv += ["--output", str(self.lab.shared / f"run{number}" / f"rank{place}")]
            logs.append(self.lab.folder / f"run{number}-{place}.log")
            with logs[-1].open("w") as log:
                started.append(
                    subprocess.Popen(
                        self.lab.lab.enter_argv(host.name, *argv),
                        env=env,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            codes = [each.wait(TIMEOUT_S) for each in started]
        except subprocess.TimeoutExpired as error:
            raise BenchError(str(error)) from error
        finally:
            for each in started:
                each.kill()
            self.lab.wait_quiet()
        if any(codes):
            raise BenchError(
                f"ended with {codes}:\n" + "\n".join(log.read_text(errors="replace")[-1500:] for log in logs)
            )
        return [
            self.lab.upper(host.name, str(self.lab.shared / f"run{number}" / f"rank{place}"))
            for place, host in enumerate(hosts)
        ]


def main() -> int:
    """Run the benchmark, and print the tables."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/slow_network: the lab needs root")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("bench/slow_network: wants two cores, one for each host")
    chosen = {
        name: mode
        for name, mode in modes().items()
        if name in (ALONE, EACH_ALONE, DDP) or any(word in name for word in args.only.split(","))
    }
    num_bytes = 4 * sum(each.numel() for each in load_task("text").model().parameters())
    accuracies: dict[str, list[float]] = {name: [] for name in chosen}
    with bench(2, prepare) as lab:
        runs = Runs(lab)
        first, *_ = lab.lab.hosts
        speed = max(runs.speed(chosen[ALONE]) for _ in range(2))
        step_s = BATCH / speed
        rate_mbit = num_bytes * 8 / 1e6 / (RATIO * step_s)
        note(f"a step on one host: {step_s * 1e3:.1f} ms; the link: {rate_mbit:.1f} Mbit/s")
        lab.lab.slow(first, rate_mbit=rate_mbit)
        speeds, broken = interleave(
            {name: _speed(runs, mode) for name, mode in chosen.items()},
            rounds=args.rounds,
            shown=lambda found: f"{found:7.1f} samples/s",
        )
        lab.lab.mend(first)
        for seed, (name, mode) in itertools.product(range(args.seeds), chosen.items()):
            if name not in broken and mode.together:
                accuracies[name].append(runs.accuracy(mode, seed))
                note(f"seed {seed}  {name:<28} {accuracies[name][-1]:.1%}")
    print(
        f"Two hosts of one core each, {num_bytes / 1e6:.2f} MB of gradients, {step_s * 1e3:.0f} ms to compute a step "
        f"of {BATCH} samples on one, a link of {rate_mbit:.1f} Mbit/s: {RATIO:g} times as long to send as to compute; "
        f"{args.rounds} rounds, interleaved; accuracy after {NUM_STEPS * 2 * BATCH:,} samples, {args.seeds} seeds; "
        f"{machine()}.\n"
    )
    print(modes_table(speeds, accuracies))
    print(f"\n{goals(speeds, accuracies)}")
    for name, why in broken.items():
        note(f"\n{name} broke: {why}")
    return 1 if broken else 0


def prepare(shared: Path) -> None:
    """Put the code where the hosts see it."""
    for job in ("slow_network_job.py", "plan_job.py"):
        shutil.copyfile(Path(__file__).with_name(job), shared / job)
    (training,) = nodekit.training.__path__
    shutil.copytree(Path(training).resolve(), shared / "nodekit" / "training")


def _speed(runs: Runs, mode: Mode) -> Callable[[int], float]:
    return lambda _number: runs.speed(mode)


def lines(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run, by step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def modes_table(speeds: Mapping[str, Sequence[float]], accuracies: Mapping[str, Sequence[float]]) -> str:
    """Return the table of speeds (medians, ranges), efficiencies and mean accuracies."""
    rows = []
    for name, found in speeds.items():
        seeds = accuracies[name]
        rows.append(
            [
                name,
                f"{median(found):.0f}",
                f"{min(found):.0f}–{max(found):.0f}",
                "–" if name == ALONE else f"{efficiency(speeds, name):.2f}",
                "–" if name == ALONE else spread(_efficiencies(speeds, name)),
                "–" if name == ALONE else f"{median(_efficiencies(speeds, name, EACH_ALONE)):.2f}",
                f"{_mean(seeds):.1%}" if seeds else "–",
                f"{min(seeds):.1%}–{max(seeds):.1%}" if seeds else "–",
            ]
        )
    columns = ["", "samples/s", "range", "efficiency", "by round", "to each alone", "accuracy", "range"]
    return table(columns, rows)


def goals(speeds: Mapping[str, Sequence[float]], accuracies: Mapping[str, Sequence[float]]) -> str:
    """Return the most efficient modes that are no less accurate than ddp and one host."""
    if not (accuracies[DDP] and accuracies[ALONE] and ALONE in speeds):
        return "no accuracies, so no mode is the best"
    wanted = max(_mean(accuracies[DDP]), _mean(accuracies[ALONE])) - GOAL_LOSS
    good = [
        name for name in speeds if accuracies[name] and name != ALONE and _mean(accuracies[name]) >= wanted
    ]
    if not good:
        return f"no mode has an accuracy of {wanted:.1%}: MISSED"
    best = max(good, key=lambda name: efficiency(speeds, name))
    met = "met" if efficiency(speeds, best) >= GOAL_EFFICIENCY else "MISSED"
    return (
        f"the most efficient with at most {GOAL_LOSS:.0%} less than ddp and one host: {best}, "
        f"{efficiency(speeds, best):.2f}, goal ≥ {GOAL_EFFICIENCY}: {met}; of what two hosts give "
        f"without a network, {median(_efficiencies(speeds, best, EACH_ALONE)):.2f}"
    )


def efficiency(speeds: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the efficiency of two hosts: 1 if they are twice as fast as one."""
    return median(_efficiencies(speeds, name))


def _efficiencies(speeds: Mapping[str, Sequence[float]], name: str, base: str = ALONE) -> list[float]:
    times = 2 if base == ALONE else 1
    return [both / (times * one) for both, one in zip(speeds[name], speeds[base], strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/slow_network",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each for speed (2)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each for accuracy (2)")
    parser.add_argument(
        "--only", default="", metavar="A,B", help="those with one of these words, ddp and one host"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
