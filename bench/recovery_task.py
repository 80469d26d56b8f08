"""The task of kit's training module in bench/recovery: it records what recovery_job.py records."""

import time

first_line = time.time()
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from nodekit.training.reporting import metrics  # noqa: E402
from nodekit.training.reporting.report import Report  # noqa: E402
from nodekit.training.tasks.digits import Digits  # noqa: E402
from nodekit.training.world import World  # noqa: E402

imported = time.time()
STEP_S = float(os.environ.get("BENCH_STEP_S", "0.02"))
torch.set_num_threads(1)
folder = Path(os.environ["BENCH_FOLDER"])
is_first = not (folder / "steps.jsonl").exists()
memory = bytes(1) * int(Path(__file__).with_name("bytes").read_text() if is_first else 0)  # with --gb
folder.mkdir(parents=True, exist_ok=True)
lines = (folder / "steps.jsonl").open("ab", buffering=0)


class Task(Digits):
    """Digits, with recovery_job's step time."""

    def loss(self, model: Any, batch: Any) -> Any:
        """Wait as long as a step of recovery_job's, and return the parent's loss."""
        time.sleep(STEP_S)
        return super().loss(model, batch)


class _Written:
    """Writes a line when a rank is about to train, and one for each step."""

    where: dict[str, Any]
    begin, step = Report.__init__, Report.step

    @classmethod
    def say(cls, **fields: object) -> None:
        lines.write(json.dumps({**cls.where, **fields}).encode() + b"\n")

    @classmethod
    def reported_begin(cls, report: Report, world: World, *args: Any, **more: Any) -> None:
        cls.begin(report, world, *args, **more)
        cls.where = {"world": metrics.attempt_of(world), "size": world.world_size, "rank": world.rank}
        times = {
            "first_line": first_line,
            "imported": imported,
            "joined": time.time(),
            "resumed": time.time(),
        }
        cls.say(pid=os.getpid(), step=more["step"], **times)

    @classmethod
    def reported_step(cls, report: Report, step: int, **more: Any) -> None:
        cls.step(report, step, **more)
        cls.say(step=step, time=time.time())


Report.__init__ = lambda *args, **more: _Written.reported_begin(*args, **more)  # type: ignore[assignment,method-assign]
Report.step = lambda *args, **more: _Written.reported_step(*args, **more)  # type: ignore[method-assign]
