"""The plan of a comparison: engines, numbers of ranks, reasons against a run, commands; pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from nodekit.deploy.output.wording import count
from nodekit.inventory.errors import WrongUsage
from nodekit.training.engine_info import ALONE, ENGINES, EngineError
from nodekit.training.engines.load import check_engine
from nodekit.training.options.arguments import OptionsError, read
from nodekit.training.options.options import Options

BASE = "single"
"""The baseline of the comparison."""
VARIANTS = {
    **{str(stage): ("--zero", str(stage)) for stage in range(4)},
    "bf16": ("--amp", "bf16"),
    "fp16": ("--amp", "fp16"),
    "spawn": ("--launcher", "spawn"),
}
"""Suffixes of an engine's name → options: ``deepspeed:3``, ``ddp:spawn:bf16``."""
TABLES = {
    "seeds": (
        *("single", "dp", "ddp", "ddp:spawn", "ddp:spawn:fp16"),
        *("horovod", "deepspeed", "accelerate", "fabric", "trainer"),
    )
}
"""Values of ``--table`` → engines: `seeds` is the table of the Chinese tutorials that kit began with."""
_TABLE_TASK = "text"
"""The tutorials' task: sentences of six emotions."""

_OURS = {
    "--engine": "name engines by --engines",
    "--zero": "name a stage by --engines deepspeed:STAGE",
    "--launcher": "name it by --engines ddp:spawn",
    "--nproc-per-node": "give --nproc",
    "--output": "give -o",
}
_OF_A_JOB = (  # variables of a job's ranks, in case kit compare runs in one
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "NODEKIT_SNAPSHOT_DIR", "NODEKIT_SNAPSHOT_SHARED", "NODEKIT_OUTPUT_DIR", "NODEKIT_GENERATION", "NODEKIT_RUN_ID",
    "NODEKIT_SNAPSHOT_EVERY", "NODEKIT_SNAPSHOT_EXPECTED", "NODEKIT_COLLECTIVE_TIMEOUT_S",
    "NODEKIT_ON_NAN",
)  # fmt: skip
_GRACE_S = 5.0
_NO_SNAPSHOTS_S = 1e9
_PROGRAM = "python -m nodekit.training: "


@dataclass(frozen=True)
class Way:
    """An engine with its variants: one row of the comparison."""

    name: str
    arguments: tuple[str, ...]

    @property
    def engine(self) -> str:
        """The engine's name, without variants."""
        return self.name.partition(":")[0]

    @property
    def is_spawned(self) -> bool:
        """Whether the first process starts the other ranks, without torchrun."""
        return "spawn" in self.arguments


