"""Print the output of a run's ranks.

All nodes' and all ranks' lines are printed in the order of time, the nodes' clocks put right by what they
were off. A line is dated to within half a second. Earlier attempts are there too; what was left out because
the logs had grown too large (logs.keep in the inventory) is told in its place.

In a terminal each line has its time (yours) and its node a colour; in a pipe it is `NODE:RANK | LINE`. What
is filtered is filtered on the nodes, and does not travel.

--fetch copies the logs to this machine, each time what is new; so do kit down --fetch and, at the end of a
run, `logs: {fetch: true}` in the inventory. Where a node cannot be reached any more, its copy is shown.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.records.loglines import Wanted

EPILOG = """\
examples:
  kit logs                               all of the latest run
  kit logs -f --rank 0                   what rank 0 says, until the run ends
  kit logs --attempt 0.0 --grep Error    what went wrong in the first attempt
  kit logs --node 'gpu[3-4]' --since 10m
  kit logs --since 12:00 --until 12:05 --time > noon.txt
  kit logs lab-1122 --fetch              copies, for when the hosts are off

exit codes:
  0    shown, or fetched
  1    a node's logs could not be read, or bad input
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit logs [RUN] [options]"
    arguments.add_run(command)
    command.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    which = command.add_argument_group("which lines")
    which.add_argument("--node", metavar="N", help="of these nodes, as gpu1 or gpu[1-3] (all)")
    which.add_argument("--rank", metavar="R", help="of these ranks, as 3, 0-3 or 0,2 (all)")
    which.add_argument(
        "--attempt", metavar="G.N", help="of this attempt, as 0.1, of a generation, as 1, or last (all)"
    )
    which.add_argument("--since", metavar="WHEN", help="written since then: 10m, 2h, 12:03, 2026-11-22T12:03")
    which.add_argument("--until", metavar="WHEN", help="written until then")
    which.add_argument("--grep", metavar="REGEX", help="in which this is found; looked for on the nodes")
    how = command.add_argument_group("how")
    how.add_argument("--time", action="store_true", help="date and time to the millisecond before each line")
    how.add_argument("--json", action="store_true", help="an object on each line, for programs")
    how.add_argument(
        "--fetch", action="store_true", help="copy all logs to this machine, in place of showing them"
    )
    how.add_argument("-o", "--output", metavar="DIR", help="with --fetch: to there (the run's record)")
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Show the output of a run, or fetch it; return 1 if a node's logs could not be read."""
    from nodekit.deploy.logs import showlogs
    from nodekit.deploy.records import find_runs

    wanted = _wanted(args)
    if args.output and not args.fetch:
        arguments.refuse_without("-o", "--fetch")
    if args.fetch:
        which = ("rank", "attempt", "since", "until", "grep", "time", "json")
        others = {"-f": args.follow, **{f"--{name}": getattr(args, name) for name in which}}
        arguments.refuse_beside(
            "--fetch", others, why="--fetch copies the logs as they are, and shows nothing"
        )
    options = showlogs.Options(
        wanted=wanted,
        follow=args.follow,
        times=args.time,
        json=args.json,
        fetch=args.fetch,
        output=args.output,
        ssh=arguments.ssh_options(args, notice=lambda text: print(f"kit: {text}", file=sys.stderr)),
    )
    try:
        return showlogs.logs(find_runs.find(args.run_id), options)
    except KeyboardInterrupt:
        return 130  # and no message: the run goes on


def _wanted(args: argparse.Namespace) -> Wanted:
    """Return which lines to show, by the options.

    Raises:
        KitError: the value of an option is invalid.
    """
    from nodekit.deploy.records.loglines import Wanted, parse_ranks, parse_when
    from nodekit.inventory import hostlists

    now = time.time()
    if args.grep is not None:
        try:
            re.compile(args.grep)
        except re.error as error:
            raise KitError(
                f"--grep: found '{args.grep}'", wanted=f"a regular expression as Python has them: {error}"
            ) from error
    try:
        nodes = tuple(hostlists.expand(args.node)) if args.node is not None else ()
    except ValueError as error:
        raise KitError(
            f"--node: found '{args.node}'", wanted=f"nodes, as gpu1 or gpu[1-3]: {error}"
        ) from error
    return Wanted(
        nodes=nodes,
        ranks=parse_ranks(args.rank) if args.rank is not None else (),
        attempt=args.attempt or "",
        since=parse_when(args.since, now=now) if args.since is not None else None,
        until=parse_when(args.until, now=now, option="--until") if args.until is not None else None,
        grep=args.grep,
    )
