"""Plain FSDP2: each layer of a transformer is sharded, and then the rest."""

import torch
import torch.distributed as dist
from common import args, backend, clock, collate, data, device, model, per_rank, to_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group(backend)
model.to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
if args.task == "text":
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
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
