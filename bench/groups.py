"""How long ranks take to meet in a new process group of gloo's: as kit does it, as is usual, and by `_reconfigure`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from groups_job import PER_TURN
from rounds import machine, median, note, spread, table

JOB = Path(__file__).with_name("groups_job.py")
WAYS = {
    "abandon": "as kit does: the old one is kept",
    "destroy": "destroy_process_group, init_process_group",
    "reconfigure": "_reconfigure",
}
EPILOG = """\
examples:
  bench/groups                                      with the torch of this project
  bench/groups --python VENV/bin/python             with another one: 2.14 is the first that has _reconfigure

Exit status: 0.
"""


def turn(python: str, way: str, size: int) -> list[float]:
    """Return the seconds of the slowest rank, for each re-formation."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    own = [python, str(JOB), way, str(size), str(server.port)]
    ranks = [subprocess.Popen([*own, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
    found: list[list[float]] = [[]] * size

    def read(rank: int) -> None:
        found[rank] = json.loads(ranks[rank].communicate(timeout=120)[0])

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [max(each) for each in zip(*found, strict=True)]


def has_reconfigure(python: str) -> bool:
    """Whether that python's torch has `_reconfigure` for gloo."""
    asked = "import torch.distributed.distributed_c10d as c; raise SystemExit(not hasattr(c, '_reconfigure'))"
    return subprocess.run([python, "-c", asked], check=False).returncode == 0


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
    ways = [way for way in WAYS if way != "reconfigure" or has_reconfigure(args.python)]
    rows = []
    for size in args.ranks:
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds):
            for way in ways[:: -1 if number % 2 else 1]:
                took = turn(args.python, way, size)
                seconds[way] += took
                note(f"round {number + 1}  {size} ranks  {way:<12} {1000 * median(took):.1f} ms")
        for way in ways:
            ms = [1000 * each for each in seconds[way]]
            ratio = median(seconds[way]) / median(seconds["abandon"])
            rows.append([f"{size} ranks, {WAYS[way]}", f"{median(ms):.1f}", spread(ms), f"{ratio:.2f} ×"])
    print(f"A process group of gloo, made anew; torch {version}. {machine()}\n")
    print(table(["", "median ms", "range", "to kit"], rows))
    if "reconfigure" not in ways:
        print("\nThis torch has no _reconfigure.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
