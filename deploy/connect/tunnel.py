"""A port of this machine's loopback that leads to one of a host's, through the SSH connection that is there."""

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
    """Open until `close`; the host refuses a connection, and the next one is tried all the same."""

    def __init__(self, connection: SshConnection, *, here: int, there: int) -> None:
        """Listen.

        Raises:
            OSError: the port `here` is taken; 0 is one that is free.
        """
        self._connection = connection
        self._there = there
        self._open: set[Any] = set()
        self.refused: HostError | None = None
        """Why the host would not let a connection through, if it does not forward at all."""
        listener = socket.create_server(("127.0.0.1", here))
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._lead, name="tunnel")

    def close(self) -> None:
        """End it, and what goes through it."""
        self._acceptor.close()
        for end in list(self._open):
            end.close()

    def _lead(self, own: socket.socket, address: str, proven: Callable[[], None]) -> None:  # noqa: ARG002  # it is ours
        proven()  # whoever is logged in here may
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
    """Sockets and channels have the same methods."""
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_BYTES):
            sink.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        sink.shutdown(socket.SHUT_WR)
