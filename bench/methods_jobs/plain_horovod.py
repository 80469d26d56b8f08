"""Plain Horovod, for horovodrun."""

import horovod.torch as hvd
import torch
from common import args, clock, collate, data, device, model, per_rank, to_device
from torch.utils.data import DataLoader, DistributedSampler

hvd.init()
model.to(device)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=per_rank, sampler=sampler, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for batch in loader:
        model(**to_device(batch))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    clock.epoch_ended()
