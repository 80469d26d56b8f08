"""The cost of a snapshot for the training: blocking, kit's in the background, and torch's async_save."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rounds import interleave, machine, median, note, spread, table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nodekit.training import Snapshots
from nodekit.training.snapshots.saver import MOST_SHARE, interval_s

BLOCKING = "torch.save + fsync"
OURS = "nodekit, save_async"
GOAL_STALL = 0.10
QUIET_STEPS = 3
DESCRIPTION = """\
What a snapshot costs the training of a transformer with Adam (model and optimizer state: 12 bytes per parameter):

  torch.save + fsync    blocking: written beside, synced, renamed; the training stands still meanwhile
  nodekit               Snapshots.save_async: a copy to host memory; written, hashed, synced, committed behind it
  DCP                   torch.distributed.checkpoint.async_save, as it comes, and with a stager that keeps its buffers

All train the same model, real steps in between, and take turns, round by round, after a warm-up round. Stall: how
long the call holds the loop up. Steps meanwhile: how much longer the steps took while it was being written than
steps without (it takes cores and memory from them, on a CPU more than beside a GPU). The table is for docs/numbers.md.
"""
EPILOG = """\
examples:
  bench/snapshot                       110 M parameters, 3 rounds
  bench/snapshot --params 1e6          in seconds
  bench/snapshot --folder /mnt/disk    on that disk

