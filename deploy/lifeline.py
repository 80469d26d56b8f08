"""Tells at once when a node is gone: an idle TCP connection from every agent to the rendezvous host's.

A process that dies closes it, and where a cable is cut the kernel's keep-alive probes go unanswered; both ends
know within ``keep_alive_s * lost_after`` seconds. The kernel does the probing, so a node that is only busy is not
taken for dead, as one is that misses torch's heartbeats; no clocks are compared. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from nodekit.deploy import remote

_HELLO_TIMEOUT_S = 10.0
_MAX_WIDENING = 8


def _keep_alive(connection: socket.socket, keep_alive_s: float, lost_after: int) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel takes whole seconds for the probes, and milliseconds for the whole.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(keep_alive_s)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(keep_alive_s)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, lost_after))
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(keep_alive_s * lost_after * 1000))
    )


class Hub:
    """The rendezvous host's end: knows which nodes are connected, and says who is lost."""

    def __init__(self, keep_alive_s: float, lost_after: int, say: Callable[..., None]) -> None:
        """Listen; `say(kind, **fields)` is told of false alarms."""
        self.cookie = os.urandom(16).hex()
        """What a node must know, from the rendezvous store, to be listened to."""
        self._keep_alive_s = keep_alive_s
        self._lost_after = lost_after
        self._widest = lost_after * _MAX_WIDENING
        self._say = say
        self._lock = threading.Lock()
        self._connected: dict[str, socket.socket] = {}
        self._lost: set[str] = set()
        self._listener = remote.listen()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="lifeline-hub", daemon=True).start()

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
        with self._lock, contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for connection in self._connected.values():
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        identity = ""
        try:
            connection.settimeout(_HELLO_TIMEOUT_S)
            _keep_alive(connection, self._keep_alive_s, self._lost_after)
            hello = json.loads(connection.makefile("rb").readline(4096))
            if hello["cookie"] != self.cookie:
                return
            identity = str(hello["identity"])
            with self._lock:
                if identity in self._lost:  # the same process: it was never dead
                    self._widen()
                self._connected[identity] = connection
                self._lost.discard(identity)
            connection.sendall(b"%d\n" % self._lost_after)
            connection.settimeout(None)
            while connection.recv(64):
                pass
        except (OSError, ValueError, KeyError):
            pass
        finally:
            connection.close()
            with self._lock:
                if identity and self._connected.get(identity) is connection:
                    del self._connected[identity]
                    self._lost.add(identity)

    def _widen(self) -> None:
        """After a false alarm, be slower to raise the next one."""
        wider = min(self._lost_after * 2, self._widest)
        if wider > self._lost_after:
            self._lost_after = wider
            for connection in self._connected.values():
                _keep_alive(connection, self._keep_alive_s, wider)
            self._say("false-alarm", lost_after_s=self._keep_alive_s * wider)


class Lifeline:
    """A node's end: `lost` is set once the rendezvous host is gone, after `on_lost` was called."""

    def __init__(
        self,
        address: str,
        port: int,
        cookie: str,
        identity: str,
        *,
        keep_alive_s: float,
        lost_after: int,
        on_lost: Callable[[], None],
    ) -> None:
        self.lost = threading.Event()
        self._on_lost = on_lost
        self._closed = False
        self._connection = socket.create_connection((address, port), timeout=_HELLO_TIMEOUT_S)
        _keep_alive(self._connection, keep_alive_s, lost_after)
        self._connection.sendall(json.dumps({"cookie": cookie, "identity": identity}).encode() + b"\n")
        answer = self._connection.makefile("rb").readline(64)
        if not answer.endswith(b"\n"):
            self._connection.close()
            raise ConnectionError(f"the rendezvous host {address} does not know this rendezvous any more")
        _keep_alive(self._connection, keep_alive_s, int(answer))  # as wide as the host has found it must be
        self._connection.settimeout(None)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def close(self) -> None:
        """Hang up; `on_lost` is not called."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while self._connection.recv(64):
                pass
        self._connection.close()
        if not self._closed:
            self._on_lost()
        self.lost.set()


def cut_connections(address: str, port: int) -> None:
    """Break this process's TCP connections to a place: who waits there for a host that is gone gets an error.

    torch's store waits without a limit for the answer of a host whose cable was cut.
    """
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            number = int(path.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as each:
                if each.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = each.getpeername()
                if peer[1] == port and str(peer[0]).removeprefix("::ffff:") == address:
                    each.shutdown(socket.SHUT_RDWR)
