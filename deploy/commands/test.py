"""Measure a run's weights on the task's test data.

Print precision, recall and F1 of each class, and which were taken for which. Computed by the run's own code
on the first of its nodes that has the newest weights; nothing is written there.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments

if TYPE_CHECKING:
    from nodekit.deploy.results.apply import Options


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command)
    add_weights(command)


def add_weights(command: argparse.ArgumentParser) -> None:
    """Add the options of what applies a run's weights."""
    command.add_argument(
        "--weights",
        choices=["best", "last"],
        default="best",
        help="those that were best on the dev data, or the last (%(default)s)",
    )
    command.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds to wait (%(default)g)"
    )
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)


def options(args: argparse.Namespace) -> Options:
    """What was said by `add_weights`'s options."""
    from nodekit.deploy.results.apply import Options

    return Options(
        weights=args.weights, timeout_s=args.timeout, json=args.json, ssh=arguments.ssh_options(args)
    )


def run(args: argparse.Namespace) -> int:
    """Print how good the weights are."""
    from nodekit.deploy.records import runs
    from nodekit.deploy.results import apply

    return apply.test(runs.find(args.run_id), options(args))
