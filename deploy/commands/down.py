"""Stop a run on every node."""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command, "a run's id or its beginning, or a sweep's (the latest run)")
    arguments.add_ssh(command)
    command.add_argument("--force", action="store_true", help="kill at once, with no time for a snapshot")
    command.add_argument(
        "--lost",
        action="store_true",
        help="nodes that cannot be reached are off, you know it: kit up may go on without them",
    )
    command.add_argument("--fetch", action="store_true", help="copy its logs to this machine (kit logs)")


def run(args: argparse.Namespace) -> int:
    """Stop a run, or all runs of a sweep."""
    from nodekit.deploy.records import runs
    from nodekit.deploy.ssh_backend import up

    options = arguments.ssh_options(args)
    if members := runs.sweep(args.run_id):
        from nodekit.slurm import sweep

        return sweep.down(members, options, fetch=args.fetch)
    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import backend

        return backend.down(run, options, fetch=args.fetch)
    return up.down(run, options, force=args.force, lost=args.lost, fetch=args.fetch)
