"""bench/recovery --no-fault: kit's training module on a busy machine: does a healthy node ever count as lost?"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import Bench, BenchError, note
from sessions import KitModule, wait_for

START_TIMEOUT_S = 60.0
LOOK_S = 1.0
NOTE_S = 600.0
BUSY_PER_CORE = 10
ALARMS = (
    "attempt-ended",
    "false-alarm",
    "hang",
    "membership",
    "no-quorum",
    "store-lost",
    "worker-failed",
)
"""Kinds of events that report a loss."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run without faults."""

    seconds: float
    num_steps: int
    longest_s: float
    """Longest time between two steps of any ranks, in seconds."""
    loads: Sequence[float]
    """Samples of the machine's load average."""
    alarms: Sequence[Mapping[str, Any]]
    num_silent: int
    """How often the supervisor had no answer from a node for 3 s; no node is lost by that."""
    """Events that report a loss."""


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Run this many processes that each use a core, within the block."""
    argv = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(argv) for _ in range(num_processes)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def run(lab: Bench, job: Path, seconds: float) -> Outcome:
    """Train for this long without any fault."""
    session = KitModule(lab, job)
    at = session.command.index("--epochs") + 1
    session.command = (*session.command[:at], "1000000", *session.command[at + 1 :])
    session.start()
    try:
        if not wait_for(lambda: _world(session) == len(lab.lab.hosts), timeout_s=START_TIMEOUT_S):
            raise BenchError("not all hosts train")
        with busy(BUSY_PER_CORE * (os.cpu_count() or 1)):
            return _watch(session, seconds)
    finally:
        session.end()


def _watch(session: KitModule, seconds: float) -> Outcome:
    began = time.time()
    first = last_step = max(line["step"] for line in session.lines if "time" in line)
    last_s, longest_s, told_s = began, 0.0, began
    loads: list[float] = []
    while time.time() < began + seconds and not session.has_ended:
        time.sleep(LOOK_S)
        lines = [line for line in session.read() if "time" in line]
        session.lines.clear()  # an hour has half a million lines
        times = sorted(max(began, float(line["time"])) for line in lines)
        longest_s = max([longest_s, *(b - a for a, b in itertools.pairwise([last_s, *times]))])
        last_s, last_step = max([last_s, *times]), max([last_step, *(line["step"] for line in lines)])
        if time.time() >= told_s + min(NOTE_S, seconds / 10):
            told_s = time.time()
            loads.append(os.getloadavg()[0])
            note(
                f"  {told_s - began:.0f} s, step {last_step}, load {loads[-1]:.0f}, longest pause {longest_s:.2f} s"
            )
    since = [each for each in session.history() if each["time"] > began]
    alarms = [each for each in since if each["kind"] in ALARMS]
    num_silent = sum(each["kind"] == "unreachable" for each in since)
    longest_s = max(longest_s, time.time() - last_s)
    return Outcome(time.time() - began, last_step - first, longest_s, loads, alarms, num_silent)


def _world(session: KitModule) -> int:
    """Return the size of the newest world that has made a step."""
    lines = [line for line in session.read() if "time" in line]
    return int(max(lines, key=lambda line: float(line["time"]))["size"]) if lines else 0


def told(outcome: Outcome) -> str:
    """Format the outcome for printing."""
    load = f"load {min(outcome.loads):.0f} to {max(outcome.loads):.0f}" if outcome.loads else "load not seen"
    said = [
        f"{outcome.seconds:.0f} s without a fault, beside {BUSY_PER_CORE} busy processes for each of "
        f"{os.cpu_count()} cores ({load}): {outcome.num_steps} steps, the longest pause between two "
        f"{outcome.longest_s:.2f} s"
    ]
    if outcome.num_silent:
        said[0] += f"; the supervisor had no answer from a node for 3 s {outcome.num_silent} times"
    if not outcome.alarms:
        return f"{said[0]}\nno rank and no node counted as lost"
    counts = Counter(each["kind"] for each in outcome.alarms)
    said.append("FALSE ALARMS: " + ", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return "\n".join([*said, *(f"  {each}" for each in outcome.alarms[:20])])
