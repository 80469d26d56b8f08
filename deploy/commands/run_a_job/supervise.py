"""Supervise a run that nobody watches: what `kit up -d` leaves running."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from nodekit.deploy.commands import arguments

ACTS = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_id")
    arguments.add_metrics(command)
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Supervise a run to its end."""
    from nodekit.deploy.launch.options import Options
    from nodekit.deploy.records import find_runs
    from nodekit.deploy.ssh_backend.backend import SshBackend

    run = find_runs.find(args.run_id)
    options = Options(
        inventory=Path(run.inventory_path),
        quiet=True,
        metrics=arguments.metrics(args),
        ssh=dataclasses.replace(arguments.ssh_options(args), may_ask=False),
    )
    return SshBackend().supervise(run, options)