@dataclass(frozen=True)
class Run:
    """One training: an engine with its variants, on a number of ranks."""

    way: Way
    num_ranks: int

    @property
    def file(self) -> str:
        """The name of the run's files, without suffix."""
        return f"{self.way.name.replace(':', '-')}-{self.num_ranks}"

    def __str__(self) -> str:
        return f"{self.way.name}, {count(self.num_ranks, 'rank')}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the comparison runs on."""

    torch: str
    """The version of torch."""
    gpus: tuple[str, ...]
    """The GPUs' names."""
    cpu: str
    num_cores: int

    def num_threads(self, num_ranks: int) -> int:
        """Return the number of threads per rank."""
        return max(1, self.num_cores // num_ranks)


def chosen(text: str | None) -> list[Way]:
    """Parse ``--engines``; None: all engines, the baseline first.

    Raises:
        WrongUsage: an engine or a variant does not exist.
    """
    names = text.split(",") if text is not None else sorted(ENGINES, key=lambda name: name not in ALONE)
    ways, problems = [], []
    for name in dict.fromkeys(map(str.strip, names)):
        engine, *variants = name.split(":")
        for number, each in enumerate(name.split(":")):
            kind, known = ("variant", list(VARIANTS)) if number else ("engine", list(ENGINES))
            if each not in known:
                near = get_close_matches(each, known, n=1)
                problems.append(
                    f"--engines {name}: there is no {kind} '{each}'"
                    + (f"; did you mean {near[0]}?" if near else "")
                    + f" (they are: {', '.join(known)})"
                )
        options = [word for variant in variants for word in VARIANTS.get(variant, ())]
        ways.append(Way(name, ("--engine", engine, *options)))
    if problems:
        raise WrongUsage("\n".join(problems))
    return ways


def named(table: str | None, engines: str | None) -> str | None:
    """Return the engines to run: the value of ``--engines``, or the list of a ``--table``.

    Raises:
        WrongUsage: both are given.
    """
    if table is None:
        return engines
    if engines is not None:
        raise WrongUsage(f"--table {table} names its engines itself: leave out --table or --engines")
    return ",".join(TABLES[table])


def with_task(table: str | None, given: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments for all runs, with the task of a ready table if they name none."""
    names = {word.partition("=")[0] for word in given}
    return (*(("--task", _TABLE_TASK) if table and "--task" not in names else ()), *given)


def numbers(text: str) -> list[int]:
    """Parse ``--nproc``.

    Raises:
        WrongUsage: a value is not a number of ranks.
    """
    found = [each.strip() for each in text.split(",")]
    for each in found:
        if not (each.isascii() and each.isdigit() and int(each)):
            raise WrongUsage(f"--nproc {text}: '{each}' is not a number of ranks; wanted as in --nproc 1,2")
    return list(dict.fromkeys(map(int, found)))


def usual_numbers(machine: Machine, table: str | None = None) -> list[int]:
    """Return the default of ``--nproc``: 1 (not for a ready table), and the number of GPUs, or 2 without GPUs."""
    most = len(machine.gpus) or 2
    return [most] if table else sorted({1, most})


def shared_arguments(given: Sequence[str]) -> tuple[str, ...]:
    """Return the training module's arguments for every run: those given, and no snapshots but the final one.

    Raises:
        WrongUsage: an argument is one that kit compare sets itself.
    """
    names = [word.partition("=")[0] for word in given if word.startswith("--")]
    for name in names:
        if name in _OURS:
            raise WrongUsage(f"{name} after the -- would be the same for all: {_OURS[name]}, before the --")
    found = list(given)
    if not {"--snapshot-every", "--snapshot-seconds"} & set(names):
        found += ["--snapshot-seconds", str(_NO_SNAPSHOTS_S)]
    if "--grace" not in names:
        found += ["--grace", str(_GRACE_S)]
    return tuple(found)


def runs(ways: Iterable[Way], nums_ranks: Iterable[int]) -> list[Run]:
    """Return all runs, the fewest ranks first; engines that use a single process run once."""
    ways = list(ways)
    alone = [Run(way, 1) for way in ways if way.engine in ALONE]
    others = [Run(way, num) for num in nums_ranks for way in ways if way.engine not in ALONE]
    return sorted([*alone, *others], key=lambda run: run.num_ranks)


def refusal(run: Run, arguments: Sequence[str], machine: Machine) -> str | None:
    """Return why a run is not possible here, in the words of the component that refuses it; None if it is."""
    options = parsed((*arguments, *run.way.arguments))
    if isinstance(options, str):
        return options
    try:
        check_engine(options, "cuda" if machine.gpus else "cpu")
    except EngineError as error:
        return str(error)
    if machine.gpus and run.num_ranks > len(machine.gpus):
        return f"{run.num_ranks} ranks need as many GPUs, and here they are {len(machine.gpus)}"
    if options.batch_size < run.num_ranks:
        return f"--batch-size {options.batch_size} is less than a sample for each of {run.num_ranks} ranks"
    return None


def parsed(arguments: Sequence[str]) -> Options | str:
    """Return the training module's options, or why it refuses them."""
    try:
        return read(arguments, {})
    except OptionsError as error:
        return str(error).removeprefix(_PROGRAM)


def argv(run: Run, arguments: Sequence[str], output: Path) -> list[str]:
    """Return the command of a run."""
    module = ["-m", "nodekit.training", *arguments, *run.way.arguments, "--output", str(output)]
    if run.way.is_spawned:
        return [sys.executable, *module, "--nproc-per-node", str(run.num_ranks)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.num_ranks)]
    return [sys.executable, *launcher, *module]


def environment(run: Run, machine: Machine, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run: this process's, without a job's variables, and with the number of threads."""
    kept = {name: value for name, value in ours.items() if name not in _OF_A_JOB}
    return {**kept, "OMP_NUM_THREADS": str(machine.num_threads(run.num_ranks))}


def heading(options: Options, given: Sequence[str], machine: Machine, plan: Sequence[Run]) -> tuple[str, str]:
    """Return two lines: what is trained, and where and how."""
    what = (
        f"{options.task}, {count(options.epochs, 'epoch')}, {count(options.batch_size, 'sample')} a step "
        f"over all ranks, seed {options.seed}"
    )
    gpus = ", ".join(f"{machine.gpus.count(name)} × {name}" for name in dict.fromkeys(machine.gpus))
    threads = ", ".join(
        f"{machine.num_threads(num)} with {count(num, 'rank')}"
        for num in dict.fromkeys(run.num_ranks for run in plan)
    )
    where = (
        f"{count(machine.num_cores, 'core')} of {machine.cpu}, {gpus or 'no GPU'}, torch {machine.torch}; "
        f"OMP_NUM_THREADS: {threads}"
    )
    return what, where + (f"; options: {shlex.join(given)}" if given else "")


def batch_remark(options: Options, plan: Sequence[Run]) -> str:
    """Return a note for readers of tutorials on the global batch; "" if all runs have one rank."""
    num_ranks = max(run.num_ranks for run in plan)
    if num_ranks == 1:
        return ""
    return (
        f"The batch is global: {count(options.batch_size, 'sample')} a step over all ranks, so all runs make the same "
        f"steps. In most tutorials it is per process, so that {num_ranks} ranks make 1/{num_ranks} of the steps: that "
        f"is --batch-size {num_ranks * options.batch_size} here."
    )
