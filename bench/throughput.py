"""Steps per second of kit's training module under `kit up`, as a share of a plain DDP script's under torchrun."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rounds import BenchError, exit_on_signals, interval, machine, middle, note, table
from steady_job import START_S, Job, descendants, signalled, stopped

KIT, PLAIN = "kit up, training module", "torchrun, plain DDP"
RANKS = 2
LR = 1e-9
"""So low that nothing is learnt: once a model has memorized its samples, gradients are denormal, and slow on a CPU."""
WINDOW_S, SETTLE_S = 1.5, 0.3
GOAL = 0.995
HEADER = ["step of the plain script", "kit to it: apart", "in kit's ranks", "pairs", "goal"]
CODE = Path(__file__).with_name("throughput_job.py")
INVENTORY = f"""\
name: throughput
connection: local
hosts:
  node: {{{{gpus: 0}}}}
job:
  nproc_per_node: {RANKS}
  env:
    OMP_NUM_THREADS: "1"
    BENCH_BATCH_SIZE: "{{batch_size}}"
    BENCH_LR: "{LR}"
    BENCH_TURNS: "{{turns}}"
    BENCH_TURN_STEPS: "{{turn_steps}}"
"""
TURN_SAMPLES = 10_000
"""Samples per turn in the same processes, so that a turn takes about a second."""
DESCRIPTION = f"""\
What kit's training module costs while nothing fails: it keeps what its ranks need to go on without a lost one, sums the
loss, writes metrics and curves, and is watched. The script does nothing of this: it is torch's tutorial, with a
DataLoader, a DistributedSampler, DDP and AdamW. But the module keeps the memory that a step frees, for the next one; in
kit's ranks, the script has that, too.

Both train the same model on the same samples with {RANKS} ranks on this machine, in turns of about a second:

apart           The script runs under torchrun, at the same time; the other one is stopped (SIGSTOP) meanwhile, with all
                that belongs to it. Two processes that do the same differ by some percent, by where their memory lies:
                both are started anew for each pair of rates, and it takes many pairs to tell one percent.
in kit's ranks  The script's steps are made by kit's ranks, in turns with the module's, with the same model, and so in
                the same memory. This counts what the module does in a step, but for the few numbers that go with the
                gradients; kit's other processes run beside both.
"""
EPILOG = f"""\
examples:
  bench/throughput                         two lengths of a step, some 15 minutes each; wants an idle machine
  bench/throughput --batch-size 1024       one length of a step: so many samples over all ranks together

