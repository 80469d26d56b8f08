"""Runs of the training module under torchrun on this machine, and what they have left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import warm_python

# Clipping is active and shows a wrong scale of the gradients, which AdamW alone would hide.
SAME = [
    "--lr",
    "0.0003",
    "--clip",
    "0.5",
    "--micro-batch",
    "16",
    "--schedule",
    "constant",
    "--warmup-steps",
    "0",
]


_KILLED_ONCE = """
import os, pathlib, signal, time
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def train_data(self):
        data = super().train_data()
        self.num_left = {micro_batches}
        return data
    def loss(self, model, batch):
        self.num_left -= 1
        mark = pathlib.Path(__file__ + ".killed")
        if self.num_left == 0 and os.environ["LOCAL_RANK"] == str({rank}) and not mark.exists():
            mark.touch()
            # Whichever rank writes the last snapshot: a step after it that took less than to save is not worth saving.
            # To a save belongs what makes room: of the last two there are a manifest and the rest of each.
            until = time.monotonic() + 60
            while time.monotonic() < until:
                found = [*pathlib.Path(__file__).parent.rglob("{snapshot}")]
                if found and len([*found[0].parent.glob("g*")]) <= 4:
                    break
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


def task(folder: Path, text: str) -> list[str]:
    """The option for a task of this text, whose class is Task."""
    (folder / "own.py").write_text(text)
    return ["--task", f"{folder / 'own.py'}:Task"]


def killed_once(folder: Path, *, step: int, saved: int = 32, num_ranks: int = 2) -> list[str]:
    """The digits; the last rank gets SIGKILL in its first time through ``step``, which is in the second epoch.

    By then the snapshot of step ``saved`` is there.
    """
    per_step = -(-64 // num_ranks // 16)
    in_the_last_of_an_epoch = -(-(1437 - 22 * 64) // num_ranks // 16)
    micro_batches = (step - 2) * per_step + in_the_last_of_an_epoch + 1
    snapshot = f"g0000-s{saved:09}.json"
    return task(
        folder, _KILLED_ONCE.format(micro_batches=micro_batches, rank=num_ranks - 1, snapshot=snapshot)
    )


def train(
    folder: Path,
    *arguments: str,
    num_ranks: int = 2,
    code: int = 0,
    launcher: Sequence[str] = (),
    same: Sequence[str] = SAME,
) -> str:
    """Run the module to its end, and give what it said."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *launcher]
    module = ["-m", "nodekit.training", "--output", str(folder), *same, *arguments]
    done = subprocess.run(
        [warm_python.program(), *torchrun, *module],
        env={**os.environ, **warm_python.environment()},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
