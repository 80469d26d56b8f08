"""The cost of observation: its share of training and of a core, a week's events, and drawing 64 nodes on the screen."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import io
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rounds import BenchError, exit_on_signals, interval, machine, middle, note, table
from steady_job import Job, cpu_s, stopped, threads_of

from nodekit.deploy.agent.telemetry import notes
from nodekit.deploy.agent.telemetry.notes import Notes
from nodekit.deploy.host import current_status

GOAL_SHARE, GOAL_CORE, GOAL_WEEK_MB, GOAL_DRAW_MS = 0.005, 0.01, 50.0, 100.0
WEEK_S = 7 * 86_400.0
WHOLE, UNWATCHED, UNSEEN, ALONE = "whole", "unwatched", "unseen", "alone"
AROUND_S = (-0.01, 0.05)  # when the effects of a look at the node are felt, relative to it
EDGE_S = 0.05  # ignored at both ends of a window: stopping and resuming takes a moment
SETTLE_S = 0.4  # after a stop: time to catch up on what was left undone
# Threads of the agent: one dates and limits log lines, one records steps and usage.
LOGGING = ("logbook", "status")
DESCRIPTION = """\
Six costs of seeing a run.

  training   a node of one core runs the training module, which takes all of it; the supervisor is on another
             core, as it is on another machine. What watches (the channel's far end, the supervisor) is stopped in
             some windows, what logs (threads of the agent) too in others, and all of kit in the rest: how many
             steps per second there are with it, as a ratio to those without. It is the hardest case: no second
             core, and no GPU, hides any of it.
  a look     once a second the agent's status is written and the channel's far end sends it. The steps around that
             moment are compared with those of the second around it, which shows a tenth of a percent: what
             runs from second to second, as a machine's speed does, does not show.
  a core     what kit takes of it meanwhile: the channel's far end, which watches, the agent's threads that log, and
             all of it. The rest of the agent looks after the job: rendezvous, hangs, copies of snapshots.
  a step     what the training module itself takes to note one: metrics.jsonl, TensorBoard's curves, progress.
  events     of a week, by the real code with a clock of its own: nodes with 8 GPUs, a snapshot a minute, an
             evaluation every five.
  redraw     of `kit watch`, for 64 nodes in a window of 120 by 40.
"""
EPILOG = """\
examples:
  bench/overhead                    some fifteen minutes; wants a machine that has nothing else to do
  bench/overhead --seconds 30       a rough look

Exit status: 0 unless something broke; a goal that is missed is no error.
"""


# --- training, with kit and with kit stopped -------------------------------------------------------------------


def measure(job: Job, *, seconds: float, window_s: float) -> dict[str, Any]:
    """Return ratios of steps per second with and without kit, for each window, and shares of a core."""
    agents = list(job.agents.values())
    groups = {
        "kit": [job.channels + agents + list(job.servers.values())],
        "watching": [job.channels],
        "logging": [agents, LOGGING],
        "supervisor": [[job.supervisor]],
    }
    note(
        f"training: {seconds / 3:.0f} s, to see what kit takes of a core, and what a look takes of the steps around it"
    )
    begun, before = time.monotonic(), {name: cpu_s(*args) for name, args in groups.items()}
    looks = _looks(job, seconds / 3)
    spent = time.monotonic() - begun
    cpu = {name: (cpu_s(*args) - before[name]) / spent for name, args in groups.items()}
    note(f"and in turns with kit stopped, {seconds:.0f} s")
    begun = time.monotonic()
    watching = [job.supervisor, *job.channels]
    logging = [thread for pid in agents for thread in threads_of(pid, LOGGING)]
    without = {UNWATCHED: (watching, []), UNSEEN: (watching, logging), ALONE: (job.all, [])}
    windows: list[tuple[str, float, float]] = []

    def train(turn: str) -> None:
        start = time.time()
        time.sleep(window_s)
        windows.append((turn, start, time.time()))

    order = random.Random(0)
    train(WHOLE)
    while time.monotonic() < begun + seconds:
        for turn in order.sample(list(without), k=len(without)):
            with stopped(*without[turn]):
                train(turn)
            # Between two stops everything runs: nothing may be silent for longer than kit tolerates.
            time.sleep(SETTLE_S)
            train(WHOLE)
    time.sleep(1.0)
    steps = job.steps()
    done = [at for at, _ in steps]
    lost = [each for look in looks if (each := lost_s(done, look)) is not None]
    rates = [(turn, _rate(steps, start + EDGE_S, end - EDGE_S)) for turn, start, end in windows]
    rates_of = {name: [rate for turn, rate in rates if turn == name] for name in (WHOLE, *without)}
    ratios: dict[str, list[float]] = {turn: [] for turn in without}
    for (_, before_it), (turn, less), (_, after_it) in zip(rates, rates[1:], rates[2:], strict=False):
        # Compare with the mean of both neighbours: this cancels a machine that gets steadily faster or slower.
        if turn != WHOLE:
            ratios[turn].append((before_it + after_it) / 2 / less)
    return {"cpu": cpu, "ratios": ratios, "rates": rates_of, "lost": lost}


def _looks(job: Job, seconds: float) -> list[float]:
    """Return when the node was looked at: its status is written then, which wakes the far end of the channel."""
    now = current_status.Present(str(next(iter(job.node_dirs.values())) / "events.jsonl"))
    found: list[float] = []
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        found += [each["time"] for each in now.read().values() if each["time"] not in found[-1:]]
        time.sleep(0.1)
    return found


def lost_s(done: Sequence[float], look: float) -> float | None:
    """Return the seconds of training lost around a look, by the step rate in the rest of the second around it."""

    def count(at: float) -> float | None:
        """Return the steps done by then, including the fraction of the one in progress."""
        index = bisect.bisect_right(done, at)
        if not 0 < index < len(done):
            return None
        return index + (at - done[index - 1]) / (done[index] - done[index - 1])

    before, after = AROUND_S
    counts = [count(look + each) for each in (-0.5, before, after, 0.5)]
    if None in counts:
        return None
    first, low, high, last = (each for each in counts if each is not None)
    rest = (low - first + last - high) / (1 - (after - before))
    return (after - before) - (high - low) / rest


def _rate(steps: Sequence[tuple[float, int]], start: float, end: float) -> float:
    """Return the steps per second between two times, without the gaps between epochs."""
    inside = [each for each in steps if start <= each[0] < end]
    took = [time - before for (before, last), (time, epoch) in itertools.pairwise(inside) if last == epoch]
    return 1 / statistics.mean(took)


def noted_us(*, num_steps: int = 500, step_s: float = 0.009) -> float:
    """Return the microseconds of processor time that the training module takes to report a step, in all its threads."""
    from nodekit.training.reporting.report import Report
    from nodekit.training.world import World

    def took(report: Report | None) -> float:
        begun = time.process_time()
        for step in range(2, num_steps):
            time.sleep(step_s)
            if report is not None:
                report.step(step, epoch=1, loss=1.0 / step, lr=1e-3, num_samples=64, ended=time.time())
        return (time.process_time() - begun) / (num_steps - 2) * 1e6

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as unseen:
        world = World.from_env({"NODEKIT_PROGRESS_FILE": f"{folder}/progress"})
        with (
            contextlib.redirect_stderr(unseen),  # no progress bar
            Report(world, Path(folder), step=0, total_steps=10 * num_steps, is_evaluated=True) as report,
        ):
            report.step(1, epoch=1, loss=1.0, lr=1e-3, num_samples=64, ended=time.time())
            report.settle()  # until TensorBoard is imported
            return took(report) - took(None)


# --- a week's events ------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.79e9 + self.now


def week_mb(num_nodes: int) -> float:
    """Return the megabytes of events that `num_nodes` nodes with 8 GPUs write in a week."""
    gpu = {"use": 0.97, "memory": 72_154_285_056, "memory_total": 150_754_820_096}
    sample = {
        "cpu": 0.312,
        "memory": 210_763_776_000,
        "memory_total": 1_081_101_176_832,
        "interface": "enp134s0f0",
        "received": 2_406_113_280,
        "sent": 2_406_113_280,
        "gpus": [{"index": index, **gpu} for index in range(8)],
    }
    size = 0
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(notes, "time", _Clock()) as clock:
        told, snapshots = Path(folder, "told"), Path(folder, "snapshots")
        told.mkdir()
        snapshots.mkdir()

        def say(kind: str, **fields: Any) -> None:
            nonlocal size
            line = {"run": "lab-1122-061157-e9c4", "time": 1.79e9 + 0.1234567, "node": "gpu-17", "kind": kind}
            size += len(json.dumps({**line, "at": ["1795327919.788755", 4717123], **fields})) + 1

        node = Notes(say=say, told=told, snapshots=snapshots, usage=lambda: sample, num_nodes=num_nodes)
        node.begin("0.0", sees_snapshots=True)
        written = Path(folder, "events.jsonl")
        written.write_text('{"time": 1.5}\n')
        now, own = (
            current_status.of(folder),
            {"run": "lab-1122-061157-e9c4", "node": "gpu-17", "usage": sample},
        )
        workers = [
            {"local_rank": rank, "rank": rank, "pid": 12345, "start_time": 123456789} for rank in range(8)
        ]
        names = [f"gpu-{number}" for number in range(num_nodes)]
        first = 0  # of these bytes, those that only rank 0's node writes
        step = 0
        while clock.now < WEEK_S:
            clock.now += 2.0 if clock.now < 1000 else 20.0
            step = int(clock.now * 3)
            if clock.now % 60 < 20:
                for path in snapshots.iterdir():
                    path.unlink()
                (snapshots / f"g0000-s{step:09d}.json").write_text('{"size_bytes": {"a": 1234567890}}')
            if clock.now % 300 < 20:
                line = {
                    "kind": "evaluation",
                    "step": step,
                    "epoch": 3,
                    "metrics": {"accuracy": 0.7, "loss": 0.9},
                }
                with (told / "rank0").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                before = size
                node.look(f"{step}/9000000 epoch 3 loss 1.2345", is_training=False)
                first += size - before
            node.look(f"{step}/9000000 epoch 3 loss 1.2345", is_training=True)
            now.write(
                {
                    **own,
                    "time": clock.now,
                    "progress": f"{step}/9000000",
                    "workers": workers,
                    "members": names,
                }
            )
        size += written.stat().st_size
    return ((size - first) * num_nodes + first) / 1e6


# --- a screen -------------------------------------------------------------------------------------------------


def redraw_ms(num_nodes: int, *, rounds: int = 50) -> list[float]:
    """Return the milliseconds to draw a view of this many nodes, each time with different numbers."""
    from rich.console import Console

    from nodekit.deploy.screen import screen

    gpu = {"use": 0.97, "memory": 72 << 30, "memory_total": 140 << 30}
    took = []
    with Path(os.devnull).open("w") as nothing:
        console = Console(file=nothing, force_terminal=True, width=120, height=40, color_system="truecolor")
        for number in range(rounds):
            rows = [
                screen.Node(
                    name=f"gpu{index}",
                    state="running",
                    generation=1,
                    restarts=index % 3,
                    usage={
                        "cpu": 0.3,
                        "memory": 1 << 37,
                        "memory_total": 1 << 40,
                        "received": 1e9 + number,
                        "sent": 1e9,
                        "gpus": [{"index": each, **gpu} for each in range(8)],
                    },
                    step=number,
                    rate=3.2,
                    quiet_s=0.4,
                )
                for index in range(num_nodes)
            ]
            model = screen.Model(
                run_id="lab-1122-061157-e9c4",
                state="running",
                now=1.79e9 + number,
                nodes=rows,
                started=1.79e9 - 86_400,
                generation=1,
                step=number,
                total_steps=9000,
                rate=3.2,
                losses=[(step, 2.0 / (1 + step / 100)) for step in range(2000)],
                events=[(1.79e9, "gpu3 silent for 3 s; re-forming with 63 nodes")] * 12,
            )
            begin = time.perf_counter()
            console.print(screen.render(model, 120, 40))
            took.append((time.perf_counter() - begin) * 1000)
    return took


# --- all of it ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running() -> Iterator[Job]:
    """Run a job in its own folders within the block."""
    with tempfile.TemporaryDirectory(prefix="nodekit-overhead-") as folder:
        job = Job(Path(folder))
        job.pin()
        try:
            yield job
        finally:
            job.stop()


def rows_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the first rows of the table."""
    rates, cpu = {turn: statistics.median(each) for turn, each in found["rates"].items()}, found["cpu"]

    def ratio(turn: str) -> str:
        low, high = interval(found["ratios"][turn])
        here = middle(found["ratios"][turn])
        return f"{here:.4f} ({low:.4f}–{high:.4f}); {rates[WHOLE]:.1f} to {rates[turn]:.1f} steps/s"

    lost = found["lost"]  # in seconds per second
    most_off = 1.645 * statistics.stdev(lost) / len(lost) ** 0.5  # at 90 % confidence
    here = statistics.mean(lost)
    around = f"{here:.2%} ({here - most_off:.2%}–{here + most_off:.2%}); {len(lost)} looks"
    return [
        ["training, lost around each look", around, f"{GOAL_SHARE:.1%}"],
        ["training, watched and logged to neither", ratio(UNSEEN), f"{1 - GOAL_SHARE:.3f}"],
        ["training, watched to unwatched", ratio(UNWATCHED), ""],
        ["training, with all of kit to none", ratio(ALONE), ""],
        ["of one core per node, watching", f"{cpu['watching']:.2%}", ""],
        ["of one core per node, logging", f"{cpu['logging']:.2%}", ""],
        ["of one core per node, all of kit", f"{cpu['kit']:.2%}", f"{GOAL_CORE:.0%}"],
        ["of a core where kit up runs", f"{cpu['supervisor']:.2%}", ""],
    ]


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="bench/overhead",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="to train in turns (%(default)g)")
    parser.add_argument(
        "--window", type=float, default=1.0, help="seconds of each turn, below kit's patience (%(default)g)"
    )
    args = parser.parse_args()
    if not 0.5 <= args.window <= 2 or args.seconds < 10 * args.window:
        parser.error("wanted a window of 0.5 to 2 s, and at least ten of them")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("wanted two cores: one for the node, one for the supervisor")
    exit_on_signals()
    where = machine()  # now, before this process is pinned to one core
    try:
        with running() as job:
            rows = rows_of(measure(job, seconds=args.seconds, window_s=args.window))
    except BenchError as error:
        print(f"bench/overhead: {error}", file=sys.stderr)
        return 1
    rows.append(["of a step, the module's own notes", f"{noted_us():.0f} µs", ""])
    rows += [
        [
            f"events of a week, {count} node{'s' * (count > 1)}",
            f"{week_mb(count):.1f} MB",
            f"{GOAL_WEEK_MB:.0f} MB",
        ]
        for count in (1, 8, 64)
    ]
    took = redraw_ms(64)
    rows.append(
        [
            "kit watch draws 64 nodes",
            f"{statistics.median(took):.1f} ms (most {max(took):.1f})",
            f"{GOAL_DRAW_MS:.0f} ms",
        ]
    )
    print(f"{where}\n\n{table(['cost', 'found', 'goal'], rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
