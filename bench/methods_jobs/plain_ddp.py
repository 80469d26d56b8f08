"""Plain DistributedDataParallel."""

import torch
import torch.distributed as dist
from common import args, backend, clock, collate, data, device, model, per_rank, to_device
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group(backend)
model = DistributedDataParallel(model.to(device))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=per_rank, sampler=sampler, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for batch in loader:
        model(**to_device(batch))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    clock.epoch_ended()
dist.destroy_process_group()
