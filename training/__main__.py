"""``python -m nodekit.training``: train a task; see ``--help``."""

import gc
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.training.options import Options, parse
from nodekit.training.refusals import ONE_FOLDER
from nodekit.training.reporting.trackers import TRACKERS, lacking
from nodekit.training.stop import Stop, leave

if TYPE_CHECKING:
    from nodekit.training.spawn import Parent
    from nodekit.training.tasks import Task
    from nodekit.training.world import World

_NAME = "python -m nodekit.training"
_LASTING: list[object] = []
"""What is not to be freed before the process ends.

To free DDP's part of a process group, torch 2.13 joins gloo's threads while it holds the GIL, and one of them may wait
for that very GIL, to let go of the last collective: the process then hangs for ever, in 1 run of 30.
"""


def main() -> int:
    """Train; gives the exit status.

    0 trained to the end, 1 failed, 2 bad options, 130 stopped by Ctrl-C, 143 stopped by SIGTERM or SIGUSR2, with a
    snapshot, 144 fenced: a newer generation has taken over.
    """
    options = parse()
    if options.launcher == "torchrun":
        return train(options)
    from nodekit.training import spawn

    try:
        num_ranks = spawn.num_ranks(options)
        # What all ranks would refuse is said once, here.
        world, _ = _check(options, spawn.environ_to_check(os.environ, num_ranks))
        spawn.check_address(world.init_method)
    except (ValueError, FileNotFoundError) as error:
        return _refused(error)
    # A folder that is named by the time is the same for all.
    options = replace(options, output=_output_folder(options, world))
    return spawn.run(options)


def _check(options: Options, environ: Mapping[str, str] | None = None) -> tuple["World", "Task"]:
    """Who this rank is and what it trains.

    Raises:
        ValueError: that cannot be done here; before any rank waits for another.
        FileNotFoundError: likewise.
    """
    from nodekit.training.engines import check_engine
    from nodekit.training.tasks import load_task
    from nodekit.training.world import World

    world = World.from_env(
        environ, timeout_s=options.timeout, init_method=options.init_method, backend=options.backend
    )
    if options.sync_bn and world.device.type == "cpu":
        raise ValueError("--sync-bn needs CUDA: torch has no SyncBatchNorm for the CPU")
    check_engine(options, world.device.type)
    if problem := lacking(options.track, [name for name in TRACKERS if importlib.util.find_spec(name)]):
        raise ValueError(problem)
    is_many = world.world_size > world.local_world_size
    if options.snapshot_format == "sharded" and is_many and not world.snapshot_is_shared:
        raise ValueError(
            "--snapshot-format sharded needs one folder that all ranks see, and every node has its own: "
            f"{ONE_FOLDER}"
        )
    in_part = (
        options.ignore_mismatched_sizes and options.model is not None
    )  # else it is for --init-from alone
    task = load_task(options.task, data=options.data, model=options.model, ignore_mismatched_sizes=in_part)
    return world, task


def _refused(error: Exception) -> int:
    print(f"{_NAME}: {error}", file=sys.stderr)
    return 2


def train(options: Options, parent: "Parent | None" = None) -> int:
    """Train as one rank, perhaps a spawned one, and give the exit status."""
    # Nothing of what is imported is garbage, and looking for some takes a fifth of the imports' time.
    gc.disable()
    # Torch is the slow one: not for --help, nor for a mistyped option.
    from nodekit.training.loop import Loop
    from nodekit.training.snapshots.fence import EXIT_FENCED, Fenced

    logging.basicConfig(format="nodekit: %(message)s", level=logging.WARNING)
    try:
        world, task = _check(options)
    except (ValueError, FileNotFoundError) as error:
        return _refused(error)
    gc.freeze()
    gc.enable()
    with world, Stop(options.grace) as stop:
        loop = None
        try:
            if parent is not None:
                parent.stops_by(stop)
            loop = Loop(options, world, task, _output_folder(options, world), stop)
            _LASTING.append(loop)
            gc.freeze()  # nor what libraries bring: the Trainer has all garbage collected before each epoch
            result = loop.run()
            world.close()  # here, where it cannot take longer than the grace if a signal comes
        except Fenced as error:
            stop.end_within_grace(EXIT_FENCED)
            print(f"nodekit: {error}", file=sys.stderr)
            world.close()
            return EXIT_FENCED
        except Exception as error:
            _LASTING.append(error)  # its traceback has the frames that have it all
            code = stop.exit_code if stop.requested else 1
            stop.end_within_grace(code)  # a peer that is gone may keep the process group from closing
            if stop.requested:
                print(f"nodekit: stopped, but without a snapshot of this step: {error}", file=sys.stderr)
            elif parent is None or parent.is_first():
                _record(error)
            if loop is not None:
                loop.saver.settle()  # a snapshot on its way to the disk is work saved
            world.close()
            return code
        return stop.exit_code if result is None else 0


def _record(error: Exception) -> None:
    """Say what failed on this rank: in full on stderr, and to torchrun's agent where it has asked for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from nodekit.training.engines import EngineError

    get_error_handler().record_exception(error)
    is_worded = isinstance(error, ValueError) and error.__cause__ is not None
    if is_worded or isinstance(error, EngineError):  # for users
        print(f"{_NAME}: {error}", file=sys.stderr)
    else:
        logging.getLogger("nodekit.training").error("this rank failed", exc_info=error)


def _output_folder(options: Options, world: "World") -> Path:
    """This node's folder: as told, or one below the working folder that a restart by torchrun finds again."""
    if options.output is None and world.output_dir is not None:
        return world.output_dir
    folder = options.output or Path("runs", world.run_id or time.strftime("%Y%m%d-%H%M%S"))
    return folder / f"node{world.node_rank}" if world.node_rank else folder


if __name__ == "__main__":
    leave(main())
