"""Measures all-reduces as one rank; a stand-alone program that a host's python reads from stdin.

Its argument is JSON: ``backend``, ``sizes`` (bytes, increasing), ``seconds`` for all sizes together, and ``share`` of
the machine's free memory that it may use. RANK and torchrun's other variables identify the rank. Rank 0 prints one
line of JSON: ``num_ranks``, ``points`` (bytes, seconds), and ``stopped``, why larger sizes were left out.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MEET_S = 60.0
"""Seconds for the ranks to import torch and rendezvous."""
_ENOUGH_S = 0.4
_WARM_UP = 2
"""All-reduces before each size with NCCL, as in nccl-tests: NCCL opens channels at the first use of an algorithm."""
_MOST_TIMES = 20
_LEAST_TIMES = 3
_BLOCKS = 5
_COPIES = 4
"""Memory needed per message, in messages: the message, buffers of gloo or NCCL, and a reserve."""
_MOST_SHARE = 0.4
"""Skip a size if one all-reduce of it would take more than this share of the time left: it runs at least twice."""


def main(settings: dict[str, Any]) -> None:
    """Measure increasing sizes, until one would be too large or take too long."""
    gc.disable()  # the imports leave no garbage, and collections would take a fifth of their time
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if settings["backend"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(settings["backend"], timeout=timedelta(seconds=max(MEET_S, settings["seconds"])))
    num_ranks = dist.get_world_size()

    def zeros(size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)

    def block_s(tensor: torch.Tensor, times: int) -> float:
        """Return the seconds per all-reduce, averaged over the ranks as in nccl-tests."""
        dist.barrier()
        begin = time.monotonic()
        for _ in range(times):
            dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor([(time.monotonic() - begin) / times], dtype=torch.float64, device=device)
        dist.all_reduce(seconds)
        return float(seconds.item()) / num_ranks

    def told(number: int) -> int:
        """Broadcast rank 0's number: decisions by each rank's own clock could differ."""
        answer = torch.tensor([number], device=device)
        dist.broadcast(answer, src=0)
        return int(answer.item())

    free = _free_bytes() * settings["share"]
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info()[0])
    least = torch.tensor([free], dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    most_bytes = float(least.item()) / _COPIES
    block_s(zeros(4), 3)  # opens the connections
    points, stopped = _measure(settings, most_bytes, zeros, block_s, told)
    if dist.get_rank() == 0:
        print(json.dumps({"num_ranks": num_ranks, "points": points, "stopped": stopped}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measure(
    settings: dict[str, Any],
    most_bytes: float,
    zeros: Callable[[int], torch.Tensor],
    block_s: Callable[[torch.Tensor, int], float],
    told: Callable[[int], int],
) -> tuple[list[tuple[int, float]], str]:
    """Return the points, and why larger sizes were skipped; the callables are documented in `main`."""
    deadline = time.monotonic() + settings["seconds"]
    points: list[tuple[int, float]] = []
    last = (settings["sizes"][0], 0.0)
    for size_bytes in settings["sizes"]:
        expected_s = last[1] * size_bytes / last[0]
        if size_bytes > most_bytes:
            return points, "memory"
        if not told(expected_s < _MOST_SHARE * (deadline - time.monotonic())):
            return points, "time"
        tensor = zeros(size_bytes)
        if settings["backend"] == "nccl":
            block_s(tensor, _WARM_UP)
        once_s = block_s(tensor, 1)
        half_s = _MOST_SHARE * (deadline - time.monotonic()) / 2
        fewest = _LEAST_TIMES if _LEAST_TIMES * once_s < half_s else 1
        times = told(max(fewest, min(_MOST_TIMES, int(_ENOUGH_S / max(once_s, 1e-6)))))
        # The median of several blocks is robust against short disturbances.
        blocks = min(times, _BLOCKS)
        last = (size_bytes, statistics.median(block_s(tensor, times // blocks) for _ in range(blocks)))
        points.append(last)
        del tensor
    return points, ""


def _free_bytes() -> float:
    """Return the free bytes of memory on this machine, or in its container."""
    free = float("inf")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = float(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, float(text) - float(used.read_text()))
    return free


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
