"""Stop a run on every node."""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments

ACTS = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command, "a run's id or its beginning, or a sweep's (the latest run)")
    arguments.add_ssh(command)
    command.add_argument("--force", action="store_true", help="kill at once, with no time for a snapshot")
    command.add_argument(
        "--lost",
        action="store_true",
        help="you know that unreachable nodes are switched off: kit up may go on without them",
    )
    command.add_argument("--fetch", action="store_true", help="copy its logs to this machine (kit logs)")


def run(args: argparse.Namespace) -> int:
    """Stop a run, or all runs of a sweep; `stop` in deploy/host/node/agents.py is what happens on a node."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.launch.options import StopOptions
    from nodekit.deploy.records import find_runs

    options = StopOptions(force=args.force, lost=args.lost, fetch=args.fetch, ssh=arguments.ssh_options(args))
    if members := find_runs.sweep(args.run_id):
        return backend_of(members[0]).sweep_down(members, options)
    run = find_runs.find(args.run_id)
    return backend_of(run).down(run, options)
