"""The mends of torch's rendezvous, each seen to matter; they fail when upstream moves what they stand on."""

import base64
import contextlib
import inspect
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import until
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as upstream

from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.agent.rendezvous import keepalive, rendezvous, state
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.rendezvous.keepalive import Keepalive, KeepaliveServer, cut_connections
from nodekit.deploy.agent.rendezvous.rendezvous import FormAgain, Rendezvous, StoreLost
from nodekit.deploy.agent.rendezvous.signed_store import Forged, SignedBackend, SignedStore
from nodekit.deploy.agent.spec import AgentSpec
from nodekit.deploy.host import accept

TOKEN = "the run's token"
PATIENT = timedelta(seconds=60)
"""For a store that is in this process: it answers at once, unless the machine stands still."""


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rendezvous]]:
    """Nodes of one rendezvous, by node_rank; the first one hosts the store on a socket that listens already."""
    for name in ("_delay", "get_method_name"):
        monkeypatch.setattr(upstream, name, getattr(upstream, name))  # put back at the end
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    fds = [held.detach()]
    made: list[Rendezvous] = []

    def connect(node_rank: int, *, nodes: int, min_nodes: int | None = None, addr: str = "127.0.0.1") -> Any:
        names = tuple(f"n{number}" for number in range(nodes))
        spec = AgentSpec(
            run_id="r",
            generation=0,
            name=f"n{node_rank}",
            nodes=names,
            electorate=names,
            node_rank=node_rank,
            nproc_per_node=1,
            local_addr=addr,
            min_nodes=min_nodes or nodes,
            max_nodes=nodes,
            master_addr="127.0.0.1",
            master_port=port,
            is_host=bool(fds),
            listen_fd=fds.pop() if fds else None,
            max_restarts=0,
            argv=(),
            env={},
            code_dir="",
            node_dir="",
            grace_s=1.0,
            wait_s=20.0,
            token=TOKEN,
        )
        made.append(rendezvous.Rendezvous(spec, lambda: None, nothing))
        return made[-1]

    yield connect
    for each in reversed(made):
        each.close()


def form_all(nodes: list[Rendezvous]) -> list[Formed]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda node: node.form({"name": node._spec.name, "nproc": 1}), nodes))


def hang_up(node: Rendezvous, *, others: Rendezvous) -> None:
    """What the others see of a node whose process is killed; `close` would cut the connections of them all."""
    upstream._delay = others._delay
    node._handler._stop_heartbeats()
    assert node._keepalive is not None
    node._keepalive.close()


def nothing(kind: str, **fields: Any) -> None:
    """Take an event."""


def test_ranks_follow_the_plan_and_not_the_order_of_address_strings(connect: Any) -> None:
    nodes = [connect(2, nodes=3, addr="127.0.0.1"), connect(0, nodes=3, addr="127.0.0.2")]
    nodes.append(connect(1, nodes=3, addr="127.0.0.10"))
    formed = form_all(nodes)
    assert [each.group_rank for each in formed] == [2, 0, 1]
    assert {each.master_addr for each in formed} == {"127.0.0.2"}
    for each in formed:
        assert [member["name"] for member in each.members] == ["n0", "n1", "n2"]


def test_upstream_alone_would_sort_address_strings() -> None:
    nodes = [upstream._NodeDesc("10.0.0.2", 1, 0), upstream._NodeDesc("10.0.0.10", 1, 0)]
    assert [node.addr for node in sorted(nodes)] == ["10.0.0.10", "10.0.0.2"]


def test_all_nodes_agree_on_the_round(connect: Any) -> None:
    nodes = [connect(0, nodes=2), connect(1, nodes=2)]
    assert [formed.round for formed in form_all(nodes)] == [0, 0]
    assert [formed.round for formed in form_all(nodes)] == [1, 1]


def test_every_round_has_a_store_of_its_own_for_the_workers(connect: Any) -> None:
    nodes = [connect(0, nodes=2), connect(1, nodes=2)]
    ports = []
    for _ in range(2):
        first, second = form_all(nodes)
        assert first.master_port == second.master_port
        store = TCPStore("127.0.0.1", first.master_port, is_master=False, timeout=PATIENT)
        assert not store.check(["old"])
        store.set("old", "x")
        ports.append(first.master_port)
    assert ports[0] != ports[1]


