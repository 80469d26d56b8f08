"""Hostile and broken company of the nodes that keep copies."""

import contextlib
import hashlib
import socket
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from replica_cluster import PATIENT_S, TOKEN, Cluster, Node, wait_for

from nodekit.deploy.agent import agent_wire
from nodekit.deploy.agent.replicas.replica_files import is_allowed
from nodekit.deploy.host import ports


def test_who_does_not_know_the_token_gets_nothing(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(1)
    with pytest.raises(agent_wire.WrongToken):
        agent_wire.connect(nodes[0].alive.endpoint, "another token")
    wait_for(lambda: nodes[0].kinds("replica-refused"))
    agent_wire.connect(nodes[0].alive.endpoint, TOKEN).close()


def test_the_token_does_not_travel_and_a_changed_frame_is_refused() -> None:
    heard = bytearray()

    def pair() -> tuple[socket.socket, socket.socket]:
        with ports.listen("127.0.0.1") as listener:
            return socket.create_connection(listener.getsockname()), listener.accept()[0]

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        (a, b), (c, d) = pair(), pair()  # a says something to d, by way of b and c
        client, server = (stack.enter_context(agent_wire.Wire(each)) for each in (a, d))
        for each in (b, c):
            stack.enter_context(each)
        proving = [pool.submit(w.prove, TOKEN, is_client=w is client) for w in (client, server)]
        for source, sink in [(b, c), (c, b), (b, c), (c, b)]:
            heard += (said := source.recv(64))
            sink.sendall(said)
        for each in proving:
            each.result()
        for op, is_changed in [("list", False), ("fetch", True)]:
            client.send({"op": op})
            heard += (said := b.recv(1024))
            c.sendall(said.replace(b"fetch", b"fetcH"))
            if is_changed:
                with pytest.raises(ConnectionError, match="changed on its way"):
                    server.receive()
            else:
                assert server.receive() == {"op": op}
    assert b"list" in heard
    assert TOKEN.encode() not in heard


def test_a_call_to_a_lost_host_is_not_waited_for(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    with contextlib.ExitStack() as stack:
        lost = stack.enter_context(socket.socket())
        lost.bind(("127.0.0.1", 0))
        lost.listen(0)
        for _ in range(3):  # with its queue full, it drops what comes, as a host does whose cable was pulled
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(lost.getsockname())
        pusher = nodes[0].alive._pusher
        assert pusher is not None
        pusher._targets[0].endpoint = f"127.0.0.1:{lost.getsockname()[1]}"
        nodes[0].write("a.pt", "a")  # only now: it goes at once
        wait_for(lambda: pusher._wire is not None)
        time.sleep(0.1)
        assert pusher._wire is not None, "it is refused instead"
        started = time.monotonic()
        nodes[0].die()
        assert time.monotonic() - started < PATIENT_S / 2, "the call itself would last for twice as long"
        assert not pusher._thread.is_alive()


def test_a_large_file_goes_in_pieces(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    with (nodes[0].folder / "big.pt").open("wb") as file:
        file.truncate(48 << 20)
    tracemalloc.start()
    try:
        nodes.settle()
        nodes[0].die()
        nodes.gather()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (nodes[1].folder / "big.pt").stat().st_size == 48 << 20


HOSTILE = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a//b",
    "",
    ".",
    "..",
    "a/.",
    "a\0b",
    "\ud800",
    "fence",
    ".tmp",
]


def keep(name: str, data: bytes, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    """What a node that keeps to no rules might ask another to keep for it."""
    version = [[1, attempt], 1, hashlib.sha256(data).hexdigest(), "", len(data)]
    listing = {"node": "n0", "attempt": [1, attempt], "told_ns": time.time_ns(), "files": {name: version}}
    return {"op": "keep", "attempt": [1, attempt], "listing": listing | changes}


def call(node: Node) -> agent_wire.Wire:
    return agent_wire.connect(node.alive.endpoint, TOKEN)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_refused(cluster: Callable[..., Cluster], name: str) -> None:
    nodes = cluster(2)
    nodes.gather()
    with call(nodes[1]) as wire, pytest.raises(ConnectionError):
        wire.ask(keep(name, b"owned"))
    with contextlib.suppress(ValueError):
        assert not is_allowed(name)
    assert nodes[1].keeps("n0") == {}


@pytest.mark.parametrize("request_", [
    {"op": "fetch", "sha256": "../state.json"},
    {"op": "fetch", "sha256": "listings/n0.json"},
    {"op": "fetch"},
    {"op": "exec"},
    keep("a", b"x", node="../../x" * 40),
    keep("a", b"x", files={"a": [[1, 1], 0, "../../x", "", 1]}),
    keep("a", b"x", files={"a": [[1, 1], 0, "0" * 64, "", -1]}),
    keep("a", b"x", files={"a": [[1, 1], 0, "0" * 64, "", 1 << 70]}),
    keep("a", b"x", files={"a": [[1, 1], 0, "", "../../etc/passwd", 0]}),
])  # fmt: skip
def test_a_hostile_request_ends_the_connection(
    cluster: Callable[..., Cluster], request_: dict[str, Any]
) -> None:
    nodes = cluster(2)
    nodes.gather()
    with call(nodes[0]) as wire, pytest.raises(ConnectionError):
        wire.ask(request_)
    with call(nodes[0]) as wire:
        assert wire.ask({"op": "fetch", "sha256": "0" * 64}) == {}  # and it still serves


@pytest.mark.parametrize(("node", "sent", "is_kept"), [
    ("n0", b"good", True), ("../../../escaped", b"good", True), ("n0", b"evil", False),
])  # fmt: skip
def test_only_the_content_that_was_named_is_kept_and_only_where_copies_are(
    cluster: Callable[..., Cluster], tmp_path: Path, node: str, sent: bytes, is_kept: bool
) -> None:
    nodes = cluster(2)
    nodes.gather()
    with call(nodes[1]) as wire:
        asked = wire.ask(keep("a.pt", b"good", node=node))
        assert asked == {"op": "fetch", "sha256": hashlib.sha256(b"good").hexdigest()}
        wire.send({"size_bytes": len(sent)})
        wire._sock.sendall(sent)
        assert wire.receive() == {"is_kept": is_kept}
    assert [path.read_bytes() for path in nodes[1].blobs()] == [sent] * is_kept
    assert [path for path in tmp_path.rglob("*escaped*") if path.parent.name != "listings"] == []


def test_a_zombie_of_an_older_attempt_is_refused(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes.gather([nodes[1]])
    nodes[0].write("last.pt", "by the zombie")
    wait_for(lambda: any("over" in each["reason"] for each in nodes[0].kinds("replica-failed")))
    assert nodes[1].blobs() == []


@pytest.mark.parametrize("accepts", [True, False])
def test_a_member_that_says_nothing_costs_the_deadline_at_most(
    cluster: Callable[..., Cluster], accepts: bool
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("a.pt", "a")
    nodes.settle()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if accepts:
            mute.listen()
        for _ in range(3):  # of which the machine may stand still in one
            started = time.monotonic()
            gathered = nodes.gather(silent={"mute": f"127.0.0.1:{mute.getsockname()[1]}"}, deadline_s=1)
            took_s = time.monotonic() - started
            if took_s < 5 and [list(each.silent) for each in gathered] == [["mute"], ["mute"]]:
                break
        assert took_s < 5, "nobody else would end it"
    assert [list(each.silent) for each in gathered] == [["mute"], ["mute"]]
    assert [node.files() for node in nodes.nodes] == [{"a.pt": "a"}] * 2


@pytest.mark.parametrize("num_attempts_before", [0, 1])
def test_a_member_that_comes_late_is_waited_for(
    cluster: Callable[..., Cluster], num_attempts_before: int
) -> None:
    nodes = cluster(2, copies=1)  # what is new is on the late one alone
    for _ in range(num_attempts_before):
        nodes.gather()
    nodes[1].write("a.pt", "a")
    peers = nodes.peers(nodes.nodes)
    attempt = (1, nodes.attempt + 1)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(nodes[0].alive.gather, peers, attempt, PATIENT_S)
        time.sleep(1.2)
        nodes[1].alive.gather(peers, attempt, PATIENT_S)
        assert early.result().silent == {}
    assert nodes[0].files() == {"a.pt": "a"}


def test_a_node_that_hears_nobody_does_not_pass_for_the_newest(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("last.pt", "v1")
    nodes.settle()
    nodes.gather()
    nodes[2].die()
    nodes[0].write("last.pt", "v2")
    nodes.settle()
    nodes.gather()
    nodes[2].start()
    nodes[2].write("step_900.pt", "stale")
    # In this attempt, node 2 reaches nobody and the others do not reach it.
    nodes.attempt += 1
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        both = {node.name: node.alive.endpoint for node in nodes.nodes[:2]} | {"n2": dead}
        alone = {"n0": dead, "n1": dead, "n2": nodes[2].alive.endpoint}
        with ThreadPoolExecutor(3) as pool:
            for work in [
                pool.submit(node.alive.gather, peers, (1, nodes.attempt), PATIENT_S)
                for node, peers in ((nodes[0], both), (nodes[1], both), (nodes[2], alone))
            ]:
                work.result()
    nodes[2].write("by_rank_2.pt", "written in this attempt")
    nodes.gather()
    expected = {"last.pt": "v2", "by_rank_2.pt": "written in this attempt"}
    assert [node.files() for node in nodes.nodes] == [expected] * 3
    assert "stale" in nodes[2].aside().values()
