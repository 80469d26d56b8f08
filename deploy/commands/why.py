"""`kit why`: why a run failed, or what it has recovered from, told again from its events."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments, helptext

if TYPE_CHECKING:  # every command's parser is made by every kit: what is slow to import comes later
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.records.runs import Run


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``kit why``."""
    help_text = "why a run failed: the first cause, its cure, and how to go on"
    command = arguments.add(commands, "why", run_why, help_text, helptext.WHY)
    command.add_argument(
        "run_id", nargs="?", metavar="RUN", help="a run's id or its beginning (the latest run)"
    )
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)


def run_why(args: argparse.Namespace) -> int:
    """Say why; the exit status."""
    from nodekit.deploy.records import runs

    return why(runs.find(args.run_id), arguments.ssh_options(args), as_json=args.json)


def why(run: Run, options: SshOptions, *, as_json: bool) -> int:
    """Print the verdict on a run; the exit status is 0, whatever became of it."""
    from nodekit.deploy.records import past
    from nodekit.deploy.screen.verdict_screen import screen
    from nodekit.deploy.ssh_backend import up
    from nodekit.deploy.story.verdict import verdict_of

    record, events = past.past(run, options)
    inventory = up.inventory_of(run)
    found = verdict_of(events, max_restarts=inventory.job.max_restarts, state=run.state, reason=run.verdict)
    if found is not None:
        record.left_out = record.left_out or run.left_out
        found = up.with_left_out(record, found)
    if as_json:
        told = found.to_dict() if found else None
        resume = up.resume_command(run) if run.state == "failed" else ""
        print(json.dumps({"run_id": run.run_id, "state": run.state, "why": told, "resume": resume}, indent=2))
        return 0
    if found is None:
        print(f"{run.run_id} is {run.state}, and no rank has failed so far")
    elif run.state == "failed":
        record.verdict, record.state = run.verdict, run.state
        print("\n".join(up.failed_screen(record, found)))
    elif found.first is None:
        print(f"{run.run_id} {found.text}" if found.outcome == "succeeded" else f"{run.run_id}: {found.text}")
    else:
        ago = time.time() - found.first.when
        print(f"{run.run_id} is {run.state}; what it last recovered from, {ago / 60:.0f} min ago:\n")
        width, height = up.terminal()
        lines = screen(found, run_id=run.run_id, width=width, height=height - 2)
        print("\n".join(lines).replace(" failed: ", ": ", 1))
    return 0
