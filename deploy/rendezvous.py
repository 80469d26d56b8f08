"""torch's c10d rendezvous with the mends a cluster needs; all is upstream's but what is said here.

It reads private names of `torch.distributed.elastic.rendezvous.dynamic_rendezvous` (2.10 to 2.13);
tests/test_rendezvous.py fails when upstream moves them. What differs from stock c10d:

- ranks follow the plan's node_rank, where upstream sorts address *strings* ("10.0.0.10" before "10.0.0.2");
- the store takes over a socket that already listens, so the port found free cannot be lost in between;
- every round has a new store for the workers, kept by the agent of rank 0: upstream keeps the first round's, with
  a stale MASTER_ADDR and old keys in it, or (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE`) leaves it to the worker of
  rank 0, for which the others then wait in growing pauses (0.4 s of a start);
- a participant whose heartbeat expired counts as a reason to re-form (upstream looks at waiting nodes only);
- a state that has to be asked for again is asked for after 0.1 s, not 1 s.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is: torch's stubs leave it out
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as upstream
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

CONNECT_TIMEOUT_S = 60
_POLL_S = 0.05


@dataclass(eq=True, frozen=True, repr=False)
class RankedNode(upstream._NodeDesc):
    """A node that sorts by its planned rank; upstream gives out ranks in sorted order."""

    node_rank: int = 0

    def __lt__(self, other: RankedNode) -> bool:
        return (self.node_rank, self.pid) < (other.node_rank, other.pid)


class Rendezvous(upstream.DynamicRendezvousHandler):
    """Upstream's handler, which also tells a dead participant."""

    _formed_size = 0

    @property
    def round(self) -> int:
        """The current round, the same number on every node of it."""
        return int(self._state_holder.state.round)

    def next_rendezvous(self) -> RendezvousInfo:
        """See upstream."""
        # Forgotten, it is built anew: with the address of the rank 0 of this round, and with no old round's keys.
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        info = super().next_rendezvous()
        self._formed_size = info.world_size
        return info

    def num_nodes_waiting(self) -> int:
        """Nodes that wait to come in, plus those this round was formed with that are gone since."""
        waiting: int = super().num_nodes_waiting()
        return waiting + max(0, self._formed_size - len(self._state_holder.state.participants))


def connect(
    *,
    run_id: str,
    node_rank: int,
    local_addr: str,
    min_nodes: int,
    max_nodes: int,
    master_addr: str,
    master_port: int,
    listen_fd: int | None,
) -> Rendezvous:
    """Reach the store on the rendezvous host, or be it, and build this node's handler.

    Args:
        run_id: of the rendezvous: another generation of a run has another.
        local_addr: this node's address on the job's interface; becomes MASTER_ADDR when it is rank 0.
        listen_fd: the listening socket that holds `master_port`; given on the rendezvous host alone.
    """
    store = TCPStore(
        master_addr,
        master_port,
        is_master=listen_fd is not None,
        multi_tenant=True,
        timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        master_listen_fd=listen_fd,
    )
    settings = upstream.RendezvousSettings(
        run_id,
        min_nodes,
        max_nodes,
        upstream.RendezvousTimeout(),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    backend = C10dRendezvousBackend(store, run_id)
    state = upstream._BackendRendezvousStateHolder(backend, settings, cache_duration=_POLL_S)  # type: ignore[arg-type]  # it is only ever subtracted from a time
    node = RankedNode(local_addr, os.getpid(), 0, node_rank=node_rank)
    handler = Rendezvous(node, settings, backend.name, store, state)
    upstream._delay = _short_delay  # type: ignore[attr-defined]  # upstream imports it without exporting it
    return handler


def _short_delay(seconds: float | tuple[float, float]) -> None:
    """In place of upstream's, which lets a state wait for a second before it is asked for again."""
    time.sleep(_POLL_S * random.random() if isinstance(seconds, tuple) else min(seconds, _POLL_S))  # noqa: S311
