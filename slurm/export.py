"""`kit export`: write a script with which plain `sbatch` runs what `kit up` would submit, to inspect and to keep."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.records import runs
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory
from nodekit.slurm.submission.prepare import prepare

NODES = ("nodes", "ntasks-per-node", "no-kill")
GOES_ON = ("requeue", "open-mode", "signal")
OUTPUT = ("chdir", "output", "job-name")


def export(options: Options, output: Path | None) -> int:
    """Prepare a run in the shared folder, and write the script that runs it; return the exit status.

    Args:
        options: as for `kit up`.
        output: path of the script; None for stdout.
    """
    inventory = load_inventory(options.inventory)
    if inventory.slurm is None:
        raise KitError(
            f"{inventory.path}: found hosts",
            wanted="slurm for sbatch",
            cure="for hosts there is --to shell, hostfile, ansible, accelerate, deepspeed or compose",
        )
    if inventory.slurm.array:
        raise KitError(
            "slurm.array: a script is for one run", cure="take it out, or use kit up, which submits arrays"
        )
    if output is not None and not output.parent.is_dir():
        raise KitError(f"--output {output}: there is no folder {output.parent}")
    options = dataclasses.replace(options, quiet=output is None)
    run_id = runs.new_id(inventory.name)
    with contextlib.ExitStack() as stack:
        ready = prepare(stack, inventory, run_id, options, Phases(silent=options.quiet), secrets={})
        ready.place(ready.run_dir, inventory, options.command)
    text = script(
        inventory, options.command, run_dir=ready.run_dir, python=ready.python, parameters=ready.parameters
    )
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        output.write_text(text, encoding="utf-8")
        output.chmod(0o755)
    except OSError as error:
        raise KitError(f"--output {output}: {error}") from error
    where = f" on {inventory.slurm.login}" if inventory.slurm.login else ""
    print(f"{run_id} lies ready in {ready.run_dir}; sbatch {shlex.quote(str(output))}{where} runs it")
    return 0


def script(
    inventory: Inventory,
    command: Sequence[str] | None,
    *,
    run_dir: str,
    python: str,
    parameters: Mapping[str, Any],
) -> str:
    """Return the text of the script.

    Args:
        inventory: with a `slurm:` section.
        command: replaces the inventory's command.
        run_dir: the run's folder in the shared folder.
        python: the interpreter on the nodes.
        parameters: for submitit, from `sbatch_parameters.parameters`.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    runs_what = shlex.join(command or inventory.job.command or ("-m", "nodekit.training"))
    # Written by submitit itself, so that the options below are exactly those of kit up.
    text = _make_sbatch_string(command="", folder=f"{run_dir}/slurm", **parameters)
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    asked = [line for line in lines if not _is_of(line, (*NODES, *GOES_ON, *OUTPUT))]
    names = inventory.job.secrets
    made = f"kit {metadata.version('nodekit')} on {time.strftime('%Y-%m-%d %H:%M:%S')}"
    said = "none is in here, nor in the run's folder: before sbatch, which passes on the environment,"
    secrets = f"#   secrets    {said}\n#              export {' '.join(names)}\n"
    srun = [
        "srun", "--unbuffered", "--output", f"{run_dir}/slurm/%j_%t_log.out",
        *parameters["srun_args"], python, "-u", "-m", "nodekit.slurm.allocation.sbatch_entry", run_dir,
    ]  # fmt: skip
    return f"""\
#!/bin/bash
#
# Runs by plain sbatch what `kit up {shlex.quote(inventory.path.name)}` would submit.
# Written by {made}, from {_one_line(str(inventory.path))}
#
#   runs       {_one_line(runs_what)}
#   code       {_one_line(run_dir)}/code, as it was then; kit export again takes it anew
#   says       {_one_line(run_dir)}/slurm/logs/kit.log
#   writes     {_one_line(run_dir)}/NODE/logs and …/output, for each node
{secrets if names else ""}#
# Submitted again it goes on from the newest snapshot; let only one job of it run at a time.

# What is asked for (slurm.time, slurm.partition, …):
{_join(asked)}
# A task on each node. When a node is lost the others go on, while enough are left:
{_join(line for line in lines if _is_of(line, NODES))}
# Told before the time limit, it saves a snapshot and has Slurm queue it again; it goes on from there. Slurm does the
# same with it after a preemption, or when its first node is lost:
{_join(line for line in lines if _is_of(line, GOES_ON))}
{_join(line for line in lines if _is_of(line, OUTPUT))}
# From within another job, sbatch passes on that job's variables, also those that Slurm does not set anew for this one:
unset "${{!SLURM_ARRAY_@}}"
case $(scontrol show job --oneliner "$SLURM_JOB_ID") in *" Restarts=0 "*) unset SLURM_RESTART_COUNT ;; esac

# slurm.setup, where kit itself is, and what looks in the end whether srun was broken off:
{_join(parameters["setup"])}
# The task on the first node leads the others, as kit up leads its hosts: it checks them, starts an agent on each,
# and has them meet again when one is lost. The ranks are started by these agents.
{shlex.join(srun)}
"""


def _is_of(line: str, names: Sequence[str]) -> bool:
    return line.removeprefix("#SBATCH --").partition("=")[0] in names


def _join(lines: Any) -> str:
    return "".join(f"{line}\n" for line in lines)


def _one_line(text: str) -> str:
    """Return a text without line breaks, so that it cannot end the comment it is put in."""
    return " ".join(text.splitlines())