Exit status: 0 unless something broke; a goal that is missed is no error.
"""


@dataclass(frozen=True)
class Cost:
    """The cost of one snapshot, in seconds."""

    stall_s: float
    write_s: float
    """From the call until the snapshot is on the disk."""
    slowed_s: float
    """How much longer the steps in the meantime took than steps without a snapshot."""
    quiet_step_s: float


class Training:
    """A model, and its training steps."""

    def __init__(self, num_params: int) -> None:
        width = max(64, round((num_params / (12 * 12 + 40)) ** 0.5 / 64) * 64)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(40 * width, width), body).to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(40 * width, (1, 64), device=self.device)
        self.step()  # creates Adam's state

    @property
    def num_params(self) -> int:
        """The number of parameters."""
        return sum(each.numel() for each in self.model.parameters())

    def state(self) -> dict[str, Any]:
        """Return the state that a snapshot contains."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self) -> float:
        """Make one step; return its seconds."""
        started_s = time.perf_counter()
        self.model(self.tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s


class Contestants:
    """Ways to take a snapshot; each returns a function that says whether the snapshot is complete."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder
        self.snapshots = Snapshots(folder / "ours")
        on_cuda = training.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_cuda,
        )
        self.kept_stager = DefaultStager(options)

    def all(self) -> dict[str, Callable[[int], Cost]]:
        """Return name → function that takes one snapshot and returns its cost."""
        return {
            BLOCKING: lambda number: self.cost(self.blocking, number),
            OURS: lambda number: self.cost(self.ours, number),
            "DCP async_save": lambda number: self.cost(self.dcp, number),
            "DCP async_save, stager kept": lambda number: self.cost(self.dcp_kept, number),
        }

    def cost(self, save: Callable[[int], Callable[[], bool]], number: int) -> Cost:
        """Make steps without a snapshot, take one, and make steps until it is on the disk."""
        os.sync()
        quiet_s = median([self.training.step() for _ in range(QUIET_STEPS)])
        started_s = time.perf_counter()
        is_done = save(number)
        stall_s = time.perf_counter() - started_s
        slowed_s = 0.0
        while not is_done():
            slowed_s += self.training.step() - quiet_s
        return Cost(stall_s, time.perf_counter() - started_s, slowed_s, quiet_s)

    def blocking(self, _number: int) -> Callable[[], bool]:
        """Save as most training loops do, with the least that can be called safe."""
        beside = self.folder / "blocking.tmp"
        with beside.open("wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / "blocking.pt")
        return lambda: True

    def ours(self, number: int) -> Callable[[], bool]:
        """Save with kit's code, which is what is measured."""
        self.snapshots.save_async(self.training.state(), step=number)
        return lambda: self.snapshots.wait(0)

    def dcp(self, _number: int) -> Callable[[], bool]:
        """Save with torch's async_save, as in its documentation."""
        return self._dcp(None)

    def dcp_kept(self, _number: int) -> Callable[[], bool]:
        """Save with async_save and reused buffers, as kit does."""
        return self._dcp(self.kept_stager)

    def _dcp(self, stager: DefaultStager | None) -> Callable[[], bool]:
        folder = self.folder / "dcp"
        shutil.rmtree(folder, ignore_errors=True)
        saved = dcp.async_save(self.training.state(), checkpoint_id=folder, no_dist=True, async_stager=stager)
        assert isinstance(saved, Future)

        def is_done() -> bool:
            if saved.done():
                saved.result()
            return saved.done()

        return is_done


def main() -> int:
    """Run the benchmark, and print the table."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="nodekit-bench-", dir=args.folder) as folder:
        training = Training(int(args.params))
        contestants = Contestants(training, Path(folder))
        measured, broken = interleave(
            contestants.all(),
            rounds=args.rounds,
            shown=lambda cost: f"stall {cost.stall_s:6.3f} s, on the disk after {cost.write_s:6.2f} s",
        )
        found = Snapshots(contestants.snapshots.folder).load()
        assert found, "what we wrote does not load"
        size_mb = sum(found.manifest.size_bytes.values()) / 1e6
    print(
        f"Snapshot of {training.num_params / 1e6:.0f} M parameters with Adam's state ({size_mb:.0f} MB) on "
        f"{training.device.type}, seconds; {args.rounds} rounds, interleaved; a step without: "
        f"{median([cost.quiet_step_s for costs in measured.values() for cost in costs]):.2f}; {machine()}.\n"
    )
    print(costs_table(measured))
    print(f"\n{goals(measured)}")
    for name, why in broken.items():
        note(f"\n{name} broke: {why}")
    return 1 if broken else 0


def costs_table(measured: Mapping[str, Sequence[Cost]]) -> str:
    """Return the table of medians and ranges."""
    blocking_s = median([cost.stall_s for cost in measured[BLOCKING]])
    rows = []
    for name, costs in measured.items():
        stalls, writes = [cost.stall_s for cost in costs], [cost.write_s for cost in costs]
        slowed = [cost.slowed_s for cost in costs]
        rows.append(
            [
                name,
                f"{median(stalls):.3f}",
                f"{min(stalls):.3f}–{max(stalls):.3f}",
                f"{median(stalls) / blocking_s:.1%}",
                f"{median(slowed):.2f}",
                spread(slowed),
                f"{median(writes):.2f}",
                spread(writes),
            ]
        )
    header = ["", "stall", "range", "to blocking", "steps meanwhile", "range", "on the disk after", "range"]
    return table(header, rows)


def goals(measured: Mapping[str, Sequence[Cost]]) -> str:
    """Return whether kit meets its two goals."""
    stall_s = median([cost.stall_s for cost in measured[OURS]])
    ratio = stall_s / median([cost.stall_s for cost in measured[BLOCKING]])
    cost_s = median([cost.stall_s + max(0.0, cost.slowed_s) for cost in measured[OURS]])
    every_s = interval_s(cost_s, trained_s=0.0, num_restarts=0)
    share = cost_s / every_s

    def verdict(value: float, goal: float) -> str:
        return "met" if value <= goal else "MISSED"

    return "\n".join(
        [
            f"stall to blocking: {ratio:.1%}, goal ≤ {GOAL_STALL:.0%}: {verdict(ratio, GOAL_STALL)}",
            f"share of the time, stall and slower steps, at the interval that auto picks for it ({every_s:.0f} s, no "
            f"failure yet): {share:.2%}, goal ≤ {MOST_SHARE:.0%}: {verdict(share, MOST_SHARE)}",
        ]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/snapshot",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--params", type=float, default=110e6, metavar="N", help="parameters, about (110e6)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="snapshots of each (3)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write (the temporary folder)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
