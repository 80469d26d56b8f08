"""Plain Lightning Fabric, as in its introduction."""

import os

import torch
from common import args, clock, collate, data, device, model, per_rank
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(accelerator=device.type, devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=per_rank, shuffle=True, collate_fn=collate))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.003))
for _ in range(args.epochs):
    for batch in loader:
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    clock.epoch_ended()
torch.distributed.destroy_process_group()
