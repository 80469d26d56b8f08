"""Arguments, options and checks that several of kit's commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.inventory.errors import KitError, WrongUsage

if TYPE_CHECKING:  # every command's file is read for `kit --help`: what is slow to import comes later
    from nodekit.deploy.connect.cluster import SshOptions
    from nodekit.deploy.metrics.metrics_port import Place

EXIT_CODES = """\
exit codes:
  0    trained to the end (up), or done (the other commands)
  1    bad input, or a host that cannot be reached or used
  2    wrong usage of the command line
  3    the job was started and failed
  4    the job failed, also after a restart, and made no progress
  130  stopped by Ctrl-C, or (up) by kit down from elsewhere
"""


def tell(error: KitError) -> None:
    """Print an error on stderr; one that combines errors of several hosts, one line each."""
    for each in error.errors:
        print(f"kit: {each}", file=sys.stderr)


def refuse_beside(option: str, others: Mapping[str, object], *, why: str = "") -> None:
    """Refuse options that have no effect beside `option`.

    Args:
        option: as it is written on the command line.
        others: option → whether it was given.
        why: what `option` does instead, or what the user can use instead.

    Raises:
        WrongUsage: some of the others were given.
    """
    if given := [name for name, is_given in others.items() if is_given]:
        raise WrongUsage(f"found {option} and {', '.join(given)}", wanted="one of them", cure=why)


def refuse_without(option: str, needed: str, *, why: str = "") -> None:
    """Refuse an option that has no effect without another one.

    Raises:
        WrongUsage: always.
    """
    raise WrongUsage(f"found {option} without {needed}", wanted="both", cure=why)


def add_run(
    command: argparse.ArgumentParser, text: str = "a run's id or its beginning (the latest run)"
) -> None:
    """Add the optional argument RUN."""
    command.add_argument("run_id", metavar="RUN", nargs="?", help=text)


def add_inventory(command: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the argument INVENTORY; if it is optional, it defaults to `local`."""
    if is_optional:
        text = "the inventory file (local: two nodes on this machine)"
        command.add_argument("inventory", metavar="INVENTORY", nargs="?", default="local", help=text)
    else:
        command.add_argument("inventory", metavar="INVENTORY", help="the inventory file")


def inventory(args: argparse.Namespace) -> Path:
    """Return the path of the inventory: the path that was given, or that of the example with this name."""
    from nodekit.inventory.load import example_names, example_path

    path = Path(args.inventory)
    if path.suffix == ".py":
        own = f"your command comes after `--`: {args.prog} local -- {path} (local: two nodes on this machine)"
        cure = own if args.takes_command else ""
        raise WrongUsage(f"{path}: found a Python script", wanted="an inventory file", cure=cure)
    # Prefer the example to a folder of that name: an example's workdir may lie here (~/nodekit/local, in a clone).
    if (not path.exists() or path.is_dir()) and str(path) in example_names():
        return example_path(str(path))
    return path


def add_ssh(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that log in to hosts."""
    command.add_argument(
        "--accept-new-host-keys",
        action="store_true",
        help="add the key of a host that is not in known_hosts yet (a changed key is refused all the same)",
    )


def ssh_options(args: argparse.Namespace, *, notice: Callable[[str], None] | None = None) -> SshOptions:
    """Return the values of the options that `add_ssh` adds; notices go to `notice`, by default to stderr."""
    from nodekit.deploy.connect.cluster import SshOptions

    return SshOptions(
        accept_new_host_keys=args.accept_new_host_keys,
        notice=notice or (lambda text: print(text, file=sys.stderr)),
    )


NO_ADDRESS = "127.0.0.1"
"""The default address of --metrics-address."""


def add_metrics(command: argparse.ArgumentParser) -> None:
    """Add the options for serving metrics."""
    command.add_argument(
        "--metrics-port", metavar="PORT", type=int, help="serve nodekit_* metrics for Prometheus there"
    )
    command.add_argument(
        "--metrics-address",
        metavar="ADDRESS",
        default=NO_ADDRESS,
        help="with --metrics-port: on this address of this machine, 0.0.0.0 for all (%(default)s)",
    )


def metrics(args: argparse.Namespace) -> Place | None:
    """Return where to serve metrics, by the options that `add_metrics` adds; None: nowhere."""
    if args.metrics_port is None:
        if args.metrics_address != NO_ADDRESS:
            refuse_without("--metrics-address", "--metrics-port")
        return None
    if not 1 <= args.metrics_port <= 65535:
        raise WrongUsage(f"--metrics-port: found {args.metrics_port}", wanted="a number from 1 to 65535")
    from nodekit.deploy.metrics.metrics_port import Place

    return Place(args.metrics_port, args.metrics_address)


def wants_lines(args: argparse.Namespace) -> bool:
    """Whether to print lines in a terminal too: the output of ``--debug`` would break up the live view."""
    return bool(args.plain or (args.debug and sys.stderr.isatty()))


def is_confirmed(question: str) -> bool:
    """Ask for a yes or no on the terminal; Ctrl-D means no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
