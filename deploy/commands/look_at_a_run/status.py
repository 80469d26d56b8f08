"""Show what each node of a run is doing."""

from __future__ import annotations

import argparse
import json

from nodekit.deploy.commands import arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command, "a run's id or its beginning, or a sweep's (the latest run)")
    arguments.add_ssh(command)
    command.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print what each node does, or did last.

    deploy/story/status.py makes the line of a node, slurm/cluster/jobs.py that of a Slurm job.
    """
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.records import find_runs, runs

    options = arguments.ssh_options(args)
    if members := find_runs.sweep(args.run_id):
        return backend_of(members[0]).sweep_status(members, options, as_json=args.json)
    run = find_runs.find(args.run_id)
    found = backend_of(run).status(run, options)
    if args.json:
        print(json.dumps({**runs.public(run), **found.data}, indent=2))
        return 0
    print(f"{run.run_id}  {found.state}" + (f": {run.verdict}" if run.verdict else ""))
    for line in found.lines:
        print(f"  {line}")
    width = max(map(len, found.nodes), default=0)
    for name, line in found.nodes.items():
        print(f"  {name.ljust(width)}  {line}")
    if run.state == "failed":
        print(f"why: kit why {run.run_id}")
    return 0
