"""End what earlier runs have left on the hosts.

It ends processes whose agent is gone and agents of runs that are over, and removes their shared memory. It
knows each by what the run has recorded of it (pid, start time and boot), and by nothing else: what only looks
like it is left alone, and so is a run that is running.

A process that has reported in the last two minutes may still train: it is ended only if you say so.

A host that a run has drained because something of it is broken, such as a GPU, is left out of the runs to
come. --forgive lets them use it again, when it is mended; nothing is ended then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    from nodekit.deploy.connect.channel import HostChannel
    from nodekit.deploy.host.broken import Broken
    from nodekit.deploy.preflight.leftovers import Left
    from nodekit.inventory.schema import Inventory

ACTS = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    arguments.add_inventory(command)
    command.add_argument("--yes", action="store_true", help="end also what may still train")
    command.add_argument("--dry-run", action="store_true", help="say what would be ended, and end nothing")
    command.add_argument(
        "--forgive", action="store_true", help="let kit up use hosts again that were drained as broken"
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Show what is left, and end it; return 1 if something is left running, or a host could not be asked."""
    from nodekit.deploy.connect import cluster
    from nodekit.deploy.preflight import leftovers
    from nodekit.inventory.load import load_inventory

    inventory = load_inventory(arguments.inventory(args))
    if not inventory.hosts:
        raise KitError(
            f"{inventory.path}: found slurm",
            wanted="hosts: Slurm itself ends what its jobs have started",
            cure="kit down RUN cancels a job; kit rm RUN removes its files",
        )
    with cluster.channels(inventory.hosts, arguments.ssh_options(args), some=True) as channels:
        if args.forgive:
            return _forgive(channels, inventory, dry_run=args.dry_run)
        found = leftovers.find(channels, inventory)
        failed = [str(each) for each in found.values() if isinstance(each, Exception)]
        here = [left for each in found.values() if not isinstance(each, Exception) for left in each]
        for left in here:
            print(f"{left.host}: {left.run}: {left.text}" + " – it is running" * (left.standing == "running"))
        over = [left for left in here if left.standing != "running"]
        refused = [left for left in over if left.still_trains and not args.yes]
        if refused and not args.dry_run and sys.stdin.isatty() and _is_confirmed(refused):
            refused = []
        chosen = [left for left in over if left not in refused]
        if not args.dry_run:
            failed += [str(error) for error in leftovers.end(channels, inventory, chosen).values()]
    for problem in failed:
        print(f"kit: {problem}", file=sys.stderr)
    for left in refused:
        why = "may still train; kit clean --yes ends it all the same"
        print(f"kit: {left.host}: {left.run} {why}", file=sys.stderr)
    nothing = "nothing is left"
    if failed or len(channels) < len(inventory.hosts):
        nothing += " on the hosts that could be looked at"
    if args.dry_run:
        print(f"{len(over)} would be ended" if here else nothing)
    else:
        print(f"{len(chosen)} ended" if here else nothing)
    return 1 if failed or refused or len(channels) < len(inventory.hosts) else 0


def _forgive(channels: Mapping[str, HostChannel], inventory: Inventory, *, dry_run: bool) -> int:
    """Let the hosts forget what was broken; return 1 if a host could not be asked."""
    from nodekit.deploy.connect.channel import CALL_TIMEOUT_S, on_all

    workdirs = {host.name: host.workdir for host in inventory.hosts}
    what = "recall" if dry_run else "forgive"

    def ask(channel: HostChannel) -> dict[str, Broken]:
        found: dict[str, Broken] = channel.call(
            f"broken.{what}", timeout_s=CALL_TIMEOUT_S, workdir=workdirs[channel.host]
        )
        return found

    results = on_all(channels, ask)
    failed = [result for result in results.values() if isinstance(result, Exception)]
    known = {host: found for host, found in results.items() if not isinstance(found, Exception)}
    for host, found in known.items():
        for each in found.values():
            print(f"{host}: {'would be ' * dry_run}forgiven: {each['why']} (drained by {each['run']})")
    if not any(known.values()):
        print("nothing is to be forgiven")
    for error in failed:
        print(f"kit: {error}", file=sys.stderr)
    return 1 if failed or len(channels) < len(inventory.hosts) else 0


def _is_confirmed(refused: Sequence[Left]) -> bool:
    print("it may still train: " + ", ".join(f"{left.run} on {left.host}" for left in refused))
    return arguments.is_confirmed("end it?")
