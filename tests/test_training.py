"""The training module as it is run: under torchrun, killed, resumed, stopped, on more and fewer ranks."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodekit.training.options import parse

FAULTY = '''
"""Digits, with all that must come back on a resume: dropout, batch norm, augmentation; and a fault to order."""
import os, random, signal
import numpy as np
import torch
from torch import nn
from nodekit.training.tasks.digits import Digits, Pixels

class Logged(Pixels):
    def __getitem__(self, index):
        with open(f"{os.environ['SEEN']}.{os.environ.get('RANK', 0)}", "a") as file:
            file.write(f"{index}\\n")
        image, label = super().__getitem__(index)
        if PLAIN:
            return image, label
        return image + 0.1 * random.random() + 0.1 * float(np.random.standard_normal()), label

PLAIN = os.environ.get("PLAIN")

class Faulty(Digits):
    calls = 0
    def train_data(self):
        data = super().train_data()
        return Logged(data.images[:200], data.labels[:200])
    def model(self):
        noise = [] if PLAIN else [nn.BatchNorm1d(32), nn.Dropout(0.3)]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *noise, nn.ReLU(), nn.Linear(32, 10))
    def loss(self, model, batch):
        self.calls += 1
        if self.calls == int(os.environ.get("PAUSE_AT", 0)):
            print("pausing", flush=True)
            while not os.path.exists(os.environ["SEEN"] + ".go"):
                pass
        return super().loss(model, batch)
    def optimizer(self, model, lr):
        if at := int(os.environ.get("KILL_AT", 0)):  # after that many steps here, before the next one
            class Killing(torch.optim.SGD):
                steps = 0
                def zero_grad(self, set_to_none=True):
                    super().zero_grad(set_to_none)
            optimizer = Killing(model.parameters(), lr=lr, momentum=0.9)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
'''


def environ(**extra: object) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in extra.items()}}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def torchrun(num_ranks: int, *arguments: object, **extra: object) -> Iterator[subprocess.Popen[str]]:
    """The module under real torchrun; nothing of it outlives the block."""
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "nodekit.training",
    ]  # fmt: skip
    with started([*launcher, *map(str, arguments)], **extra) as process:
        yield process


@contextlib.contextmanager
def started(argv: list[str], **extra: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        argv,
        env=environ(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def by_hand(world_size: int, *arguments: object, **extra: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Each rank a node of its own; an extra that is a list has one value per rank."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    [sys.executable, "-m", "nodekit.training", *map(str, arguments)],
                    RANK=rank, LOCAL_RANK=0, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=1, NODE_RANK=rank,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                    **{name: value[rank] if isinstance(value, list) else value for name, value in extra.items()},
                )
            )
            for rank in range(world_size)
        ]  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=90)
    assert process.returncode == code, output
    return output


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout
    seen = ""
    for line in process.stdout:  # ends with the process, and the test's own timeout is behind that
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no {text!r} in: {seen}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return values


def test_digits_reach_their_accuracy_on_two_ranks(tmp_path: Path) -> None:
    output, progress = tmp_path / "it's an $output; folder", tmp_path / "progress"
    with torchrun(2, "--output", output, NODEKIT_PROGRESS_FILE=progress) as process:
        said = finish(process)
    reached = result(output)
    assert reached["accuracy"] >= 0.97
    assert reached["train_seconds"] < 60
    assert reached["steps"] == len(losses(output))
    assert "test accuracy 0.9" in said
    assert "\r" not in said
    assert progress.read_text().startswith(f"{reached['steps']}/{reached['steps']} epoch ")
    assert list((output / "tensorboard").glob("events.*"))
    assert len([line for line in metrics(output) if "test" in line]) == reached["epochs"]
