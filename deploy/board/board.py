"""`kit board` on the command line."""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments, helptext


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``board`` to kit's commands."""
    command = arguments.add(
        commands,
        "board",
        _run,
        "TensorBoard over the curves of runs",
        helptext.BOARD,
        helptext.BOARD_EXAMPLES,
    )
    command.add_argument(
        "run_ids",
        metavar="RUN",
        nargs="*",
        help="runs' ids or their beginnings, or a sweep's (the latest run)",
    )
    command.add_argument(
        "--port", metavar="PORT", type=int, help="on this machine's 127.0.0.1 (6006, or one that is free)"
    )
    command.add_argument(
        "--on", metavar="NODE", help="start it on this node, over what is there, and lead a port here to it"
    )
    arguments.add_ssh(command)


def _run(args: argparse.Namespace) -> int:
    from nodekit.deploy.board.board_serve import Options, board

    ssh = arguments.ssh_options(args)
    return board(Options(run_ids=tuple(args.run_ids), port=args.port, on=args.on, ssh=ssh))
