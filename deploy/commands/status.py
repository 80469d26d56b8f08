"""Show what each node of a run is doing."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nodekit.deploy.commands import arguments

if TYPE_CHECKING:
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.records.runs import Run


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command, "a run's id or its beginning, or a sweep's (the latest run)")
    arguments.add_ssh(command)
    command.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Say what each node does, or did last."""
    from nodekit.deploy.records import runs

    options = arguments.ssh_options(args)
    if members := runs.sweep(args.run_id):
        from nodekit.slurm import sweep

        return sweep.status(members, options, as_json=args.json)
    run = runs.find(args.run_id)
    if run.slurm:
        from nodekit.slurm import show

        return show.status(run, options, as_json=args.json)
    return _on_hosts(run, options, as_json=args.json)


def _on_hosts(run: Run, options: SshOptions, *, as_json: bool) -> int:
    """Of a run that has its own hosts."""
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.records import events, runs
    from nodekit.deploy.ssh_backend import up

    with cluster.links(up.inventory_of(run).hosts, options, some=True) as links:
        found = up.statuses(run, links)
    last = {
        name: status for name, status in events.now(run.folder).items() if name in run.nodes.keys() - found
    }
    is_known = run.state in runs.ENDED or any(status["alive"] for status in found.values())
    state = run.state if is_known else "ended while nobody watched; kit up goes on"
    if as_json:
        told = {**found, **{name: {**status, "alive": None} for name, status in last.items()}}
        print(json.dumps({**runs.public(run), "state": state, "status": told}, indent=2))
        return 0
    print(f"{run.run_id}  {state}" + (f": {run.verdict}" if run.verdict else ""))
    width = max(map(len, run.nodes), default=0)
    for name in run.nodes:
        print(f"  {name.ljust(width)}  {_line(found.get(name), last.get(name))}")
    if run.state == "failed":
        print(f"why: kit why {run.run_id}")
    return 0


def _line(found: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> str:
    """What a node does; where it cannot be reached, what was `last` heard of it."""
    from nodekit.deploy.records import runs
    from nodekit.deploy.screen.view import status_line

    if found is not None:
        is_gone = not found["alive"] and found.get("state") not in runs.ENDED
        return status_line({**found, "state": "gone"} if is_gone else found, now=time.time())
    if last is None:
        return "unreachable"
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(last["time"]))
    return f"unreachable; last heard of {when}: {status_line(last, now=last['time'])}"