def test_the_store_of_workers_that_train_on_lives_until_the_next_ones_begin(connect: Any) -> None:
    """The agents may meet several times until then."""
    nodes = [connect(0, nodes=2), connect(1, nodes=2)]
    port = form_all(nodes)[0].master_port
    TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENT).set("name", "value")
    for _ in range(3):
        last = form_all(nodes)[0]
    assert TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENT).get("name") == b"value"
    nodes[0].workers_begin()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    socket.create_connection(("127.0.0.1", last.master_port)).close()


def test_a_node_that_is_gone_is_a_reason_to_form_anew_at_once(connect: Any) -> None:
    stays, leaves = connect(0, nodes=2, min_nodes=1), connect(1, nodes=2, min_nodes=1)
    form_all([stays, leaves])
    assert stays.num_nodes_waiting() == 0
    start = time.monotonic()
    hang_up(leaves, others=stays)
    while stays.num_nodes_waiting() == 0:
        assert time.monotonic() - start < 10, "upstream waits 15 s for a heartbeat to expire"
        time.sleep(0.01)
    assert stays.num_lost == 1
    assert upstream.DynamicRendezvousHandler.num_nodes_waiting(stays._handler) == 0
    (alone,) = form_all([stays])
    assert [member["name"] for member in alone.members] == ["n0"]


