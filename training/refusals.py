"""Options that exclude each other, and why; known before anything is started."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nodekit.training.engines import ALONE, ENGINES

if TYPE_CHECKING:
    from nodekit.training.options import Options

_ALONE = dict.fromkeys(ALONE, "is one process, with nobody to exchange anything with")
_SPREADS = "has no whole model on each rank, whose weights could be averaged"
_PLAIN = "sends gradients as they are"

ONE_FOLDER = (
    "give all nodes one folder (with kit snapshots: {shared: /path}; else NODEKIT_SNAPSHOT_SHARED=1 and the same "
    "NODEKIT_SNAPSHOT_DIR), or take --snapshot-format whole"
)
"""What sharded snapshots need, beyond what options can tell."""


def refusals(options: "Options", environ: Mapping[str, str]) -> Iterator[str]:
    """Each a sentence for the user; none where all is right.

    Args:
        options: as they were given.
        environ: of a rank, or of who is to start the ranks.
    """
    for option, is_given, without in _by_engine(options):
        if is_given and options.engine in without:
            others = ", ".join(name for name in ENGINES if name not in without)
            yield f"{option}: the engine {options.engine} {without[options.engine]}; it is for --engine {others}"
    if options.steps_apart and (options.compress != "off" or options.find_unused):
        option = "--compress" if options.compress != "off" else "--find-unused"
        yield f"{option}: with --local-sgd or --diloco no gradients are sent; leave one of them out"
    if options.ignore_mismatched_sizes and not (options.init_from or options.model):
        yield "--ignore-mismatched-sizes is for --init-from or --model, and neither is given"
    if options.nproc_per_node and options.launcher != "spawn":
        yield "--nproc-per-node is for --launcher spawn; torchrun and kit are told it themselves"
    yield from _by_ranks(options, environ)


def _by_engine(options: "Options") -> Iterator[tuple[str, object, Mapping[str, str]]]:
    """Option, whether it is given, and the engines that do without it, with the reason."""
    yield "--zero", options.zero is not None, _all_but("deepspeed", "has no stages of ZeRO")
    yield "--deepspeed-config", options.deepspeed_config, _all_but("deepspeed", "does not read it")
    sharded = options.snapshot_format == "sharded"
    yield "--snapshot-format sharded", sharded, _all_but("fsdp", "has no shards")
    finds = dict.fromkeys(("fsdp", "deepspeed", "horovod"), "finds them without being told")
    yield "--find-unused", options.find_unused, {**_ALONE, **finds}
    plain = {**_ALONE, "fsdp": _PLAIN, "deepspeed": _PLAIN}
    yield "--compress fp16", options.compress == "fp16", plain
    fp16_alone = {**plain, "horovod": "has fp16 alone"}
    yield f"--compress {options.compress}", options.compress in ("bf16", "powersgd"), fp16_alone
    apart = "--local-sgd" if options.local_sgd else "--diloco"
    yield apart, options.steps_apart, {**_ALONE, "fsdp": _SPREADS, "deepspeed": _SPREADS}
    yield "--sync-bn", options.sync_bn, _ALONE
    wrong = {
        "dp": "copies the model in each step",
        "deepspeed": "makes wrong steps of a compiled model (tried with 0.19.8)",
    }
    yield "--compile", options.compile, wrong


def _by_ranks(options: "Options", environ: Mapping[str, str]) -> Iterator[str]:
    """What does not go with the number of ranks, or with who starts them."""
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


def _all_but(engine: str, reason: str) -> dict[str, str]:
    return {name: reason for name in ENGINES if name != engine}
