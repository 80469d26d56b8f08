"""What listens for agents and tasks goes on, whatever strangers do at its port."""

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import strangers
from agents import until
from free_ports import free_port

from nodekit.deploy.agent import agent_wire, descriptors
from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.agent.rendezvous.keepalive import Keepalive, KeepaliveServer
from nodekit.deploy.agent.replicas.replicas import Replicas
from nodekit.deploy.host import accept, ports
from nodekit.deploy.host.accept import Acceptor
from nodekit.deploy.host.probes.network import linkspeed
from nodekit.slurm.allocation import handshake

TOKEN = "token-of-the-run"


def echo(connection: socket.socket, address: str, proven: Callable[[], None]) -> None:
    """Serve who says `hello`: from then on what it says comes back."""
    with connection:
        if connection.recv(5) == b"hello":
            proven()
            connection.sendall(b"hello")
            while data := connection.recv(64):
                connection.sendall(data)


class Listener(socket.socket):
    """Counts the calls that it could not accept."""

    num_failed = 0

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except TimeoutError:
            raise
        except OSError:
            self.num_failed += 1
            raise


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    made.bind(("127.0.0.1", 0))
    made.listen(1024)
    acceptor = Acceptor(made, echo, name="echo")
    yield made
    acceptor.close()


def call(listener: socket.socket, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=30, source_address=(source, 0))


def is_served(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"hello")
        return connection.recv(5) == b"hello"
    return False


