"""Authenticated frames over TCP, between the agents of a run, and between Slurm's tasks and their leader.

Both sides prove that they know the run's token by an HMAC over both sides' nonces; the token itself is never sent.
Every frame carries an HMAC, under a key of this connection alone, that covers its direction and number too: no frame
can be changed, repeated, left out or sent back. File contents go between the frames without one; a frame has their
SHA-256. Nothing is encrypted: the job's own collectives cross the same network unencrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20
STALLED_AFTER_S = 10.0
"""How long one send or receive may go without progress."""
CONNECT_S = 5.0
_MAX_FRAME_BYTES = 64 << 20
_NONCE_BYTES = _TAG_BYTES = 32


class WrongToken(ConnectionError):
    """The other side does not know the run's token."""


class Wire:
    """A connection to another process of the run; call `prove` first.

    Only one thread may use it at a time, with two exceptions: any thread may call `abort`, and one may send frames
    while another waits in `receive_frame`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._key = b""
        self._labels = (b"", b"")
        self._num_sent = self._num_received = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prove(self, token: str, *, is_client: bool, timeout_s: float = CONNECT_S) -> None:
        """Authenticate both sides to each other by the run's token, within `timeout_s` seconds in all.

        Raises:
            WrongToken: the other side has another token.
            OSError: the connection is lost, or the other side is too slow.
        """
        deadline = time.monotonic() + timeout_s
        self._sock.settimeout(timeout_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(_NONCE_BYTES)
        self._sock.sendall(mine)
        theirs = self._exactly(_NONCE_BYTES, deadline)
        nonces = mine + theirs if is_client else theirs + mine
        self._labels = (b"client", b"server") if is_client else (b"server", b"client")

        def proof(what: bytes) -> bytes:
            return hmac.digest(token.encode(), what + nonces, "sha256")

        # The client proves first, so that a stranger who connects gets no HMAC to guess the token from.
        if is_client:
            self._sock.sendall(proof(b"client"))
        try:
            found = self._exactly(_TAG_BYTES, deadline)
        except ConnectionError as error:
            raise WrongToken("it refused the run's token") if is_client else error from None
        if not hmac.compare_digest(found, proof(self._labels[1])):
            raise WrongToken("it does not know the run's token")
        if not is_client:
            self._sock.sendall(proof(b"server"))
        self._key = proof(b"frames")
        self._sock.settimeout(STALLED_AFTER_S)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message as one frame of JSON."""
        self.send_frame(json.dumps(message).encode())

    def send_frame(self, data: bytes) -> None:
        """Send one frame of bytes."""
        tag = self._tag(self._labels[0], self._num_sent, data)
        self._num_sent += 1
        self._sock.sendall(struct.pack("!I", len(data)) + tag + data)

    def receive(self, timeout_s: float = STALLED_AFTER_S) -> dict[str, Any]:
        """Return the message of the next frame.

        Raises:
            OSError: none came in time, the connection is lost, or the other side reports an error.
        """
        self._sock.settimeout(max(timeout_s, 0.001))
        message = json.loads(self.receive_frame())
        self._sock.settimeout(STALLED_AFTER_S)
        if not isinstance(message, dict):
            raise ConnectionError("a frame is not an object")
        if "error" in message:
            raise OSError(str(message["error"]))
        return message

    def receive_frame(self) -> bytes:
        """Return the bytes of the next frame; wait for it as long as the socket's timeout.

        Raises:
            OSError: the connection is lost, none came in time, or the frame is not the next one that was sent.
        """
        (size,) = struct.unpack("!I", self._exactly(4))
        if size > _MAX_FRAME_BYTES:
            raise ConnectionError(f"a frame of {size} bytes is more than {_MAX_FRAME_BYTES}")
        tag, data = self._exactly(_TAG_BYTES), self._exactly(size)
        if not hmac.compare_digest(tag, self._tag(self._labels[1], self._num_received, data)):
            raise ConnectionError("a frame was changed on its way")
        self._num_received += 1
        return data

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one frame and return the answer."""
        self.send(message)
        return self.receive()

    def send_bytes(self, file: BinaryIO, size_bytes: int) -> None:
        """Send the first `size_bytes` bytes of `file`, by sendfile(2)."""
        if size_bytes and self._sock.sendfile(file, 0, size_bytes) != size_bytes:
            raise ConnectionError("the file became shorter while it was sent")

    def receive_bytes(self, size_bytes: int, file: BinaryIO) -> str:
        """Receive `size_bytes` bytes into `file`; return their SHA-256."""
        digest = hashlib.sha256()
        chunk = memoryview(bytearray(min(CHUNK_BYTES, max(size_bytes, 1))))
        while size_bytes:
            received = self._sock.recv_into(chunk[:size_bytes])
            if not received:
                raise ConnectionError("the connection was closed in the middle of a file")
            digest.update(chunk[:received])
            file.write(chunk[:received])
            size_bytes -= received
        return digest.hexdigest()

    def abort(self) -> None:
        """Make the thread that uses or opens this connection get an OSError; may be called from any thread."""
        with contextlib.suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _tag(self, label: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, label + struct.pack("!Q", number) + data, "sha256")

    def _exactly(self, size_bytes: int, deadline: float | None = None) -> bytes:
        """Receive exactly `size_bytes` bytes, all by `deadline`; without one, each part within the socket's timeout."""
        data = bytearray()
        while len(data) < size_bytes:
            if deadline is not None:
                self._sock.settimeout(max(deadline - time.monotonic(), 1e-6))
            part = self._sock.recv(min(size_bytes - len(data), CHUNK_BYTES))
            if not part:
                raise ConnectionError("the connection was closed")
            data += part
        return bytes(data)


def endpoint_of(listener: socket.socket) -> str:
    """Return `address:port` of a listening socket, with an IPv6 address in brackets."""
    address, port = listener.getsockname()[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def connect(
    endpoint: str,
    token: str,
    timeout_s: float = CONNECT_S,
    announce: Callable[[Wire], object] | None = None,
) -> Wire:
    """Connect to the agent at `endpoint`, and authenticate.

    Args:
        endpoint: ``address:port``, with an IPv6 address in brackets.
        token: of the run.
        timeout_s: for the connect, and again for the authentication.
        announce: called with the wire before it connects, so that another thread can `abort` it.
    """
    address, _, port = endpoint.rpartition(":")
    sock = socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET)
    wire = Wire(sock)
    try:
        if announce is not None:
            announce(wire)
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect((address.strip("[]"), int(port)))
        wire.prove(token, is_client=True, timeout_s=max(timeout_s, 0.001))
    except BaseException:
        wire.close()
        raise
    return wire
