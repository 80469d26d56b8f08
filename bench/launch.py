"""Time from Enter to the first training step on three hosts: kit, by hand, DeepSpeed, torchrunx."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import made_tree
import peers
from contestants import STAGES, Start, Starts
from rounds import bench, interleave, machine, median, note, spread, table

NUM_HOSTS = 3
BY_HAND = ("ssh + torchrun, c10d", "ssh + torchrun, static")
KIT = "kit up"
GOAL = 1.10
DESCRIPTION = """\
How long it takes from Enter to the first training step done on all ranks, on three hosts of a lab on this
machine (network namespaces with real sshd), one worker each: the same small DDP script, started

  by hand       three `ssh HOST 'cd … && torchrun …'` at once, with the code there already; with the c10d
                rendezvous, and with a rank given to each host
  kit up        a new run of unchanged code: python's start, the checks and the sync included
  deepspeed     its launcher, by pdsh; the code there already
  torchrunx     from a program of its user's; the code there already

They take turns, round by round, after a warm-up round. A start counts when every rank has made the same step.
The tables are for docs/numbers.md.
"""
EPILOG = """\
examples:
  bench/launch                      5 rounds of those that are installed
  bench/launch --install-peers      install DeepSpeed and torchrunx first, into {venv}
  bench/launch --rounds 1 --only kit,c10d

It needs root (for the lab). Exit status: 0 unless something broke; no time is an error.
"""
WORDS = {
    "first_line": "the script's first line",
    "imported": "it has imported torch",
    "joined": "it has joined the process group",
    "stepped": "it has made its first step",
}
KIT_WORDS = {
    "python": "kit: python, imports, inventory",
    "connect": "kit: connect",
    "check": "kit: check, plan",
    "sync": "kit: sync (agents import torch meanwhile)",
    "agent-started": "kit: go, agents ready",
    "rendezvous": "kit: rendezvous",
    "workers-started": "kit: workers forked",
    "first_line": "worker: python starts",
    "imported": "worker: import torch",
    "joined": "worker: join the process group",
    "stepped": "worker: first step",
}


def main() -> int:
    """Run the benchmark, and print the tables."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/launch: the lab needs root")
    if args.install_peers:
        peers.install()

    def prepare(shared: Path) -> None:
        (shared / "job").mkdir()
        shutil.copyfile(Path(__file__).with_name("job.py"), shared / "job/train.py")

    with bench(NUM_HOSTS, prepare) as lab:
        project = lab.folder / "project"
        made_tree.make(project, num_files=args.files, size_bytes=args.files * 10_000)
        shutil.copyfile(lab.shared / "job/train.py", project / "train.py")
        contestants, absent = Starts(lab, project, lab.shared / "job").available()
        wanted = args.only.split(",")
        chosen = {name: run for name, run in contestants.items() if any(word in name for word in wanted)}
        measured, broken = interleave(
            chosen, rounds=args.rounds, shown=lambda start: f"{start.step_s:6.2f} s", between=lab.wait_quiet
        )
    print(
        f"Enter to first step on {NUM_HOSTS} hosts, seconds; {args.rounds} rounds, interleaved; {machine()}.\n"
    )
    print(
        totals(
            measured, {**absent, **{name: f"broken: {why.splitlines()[0]}" for name, why in broken.items()}}
        )
    )
    if measured:
        print("\nWhen the last rank was how far, seconds after Enter, medians:\n")
        print(stages(measured))
    if KIT in measured:
        print("\nWhere kit's time goes, medians; in its own order, each from the end of the one before:\n")
        print(phases(measured[KIT]))
    for name, why in broken.items():
        note(f"\n{name} broke: {why}")
    for name, starts in measured.items():
        for trouble in {start.trouble for start in starts if start.trouble}:
            note(f"\n{name} made its steps, and then ended badly: {trouble}")
    return 1 if broken or any(start.trouble for start in measured.get(KIT, ())) else 0


def totals(measured: Mapping[str, Sequence[Start]], without: Mapping[str, str]) -> str:
    """Return the table of times and ratios of all contestants."""
    medians = {name: median([start.step_s for start in starts]) for name, starts in measured.items()}
    bases = [name for name in BY_HAND if name in medians]
    rows = []
    for name, starts in measured.items():
        ratios = [f"{medians[name] / medians[base]:.2f} ×" for base in bases]
        end = f"{median([start.end_s for start in starts]):.2f}"
        well = f"{sum(not start.trouble for start in starts)} of {len(starts)}"
        spread_s = spread([start.step_s for start in starts])
        rows.append([name, f"{medians[name]:.2f}", spread_s, *ratios, end, well])
    rows += [[f"{name}: {why}", *["–"] * (4 + len(bases))] for name, why in without.items()]
    header = [
        "",
        "median",
        "range",
        *(f"to {base.partition(', ')[2]} by hand" for base in bases),
        "until it ended",
        "ended well",
    ]
    return table(header, rows)


def stages(measured: Mapping[str, Sequence[Start]]) -> str:
    """Return the table of the stages that all contestants have."""
    rows = [
        [
            WORDS[stage],
            *(f"{median([start.stages[stage] for start in starts]):.2f}" for starts in measured.values()),
        ]
        for stage in STAGES
    ]
    connects = []
    for starts in measured.values():
        known = [start.more["connect"] for start in starts if "connect" in start.more]
        connects.append(f"{median(known):.2f}" if known else "not told")
    return table(["", *measured], [["logged in on all hosts", *connects], *rows])


def phases(starts: Sequence[Start]) -> str:
    """Return the table of kit's phases: how long each took, and when it was over."""
    rows = []
    for before, phase in itertools.pairwise([None, *KIT_WORDS]):
        assert phase is not None
        ends = [_moment(start, phase) for start in starts]
        took = [
            end - (_moment(start, before) if before else 0.0) for start, end in zip(starts, ends, strict=True)
        ]
        rows.append([KIT_WORDS[phase], f"{median(took):.2f}", spread(took), f"{median(ends):.2f}"])
    return table(["phase", "median", "range", "over at"], rows)


def _moment(start: Start, phase: str) -> float:
    return {**start.more, **start.stages}[phase]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/launch",
        description=DESCRIPTION,
        epilog=EPILOG.format(venv=peers.VENV),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each starts (5)")
    parser.add_argument(
        "--files", type=int, default=200, metavar="N", help="the project kit sends has so many files (200)"
    )
    parser.add_argument(
        "--only", default="", metavar="A,B", help="those with one of these words in their names"
    )
    parser.add_argument("--install-peers", action="store_true", help="install DeepSpeed and torchrunx first")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
