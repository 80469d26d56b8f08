"""``--launcher spawn``: this process starts the ranks of one machine itself, and ends with them. No restarts."""

import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from nodekit.training.engines import ALONE
from nodekit.training.initmethod import InitMethod
from nodekit.training.options import Options
from nodekit.training.stop import EXIT_STOPPED, Stop, leave

_LOOK_EVERY_S = 0.2
_MARGIN_S = 5.0
"""Beyond the grace that ranks give themselves, until their processes are killed."""


class Parent:
    """What a rank has of the process that started it: whether it is to stop, and who of the ranks speaks first."""

    def __init__(self, told: Connection, first: Lock) -> None:
        """``told`` ends when the ranks are to stop, or their parent is gone; whoever takes ``first`` speaks."""
        self._told, self._first = told, first
        self._stop: Stop | None = None
        threading.Thread(target=self._watch, name="nodekit-parent", daemon=True).start()

    def stops_by(self, stop: Stop) -> None:
        """From here on, let the loop act on it at a step's edge; until then the process ends at once."""
        self._stop = stop

    def is_first(self) -> bool:
        """Whether this is the first rank that failed: the others fail because it did, and need not tell why."""
        return self._first.acquire(block=False)

    def _watch(self) -> None:
        with suppress(EOFError, OSError):  # nothing is ever sent: it ends
            self._told.recv_bytes()
        if self._stop is None:
            os._exit(EXIT_STOPPED)
        self._stop.request()


def num_ranks(options: Options) -> int:
    """As many as there are GPUs, else one, unless told."""
    return options.nproc_per_node or (1 if options.engine in ALONE else torch.cuda.device_count()) or 1


def environment(rank: int, world_size: int, master_port: int) -> dict[str, str]:
    """What a rank finds in its environment, as torchrun would set it; the store is the parent's, as torchrun's is."""
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
    """Refuse a ``tcp://`` where rank 0 could not listen.

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
    """Start the ranks, wait for all, and give the exit status; on a stop or a failure, none is left behind."""
    world_size, method = num_ranks(options), InitMethod.parse(options.init_method)
    # As torchrun does, but with all cores; it must be set before a rank imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // world_size)))
    with ExitStack() as stack:
        stop = stack.enter_context(Stop(options.grace + 2 * _MARGIN_S))
        port = 0
        if method.scheme == "env":  # the port is this process's from the beginning: nobody else can take it
            store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            port = store.port
        told, telling = multiprocessing.connection.Pipe(duplex=False)
        first = multiprocessing.get_context("spawn").Lock()
        stack.callback(telling.close)
        # Ranks inherit that: while they import torch, Ctrl-C would be a traceback of each. They hear of it from here.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        started = spawn(  # type: ignore[no-untyped-call]
            _rank, (options, world_size, port, told, first), world_size, join=False
        )
        signal.signal(signal.SIGINT, handler)
        processes: list[BaseProcess] = started.processes
        told.close()
        try:
            code = _wait(processes, stop, telling, options.grace)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            method.remove()
        return code


def _wait(processes: list[BaseProcess], stop: Stop, telling: Connection, grace_s: float) -> int:
    """Until all have ended, or have had their time to; the status is that of the first that did not end well."""
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    code, deadline_s = 0, float("inf")
    while running and time.monotonic() < deadline_s:
        for sentinel in multiprocessing.connection.wait(list(running), timeout=_LOOK_EVERY_S):
            rank = running.pop(sentinel)  # type: ignore[arg-type]  # these sentinels are numbers
            processes[rank].join()
            if not code:
                code = _status(rank, processes[rank], stop)
        if (stop.requested or code) and not telling.closed:
            telling.close()
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


def _rank(rank: int, options: Options, world_size: int, port: int, told: Connection, first: Lock) -> NoReturn:
    from nodekit.training.__main__ import train  # which is `__main__` to the parent, and not to a rank

    parent = Parent(told, first)
    os.environ.update(environment(rank, world_size, port))
    try:
        code = train(options, parent)
    except Exception:
        code = 1
        if parent.is_first():
            traceback.print_exc()
    leave(code)


def environ_to_check(environ: Mapping[str, str], world_size: int) -> dict[str, str]:
    """The environment of the last rank, which needs the most: as many GPUs as there are ranks."""
    return {**environ, **environment(world_size - 1, world_size, 0)}
