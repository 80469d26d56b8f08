"""Check whether a job would run on the hosts of an inventory.

All hosts are looked at at once, in ten seconds at most (more where this machine is busy): can they be logged
in to, is there room to write, do Python, torch, CUDA, NCCL and what the script imports agree, are the GPUs
well and free, do the clocks agree, does the network carry the job, and has an earlier run left anything
behind. A table of hosts and checks, and for each cell that is not well: what was found, what was wanted, and
what mends it.

Nothing is changed on the hosts. kit up runs the same checks, but for the network, before it starts anything.
"""

from __future__ import annotations

import argparse
import shutil

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError

EPILOG = """\
examples:
  kit check lab.yaml                     the hosts, and the job that the inventory names
  kit check lab.yaml -- train.py         would this script start there?
  kit check lab.yaml --deep              and then a real rendezvous and an all-reduce over all of them
  kit check lab.yaml --json | jq '.findings[] | select(.level != "ok")'

exit codes:
  0    a job could start; warnings are told apart
  1    something would keep it from that, or bad input
  2    wrong usage of the command line
"""
TAKES_COMMAND = True
MAX_TIMEOUT_S = 86400


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit check INVENTORY [options] [-- SCRIPT.py ARGS…]"
    arguments.add_inventory(command)
    command.add_argument("--deep", action="store_true", help="end with a real rendezvous and an all-reduce")
    command.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        help="time limit in seconds, --deep not counted (10; more if this machine is busy)",
    )
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Examine the hosts; return 1 if something would keep a job from starting."""
    from nodekit.deploy.preflight import check_report, checkup

    if args.timeout is not None and not 0 < args.timeout <= MAX_TIMEOUT_S:
        raise KitError(f"kit check --timeout {args.timeout:g}: wanted some seconds, at most {MAX_TIMEOUT_S}")
    report = checkup.run(
        checkup.Options(
            inventory=arguments.inventory(args),
            command=tuple(args.command) or None,
            deep=args.deep,
            timeout_s=args.timeout,
            ssh=arguments.ssh_options(args),
        )
    )
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    print(check_report.to_json(report) if args.json else check_report.text(report, width))
    return 1 if report.failed else 0