Exit status: 0 unless something broke; a goal ({GOAL}) that is missed is no error.
"""


@contextlib.contextmanager
def torchrun(*argv: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run torchrun with ranks on this machine within the block."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={RANKS}", *argv),
        ],
        env={**os.environ, **env},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        signalled([process.pid, *descendants(process.pid)], signal.SIGKILL)
        process.wait()


class Plain:
    """The plain script, under torchrun."""

    def __init__(self, process: subprocess.Popen[bytes], steps: Path) -> None:
        self._process = process
        self._steps = steps

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path, batch_size: int) -> Iterator[Plain]:
        """Start the script, and yield it once it has made its first steps."""
        env = {
            "OMP_NUM_THREADS": "1",
            "BENCH_BATCH_SIZE": str(batch_size),
            "BENCH_LR": str(LR),
            "BENCH_STEPS": str(folder / "steps"),
        }
        with torchrun(str(CODE), **env) as process:
            plain = cls(process, folder / "steps")
            deadline = time.monotonic() + START_S
            while len(plain.steps()) < 100:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise BenchError(f"the plain script has made no 100 steps within {START_S:.0f} s")
                time.sleep(0.5)
            yield plain

    @property
    def all(self) -> list[int]:
        """Return its processes."""
        return [self._process.pid, *descendants(self._process.pid)]

    def steps(self) -> Sequence[float]:
        """Return when each step was done."""
        data = self._steps.read_bytes() if self._steps.exists() else b""
        return memoryview(data[: len(data) // 8 * 8]).cast("d")


def rate(done: Sequence[float], start: float, end: float) -> float:
    """Return the steps per second between the first and the last step in an interval.

    Raises:
        BenchError: the interval has fewer than two steps.
    """
    first, last = bisect.bisect_left(done, start), bisect.bisect_left(done, end) - 1
    if last <= first:
        raise BenchError(f"fewer than two steps in {end - start:.1f} s: take a smaller --batch-size")
    return (last - first) / (done[last] - done[first])


def measure(batch_size: int, num_pairs: int, seconds: float) -> list[str]:
    """Measure with one batch size; return a row of the table."""
    ratios, within, steps_s = [], [], []
    for number in range(num_pairs):
        with tempfile.TemporaryDirectory(prefix="nodekit-throughput-") as name:
            folder = Path(name)
            argv = ["--task", f"{CODE.name}:Task", "--batch-size", str(batch_size), "--lr", str(LR)]
            turns = folder / "turns"
            inventory = INVENTORY.format(
                batch_size=batch_size, turns=turns, turn_steps=max(5, TURN_SAMPLES // batch_size)
            )
            job = Job(folder, *argv, inventory=inventory, files=[CODE])
            try:
                with Plain.started(folder, batch_size) as plain:
                    kit_rate, plain_rate = in_turns(job, plain, seconds)
                within.append(middle(in_its_ranks(turns, seconds)))
            finally:
                job.stop()
        ratios.append(kit_rate / plain_rate)
        steps_s.append(1 / plain_rate)
        own = f"apart {ratios[-1]:.4f}, in kit's ranks {within[-1]:.4f}"
        note(f"batches of {batch_size}, pair {number + 1} of {num_pairs}: {own}")
    shown = [
        f"{middle(each):.4f} ({low:.4f}–{high:.4f})"
        for each in (ratios, within)
        for low, high in [interval(each)]
    ]
    return [f"{1e3 * middle(steps_s):.1f} ms", *shown, f"{num_pairs}", f"{GOAL}"]


def in_turns(job: Job, plain: Plain, seconds: float) -> tuple[float, float]:
    """Return the steps per second of kit's job and of the script, measured in turns."""
    kit = {*job.all, *(each for agent in job.agents.values() for each in descendants(agent))}
    others = {KIT: plain.all, PLAIN: sorted(kit)}
    windows: list[tuple[str, float, float]] = []
    begun, turn = time.monotonic(), KIT
    while time.monotonic() < begun + seconds:
        with stopped(others[turn]):
            time.sleep(SETTLE_S)
            start = time.time()
            time.sleep(WINDOW_S)
            windows.append((turn, start, time.time()))
        turn = PLAIN if turn == KIT else KIT
    time.sleep(1.0)
    done: dict[str, Sequence[float]] = {KIT: [at for at, _ in job.steps()], PLAIN: plain.steps()}
    rates = {
        name: middle([rate(done[name], start, end) for turn, start, end in windows if turn == name])
        for name in done
    }
    return rates[KIT], rates[PLAIN]


def in_its_ranks(turns: Path, seconds: float) -> list[float]:
    """Return for each turn the ratio of the script's time to the module's, for the same number of steps."""
    times = turns.with_suffix(".times")
    turns.touch()
    try:
        time.sleep(seconds)
    finally:
        turns.unlink()
        time.sleep(2 * WINDOW_S)
    found = [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []
    if not found:
        raise BenchError(f"no turn of the plain script's in kit's ranks within {seconds:.0f} s")
    return [plain_s / kit_s for kit_s, plain_s in found]


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench/throughput",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=10, help="how often both are started (%(default)d)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each pair (%(default)g)")
    parser.add_argument("--batch-size", type=int, action="append", help="samples per step (256 and 1024)")
    args = parser.parse_args()
    if args.seconds < 6 * WINDOW_S or args.pairs < 3:
        parser.error(f"wanted at least {6 * WINDOW_S:g} seconds for each of at least 3 pairs")
    exit_on_signals()
    try:
        rows = [measure(each, args.pairs, args.seconds) for each in args.batch_size or (256, 1024)]
    except BenchError as error:
        print(f"bench/throughput: {error}", file=sys.stderr)
        return 1
    print(f"{machine()}\n\n{table(HEADER, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
