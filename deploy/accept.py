"""Accept connections until closed, whatever goes wrong, and keep few of those that have not shown who they are.

Anyone who reaches a port can open connections to it and say nothing: each would hold a descriptor and a thread for
ever. Standard library only, and Python 3.8 syntax: it runs on the hosts, too (`deploy/linkspeed.py`).
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from typing import Callable, List, Optional

HANDSHAKE_S = 10.0
"""How long a connection has for its whole handshake, however it divides its bytes."""
MOST_UNPROVEN = 64
_PAUSE_S = 0.1  # after an error: there may be no descriptors left for a while


class Caller:
    """A connection that was accepted, and what is known of who is at its other end."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.until = time.monotonic() + HANDSHAKE_S
        self.is_proven = self.is_ended = False


class Acceptor:
    """Accepts on a listening socket, and serves each connection in a thread of its own.

    A connection that is not proven is ended after `HANDSHAKE_S`. There are at most `MOST_UNPROVEN` of them: one more
    ends the oldest of the address that has most.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket, str, Callable[[], None]], None],
        *,
        name: str,
    ) -> None:
        """Accept from now on.

        Args:
            listener: closed by `close`.
            serve: called as ``serve(connection, address, proven)``. It calls ``proven()`` once it knows who that is,
                which raises an OSError if the connection was ended meanwhile; from then on the connection is its to
                close. One that is not proven is closed when it returns. An OSError, ValueError, KeyError or TypeError
                ends the connection alone.
            name: of the threads.
        """
        self._listener = listener
        self._function = serve
        self._name = name
        self._lock = threading.Lock()
        self._unproven: List[Caller] = []  # the oldest comes first
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more, and end what is not proven; what is proven goes on."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._listener.close()
        with self._lock:
            while self._unproven:
                self._end(self._unproven[0])

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._listener.settimeout(self._end_late())
                connection, address = self._listener.accept()
            except socket.timeout:
                continue
            except (
                OSError
            ):  # the caller has gone already, or there are no descriptors left: that is not our end
                with self._lock:
                    self._make_room()
                self._closed.wait(_PAUSE_S)
                continue
            caller = Caller(connection, str(address[0]))
            with self._lock:
                if len(self._unproven) >= MOST_UNPROVEN:
                    self._make_room()
                self._unproven.append(caller)
            try:
                threading.Thread(target=self._serve, args=(caller,), name=self._name, daemon=True).start()
            except RuntimeError:  # there are no threads left
                with self._lock:
                    self._end(caller)
                connection.close()
                self._closed.wait(_PAUSE_S)

    def _serve(self, caller: Caller) -> None:
        try:
            self._function(caller.connection, caller.address, lambda: self._prove(caller))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it is gone, or is not one of us
        finally:
            if not caller.is_proven:
                with self._lock:
                    self._end(caller)
                caller.connection.close()

    def _prove(self, caller: Caller) -> None:
        with self._lock:
            if caller.is_ended:
                raise ConnectionError("the handshake took too long, or there were too many others")
            caller.is_proven = True
            self._unproven.remove(caller)

    # --- with the lock held, but for the first ---

    def _end_late(self) -> Optional[float]:
        """End the connections whose time is over; seconds until the next one's is, None without any."""
        with self._lock:
            now = time.monotonic()
            while self._unproven and self._unproven[0].until <= now:
                self._end(self._unproven[0])
            return self._unproven[0].until - now if self._unproven else None

    def _make_room(self) -> None:
        """End the oldest connection of the address that has most: a stranger's are to be in his own way first."""
        numbers = collections.Counter(each.address for each in self._unproven)
        if numbers:
            most = max(numbers.values())
            self._end(next(each for each in self._unproven if numbers[each.address] == most))

    def _end(self, caller: Caller) -> None:
        """Have its thread find it closed; the descriptor is that thread's to close."""
        if not caller.is_ended:
            caller.is_ended = True
            self._unproven.remove(caller)
            with contextlib.suppress(OSError):  # the other end was faster
                caller.connection.shutdown(socket.SHUT_RDWR)
