"""Plain DeepSpeed, at ZeRO stage 1 like kit's default."""

import deepspeed
import torch
from common import args, backend, clock, collate, data, model, per_rank

# At first use, its helper for a single machine is compiled for half a minute; kit does without it, too.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    training_data=data,
    collate_fn=collate,
    config={
        "train_micro_batch_size_per_gpu": per_rank,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    },
)
for epoch in range(args.epochs):
    loader.data_sampler.set_epoch(epoch)
    for batch in loader:
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()})["loss"]
        engine.backward(loss)
        engine.step()
    clock.epoch_ended()
torch.distributed.destroy_process_group()
