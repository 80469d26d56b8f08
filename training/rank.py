"""Run one rank, from its options to its exit status."""

import gc
import importlib.util
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.training.errors import TrainingError, log_to_stderr, refuse_unsafe
from nodekit.training.folder import InUse, default_folder, held
from nodekit.training.options.options import Options
from nodekit.training.process.stop import EXIT_STOPPED, Interruptible, Stop
from nodekit.training.reporting.trackers import TRACKERS, lacking

if TYPE_CHECKING:
    from nodekit.training.loop import Loop
    from nodekit.training.process.kept import Kept
    from nodekit.training.steps.not_finite import NotFinite
    from nodekit.training.tasks import Task
    from nodekit.training.world import World

_NAME = "python -m nodekit.training"
_MOST_ROLLBACKS = 5
"""How often ``--on-nan rollback`` goes back within an epoch's steps; after more, the training itself diverges.

A single bad sample causes one rollback per epoch: it returns in each epoch, in another batch.
"""
_KEPT_ALIVE: list[object] = []
"""Objects that must not be freed before the process ends.

When torch 2.13 frees DDP's part of a process group, it joins gloo's threads while it holds the GIL. One of these may
wait for the GIL to release the last collective: the process then hangs forever, in 1 run of 30.
"""


class Parent:
    """A spawned rank's connection to the process that started it: when to stop, and which rank reports an error."""

    def __init__(self, stop_pipe: Connection, first: Lock) -> None:
        """``stop_pipe`` is closed when ranks are to stop or the parent dies; the rank that gets ``first`` reports."""
        self._stop_pipe, self._first = stop_pipe, first
        self._stop: Stop | None = None
        threading.Thread(target=self._watch, name="nodekit-parent", daemon=True).start()

    def stops_by(self, stop: Stop) -> None:
        """From now on, request a stop at the end of a step; before this call, the process ends at once."""
        self._stop = stop

    def is_first(self) -> bool:
        """Whether this is the first rank that failed; the others fail as a consequence, and need not report it."""
        return self._first.acquire(block=False)

    def _watch(self) -> None:
        with suppress(EOFError, OSError):  # nothing is ever sent: this returns when the pipe is closed
            self._stop_pipe.recv_bytes()
        if self._stop is None:
            os._exit(EXIT_STOPPED)
        self._stop.request()


def check(options: Options, environ: Mapping[str, str] | None = None) -> tuple["World", "Task"]:
    """Return which rank this is and what it trains, or refuse the options before any rank waits for another.

    Raises:
        ValueError: the options cannot be followed on this machine.
        FileNotFoundError: a file that the options name is missing.
    """
    import torch

    from nodekit.training.engines.load import check_engine
    from nodekit.training.process import rng
    from nodekit.training.tasks import MEASURES, task_of
    from nodekit.training.weights.best import no_such_measure

    refuse_unsafe(torch.__version__)
    world = _world(options, environ)
    if options.gpus:
        _check_gpus(options.gpus, torch.cuda.device_count(), world.local_world_size, options.engine)
    if options.sync_bn and world.device.type == "cpu":
        raise ValueError("--sync-bn needs CUDA: torch has no SyncBatchNorm for the CPU")
    check_engine(options, world.device.type)
    if problem := lacking(options.track, [name for name in TRACKERS if importlib.util.find_spec(name)]):
        raise ValueError(problem)
    rng.seed_all(options.seed, rank=0)  # a task may split its data at random, the same way on all ranks
    task = task_of(options)
    if options.best not in ("auto", "off", *MEASURES) and not callable(getattr(task, "measure", None)):
        raise ValueError(no_such_measure(options.best, MEASURES))
    return world, task


def _world(options: Options, environ: Mapping[str, str] | None = None) -> "World":
    from nodekit.training.world import World

    env = os.environ if environ is None else environ
    num_tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    # With an --output of its own for each task, training alone may be intended.
    trains_apart = "RANK" not in env and num_tasks.isdecimal() and int(num_tasks) > 1
    if trains_apart and options.output is None:
        raise ValueError(
            f"this is one of {num_tasks} tasks of srun, and RANK is not set: each would train alone, into the same "
            "files; start torchrun in one task per node (srun --ntasks-per-node=1 torchrun … -m nodekit.training), use "
            "kit up, or give each an --output of its own"
        )
    return World.from_env(
        environ, timeout_s=options.timeout, init_method=options.init_method, backend=options.backend
    )


def _check_gpus(gpus: Sequence[int], num_visible: int, num_ranks: int, engine: str) -> None:
    """Refuse ``--gpus`` if some of the GPUs do not exist, or this node's ranks would not use them."""
    given = f"--gpus {','.join(map(str, gpus))}"
    if num_visible != len(gpus):
        raise ValueError(
            f"{given}: torch sees {num_visible} of these {len(gpus)} GPUs; nvidia-smi lists those of this machine, and "
            "torch has to be a build for CUDA"
        )
    if engine != "dp" and num_ranks < len(gpus):
        raise ValueError(
            f"{given}: {num_ranks} rank{'s' * (num_ranks > 1)} of --engine {engine} would use {num_ranks} of these "
            f"{len(gpus)} GPUs; start a rank for each (--launcher spawn does), or take --engine dp"
        )


