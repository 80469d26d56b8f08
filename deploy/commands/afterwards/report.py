"""Write a run's report: one HTML page to keep, send and print.

In it are a summary, who was in when, curves with restarts marked, what the time went into, snapshots, use of
network, GPUs and CPUs, versions, failures with their tracebacks, the inventory and all events. It needs no
network to be read, and no host to be written: those that can be reached within seconds give a finer loss
curve. Secrets and values of variables are left out. Only you can read the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nodekit.deploy.commands import arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command)
    command.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write it there, - for stdout (RUN.html, here)"
    )
    command.add_argument("--offline", action="store_true", help="ask no host for anything")
    command.add_argument(
        "--json", action="store_true", help="what the page is made from, for programs, on stdout"
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Write the report of one run."""
    from nodekit.deploy.records import find_runs
    from nodekit.deploy.report import report

    if args.json:
        arguments.refuse_beside(
            "--json", {"--output": args.output is not None}, why="--json writes to stdout"
        )
    options = arguments.ssh_options(args)
    run = find_runs.find(args.run_id)
    if args.json:
        print(report.to_json(run, options))
        return 0
    text = report.build(run, options, offline=args.offline)
    if str(args.output) == "-":
        sys.stdout.write(text)
        return 0
    path = args.output or Path(f"{run.run_id}.html")
    report.write(path, text)
    print(
        f"{path.resolve()} is written ({len(text.encode()) / 1000:,.0f} kB); any browser shows and prints it"
    )
    return 0
