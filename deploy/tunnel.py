"""A port of this machine's loopback that leads to one of a host's, through the SSH connection that is there."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from nodekit.inventory.errors import HostError

if TYPE_CHECKING:
    from nodekit.deploy.ssh import SshConnection

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
        self._listener = socket.create_server(("127.0.0.1", here))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="tunnel", daemon=True).start()

    def close(self) -> None:
        """End it, and what goes through it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._listener.close()
        for end in list(self._open):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                own, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._lead, args=(own,), name="tunnel-one", daemon=True).start()

    def _lead(self, own: socket.socket) -> None:
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
