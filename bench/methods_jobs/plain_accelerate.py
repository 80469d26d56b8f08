"""Plain Hugging Face Accelerate, as in its quick tour."""

import accelerate
import torch
from common import args, clock, collate, data, model, per_rank
from torch.utils.data import DataLoader

accelerator = accelerate.Accelerator()
loader = DataLoader(data, batch_size=per_rank, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(args.epochs):
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    clock.epoch_ended()
accelerator.end_training()