def refused(error: Exception) -> int:
    """Print why the options cannot be followed here, and return the exit status 2."""
    print(f"{_NAME}: {error}", file=sys.stderr)
    return 2


def train(options: Options, parent: Parent | None = None) -> int:
    """Train as one rank, perhaps a spawned one, and return the exit status."""
    # The imports leave no garbage, and garbage collection takes a fifth of their time.
    gc.disable()
    # Importing torch is slow, so --help and a mistyped option must not wait for it.
    from nodekit.training import loop  # noqa: F401  # before gc.freeze
    from nodekit.training.attempts import reform
    from nodekit.training.attempts.standby import get_ready
    from nodekit.training.imports import import_all, imports_of
    from nodekit.training.reporting import node_lines

    log_to_stderr()
    try:
        world, task = check(options)
    except (ValueError, FileNotFoundError) as error:
        return refused(error)
    import_all(imports_of(options))
    if world.standby_world_size is not None:
        get_ready(options, world, task)
        world = reform.attempt_of(world, lambda: _world(options))
    gc.freeze()
    gc.enable()
    if not _prints(world):
        return _train(options, world, task, parent)
    folder = output_folder(options, world)  # the same in all attempts: without kit there is only one
    try:
        # A folder from the environment belongs to one run already, and NFS may keep a lost node's lock for a while.
        with held(folder) if world.output_dir is None else nullcontext():
            print(node_lines.start(world, folder, engine=options.engine), flush=True)
            code = _train(options, world, task, parent)
    except InUse as error:
        return refused(error)
    if text := node_lines.end(world, folder, exit_status=code, early_stop=options.early_stop):
        print(text, flush=True)
    return code


def _prints(world: "World") -> bool:
    """Whether this rank prints its node's lines; without kit, each node's first rank does."""
    return world.is_first_on_node and not world.is_by_kit


def _train(options: Options, world: "World", task: "Task", parent: Parent | None) -> int:
    """Join the process group, train in one or several attempts, and return the exit status."""
    from nodekit.training.attempts import reform
    from nodekit.training.process import malloc

    # With a GPU, the process would keep the memory of weights that it has moved there.
    if world.device.type == "cpu":
        malloc.keep_freed_memory()
    world = replace(world, may_stay=reform.can_go_on(options, world))
    if world.may_stay:
        reform.pause_later(world)
    with ExitStack() as stack:
        with _interruptible(world, parent):
            stack.enter_context(world)
        stop = stack.enter_context(Stop(options.grace))
        if parent is not None:
            parent.stops_by(stop)
        return reform.run(
            world,
            stop,
            lambda: _world(options),
            lambda each: _attempt(options, each, task, stop, parent),
            lambda each: reform.can_go_on(options, each),
        )


def _interruptible(world: "World", parent: Parent | None) -> AbstractContextManager[object]:
    """Let Ctrl-C end this rank during the rendezvous if no launcher does so: kit and torchrun send SIGTERM."""
    from torch.distributed import is_torchelastic_launched

    if not world.launched or world.is_by_kit or parent is not None or is_torchelastic_launched():
        return nullcontext()
    return Interruptible(f"rank {world.rank} of {world.world_size} waited for the others at {world.meets_at}")


def _attempt(
    options: Options, world: "World", task: "Task", stop: Stop, parent: Parent | None
) -> "int | Kept":
    """Train for one attempt, from ``world.kept`` if there is one; return the exit status, or a step to go on from."""
    from nodekit.training.attempts import reform
    from nodekit.training.process.stages import KEEPING
    from nodekit.training.reporting import node_lines
    from nodekit.training.snapshots.emergency import why_over
    from nodekit.training.snapshots.files.fence import EXIT_FENCED, Fenced

    loops: list[Loop] = []
    try:
        if world.kept is not None:
            with reform.guarded(world, stop):
                world.__enter__()
        if _prints(world) and (text := node_lines.met(world)):
            print(text, flush=True)
        folder = output_folder(options, world)  # this node's number may have changed since the last attempt
        result = _run_loops(loops, options, world, task, folder, stop)
        if result is None and loops[-1].is_paused and (kept := loops[-1].keep()):
            _forget(loops.pop())
            kept.has_paused = True
            return kept
        world.close()  # within Stop: if a signal comes, it cannot take longer than the grace
        return stop.exit_code if result is None else 0
    except Exception as error:
        loop = loops.pop() if loops else None
        why = why_over(error)
        kept = _last_step(world, loop) if why else None
        if kept is not None and not stop.requested and world.may_stay:
            # From here on, this rank does not listen to its agent until it waits for the next attempt.
            world.stage(KEEPING, step=kept.age[1])
            said = str(error).partition("\n")[0]  # NCCL's message has four lines; the first one is enough
            print(f"nodekit: {why}: waiting with step {kept.age[1]} ({said})", file=sys.stderr)
            traceback.clear_frames(error.__traceback__)
            if loop is not None:
                _forget(loop)
            return kept
        if isinstance(error, Fenced):
            stop.end_within_grace(EXIT_FENCED)
            print(f"nodekit: {error}", file=sys.stderr)
            if kept is not None and world.may_stay:  # it is to stop; see `EmergencySave.keep`
                kept.save()
            world.close()
            return EXIT_FENCED
        if why:
            no_step = "it is to stop" if stop.requested else "it has no whole step"
            print(
                f"nodekit: {why}, and this rank ends: {reform.why_ends(options, world) or no_step}",
                file=sys.stderr,
            )
        _KEPT_ALIVE.append(error)  # its traceback refers to all frames, and so to DDP
        code = stop.exit_code if stop.requested else 1
        stop.end_within_grace(code)  # a lost rank may keep the process group from closing
        if not stop.requested and (parent is None or parent.is_first()):
            _report(error)
        is_saved = kept is not None and kept.save()
        if loop is not None:
            loop.saver.settle()  # let a snapshot that is being written finish
        # Spawned ranks are also stopped when one of them has failed, and that rank has reported already.
        if stop.requested and not is_saved and (parent is None or parent.is_first()):
            print(f"nodekit: stopped, but without a snapshot of this step: {error}", file=sys.stderr)
        world.close()
        return code


