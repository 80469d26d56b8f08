"""`kit export`: the job of an inventory as files for another tool, or as plain scripts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from nodekit.deploy.export import export_compose, export_formats
from nodekit.deploy.export.export_formats import File
from nodekit.deploy.export.export_script import Source
from nodekit.deploy.launch import planning
from nodekit.deploy.launch.options import Options
from nodekit.deploy.records import runs
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory

FOLDERS = ("accelerate", "deepspeed", "shell")
"""Formats that consist of several files."""
PORT = 29500
"""torchrun's default port: a free port found today may be taken when the export is used."""


def build(options: Options, to: str, *, master_port: int = PORT) -> list[File]:
    """Return the files of a format other than sbatch; connects to the hosts if the inventory is not enough.

    Raises:
        KitError: a host cannot be reached or used, or the tool cannot run this job.
    """
    inventory = load_inventory(options.inventory)
    if not inventory.hosts:
        raise KitError(
            f"{inventory.path}: found slurm", wanted="hosts: only --to sbatch is for jobs that Slurm runs"
        )
    made = f"kit {metadata.version('nodekit')} on {time.strftime('%Y-%m-%d %H:%M:%S')}"
    source = Source(inventory=inventory, command=options.command, made=made)
    if to == "ansible":
        return export_formats.ansible(source)
    if to == "compose":
        digest = sync.package().digest
        return export_compose.compose(source, run_id=runs.new_id(inventory.name), kit_digest=digest)
    if to == "hostfile" and (slots := export_formats.slots_of(inventory)) is not None:
        return export_formats.hostfile(source, slots)
    planned = planning.planned(inventory, options, master_port=master_port)
    if to == "hostfile":
        return export_formats.hostfile(source, {node.name: node.nproc_per_node for node in planned.active})
    several = {
        "accelerate": export_formats.accelerate,
        "deepspeed": export_formats.deepspeed,
        "shell": export_formats.shell,
    }
    return several[to](planned, source)


def to_text(files: Sequence[File]) -> str:
    """Return the files as one text, several with headers as by head(1)."""
    if len(files) == 1:
        return files[0].text
    return "\n".join(f"==> {file.name} <==\n{file.text}" for file in files)


def write(files: Sequence[File], to: str, output: Path) -> str:
    """Write one file, or several into a folder; return the line to print.

    Raises:
        KitError: a file cannot be written.
    """
    try:
        if to in FOLDERS:
            output.mkdir(parents=True, exist_ok=True)
        for file in files:
            path = output / file.name if to in FOLDERS else output
            path.write_text(file.text, encoding="utf-8")
            if file.mode is not None:
                path.chmod(file.mode)
    except OSError as error:
        raise KitError(f"{error.filename or output}: cannot be written: {error.strerror}") from error
    names = ", ".join(file.name for file in files)
    shown = shlex.quote(str(output))
    told = f"{shown}: {names}" if to in FOLDERS else f"{shown} is written"
    return f"{told}; how to use it stands in its first lines"
