"""The loop of recovery_job.py in kit's `run_attempts` for custom training loops: the ranks keep their processes."""

import time

first_line = time.time()
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from nodekit.training import (  # noqa: E402
    EmergencySave,
    Snapshots,
    Stop,
    World,
    newest_of_all,
    run_attempts,
    writes_snapshots,
)
from nodekit.training.reporting.metrics import attempt_of  # noqa: E402

imported = time.time()
SNAPSHOT_EVERY = 25
STEP_S = 0.02
torch.set_num_threads(1)
folder = Path(os.environ["BENCH_FOLDER"])
is_first = not (folder / "steps.jsonl").exists()
memory = bytes(1) * int(Path(__file__).with_name("bytes").read_text() if is_first else 0)  # with --gb
folder.mkdir(parents=True, exist_ok=True)
lines = (folder / "steps.jsonl").open("ab", buffering=0)


def say(**fields: object) -> None:
    """Write a line, with a single write."""
    lines.write(json.dumps(fields).encode() + b"\n")


def train(world: World, stop: Stop) -> int:
    """Train in one attempt."""
    joined = time.time()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    snapshots = Snapshots(world.snapshot_dir or folder / "snapshots", generation=world.generation)
    writes = writes_snapshots(snapshots, world)
    step = 0
    if found := newest_of_all(snapshots, world, writes=writes):
        model.load_state_dict(found.state)
        step = found.manifest.step
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    where = {"world": attempt_of(world), "size": world.world_size, "rank": world.rank}
    times = {"first_line": first_line, "imported": imported, "joined": joined, "resumed": time.time()}
    say(**where, pid=os.getpid(), step=step, **times)
    torch.manual_seed(1 + world.rank)
    emergency = EmergencySave(snapshots, world, model.state_dict, lambda: step, optimizer)
    while True:
        begin = time.time()
        loss = nn.functional.cross_entropy(trained(torch.randn(32, 64)), torch.randint(10, (32,)))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
        step += 1
        say(**where, step=step, time=time.time())
        stops = emergency.stops(stop.requested)
        if writes and (stops or step % SNAPSHOT_EVERY == 0):
            snapshots.save_async(model.state_dict(), step=step, world_size=world.world_size)
        if stops:
            snapshots.wait()
            return stop.exit_code
        time.sleep(max(0.0, begin + STEP_S - time.time()))


if __name__ == "__main__":
    sys.exit(run_attempts(train))
