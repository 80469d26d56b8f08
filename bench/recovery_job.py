"""The training of all contestants of bench/recovery: a DDP loop that records the time of each step.

Each node keeps its own snapshots, and the one with the newest sends it to all. Each rank appends lines to
BENCH_FOLDER/steps.jsonl on its host: one before it begins to train, with the times of its start, then one per step.
"""

import time

first_line = time.time()
import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import secrets  # noqa: E402
import signal  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

imported = time.time()
SNAPSHOT_EVERY = 25
STEP_S = 0.02
# The hosts share this machine's cores: a launcher that does not set OMP_NUM_THREADS must not lose by that.
torch.set_num_threads(1)
folder = Path(os.environ["BENCH_FOLDER"])
is_first = not (folder / "steps.jsonl").exists()
memory = bytes(1) * int(Path(__file__).with_name("bytes").read_text() if is_first else 0)  # with --gb
snapshots = Path(os.environ.get("NODEKIT_SNAPSHOT_DIR") or folder / "snapshots")
snapshots.mkdir(parents=True, exist_ok=True)
folder.mkdir(parents=True, exist_ok=True)
lines = (folder / "steps.jsonl").open("ab", buffering=0)


def say(**fields: object) -> None:
    """Write a line, with a single write."""
    lines.write(json.dumps(fields).encode() + b"\n")


def newest() -> tuple[int, "Path | None"]:
    """Return the step and the path of this node's newest snapshot."""
    found = {int(path.stem.partition("-")[2]): path for path in snapshots.glob("step-*.pt")}
    return max(found.items()) if found else (0, None)


def save(step: int) -> None:
    """Write a snapshot atomically, and keep two; all nodes may share the folder."""
    beside = snapshots / f"draft-{rank}"
    with beside.open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(snapshots / f"step-{step}.pt")
    for old in sorted(snapshots.glob("step-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))[:-2]:
        old.unlink(missing_ok=True)


def train() -> None:
    """Make one step."""
    loss = nn.functional.cross_entropy(trained(torch.randn(32, 64)), torch.randint(10, (32,)))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    optimizer.step()


def wait_as_in_nccl(*_: object) -> None:
    """Ignore SIGTERM and the loss of peers from now on, as a rank that waits in NCCL's kernel would."""
    global is_nccl_like
    is_nccl_like = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


is_nccl_like = False
signal.signal(signal.SIGUSR1, wait_as_in_nccl)
heartbeat = contextlib.nullcontext
if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:  # ft_launcher expects a heartbeat for every step
    import nvidia_resiliency_ext.fault_tolerance as ft

    client = ft.RankMonitorClient()
    client.init_workload_monitoring()
    heartbeat = client.send_heartbeat

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
joined = time.time()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
own, path = newest()
here = torch.tensor([own, secrets.randbits(40)])
all_here = [torch.zeros_like(here) for _ in range(world_size)]
dist.all_gather(all_here, here)
step, world = max(int(each[0]) for each in all_here), int(all_here[0][1])
if step:
    source = [int(each[0]) for each in all_here].index(step)
    if rank == source:
        assert path is not None
        model.load_state_dict(torch.load(path, weights_only=True))
    for value in model.state_dict().values():
        dist.broadcast(value, source)
trained = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
where = {"world": world, "size": world_size, "rank": rank}
times = {"first_line": first_line, "imported": imported, "joined": joined, "resumed": time.time()}
say(**where, pid=os.getpid(), step=step, **times)
torch.manual_seed(1 + rank)  # every rank has its own data
while True:
    begin = time.time()
    try:
        train()
    except RuntimeError:
        while is_nccl_like:
            time.sleep(0.01)
        raise
    step += 1
    say(**where, step=step, time=time.time())
    heartbeat()
    if step % SNAPSHOT_EVERY == 0:
        save(step)
    time.sleep(max(0.0, begin + STEP_S - time.time()))
