"""The training loop: one task on all ranks, from the newest snapshot to the last epoch."""

import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from nodekit.training import starting_point
from nodekit.training.data.evaluate import Evaluation, to_device
from nodekit.training.data.loading import load_training_data, loading, num_in
from nodekit.training.engine_info import ENGINES
from nodekit.training.engines import ShardedEngine, State
from nodekit.training.engines.load import begins_on_cpu, load_engine, own_optimizer
from nodekit.training.errors import TrainingError
from nodekit.training.group.collectives import NOT_SENT, broadcast_from_first, sent_buffers
from nodekit.training.options.options import Options
from nodekit.training.process import rng
from nodekit.training.process.kept import Kept
from nodekit.training.process.stages import KEEPING, PAUSING
from nodekit.training.process.stop import Stop
from nodekit.training.reporting.report import Report
from nodekit.training.reporting.waits import Waits
from nodekit.training.snapshots.emergency import LastWholeStep, why_over
from nodekit.training.snapshots.exchange import newest_of_all
from nodekit.training.snapshots.files.manifest import Loaded
from nodekit.training.snapshots.hostcopy import gather_for_others, holds_gathered, off_the_gpu
from nodekit.training.snapshots.opening import open_snapshots
from nodekit.training.snapshots.saver import Saver
from nodekit.training.steps.guarded import GuardedUpdates, can_guard, shared_flag
from nodekit.training.steps.local_sgd import LocalSgd
from nodekit.training.steps.not_finite import check_loss, check_weights
from nodekit.training.steps.optimizers import is_fused
from nodekit.training.steps.step_sums import Step, StepSums, part_of_loss
from nodekit.training.tasks import GIVEN, Task, optimizer_of
from nodekit.training.weights.best import Best
from nodekit.training.weights.digest import size_bytes, weights_sha256
from nodekit.training.weights.epochs import EpochWeights
from nodekit.training.world import World

log = logging.getLogger("nodekit.training")


