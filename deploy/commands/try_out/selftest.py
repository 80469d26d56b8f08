"""Prove on your own machines what only they can show.

Kit's own tests have no GPU. In about ten minutes this tries on yours what that leaves open: the network by
NCCL; each engine's training, and its resume from a snapshot after a crash, bit for bit; the time of such a
restart by phase; that GPU memory is free again before it; that a hang in NCCL is found; kit compare.

A table, and a file to send us, selftest.md and selftest.json, which says what is in it: no names of hosts or
users, no addresses, no paths, no secrets. What cannot be tried is told with the reason, such as `no GPU`.

What is trained is kit's own small task: your code is not sent, your runs are left alone, and nothing is left
running. The hosts should have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nodekit.deploy.commands import arguments

EPILOG = """\
examples:
  kit selftest lab.yaml                      all that lab.yaml's hosts allow
  kit selftest lab.yaml --engines ddp,fsdp   these engines only
  kit selftest lab.yaml -o ~/selftest        the report to there

exit codes:
  0    all that could be tried has passed
  1    something failed, or bad input
  2    wrong usage of the command line
  130  stopped by Ctrl-C; the report has what was tried until then
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit selftest INVENTORY [options]"
    arguments.add_inventory(command)
    command.add_argument("--engines", metavar="NAME,NAME…", default="", help="which (all)")
    command.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="a new folder for the report (in kit's state folder)"
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Try each part; return 1 if one failed."""
    from nodekit.deploy.selftest.selftest import Options, selftest

    return selftest(
        Options(
            inventory=arguments.inventory(args),
            engines=tuple(name for name in args.engines.split(",") if name),
            output=args.output,
            ssh=arguments.ssh_options(args),
        )
    )
