"""Test of `kit bench --plan`: its forecast step times on slow links, and the measured ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

import slow_network
from rounds import Bench, BenchError, bench, machine, median, note, table
from slow_network import EACH_ALONE, Mode, Runs, lines

from nodekit.training.tasks import load_task

RATIOS = (4.0, 1.0)
"""Seconds to send the gradients, divided by the seconds of a step's computing; one value for each of two links."""
BATCHES = {"waiting": 4, "text": 32}
"""Task → samples per host and step."""
TASKS = {"waiting": "plan_job.py:Waiting", "text": "slow_network_job.py:Text"}
ACCUMULATE = 4
APART = 8
NUM_STEPS = 12
FROM_STEP = 4
"""The step at which counting begins."""
GOAL = 0.15
KIT_TIMEOUT_S = 300
DESCRIPTION = f"""\
Two hosts of a lab on this machine (network namespaces), each pinned to one core, train over links of two speeds: on
one the model's gradients take {RATIOS[0]:g} times as long as a step's computing, on the other {RATIOS[1]:g} times. On
each, `kit bench --plan` measures the all-reduce and forecasts the time of a step by ddp, --compress bf16,
--accumulate {ACCUMULATE} and --local-sgd {APART}; then each of them is trained and timed.

The model's computing is waiting, layer by layer, forward and backward: as that of a GPU it takes no time of the cores
that are the network here. With --task text it is the small BERT of the task text, on the same two cores as the wire,
so the machine must have nothing else to do; there a node's step is timed with both hosts at work, each alone, since
they share memory and caches, which two machines do not. Of several rounds the least counts: what disturbs the machine
only adds.
"""
EPILOG = """\
examples:
  bench/plan                   3 rounds: some 6 minutes
  bench/plan --rounds 1 --task text

It needs root (for the lab). Exit status: 0 unless something broke; a forecast that is wrong is no error.
"""


def modes(batch: int) -> dict[str, Mode]:
    """Return the modes to train, by the names that `kit bench` gives them."""
    plain = Mode(batch=batch, num_steps=NUM_STEPS, from_step=FROM_STEP)
    apart = Mode(
        ["--local-sgd", str(APART)],
        batch=batch,
        period=APART,
        # Count from the middle of the second period: so no exchange is at either end, and the first one is left out,
        # in which TCP is still finding the link's rate: it takes up to three times as long.
        num_steps=APART // 2 + 4 * APART + 1,
        from_step=APART // 2 + APART,
    )
    return {
        "ddp": plain,
        "--compress bf16": dataclasses.replace(plain, options=["--compress", "bf16"]),
        f"--accumulate {ACCUMULATE}": dataclasses.replace(
            plain,
            options=["--accumulate", str(ACCUMULATE)],
            batch=batch * ACCUMULATE,
            num_steps=NUM_STEPS // 2,
            from_step=FROM_STEP // 2,
        ),
        f"--local-sgd {APART}": apart,
    }


def main() -> int:
    """Run the benchmark, and print the table."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/plan: the lab needs root")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("bench/plan: wants two cores, one for each host")
    where = str(Path(__file__).with_name(TASKS[args.task]))
    num_parameters = sum(each.numel() for each in load_task(where).model().parameters())
    batch = BATCHES[args.task]
    rows: list[list[str]] = []
    worst = 0.0
    with bench(2, slow_network.prepare) as lab:
        runs = Runs(lab, TASKS[args.task])
        first, *_ = lab.lab.hosts
        alone = Mode(together=False, batch=batch, num_steps=NUM_STEPS, from_step=FROM_STEP)
        step_s = min(_step_s(runs, alone) for _ in range(args.rounds))
        timed = {**modes(batch), EACH_ALONE: alone}
        note(f"a step of each host alone: {step_s * 1e3:.1f} ms")
        for ratio in RATIOS:
            rate_mbit = num_parameters * 4 * 8 / 1e6 / (ratio * step_s)
            lab.lab.slow(first, rate_mbit=rate_mbit)
            found: dict[str, list[float]] = {}
            for number, (name, mode) in product(range(args.rounds), timed.items()):
                found.setdefault(name, []).append(_step_s(runs, mode))
                note(f"{rate_mbit:.0f} Mb/s  round {number + 1}  {name:<28} {found[name][-1] * 1e3:7.1f} ms")
            told = _forecast(lab, num_parameters, min(found[EACH_ALONE]))
            note(told["recommendation"])
            lab.lab.mend(first)
            for name in modes(batch):
                predicted, measured = _predicted(told, name), min(found[name])
                worst = max(worst, abs(predicted / measured - 1))
                rows.append(
                    [
                        f"{rate_mbit:.0f} Mb/s, {name}",
                        f"{predicted * 1e3:.1f} ms",
                        f"{measured * 1e3:.1f} ms",
                        f"{min(found[name]) * 1e3:.1f}–{max(found[name]) * 1e3:.1f}",
                        f"{predicted / measured:.2f}",
                    ]
                )
    print(
        f"Two hosts of one core each, {num_parameters * 4 / 1e6:.2f} MB of gradients, {step_s * 1e3:.0f} ms to "
        f"compute a step of {batch} samples; {args.rounds} rounds, interleaved; {machine()}.\n"
    )
    print(table(["link, way", "forecast", "measured", "range", "ratio"], rows))
    met = "met" if worst <= GOAL else "MISSED"
    print(f"\nfurthest off by {worst:.0%}, goal ≤ {GOAL:.0%}: {met}")
    return 0


def _step_s(runs: Runs, mode: Mode) -> float:
    """Return the seconds of one update: the median over updates, or with local SGD over whole periods."""
    slowest = 0.0
    folders = runs.train(mode, num_steps=mode.num_steps, seed=0)
    for folder in folders[:1] if mode.together else folders:
        times = [line["time"] for line in lines(folder) if "loss" in line][mode.from_step :: mode.period]
        slowest = max(slowest, median([after - before for before, after in pairwise(times)]) / mode.period)
    return slowest


def _forecast(lab: Bench, num_parameters: int, step_s: float) -> Mapping[str, object]:
    """Return kit's forecast for this model on the lab's network."""
    argv = [sys.executable, "-m", "nodekit.deploy.commands.cli", "bench", str(lab.lab.inventory), "--json"]
    argv += ["--max-size", "4MiB", "--time-limit", "60", "--plan", str(num_parameters)]
    argv += ["--step-time", str(step_s), "--accumulate", str(ACCUMULATE), "--apart", str(APART)]
    done = subprocess.run(argv, env=lab.env(), capture_output=True, text=True, timeout=KIT_TIMEOUT_S)
    if done.returncode:
        raise BenchError(done.stderr)
    told: Mapping[str, object] = json.loads(done.stdout)["plan"]
    return told


def _predicted(told: Mapping[str, object], name: str) -> float:
    """Return the forecast for two nodes; local SGD sends as much as DiLoCo."""
    name = name.replace("--local-sgd", "--diloco")
    forecasts = told["forecasts"]
    assert isinstance(forecasts, Sequence)
    return next(float(each["step_s"]) for each in forecasts if each["way"] == name and each["num_nodes"] == 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/plan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("--task", choices=list(TASKS), default="waiting", help="what to train (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
