"""Measure how fast one host sends to another over TCP; the code of both ends."""

from __future__ import annotations

import hmac
import json
import select
import socket
import statistics
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from nodekit.deploy.host import accept, ports

CONNECT_TIMEOUT_S = 5.0
_SILENCE_S = 10.0  # without a byte for so long, a connection counts as dead
_CHUNK = bytes(1 << 18)
_WARM_UP = 0.25  # the share of the time that is not counted, in which TCP finds the link's speed
_LEAST_CHUNKS = 16  # with fewer, the rate would be inaccurate: then measure longer
_LONGEST = 4  # at most so many times as long
_ROUND_TRIPS = 100
_ROUND_TRIPS_S = 0.4
_MAX_HEADER_BYTES = 256


def listen(address: str, token: str, limit_s: float) -> int:
    """Be the receiving end for `limit_s` seconds, for peers that know the token; return the port."""
    server = ports.listen(address)
    port: int = server.getsockname()[1]

    acceptor = accept.Acceptor(
        server, lambda connection, _, proven: _serve(connection, token, proven), name="linkspeed"
    )
    end = threading.Timer(limit_s, acceptor.close)
    end.daemon = True
    end.start()
    return port


def measure(address: str, port: int, token: str, source: str, seconds: float, streams: int) -> Dict[str, Any]:
    """Send to the listener at `address` from this host's address `source`; return ``{"bytes_per_s", "rtt_s"}``.

    The rate is that of all streams together, measured by the receiver; the round trip is the median on an idle link.

    Raises:
        OSError: a connection failed or broke.
    """
    rtt_s = _round_trip(_connect(address, port, source, "%s echo\n" % token))
    rates: List[float] = []
    errors: List[OSError] = []

    def stream() -> None:
        try:
            rates.append(_send(_connect(address, port, source, "%s sink %r\n" % (token, seconds)), seconds))
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {"bytes_per_s": sum(rates), "rtt_s": rtt_s}


def _connect(address: str, port: int, source: str, header: str) -> socket.socket:
    connection = socket.create_connection((address, port), CONNECT_TIMEOUT_S, (source, 0))
    connection.settimeout(_SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(header.encode())
    return connection


def _round_trip(connection: socket.socket) -> float:
    """Return the median of up to `_ROUND_TRIPS` round trips, in seconds."""
    with connection:
        times: List[float] = []
        deadline = time.monotonic() + _ROUND_TRIPS_S
        while len(times) < 3 or (len(times) < _ROUND_TRIPS and time.monotonic() < deadline):
            begin = time.monotonic()
            connection.sendall(b".")
            if not connection.recv(1):
                raise OSError("the other end closed the connection: is something else at that port?")
            times.append(time.monotonic() - begin)
        return statistics.median(times[1:])  # the first one includes the header


def _send(connection: socket.socket, seconds: float) -> float:
    """Send until the receiver reports what has arrived; return its rate in bytes per second."""
    with connection:
        connection.setblocking(False)
        said = b""
        deadline = time.monotonic() + _LONGEST * seconds + _SILENCE_S
        while not said.endswith(b"\n"):
            readable, writable, _ = select.select([connection], [connection], [], _SILENCE_S)
            if time.monotonic() > deadline or not (readable or writable):
                raise OSError("no byte has gone through for %.0f s" % _SILENCE_S)
            if readable:
                more = connection.recv(1 << 12)
                if not more:
                    raise OSError("the other end closed the connection")
                said += more
            elif writable:
                try:
                    connection.send(_CHUNK)
                except BlockingIOError:
                    pass
        # Discard what is still in the send buffer: on a slow link, sending it would take seconds.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        arrived = json.loads(said)
        if not arrived["seconds"]:
            raise OSError("too little has arrived to tell a rate")
        rate: float = arrived["bytes"] / arrived["seconds"]
        return rate


def _serve(connection: socket.socket, token: str, proven: Callable[[], None]) -> None:
    with connection:
        connection.settimeout(_SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        words = _header(connection).split()
        if len(words) < 2 or not hmac.compare_digest(words[0].encode(), token.encode()):
            return
        proven()
        if words[1] == "echo":
            while connection.recv(1):
                connection.sendall(b".")
        else:
            _sink(connection, float(words[2]))


def _header(connection: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < _MAX_HEADER_BYTES:
        byte = connection.recv(1)
        if not byte:
            break
        found += byte
    return found.decode("ascii", "replace")


def _sink(connection: socket.socket, seconds: float) -> None:
    """Receive for `seconds` or longer, report the bytes and the time after the warm-up, and discard the rest."""
    buffer = bytearray(1 << 20)
    begin = time.monotonic()
    counted_from: Optional[float] = None
    num_bytes = num_chunks = 0
    now = begin
    while True:
        got = connection.recv_into(buffer)
        if not got:
            return
        now = time.monotonic()
        if counted_from is None:
            # Time is measured from this arrival to the last one, so the bytes of this one are not counted.
            counted_from = now if now - begin >= _WARM_UP * seconds else None
            continue
        num_bytes += got
        num_chunks += 1
        passed = now - begin
        if passed >= _LONGEST * seconds or (passed >= seconds and num_chunks >= _LEAST_CHUNKS):
            break
    connection.sendall(json.dumps({"bytes": num_bytes, "seconds": now - counted_from}).encode() + b"\n")
    while connection.recv_into(buffer):
        pass
