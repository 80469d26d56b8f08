"""Samples per second of each engine against the shortest possible script for the same method."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rounds import BenchError, interleave, machine, median, note, spread, table

from nodekit.training.engine_info import ALONE

JOBS = Path(__file__).parent / "methods_jobs"
ENGINES = {
    "single": None,
    "ddp": None,
    "fsdp": None,
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
    "fabric": "lightning_fabric",
    "trainer": "transformers",
    "horovod": "horovod",
}
"""Engine → the library that it needs; without it, the engine is left out."""
EPOCHS = {"digits": 40, "text": 12}
WARM_UP = {"digits": 20, "text": 6}
"""Epochs that do not count, about 3 s. Meanwhile, kit imports TensorBoard in the background."""
BATCH = 64
GOAL = 0.98
TIMEOUT_S = 180
DESCRIPTION = """\
Samples per second of each engine of kit, against a script of some 20 lines for the same method as its library's own
introduction has it, without logs, metrics, snapshots and restarts (bench/methods_jobs). Model, samples, batch
(64 over all ranks), AdamW and the number of ranks (2; single: 1) are the same; kit runs as users run it, with
metrics, TensorBoard and snapshots. For the Trainer, the script is Trainer(model, arguments, data).train().

Counted is the time from the end of an epoch (in kit: of the evaluation after it) to the last step of the next one,
so with everything at the edges of steps and at the start of an epoch; the first half of the epochs is the warm-up.
A run counts with its median epoch. Both sides of an engine run one after the other, and take turns, round by round.
"""
EPILOG = """\
examples:
  bench/methods                          every engine that is installed, digits and text, 3 rounds
  bench/methods --task text --only ddp,accelerate --rounds 5

