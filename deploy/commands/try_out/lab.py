"""Make real hosts on this one machine, to try kit on.

Each has its own network, host name, processes, disk and sshd, and can be broken. Needs root, and Linux. `kit
lab up` writes an inventory for `kit up`, with `--slurm` also one for Slurm jobs; nothing else on the machine
is touched, and `kit lab down` removes all of it, what the hosts wrote included, and nothing else.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.inventory.errors import KitError, WrongUsage

if TYPE_CHECKING:
    from nodekit.deploy.lab.lab_cluster import Lab


HOST_COMMANDS = {
    "crash": "end every process of a host at once; peers see its connections reset",
    "cut": "pull a host's network cable: nothing arrives, nobody is told (then `crash`: a power loss)",
    "mend": "make a host's link whole again after `cut` and `slow`",
    "revive": "start a crashed host again, with the same disk, address and host key",
}

ACTS = True


def add_arguments(lab: argparse.ArgumentParser) -> None:
    commands = lab.add_subparsers(dest="lab_command", metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        command.add_argument(
            "--folder", type=Path, help="where the lab is (default: nodekit/lab in the XDG state folder)"
        )
        return command

    up = add("up", "make a lab and write its inventory")
    up.add_argument(
        "n", metavar="N", type=int, nargs="?", default=3, help="how many hosts (default: %(default)s)"
    )
    up.add_argument("--name", default="lab", help="the name in the inventory (default: %(default)s)")
    up.add_argument(
        "--slurm",
        action="store_true",
        help="make the hosts a Slurm cluster, too, with this machine to submit",
    )
    up.add_argument(
        "--accounting", action="store_true", help="with --slurm: keep accounts, so that sacct works"
    )
    add("down", "remove the lab, with its hosts' disks")
    add("status", "show the hosts and how they are")
    for name, text in HOST_COMMANDS.items():
        add(name, text).add_argument("host", metavar="HOST")

    slow = add("slow", "make a host's link slow, until `mend`")
    slow.add_argument("host", metavar="HOST")
    slow.add_argument(
        "--delay-ms", type=float, default=0, help="how long packets wait, each way (default: %(default)s)"
    )
    slow.add_argument("--rate-mbit", type=float, help="how many Mbit/s pass, each way (default: no limit)")
    slow.add_argument(
        "--loss-percent", type=float, help="how many packets are lost, each way (default: none)"
    )


def run(args: argparse.Namespace) -> int:
    """Run one of the commands of `kit lab`."""
    from nodekit.deploy.lab.lab_cluster import Lab

    if args.lab_command == "up":
        return _up(args)
    if args.lab_command == "down":
        return _down(args)
    is_slow = args.lab_command == "slow"
    if is_slow and not (args.delay_ms or args.rate_mbit or args.loss_percent):
        raise WrongUsage(
            "kit lab slow: found nothing that makes the link slow",
            wanted="--delay-ms, --rate-mbit or --loss-percent",
            cure=f"`kit lab slow {args.host} --delay-ms 50`, say",
        )
    if is_slow:
        _refuse_values(args)
    lab = Lab.load(args.folder)
    if args.lab_command == "status":
        _print_hosts(lab)
        return 0
    before = lab.status(args.host)
    if is_slow:
        lab.slow(args.host, delay_ms=args.delay_ms, rate_mbit=args.rate_mbit, loss_percent=args.loss_percent)
    else:
        {"crash": lab.crash, "cut": lab.cut, "mend": lab.mend, "revive": lab.revive}[args.lab_command](
            args.host
        )
    after = lab.status(args.host)
    # `slow` on a slow link changes its limits, though the status stays the same.
    print(f"{args.host}: {after}" + (" already: nothing was done" if after == before and not is_slow else ""))
    return 0


def _refuse_values(args: argparse.Namespace) -> None:
    for name, most in (("delay_ms", 60_000), ("rate_mbit", 1_000_000), ("loss_percent", 100)):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= most:
            raise KitError(
                f"--{name.replace('_', '-')}: found {value:g}", wanted=f"a number from 0 to {most:,}"
            )


def _up(args: argparse.Namespace) -> int:
    from nodekit.deploy.lab import lab_record
    from nodekit.deploy.lab.lab_cluster import Lab, lab_folder

    was_there = (lab_folder(args.folder) / lab_record.FILE).exists()
    lab = Lab.up(args.n, folder=args.folder, name=args.name, slurm=args.slurm, accounting=args.accounting)
    print(f"{'already up' if was_there else 'up'}: {len(lab.hosts)} hosts in {lab.network}")
    _print_hosts(lab)
    over_ssh = "   # over SSH" if lab.has_slurm else ""
    print(f"train:   kit up {shlex.quote(str(lab.inventory))}{over_ssh}")
    print(f"log in:  {shlex.join(lab.ssh_argv(next(iter(lab.hosts))))}")
    if lab.has_slurm:
        print(
            f"slurm:   export SLURM_CONF={shlex.quote(str(lab.slurm.conf))}   # then sinfo, squeue, srun, sbatch"
        )
        print(f"         kit up {shlex.quote(str(lab.slurm_inventory))}   # after it: trains as a Slurm job")
        print(
            f"shared:  {shlex.quote(str(lab.slurm.shared))}   (the same folder on every host: submit from there)"
        )
    return 0


def _down(args: argparse.Namespace) -> int:
    from nodekit.deploy.lab import lab_record
    from nodekit.deploy.lab.lab_cluster import down, lab_folder

    folder = lab_folder(args.folder)
    if (folder / lab_record.FILE).exists():
        print(
            f"removing the lab in {folder}: ends its hosts, then removes their disks",
            file=sys.stderr,
            flush=True,
        )
    left = down(folder)
    if left is None:
        print(f"no lab in {folder}: nothing to do")
        return 0
    print(f"removed the lab in {folder}")
    if left:
        print(f"left there, for kit lab up did not make it: {', '.join(left)}")
    return 0


def _print_hosts(lab: Lab) -> None:
    nodes, error = _nodes(lab)
    for host in lab.hosts.values():
        node = f"   slurm: {nodes[host.name]}" if host.name in nodes else ""
        print(f"  {host.name:8} {host.address:15} {host.interface:12} {lab.status(host.name)}{node}")
    if error:
        print(f"slurm:   {error}")


def _nodes(lab: Lab) -> tuple[dict[str, str], KitError | None]:
    """Return the states of Slurm's nodes (none without Slurm), and the error if they cannot be asked for."""
    try:
        return (lab.slurm.node_states() if lab.has_slurm else {}), None
    except KitError as error:
        return {}, error
