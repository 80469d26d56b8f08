"""Label texts by a run's weights.

Print the label of each text, and its probability. Computed by the run's own code on a node that has the
weights.
"""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import test
from nodekit.inventory.errors import KitError


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_id", metavar="RUN", help="a run's id or its beginning")
    command.add_argument("texts", metavar="TEXT", nargs="*", help="what to label")
    command.add_argument("--file", metavar="F", help="in place of TEXT: a text on each line; - for stdin")
    test.add_weights(command)


def run(args: argparse.Namespace) -> int:
    """Print each text's label."""
    from nodekit.deploy.records import runs
    from nodekit.deploy.results import apply

    if bool(args.texts) == (args.file is not None):
        raise KitError("kit predict: wanted either TEXT… or --file F, and not both")
    if not all(text.strip() for text in args.texts):
        raise KitError("kit predict: found an empty text", wanted="some words")
    run = runs.find(args.run_id)
    return apply.predict(run, args.texts or apply.read_texts(args.file), test.options(args))
