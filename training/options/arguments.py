"""Read the options of ``python -m nodekit.training``, and check them before anything slow is started."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from nodekit.training.engine_info import ALONE, ENGINES
from nodekit.training.errors import TrainingError
from nodekit.training.options.option_files import parse_with_files
from nodekit.training.options.options import Options

_INSTEAD = {"--local-world-size": "--nproc-per-node", "--bert-dir": "--model"}
"""Scripts' name for an option → its name here, for names that spelling alone does not lead to."""


class OptionsError(ValueError):
    """Invalid options; the message is one line for users, with the program's name before it."""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, since every rank prints it, and names the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        known = [
            option for action in self._actions for option in action.option_strings if option.startswith("--")
        ]
        if message.startswith("unrecognized arguments: "):
            given = (message.removeprefix("unrecognized arguments: ").split("=")[0].split() or [""])[0]
            near = _INSTEAD.get(_flag(given[2:])) or "".join(get_close_matches(given, known, n=1))
            message += f"{f' (did you mean {near}?)' if near else ''}; the options are: {', '.join(known)}"
        raise OptionsError(f"{self.prog}: {message}")


def parse(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """As ``read``; ends the process with exit status 2 if the options are invalid."""
    try:
        return read(arguments, environ, folder=Path())
    except OptionsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def read(
    arguments: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
) -> Options:
    """Read the command line, and the files that it names if ``folder`` is given.

    Args:
        arguments: the command line; None: this process's.
        environ: None: this process's. It may have kit's defaults: ``NODEKIT_SNAPSHOT_EVERY`` for
            ``--snapshot-seconds``, ``NODEKIT_COLLECTIVE_TIMEOUT_S`` for ``--timeout``, ``NODEKIT_ON_NAN``.
        folder: the folder in which the command will run, or its copy here; None: do not read files.

    Raises:
        OptionsError: an option is invalid, or conflicts with another.
        SystemExit: with 0, after ``--help``.
    """
    env = os.environ if environ is None else environ
    parser = _parser(env)
    given = [*map(_with_dashes, sys.argv[1:] if arguments is None else arguments)]
    try:
        values_given = (
            parser.parse_args(given) if folder is None else parse_with_files(parser, given, env, folder)
        )
    except TrainingError as error:
        parser.error(str(error))
    options = Options(**vars(values_given))
    for problem in _problems(options, env):
        parser.error(problem)
    return options


def _parser(env: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="python -m nodekit.training",
        description="Train a task on all ranks, by kit, torchrun or alone, from its newest snapshot on.",
        epilog="engines:\n" + "\n".join(f"  {name:<20}  {info.about}" for name, info in ENGINES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in fields(Options):
        title, either, settings = (option.metadata[key] for key in ("group", "either", "settings"))
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups[title]
        if either:
            if either not in groups:
                groups[either] = group.add_mutually_exclusive_group()
            group = groups[either]
        default = option.default
        if text := env.get(variable := option.metadata["env"]):
            try:
                default = settings["type"](text)
            except argparse.ArgumentTypeError as error:
                parser.error(f"{variable}: {error}")
        group.add_argument(_flag(option.name), default=default, **settings)
    return parser


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_dashes(argument: str) -> str:
    """Spell an option as ``--help`` does: as for torchrun, ``--local_rank`` is ``--local-rank``."""
    name, equals, value = argument.partition("=")
    is_option = name.startswith("--") and name[2:] in {option.name for option in fields(Options)}
    return f"{_flag(name[2:])}{equals}{value}" if is_option else argument


def _problems(options: Options, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each conflict between options.

    Args:
        options: as they were given.
        environ: of a rank, or of the process that will start the ranks.
    """
    without = {option.name: option.metadata["without"] for option in fields(options)}
    if options.compress != "fp16":
        without["compress"] = without["compress"] | {"horovod": "has fp16 alone"}
    if options.snapshot_format == "whole":  # allowed for all engines, which save whole snapshots anyway
        without["snapshot_format"] = {}
    for option in fields(options):
        value, reasons = getattr(options, option.name), without[option.name]
        if value != option.default and options.engine in reasons:
            given = f"{_flag(option.name)} {value}" if isinstance(value, str) else _flag(option.name)
            others = ", ".join(name for name in ENGINES if name not in reasons)
            yield f"{given}: the engine {options.engine} {reasons[options.engine]}; it is for --engine {others}"
        if option.name.startswith("outer_") and value != option.default and not options.diloco:
            yield f"{_flag(option.name)} is for --diloco, and that is not given"
    if options.local_steps and (options.compress != "off" or options.find_unused):
        given = "--compress" if options.compress != "off" else "--find-unused"
        yield f"{given}: with --local-sgd or --diloco no gradients are sent; leave one of them out"
    if options.ignore_mismatched_sizes and not (options.init_from or options.resume_from or options.model):
        yield "--ignore-mismatched-sizes is for --init-from, --resume-from or --model, and none is given"
    if options.early_stop and options.best == "off":
        yield "--early-stop goes by the measure of --best, and that is off; name one, or leave --best out"
    if options.nproc_per_node and options.launcher != "spawn":
        yield "--nproc-per-node is for --launcher spawn; torchrun and kit have an option of their own for it"
    yield from _problems_of_ranks(options, environ)


def _problems_of_ranks(options: Options, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each conflict with the number of ranks, or with their launcher."""
    if options.local_rank is not None and environ.get("LOCAL_RANK") != str(options.local_rank):
        found = (
            f"LOCAL_RANK is {environ['LOCAL_RANK']}" if "LOCAL_RANK" in environ else "LOCAL_RANK is not set"
        )
        yield (
            f"--local-rank {options.local_rank}, but {found}: the option is for torch.distributed.launch and "
            "deepspeed, which set both; leave it out"
        )
    started = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if options.launcher == "spawn" and started:
        yield (
            f"--launcher spawn starts the ranks itself, and {started[0]} says that kit or torchrun does: leave the "
            "option out"
        )
    if options.backend == "mpi" and options.launcher == "spawn":
        yield "--backend mpi: its ranks are started by mpirun, not by --launcher spawn; take gloo"
    num_ranks = environ.get("WORLD_SIZE", str(options.nproc_per_node or 1))
    if num_ranks.isdecimal() and options.batch_size < int(num_ranks):
        yield (
            f"--batch-size {options.batch_size} is less than the {num_ranks} ranks, and each computes a part of every "
            f"batch: give --batch-size {num_ranks} or more, or start fewer ranks"
        )
    if options.engine in ALONE and num_ranks != "1":
        yield (
            f"--engine {options.engine} is one process, and there are {num_ranks} ranks: "
            "start one (nproc_per_node: 1 on one node, or python without a launcher), or take --engine ddp"
        )
