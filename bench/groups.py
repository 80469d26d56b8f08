"""How long ranks take to meet in a group of gloo's again, as kit does it and otherwise, and what that leaves."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from groups_job import PER_TURN
from rounds import machine, median, note, spread, table

import nodekit

JOB = Path(__file__).with_name("groups_job.py")
WAYS = {
    "keep": "kit, with torch 2.14 or newer: connections shut, then _reconfigure",
    "leave": "kit, with an older torch: a new group beside the old one",
    "destroy": "destroy_process_group, init_process_group",
    "reconfigure": "_reconfigure alone",
}
OF_2_14 = ("keep", "reconfigure")
EPILOG = """\
examples:
  bench/groups                                      with the torch of this project
  bench/groups --python VENV/bin/python             with another one: 2.14 is the first that has _reconfigure

Exit status: 0.
"""


@dataclass(frozen=True)
class Turn:
    """Some re-formations in one process per rank."""

    seconds: list[float]
    """Of the slowest rank, for each."""
    threads: float
    """How many more threads a rank had after each."""


def environment() -> dict[str, str]:
    """Return this process's, in which a python that has torch alone finds kit, too."""
    return {**os.environ, "PYTHONPATH": str(Path(next(iter(nodekit.__path__))).parent)}


def turn(python: str, way: str, size: int) -> Turn:
    """Re-form a group of ``size`` ranks some times."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    own = [python, str(JOB), way, str(size), str(server.port)]
    # That python may have torch alone.
    env = {**os.environ, "PYTHONPATH": str(Path(next(iter(nodekit.__path__))).parent)}
    ranks = [
        subprocess.Popen([*own, str(rank)], stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(size)
    ]
    found: list[dict[str, Any]] = [{}] * size

    def read(rank: int) -> None:
        found[rank] = json.loads(ranks[rank].communicate(timeout=120)[0])

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    seconds = [max(each) for each in zip(*(one["seconds"] for one in found), strict=True)]
    return Turn(seconds, max(one["threads"] for one in found))


def has_reconfigure(python: str) -> bool:
    """Whether kit would use `_reconfigure` with that python's torch."""
    asked = (
        "from nodekit.training.group.reconfigure import is_available; raise SystemExit(not is_available())"
    )
    return subprocess.run([python, "-c", asked], env=environment(), check=False).returncode == 0


def torch_of(python: str) -> str:
    """Return the version of that python's torch."""
    asked = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench/groups: --python {python}: wanted a python that can import torch: {error}")


def sizes(text: str) -> list[int]:
    """Parse ``2,4``."""
    found = [int(each) for each in text.split(",")]
    if min(found) < 2:
        raise ValueError(text)
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run the benchmark, and print the table."""
    parser = argparse.ArgumentParser(
        prog="bench/groups",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="whose torch is tried (this one's)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help=f"of {PER_TURN} meetings each way (5)"
    )
    parser.add_argument(
        "--ranks", type=sizes, default="2,4", metavar="N,M", help="how many of them, on this machine (2,4)"
    )
    args = parser.parse_args(given)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: wanted 1 or more")
    version = torch_of(args.python)
    has_it = has_reconfigure(args.python)
    ways = [way for way in WAYS if has_it or way not in OF_2_14]
    rows = []
    for size in args.ranks:
        turns: dict[str, list[Turn]] = {way: [] for way in ways}
        for number in range(args.rounds):
            for way in ways[:: -1 if number % 2 else 1]:
                turns[way].append(took := turn(args.python, way, size))
                note(f"round {number + 1}  {size} ranks  {way:<12} {1000 * median(took.seconds):.1f} ms")
        of_kit = median([each for one in turns[ways[0]] for each in one.seconds])
        for way in ways:
            ms = [1000 * each for one in turns[way] for each in one.seconds]
            ratio, threads = median(ms) / 1000 / of_kit, max(each.threads for each in turns[way])
            rows.append(
                [
                    f"{size} ranks, {WAYS[way]}",
                    f"{median(ms):.1f}",
                    spread(ms),
                    f"{ratio:.2f} ×",
                    f"{threads:.0f}",
                ]
            )
    print(f"A process group of gloo, made anew; torch {version}. {machine()}\n")
    print(table(["", "median ms", "range", "to kit", "threads left each time"], rows))
    if not has_it:
        print("\nThis torch has no _reconfigure.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
