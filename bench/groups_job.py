"""One rank of bench/groups: re-forms the group again and again, and prints how long that took and what it left."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nodekit.training.group import connections, reconfigure

TIMEOUT = timedelta(seconds=60)
PER_TURN = 20


def meet(store: Any, way: str, rank: int, size: int) -> Callable[[int], object]:
    """Return the function that forms the group again; its argument is the number of times so far."""
    c10d: Any = dist.distributed_c10d
    kept: list[Any] = []

    def init(number: int, **more: Any) -> None:
        prefix = dist.PrefixStore(f"group{number}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=size, timeout=TIMEOUT, **more)

    def leave_and_join(number: int) -> None:
        if number:
            kept.append(list(c10d._world.pg_map) if way == "leave" else None)
            dist.destroy_process_group()
        init(number)

    def keep_and_join(number: int) -> None:
        if number:
            reconfigure.keep()
            dist.destroy_process_group()
        with reconfigure.enabled():
            connections.remember()
            init(number)

    def just_reconfigure(number: int) -> None:
        store.set(f"handle{number}/{rank}", c10d._get_reconfigure_handle())
        handles = [store.get(f"handle{number}/{other}").decode() for other in range(size)]
        c10d._reconfigure(uuid=1 + number, handles=handles).wait()

    if way == "keep":
        return keep_and_join
    if way != "reconfigure":
        return leave_and_join
    init(0, enable_reconfigure=True)
    return just_reconfigure


def be_rank(way: str, rank: int, size: int, port: int) -> None:
    """Re-form the group several times; print the seconds of each but the first, up to the end of a collective."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    again, seconds, threads = meet(store, way, rank, size), [], []
    for number in range(PER_TURN + 1):
        store.add(f"ready{number}", 1)
        while store.add(f"ready{number}", 0) < size:
            time.sleep(0.0005)
        begin = time.monotonic()
        again(number)
        dist.all_reduce(torch.ones(1))
        seconds.append(time.monotonic() - begin)
        threads.append(len([*Path("/proc/self/task").iterdir()]))
    left = (threads[-1] - threads[0]) / PER_TURN
    print(json.dumps({"seconds": seconds[1:], "threads": left}), flush=True)
    os._exit(0)  # groups that were left cannot be ended


if __name__ == "__main__":
    way, size, port, rank = sys.argv[1:]
    be_rank(way, int(rank), int(size), int(port))
