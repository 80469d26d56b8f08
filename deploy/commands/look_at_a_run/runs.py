"""List the runs on record, oldest first; compare some.

Each line shows when the run was started and how long it was up (all its starts together), how far it came, the
best value of its metric, its goodput (share of its time that trained steps which count; – where no step was
told), its state and how it ended. A step with ~ is guessed, from a tqdm bar or a line as `iter 100: loss 3.1` among
the last that rank 0 printed; a script that writes STEP/TOTAL to the file $NODEKIT_PROGRESS_FILE tells it itself.

Nothing but this machine is asked. `left` is a run that is on record as running while nobody looks after it:
it may still train. In Slurm's queue, a run is on record as running until `kit status` or `kit up` looks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from nodekit.deploy.commands import arguments
from nodekit.deploy.output import whole_file
from nodekit.inventory.errors import KitError

EPILOG = """\
examples:
  kit runs                               all
  kit runs lab.yaml --last 5             the last five of an inventory
  kit runs --json | jq '.[] | select(.state == "failed") | .run_id'
  kit runs --compare lab-1122-06 lab-1122-07            curves over each other, and what differs
  kit runs --compare lab-1122-06 lab-1122-07 --html compared.html
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "kit runs [NAME] [--last N] [--json]\n       kit runs --compare RUN RUN… [--html FILE] [--json]"
    )
    command.add_argument(
        "name", metavar="NAME", nargs="?", help="those of this inventory file, or whose id begins so"
    )
    command.add_argument("--last", metavar="N", type=int, help="the last N only")
    command.add_argument(
        "--compare",
        metavar="RUN",
        nargs="+",
        help="draw the curves of these over each other, and what differs",
    )
    command.add_argument("--html", metavar="FILE", type=Path, help="with --compare: write it as a page")
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """List the runs, or compare some."""
    from nodekit.deploy.records import record_files, runs
    from nodekit.deploy.runs import runs_table

    if args.compare:
        arguments.refuse_beside(
            "--compare", {"NAME": args.name, "--last": args.last}, why="--compare has the runs behind it"
        )
        return _compare(args)
    if args.html:
        arguments.refuse_without("--html", "--compare RUN RUN…", why="kit report RUN writes one run's page")
    if args.last is not None and args.last < 1:
        raise KitError(f"kit runs --last {args.last}: wanted a number above 0")
    found, unreadable = runs.on_record()
    rows = [runs_table.row(run) for run in runs_table.chosen(found, args.name, args.last)]
    if args.json:
        print(json.dumps([runs_table.public(each) for each in rows], indent=2))
    elif not found and unreadable:
        pass
    elif not found:
        print(f"no run on record in {record_files.folder()}; start one: kit up INVENTORY")
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        runs_table.show(rows)
    else:
        print(runs_table.text(rows))
    if any(each.numbers.get("guess") for each in rows) and not args.json:
        print(runs_table.HOW_TO_TELL, file=sys.stderr)
    for each in unreadable:
        print(f"kit: {each.error()}", file=sys.stderr)
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Compare the runs given to ``--compare``."""
    from nodekit.deploy.runs import runs_compare

    compared = runs_compare.read(args.compare, arguments.ssh_options(args))
    if args.html:
        from nodekit.deploy.runs.runs_page import page

        try:
            whole_file.write(args.html, page(compared))
        except OSError as error:
            raise KitError(f"{args.html}: cannot be written: {error.strerror}") from error
        print(f"wrote {shlex.quote(str(args.html))}", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(runs_compare.to_json(compared))
    elif not args.html:
        runs_compare.show(compared)
    return 0
