"""What can be asked of the shared training module, checked before anything slow or shared is started."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from nodekit.training.engines import ENGINES
from nodekit.training.initmethod import InitMethod
from nodekit.training.refusals import refusals
from nodekit.training.reporting.trackers import TRACKERS

LINEAR_LR_BATCH = 256
"""The batch that ``--lr`` is meant for under ``--lr-scale``."""
_LR_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line; ``--help`` says what each is."""

    task: str
    data: str | None
    model: str | None
    init_from: Path | None
    ignore_mismatched_sizes: bool
    engine: str
    zero: int | None
    deepspeed_config: Path | None
    launcher: str
    nproc_per_node: int | None
    init_method: str
    backend: str
    epochs: int
    batch_size: int
    micro_batch: int | None
    accumulate: int | None
    lr: float
    lr_scale: str
    schedule: str
    warmup_steps: int | None
    clip: float | None
    amp: str
    sync_bn: bool
    compile: bool
    compress: str
    find_unused: bool
    local_sgd: int | None
    diloco: int | None
    outer_lr: float
    outer_momentum: float
    seed: int
    eval_every: int | None
    best: str
    snapshot_every: int | None
    snapshot_seconds: float | None
    """None: as often as pays, by what a snapshot costs."""
    keep: int
    snapshot_format: str
    track: str | None
    num_workers: int
    output: Path | None
    timeout: float
    grace: float

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up, scaling included.

        The number of ranks is not in it, since the global batch stays the same whatever that is.
        """
        factor: float = (self.batch_size / LINEAR_LR_BATCH) ** _LR_EXPONENTS[self.lr_scale]
        return self.lr * factor

    @property
    def steps_apart(self) -> int | None:
        """How many steps the ranks make by themselves under ``--local-sgd`` or ``--diloco``; None: not one."""
        return self.local_sgd or self.diloco

    def largest_micro_batch(self, world_size: int) -> int | None:
        """Most samples a rank computes at once, by ``--micro-batch`` or ``--accumulate``; None for no limit."""
        if self.accumulate is None:
            return self.micro_batch
        return -(-self.batch_size // (world_size * self.accumulate))

    def lr_factor(self, step: int, total_steps: int) -> float:
        """What ``peak_lr`` is multiplied by in step ``step`` (from 0) of ``total_steps``."""
        warmup = total_steps // 20 if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, total_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class OptionsError(ValueError):
    """Options that are not right; the message is a line for users, with the program's name before it."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, since every rank says it, and names the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        known = [
            option for action in self._actions for option in action.option_strings if option.startswith("--")
        ]
        if message.startswith("unrecognized arguments: "):
            given = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
            near = get_close_matches(given, known, n=1)
            message += f"{f' (did you mean {near[0]}?)' if near else ''}; the options are: {', '.join(known)}"
        raise OptionsError(f"{self.prog}: {message}")


