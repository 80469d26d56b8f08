"""Build the command of a rank from the user's, and read the options of kit's training module in it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nodekit.deploy.host import programs
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.plan.launchers import refuse_launcher
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Inventory
from nodekit.training.engine_info import lacking, refused_on_gpus
from nodekit.training.options.arguments import OptionsError, read
from nodekit.training.options.options import Options
from nodekit.training.reporting import trackers
from nodekit.training.tasks import TaskError
from nodekit.training.tasks.rows import read_splits

TRAINING_MODULE = ("-m", "nodekit.training")
PYTHON = "python"  # argv[0] of a Python command: the node's own interpreter takes its place

# Neither double braces, which other tools use in templates, nor `${node}`, which is for a shell or Hydra.
_WORD = re.compile(r"(?<![{$])\{(snapshot_dir|run_id|node)\}(?!\})")


def argv_of(
    inventory: Inventory, command: Sequence[str] | None, kinds: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return the command of a rank: the command line's, the inventory's, or the training module.

    ``train.py`` and ``python train.py`` are the same, and so with ``-m``: the node's own interpreter runs them,
    unbuffered. As under torchrun, a Python script need not end in .py, have a ``#!`` line or be executable. Other
    programs are executed.

    Args:
        inventory: scripts are looked for in its `job.code`.
        command: the command line's, which replaces the inventory's.
        kinds: absolute path → its `programs.kind` on the hosts.

    Raises:
        KitError: the command is another launcher, such as torchrun.
    """
    argv = tuple(command or inventory.job.command or TRAINING_MODULE)
    begin = 2 if argv[:2] == (PYTHON, "-u") else 1 if argv[0] == PYTHON else 0
    target = argv[begin:] or argv  # `python` without arguments is like any other program
    code = Path(inventory.job.code).expanduser()
    refuse_launcher(target, code)
    name = target[0]
    is_script = begin > 0 and len(argv) > begin and not name.startswith("-")
    if name == "-m" or name.endswith(".py") or is_script:
        return (PYTHON, "-u", *target)
    if begin or not name:
        return argv
    kind = kinds.get(name, "") if Path(name).is_absolute() else programs.kind(str(code / name))
    if kind == "python":
        return (PYTHON, "-u", *target)
    return (f"./{name}", *argv[1:]) if kind and "/" not in name else argv


def argv_on(
    inventory: Inventory, command: Sequence[str] | None, facts: Mapping[str, Facts]
) -> tuple[str, ...]:
    """Return `argv_of`, with the kinds of files that the facts of the hosts contain."""
    return argv_of(inventory, command, next((found.files for found in facts.values() if found.files), {}))


def filled(argv: Sequence[str], *, snapshot_dir: str, run_id: str, node: str) -> tuple[str, ...]:
    """Return a command with ``{snapshot_dir}``, ``{run_id}`` and ``{node}`` replaced.

    All else stays byte for byte, other braces too: ``{{node}}``, ``${node}``, ``{"a": 1}``.
    """
    values = {"snapshot_dir": snapshot_dir, "run_id": run_id, "node": node}
    return tuple(_WORD.sub(lambda found: values[found[1]], each) for each in argv)


def refuse_options(
    argv: Sequence[str],
    code: Path,
    *,
    world_size: int,
    env: Mapping[str, str],
    modules: Mapping[str, Collection[str]],
) -> None:
    """Check the options of the training module, if the command runs it.

    Args:
        argv: the command of a rank.
        code: the folder that is synced; the text task's data in it are read too.
        world_size: the number of ranks.
        env: the environment of the ranks.
        modules: host → which of engine_info.LIBRARIES and trackers.TRACKERS are installed there.

    Raises:
        KitError: the module would refuse the options or the data.
    """
    asked = training_options(argv, {**env, "WORLD_SIZE": str(world_size)}, code)
    if asked is None:
        return
    if int(env.get("NODEKIT_NUM_GPUS", "0")) and (problem := refused_on_gpus(asked.engine)):
        raise KitError(problem)
    problems = {
        host: lacking(asked.engine, found) or trackers.lacking(asked.track, found)
        for host, found in modules.items()
    }
    if without := [host for host, problem in problems.items() if problem]:
        raise KitError(f"{', '.join(without)}: {problems[without[0]]}")
    if asked.task != "text" or asked.data is None or Path(asked.data).is_absolute():
        return  # only the hosts have a folder outside of the code
    if (code / asked.data).is_dir():
        try:
            read_splits(code / asked.data)
        except TaskError as error:
            raise KitError(str(error)) from error


def training_options(argv: Sequence[str], env: Mapping[str, str], code: Path | None = None) -> Options | None:
    """Return the training module's options in a command; None for another command, or for its --help.

    With ``code``, the folder that is synced, also read the files in it that the options name.

    Raises:
        KitError: the module would refuse the options.
    """
    if tuple(argv[2:4]) != TRAINING_MODULE:
        return None
    arguments = argv[4:]
    if {"-h", "--help"} & set(arguments):
        return None
    try:
        return read(arguments, env, folder=code)
    except OptionsError as error:
        raise KitError(str(error)) from None


def weights_folders(node: Mapping[str, Any], weights: str) -> list[str]:
    """Return the folders where a node of a run may have its weights, from its recorded plan; pure."""
    asked = training_options(node["argv"], node["env"])
    if asked is None or asked.output is None:
        return [posixpath.join(node["env"]["NODEKIT_OUTPUT_DIR"], weights)]
    output = posixpath.join(node["code_dir"], str(asked.output))
    # The order of node ranks may differ from the inventory's, so it may be any of these folders.
    own = [output, *(posixpath.join(output, f"node{rank}") for rank in range(1, node["max_nodes"]))]
    return [posixpath.join(each, weights) for each in own]
