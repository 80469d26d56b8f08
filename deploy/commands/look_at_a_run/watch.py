"""Watch a run in a live view.

It has a row for each node with what it does and uses, the loss, what is left to do, what has happened. Keys:
arrows or a number mark a node, l follows its output, d drains it, s stops the job (after a question), q
leaves, ? lists them all. Looking changes nothing: the run goes on when the view is closed, by q, Ctrl-C or a
lost connection. Where the output is no terminal, lines are printed in its place. After the run
has ended, its last state and the verdict are shown.
"""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_run(command)
    command.add_argument(
        "--plain", action="store_true", help="lines in place of the live view, in a terminal too"
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Watch a run until it ends or the user leaves."""
    from nodekit.deploy.backend import backend_of
    from nodekit.deploy.records import find_runs, runs
    from nodekit.deploy.screen.view import show_last

    run, options = find_runs.find(args.run_id), arguments.ssh_options(args)
    backend = backend_of(run)
    if run.state in runs.ENDED:
        return show_last(run, *backend.history(run, options))
    return backend.watch(run, options, plain=arguments.wants_lines(args))
