"""Remove runs: their folders on the nodes, and the record.

Only runs that are over: first go their folders on the nodes (code, logs, output, snapshots), then the record
here. What goes, and how large it is, is said first, and asked for.

Only `<workdir>/runs/<id>` is removed, where the run's own files say that it is that run's, and its snapshots
in a folder that hosts share. A run that runs is refused; so is one that a host has which cannot be reached.
What could not be removed keeps its record, and the same command goes on with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError, KitErrors

if TYPE_CHECKING:
    from nodekit.deploy.records.runs import Run

ACTS = True
EPILOG = """\
examples:
  kit rm lab-1122-0601                   asks
  kit rm --older-than 30d --dry-run      what would go
  kit rm --older-than 30d --keep-snapshots --yes
  kit rm --lost lab-1122-0601            without the hosts that are off for good

exit codes:
  0    removed, or not there
  1    something was refused, or could not be removed
  2    wrong usage of the command line
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", metavar="RUN", nargs="*", help="a run's id or its beginning, or a sweep's")
    command.add_argument("--older-than", metavar="AGE", help="those that ended longer ago, as 30d, 12h or 2w")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    command.add_argument("--keep-snapshots", action="store_true", help="leave the snapshots where they are")
    command.add_argument(
        "--records-only", action="store_true", help="only the records here: what is on the nodes stays there"
    )
    command.add_argument(
        "--lost",
        action="store_true",
        help="you know that unreachable hosts will not come back: remove the run without them",
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Show what would be removed, ask, and remove it; return 1 if a run is left."""
    from nodekit.deploy.results import rm

    if args.records_only:
        others = {"--keep-snapshots": args.keep_snapshots}
        arguments.refuse_beside("--records-only", others, why="--records-only leaves all on the nodes")
    found, notes = rm.chosen(args.runs, args.older_than)
    for note in notes:
        print(note)
    if found and not (args.yes or args.dry_run or sys.stdin.isatty()):
        raise KitError(
            "no terminal to ask in", cure="kit rm --yes removes without asking, --dry-run shows what"
        )
    failed = 0
    for run in found:
        try:
            with rm.held(run):
                (_remove_record if args.records_only else _remove)(run, args)
        except KitError as error:
            arguments.tell(error)
            failed += 1
    return 1 if failed else 0


def _remove_record(run: Run, args: argparse.Namespace) -> None:
    from nodekit.deploy.records import runs
    from nodekit.deploy.results import rm

    if run.state in runs.LIVE and not args.lost:
        raise KitError(
            f"{run.run_id} is {run.state}, as far as is known here",
            cure=f"kit down {run.run_id} first; with --lost its record goes all the same",
        )
    if _is_wanted([f"{run.run_id}  {run.state}", f"  the record in {run.folder}"], args):
        rm.remove_record(run)
        print(f"{run.run_id}: the record is removed")


def _remove(run: Run, args: argparse.Namespace) -> None:
    from nodekit.deploy.results import rm

    told: list[str] = []
    options = arguments.ssh_options(args, notice=told.append)
    with rm.looked_at(run, options) as (removal, channels):
        if removal.lost and not args.lost:
            where = ", ".join(removal.lost)
            left = KitError(
                f"nothing of {run.run_id} is removed, since {where} may have a part of it",
                cure=f"kit rm --lost {run.run_id} removes the rest and the record, if {where} will not come back",
            )
            raise KitErrors([*map(KitError, told), left])
        if removal.problems:
            raise KitErrors(map(KitError, [*removal.problems, f"nothing of {run.run_id} is removed"]))
        if _is_wanted(removal.lines(keep_snapshots=args.keep_snapshots), args):
            rm.remove(removal, channels, keep_snapshots=args.keep_snapshots)
            rm.remove_sweep(removal, channels)
            print(f"{run.run_id} is removed")


def _is_wanted(lines: Sequence[str], args: argparse.Namespace) -> bool:
    print("\n".join(lines), flush=True)
    if args.dry_run:
        return False
    return args.yes or arguments.is_confirmed("remove it?")
