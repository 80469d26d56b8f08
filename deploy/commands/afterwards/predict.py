"""Label texts by trained weights.

Print the label of each text, and its probability. The weights are those of a run, or in a folder that a run
has written, such as output/best. A run's are applied by its own code, on the node that has the newest; a
folder's on this machine.
"""

from __future__ import annotations

import argparse

from nodekit.deploy.commands.afterwards import test
from nodekit.inventory.errors import KitError


def add_arguments(command: argparse.ArgumentParser) -> None:
    test.add_source(command)
    command.add_argument("texts", metavar="TEXT", nargs="*", help="what to label")
    command.add_argument("--file", metavar="F", help="in place of TEXT: a text on each line; - for stdin")
    test.add_weights(command)


def run(args: argparse.Namespace) -> int:
    """Print each text's label."""
    from nodekit.deploy.results import apply

    if bool(args.texts) == (args.file is not None):
        raise KitError("wanted either TEXT… or --file F, and not both")
    if not all(text.strip() for text in args.texts):
        raise KitError("found an empty text", wanted="some words")
    source = apply.find(args.source, args.weights)
    return apply.predict(source, args.texts or apply.read_texts(args.file), test.options(args))
