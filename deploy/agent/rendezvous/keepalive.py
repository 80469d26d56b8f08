"""Detect a lost node at once, by a TCP connection from every agent to the rendezvous host's agent.

A process that dies closes its connection. Both ends also send a few bytes every ``keep_alive_s`` seconds; after a cable
is cut, the kernel retransmits them, and ends the connection once they stay unacknowledged: at most
``keep_alive_s * lost_after`` seconds after the cut. The other host's kernel acknowledges, so a node that is only busy
is not taken for dead, as it would be by torch's heartbeats; no clocks are compared. Both ends first prove that they
belong to this run (`agent_wire.Wire`). Standard library only.

Over the same connections every agent learns at once which node is lost, or that a rank has failed and the round is
broken: ranks that wait in NCCL's kernels would otherwise wait until NCCL's own timeout.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.host import ports
from nodekit.deploy.host.accept import HANDSHAKE_S, Acceptor
from nodekit.deploy.host.schema import Say

_BEAT = b""
_MAX_WIDENING = 8
_REPEATED_AFTER_S = 0.4
"""Linux counts TCP_USER_TIMEOUT from the first retransmission, this long after the bytes were sent (measured, 6.18)."""
News = Mapping[str, Any]
"""What agents tell each other: ``broken``, the number of a broken round, and ``explained``, whether a rank gave the
cause; or the identity of a node that is ``lost``, or ``found`` again."""


def _end_when_unanswered(connection: socket.socket, keep_alive_s: float, lost_after: int) -> None:
    """Have the kernel end a connection within `keep_alive_s` × `lost_after` seconds of the loss of the other host."""
    # The first bytes after a cut are sent up to keep_alive_s later.
    left_s = keep_alive_s * max(1, lost_after - 1)
    # Another kernel, or a path with a longer round trip, may begin to count sooner.
    timeout_s = max(0.75 * left_s, left_s - _REPEATED_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))


class KeepaliveServer:
    """The rendezvous host's end: tracks which nodes are connected, and reports those that are lost."""

    def __init__(
        self,
        address: str,
        token: str,
        keep_alive_s: float,
        lost_after: int,
        say: Say,
        on_news: Callable[[News], None] = lambda _: None,
    ) -> None:
        """Listen at `address` for agents that know the token.

        Args:
            address: to listen at, on a free port (`port`).
            token: of this run and generation.
            keep_alive_s: seconds between two beats.
            lost_after: how many beats may stay unacknowledged before a node counts as lost.
            say: records an event when a node was taken for lost by mistake.
            on_news: called, by a thread, with all news, from other agents and of lost nodes.
        """
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
        self._closed = threading.Event()
        listener = ports.listen(address)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._serve, name="keepalive-server")
        threading.Thread(target=self._beat, name="keepalive-beat", daemon=True).start()

    @property
    def connected(self) -> set[str]:
        """The identities of the connected nodes."""
        with self._lock:
            return set(self._connected)

    @property
    def lost(self) -> set[str]:
        """The identities of nodes whose connection has ended."""
        with self._lock:
            return set(self._lost)

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._closed.set()
        self._acceptor.close()
        with self._lock, contextlib.suppress(OSError):
            for connection in self._connected.values():
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, address: str, proven: Callable[[], None]) -> None:  # noqa: ARG002  # the proof counts, not the address
        identity = ""
        with connection:
            try:
                wire = Wire(connection)
                wire.prove(self._token, is_client=False, timeout_s=HANDSHAKE_S)
                proven()
                _end_when_unanswered(connection, self._keep_alive_s, self._lost_after)
                identity = str(wire.receive()["identity"])
                with self._lock:
                    self._connected[identity] = connection
                    if identity in self._lost:  # the same process: it had not died
                        self._widen()
                        self._lost.discard(identity)
                        self._send({"found": identity})
                wire.send({"lost_after": self._lost_after})  # widened after earlier false alarms
                connection.settimeout(None)
                with self._lock:
                    self._wires[identity] = wire
                while True:
                    if frame := wire.receive_frame():
                        self.tell(json.loads(frame), but=identity)
            finally:
                with self._lock:
                    if is_lost := bool(identity) and self._connected.get(identity) is connection:
                        del self._connected[identity]
                        self._wires.pop(identity, None)
                        self._lost.add(identity)
                        self._send({"lost": identity})  # under the lock: before a later `found`
                if is_lost:
                    self._on_news({"lost": identity})

    def tell(self, news: News, *, but: str = "") -> None:
        """Tell the news to all agents, this host's included, except to the one with the identity `but`."""
        with self._lock:
            self._send(news, but=but)
        self._on_news(news)

    def _send(self, news: News, *, but: str = "") -> None:
        for identity, wire in self._wires.items():
            if identity != but:
                with contextlib.suppress(OSError):  # this connection ends: `_serve` notices
                    wire.send(dict(news))

    def _beat(self) -> None:
        while not self._closed.wait(self._keep_alive_s):
            with self._lock:
                for wire in self._wires.values():
                    with contextlib.suppress(OSError):  # this connection ends: `_serve` notices
                        wire.send_frame(_BEAT)

    def _widen(self) -> None:
        """Double `lost_after` following a false alarm, up to `_MAX_WIDENING` times the first value."""
        wider = min(self._lost_after * 2, self._widest)
        if wider > self._lost_after:
            self._lost_after = wider
            for connection in self._connected.values():
                _end_when_unanswered(connection, self._keep_alive_s, wider)
            self._say("false-alarm", lost_after_s=self._keep_alive_s * wider)


