"""Code that the plain scripts share: the task's model and data, the command line, and a clock."""

import argparse
import json
import os
import sys
import time

import torch
from torch.nn import functional
from torch.utils.data import default_collate

from nodekit.training.tasks import load_task

parser = argparse.ArgumentParser()
parser.add_argument("--task", default="digits")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="over all ranks together")
args = parser.parse_args()


def told(name, horovods, alone):
    """Return a number that torchrun or Horovod has set for this process; `alone` if neither has."""
    return int(os.environ.get(name) or os.environ.get(horovods) or alone)


rank, local_rank = told("RANK", "HOROVOD_RANK", 0), told("LOCAL_RANK", "HOROVOD_LOCAL_RANK", 0)
per_rank = args.batch_size // told("WORLD_SIZE", "HOROVOD_SIZE", 1)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
backend = "nccl" if device.type == "cuda" else "gloo"


class Digits(torch.nn.Module):
    """The digits' model, with the call signature of transformers' models."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, images, labels):
        """Return the loss and the logits."""
        logits = self.layers(images)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


task = load_task(args.task)
data = task.train_data()
torch.manual_seed(0)
model = task.model() if args.task == "text" else Digits(task.model())


def collate(samples):
    """Collate samples into keyword arguments of the model."""
    if args.task == "text":
        return task.collate(samples)
    return dict(zip(("images", "labels"), default_collate(samples), strict=True))


def to_device(batch):
    """Move a batch to the device, where no library does it."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


class Clock:
    """Records when epochs end."""

    def __init__(self):
        self.times = []

    def epoch_ended(self):
        """Record the end of an epoch."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.time())
        if rank == 0 and len(self.times) == args.epochs:
            sys.stdout.write(f"BENCH {json.dumps(self.times)}\n")
            sys.stdout.flush()


clock = Clock()
