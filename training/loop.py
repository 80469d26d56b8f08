"""The training loop: one task on all ranks, from the newest snapshot to the last epoch."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nodekit.training import rng
from nodekit.training.engines import ShardedEngine, State
from nodekit.training.engines.load import load_engine
from nodekit.training.evaluate import Evaluation, to_device
from nodekit.training.local_sgd import LocalSgd
from nodekit.training.options import Options
from nodekit.training.reporting.report import Report
from nodekit.training.sampler import ElasticSampler
from nodekit.training.snapshots.exchange import newest_of_all, writes_snapshots
from nodekit.training.snapshots.manifest import Loaded
from nodekit.training.snapshots.saver import Saver
from nodekit.training.snapshots.snapshot import Snapshots
from nodekit.training.stop import Stop
from nodekit.training.tasks import Task, optimizer_of
from nodekit.training.weights.best import Best
from nodekit.training.weights.export import load_weights, read_weights
from nodekit.training.world import World


@dataclass(slots=True)
class _Step:
    """A step that is not reported yet."""

    step: int
    loss_sum: torch.Tensor
    """This rank's part of the mean loss, a scalar."""
    lr: float
    num_samples: int
    ended: float = 0.0
    """Seconds since 1970; 0 while the optimizer steps."""


_ANEW = "To train anew, give another folder with --output, or a new run with kit up --new"


class CannotResume(ValueError):
    """The snapshot that is there is not one that these options can go on from; the message says what to do."""


