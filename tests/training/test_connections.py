"""What is done where gloo leaves a rank waiting for one that is lost."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import agents
import pytest
import torch

from nodekit.training.group import connections


def found_deaf(work: Callable[[], object], told: Callable[[], object] = lambda: None) -> bool:
    """What `is_deaf` says of the main thread, which does this meanwhile; `told` is called once it is said."""
    has_left = threading.Event()
    found: list[bool] = []

    def look() -> None:
        found.append(connections.is_deaf(has_left))
        told()

    watch = threading.Thread(target=look)
    watch.start()
    work()
    has_left.set()
    watch.join()
    return found[0]


def test_a_rank_that_waits_and_does_nothing_is_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "DEAF_S", 0.3)
    others: torch.futures.Future[None] = torch.futures.Future()
    is_told = threading.Event()
    # It waits until it is found, however late the one who looks comes to it on a busy machine.
    threading.Thread(target=lambda: (is_told.wait(60), others.set_result(None))).start()
    assert found_deaf(lambda: others.wait(), is_told.set)


def test_the_kernel_keeps_a_groups_connections_alive_through_a_long_step() -> None:
    def is_kept_alive(connection: socket.socket) -> int:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as earlier,
    ):
        with connections.opened():
            one = socket.create_connection(listener.getsockname())
            other = socket.create_server(("127.0.0.1", 0))
        with one, other:
            assert [is_kept_alive(each) for each in (one, other, earlier)] == [1, 0, 0]
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                assert one.getsockopt(socket.IPPROTO_TCP, option) == connections.KEEPALIVE_S


def test_what_a_process_has_opened_of_another_kind_meanwhile_is_not_shut() -> None:
    """Such as the pipe of a data loader."""
    with connections.opened() as found:
        one, other = socket.socketpair()
    with one, other:
        assert len(found) == 2
        connections.shut_down(found)
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_a_connection_whose_number_is_anothers_by_now_is_left_alone() -> None:
    called: list[object] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        inode = os.fstat(connection.fileno()).st_ino
        connections._each_connection({(connection.fileno(), inode + 1)}, called.append)
        assert called == []
        connections._each_connection({(connection.fileno(), inode)}, called.append)
        assert len(called) == 1


def test_a_rank_that_waits_for_its_own_disk_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Snapshots.wait`, say: who left the others then would end, with the snapshot half written."""
    monkeypatch.setattr(connections, "DEAF_S", 0.3)
    monkeypatch.setattr(connections, "is_deaf", connections.is_stalled)
    is_written = threading.Event()
    assert not found_deaf(lambda: is_written.wait(1))


def test_a_rank_that_asks_horovod_again_and_again_is_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not idle, and yet does nothing else."""
    monkeypatch.setattr(connections, "DEAF_S", 0.3)
    told: list[bool] = []
    asking = compile(
        "until = monotonic() + 60\nwhile not told and monotonic() < until: pass",
        "/kit/training/engines/horovod.py",
        "exec",
    )
    names = {"monotonic": time.monotonic, "told": told}
    assert found_deaf(lambda: exec(asking, names), lambda: told.append(True))


def test_a_rank_that_works_or_rests_in_its_own_code_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass, a slow disk, a sleep: it comes to the collective after that, and has an error there."""
    monkeypatch.setattr(connections, "DEAF_S", 0.3)
    assert not found_deaf(lambda: time.sleep(1))
    weights = torch.ones(200, 200, requires_grad=True)

    def backward() -> None:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            (weights @ weights).sum().backward()

    assert not found_deaf(backward)
    monkeypatch.setattr(connections, "DEAF_S", 60.0)
    others: torch.futures.Future[None] = torch.futures.Future()
    threading.Timer(0.2, others.set_result, [None]).start()
    assert not found_deaf(lambda: others.wait()), "it has left in time"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_only_connections_of_groups_that_nobody_aborts_are_shut(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have groups on gloo beside those on NCCL, whose own connections are not to be broken."""

    def make(*_: object, **__: object) -> tuple[socket.socket, socket.socket]:
        listens = socket.create_server(("127.0.0.1", 0))
        here = socket.create_connection(listens.getsockname())
        there = listens.accept()[0]
        listens.close()
        return here, there

    monkeypatch.setattr(torch.distributed.distributed_c10d, "_new_process_group_helper", make)
    connections.remember()
    here, there = torch.distributed.distributed_c10d._new_process_group_helper(2, 0, [], backend, None)
    try:
        connections.shut_down()
        here.settimeout(0.2)
        if backend == "gloo":
            assert here.recv(1) == b""
        else:
            with pytest.raises(TimeoutError):
                here.recv(1)
    finally:
        here.close()
        there.close()
        connections._opened.clear()


class Arriving:
    """A connection from another rank, and `let_arrive` in a thread beside this one, which may wait for the rank."""

    def __init__(self) -> None:
        self.there, self.here = socket.socketpair()
        self.over: torch.futures.Future[None] = torch.futures.Future()
        connections._opened.add((self.here.fileno(), os.fstat(self.here.fileno()).st_ino))

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait as the main thread does in a collective, until `let_arrive` has returned, and do that meanwhile."""

        def look() -> None:
            agents.until(lambda: connections._waits_for_others(True), what="the main thread waits")
            doing = threading.Timer(0.2, meanwhile)
            doing.start()
            connections.let_arrive()
            self.over.set_result(None)
            doing.join()

        thread = threading.Thread(target=look)
        thread.start()
        self.over.wait()
        thread.join()


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arriving]:
    monkeypatch.setattr(connections, "_opened", set())
    monkeypatch.setattr(connections, "_ARRIVE_S", 60.0)
    made = Arriving()
    with made.there, made.here:
        yield made


def test_who_waits_for_a_lost_rank_reads_first_what_that_has_sent(arriving: Arriving) -> None:
    arriving.there.send(b"the last part of a sum")
    arriving.there.close()
    read: list[bytes] = []
    arriving.wait(lambda: read.append(b"" if arriving.over.done() else arriving.here.recv(64)))
    assert read == [b"the last part of a sum"]


def test_who_waits_for_what_never_comes_is_not_kept(arriving: Arriving) -> None:
    arriving.wait()


def test_what_nobody_reads_keeps_who_waits_for_a_moment_alone(
    arriving: Arriving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_ARRIVE_S", 0.05)
    arriving.there.send(b"of another collective")
    arriving.wait()


def test_who_computes_has_not_given_the_others_its_own_part_yet(arriving: Arriving) -> None:
    arriving.there.send(b"of a step that cannot have ended")
    thread = threading.Thread(target=connections.let_arrive, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
