"""The script that all contestants start: one DDP step on each rank, timed by the clock that all lab hosts share.

It prints one line ``BENCH {…}``: the times of its stages, and the sum of the weights after the step, which is equal on
all ranks only if the gradients were averaged over all of them.
"""

import time

first_line = time.time()
import json  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

imported = time.time()
# The hosts share this machine's cores: a launcher that does not set OMP_NUM_THREADS must not lose by that.
torch.set_num_threads(1)
dist.init_process_group("gloo")
joined = time.time()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)  # every rank has its own data
loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
optimizer.step()
stepped = time.time()
with torch.no_grad():
    weights = sum(float(parameter.double().sum()) for parameter in model.parameters())
said = {
    "rank": rank,
    "world_size": world_size,
    "weights": round(weights, 9),
    "first_line": first_line,
    "imported": imported,
    "joined": joined,
    "stepped": stepped,
}
sys.stdout.write(f"BENCH {json.dumps(said)}\n")  # unbuffered, print would need two writes
sys.stdout.flush()
dist.barrier()  # no rank leaves while another still needs it
dist.destroy_process_group()
