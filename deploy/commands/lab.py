"""``kit lab``: makes real hosts on this machine, breaks and mends them. `Lab` is the same for programs."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from nodekit.deploy.lab import lab_record
from nodekit.deploy.lab.lab_cluster import Lab, down, lab_folder
from nodekit.deploy.lab.lab_network import LabHost
from nodekit.inventory.errors import KitError

__all__ = ["Lab", "LabHost", "add_commands"]

DESCRIPTION = """\
Several real hosts on this one Linux machine, to try kit on and to break: each with its own network, host
name, processes, disk and sshd. Needs root. `kit lab up` writes an inventory for `kit up`; nothing else on the
machine is touched, and `kit lab down` removes all of it, what the hosts wrote included, and nothing else."""

HOST_COMMANDS = {
    "crash": "end every process of a host at once; peers see its connections reset",
    "cut": "pull a host's network cable: nothing arrives, nobody is told (then `crash`: a power loss)",
    "mend": "make a host's link whole again after `cut` and `slow`",
    "revive": "start a crashed host again, with the same disk, address and host key",
}


def add_commands(sub: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``lab`` and its subcommands to kit's."""
    lab = sub.add_parser("lab", help="real hosts on this one machine, to try kit on", description=DESCRIPTION)
    commands = lab.add_subparsers(dest="lab_command", metavar="COMMAND", required=True)

    up = _add(commands, "up", "make a lab and write its inventory", run_up)
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
    _add(commands, "down", "remove the lab, with its hosts' disks", run_down)
    _add(commands, "status", "show the hosts and how they are", run_status)
    for name, text in HOST_COMMANDS.items():
        _add(commands, name, text, run_on_host).add_argument("host", metavar="HOST")

    slow = _add(commands, "slow", "make a host's link slow, until `mend`", run_slow)
    slow.add_argument("host", metavar="HOST")
    slow.add_argument(
        "--delay-ms", type=float, default=0, help="how long packets wait, each way (default: %(default)s)"
    )
    slow.add_argument("--rate-mbit", type=float, help="how many Mbit/s pass, each way (default: no limit)")
    slow.add_argument(
        "--loss-percent", type=float, help="how many packets are lost, each way (default: none)"
    )


def run_up(args: argparse.Namespace) -> int:
    """Make the lab, or say that it is there."""
    was_there = (lab_folder(args.folder) / lab_record.FILE).exists()
    lab = Lab.up(args.n, folder=args.folder, name=args.name, slurm=args.slurm, accounting=args.accounting)
    print(f"{'already up' if was_there else 'up'}: {len(lab.hosts)} hosts in {lab.network}")
    _print_hosts(lab)
    print(f"train:   kit up {shlex.quote(str(lab.inventory))}")
    print(f"log in:  {shlex.join(lab.ssh_argv(next(iter(lab.hosts))))}")
    if lab.has_slurm:
        print(
            f"slurm:   export SLURM_CONF={shlex.quote(str(lab.slurm.conf))}   # then sinfo, squeue, srun, sbatch"
        )
        print(
            f"shared:  {shlex.quote(str(lab.slurm.shared))}   (the same folder on every host: submit from there)"
        )
    return 0


def run_down(args: argparse.Namespace) -> int:
    """Remove the lab; none is fine."""
    folder = lab_folder(args.folder)
    left = down(folder)
    if left is None:
        print(f"no lab in {folder}: nothing to do")
        return 0
    print(f"removed the lab in {folder}")
    if left:
        print(f"left there, for kit lab up did not make it: {', '.join(left)}")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """Show the lab."""
    _print_hosts(Lab.load(args.folder))
    return 0


def run_on_host(args: argparse.Namespace) -> int:
    """Crash, cut, mend or revive one host."""
    lab = Lab.load(args.folder)
    {"crash": lab.crash, "cut": lab.cut, "mend": lab.mend, "revive": lab.revive}[args.lab_command](args.host)
    print(f"{args.host}: {lab.status(args.host)}")
    return 0


def run_slow(args: argparse.Namespace) -> int:
    """Slow one host's link."""
    lab = Lab.load(args.folder)
    lab.slow(args.host, delay_ms=args.delay_ms, rate_mbit=args.rate_mbit, loss_percent=args.loss_percent)
    print(f"{args.host}: {lab.status(args.host)}")
    return 0


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument(
        "--folder", type=Path, help="where the lab is (default: nodekit/lab in the XDG state folder)"
    )
    parser.set_defaults(run=run)
    return parser


def _print_hosts(lab: Lab) -> None:
    nodes, error = _nodes(lab)
    for host in lab.hosts.values():
        node = f"   slurm: {nodes[host.name]}" if host.name in nodes else ""
        print(f"  {host.name:8} {host.address:15} {host.interface:12} {lab.status(host.name)}{node}")
    if error:
        print(f"slurm:   {error}")


def _nodes(lab: Lab) -> tuple[dict[str, str], KitError | None]:
    """Slurm's nodes, none without Slurm, and why they are not known."""
    try:
        return (lab.slurm.node_states() if lab.has_slurm else {}), None
    except KitError as error:
        return {}, error
