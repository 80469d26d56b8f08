"""Take a node out of a job that goes on.

To mend or reboot it, for example. Its ranks save a snapshot with the others, it leaves, and the others train
on without it, or with a spare in its place. It is not taken back before --undo. A node that the job cannot do
without (nodes.min) stays. Of a run that is stopped and started again no node is drained.
"""

from __future__ import annotations

import argparse


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_id", metavar="RUN", help="a run's id or its beginning")
    command.add_argument("node", metavar="NODE", help="the node's name in the inventory")
    command.add_argument("--undo", action="store_true", help="let it come back into the job")


def run(args: argparse.Namespace) -> int:
    """Drain a node, or take it back."""
    from nodekit.deploy.records import runs
    from nodekit.deploy.ssh_backend.drain import drain

    return drain(runs.find(args.run_id), args.node, undo=args.undo)
