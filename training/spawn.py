"""``--launcher spawn``: start the ranks of one machine from this process, and end with them, without restarts."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from nodekit.training.engine_info import ALONE
from nodekit.training.group.initmethod import InitMethod
from nodekit.training.options.options import Options
from nodekit.training.process.devices import kind_here, number_of
from nodekit.training.process.stop import Stop, leave
from nodekit.training.rank import Parent, check, refused, train

_POLL_EVERY_S = 0.2
_MARGIN_S = 5.0
"""Seconds beyond the ranks' own grace until their processes are killed."""


def environment(rank: int, world_size: int, master_port: int) -> dict[str, str]:
    """Return a rank's environment as torchrun would set it; the parent process holds the store, as torchrun does."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def check_address(method: InitMethod) -> None:
    """Check that rank 0 can listen on a ``tcp://`` address; other methods pass.

    Raises:
        ValueError: the port is taken, or the host is another machine.
    """
    if method.scheme != "tcp":
        return
    try:
        family = socket.getaddrinfo(method.host, method.port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((method.host, method.port), family=family).close()
    except OSError as error:
        raise ValueError(
            f"--init-method: rank 0 cannot listen on {method.host} port {method.port} of this machine: "
            f"{error.strerror}; take another port, or env://, which finds one"
        ) from None


def run(options: Options) -> int:
    """Start the ranks, wait for all, and return the exit status; on a stop or a failure, no rank is left running."""
    num_gpus = 1 if options.engine in ALONE else number_of(kind_here())
    world_size = options.nproc_per_node or num_gpus or 1
    try:
        # Check once here what all ranks would refuse, as the last rank, which needs as many GPUs as there are ranks.
        last = environment(world_size - 1, world_size, 0)
        world, _ = check(options, {**os.environ, **last})
        check_address(world.init_method)
    except (ValueError, FileNotFoundError) as error:
        return refused(error)
    # As torchrun does, but share out all cores, not one each; it must be set before a rank imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // world_size)))
    with ExitStack() as stack:
        stop = stack.enter_context(Stop(options.grace + 2 * _MARGIN_S))
        port = 0
        # This process listens on the port from here on, so that no other process can take it.
        if world.init_method.scheme == "env":
            store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            port = store.port
        stop_pipe, parents_end = multiprocessing.connection.Pipe(duplex=False)
        first = multiprocessing.get_context("spawn").Lock()
        stack.callback(parents_end.close)
        # Ranks inherit SIG_IGN: while they import torch, Ctrl-C would print a traceback in each. The parent stops them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        started = spawn(  # type: ignore[no-untyped-call]
            _rank, (options, world_size, port, stop_pipe, first), world_size, join=False
        )
        signal.signal(signal.SIGINT, handler)
        processes: list[BaseProcess] = started.processes
        stop_pipe.close()
        try:
            return _wait(processes, stop, parents_end, first, options.grace)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            world.init_method.remove()


def _wait(
    processes: list[BaseProcess], stop: Stop, parents_end: Connection, first: Lock, grace_s: float
) -> int:
    """Wait until all ranks have ended, or their grace is over; return the status of the first rank that failed."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    code, deadline_s = 0, float("inf")
    while running and time.monotonic() < deadline_s:
        for sentinel in multiprocessing.connection.wait(list(running), timeout=_POLL_EVERY_S):
            rank = running.pop(sentinel)  # type: ignore[arg-type]  # these sentinels are numbers
            processes[rank].join()
            if not code:
                code = _status(rank, processes[rank], stop)
        if (stop.requested or code) and not parents_end.closed:
            if not stop.requested:
                # A rank that was killed has not taken it: keep the others from reporting.
                first.acquire(block=False)
            parents_end.close()
            deadline_s = time.monotonic() + grace_s + _MARGIN_S
    if running:
        code = code or 1
        left = ", ".join(map(str, sorted(running.values())))
        print(f"nodekit: rank {left} did not end within {grace_s:g} s of grace: killed", file=sys.stderr)
    return stop.exit_code if code and stop.requested else code


def _status(rank: int, process: BaseProcess, stop: Stop) -> int:
    code = process.exitcode or 0
    if code in (-signal.SIGTERM, -signal.SIGINT):
        return 128 - code
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        print(f"nodekit: rank {rank} (process {process.pid}) was killed by {name}", file=sys.stderr)
        return 1
    if code == 1 and not stop.requested:
        print(f"nodekit: rank {rank} has failed; the others are ended", file=sys.stderr)
    return code


def _rank(
    rank: int, options: Options, world_size: int, port: int, stop_pipe: Connection, first: Lock
) -> NoReturn:
    parent = Parent(stop_pipe, first)
    # The ranks were spawned. If their data loaders' workers were too, each would import everything again, need data
    # that can be pickled, and be ended by Ctrl-C in the terminal before the rank's snapshot.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(environment(rank, world_size, port))
    try:
        code = train(options, parent)
    except Exception:
        code = 1
        if parent.is_first():
            traceback.print_exc()
    leave(code)
