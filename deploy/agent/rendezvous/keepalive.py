"""Tells at once when a node is gone: an idle TCP connection from every agent to the rendezvous host's.

A process that dies closes it, and where a cable is cut the kernel's keep-alive probes go unanswered; both ends
know within ``keep_alive_s * lost_after`` seconds. The kernel does the probing, so a node that is only busy is not
taken for dead, as one is that misses torch's heartbeats; no clocks are compared. Both ends prove that they are of this
run before anything is said (`agent_wire.Wire`). Standard library only.

Over the same connections every agent is told at once that a node is lost, or that a rank of some node has failed and
the round is broken: where ranks wait in NCCL's kernels, nothing else ends their waiting soon.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import stat
import threading
from collections.abc import Callable, Iterable

from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.host import ports
from nodekit.deploy.host.accept import HANDSHAKE_S, Acceptor
from nodekit.deploy.host.schema import Say

_MAX_WIDENING = 8


def _keep_alive(connection: socket.socket, keep_alive_s: float, lost_after: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel takes whole seconds for the probes, and milliseconds for the whole.
    interval_s, whole_ms = max(1, int(keep_alive_s)), max(1000, int(keep_alive_s * lost_after * 1000))
    for option, value in (
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, max(1, lost_after)),
        (socket.TCP_USER_TIMEOUT, whole_ms),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class KeepaliveServer:
    """The rendezvous host's end: knows which nodes are connected, and says who is lost."""

    def __init__(
        self,
        address: str,
        token: str,
        keep_alive_s: float,
        lost_after: int,
        say: Say,
        on_news: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        """Listen at `address`, for who knows the token; `say` is told of false alarms, `on_news` as a `Keepalive`'s."""
        self._token = token
        self._keep_alive_s = keep_alive_s
        self._lost_after = lost_after
        self._widest = lost_after * _MAX_WIDENING
        self._say = say
        self._on_news = on_news
        self._lock = threading.Lock()
        self._connected: dict[str, socket.socket] = {}
        self._wires: dict[str, Wire] = {}
        self._lost: set[str] = set()
        listener = ports.listen(address)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._serve, name="keepalive-server")

    @property
    def connected(self) -> set[str]:
        """Who is connected, by the identity they gave."""
        with self._lock:
            return set(self._connected)

    @property
    def lost(self) -> set[str]:
        """Who was connected and is gone."""
        with self._lock:
            return set(self._lost)

    def close(self) -> None:
        """Let go of everyone."""
        self._acceptor.close()
        with self._lock, contextlib.suppress(OSError):
            for connection in self._connected.values():
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, address: str, proven: Callable[[], None]) -> None:  # noqa: ARG002  # whoever proves it is one of us
        identity = ""
        with connection:
            try:
                wire = Wire(connection)
                wire.prove(self._token, is_client=False, timeout_s=HANDSHAKE_S)
                proven()
                _keep_alive(connection, self._keep_alive_s, self._lost_after)
                identity = str(wire.receive()["identity"])
                with self._lock:
                    if identity in self._lost:  # the same process: it was never dead
                        self._widen()
                    self._connected[identity] = connection
                    self._lost.discard(identity)
                wire.send({"lost_after": self._lost_after})  # as wide as it was found it must be
                connection.settimeout(None)
                with self._lock:
                    self._wires[identity] = wire
                while True:
                    self.tell(_news_in(wire.receive_frame()), but=identity)
            finally:
                with self._lock:
                    if is_lost := bool(identity) and self._connected.get(identity) is connection:
                        del self._connected[identity]
                        self._wires.pop(identity, None)
                        self._lost.add(identity)
                if is_lost:
                    self.tell(None)

    def tell(self, broken: int | None, *, but: str = "") -> None:
        """Tell all agents but one, and this one, that a round is broken; None: that a node is lost."""
        with self._lock:
            for identity, wire in self._wires.items():
                if identity != but:
                    with contextlib.suppress(OSError):  # it is being lost
                        wire.send({"broken": broken})
        self._on_news(broken)

    def _widen(self) -> None:
        """After a false alarm, be slower to raise the next one."""
        wider = min(self._lost_after * 2, self._widest)
        if wider > self._lost_after:
            self._lost_after = wider
            for connection in self._connected.values():
                _keep_alive(connection, self._keep_alive_s, wider)
            self._say("false-alarm", lost_after_s=self._keep_alive_s * wider)


class Keepalive:
    """A node's end: `lost` is set once the rendezvous host is gone, after `on_lost` was called."""

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        identity: str,
        *,
        keep_alive_s: float,
        lost_after: int,
        on_lost: Callable[[], None],
        on_news: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        """Connect; `on_news` is called, by a thread, with the round that is broken, None where a node is lost."""
        self.lost = threading.Event()
        self._on_lost, self._on_news = on_lost, on_news
        self._closed = False
        self._connection = socket.create_connection((address, port), timeout=HANDSHAKE_S)
        try:
            self._wire = wire = Wire(self._connection)
            wire.prove(token, is_client=True, timeout_s=HANDSHAKE_S)
            _keep_alive(self._connection, keep_alive_s, lost_after)
            answer = wire.ask({"identity": identity})
            _keep_alive(self._connection, keep_alive_s, int(answer["lost_after"]))
            self._connection.settimeout(None)
        except (OSError, ValueError, KeyError) as error:
            self._connection.close()
            raise ConnectionError(
                f"{address}:{port} does not take this node's keepalive ({error}): it is of another rendezvous by now, "
                "or strangers keep it busy"
            ) from error
        threading.Thread(target=self._watch, name="keepalive", daemon=True).start()

    def tell(self, broken: int) -> None:
        """Have all agents know that a round is broken; for one thread."""
        with contextlib.suppress(OSError):  # they will see it, or this node's end
            self._wire.send({"broken": broken})

    def close(self) -> None:
        """Hang up; `on_lost` is not called."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._on_news(_news_in(self._wire.receive_frame()))
        self._connection.close()
        try:
            if not self._closed:
                self._on_lost()
        finally:
            self.lost.set()


def _news_in(frame: bytes) -> int | None:
    broken = json.loads(frame).get("broken")
    return broken if isinstance(broken, int) else None


def cut_connections(address: str, port: int) -> None:
    """Break this process's TCP connections to a place: who waits there for a host that is gone gets an error.

    torch's store waits without a limit for the answer of a host whose cable was cut.
    """
    for number in _descriptors():
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            each = socket.socket(fileno=number)  # not of a duplicate: there may be no descriptor left for one
            try:
                if each.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = each.getpeername()
                if peer[1] == port and str(peer[0]).removeprefix("::ffff:") == address:
                    each.shutdown(socket.SHUT_RDWR)
            finally:
                each.detach()


def _descriptors() -> Iterable[int]:
    """Those of this process that are open, or may be."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  # fewer steps, with few left
    except OSError:  # none is left to look with
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