class Loop:
    """Model, optimizer, data and snapshots of one rank; all ranks make the same steps."""

    def __init__(
        self,
        options: Options,
        world: World,
        task: Task,
        folder: Path,
        stop: Stop,
        *,
        without: Collection[tuple[int, int]] = (),
    ) -> None:
        """Create everything and load the newest snapshot, or the step that a rank has kept in memory.

        The process group exists already. ``without``: epoch and offset of each batch to leave out of the training.
        """
        self.options = options
        self.world = world
        self.task = task
        self.stop = stop
        world.stage("making the model and reading the data")
        optimizer = self._make_model()
        self.sampler, self.loader = load_training_data(options, world, task)
        rng.seed_all(options.seed, rank=1 + world.rank)
        self.is_sharded = options.is_sharded
        world.stage("looking for the newest snapshot")
        snapshots, writes = open_snapshots(folder, options, world)
        found = newest_of_all(snapshots, world, writes=writes, is_mapped=True)
        if found:
            world.stage("loading the snapshot")
        start = starting_point.load(found, options, self.module, optimizer, self.sampler)
        self.step, self.resumed_from = start.step, start.resumed_from
        self.sampler.leave_out(without)
        self.total_steps = self.step + self.sampler.steps_to(options.epochs)
        world.stage("making the engine")
        self._make_engine(found, optimizer)
        self._make_reporting(folder, {} if found is None else found.state.get("best", {}))
        for each in start.notes:
            self.report.say(each)
        self.last_whole_step = self._watch_updates(optimizer)
        self.saver = Saver(
            snapshots, world, self.report, writes=writes or self.is_sharded, every=options.snapshot_every,
            seconds=options.snapshot_seconds, trained_s=start.trained_s,
        )  # fmt: skip
        self._last_batch: tuple[int, int] | None = None  # of the last step whose loss is known
        is_guarded = self.last_whole_step.is_known_late
        self._sums = StepSums(
            world,
            getattr(self.engine, "start_sum", None),
            may_be_late=not options.local_steps,
            is_guarded=is_guarded,
        )
        self._is_prepared = False
        self._owes_snapshot = False
        self._saved_step: int | None = None
        self.is_paused = False
        """Whether the training has stopped without a snapshot, to go on in another attempt of the same processes."""
        self._is_asked_to_pause = False
        if found and world.may_stay:  # the step that was found may be in memory only
            world.settle()
            self._step_is_whole()
            self._prepare_snapshots()

    def _make_model(self) -> torch.optim.Optimizer:
        """Make the model, on its device, and return its optimizer."""
        options, device = self.options, self.world.device
        rng.seed_all(options.seed, rank=0)  # the same weights everywhere; engines send rank 0's anyway
        # Some engines share the weights out before they go to the device, which may have no room for the whole.
        self.module = self.task.model().to("cpu" if begins_on_cpu(options) else device)
        if options.sync_bn:
            self.module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
        fused = is_fused(options, device)
        optimizer = own_optimizer(options, self.module, fused=fused) or optimizer_of(
            self.task, self.module, options.peak_lr, fused=fused
        )
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        if self.world.aborts_nccl:
            # Rank 0's buffers are sent in each step. If that is cut off, it leaves garbage, and an index of garbage
            # ends CUDA in this process. Seeds and snapshots have made these equal.
            whole = [name for name, each in self.module.named_buffers() if not each.is_floating_point()]
            whole += getattr(self.module, NOT_SENT, ())  # what the task's model keeps apart itself
            setattr(self.module, NOT_SENT, whole)
        return optimizer

    def _make_engine(self, found: Loaded | None, optimizer: torch.optim.Optimizer) -> None:
        state = found.state if found else {}
        self.engine = load_engine(
            self.options,
            self.world,
            self.module,
            optimizer,
            state.get("scaler"),
            are_alike=found is not None and not found.shards,
        )
        if found and found.shards:
            cast(ShardedEngine, self.engine).load_shards(found)
        if self.options.compile:
            self.module.compile()  # in place, which keeps the names in its state dict
        reforms = ENGINES[self.options.engine].reforms
        self._sends_buffers = reforms and self.world.world_size > 1 and not self.options.local_steps
        self.local_sgd: LocalSgd | None = None
        if self.options.local_steps:
            self.local_sgd = LocalSgd(self.options, self.world, self.module, step=self.step)
            self.local_sgd.load(state.get("outer", {}))

    def _watch_updates(self, optimizer: torch.optim.Optimizer) -> LastWholeStep | GuardedUpdates:
        if self.world.aborts_nccl and can_guard(optimizer, scales=self.options.amp == "fp16"):
            flag = shared_flag(self.world.device)
            if all(self.world.gather(flag is not None)):  # all ranks read the sums of a step at the same time
                assert flag is not None
                return GuardedUpdates(self.module, optimizer, flag)
            if self.world.is_main:
                log.warning("each step waits for its gradients: not all GPUs can read their hosts' memory")
        return LastWholeStep(self.module)

    def _make_reporting(self, folder: Path, best: Mapping[str, Any]) -> None:
        """Create the report, the evaluation, and what keeps weights."""
        options, data = self.options, self.task.test_data()
        num_in(data, "test_data")  # before the report opens its files
        self.notes: list[str] = []
        if callable(notes := getattr(self.task, "notes", None)):
            # Only on rank 0: the task text reads all its texts for this.
            self.notes = self.world.gather([*map(str, notes())] if self.world.is_main else [])[0]
        facts = {name: getattr(options, name) for name in ("task", *GIVEN, "engine", "seed")}
        if self.notes:
            facts["notes"] = self.notes
        stops_early = options.early_stop is not None
        self.best = Best(options.best, folder, self.world, self.task, facts, stops_early=stops_early)
        self.best.load(best)
        self.epoch_weights = EpochWeights(options.save_every_epoch, folder, self.world)
        self.means: dict[str, float] = {}  # of the last evaluation
        is_within_epoch = self.sampler.steps_left > 0
        # A stop at a step leaves out its evaluation, and so does the loss of a rank; --early-stop counts it.
        is_left_out = bool(best) and is_within_epoch and self._evaluates and self.best.step != self.step
        self._evaluates_first = is_left_out or bool(self._why_early)
        self.report = Report(
            self.world,
            folder,
            step=self.step,
            total_steps=self.total_steps,
            is_evaluated=is_within_epoch and not self._evaluates_first,
            track=options.track,
            settings=asdict(options),
        )
        self.waits = Waits(self.world.device, self.world.progress_file, rank=self.world.rank)
        how = loading(options, self.world, self.task)
        self.evaluation = Evaluation(self.task, data, self.world, self.report, how, options.eval_batch_size)

    def run(self) -> dict[str, Any] | None:
        """Train to the end and return the result; None if stopped, with a snapshot of the last step."""
        with self.report, self._late_losses():
            self._say_what_begins()
            started_s, started_step = time.monotonic(), self.step
            self.world.stage("the first step")
            is_stopped = self._evaluates_first and not self._evaluate("at step")
            while not is_stopped and self.sampler.epoch < self.options.epochs and not self._why_early:
                if self._epoch():
                    is_stopped = not self._end_epoch()
                else:
                    is_stopped = not self._why_early
            if is_stopped:
                if not self.is_paused:  # else other nodes wait, and the writers go on in the background
                    if self._saved_step != self.step:  # a stop during an evaluation
                        self._save()
                    self.saver.wait()
                    self.best.wait()
                    self.epoch_weights.wait()
                why = ": another node comes in" if self.is_paused else ", to go on from there"
                self.report.say(f"stopped at step {self.step}/{self.total_steps}{why}")
                return None
            early = self._why_early
            if early:
                self.report.alive(at_once=True)
                self.report.say(f"ended early at step {self.step}/{self.total_steps}: {early}")
            self.saver.wait()
            self.epoch_weights.wait()
            weights = self.engine.weights()
            epochs = self.sampler.epoch + bool(early)
            self.best.write_last(weights, means=self.means, step=self.step, epoch=epochs)
            result = {
                **self.means,
                "steps": self.step,
                "epochs": epochs,
                **({"stopped_early": early} if early else {}),
                **({"notes": "; ".join(self.notes)} if self.notes else {}),
                "world_size": self.world.world_size,
                "resumed_from": self.resumed_from,
                "resumed_at_step": started_step,
                "first_step_s": self.report.first_step_s,
                "train_seconds": time.monotonic() - started_s,
                **self.report.costs(),
                "weights_sha256": weights_sha256(weights),
            }
            self.report.result(result)
            return result

    @contextmanager
    def _late_losses(self) -> Iterator[None]:
        """When another rank is lost, report the steps that the GPU has completed ahead of the reports."""
        try:
            yield
        except Exception as error:
            if self.last_whole_step.is_known_late and why_over(error):
                self.world.leave_others()
                self._report_late()
            raise

    def _report_late(self) -> None:
        try:
            if (step := self.last_whole_step.found()) is None:
                return
            for each, loss in self._sums.losses_until(step):
                if not math.isfinite(loss):  # nor are the weights, then
                    self.last_whole_step.forget()
                    return
                self._report_step(each, loss)
            self.world.stage(KEEPING, step=step)  # again: the report has overwritten it
        except RuntimeError as error:  # of the GPU; the first error is the one to be raised
            log.warning("no step is kept: %s", error)
            self.last_whole_step.forget()

    def _say_what_begins(self) -> None:
        """Report where the training resumes, the task's notes, and the disk space for the weights of all epochs."""
        if self.resumed_from:
            if self.world.is_main:
                self.report.tell("resumed", step=self.step)
            self.report.say(
                f"resumed at step {self.step} (epoch {self.sampler.epoch + 1}, {self.sampler.offset} of "
                f"{self.sampler.num_samples} samples done) from {self.resumed_from}"
            )
            if self.step == self.total_steps:
                self.report.say(f"--epochs {self.options.epochs} is reached already: only evaluating")
            if self.sampler.seed != self.options.seed:
                self.report.say(
                    f"the order of the data goes on with --seed {self.sampler.seed} of the snapshot, not "
                    f"{self.options.seed}"
                )
        for note in self.notes:
            self.report.say(f"note: {note}")
        if text := self.epoch_weights.forecast(self.options.epochs, size_bytes(self.module)):
            self.report.say(text)

    def _end_epoch(self) -> bool:
        """Evaluate, and go on to the next epoch; by ``--early-stop``, take a snapshot and stay. False if stopped."""
        if not self._evaluate(f"epoch {self.sampler.epoch + 1} done at step", ends_epoch=True):
            return False
        if not self._why_early:
            self.sampler.next_epoch()
        elif self._saved_step != self.step:
            self._save()
        return True

    @property
    def _why_early(self) -> str:
        """Why the training ends at this step by ``--early-stop``; "" if it does not, or if this is the last step."""
        return self.best.why_stop(self.options.early_stop) if self.step < self.total_steps else ""

    def _epoch(self) -> bool:
        """Train to the end of the epoch; False if stopped before it or right at it."""
        self.module.train()
        num_steps = self.sampler.steps_left
        if not num_steps:  # resumed between the last step and the evaluation
            return True
        micro_batches = zip(self.sampler.micro_batches(), self.loader, strict=True)

        def compute() -> None:
            rng.seed_step(self.sampler.seed, 1 + self.world.rank, self.step, self.world.device)
            self.last_whole_step.next_begins()
            factor = self.options.lr_factor(self.step, self.total_steps)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            loss_sum: float | torch.Tensor = 0.0
            for micro, batch in self.waits.loading(micro_batches):
                with self.engine.sync(is_last=micro.is_last and not self.local_sgd):
                    with self.engine.autocast():
                        loss = self.task.loss(self.engine.model, to_device(batch, self.world.device))
                    loss_sum = loss_sum + part_of_loss(loss, micro.share, self.world.device)
                    if micro.is_last:
                        self._start_sum(loss_sum)
                    is_plain = micro.weight == 1 and not self.waits.is_measured
                    loss_part = loss if is_plain else loss * micro.weight
                    with self.waits.backward(loss_part):
                        self.engine.backward(loss_part)
                if micro.is_last:
                    break
            with self.waits.for_others():
                self._sums.settle()
                self.engine.average()
                if self._sends_buffers:
                    # Before the update: a rank that has made it goes on with these, if rank 0 is lost.
                    broadcast_from_first(sent_buffers(self.module), self.world.device)
                if not self.last_whole_step.is_known_late:
                    self.world.settle()
            self.last_whole_step.update_begins()

        if not getattr(self.engine, "drive", self._drive)(num_steps, compute, self._end_step):
            return False
        if next(micro_batches, None) is not None:  # which also ends the loader's round
            raise AssertionError("the epoch has more batches than steps")
        return True

    def _drive(self, num_steps: int, compute: Callable[[], None], end_step: Callable[[], bool]) -> bool:
        for _ in range(num_steps):
            compute()
            self.engine.update(self.options.clip)
            if end_step():
                return False
        return True

    def _start_sum(self, loss_sum: float | torch.Tensor) -> None:
        """Start the all-reduce of loss and flags, which overlaps the backward pass."""
        batch = self.sampler.epoch, self.sampler.offset
        num_samples = min(self.sampler.batch_size, self.sampler.num_samples - self.sampler.offset)
        self.sampler.advance()
        self.step += 1
        lr = float(self.engine.optimizer.param_groups[0]["lr"])
        self._newest = Step(self.step, loss_sum, lr=lr, num_samples=num_samples, batch=batch)
        self._sums.add(self._newest)
        syncs = self.local_sgd is None or self.local_sgd.syncs_after(self.step)
        if syncs or self._epoch_ends or self._evaluates:
            flags = [
                self.stop.requested,
                self._is_asked_to_pause,
                self.local_sgd.step_s if self.local_sgd else 0.0,
                *self.saver.flags(step=self.step, is_last=self.step == self.total_steps),
            ]
            self._sums.start(flags)

    @property
    def _epoch_ends(self) -> bool:
        return self.sampler.offset >= self.sampler.num_samples

    @property
    def _evaluates(self) -> bool:
        return bool(self.options.eval_every) and self.step % (self.options.eval_every or 1) == 0

    def _end_step(self) -> bool:
        """Between two steps, agree with all ranks on loss, snapshot and stopping; True to stop."""
        self._newest.ended = time.time()
        if self.last_whole_step.is_known_late:
            self._step_is_whole()
        if not self._sums:
            self.waits.step()
            return False
        if not self._is_prepared:
            self._prepare_snapshots()
        acts_now = self._epoch_ends or self._evaluates or self.saver.is_certain(self.step)
        with self.waits.for_others():
            stop, is_due = self._read_sums(but=1 if self._sums.is_late and not acts_now else 0)
            if stop or is_due:
                stop = self._read_sums()[0] or stop
        self.waits.step()
        is_due = is_due or self._owes_snapshot
        is_common = True  # whether all ranks have the same weights
        if self.local_sgd:
            averages = self.local_sgd.averages_after(self.step)
            is_common = averages or self._epoch_ends or self._evaluates or stop
            if is_common:
                self.local_sgd.average()
        ends_early = False
        if self._evaluates and not self._epoch_ends and not stop:
            stop = not self._evaluate("at step")
            ends_early = bool(self._why_early)
            self.module.train()
        self._owes_snapshot = is_due and not is_common
        if (is_due and is_common) or (stop and not self.is_paused) or ends_early:
            self._save()
        return stop or ends_early

    def _read_sums(self, *, but: int = 0) -> tuple[bool, bool]:
        """Report the steps of all sums but the newest ``but``: whether to stop, and whether to take a snapshot."""
        stops = is_due = False
        for steps, (stop, pause, step_s, *saver_sums) in self._sums.read(but=but):
            for each, loss in steps:
                batches = each.batch, self._last_batch
                differ = self.local_sgd is not None and not self.local_sgd.averages_after(each.step - 1)
                check_loss(self.world, each.step, loss, each.loss_sum, batches, weights_differ=differ)
                self._report_step(each, loss)
            if not self._sums and not self.last_whole_step.is_known_late:
                self._step_is_whole()  # what is kept or saved is reported, too
            if self.local_sgd:
                self.local_sgd.synced(self.step, step_s / self.world.world_size)
            self.is_paused = bool(pause) and not stop
            stops, is_due = stops or bool(stop or pause), self.saver.agree(saver_sums) or is_due
        return stops, is_due

    def _report_step(self, step: Step, loss: float) -> None:
        self._last_batch = step.batch
        self.report.step(
            step.step,
            epoch=self.sampler.epoch + 1,
            loss=loss,
            lr=step.lr,
            num_samples=step.num_samples,
            ended=step.ended,
        )

    def _evaluate(self, when: str, *, ends_epoch: bool = False) -> bool:
        """Evaluate the model, and keep the weights if they are the best, or those of an epoch.

        False, and nothing is kept, if a rank is asked to stop meanwhile, since an evaluation may take longer than the
        grace period. It is then done again after the resume.
        """
        check_weights(self.world, self.step, self.module, self._last_batch)
        self._share_buffers()  # DDP broadcasts rank 0's before a step, not after it
        self.report.settle()
        # All ranks take rank 0's means, so that they decide alike which weights are the best and when to stop.
        try:
            means = self.evaluation(self.engine, self.module, lambda: self.stop.requested)
        except Exception as error:
            if not why_over(error):  # an error of the task, maybe on all ranks; the weights are whole
                self._save_alone()
            raise
        if means is None:
            return False
        self.means = self.world.gather(means)[0]
        epoch = self.sampler.epoch + 1
        try:
            better = self.best.improved(self.means)
        except TrainingError:  # an option is wrong; once it is right, the training resumes from here
            if self._saved_step != self.step:
                self._save()
            self.saver.wait()
            raise
        self.report.evaluation(self.step, epoch=epoch, means=self.means, when=when, best=better)
        # All ranks of sharded engines gather them: once will do.
        weights = functools.cache(self.engine.weights)
        self.best.look(self.means, weights, step=self.step, epoch=epoch)
        if ends_epoch:
            self.epoch_weights.look(epoch, weights)
        self.saver.paused()
        return True

    def _share_buffers(self) -> None:
        """Broadcast rank 0's buffers; if a rank is lost meanwhile, the kept step has the buffers of before."""
        self.last_whole_step.next_begins()
        broadcast_from_first(self.module.buffers(), self.world.device)
        self.world.settle()
        self.last_whole_step.next_begins()

    def _save(self) -> None:
        """Save a snapshot of this step on every node; the learning rate follows from the step."""
        self._saved_step = self.step
        with self.saver.measured():
            check_weights(self.world, self.step, self.module, self._last_batch)
            self._share_buffers()
            if self.local_sgd:
                self.local_sgd.average_optimizer(self.engine.optimizer)
            if self.saver.writes:
                self.saver.save(self._state(), step=self.step)
            else:
                gather_for_others(self.engine.state())

    def _step_is_whole(self) -> None:
        # The values from before an evaluation: when a rank is lost, some of the others may have finished it and some
        # not. All do it again, so that each node has the files that it writes.
        values = {"sampler": self.sampler.state_dict(), "best": self.best.state()}
        self.last_whole_step.is_done(self.step, values)

    def _ask_to_pause(self) -> None:
        self._is_asked_to_pause = True
        self.world.stage(PAUSING, step=self.step)

    def keep(self) -> Kept | None:
        """Return the last whole step, for a rank that has lost another one; without it the step would be done again.

        Any number of ranks may save it: on each node the first one does. None if this rank does not have all of the
        state, or if no step is whole.
        """
        if not self.world.keeps_steps or (step := self.last_whole_step.found()) is None:
            return None
        state = {**self._state(), **self.last_whole_step.values, "step": step}
        if not self._has_all_of(state):
            return None
        state = off_the_gpu(state, self.world.device)
        return Kept(
            state,
            (self.world.generation or 0, step),
            functools.partial(self.saver.save_alone, state, step=step),
            self.saver.snapshots.attempt,
            functools.partial(setattr, self.saver.snapshots, "entered"),
        )

    def _save_alone(self) -> None:
        try:
            if (kept := self.keep()) is not None:
                kept.save()
        except Exception as error:  # the first error is the one to be reported
            log.warning("step %d is not saved: %s", self.step, error)

    def _has_all_of(self, state: State) -> bool:
        return not (self.local_sgd or self.is_sharded or holds_gathered(state))

    def _prepare_snapshots(self) -> None:
        """Allocate the memory for snapshots beside the next steps, now that the optimizer has its state."""
        self._is_prepared = True
        state = self._state()
        if self.saver.writes:
            self.saver.snapshots.prepare(state)
        if self._has_all_of(state):
            self.world.keeps_when_lost(lambda: self.last_whole_step.newest, self._save_alone)
            if self.world.may_stay and self.world.messages:
                self.world.messages.when("pause", self._ask_to_pause)

    def _state(self) -> State:
        """The contents of a snapshot; with a sharded engine, this rank's part of the tensors."""
        return {
            **(cast(ShardedEngine, self.engine).shards() if self.is_sharded else self.engine.state()),
            "sampler": self.sampler.state_dict(),
            "step": self.step,
            "trained_s": self.saver.trained_s,
            "best": self.best.state(),
            "outer": self.local_sgd.state() if self.local_sgd else {},
        }
