"""Write an inventory by looking at the hosts.

The hosts are those named, or those of a file; kit logs in to each, as ssh would, and notes its GPUs, cores,
interfaces and the interpreters that have torch. What has one answer becomes a key; what has several becomes a
comment that begins with CHOOSE. A host that cannot be reached stays in the file, with the reason.

Nothing is changed on any host. The file is checked before it is written, and an existing one is not written
over.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from nodekit.deploy.commands import arguments

EPILOG = """\
examples:
  kit init gpu1 gpu2 user@10.0.0.13          these; any name that ssh knows
  kit init gpu[01-16] -o lab.yaml            a hostlist, into lab.yaml
  kit init --ssh-config 'gpu*'               the hosts of ~/.ssh/config, or some of them
  kit init --hostfile hosts                  of MPI, DeepSpeed or Horovod: gpu1 slots=8, gpu1:8
  kit init --ansible hosts.ini --group gpu   an Ansible inventory: INI, YAML, or ansible-inventory --list
  kit init --slurm -o slurm.yaml             the cluster whose login node this is

exit codes:
  0    written
  1    not written, or written with no host that could be reached
  2    wrong usage
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = (
        "kit init [HOST…] [--ssh-config | --hostfile F | --ansible F | --slurm]\n                [options]"
    )
    command.add_argument(
        "hosts",
        metavar="HOST",
        nargs="*",
        help="the hosts; with --ssh-config, --hostfile or --ansible: only those of it that match (* and ?)",
    )
    source = command.add_mutually_exclusive_group()
    source.add_argument("--ssh-config", action="store_true", help="the hosts of ~/.ssh/config")
    source.add_argument(
        "--hostfile", metavar="F", type=Path, help="those of an MPI, DeepSpeed or Horovod hostfile"
    )
    source.add_argument("--ansible", metavar="F", type=Path, help="those of an Ansible inventory")
    source.add_argument("--slurm", action="store_true", help="ask scontrol, here, what the cluster has")
    command.add_argument("--group", metavar="G", help="with --ansible: this group only")
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("cluster.yaml"),
        help="what to write, - for stdout (%(default)s)",
    )
    command.add_argument("--force", action="store_true", help="write over FILE if it is there")
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Write the inventory, and print a summary of it."""
    from nodekit.deploy.init import init

    options = init.Options(
        hosts=tuple(args.hosts),
        ssh_config=args.ssh_config,
        hostfile=args.hostfile,
        ansible=args.ansible,
        group=args.group,
        slurm=args.slurm,
        output=args.output,
        force=args.force,
        ssh=arguments.ssh_options(args),
    )
    is_file = str(args.output) != "-"
    talk = sys.stdout if is_file else sys.stderr
    written = init.init(options, say=lambda line: print(line, file=talk, flush=True))
    if not is_file:
        print(written.template.text, end="")
    else:
        shown = shlex.quote(str(args.output))
        print(f"wrote {shown}: {written.template.summary}")
        if written.template.num_choices:
            print(f"  {written.template.num_choices} for you to decide: grep CHOOSE {shown}")
        print(f"  what would run: kit up {shown} --dry-run")
    if written.num_reached == 0:
        print("kit: none of the hosts could be looked at; the file says why", file=sys.stderr)
        return 1
    return 0
