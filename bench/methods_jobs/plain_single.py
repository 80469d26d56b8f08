"""Plain training in one process."""

import torch
from common import args, clock, collate, data, device, model, per_rank, to_device
from torch.utils.data import DataLoader

model.to(device)
loader = DataLoader(data, batch_size=per_rank, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
for _ in range(args.epochs):
    for batch in loader:
        model(**to_device(batch))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    clock.epoch_ended()
