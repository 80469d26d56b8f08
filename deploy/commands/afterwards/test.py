"""Measure trained weights on the task's test data.

Print precision, recall and F1 of each class, and which were taken for which. The weights are those of a run,
or in a folder that a run has written, such as output/best. A run's are measured by its own code, on the node
that has the newest; a folder's on this machine. Nothing is written there.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments

if TYPE_CHECKING:
    from nodekit.deploy.results.apply import Options


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_source(command, nargs="?")
    add_weights(command)


def add_source(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add the argument RUN|DIR, the source of the weights."""
    text = "a run's id or its beginning, or a folder of weights on this machine"
    command.add_argument(
        "source", metavar="RUN|DIR", nargs=nargs, help=f"{text} (the latest run)" if nargs else text
    )


def add_weights(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that apply weights."""
    command.add_argument(
        "--weights",
        choices=["best", "last"],
        default="best",
        help="those that were best on the dev data, or the last (%(default)s)",
    )
    command.add_argument(
        "--data", metavar="DIR", help="the task's data, if they are not where the run had them"
    )
    command.add_argument(
        "--timeout", metavar="S", type=float, default=600.0, help="seconds to wait (%(default)g)"
    )
    command.add_argument("--json", action="store_true", help="for programs")
    arguments.add_ssh(command)


def options(args: argparse.Namespace) -> Options:
    """Return the values of the options that `add_weights` adds."""
    from nodekit.deploy.results.apply import Options

    return Options(
        weights=args.weights,
        data=args.data,
        timeout_s=args.timeout,
        json=args.json,
        ssh=arguments.ssh_options(args),
    )


def run(args: argparse.Namespace) -> int:
    """Print the metrics of the weights on the test data."""
    from nodekit.deploy.results import apply

    return apply.test(apply.find(args.source, args.weights), options(args))
