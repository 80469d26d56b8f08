"""Accept connections until closed, whatever goes wrong, and bound the number of unauthenticated ones.

Anyone who can reach a port can open connections to it and stay silent: each would hold a descriptor and a thread for
ever.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from typing import Callable, List, Optional

HANDSHAKE_S = 10.0
"""The longest time for a whole handshake, however slowly its bytes arrive."""
MOST_UNPROVEN = 64
YOUNG_S = 0.25
"""A younger connection is not closed for lack of room: all nodes of a large job connect at once."""
_PAUSE_S = 0.1  # after an error, as there may be no descriptors left for a while


class Caller:
    """An accepted connection, its peer's address, and whether the peer is authenticated."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.came = time.monotonic()
        self.is_proven = self.is_ended = False
        self.thread: threading.Thread
        """The thread that serves the connection."""


class Acceptor:
    """Accepts connections on a listening socket, and serves each in a thread of its own.

    A connection that is not authenticated (proven) is closed after `HANDSHAKE_S`. There are at most `MOST_UNPROVEN` of
    them: for one more, the oldest one of the address with the most is closed.
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
            listener: the listening socket; `close` closes it.
            serve: called as ``serve(connection, address, proven)``. It calls ``proven()`` once the peer is
                authenticated, which raises an OSError if the connection was closed meanwhile. From then on ``serve``
                must close the connection; before that, the acceptor does when ``serve`` returns. An OSError,
                ValueError, KeyError or TypeError ends this connection only.
            name: of the threads.
        """
        self._listener = listener
        self._function = serve
        self._name = name
        self._changed = threading.Condition()
        self._unproven: List[Caller] = []  # oldest first
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and close the connections that are not proven; those that are go on."""
        self._closed.set()
        with self._changed:
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._listener.close()
        with self._changed:
            ended = self._unproven[:]
            for caller in ended:
                self._end(caller)
        for caller in ended:
            caller.thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._listener.settimeout(self._wait_for_room())
                connection, address = self._listener.accept()
            except socket.timeout:
                continue
            except OSError:  # the caller has gone already, or no descriptor is left: go on
                with self._changed:
                    if self._unproven:
                        self._end(self._in_the_way())
                self._closed.wait(_PAUSE_S)
                continue
            caller = Caller(connection, str(address[0]))
            caller.thread = threading.Thread(target=self._serve, args=(caller,), name=self._name, daemon=True)
            with self._changed:
                self._unproven.append(caller)
            try:
                caller.thread.start()
            except RuntimeError:  # there are no threads left
                with self._changed:
                    self._end(caller)
                connection.close()
                self._closed.wait(_PAUSE_S)

    def _serve(self, caller: Caller) -> None:
        try:
            self._function(caller.connection, caller.address, lambda: self._prove(caller))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the caller has gone, or does not speak kit's protocol
        finally:
            if not caller.is_proven:
                with self._changed:
                    self._end(caller)
                caller.connection.close()

    def _prove(self, caller: Caller) -> None:
        with self._changed:
            if caller.is_ended:
                raise ConnectionError("the handshake took too long, or there were too many others")
            caller.is_proven = True
            self._unproven.remove(caller)
            self._changed.notify()

    def _wait_for_room(self) -> Optional[float]:
        """Wait for room for one more; return the seconds until the next handshake times out, None if there is none."""
        with self._changed:
            while self._unproven and not self._closed.is_set():
                now = time.monotonic()
                first, crowding = self._unproven[0], self._in_the_way()
                if first.came + HANDSHAKE_S <= now:
                    self._end(first)
                elif len(self._unproven) < MOST_UNPROVEN:
                    return first.came + HANDSHAKE_S - now
                elif crowding.came + YOUNG_S <= now:
                    self._end(crowding)
                else:
                    self._changed.wait(crowding.came + YOUNG_S - now)
        return None

    def _in_the_way(self) -> Caller:
        """Return the oldest connection of the address with the most, so that a flood displaces itself first."""
        numbers = collections.Counter(each.address for each in self._unproven)
        most = max(numbers.values())
        return next(each for each in self._unproven if numbers[each.address] == most)

    def _end(self, caller: Caller) -> None:
        """Shut the connection down, which its thread notices; that thread closes the descriptor."""
        if not caller.is_ended:
            caller.is_ended = True
            self._unproven.remove(caller)
            self._changed.notify()
            with contextlib.suppress(OSError):  # the other end has closed it already
                caller.connection.shutdown(socket.SHUT_RDWR)
