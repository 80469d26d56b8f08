"""The mends of torch's rendezvous, each seen to matter; they fail when upstream moves what they stand on."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as upstream

from nodekit.deploy import rendezvous


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., rendezvous.Rendezvous]:
    """Handlers of one rendezvous, by node_rank; the first one hosts the store on a socket that listens already."""
    monkeypatch.setattr(upstream, "_delay", upstream._delay)  # put back at the end
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    fds = [held.detach()]

    def connect(node_rank: int, *, nodes: int, min_nodes: int | None = None, addr: str = "127.0.0.1") -> Any:
        return rendezvous.connect(
            run_id="r",
            node_rank=node_rank,
            local_addr=addr,
            min_nodes=min_nodes or nodes,
            max_nodes=nodes,
            master_addr="127.0.0.1",
            master_port=port,
            listen_fd=fds.pop() if fds else None,
        )

    return connect


def join_all(handlers: list[rendezvous.Rendezvous]) -> list[Any]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers))


def test_ranks_follow_the_plan_and_not_the_order_of_address_strings(connect: Any) -> None:
    handlers = [connect(2, nodes=3, addr="127.0.0.1"), connect(0, nodes=3, addr="127.0.0.2")]
    handlers.append(connect(1, nodes=3, addr="127.0.0.10"))
    infos = join_all(handlers)
    assert [info.rank for info in infos] == [2, 0, 1]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.2"}


def test_upstream_alone_would_sort_address_strings() -> None:
    nodes = [upstream._NodeDesc("10.0.0.2", 1, 0), upstream._NodeDesc("10.0.0.10", 1, 0)]
    assert [node.addr for node in sorted(nodes)] == ["10.0.0.10", "10.0.0.2"]


def test_all_nodes_agree_on_the_round(connect: Any) -> None:
    handlers = [connect(0, nodes=2), connect(1, nodes=2)]
    join_all(handlers)
    assert [handler.round for handler in handlers] == [0, 0]
    join_all(handlers)
    assert [handler.round for handler in handlers] == [1, 1]


def test_every_round_has_a_store_of_its_own_for_the_workers(connect: Any) -> None:
    handlers = [connect(0, nodes=2), connect(1, nodes=2)]
    ports = []
    for _ in range(2):
        infos = [info.bootstrap_store_info for info in join_all(handlers)]
        assert infos[0].master_port == infos[1].master_port
        store = TCPStore("127.0.0.1", infos[0].master_port, is_master=False, timeout=timedelta(seconds=5))
        assert not store.check(["old"])
        store.set("old", "x")
        ports.append(infos[0].master_port)
    assert ports[0] != ports[1]
    assert handlers[0].use_agent_store


def test_a_participant_that_is_gone_counts_as_a_reason_to_form_anew(connect: Any) -> None:
    stays, leaves = connect(0, nodes=2, min_nodes=1), connect(1, nodes=2, min_nodes=1)
    join_all([stays, leaves])
    assert stays.num_nodes_waiting() == 0
    state = stays._state_holder
    leaves._stop_heartbeats()
    with stays._heartbeat_lock:
        # What upstream does when a heartbeat expires; waiting for a real one takes 15 s.
        leaver = next(node for node in state.state.participants if node.node_rank == 1)
        del state.state.participants[leaver]
        del state.state.last_heartbeats[leaver]
        state.mark_dirty()
        state.sync()
    assert stays.num_nodes_waiting() == 1
    assert upstream.DynamicRendezvousHandler.num_nodes_waiting(stays) == 0


def test_forming_takes_no_whole_seconds(connect: Any) -> None:
    handlers = [connect(0, nodes=2), connect(1, nodes=2)]
    late: list[float] = []

    def join_late() -> None:
        time.sleep(0.35)
        start = time.monotonic()
        handlers[1].next_rendezvous()
        late.append(time.monotonic() - start)

    thread = threading.Thread(target=join_late)
    thread.start()
    start = time.monotonic()
    handlers[0].next_rendezvous()
    waited = time.monotonic() - start
    thread.join()
    # Upstream asks once a second: whoever waits for a late node waits for that much more.
    assert waited < 0.35 + 0.5, (waited, late, torch.__version__)
