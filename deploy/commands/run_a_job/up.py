"""Bring up the job of an inventory and watch it.

Check the hosts, sync the code, start an agent on each node, stream every rank's output, and tell how it
ended.

Safe to run again: on a running job it attaches, after `kit down` or a failure it goes on from the newest
snapshot. Ctrl-C stops the job on every node; a second Ctrl-C kills it at once.

In a terminal it shows a live view, that of `kit watch`: ? lists its keys, q leaves the job running. --plain
and -q print lines there too.

Where the inventory has `slurm:` in place of `hosts:`, it submits the job and follows it through the queue to
its end; Ctrl-C cancels it.
"""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments

ACTS = True
EPILOG = f"""\
examples:
  kit up                                 the training module, on two nodes on this machine
  kit up inventory/lab.yaml              the job the inventory names
  kit up lab.yaml -- train.py --lr 0.1   this script, as torchrun would run it
  kit up lab.yaml --dry-run              print what each node would run, and run nothing
  kit up slurm.yaml --sweep lr=1e-3,3e-4 --sweep seed=0,1     four runs, as a Slurm array

{arguments.EXIT_CODES}"""
TAKES_COMMAND = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit up [INVENTORY] [options] [-- SCRIPT.py ARGS…]"
    arguments.add_inventory(command, is_optional=True)
    command.add_argument(
        "-d", "--detach", action="store_true", help="leave the job running once it has started"
    )
    command.add_argument("--new", action="store_true", help="start a new run, even where one could go on")
    command.add_argument(
        "--dry-run", action="store_true", help="check, print what each node would run, run nothing"
    )
    command.add_argument("--json", action="store_true", help="with --dry-run: the plan for programs")
    command.add_argument(
        "--skip-check",
        action="store_true",
        help="start even if `kit check` would fail: only the checks that every start needs",
    )
    command.add_argument("-q", "--quiet", action="store_true", help="only the nodes' status and the verdict")
    command.add_argument(
        "--plain", action="store_true", help="lines in place of the live view that a terminal gets"
    )
    command.add_argument(
        "--sweep",
        metavar="OPTION=V,V…",
        action="append",
        default=[],
        help="under Slurm: a run for each value, with `--OPTION V` after the command, in one array; given again, "
        "every value with every other",
    )
    arguments.add_metrics(command)
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Bring up the job; the exit status says how it ended."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.launch.options import Options
    from nodekit.inventory.load import load_inventory

    if args.json and not args.dry_run:
        arguments.refuse_without("--json", "--dry-run", why="kit status --json tells of a run")
    options = Options(
        inventory=arguments.inventory(args),
        command=tuple(args.command) or None,
        dry_run=args.dry_run,
        json=args.json,
        detach=args.detach,
        new=args.new,
        quiet=args.quiet,
        plain=arguments.wants_lines(args),
        sweep=tuple(args.sweep),
        skip_check=args.skip_check,
        metrics=arguments.metrics(args),
        ssh=arguments.ssh_options(args),
    )
    inventory = load_inventory(options.inventory)
    return backend_of(inventory).up(inventory, options)