def _last_step(world: "World", loop: "Loop | None") -> "Kept | None":
    """Leave the process group, since another rank is lost, and return the newest whole step in memory, if any."""
    world.leave_others()
    if loop is None:  # the error came before the loop was made: the earlier attempt's step may still be held
        return world.held_step
    try:
        return loop.keep()
    except Exception as unmade:  # only logged: the caller reports the error that ended the attempt
        logging.getLogger("nodekit.training").warning("no step is kept: %s", unmade)
        return None


def _run_loops(
    loops: "list[Loop]",
    options: Options,
    world: "World",
    task: "Task",
    folder: Path,
    stop: Stop,
) -> dict[str, Any] | None:
    """Train to the end and return the result, going back to a snapshot by ``--on-nan rollback`` if need be.

    ``loops`` holds the present loop, also after an error.
    """
    from nodekit.training.attempts import reform
    from nodekit.training.loop import Loop
    from nodekit.training.steps.not_finite import NotFinite

    left_out: set[tuple[int, int]] = set()
    bad_steps: list[int] = []
    while True:
        with reform.guarded(world, stop):
            loop = Loop(options, world, task, folder, stop, without=left_out)
        if world.kept is not None:
            world.kept.release()  # the loop has loaded the step
        loops.append(loop)
        _KEPT_ALIVE.append(loop)
        try:
            return loop.run()
        except NotFinite as error:
            an_epoch_ago = error.step - loop.sampler.steps_per_epoch
            _judge(error, options, world, 1 + sum(step > an_epoch_ago for step in bad_steps))
            bad_steps.append(error.step)
            left_out.update(error.batches)
        loops.remove(loop)
        loop.saver.settle()  # the next loop begins with the newest snapshot
        _forget(loop)
        del loop
        gc.collect()  # the next loop needs the memory


def _judge(error: "NotFinite", options: Options, world: "World", number: int) -> None:
    """Report the error to kit, and raise it again unless training is to go back to a snapshot.

    ``number`` counts the rollbacks within an epoch's steps, this one included.
    """
    from nodekit.training.reporting.tell import tell

    why = ""
    if options.on_nan == "stop":
        why = "--on-nan stop"
    elif number > _MOST_ROLLBACKS:
        why = f"--on-nan rollback has gone back {_MOST_ROLLBACKS} times within an epoch's steps already"
    elif not error.batches:
        why = "it was so in the snapshot already"
    if world.is_main:
        tell(world, "not-finite", step=error.step, action="stop" if why else "rollback", **error.fields)
    if why:
        raise error.final(why)
    if world.is_main:
        batches = ", ".join(f"epoch {epoch + 1} sample {offset}" for epoch, offset in error.batches)
        nth = f"{number} of {_MOST_ROLLBACKS} within an epoch's steps"
        print(
            f"{error}: back to the newest snapshot ({nth}), without the batch that begins at {batches} of the shuffled "
            "data",
            flush=True,
        )


def _forget(loop: "Loop") -> None:
    """Let a loop be freed, but not its group for snapshots, whose last collective may still be running."""
    _KEPT_ALIVE.remove(loop)
    _KEPT_ALIVE.append(loop.saver.snapshots.peers)


def _report(error: Exception) -> None:
    """Write to stderr why this rank failed, and to torchrun's error file if torchrun asked for one."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    if isinstance(error, TrainingError):
        print(f"{_NAME}: {error}", file=sys.stderr)
    else:
        logging.getLogger("nodekit.training").error("this rank failed", exc_info=error)


def output_folder(options: Options, world: "World") -> Path:
    """Return this node's output folder: by ``--output``, kit's, or one below ``runs`` that the same command reuses."""
    if options.output is None and world.output_dir is not None:
        return world.output_dir
    folder = options.output or default_folder(options, world.world_size)
    return folder / f"node{world.node_rank}" if world.node_rank else folder