@pytest.fixture(params=["keepalives", "copies", "tasks", "link speed"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Each that listens: its port, and what one of the run's own does there."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    if request.param == "keepalives":
        hub = KeepaliveServer("127.0.0.1", TOKEN, 1.0, 3, nothing)
        options: dict[str, Any] = {"keep_alive_s": 1.0, "lost_after": 3, "on_lost": nothing}
        yield hub.port, lambda: Keepalive("127.0.0.1", hub.port, TOKEN, "1.7", **options).close()
        hub.close()
    elif request.param == "copies":
        replicas = Replicas(
            name="a", folder=tmp_path / "a", kept=tmp_path / "kept", copies=2, address="127.0.0.1", token=TOKEN,
            say=nothing,
        )  # fmt: skip
        yield (
            int(replicas.endpoint.rpartition(":")[2]),
            lambda: agent_wire.connect(replicas.endpoint, TOKEN, timeout_s=60).close(),
        )
        replicas.close()
    elif request.param == "tasks":
        monkeypatch.setenv("SLURMD_NODENAME", "n2")
        tasks = handshake.Tasks(TOKEN)
        where = {"addresses": ["127.0.0.1"], "port": tasks.port, "token": TOKEN}

        def meet() -> None:
            with handshake.call(where, is_here=False):
                until(lambda: "n2" in tasks.address)

        yield tasks.port, meet
        tasks.close()
        for each in tasks._free.values():  # channels are made of these
            each.close()
    else:
        port = linkspeed.listen("127.0.0.1", TOKEN, 60.0)
        yield port, lambda: linkspeed.measure("127.0.0.1", port, TOKEN, "127.0.0.1", 0.02, 1)


def test_more_silent_strangers_than_descriptors_keep_nobody_out(
    service: tuple[int, Callable[[], object]],
) -> None:
    port, meet = service
    with strangers.few_descriptors(accept.MOST_UNPROVEN + 40):
        with strangers.silent(port, 200) as number:
            assert number == 200
            meet()
        meet()


def test_no_descriptor_for_a_caller_is_not_the_end(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.socket()) for _ in range(50)]
        with strangers.few_descriptors(0):  # or those that threads of other tests give back just now
            for caller in callers:
                caller.settimeout(30)
                caller.connect(listener.getsockname())
            until(lambda: listener.num_failed)
        assert is_served(callers[-1])
        assert is_served(stack.enter_context(call(listener)))


def test_strangers_are_in_each_others_way_and_in_nobody_elses(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "HANDSHAKE_S", 60.0)  # or it is the time that ends `slow`, on a busy machine
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(call(listener, "127.0.0.3"))  # it came first, and is about to say hello
        many = [stack.enter_context(call(listener, "127.0.0.2")) for _ in range(accept.MOST_UNPROVEN + 20)]
        for each in many[:20]:
            assert each.recv(1) == b"", "the oldest were ended"
        assert is_served(slow)
        assert is_served(many[-1])


def test_all_nodes_of_a_large_job_may_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("YOUNG_S", "HANDSHAKE_S"):
        monkeypatch.setattr(accept, name, 60.0)  # on a busy machine, too

    def far(connection: socket.socket, address: str, proven: Callable[[], None]) -> None:
        time.sleep(0.02)  # its round trip
        echo(connection, address, proven)

    with contextlib.ExitStack() as stack:
        listener = ports.listen("127.0.0.1")
        acceptor = Acceptor(listener, far, name="far")
        callers = [stack.enter_context(call(listener)) for _ in range(4 * accept.MOST_UNPROVEN)]
        for each in callers:
            each.sendall(b"hello")
        assert {each.recv(5) for each in callers} == {b"hello"}
        acceptor.close()


def test_a_byte_now_and_then_does_not_hold_a_connection(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "HANDSHAKE_S", 0.2)

    def served(connection: socket.socket, address: str, proven: Callable[[], None]) -> None:
        with connection:
            while connection.recv(1):
                pass

    with socket.create_server(("127.0.0.1", 0)) as other:
        acceptor = Acceptor(other, served, name="patient")
        with call(other) as dripping:

            def is_ended() -> bool:
                with contextlib.suppress(TimeoutError):
                    dripping.sendall(b"x")
                    dripping.settimeout(0.01)
                    return dripping.recv(1) == b""
                return False

            with contextlib.suppress(ConnectionError):  # a byte that came too late
                until(is_ended, what="its end")
        acceptor.close()


def test_what_is_proven_is_not_ended(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    with call(listener) as ours:
        assert is_served(ours)  # in a time that a busy machine can keep
        monkeypatch.setattr(accept, "HANDSHAKE_S", 0.1)
        with call(listener) as silent:
            assert silent.recv(1) == b""
        assert is_served(ours)


def test_a_handshake_has_one_deadline_for_all_its_bytes() -> None:
    over = threading.Event()
    with ports.listen("127.0.0.1") as listener, call(listener) as ours, listener.accept()[0] as theirs:

        def drip() -> None:
            while not over.wait(0.05):
                with contextlib.suppress(OSError):
                    theirs.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TimeoutError):
            Wire(ours).prove(TOKEN, is_client=True, timeout_s=0.3)
        over.set()
        dripping.join()


def test_it_listens_at_one_address_alone() -> None:
    port = free_port()  # at no address anybody's
    with ports.listen("127.0.0.2", port) as listener:
        assert listener.getsockname() == ("127.0.0.2", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=30)
    with ports.listen("::1") as listener:
        assert listener.getsockname()[0] == "::1"
    with pytest.raises(OSError, match=r"no interface of \S+ has the address 203\.0\.113\.1 to listen on$"):
        ports.listen("203.0.113.1")


def test_who_finds_no_descriptor_waits_for_one() -> None:
    opened: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def pause() -> None:  # the first attempt has failed
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with strangers.few_descriptors(0):
        opened.append(descriptors.when_there(lambda: os.open("/dev/null", os.O_RDONLY), pause))
    os.close(opened[0])
    with pytest.raises(FileNotFoundError):
        descriptors.when_there(lambda: os.open("/nowhere", os.O_RDONLY), pause)


def test_lost_connections_are_cut_though_there_is_no_descriptor_to_look_with() -> None:
    from nodekit.deploy.agent.rendezvous.keepalive import cut_connections

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as waiting, server.accept()[0]:
            with strangers.few_descriptors(0):
                cut_connections("127.0.0.1", port)
            assert waiting.recv(1) == b""
