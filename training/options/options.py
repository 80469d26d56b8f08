"""The options of ``python -m nodekit.training``, each declared once, and values computed from them.

Such values are the learning rate of a step and the size of micro-batches. ``arguments.py`` reads the options.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nodekit.training.engine_info import ALONE, ENGINES
from nodekit.training.options import values
from nodekit.training.reporting.trackers import TRACKERS

LINEAR_LR_BATCH = 256
"""The batch size for which ``--lr`` is given with ``--lr-scale``."""
_LR_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}

ALL_EPOCHS = sys.maxsize
"""The value of ``--save-every-epoch`` without a number."""


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
        default: of the field; ``--help`` shows it unless it is None or False, or ``about`` states a default.
        about: the text for ``--help``.
        either: the name of a group whose options exclude each other.
        env: an environment variable that replaces the default if it is set.
        without: engine → why that engine cannot do what the option asks for.
        may_change: whether a run may go on from a snapshot taken with another value (see `folder.default_folder`).
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


_REFORMING = tuple(name for name, info in ENGINES.items() if info.reforms)
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

    on_lost_rank: str = _how(
        "reform",
        "when another rank is lost, under kit: save the last step and be started again, or keep it in memory, wait for "
        f"the other nodes and go on in the same process (engines {', '.join(_REFORMING)}; elsewhere "
        "restart)",
        choices=["restart", "reform"],
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
        "keep the weights with the greatest measure NAME (of a loss or an error the least) in output/best; auto: "
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
    """Seconds; None for auto."""
    keep: int = _kept(2, "snapshots to keep, 2 or more", type=values.whole(2), metavar="N")
    snapshot_format: str = _kept(
        "auto",
        "for fsdp: sharded is a file from each rank, by torch.distributed.checkpoint, kept on its node and the next "
        "one where nodes have no folder in common; whole is all of the state on each node; auto is sharded",
        choices=["auto", "whole", "sharded"],
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

        It does not depend on the number of ranks, since the global batch does not.
        """
        factor: float = (self.batch_size / LINEAR_LR_BATCH) ** _LR_EXPONENTS[self.lr_scale]
        return self.lr * factor

    @property
    def local_steps(self) -> int | None:
        """Steps from one average of the weights to the next with ``--local-sgd`` or ``--diloco``; None without."""
        return self.local_sgd or self.diloco

    @property
    def is_sharded(self) -> bool:
        """Whether each rank saves its own part of a snapshot (see ``snapshots.sharded``)."""
        return self.engine == "fsdp" and self.snapshot_format != "whole"

    def largest_micro_batch(self, world_size: int) -> int | None:
        """Return the most samples that a rank computes at once; None for no limit."""
        if self.accumulate is None:
            return self.micro_batch
        return -(-self.batch_size // (world_size * self.accumulate))

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Return the schedule's factor on ``peak_lr`` in step ``step`` (from 0) of ``total_steps``."""
        warmup = total_steps // 20 if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
