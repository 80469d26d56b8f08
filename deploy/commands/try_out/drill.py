"""Break a job, and see that it survives.

Run the job once as it is, and then once per fault, with that fault in the middle. For each: when it was
detected, when training went on, how many steps had to be done again, and whether the loss curve is still the
unbroken run's: bit for bit, or to rounding, as where the world size changed meanwhile, or with most GPU kernels. With
another number of ranks, layers such as dropout draw other numbers; then the curve has only to be near.

Without a command the job is half a minute of kit's own training module. A job of your own (the inventory's,
or after --) should be short, too. Nothing is left running or broken, and the inventory's own runs are left
alone.
"""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments

ACTS = True
EPILOG = """\
examples:
  kit drill lab.yaml                      all that lab.yaml's hosts allow
  kit drill lab.yaml worker node          these two
  kit drill lab.yaml -- train.py --small  your own job

exit codes:
  0    every fault was survived
  1    one was not, or could not be tried though asked for, or the job fails as it is
  2    wrong usage, or a fault that is not possible there
  130  stopped by Ctrl-C
"""
TAKES_COMMAND = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    from nodekit.deploy.drill.faults import help_text

    command.usage = "kit drill [INVENTORY] [FAULT…] [options] [-- SCRIPT.py ARGS…]"
    command.epilog = f"{help_text()}\n{EPILOG}"
    arguments.add_inventory(command, is_optional=True)
    command.add_argument("faults", metavar="FAULT", nargs="*", help="which (all that the inventory allows)")
    command.add_argument(
        "--list", action="store_true", help="which faults the inventory allows, and run nothing"
    )
    command.add_argument("--json", action="store_true", help="the results for programs, on stdout")
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Run the job with each fault; return 1 if one was not survived."""
    from nodekit.deploy.drill.drill import Options, drill, list_faults
    from nodekit.deploy.lab.lab_cluster import Lab

    options = Options(
        inventory=arguments.inventory(args),
        faults=tuple(args.faults),
        command=tuple(args.command),
        json=args.json,
        load_lab=Lab.load,
        ssh=arguments.ssh_options(args),
    )
    if args.list:
        arguments.refuse_beside("--list", {"--json": args.json, "FAULT": args.faults})
    return list_faults(options) if args.list else drill(options)