def test_a_node_that_is_frozen_while_its_kernel_still_answers_keeps_nobody_waiting(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by SIGSTOP, docker pause or scontrol suspend: its keepalive goes on."""
    for module in (rendezvous, state):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.5)
    nodes = [connect(rank, nodes=3, min_nodes=2) for rank in range(3)]
    form_all(nodes)
    nodes[2]._handler._stop_heartbeats()
    assert not nodes[0].num_lost
    formed = form_all(nodes[:2])
    assert [[member["name"] for member in each.members] for each in formed] == [["n0", "n1"]] * 2


def test_a_node_whose_clock_is_set_back_does_not_fall_silent(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's next heartbeat comes when the clock is as late again: a day later, and the others wait for 15 s."""

    class Yesterday(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(days=1)

    for module in (rendezvous, state):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.2)
    nodes = [connect(rank, nodes=2, min_nodes=1) for rank in range(2)]
    form_all(nodes)
    for module in (upstream, state):
        monkeypatch.setattr(module, "datetime", Yesterday)

    def is_alive() -> bool:
        nodes[0].num_nodes_waiting()
        heartbeats = nodes[0]._state.state.last_heartbeats
        return len(heartbeats) == 2 and all(
            timedelta(hours=1) < datetime.now(each.tzinfo) - each < timedelta(days=2)
            for each in heartbeats.values()
        )

    until(is_alive)


def test_who_has_not_looked_for_a_while_takes_nobody_for_silent(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped itself, say."""
    now = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now)
    alone = connect(0, nodes=2, min_nodes=1)._state
    told = {"n0": datetime(2026, 1, 1), "n1": datetime(2026, 1, 1)}
    assert alone._silent(told) == set()
    now += 3600
    assert alone._silent(told) == set()
    for _ in range(3):
        now += 4.9
        told["n0"] += timedelta(seconds=-1)  # whatever its clock does
        found = alone._silent(told)
    assert found == {"n1"}


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_node_whose_clock_is_wrong_takes_no_other_for_lost_and_is_not(
    connect: Any, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    wrong = threading.local()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=getattr(wrong, "ahead_s", 0))

    monkeypatch.setattr(upstream, "datetime", Clock)
    monkeypatch.setattr(state, "datetime", Clock)
    monkeypatch.setattr(rendezvous, "FIRST_CALL_S", 1.0)
    nodes = [connect(rank, nodes=3, min_nodes=2) for rank in range(3)]
    form_all(nodes[:2])
    # The next round is over when all have come, and not before, however long one of them takes.
    for node in nodes:
        node._settings.timeout.to_last_call(60.0)

    def form(node: Rendezvous) -> Formed:
        if node is nodes[2]:
            wrong.ahead_s = ahead_s
        while node is not nodes[2] and not node.num_nodes_waiting():
            time.sleep(0.01)
        return node.form({"name": node._spec.name, "nproc": 1})

    with ThreadPoolExecutor(3) as pool:
        formed = list(pool.map(form, nodes))
    assert [(each.group_rank, len(each.members)) for each in formed] == [(0, 3), (1, 3), (2, 3)]


def test_who_are_all_there_do_not_wait_for_a_last_call(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of its own 15 s, those for which a machine may stand still are too many.
    monkeypatch.setattr(rendezvous, "FIRST_CALL_S", 100.0)
    nodes = [connect(rank, nodes=3, min_nodes=2) for rank in range(3)]
    start = time.monotonic()
    form_all(nodes)
    hang_up(nodes.pop(), others=nodes[0])
    while nodes[0].num_nodes_waiting() == 0:
        time.sleep(0.01)
    form_all(nodes)
    assert time.monotonic() - start < 60  # the first round has a last call of 100 s


def test_the_first_round_waits_for_those_who_are_still_coming(connect: Any) -> None:
    """Else it would be broken off at once, for them."""
    nodes = [connect(rank, nodes=3, min_nodes=2) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form_all, nodes)
        time.sleep(1)  # so long they look again and again
        assert not forming.done()
        last = form_all([connect(2, nodes=3, min_nodes=2)])
        assert [len(each.members) for each in (*forming.result(), *last)] == [3, 3, 3]


def test_all_are_told_at_once_that_a_round_is_broken_or_a_node_lost(connect: Any) -> None:
    nodes = [connect(rank, nodes=3, min_nodes=2) for rank in range(3)]
    rung = [threading.Event() for _ in nodes]
    for node, bell in zip(nodes, rung, strict=True):
        node._on_news = bell.set
    form_all(nodes)
    for teller, number in ((1, 0), (0, 1)):  # one of the others; the one that has the store
        assert not any(node.is_broken(number) for node in nodes)
        nodes[teller].tell_broken(number, is_explained=False)
        until(lambda number=number: all(node.is_broken(number) for node in nodes))
        assert not any(node.is_explained(number) for node in nodes)
        nodes[1 - teller].tell_broken(number, is_explained=True)
        until(lambda number=number: all(node.is_explained(number) for node in nodes))
    nodes[0].tell_broken(0, is_explained=True)  # of an earlier round, by one that comes late
    assert nodes[0].is_broken(1)
    assert nodes[0].is_explained(1)
    for bell in rung:
        bell.clear()
    hang_up(nodes.pop(), others=nodes[0])
    assert all(bell.wait(20) for bell in rung[:2])
    assert not any(node.is_broken(2) for node in nodes)


def test_who_is_lost_is_known_to_all_whatever_the_rendezvous_host_does_meanwhile(connect: Any) -> None:
    """Its agent ends an attempt first, for which ranks that wait in NCCL take a second."""
    nodes = [connect(rank, nodes=3, min_nodes=2) for rank in range(3)]
    form_all(nodes)
    nodes[0]._handler._stop_heartbeats()  # with which it writes whom it has found to be gone
    start = time.monotonic()
    hang_up(gone := nodes.pop(), others=nodes[0])
    until(lambda: nodes[1].num_nodes_waiting() == 1)
    assert time.monotonic() - start < 10, "it takes 15 s until a heartbeat expires"
    assert (nodes[1].num_lost, nodes[1].here) == (1, {"n0", "n1"})
    assert [len(each.members) for each in form_all(nodes)] == [2, 2]
    gone._connect_keepalive(gone._handler._this_node.identity)  # a false alarm
    until(lambda: not nodes[1]._told_lost)


def test_an_agent_started_again_with_the_pid_of_the_last_one_is_another(connect: Any) -> None:
    """As in a container, or on a host that has started again: the last one was no false alarm, but dead."""
    host, gone = nodes = [connect(rank, nodes=2, min_nodes=1) for rank in range(2)]
    first = form_all(nodes)[0]
    assert not host.gone(first)
    hang_up(gone, others=host)
    until(lambda: host.num_nodes_waiting() == 1)
    assert host.has_lost(first)
    rendezvous.number_of_process.cache_clear()
    again = connect(1, nodes=2, min_nodes=1)
    formed = form_all([host, again])
    assert [len(each.members) for each in formed] == [2, 2]
    assert (host.gone(first), host.gone(formed[0])) == (["n1"], [])
    assert not host.has_lost(formed[0])
    server = host._keepalive_server
    assert server is not None
    assert (len(server.lost), server._lost_after) == (1, host._spec.lost_after), "as soon as before"


def test_the_loss_of_the_store_ends_a_wait_for_it(connect: Any) -> None:
    host, other = connect(0, nodes=2), connect(1, nodes=2)
    waiting = threading.Thread(target=host.close)
    threading.Timer(0.5, waiting.start).start()
    start = time.monotonic()
    with pytest.raises(StoreLost):
        other.form({"name": "n1"})
    assert time.monotonic() - start < 15, "it would wait for 20 s"
    with pytest.raises(StoreLost):
        other.num_nodes_waiting()


def test_a_pause_that_raises_ends_a_wait(connect: Any) -> None:
    class Enough(Exception):
        pass

    def pause() -> None:
        raise Enough

    alone = connect(0, nodes=2)
    alone._pause = pause
    with pytest.raises(Enough):
        alone.form({"name": "n0"})


def test_how_the_job_ended_is_known_to_who_comes_late(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LAST_LOOK_S", 60.0)  # a machine may stand still for longer than 3 s
    host, late = connect(0, nodes=2, min_nodes=1), connect(1, nodes=2, min_nodes=1)
    closing = threading.Thread(target=host.close, args=("succeeded",))
    closing.start()
    with pytest.raises(RendezvousClosedError):
        late.form({"name": "n1"})
    assert late.outcome == "succeeded"
    late.close()
    closing.join(30)
    assert not closing.is_alive()


def test_after_a_false_alarm_a_node_is_given_more_time() -> None:
    said: list[tuple[str, float]] = []
    hub = KeepaliveServer(
        "127.0.0.1", TOKEN, 1.0, 3, lambda kind, lost_after_s: said.append((kind, lost_after_s))
    )

    def call() -> Keepalive:
        return Keepalive(
            "127.0.0.1", hub.port, TOKEN, "1.77", keep_alive_s=1.0, lost_after=3, on_lost=lambda: None
        )

    call().close()
    until(lambda: hub.lost == {"1.77"})
    again = call()
    assert said == [("false-alarm", 6.0)]
    assert hub.lost == set()
    user_timeout = again._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    # The last sign of life may have been a second before, and the kernel begins to count 0.4 s after the next one.
    assert user_timeout == 4600
    hub.close()


def test_after_a_false_alarm_all_other_nodes_are_given_more_time_too() -> None:
    server = KeepaliveServer("127.0.0.1", TOKEN, 1.0, 3, nothing)
    options: dict[str, Any] = {"keep_alive_s": 1.0, "lost_after": 3, "on_lost": lambda: None}
    other = Keepalive("127.0.0.1", server.port, TOKEN, "0.7", **options)
    for _ in range(2):
        Keepalive("127.0.0.1", server.port, TOKEN, "1.77", **options).close()
        until(lambda: "1.77" in server.lost)
    connection = server._connected["0.7"]
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4600
    other.close()
    server.close()


def test_a_node_that_calls_again_is_not_lost_when_its_first_connection_ends() -> None:
    server = KeepaliveServer("127.0.0.1", TOKEN, 1.0, 3, nothing)
    options: dict[str, Any] = {"keep_alive_s": 1.0, "lost_after": 3, "on_lost": lambda: None}
    first, again = (Keepalive("127.0.0.1", server.port, TOKEN, "1.77", **options) for _ in range(2))
    first.close()
    assert first.lost.wait(20)
    time.sleep(0.5)  # the server hears of it a moment later
    assert (server.connected, server.lost) == ({"1.77"}, set())
    again.close()
    server.close()


def test_what_ends_with_the_handshake_does_not_end_a_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its time, nor that of a node with pauses between its signs of life that are longer than that."""
    for module in (accept, keepalive):
        monkeypatch.setattr(module, "HANDSHAKE_S", 1.0)
    server = KeepaliveServer("127.0.0.1", TOKEN, 10.0, 3, nothing)
    options: dict[str, Any] = {"keep_alive_s": 10.0, "lost_after": 3, "on_lost": lambda: None}
    node = Keepalive("127.0.0.1", server.port, TOKEN, "1.77", **options)
    assert not node.lost.wait(2.5)
    assert (server.connected, server.lost) == ({"1.77"}, set())
    node.close()
    server.close()


def test_what_waits_for_a_host_that_is_gone_is_ended_before_that_is_told() -> None:
    server = KeepaliveServer("127.0.0.1", TOKEN, 1.0, 3, nothing)
    ended: list[bool] = []
    options: dict[str, Any] = {"keep_alive_s": 1.0, "lost_after": 3}
    nodes = [
        Keepalive(
            "127.0.0.1",
            server.port,
            TOKEN,
            name,
            on_lost=lambda: ended.append(nodes[1].lost.is_set()),
            **options,
        )
        for name in ("1.77", "2.77")
    ]
    nodes[0].close()
    assert nodes[0].lost.wait(20)
    assert ended == [], "it has hung up itself"
    server.close()
    assert nodes[1].lost.wait(20)
    assert ended == [False]


def test_only_connections_to_the_place_that_is_gone_are_cut() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as gone,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(gone.getsockname(), timeout=5) as cut,
        socket.create_connection(other.getsockname(), timeout=5) as left,
    ):
        cut_connections(*gone.getsockname())
        assert cut.recv(1) == b""
        left.sendall(b"x")
        with other.accept()[0] as end:
            assert end.recv(1) == b"x"


def test_what_several_threads_tell_at_once_arrives_whole() -> None:
    """A frame that is cut in two by another one ends the connection, and its node would be taken for lost."""
    heard: list[Any] = []
    told: list[Any] = []
    server = KeepaliveServer("127.0.0.1", TOKEN, 0.001, 3, nothing, heard.append)
    node = Keepalive(
        "127.0.0.1", server.port, TOKEN, "1.77",
        keep_alive_s=0.001, lost_after=3000, on_lost=lambda: None, on_news=told.append,
    )  # fmt: skip
    until(lambda: server._wires)
    tells: list[Callable[[Any], None]] = [node.tell, server.tell] * 2
    with ThreadPoolExecutor(len(tells)) as pool:
        list(pool.map(lambda tell: [tell({"broken": number}) for number in range(300)], tells))
    until(lambda: len(heard) == 4 * 300 and len(told) == 2 * 300)
    assert server.lost == set()
    node.close()
    server.close()


def test_signs_of_life_are_sent_by_both_ends_and_are_no_news() -> None:
    """What is sent must be acknowledged: so the kernel finds out that the other host is gone."""
    heard: list[Any] = []
    server = KeepaliveServer("127.0.0.1", TOKEN, 0.05, 3, nothing, heard.append)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        wire = Wire(connection)
        wire.prove(TOKEN, is_client=True)
        wire.ask({"identity": "1.77"})
        assert [wire.receive_frame() for _ in range(3)] == [b"", b"", b""]
        wire.send_frame(b"")
        wire.send({"broken": 4})
        until(lambda: heard)
        assert heard == [{"broken": 4}]
    server.close()


def test_a_node_sends_signs_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        options: dict[str, Any] = {"keep_alive_s": 0.05, "lost_after": 3, "on_lost": lambda: None}
        calling = pool.submit(Keepalive, *listener.getsockname(), TOKEN, "1.77", **options)
        connection, _ = listener.accept()
        wire = Wire(connection)
        wire.prove(TOKEN, is_client=False)
        wire.receive()
        wire.send({"lost_after": 3})
        assert [wire.receive_frame() for _ in range(3)] == [b"", b"", b""]
        calling.result().close()
        connection.close()


class CalledAway(Exception):
    """By a call into another generation."""


def test_who_waits_for_a_host_to_answer_is_not_deaf_meanwhile() -> None:
    def pause() -> None:
        raise CalledAway

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        where = listener.getsockname()
        assert rendezvous.answers(*where, lambda: None)
        with contextlib.ExitStack() as held:  # the listener's queue is full: it says neither yes nor no
            for _ in range(4):
                waiting = held.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(where)
            with pytest.raises(CalledAway):
                rendezvous.answers(*where, pause)
    assert not rendezvous.answers(*where, lambda: None)


def test_a_stranger_is_not_listened_to() -> None:
    hub = KeepaliveServer("127.0.0.1", TOKEN, 1.0, 3, nothing)
    with pytest.raises(ConnectionError):
        Keepalive(
            "127.0.0.1", hub.port, "wrong", "1.77", keep_alive_s=1.0, lost_after=3, on_lost=lambda: None
        )
    assert hub.connected == set()
    hub.close()


# --- somebody else writes to the store: it has no authentication ---


def key(name: str) -> str:
    """Where the agents keep it."""
    return f"nodekit/r.0/{name}"


def stranger(node: Rendezvous) -> TCPStore:
    """The store, as anybody has it who reaches it."""
    return TCPStore("127.0.0.1", node._spec.master_port, is_master=False, timeout=PATIENT)


class Pickle:
    """Runs a command as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_that_a_stranger_puts_into_the_store_is_refused_and_not_run(
    connect: Any, tmp_path: Path
) -> None:
    nodes = [connect(0, nodes=2), connect(1, nodes=2)]
    form_all(nodes)
    bomb = base64.b64encode(pickle.dumps(Pickle(tmp_path / "ran"))).decode()
    for name in (key("state"), "torch.rendezvous.r.0"):  # the other one is upstream's
        for value in (f"{'0' * 64} 99 {bomb}", bomb):
            stranger(nodes[0]).set(name, value)
            for node in nodes:
                time.sleep(rendezvous._POLL_S)  # for so long a state is kept
                with pytest.raises(StoreLost, match="is not signed with this run's token"):
                    node.num_nodes_waiting()
    assert not (tmp_path / "ran").exists()


def test_an_old_state_that_a_stranger_puts_back_is_refused(connect: Any) -> None:
    alone, other = connect(0, nodes=2, min_nodes=1), connect(1, nodes=2, min_nodes=1)
    beginning = stranger(alone).get(key("state"))
    form_all([alone, other])
    stranger(alone).set(key("state"), beginning)
    with pytest.raises(StoreLost, match=r"nodekit/r\.0/state went back from version \d+ to 0"):
        alone.form({"name": "n0"})
    stranger(alone).delete_key(key("state"))
    with pytest.raises(StoreLost, match="was removed"):
        other.form({"name": "n1"})


def test_a_state_that_is_gone_is_noticed_by_who_writes_it_too(connect: Any) -> None:
    """As a node's signs of life are: its rendezvous would otherwise wait for what nobody can answer."""
    alone = connect(0, nodes=1)
    form_all([alone])
    backend = SignedBackend(alone._signed)
    state, token = backend.get_state() or (b"", None)
    *_, is_set = backend.set_state(state, token) or (False,)
    assert is_set
    _, token = backend.get_state() or (b"", None)
    stranger(alone).delete_key(key("state"))
    with pytest.raises(Forged, match="was removed"):
        backend.set_state(state, token)


@pytest.mark.parametrize("name", ["0/done/1", "0/hang", "hub", "outcome"])
def test_what_a_stranger_writes_over_is_refused(connect: Any, name: str) -> None:
    host, other = connect(0, nodes=2), connect(1, nodes=2)
    formed, _ = form_all([host, other])
    store = stranger(host)
    store.set(key(name), "1")
    store.get(key(name))  # torch 2.4's server has not done what it was told before it answers
    if name == "outcome":
        assert other.outcome == "failed"
        return
    place = (
        f"somebody else writes to the rendezvous store at 127.0.0.1:{host._spec.master_port}: {key(name)} "
    )
    look: dict[str, Callable[[], object]] = {
        "0/done/1": lambda: formed.without("done"),
        "0/hang": lambda: formed.store.get("hang"),
        "hub": lambda: connect(1, nodes=2),
    }
    with pytest.raises(StoreLost, match=re.escape(place)), host.lost_store_is_told():
        look[name]()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_round_is_formed_again_where_a_member_does_not_tell_of_itself(
    connect: Any, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """It takes part, and before it has told its address it is lost, or stands still."""
    monkeypatch.setattr(rendezvous, "FORM_TIMEOUT_S", 600.0 if is_lost else 0.3)
    host, other = connect(0, nodes=2), connect(1, nodes=2)
    deadline = time.monotonic() + PATIENT.total_seconds()

    def pause() -> None:
        assert time.monotonic() < deadline, "it waits for what never comes"

    def take_part() -> None:
        other._handler._bootstrap_store_info = other._handler._shared_tcp_store_server = ...
        other._handler.next_rendezvous()
        if is_lost:
            hang_up(other, others=host)

    host._pause = pause
    with ThreadPoolExecutor(1) as pool:
        pool.submit(take_part)
        with pytest.raises(FormAgain):
            host.form({"name": "n0"})


def test_who_is_lost_as_the_round_is_complete_leaves_no_round_of_fewer_nodes_than_the_fewest(
    connect: Any,
) -> None:
    """It would train with these, and nobody would be missed: the round never had another member."""
    host, other = connect(0, nodes=2), connect(1, nodes=2)
    count = host._handler._get_world

    def count_late() -> Any:
        until(lambda: other._identity in host._lost)
        host._state.sync()
        return count()

    def take_part() -> None:
        other._handler._bootstrap_store_info = other._handler._shared_tcp_store_server = ...
        other._handler.next_rendezvous()
        hang_up(other, others=host)

    host._handler._get_world = count_late
    with ThreadPoolExecutor(1) as pool:
        pool.submit(take_part)
        with pytest.raises(FormAgain):
            host.form({"name": "n0"})


@pytest.mark.parametrize("changed", [{"run_id": "another"}, {"generation": 1}, {"token": "another"}])
def test_an_agent_of_another_run_or_generation_is_no_member_of_this_one(
    connect: Any, changed: dict[str, Any]
) -> None:
    """It may not have heard yet that its own is over, and finds another one at the address that it knows."""
    host = connect(0, nodes=2)
    stray = Rendezvous.__new__(Rendezvous)
    stray._spec = replace(host._spec, node_rank=1, listen_fd=None, **changed)
    stray._signed = host._signed  # as if it could read that
    stray._pause = lambda: None
    with pytest.raises(StoreLost):
        stray._connect_keepalive("1.1.a")
    assert not host._keepalive_server.connected


def test_who_leaves_is_missed_at_once_and_waits_for_no_answer_of_the_store(connect: Any) -> None:
    host, other = connect(0, nodes=2), connect(1, nodes=2)
    formed, _ = form_all([host, other])

    def wait() -> None:
        with contextlib.suppress(torch.distributed.DistError):
            other._store.get("what never comes")

    waiting = threading.Thread(target=wait)
    waiting.start()
    host._handler._stop_heartbeats()  # in this process its connections are cut, too
    other.close()
    until(lambda: host.gone(formed) == ["n1"])
    waiting.join(30)
    assert not waiting.is_alive(), "it would wait for a minute"


def test_a_call_that_was_answered_before_the_host_was_lost_is_not_taken_for_one_that_counts(
    connect: Any,
) -> None:
    host, other = connect(0, nodes=2), connect(1, nodes=2)
    host.close()
    until(lambda: other.is_lost)
    with pytest.raises(StoreLost, match="its connection ended"), other.lost_store_is_told():
        pass


def test_what_is_signed_counts_for_its_run_round_and_key_alone() -> None:
    store = HashStore()
    ours = SignedStore(store, TOKEN, "nodekit/r.0", "there").part("1")
    assert ours.get("a") is None
    ours.set("a", "über 1")
    assert ours.get("a") == "über 1"
    assert ours.get_all(["a", "b"]) is None
    for reader, name in (
        (SignedStore(store, "another", "nodekit/r.0", "there").part("1"), "a"),
        (SignedStore(store, TOKEN, "nodekit/r.1", "there").part("1"), "a"),
        (SignedStore(store, TOKEN, "nodekit/r.0", "there").part("2"), "a"),
        (ours, "b"),
    ):
        store.set(reader._full(name), store.get("nodekit/r.0/1/a"))
        with pytest.raises(Forged, match=f"there: {reader._full(name)} is not signed"):
            reader.get(name)
    for garbage in (b"", b"\xff\x00", b" "):
        store.set("nodekit/r.0/1/a", garbage.decode("latin-1"))
        with pytest.raises(Forged):
            ours.get_all(["a"])


def test_an_event_s_caller_is_named_without_reading_source_files(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record() -> str:
        return str(upstream.get_method_name())

    def caller() -> str:
        return record()

    assert caller() == "caller"
    nodes = [connect(0, nodes=2), connect(1, nodes=2)]
    assert caller() == "caller", "as upstream names it"
    monkeypatch.delattr(inspect, "stack")
    assert [formed.round for formed in form_all(nodes)] == [0, 0]


def test_forming_takes_no_whole_seconds(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Upstream asks once a second: whoever waits for a late node waits for a whole one, every time. What is looked at is
    # how long it pauses, for a busy machine holds us up whatever we do.
    nodes = [connect(0, nodes=2), connect(1, nodes=2)]
    pauses: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    thread = threading.Timer(0.35, lambda: nodes[1].form({"name": "n1"}))
    thread.start()
    nodes[0].form({"name": "n0"})
    thread.join()
    assert pauses
    assert max(pauses) <= 0.1, torch.__version__
