"""The training of torchft in bench/recovery: the loop of recovery_job.py, in torchft's own pattern.

Each host is a replica group of one rank. torchft sends its state to replicas that lack it, so there are no snapshots.
"""

import time

first_line = time.time()
import json  # noqa: E402
import os  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torchft  # noqa: E402
from torch import nn  # noqa: E402

imported = time.time()
STEP_S = 0.02
TIMEOUT = timedelta(seconds=3)  # of a collective: as long as the other contestants wait for a silent host
torch.set_num_threads(1)
folder = Path(os.environ["BENCH_FOLDER"])
is_first = not (folder / "steps.jsonl").exists()
memory = bytes(1) * int(Path(__file__).with_name("bytes").read_text() if is_first else 0)  # with --gb
folder.mkdir(parents=True, exist_ok=True)
lines = (folder / "steps.jsonl").open("ab", buffering=0)


def say(**fields: object) -> None:
    """Write a line, with a single write."""
    lines.write(json.dumps(fields).encode() + b"\n")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
    min_replica_size=int(os.environ["BENCH_MIN_NODES"]),
    load_state_dict=model.load_state_dict,
    state_dict=model.state_dict,
    timeout=TIMEOUT,
    quorum_timeout=timedelta(seconds=60),
    replica_id=os.environ["BENCH_HOST"],
    hostname=os.environ["BENCH_HOST"],
)
trained = torchft.DistributedDataParallel(manager, model)
optimizer = torchft.Optimizer(manager, sgd)
joined = time.time()
world = ""
while True:
    begin = time.time()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(trained(torch.randn(32, 64)), torch.randint(10, (32,)))
    loss.backward()
    step = manager.current_step()
    optimizer.step()
    # A replica that receives the others' state does not take part in that step.
    if manager.current_step() == step + 1 and (rank := manager.participating_rank()) is not None:
        size = manager.num_participants()
        where = {"size": size, "rank": rank, "world": f"{manager._quorum_id}-{size}"}
        if where["world"] != world:
            world = where["world"]
            times = {"first_line": first_line, "imported": imported, "joined": joined, "resumed": begin}
            say(**where, pid=os.getpid(), step=step, **times)
        say(**where, step=step + 1, time=time.time())
    time.sleep(max(0.0, begin + STEP_S - time.time()))