class Loop:
    """Model, optimizer, data and snapshots of one rank; all ranks make the same steps."""

    def __init__(self, options: Options, world: World, task: Task, folder: Path, stop: Stop) -> None:
        """Create everything and load the newest snapshot; the process group exists already."""
        self.options = options
        self.world = world
        self.task = task
        self.stop = stop
        self.step = 0
        self.trained_s = 0.0
        rng.seed_all(options.seed, rank=0)  # the same weights everywhere; engines send rank 0's anyway
        self.module = task.model().to(world.device)
        if options.sync_bn:
            self.module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.module)  # type: ignore[no-untyped-call]
        optimizer = optimizer_of(task, self.module, options.peak_lr)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self._make_loader()
        rng.seed_all(options.seed, rank=1 + world.rank)
        self.is_sharded = options.snapshot_format == "sharded"
        snapshots, writes = self._open_snapshots(folder)
        found = newest_of_all(snapshots, world, writes=writes)
        self.resumed_from = found.source if found else None
        left_out: list[str] = []
        if found:
            self._resume(found, optimizer)
        elif options.init_from:
            left_out = load_weights(
                self.module,
                read_weights(options.init_from),
                ignore_mismatched_sizes=options.ignore_mismatched_sizes,
            )
        later_epochs = options.epochs - self.sampler.epoch - 1
        self.total_steps = self.step + self.sampler.steps_left + later_epochs * self.sampler.steps_per_epoch
        self._make_engine(found, optimizer)
        self._make_reporting(folder, {} if found is None else found.state.get("best", {}))
        for each in left_out:
            self.report.say(f"left out of {options.init_from}: {each}")
        self.saver = Saver(
            snapshots, world, self.report, writes=writes or self.is_sharded, every=options.snapshot_every,
            seconds=options.snapshot_seconds, trained_s=self.trained_s,
        )  # fmt: skip
        self._unreported: list[_Step] = []
        self._sums: Callable[[], list[float]] | None = None
        self._owes_snapshot = False

    def _make_loader(self) -> None:
        data = self.task.train_data()
        self.sampler = ElasticSampler(
            len(data),
            batch_size=self.options.batch_size,
            micro_batch=self.options.largest_micro_batch(self.world.world_size),
            seed=self.options.seed,
            rank=self.world.rank,
            world_size=self.world.world_size,
        )
        self.loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=self.sampler,
            persistent_workers=self.options.num_workers > 0,
            **self._loading(),
        )

    def _open_snapshots(self, folder: Path) -> tuple[Snapshots, bool]:
        """The snapshots, and whether this rank commits them."""
        options, world = self.options, self.world
        snapshots = Snapshots(
            world.snapshot_dir or folder / "snapshots", keep=options.keep, generation=world.generation,
            leave_shards=options.engine == "fsdp",
        )  # fmt: skip
        writes = writes_snapshots(snapshots, world)
        if self.is_sharded:
            from nodekit.training.snapshots.sharded import ShardedSnapshots  # takes half a second to import

            snapshots = ShardedSnapshots(snapshots, world, commits=writes)
        return snapshots, writes

    def _make_engine(self, found: Loaded | None, optimizer: torch.optim.Optimizer) -> None:
        state = found.state if found else {}
        self.engine = load_engine(self.options, self.world, self.module, optimizer, state.get("scaler"))
        if found and found.shards:
            cast(ShardedEngine, self.engine).load_shards(found)
        if self.options.compile:
            self.module.compile()  # in place, which keeps the names in its state dict
        self.local_sgd: LocalSgd | None = None
        if self.options.local_steps:
            self.local_sgd = LocalSgd(self.options, self.world, self.module, step=self.step)
            self.local_sgd.load(state.get("outer", {}))

    def _make_reporting(self, folder: Path, best: Mapping[str, Any]) -> None:
        """Create the report, the evaluation, and what keeps the best weights."""
        self.report = Report(
            self.world,
            folder,
            step=self.step,
            total_steps=self.total_steps,
            is_evaluated=self.sampler.steps_left > 0,
            track=self.options.track,
            settings=asdict(self.options),
        )
        self.evaluation = Evaluation(
            self.task, self.task.test_data(), self.world, self.report, self._loading()
        )
        facts = {name: getattr(self.options, name) for name in ("task", "data", "model", "engine")}
        self.best = Best(self.options.best, folder, self.world, self.task, facts)
        self.best.load(best)

    def run(self) -> dict[str, Any] | None:
        """Train to the end and return the result; None if stopped, with a snapshot of the last step."""
        with self.report:
            if self.resumed_from:
                if self.world.is_main:
                    self.report.tell("resumed", step=self.step)
                self.report.say(
                    f"resumed at step {self.step} (epoch {self.sampler.epoch + 1}, {self.sampler.offset} of "
                    f"{self.sampler.num_samples} samples done) from {self.resumed_from}"
                )
                if self.step == self.total_steps:
                    self.report.say(f"--epochs {self.options.epochs} is reached already: only evaluating")
            started_s, started_step, means = time.monotonic(), self.step, dict[str, float]()
            while self.sampler.epoch < self.options.epochs:
                if not self._epoch():
                    self.report.say(f"stopped at step {self.step}/{self.total_steps}, to go on from there")
                    return None
                means = self._evaluate(f"epoch {self.sampler.epoch + 1} done at step")
                self.sampler.next_epoch()
            self.saver.wait()
            weights = self.engine.weights()
            self.best.write_last(weights, means=means, step=self.step, epoch=self.options.epochs)
            result = {
                **means,
                "steps": self.step,
                "epochs": self.options.epochs,
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

    def _epoch(self) -> bool:
        """Train to the end of the epoch; False if stopped before it or right at it."""
        self.module.train()
        num_steps = self.sampler.steps_left
        if not num_steps:  # resumed between the last step and the evaluation
            return True
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = zip(self.sampler.micro_batches(), self.loader, strict=True)

        def compute() -> None:
            factor = self.options.lr_factor(self.step, self.total_steps)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            loss_sum.zero_()
            for micro, batch in micro_batches:
                with self.engine.sync(is_last=micro.is_last and not self.local_sgd):
                    with self.engine.autocast():
                        loss = self.task.loss(self.engine.model, to_device(batch, self.world.device))
                    self.engine.backward(loss * micro.weight)
                loss_sum.add_(loss.detach().double() * micro.share)
                if micro.is_last:
                    self._start_sum(loss_sum)
                    return

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

    def _start_sum(self, loss_sum: torch.Tensor) -> None:
        """Start the all-reduce of loss and flags; it overlaps the optimizer's step."""
        offset = self.sampler.offset
        self.sampler.advance()
        self.step += 1
        lr = float(self.engine.optimizer.param_groups[0]["lr"])
        num_samples = self.sampler.offset - offset
        self._unreported.append(_Step(self.step, loss_sum.clone(), lr=lr, num_samples=num_samples))
        syncs = self.local_sgd is None or self.local_sgd.syncs_after(self.step)
        if syncs or self._epoch_ends or self._evaluates:
            flags = [
                self.stop.requested,
                self.local_sgd.step_s if self.local_sgd else 0.0,
                *self.saver.flags(step=self.step, is_last=self.step == self.total_steps),
            ]
            own = torch.tensor(flags, dtype=torch.float64).to(self.world.device)
            losses = torch.stack([each.loss_sum for each in self._unreported])
            self._sums = self.world.start_sum(torch.cat([losses, own]))

    @property
    def _epoch_ends(self) -> bool:
        return not self.sampler.steps_left

    @property
    def _evaluates(self) -> bool:
        return bool(self.options.eval_every) and self.step % (self.options.eval_every or 1) == 0

    def _end_step(self) -> bool:
        """Between two steps, agree with all ranks on loss, snapshot and stopping; True to stop."""
        self._unreported[-1].ended = time.time()
        if self._sums is None:
            return False
        sums, self._sums = self._sums(), None
        steps, self._unreported = self._unreported, []
        for each, loss in zip(steps, sums, strict=False):
            self.report.step(
                each.step,
                epoch=self.sampler.epoch + 1,
                loss=loss,
                lr=each.lr,
                num_samples=each.num_samples,
                ended=each.ended,
            )
        stop, step_s, *saver_sums = sums[len(steps) :]
        is_due = self.saver.agree(saver_sums) or self._owes_snapshot
        is_common = True  # whether all ranks have the same weights
        if self.local_sgd:
            self.local_sgd.synced(self.step, step_s / self.world.world_size)
            averages = self.local_sgd.averages_after(self.step)
            is_common = averages or self._epoch_ends or self._evaluates or bool(stop)
            if is_common:
                self.local_sgd.average()
        if self._evaluates and not self._epoch_ends and not stop:
            self._evaluate("at step")
            self.module.train()
        self._owes_snapshot = is_due and not is_common
        if (is_due and is_common) or stop:
            self._save()
        if stop:
            self.saver.wait()
            self.best.wait()
        return bool(stop)

    def _evaluate(self, when: str) -> dict[str, float]:
        """Measure the model, and keep the weights if they are the best."""
        self._same_buffers()
        self.report.settle()
        means = self.evaluation(self.engine, self.module)
        epoch = self.sampler.epoch + 1
        self.report.evaluation(self.step, epoch=epoch, means=means, when=when, best=self.best.improved(means))
        self.best.look(means, self.engine.weights, step=self.step, epoch=epoch)
        self.saver.paused()
        return means

    def _save(self) -> None:
        """Save a snapshot of this step on every node; the learning rate follows from the step."""
        with self.saver.measured():
            self._same_buffers()
            if self.local_sgd:
                self.local_sgd.average_optimizer(self.engine.optimizer)
            generators = self.world.gather(rng.capture(self.world.device))
            trained = self._state()
            if self.saver.writes:
                state = {
                    **trained,
                    "sampler": self.sampler.state_dict(),
                    "step": self.step,
                    "rng": generators,
                    "trained_s": self.saver.trained_s,
                    "best": self.best.state(),
                    "outer": self.local_sgd.state() if self.local_sgd else {},
                }
                self.saver.save(state, step=self.step)

    def _state(self) -> State:
        """The engine's state; with --snapshot-format sharded, this rank's part of it."""
        return cast(ShardedEngine, self.engine).shards() if self.is_sharded else self.engine.state()

    def _resume(self, found: Loaded, optimizer: torch.optim.Optimizer) -> None:
        """Continue from a snapshot: everything but the scaler, which the engine loads."""
        state = found.state
        try:
            if not found.shards:  # else the engine reads them, each rank its own part
                self.module.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
            self.sampler.load_state_dict(state["sampler"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CannotResume(
                f"the snapshot {found.source} is not of this task or model: {error}. {_ANEW}"
            ) from error
        if self.sampler.epoch >= self.options.epochs:
            raise CannotResume(
                f"{found.source} is in epoch {self.sampler.epoch + 1} already and --epochs is "
                f"{self.options.epochs}: give more epochs. {_ANEW}"
            )
        self.step, self.trained_s = state["step"], state.get("trained_s", 0.0)
        if self.world.rank < len(state["rng"]):  # additional ranks keep their fresh seeds
            rng.restore(state["rng"][self.world.rank], self.world.device)

    def _same_buffers(self) -> None:
        """Give all ranks rank 0's buffers (batch norm's means): DDP does so before a step, not after."""
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)

    def _loading(self) -> dict[str, Any]:
        return {
            "num_workers": self.options.num_workers,
            "pin_memory": self.world.device.type == "cuda",
            "collate_fn": getattr(self.task, "collate", None),
            # Its own generator: starting a loader must not move the global one, or a resume would differ.
            "generator": torch.Generator().manual_seed(self.options.seed + self.world.rank),
        }


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """A hash of all parameters and buffers, to compare the weights of two runs."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
