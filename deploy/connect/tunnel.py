"""Port forwarding: a port on this machine's loopback that leads to one on a host, over an open SSH connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nodekit.deploy.host.accept import Acceptor
from nodekit.inventory.errors import HostError

if TYPE_CHECKING:
    from nodekit.deploy.connect.ssh import SshConnection

_BYTES = 1 << 16


class Tunnel:
    """A forwarded port, open until `close`; a connection that the host refuses does not end it."""

    def __init__(self, connection: SshConnection, *, here: int, there: int) -> None:
        """Listen on the port `here` (0: a free one), and forward connections to the port `there` on the host.

        Raises:
            OSError: the port `here` is in use.
        """
        self._connection = connection
        self._there = there
        self._open: set[Any] = set()
        self.refused: HostError | None = None
        """The last error because of which the host forwards nothing; None if there was none."""
        listener = socket.create_server(("127.0.0.1", here))
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._lead, name="tunnel")

    def close(self) -> None:
        """Stop listening, and close all forwarded connections."""
        self._acceptor.close()
        for end in list(self._open):
            end.close()

    def _lead(self, own: socket.socket, address: str, proven: Callable[[], None]) -> None:  # noqa: ARG002
        """Forward one connection, until both ends have closed it; its address is always local."""
        proven()  # every user of this machine may connect
        try:
            channel = self._connection.to_port(self._there)
        except ConnectionRefusedError:
            own.close()
            return
        except HostError as error:
            self.refused = error
            own.close()
            return
        self._open |= {own, channel}
        back = threading.Thread(target=_pump, args=(channel, own), name="tunnel-back", daemon=True)
        back.start()
        _pump(own, channel)
        back.join()
        self._open -= {own, channel}
        own.close()
        channel.close()


def _pump(source: Any, sink: Any) -> None:
    """Copy bytes until the source ends; sockets and paramiko's channels have the same methods."""
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_BYTES):
            sink.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        sink.shutdown(socket.SHUT_WR)
