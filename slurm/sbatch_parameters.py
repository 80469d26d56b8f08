"""Build the parameters of sbatch and srun for a job, as submitit takes them."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from nodekit.inventory.schema import Inventory, SlurmSettings

MAX_SIGNAL_S = 90
"""The longest time between Slurm's signal and the time limit, in seconds: for a snapshot and the requeue."""
# The other nodes survive a lost one; and without --export=ALL, an sbatch --export=NONE would hide what `setup` has set.
SRUN_ARGS = ("--no-kill", "--kill-on-bad-exit=0", "--export=ALL")

ALWAYS = ("array", "open_mode", "signal", "wait")
"""Options of sbatch on which kit or submitit always decides."""
VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NO_REQUEUE": "requeue",
    "SBATCH_TIMELIMIT": "time",
}
"""Environment variable of sbatch → the option it sets, if their names differ."""

REFUSALS: dict[str, tuple[str, Any]] = {"requeue": ("no_requeue", True), "no_kill": ("no_kill", "off")}
"""Option → what to pass if it is False: if it were only left out, Slurm's default might be the opposite."""

KEYS = {"mem": "mem_gb"}
"""Parameter → the key below `slurm:` it comes from, if their names differ."""


def inventory_keys(names: Iterable[str], settings: SlurmSettings) -> str:
    """Return the inventory's keys that these parameters come from, with their values: ``slurm.mem_gb (64)``."""
    said = []
    for name in names:
        key = KEYS.get(name, name)
        if key in settings.extra:
            said.append(f"slurm.extra.{key} ({settings.extra[key]})")
        elif key in SlurmSettings.model_fields and (value := getattr(settings, key)) is not None:
            said.append(f"slurm.{key} ({value})")
    return " or ".join(said)


def parameters(
    inventory: Inventory, *, name: str, run_dir: str, python: str, kit_dir: str, minutes: int
) -> dict[str, Any]:
    """Return the parameters for submitit's SlurmExecutor, for a job with one task on each node.

    Args:
        inventory: with a `slurm:` section.
        name: of the job.
        run_dir: the run's folder in the shared folder.
        python: the interpreter on the nodes.
        kit_dir: kit's package in the shared folder.
        minutes: the time limit, or the longest that the partition allows.
    """
    settings = inventory.slurm
    assert settings is not None
    at_exit = [python, "-m", "nodekit.slurm.allocation.srun_loss", str(PurePosixPath(run_dir).parent)]
    at_once = (settings.array or "").partition("%")[2]
    # Since Slurm 22.05 srun does not inherit --cpus-per-task from sbatch.
    cpus = [f"--cpus-per-task={settings.cpus_per_task}"] if settings.cpus_per_task else []
    asked: dict[str, Any] = {
        "job_name": name,
        "nodes": settings.nodes.max,
        "ntasks_per_node": 1,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "gpus_per_node": settings.gpus_per_node or None,
        "cpus_per_task": settings.cpus_per_task,
        "mem": None if settings.mem_gb is None else f"{round(settings.mem_gb * 1024)}M",
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "signal_delay_s": min(MAX_SIGNAL_S, minutes * 60 // 3),
        "stderr_to_stdout": True,
        # After the user's own lines: a module or a conda environment may set PYTHONPATH anew.
        "setup": [
            *settings.setup,
            f"export PYTHONPATH={shlex.quote(kit_dir)}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"trap {shlex.quote(shlex.join(at_exit))} EXIT",
        ],
        "array_parallelism": int(at_once) if at_once else None,
        "srun_args": [*SRUN_ARGS, *cpus, *settings.srun_args],
    }
    further: dict[str, Any] = {"requeue": True, "no_kill": True, "chdir": run_dir}
    for key, value in settings.extra.items():
        (asked if key in _submitits_own() else further)[key] = value
    return {
        **{key: value for key, value in asked.items() if value is not None},
        # An explicit None keeps submitit from setting its default: then the limit of the partition holds, or that of
        # the account or the quality of service.
        "time": settings.extra.get("time", settings.time_min),
        "additional_parameters": further,
    }


def written(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters for a batch script, without those that are False: sbatch refuses ``--exclusive=False``."""
    further = parameters.get("additional_parameters", {})
    off = {key: value for key, value in REFUSALS.items() if further.get(key) is False}
    return {
        **{key: value for key, value in parameters.items() if value is not False},
        "additional_parameters": {
            **{key: value for key, value in further.items() if value is not False},
            **dict(off.values()),
        },
    }


def overriding(parameters: Mapping[str, Any], environ: Iterable[str]) -> list[str]:
    """Return the user's SBATCH_ variables for options that the job sets: sbatch prefers them to the batch script."""
    values = {**parameters, **parameters.get("additional_parameters", {})}
    asked = {*ALWAYS, *(key for key, value in values.items() if value is not None)}
    names = [name for name in environ if name.startswith("SBATCH_")]
    return [name for name in names if VARIABLES.get(name, name.removeprefix("SBATCH_").lower()) in asked]


def planned_gpus(settings: SlurmSettings) -> int | None:
    """Return how many GPUs each node's ranks use; None for all GPUs that Slurm gives the job there.

    GPUs may be requested without `gpus_per_node`, as by ``extra: {gres: gpu:a100:4}``.
    """
    if settings.gpus_per_node is not None:
        return settings.gpus_per_node
    in_other_words = any(
        "gpu" in name or (name in ("gres", "tres_per_node", "tres_per_task") and "gpu" in str(value))
        for name, value in settings.extra.items()
    )
    return None if in_other_words else 0


def _submitits_own() -> frozenset[str]:
    """Return the parameters that submitit knows by name; it passes all others on to sbatch as they are."""
    from submitit.slurm import slurm

    return frozenset(inspect.signature(slurm._make_sbatch_string).parameters)
