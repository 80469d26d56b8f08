"""The options of ``python -m nodekit.training``, each declared once, and checked before anything slow is started."""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from nodekit.training import values
from nodekit.training.engine_info import ALONE, ENGINES
from nodekit.training.errors import TrainingError
from nodekit.training.option_files import parse_with_files
from nodekit.training.reporting.trackers import TRACKERS

LINEAR_LR_BATCH = 256
"""The batch that ``--lr`` is meant for under ``--lr-scale``."""
_LR_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}

ALL_EPOCHS = sys.maxsize
"""``--save-every-epoch`` without a number."""
ONE_FOLDER = (
    "give all nodes one folder (with kit snapshots: {shared: /path}; else NODEKIT_SNAPSHOT_SHARED=1 and the same "
    "NODEKIT_SNAPSHOT_DIR), or take --snapshot-format whole"
)
"""What sharded snapshots need; whether it is so, only the ranks can find out."""


def _option(
    group: str,
    default: object,
    about: str,
    *,
    either: str = "",
    env: str = "",
    without: Mapping[str, str] | None = None,
    may_change: bool = False,
    **settings: Any,
) -> Any:
    """Declare an option as a field of `Options`.

    Args:
        group: the heading in ``--help``.
        default: of the field; ``--help`` shows it, unless it is None or False or ``about`` names another.
        about: the text for ``--help``.
        either: options with the same name here exclude each other.
        env: a variable that, where it is set, replaces the default.
        without: engine → why that engine cannot do what the option asks for.
        may_change: whether a run may go on from a snapshot that was taken with another value (see `fingerprint`).
        settings: for ``add_argument``.
    """
    if default is False:
        settings["action"] = "store_true"
    elif default is not None and "(default: " not in about:
        about += " (default: %(default)s)"
    settings["help"] = about
    metadata = {
        "group": group,
        "either": either,
        "env": env,
        "without": without or {},
        "may_change": may_change,
        "settings": settings,
    }
    return field(default=default, metadata=metadata)


# Settings that several options share.
_COUNT: dict[str, Any] = {"type": values.whole(1), "metavar": "N"}
_FROM_0: dict[str, Any] = {"type": values.whole(0), "metavar": "N"}
_STEPS: dict[str, Any] = {"type": values.whole(1), "metavar": "H"}
_POSITIVE: dict[str, Any] = {"type": values.positive, "metavar": "X"}
_SECONDS: dict[str, Any] = {"type": values.positive, "metavar": "S"}
_what = partial(_option, "task and engine")
_start = partial(_option, "launch", may_change=True)
_how = partial(_option, "training")
_judged = partial(_option, "evaluation", may_change=True)
_kept = partial(_option, "output and snapshots", may_change=True)
_limits = partial(_option, "limits", may_change=True)


def _all_but(engine: str, reason: str) -> dict[str, str]:
    return {name: reason for name in ENGINES if name != engine}


