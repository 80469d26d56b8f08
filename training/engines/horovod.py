"""Horovod, over gloo: its threads agree on what to send, and average the gradients of a step.

Horovod's own launcher is not used: the ranks exchange, over torch's process group, the variables that horovodrun would
have put into their environments.
"""

import atexit
import importlib
import math
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import torch

from nodekit.training.engine_info import BUILD_HOROVOD, EngineError
from nodekit.training.engines import single
from nodekit.training.group import connections
from nodekit.training.group.collectives import broadcast_from_first
from nodekit.training.options.options import Options
from nodekit.training.world import World

_LEAVE_S = 5.0
"""How many seconds a process waits for Horovod's shutdown, which may wait forever for a rank that is stopped."""

_connections: connections.Connections = set()
"""Horovod's connections of the present attempt."""

_SLOT = ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""The facts about a rank's place that Horovod reads from the environment."""


class Engine(single.Engine):
    """Averages gradients by Horovod's grouped allreduce, before each step of the plain optimizer."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Start Horovod on all ranks, and send rank 0's weights to all ranks."""
        self._hvd = _init(self.options, self.world)
        by_name = {"off": self._hvd.Compression.none, "fp16": self._hvd.Compression.fp16}
        self._compression = by_name[self.options.compress]
        broadcast_from_first(module.state_dict().values(), self.world.device)
        return module

    def average(self) -> None:
        """Average the gradients, once in a step, whatever the number of micro-batches."""
        if self.options.local_steps:
            return
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        # The ranks' losses may use different parameters. A parameter that no rank uses gets no gradient, as with ddp.
        share = torch.tensor([each.grad is not None for each in parameters], dtype=torch.float32)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        sent = [self._compression.compress(_sendable(each)) for each in grads]
        self._wait_for(
            self._hvd.grouped_allreduce_async_(
                [*(tensor for tensor, _ in sent), share], name="gradients", op=self._hvd.Average
            )
        )
        for parameter, grad, (tensor, before), ranks in zip(
            parameters, grads, sent, share.tolist(), strict=True
        ):
            if tensor is not grad:
                grad.copy_(self._compression.decompress(tensor, before))
            parameter.grad = grad if ranks else None

    def _wait_for(self, handle: Any) -> None:
        """Wait with a timeout: Horovod's own wait keeps a core busy, blocks signals, and has no timeout."""
        until = time.monotonic() + self.world.timeout_s
        while not self._hvd.poll(handle):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"horovod: a step's gradients did not come from all ranks in {self.world.timeout_s:g} s (--timeout)"
                )
            time.sleep(0.0001)
        self._hvd.synchronize(handle)


def _sendable(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as Horovod can send it: contiguous, and not in bf16."""
    return (grad.float() if grad.dtype == torch.bfloat16 else grad).contiguous()


def _init(options: Options, world: World) -> Any:
    """Start Horovod on all ranks, and return ``horovod.torch``."""
    try:
        ops = importlib.import_module("horovod.torch.mpi_ops")  # horovod.torch only prints this error
        hvd = importlib.import_module("horovod.torch")
    except (ImportError, OSError) as error:
        raise EngineError(
            f"--engine horovod: the Horovod here was not built for this python and torch ({error}): {BUILD_HOROVOD}"
        ) from error
    if hvd.is_initialized():  # in an earlier attempt, with other ranks
        leaving = _leave(hvd, 1.0)
        if leaving.is_alive():  # Horovod's threads wait for those of the other ranks
            connections.shut_down(_connections)
            leaving.join(_LEAVE_S)
        if leaving.is_alive():
            raise RuntimeError(f"horovod: its threads of the last attempt have not ended in {_LEAVE_S:g} s")
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    interface, address = _own_address(options, world)
    addresses = world.gather((world.node_rank, address))
    local = [each for _, each in addresses if each.startswith("127.")]
    if local and len(local) < world.world_size:
        raise EngineError(
            f"--engine horovod: a rank has found {local[0]} as its address, which the others cannot reach: "
            "name the network interface of each node in GLOO_SOCKET_IFNAME"
        )
    nodes = [node for node, _ in addresses]
    names = ",".join(f"node{node}:{nodes.count(node)}" for node in dict.fromkeys(nodes))
    slots = hosts.get_host_assignments(hosts.parse_hosts(names), world.world_size)
    slot = slots[world.rank]
    with _served(address, slots) if world.is_main else nullcontext() as port:
        os.environ.update(
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
            HOROVOD_GLOO_RENDEZVOUS_ADDR=addresses[0][1],
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(world.gather(port)[0]),
            HOROVOD_GLOO_IFACE=interface,
            HOROVOD_GLOO_TIMEOUT_SECONDS=str(math.ceil(world.timeout_s)),
            **{f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in _SLOT},
        )
        with connections.opened() as own:
            hvd.init()
        _connections.clear()
        _connections.update(own)
        atexit.unregister(ops._basics.shutdown)  # it would wait without a limit for a rank whose threads hang
        atexit.unregister(_leave)  # of an earlier attempt
        atexit.register(_leave, hvd)
        world.gather(None)  # all ranks have used the server
    return hvd


def _own_address(options: Options, world: World) -> tuple[str, str]:
    """Return the network interface by which the other ranks reach this one, and its IPv4 address."""
    psutil = importlib.import_module("psutil")
    addresses = {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    name = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        address = "127.0.0.1"
        if world.world_size > world.local_world_size:
            host = urlsplit(options.init_method).hostname or os.environ.get("MASTER_ADDR", "")
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing, but finds the route
                address = probe.getsockname()[0]
        name = next((each for each, own in addresses.items() if address in own), "")
    if not addresses.get(name):
        raise EngineError(
            f"--engine horovod: found no IPv4 address at the network interface {name!r}, and wanted one that the other "
            f"nodes reach; name it in GLOO_SOCKET_IFNAME (here are {', '.join(addresses)})"
        )
    return name, addresses[name][0]


@contextmanager
def _served(address: str, slots: list[Any]) -> Iterator[int]:
    """Run Horovod's rendezvous server in a thread of rank 0 during the block; yield its port."""
    http: Any = importlib.import_module("horovod.runner.http.http_server")

    class Server(http.RendezvousHTTPServer):  # type: ignore[misc]  # the base class is known at run time only
        def server_bind(self) -> None:
            # HTTPServer's method would look up this host's name, which takes seconds without DNS.
            socketserver.TCPServer.server_bind(self)

    with Server((address, 0), http.RendezvousHandler, verbose=0) as server:
        server.init(slots)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="horovod-rendezvous")
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _leave(hvd: Any, timeout_s: float = _LEAVE_S) -> threading.Thread:
    """Shut Horovod down in a thread, so that other ranks report no error; wait for the thread at most ``timeout_s``."""
    leaving = threading.Thread(target=hvd.shutdown, name="horovod-leaves", daemon=True)
    leaving.start()
    leaving.join(timeout_s)
    return leaving