class Keepalive:
    """A node's end: once the rendezvous host is lost, `on_lost` is called, then `lost` is set."""

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
        on_news: Callable[[News], None] = lambda _: None,
    ) -> None:
        """Connect; `on_news` is called, by a thread, with the news that other agents `tell`, and of lost nodes.

        Raises:
            OSError: nothing answers there, or not with this generation's token.
        """
        self.lost = threading.Event()
        self._on_lost, self._on_news = on_lost, on_news
        self._closed = False
        self._sending = threading.Lock()
        self._connection = socket.create_connection((address, port), timeout=HANDSHAKE_S)
        try:
            self._wire = wire = Wire(self._connection)
            wire.prove(token, is_client=True, timeout_s=HANDSHAKE_S)
            _end_when_unanswered(self._connection, keep_alive_s, lost_after)
            answer = wire.ask({"identity": identity})
            _end_when_unanswered(self._connection, keep_alive_s, int(answer["lost_after"]))
            self._connection.settimeout(None)
        except (OSError, ValueError, KeyError) as error:
            self._connection.close()
            raise ConnectionError(
                f"{address}:{port} does not take this node's keepalive ({error}): it is of another rendezvous by now, "
                "or strangers keep it busy"
            ) from error
        threading.Thread(target=self._watch, name="keepalive", daemon=True).start()
        threading.Thread(target=self._beat, args=(keep_alive_s,), name="keepalive-beat", daemon=True).start()

    def tell(self, news: News) -> None:
        """Tell the news to all other agents, by way of the rendezvous host."""
        with self._sending, contextlib.suppress(OSError):  # the connection has ended: `_watch` notices
            self._wire.send(dict(news))

    def close(self) -> None:
        """End the connection; `on_lost` is not called."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                if frame := self._wire.receive_frame():
                    self._on_news(json.loads(frame))
        self._connection.close()
        try:
            if not self._closed:
                self._on_lost()
        finally:
            self.lost.set()

    def _beat(self, keep_alive_s: float) -> None:
        while not self.lost.wait(keep_alive_s):
            with self._sending, contextlib.suppress(OSError):  # `_watch` notices
                self._wire.send_frame(_BEAT)


def cut_connections(address: str, port: int) -> None:
    """Shut this process's TCP connections to an address and port, so that any thread that waits on one gets an error.

    Without this, torch's store waits without a limit for the answer of a host whose cable was cut.
    """
    for number in _descriptors():
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            each = socket.socket(fileno=number)  # no duplicate: there may be no descriptor left for one
            try:
                if each.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = each.getpeername()
                if peer[1] == port and str(peer[0]).removeprefix("::ffff:") == address:
                    each.shutdown(socket.SHUT_RDWR)
            finally:
                each.detach()


def _descriptors() -> Iterable[int]:
    """Return the descriptors of this process that are open; all that could be, if none is left to list them with."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  # fewer steps, with few left
    except OSError:  # no descriptor is left to open the folder with
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
