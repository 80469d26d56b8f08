"""Show the curves of runs in TensorBoard.

They are at one address of this machine. The event files of rank 0 are copied here, again every few seconds while
the run goes on, and kept: they can be looked at when the hosts are off. Where tensorboard is not installed here,
it is started on a node, by the interpreter of the run, and reached through the SSH connection; nothing is copied
then.

Ctrl-C ends all of it, here and there.
"""

from __future__ import annotations

import argparse

from nodekit.deploy.commands import arguments

EPILOG = """\
examples:
  kit board                        the latest run
  kit board lab-1122 lab-1121      two runs, side by side
  kit board --on gpu1              with the tensorboard of gpu1

It shows what rank 0 of the training module writes, and of a script of yours what is in
$NODEKIT_OUTPUT_DIR, in any folder: SummaryWriter(os.environ["NODEKIT_OUTPUT_DIR"]).
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    """Show the curves until Ctrl-C."""
    from nodekit.deploy.board.board_serve import Options, board

    ssh = arguments.ssh_options(args)
    return board(Options(run_ids=tuple(args.run_ids), port=args.port, on=args.on, ssh=ssh))
