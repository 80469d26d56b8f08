"""What kit's commands have in common on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nodekit.deploy.connect.cluster import SshOptions


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: object,
    help_text: str,
    description: str | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command to kit's: `run` is called with what was parsed, and gives the exit status."""
    command = commands.add_parser(
        name,
        help=help_text,
        description=description or help_text[0].upper() + help_text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def add_ssh(command: argparse.ArgumentParser) -> None:
    """Add the options of whatever logs in to hosts."""
    command.add_argument(
        "--accept-new-host-keys",
        action="store_true",
        help="add the key of a host that is not in known_hosts yet (a changed key is refused all the same)",
    )


def ssh_options(args: argparse.Namespace, *, notice: Callable[[str], None] | None = None) -> SshOptions:
    """What was said by `add_ssh`'s options; notices go to stderr, or to `notice`."""
    from nodekit.deploy.connect.cluster import SshOptions

    return SshOptions(
        accept_new_host_keys=args.accept_new_host_keys,
        notice=notice or (lambda text: print(text, file=sys.stderr)),
    )