def parse(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """As ``read``; ends the process with 2 where something is not right."""
    try:
        return read(arguments, environ)
    except OptionsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def read(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Read the command line (default: this process's).

    Defaults that kit gives in ``environ`` (default: this process's): ``NODEKIT_SNAPSHOT_EVERY``, as
    ``--snapshot-seconds``, and ``NODEKIT_COLLECTIVE_TIMEOUT_S``, as ``--timeout``.

    Raises:
        OptionsError: something is not right with it.
        SystemExit: with 0, after ``--help``.
    """
    env = os.environ if environ is None else environ
    parser = _Parser(
        prog="python -m nodekit.training",
        description="Train a task on all ranks, by kit, torchrun or alone, from its newest snapshot on.",
        epilog="engines:\n" + "\n".join(f"  {name:<20}  {text}" for name, text in ENGINES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--task",
        default="digits",
        help="digits, mnist, text, or yours: package.module:Task, path/to/file.py:Task (default: %(default)s)",
    )
    what.add_argument(
        "--data", metavar="DIR", help="the task's data, for mnist and text (default: what comes with kit)"
    )
    what.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="a BERT to begin with, for text: a folder, or its name at the hub (default: a small random one)",
    )
    what.add_argument(
        "--init-from",
        type=Path,
        metavar="PATH",
        help="weights to begin with where there is no snapshot yet: a folder that a run has written (output/best, "
        "output/last), or a file of a state dict",
    )
    what.add_argument(
        "--ignore-mismatched-sizes",
        action="store_true",
        default=False,
        help="of --init-from or --model, take the weights whose shapes fit, and list the others",
    )
    what.add_argument(
        "--engine",
        choices=list(ENGINES),
        default=next(iter(ENGINES)),
        metavar="NAME",
        help="the way to train: one of those below (default: %(default)s)",
    )
    what.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        help="for deepspeed: what is spread over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients too, "
        "3 weights too (default: 1)",
    )
    what.add_argument(
        "--deepspeed-config",
        type=Path,
        metavar="FILE",
        help="for deepspeed: your own JSON, for what is no option here",
    )
    what.add_argument(
        "--epochs",
        type=_whole(1),
        default=20,
        metavar="N",
        help="times through the training data (default: %(default)s)",
    )
    what.add_argument(
        "--seed",
        type=_whole(0),
        default=0,
        metavar="N",
        help="of weights, order and augmentation (default: %(default)s)",
    )
    what.add_argument(
        "--num-workers",
        type=_whole(0),
        default=0,
        metavar="N",
        help="processes loading data, per rank (default: %(default)s)",
    )
    start = parser.add_argument_group("how it is started")
    start.add_argument(
        "--launcher",
        choices=["torchrun", "spawn"],
        default="torchrun",
        help="who starts the ranks: torchrun (or kit), or this process itself, those of one machine, without "
        "restarts (default: %(default)s)",
    )
    start.add_argument(
        "--nproc-per-node",
        type=_whole(1),
        metavar="N",
        help="for --launcher spawn: how many ranks (default: one for each GPU, else 1)",
    )
    start.add_argument(
        "--init-method",
        type=_init_method,
        default="env://",
        metavar="URL",
        help="where the ranks meet: env://, tcp://HOST:PORT or file:///PATH (default: %(default)s)",
    )
    start.add_argument(
        "--backend",
        choices=["auto", "gloo", "nccl", "mpi"],
        default="auto",
        help="how they talk: auto is nccl where there are GPUs, else gloo (default: %(default)s)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--batch-size",
        type=_whole(1),
        default=64,
        metavar="N",
        help="samples per step over all ranks together (default: %(default)s)",
    )
    parts = how.add_mutually_exclusive_group()
    parts.add_argument(
        "--micro-batch",
        type=_whole(1),
        metavar="N",
        help="most samples a rank computes at once; more are accumulated (default: no limit)",
    )
    parts.add_argument(
        "--accumulate",
        type=_whole(1),
        metavar="N",
        help="or into how many parts, computed one after the other, it divides its share of a batch (default: 1)",
    )
    how.add_argument(
        "--lr", type=_positive, default=0.003, metavar="X", help="peak learning rate (default: %(default)s)"
    )
    how.add_argument(
        "--lr-scale",
        choices=list(_LR_EXPONENTS),
        default="none",
        help=f"--lr is for a batch of {LINEAR_LR_BATCH} and scaled to ours, linearly or by the square root "
        "(default: %(default)s)",
    )
    how.add_argument(
        "--schedule",
        choices=["cosine", "constant"],
        default="cosine",
        help="after the warm-up (default: %(default)s)",
    )
    how.add_argument(
        "--warmup-steps",
        type=_whole(0),
        metavar="N",
        help="steps of linear warm-up (default: 5%% of all)",
    )
    how.add_argument(
        "--clip", type=_positive, metavar="X", help="largest norm of the gradient (default: no limit)"
    )
    how.add_argument(
        "--amp", choices=["off", "bf16", "fp16"], default="off", help="mixed precision (default: %(default)s)"
    )
    how.add_argument(
        "--sync-bn",
        action="store_true",
        default=False,
        help="batch norm over all ranks' samples (CUDA only)",
    )
    how.add_argument(
        "--compile",
        action="store_true",
        default=False,
        help="torch.compile the model; the first steps take longer (needs a C++ compiler on a CPU)",
    )
    how.add_argument(
        "--compress",
        choices=["off", "bf16", "fp16", "powersgd"],
        default="off",
        help="gradients are sent in half as many bits, or as products of thin matrices, with what that "
        "leaves out added to the next ones (default: %(default)s)",
    )
    how.add_argument(
        "--find-unused",
        action="store_true",
        default=False,
        help="the loss may leave out parameters, other ones in each step; slower",
    )
    apart = how.add_mutually_exclusive_group()
    apart.add_argument(
        "--local-sgd",
        type=_whole(1),
        metavar="H",
        help="for slow networks: ranks make H steps each by itself, and then take the mean of their weights",
    )
    apart.add_argument(
        "--diloco",
        type=_whole(1),
        metavar="H",
        help="likewise, with a step of SGD with momentum towards that mean (DiLoCo)",
    )
    how.add_argument(
        "--outer-lr", type=_positive, default=0.7, metavar="X", help="DiLoCo's step (default: %(default)s)"
    )
    how.add_argument(
        "--outer-momentum",
        type=_share,
        default=0.5,
        metavar="X",
        help="DiLoCo's momentum, from 0 and below 1; its authors took 0.9, for long runs (default: %(default)s)",
    )
    looks = parser.add_argument_group("how it is judged")
    looks.add_argument(
        "--eval-every",
        type=_whole(1),
        metavar="N",
        help="evaluate after every N steps too (default: after each epoch)",
    )
    looks.add_argument(
        "--best",
        default="auto",
        metavar="NAME|off",
        help="keep the weights with the greatest measure NAME (or the least, of a loss) in output/best; auto: "
        "accuracy, or else loss, where the task measures it (default: %(default)s)",
    )
    keep = parser.add_argument_group("what is kept")
    keep.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="for curves, result and snapshots (default: $NODEKIT_OUTPUT_DIR, else runs/ID)",
    )
    keep.add_argument(
        "--track",
        choices=list(TRACKERS),
        help="tell this service, too, from rank 0: one run there over all restarts; as its own variables say "
        "(WANDB_API_KEY, WANDB_PROJECT; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)",
    )
    every = keep.add_mutually_exclusive_group()
    every.add_argument(
        "--snapshot-every", type=_whole(1), metavar="N", help="steps from one snapshot to the next"
    )
    every.add_argument(
        "--snapshot-seconds",
        type=_auto_or_positive,
        default=_default(parser, env, "NODEKIT_SNAPSHOT_EVERY", _auto_or_positive, None),
        metavar="T",
        help="or seconds from one to the next; auto: as often as pays, by what they cost "
        "(default: $NODEKIT_SNAPSHOT_EVERY, else auto)",
    )
    keep.add_argument(
        "--keep",
        type=_whole(2),
        default=2,
        metavar="N",
        help="snapshots to keep, 2 or more (default: %(default)s)",
    )
    keep.add_argument(
        "--snapshot-format",
        choices=["whole", "sharded"],
        default="whole",
        help="for fsdp: sharded is a file from each rank, by torch.distributed.checkpoint; they need one folder, so "
        "one node or a shared one (default: %(default)s)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--timeout",
        type=_positive,
        default=_default(parser, env, "NODEKIT_COLLECTIVE_TIMEOUT_S", _positive, 600.0),
        metavar="S",
        help="seconds to wait for the slowest rank (default: $NODEKIT_COLLECTIVE_TIMEOUT_S, else 600)",
    )
    limits.add_argument(
        "--grace",
        type=_positive,
        default=20.0,
        metavar="S",
        help="seconds from SIGTERM or SIGUSR2 to the end, snapshot or not (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    options = Options(**vars(given))
    for reason in refusals(options, env):
        parser.error(reason)
    return options


def _whole(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return whole


def _share(text: str) -> float:
    number = _float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 and below 1")
    return number


def _init_method(text: str) -> str:
    try:
        InitMethod.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _default(
    parser: _Parser,
    env: Mapping[str, str],
    name: str,
    read: Callable[[str], float | None],
    without: float | None,
) -> float | None:
    try:
        return read(env[name]) if env.get(name) else without
    except argparse.ArgumentTypeError as error:
        parser.error(f"{name}: {error}")


def _auto_or_positive(text: str) -> float | None:
    try:
        return None if text == "auto" else _positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def _positive(text: str) -> float:
    number = _float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