Exit status: 0 unless something broke; a goal that is missed is no error.
"""


@dataclass(frozen=True)
class Speed:
    """The speed of one run, in samples per second."""

    middle: float
    """Speed of its median epoch."""
    best: float
    """Speed of its fastest epoch, the one least disturbed by other work on this machine."""


def main() -> int:
    """Run the benchmark, and print the tables."""
    args = _arguments()
    chosen = [name for name in ENGINES if name in args.only.split(",") or not args.only]
    broken: dict[str, str] = {}
    for task in args.task.split(","):
        groups = []
        for name in chosen:
            library = ENGINES[name]
            if library and importlib.util.find_spec(library) is None:
                note(f"{name} is left out: {library} is not installed")
                continue
            groups.append(
                {(name, "script"): _run(name, task, _script), (name, "kit"): _run(name, task, _kit)}
            )
        found, failed = interleave(
            *({" ".join(key): run for key, run in group.items()} for group in groups),
            rounds=args.rounds,
            shown=lambda speed: f"{speed.middle:7.0f} samples/s",
        )
        broken |= failed
        print(
            f"Samples per second, {task}, batch {BATCH}, 2 ranks (single: 1); {args.rounds} rounds, interleaved; "
            f"{machine()}.\n"
        )
        print(speeds_table(found))
        print(f"\n{goals(found)}\n")
    for name, why in broken.items():
        note(f"\n{name} broke: {why}")
    return 1 if broken else 0


def _run(name: str, task: str, start: Callable[[str, str, Path], list[float]]) -> Callable[[int], Speed]:
    def run(_number: int) -> Speed:
        with tempfile.TemporaryDirectory(prefix="nodekit-bench-") as folder:
            rates = start(name, task, Path(folder))
        return Speed(median(rates), max(rates))

    return run


def _script(name: str, task: str, folder: Path) -> list[float]:
    """Run the plain script, which prints when its epochs ended; return the samples per second of each."""
    argv = [str(JOBS / f"plain_{name}.py")]
    said = _launch(name, [*argv, "--task", task, "--epochs", str(EPOCHS[task])], folder)
    found = re.search(r"BENCH (\[.*?\])", said)  # it may follow a progress bar, whose line has no end
    assert found, said
    ends = json.loads(found[1])
    return [_num_samples(task) / (end - start) for start, end in itertools.pairwise(ends)][
        WARM_UP[task] - 1 :
    ]


def _kit(name: str, task: str, folder: Path) -> list[float]:
    """Run kit; as `_script`. An epoch is from an evaluation to the last step before the next, in metrics.jsonl."""
    argv = ["-m", "nodekit.training", "--engine", name, "--task", task, "--epochs", str(EPOCHS[task])]
    _launch(name, [*argv, "--batch-size", str(BATCH), "--output", str(folder / "out")], folder)
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    rates, start_s = [], None
    for before, line in itertools.pairwise(lines):
        if "test" in line:
            if start_s is not None:
                rates.append(_num_samples(task) / (before["time"] - start_s))
            start_s = line["time"]
    return rates[WARM_UP[task] - 1 :]


def _num_samples(task: str) -> int:
    """Return the number of samples in an epoch."""
    return {"digits": 1437, "text": 1088}[task]


def _launch(name: str, argv: Sequence[str], folder: Path) -> str:
    """Run a script or a module on its ranks; return its output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    if name in ALONE:
        launcher = [sys.executable]
    elif name == "horovod" and argv[0] != "-m":
        launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--gloo", sys.executable]
    mine = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("NODEKIT_", "TORCH", "SLURM_", "HOROVOD_"))
        and key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    # As torchrun sets it; also for a single process, whose threads would compete with other work on this machine.
    env = {**mine, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w+") as log:
        try:
            subprocess.run(
                [*launcher, *argv], cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S, check=True,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise BenchError(f"{error}\n{(folder / 'log').read_text()[-2000:]}") from error
    return (folder / "log").read_text()


def speeds_table(found: Mapping[str, Sequence[Speed]]) -> str:
    """Return the table of medians, ranges, and ratios of kit to the script."""
    rows = []
    for name in _pairs(found):
        script, kit = found[f"{name} script"], found[f"{name} kit"]
        cells = []
        for speeds in (script, kit):
            middles = [speed.middle for speed in speeds]
            cells += [f"{median(middles):.0f}", f"{min(middles):.0f}–{max(middles):.0f}"]
        pairs = [ours.middle / theirs.middle for ours, theirs in zip(kit, script, strict=True)]
        best = max(speed.best for speed in kit) / max(speed.best for speed in script)
        rows.append([name, *cells, f"{_ratio(found, name):.3f}", spread(pairs), f"{best:.3f}"])
    header = ["", "script", "range", "kit", "range", "kit to script", "by round", "of best epochs"]
    return table(header, rows)


def goals(found: Mapping[str, Sequence[Speed]]) -> str:
    """Return which goals are met."""
    lines = []
    for name in _pairs(found):
        met = "met" if _ratio(found, name) >= GOAL else "MISSED"
        lines.append(f"{name} to its script: {_ratio(found, name):.3f}, goal ≥ {GOAL}: {met}")
    for other in ("trainer", "accelerate"):
        if "ddp kit" in found and f"{other} script" in found:
            ratio = _middle(found["ddp kit"]) / _middle(found[f"{other} script"])
            met = "met" if ratio >= 1 else "MISSED"
            lines.append(f"kit's ddp to the script of {other}: {ratio:.3f}, goal ≥ 1: {met}")
    return "\n".join(lines)


def _pairs(found: Mapping[str, Sequence[Speed]]) -> list[str]:
    return [name for name in ENGINES if f"{name} script" in found and f"{name} kit" in found]


def _ratio(found: Mapping[str, Sequence[Speed]], name: str) -> float:
    return _middle(found[f"{name} kit"]) / _middle(found[f"{name} script"])


def _middle(speeds: Sequence[Speed]) -> float:
    return median([speed.middle for speed in speeds])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/methods",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("--task", default="digits,text", metavar="A,B", help="of digits and text (both)")
    parser.add_argument("--only", default="", metavar="A,B", help="these engines")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
