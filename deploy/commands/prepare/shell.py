"""Run a command on the hosts of an inventory, or log in.

The command runs on all hosts at once. Each line of its output stands behind its host's name, as it comes and
never torn; how it ended on each host is told at the end. A host that cannot be reached does not keep the
others from their work.

The command is given to each host's kernel as it stands after the `--`: no shell reads it, so use `sh -c '…'`
for pipes and variables. It runs in the home folder, with nothing on its stdin; `python` is the interpreter
that the inventory names. Ctrl-C ends it on every host, with all that it started.

Without a command it opens a shell on the one host that is named.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.inventory.schema import Host

EPILOG = """\
examples:
  kit shell lab.yaml -- nvidia-smi -L
  kit shell lab.yaml 'gpu[1-3]' -- sh -c 'df -h ~ | tail -1'
  kit shell lab.yaml -- python -c 'import torch; print(torch.__version__)'
  kit shell lab.yaml --timeout 10 -- sudo -n true
  kit shell lab.yaml gpu2                  a shell on gpu2

exit codes:
  0    exit status 0 on all hosts
  1    not so on some, or one could not be reached
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""
TAKES_COMMAND = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit shell INVENTORY [HOSTS] [options] [-- COMMAND ARG…]"
    arguments.add_inventory(command)
    command.add_argument("hosts", metavar="HOSTS", nargs="?", help="these only, as gpu[1-3] (all)")
    command.add_argument("--hosts", metavar="HOSTS", dest="picked", help="the same")
    command.add_argument(
        "--timeout", metavar="S", type=float, help="end it on a host where it takes longer than S seconds"
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Run the command on all hosts, and return 1 if it failed on any; without a command, open a shell on one host."""
    from nodekit.deploy.shell import shell
    from nodekit.inventory.load import load_inventory

    if args.hosts is not None:
        arguments.refuse_beside("HOSTS", {"--hosts": args.picked is not None})
    inventory = load_inventory(arguments.inventory(args))
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise KitError(f"--timeout: found {args.timeout:g}", wanted="seconds, a number above 0")
    hosts = shell.pick(inventory, args.picked if args.hosts is None else args.hosts)
    if not args.command:
        if args.timeout is not None:
            arguments.refuse_without("--timeout", "a command", why="it comes after `--`")
        _log_in(hosts, args)
    return _run_command(hosts, args)


def _log_in(hosts: Sequence[Host], args: argparse.Namespace) -> NoReturn:
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.shell import shell

    if len(hosts) > 1:
        names = shell.fold([host.name for host in hosts])
        raise KitError(
            f"a shell to type in is one host's, and this is {names}",
            cure=f"name one: kit shell {args.inventory} {hosts[0].name}; or a command for all: kit shell "
            f"{args.inventory} -- uptime",
        )
    argv = cluster.login_argv(hosts[0], accept_new_host_keys=args.accept_new_host_keys)
    try:
        os.execvp(argv[0], argv)  # noqa: S606  # the terminal is its own from here
    except OSError as error:
        raise KitError(f"cannot run {argv[0]} on this machine: {error.strerror}") from error


def _run_command(hosts: Sequence[Host], args: argparse.Namespace) -> int:
    from nodekit.deploy.shell import shell, shell_view

    prefixes = shell_view.Prefixes([host.name for host in hosts])
    streams = {"out": sys.stdout, "err": sys.stderr}
    is_terminal = {name: stream.isatty() for name, stream in streams.items()}
    colour = {name: is_one and "NO_COLOR" not in os.environ for name, is_one in is_terminal.items()}
    ended: dict[str, shell.Ended] = {}
    with shell.Commands(
        hosts, args.command, timeout_s=args.timeout, ssh=arguments.ssh_options(args)
    ) as commands:
        for event in commands.events():
            if isinstance(event, shell.Ended):
                ended[event.host] = event
                continue
            name = event.stream
            shown = prefixes.apply(event, is_terminal=is_terminal[name], colour=colour[name])
            streams[name].buffer.write(shown)
            streams[name].flush()
    in_order = [ended[host.name] for host in hosts]
    print(shell_view.summary(in_order, colour=colour["err"]), file=sys.stderr)
    if commands.was_interrupted:
        return 130
    return 0 if all(each.is_good for each in in_order) else 1
