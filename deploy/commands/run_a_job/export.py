"""Write the job of an inventory for another tool.

It is what `kit up` would run, as that tool wants it. No secret is in it: its first lines say how to set them,
and how all of it is used.

  hostfile    a file    the hosts and their slots, for mpirun and deepspeed
  ansible     a file    the hosts as an Ansible inventory
  accelerate  a folder  for each host a configuration of accelerate launch
  deepspeed   a folder  hostfile, .deepspeed_env and the command
  shell       a folder  for each host a bash script, by plain torchrun
  compose     a file    the job on one machine, each host a container
  sbatch      a file    what kit up would submit to Slurm

accelerate, deepspeed and shell need what only the hosts know, as interfaces: they are asked and checked as by
kit up --dry-run, and nothing runs there. hostfile asks them where the inventory does not say how many GPUs
they have. For sbatch all is checked as by kit up, and the run's folder with the code is put in its place in
slurm.shared_dir now; nothing is queued. What was started from an export, kit status does not know.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nodekit.deploy.commands import arguments
from nodekit.inventory.errors import KitError

EPILOG = """\
examples:
  kit export lab.yaml --to shell -o scripts -- train.py --lr 0.1
  kit export lab.yaml --to ansible > hosts.yaml
  kit export slurm.yaml --to sbatch -o job.sh
"""
TAKES_COMMAND = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "kit export INVENTORY [--to FORMAT] [options] [-- SCRIPT.py ARGS…]"
    arguments.add_inventory(command)
    command.add_argument(
        "--to",
        metavar="FORMAT",
        choices=["hostfile", "ansible", "accelerate", "deepspeed", "sbatch", "shell", "compose"],
        default="sbatch",
        help="one of those above (sbatch)",
    )
    command.add_argument(
        "-o", "--output", metavar="PATH", type=Path, help="write it there, a file or a folder (stdout)"
    )
    command.add_argument(
        "--port",
        metavar="P",
        type=int,
        help="where the nodes meet on the first host (29500); of sbatch, each job chooses its own",
    )
    arguments.add_ssh(command)


def run(args: argparse.Namespace) -> int:
    """Write the job to stdout, or to the path that was given."""
    from nodekit.deploy.export import export
    from nodekit.deploy.launch.options import Options

    options = Options(
        inventory=arguments.inventory(args),
        command=tuple(args.command) or None,
        ssh=arguments.ssh_options(args),
    )
    if args.to == "sbatch":
        from nodekit.slurm import export as sbatch

        arguments.refuse_beside("--to sbatch", {"--port": args.port is not None})
        return sbatch.export(options, args.output)
    port = export.PORT if args.port is None else args.port
    if not 0 < port < 65536:
        raise KitError(f"--port: found {port}", wanted="a port from 1 to 65535")
    files = export.build(options, args.to, master_port=port)
    if args.output is None:
        sys.stdout.write(export.to_text(files))
    else:
        print(export.write(files, args.to, args.output))
    return 0