_ALONE = dict.fromkeys(ALONE, "is one process, with nobody to exchange anything with")
_FINDS_UNUSED = dict.fromkeys(("fsdp", "deepspeed", "horovod"), "finds them without being told")
_PLAIN_GRADIENTS = dict.fromkeys(("fsdp", "deepspeed"), "sends gradients as they are")
_NO_WHOLE_MODEL = dict.fromkeys(
    ("fsdp", "deepspeed"), "has no whole model on each rank, whose weights could be averaged"
)
_NO_COMPILE = {
    "dp": "copies the model in each step",
    "deepspeed": "makes wrong steps of a compiled model (tried with 0.19.8)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of ``python -m nodekit.training``."""

    task: str = _what(
        "digits", "digits, mnist, images, text, or yours: package.module:Task, path/to/file.py:Task"
    )
    data: str | None = _what(
        None, "the task's data, for mnist, images and text (default: what comes with kit)", metavar="DIR"
    )
    model: str | None = _what(
        None,
        "for text, a pretrained BERT: a folder, or its name at the hub; for images, a model of torchvision, as "
        "resnet18 (default: a small random one)",
        metavar="DIR|NAME",
    )
    max_length: int | None = _what(
        None, "for text: tokens per text; longer ones are cut, and counted (default: 64)", **_COUNT
    )
    image_size: int | None = _what(
        None, "for images: the side of the square that they are scaled and cut to (default: 96)", **_COUNT
    )
    init_from: Path | None = _what(
        None,
        "initial weights, if there is no snapshot yet: a folder that a run has written (output/best, "
        "output/last), or a file with a state dict",
        either="start",
        type=Path,
        metavar="PATH",
    )
    resume_from: Path | None = _what(
        None,
        "if there is no snapshot yet, continue from a script's own checkpoint: a file with the weights, the epoch "
        "and perhaps the optimizer's state",
        either="start",
        type=Path,
        metavar="FILE",
    )
    ignore_mismatched_sizes: bool = _what(
        False,
        "of --init-from, --resume-from or --model, take the weights whose shapes fit, and list the others",
    )
    engine: str = _what(
        next(iter(ENGINES)), "the way to train: one of those below", choices=list(ENGINES), metavar="NAME"
    )
    zero: int | None = _what(
        None,
        "for deepspeed: what is partitioned over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, "
        "3 weights too (default: 1)",
        type=int,
        choices=range(4),
        without=_all_but("deepspeed", "has no stages of ZeRO"),
    )
    deepspeed_config: Path | None = _what(
        None,
        "for deepspeed: its own JSON file; what it says of the options here is their default",
        type=Path,
        metavar="FILE",
        without=_all_but("deepspeed", "does not read it"),
    )
    training_args: Path | None = _what(
        None,
        "for trainer: a JSON file of TrainingArguments, those without an option here",
        type=Path,
        metavar="FILE",
        without=_all_but("trainer", "has none"),
    )
    epochs: int = _what(20, "times through the training data", may_change=True, **_COUNT)
    seed: int = _what(0, "of weights, order and augmentation", **_FROM_0)
    num_workers: int = _what(0, "processes loading data, per rank", may_change=True, **_FROM_0)
    no_pin_memory: bool = _what(
        False,
        "load batches into pageable memory (default: into pinned memory, if there is a GPU)",
        may_change=True,
    )

    launcher: str = _start(
        "torchrun",
        "who starts the ranks: torchrun (or kit), or this process itself, those of one machine, without restarts",
        choices=["torchrun", "spawn"],
    )
    nproc_per_node: int | None = _start(
        None, "for --launcher spawn: how many ranks (default: one for each GPU, else 1)", **_COUNT
    )
    init_method: str = _start(
        "env://",
        "where the ranks meet: env://, tcp://HOST:PORT or file:///PATH",
        type=values.init_method,
        metavar="URL",
    )
    backend: str = _start(
        "auto",
        "how they communicate: auto is nccl if there are GPUs, else gloo",
        choices=["auto", "gloo", "nccl", "mpi"],
    )
    gpus: tuple[int, ...] | None = _start(
        None,
        "the GPUs of this machine to use, as torch numbers them: 0,1; of those that CUDA_VISIBLE_DEVICES shows, if it "
        "is set (default: all)",
        type=values.gpus,
        metavar="N,N",
    )
    local_rank: int | None = _start(
        None, "given by python -m torch.distributed.launch and by deepspeed; has to be LOCAL_RANK", **_FROM_0
    )

    batch_size: int = _how(64, "samples per step over all ranks together", **_COUNT)
    micro_batch: int | None = _how(
        None,
        "most samples a rank computes at once; more are accumulated (default: no limit)",
        either="parts of a batch",
        may_change=True,
        **_COUNT,
    )
    accumulate: int | None = _how(
        None,
        "or into how many parts, computed one after the other, a rank divides its share of a batch (default: 1)",
        either="parts of a batch",
        may_change=True,
        **_COUNT,
    )
    lr: float = _how(0.003, "peak learning rate", **_POSITIVE)
    lr_scale: str = _how(
        "none",
        f"--lr is for a batch of {LINEAR_LR_BATCH} and scaled to ours, linearly or by the square root",
        choices=list(_LR_EXPONENTS),
    )
    schedule: str = _how("cosine", "after the warm-up", choices=["cosine", "linear", "constant"])
    warmup_steps: int | None = _how(None, "steps of linear warm-up (default: 5%% of all)", **_FROM_0)
    clip: float | None = _how(None, "largest norm of the gradient (default: no limit)", **_POSITIVE)
    amp: str = _how("off", "mixed precision", choices=["off", "bf16", "fp16"])
    sync_bn: bool = _how(False, "batch norm over all ranks' samples (CUDA only)", without=_ALONE)
    compile: bool = _how(
        False,
        "torch.compile the model; the first steps take longer (needs a C++ compiler on a CPU)",
        without=_NO_COMPILE,
    )
    compress: str = _how(
        "off",
        "send gradients in 16 bits, or as products of low-rank matrices, adding the remainder to the next ones",
        choices=["off", "bf16", "fp16", "powersgd"],
        without=_ALONE | _PLAIN_GRADIENTS,
    )
    find_unused: bool = _how(
        False,
        "the loss may leave out parameters, different ones in each step; slower",
        without=_ALONE | _FINDS_UNUSED,
    )
    local_sgd: int | None = _how(
        None,
        "for slow networks: each rank trains H steps by itself, then all average their weights",
        either="local steps",
        **_STEPS,
        without=_ALONE | _NO_WHOLE_MODEL,
    )
    diloco: int | None = _how(
        None,
        "likewise, with a step of SGD with momentum towards that average (DiLoCo)",
        either="local steps",
        **_STEPS,
        without=_ALONE | _NO_WHOLE_MODEL,
    )
    outer_lr: float = _how(0.7, "DiLoCo's learning rate for that step", **_POSITIVE)
    outer_momentum: float = _how(
        0.5,
        "DiLoCo's momentum, from 0 and below 1; its authors use 0.9, for long runs",
        type=values.fraction,
        metavar="X",
    )

    on_nan: str = _how(
        "stop",
        "when a loss or the weights are not finite: stop, or go back to the newest snapshot and leave that batch out "
        "(default: $NODEKIT_ON_NAN, else stop)",
        env="NODEKIT_ON_NAN",
        choices=["stop", "rollback"],
        type=str,
        may_change=True,
    )

    eval_every: int | None = _judged(
        None, "evaluate after every N steps too (default: after each epoch)", **_COUNT
    )
    eval_batch_size: int = _judged(256, "most samples that a rank evaluates at once", **_COUNT)
    early_stop: int | None = _judged(
        None, "end the training after N evaluations in a row without a better measure of --best", **_COUNT
    )
    best: str = _judged(
        "auto",
        "keep the weights with the greatest measure NAME (or the least, if it is a loss) in output/best; auto: "
        "accuracy, or else loss",
        metavar="NAME|off",
    )

    output: Path | None = _kept(
        None,
        "for curves, result and snapshots (default: $NODEKIT_OUTPUT_DIR, else a folder in runs, where the same command "
        "goes on)",
        type=Path,
        metavar="DIR",
    )
    save_every_epoch: int | None = _kept(
        None,
        "keep the weights after each epoch, or after the last K, as output/model_EPOCH.pth",
        nargs="?",
        const=ALL_EPOCHS,
        type=values.whole(1),
        metavar="K",
    )
    track: str | None = _kept(
        None,
        "also report to this service, from rank 0, as one run over all restarts; configured by its own variables "
        "(WANDB_API_KEY, WANDB_PROJECT; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)",
        choices=list(TRACKERS),
    )
    snapshot_every: int | None = _kept(
        None, "steps from one snapshot to the next", either="interval", **_COUNT
    )
    snapshot_seconds: float | None = _kept(
        None,
        "or seconds from one to the next; auto: from the measured cost of a snapshot "
        "(default: $NODEKIT_SNAPSHOT_EVERY, else auto)",
        either="interval",
        env="NODEKIT_SNAPSHOT_EVERY",
        type=values.auto_or_positive,
        metavar="T",
    )
    """None for auto."""
    keep: int = _kept(2, "snapshots to keep, 2 or more", type=values.whole(2), metavar="N")
    snapshot_format: str = _kept(
        "whole",
        "for fsdp: sharded is a file from each rank, by torch.distributed.checkpoint; they need one folder, so "
        "one node or a shared one",
        choices=["whole", "sharded"],
        without=_all_but("fsdp", "has no shards"),
    )

    timeout: float = _limits(
        600.0,
        "seconds to wait for the slowest rank (default: $NODEKIT_COLLECTIVE_TIMEOUT_S, else 600)",
        env="NODEKIT_COLLECTIVE_TIMEOUT_S",
        **_SECONDS,
    )
    grace: float = _limits(20.0, "seconds from SIGTERM or SIGUSR2 to the end, snapshot or not", **_SECONDS)

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up, scaled by ``--lr-scale``.

        It does not depend on the number of ranks, since the global batch does not either.
        """
        factor: float = (self.batch_size / LINEAR_LR_BATCH) ** _LR_EXPONENTS[self.lr_scale]
        return self.lr * factor

    @property
    def local_steps(self) -> int | None:
        """Steps from one average of the weights to the next with ``--local-sgd`` or ``--diloco``; None without."""
        return self.local_sgd or self.diloco

    def largest_micro_batch(self, world_size: int) -> int | None:
        """Most samples a rank computes at once, by ``--micro-batch`` or ``--accumulate``; None for no limit."""
        if self.accumulate is None:
            return self.micro_batch
        return -(-self.batch_size // (world_size * self.accumulate))

    def lr_factor(self, step: int, total_steps: int) -> float:
        """The schedule's factor on ``peak_lr`` in step ``step`` (from 0) of ``total_steps``."""
        warmup = total_steps // 20 if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


_INSTEAD = {"--local-world-size": "--nproc-per-node", "--bert-dir": "--model"}
"""What scripts often call an option, where the nearest spelling is another one."""


class OptionsError(ValueError):
    """Invalid options; the message is one line for users, with the program's name before it."""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, since every rank prints it, and names the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        known = [
            option for action in self._actions for option in action.option_strings if option.startswith("--")
        ]
        if message.startswith("unrecognized arguments: "):
            given = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
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
    """Read the command line (default: this process's), and the files that it names, if there is a ``folder`` for them.

    ``environ`` (default: this process's) may hold kit's defaults: ``NODEKIT_SNAPSHOT_EVERY`` for
    ``--snapshot-seconds`` and ``NODEKIT_COLLECTIVE_TIMEOUT_S`` for ``--timeout``.

    Raises:
        OptionsError: an option is invalid, or does not go with another.
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
    """What does not go together, each a sentence for the user.

    Args:
        options: as they were given.
        environ: of a rank, or of the process that will start the ranks.
    """
    without = {option.name: option.metadata["without"] for option in fields(options)}
    if options.compress != "fp16":
        without["compress"] = without["compress"] | {"horovod": "has fp16 alone"}
    for option in fields(options):
        value, reasons = getattr(options, option.name), without[option.name]
        if value != option.default and options.engine in reasons:
            given = f"{_flag(option.name)} {value}" if isinstance(value, str) else _flag(option.name)
            others = ", ".join(name for name in ENGINES if name not in reasons)
            yield f"{given}: the engine {options.engine} {reasons[options.engine]}; it is for --engine {others}"
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
    """What does not go with the number of ranks, or with what starts them."""
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
