"""Train by every engine on this machine, and measure.

The same task with the same data, seed and batch, by one engine after the other: how long the whole run took
and the training without imports, samples per second, how many times the throughput of one process that is
(single), the greatest memory of any rank, accuracy and macro F1.

A table, the same as CSV, a bar chart, and each run's log, result and metrics. An engine that cannot run here
is a row with the reason. single and dp are one process, and run once. A batch is shared by all ranks,
whatever their number.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
examples:
  kit compare                                     the digits by all engines
  kit compare --task text -- --epochs 2           the sentences; after the --, options of the training module
  kit compare --table seeds                       one GPU, dp, ddp by torchrun, by spawn and with AMP, the others
  kit compare --engines single,ddp,deepspeed:3 --nproc 1,2,4
  kit compare --engines single,ddp,ddp:bf16,ddp:spawn:bf16

after an engine, if wanted: :0 to :3 (deepspeed's stage), :bf16, :fp16, :spawn (its ranks without torchrun)

exit codes:
  0    measured; what cannot run here is a row with the reason
  1    bad input, or a folder that cannot be written
  2    wrong usage of the command line, or none of these can run here
  3    a training has failed; the table has all others
  130  stopped by Ctrl-C
"""
TAKES_COMMAND = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit compare [options] [-- OPTIONS OF python -m nodekit.training…]"
    command.add_argument("--engines", metavar="NAME,NAME…", help="which (all)")
    command.add_argument(
        "--table",
        choices=["seeds"],
        help="a ready list of engines: seeds, as the tutorials compare them, on the task text and all GPUs",
    )
    command.add_argument(
        "--nproc",
        metavar="N,N…",
        help="on how many ranks (1, and as many as there are GPUs, or 2 without one)",
    )
    command.add_argument("--task", metavar="NAME", help="what to train (digits; with --table seeds text)")
    command.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="a new folder for all of it (compare-DATE-TIME)"
    )
    command.add_argument(
        "--timeout", metavar="S", type=float, default=3600.0, help="most seconds for a run (%(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """Train by every engine, and print the table."""
    from nodekit.deploy.compare.compare import Options, compare

    task = ("--task", args.task) if args.task else ()
    return compare(
        Options(
            engines=args.engines,
            table=args.table,
            nproc=args.nproc,
            arguments=(*task, *args.command),
            output=args.output,
            timeout_s=args.timeout,
        )
    )
