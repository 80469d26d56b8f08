"""How the agents of one run talk to each other, and Slurm's tasks with their leader: authenticated frames over TCP.

Both sides prove that they know the run's token (HMAC over both sides' nonces; the token itself never travels), and
every frame carries an HMAC under a key of this connection alone, of its direction and number, too: none can be changed,
repeated, left out or sent back. Between agents' frames go file bytes, which carry none: their SHA-256 is in a frame.
Nothing is encrypted: the bytes of the job's own collectives go over the same network in the clear.
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
"""How long one send or receive may stand still."""
CONNECT_S = 5.0
_MAX_FRAME_BYTES = 64 << 20
_NONCE_BYTES = _TAG_BYTES = 32


class WrongToken(ConnectionError):
    """The other side does not know the run's token."""


class Wire:
    """A connection to another process of the run, once `prove`d.

    Used by one thread at a time, except for `abort`; and one thread may send frames while another one waits for them
    with `receive_frame`.
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
        """Prove to each other that both are of this run, all within `timeout_s` seconds.

        Raises:
            WrongToken: the other side is not.
            OSError: the connection is lost, or it is too slow.
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

        # The client goes first: a stranger who calls gets nothing to guess a token with.
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
        """Send one frame."""
        self.send_frame(json.dumps(message).encode())

    def send_frame(self, data: bytes) -> None:
        """Send one frame of bytes."""
        tag = self._tag(self._labels[0], self._num_sent, data)
        self._num_sent += 1
        self._sock.sendall(struct.pack("!I", len(data)) + tag + data)

    def receive(self, timeout_s: float = STALLED_AFTER_S) -> dict[str, Any]:
        """The next frame.

        Raises:
            OSError: none came in time, or the connection is lost, or the other side tells of an error.
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
        """The bytes of the next frame, waited for as long as the socket's timeout says.

        Raises:
            OSError: the connection is lost, or this is not the frame that the other side sent next.
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
        """Send the first bytes of `file`, copied by the kernel alone."""
        if size_bytes and self._sock.sendfile(file, 0, size_bytes) != size_bytes:
            raise ConnectionError("the file became shorter while it was sent")

    def receive_bytes(self, size_bytes: int, file: BinaryIO) -> str:
        """Write that many bytes to `file`; returns their SHA-256."""
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
        """Wake whoever uses the connection, or waits for it to come about, with an OSError; from any thread."""
        with contextlib.suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _tag(self, label: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, label + struct.pack("!Q", number) + data, "sha256")

    def _exactly(self, size_bytes: int, deadline: float | None = None) -> bytes:
        """So many bytes; with a deadline all of them until then, else each part within the socket's timeout."""
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
    """`address:port`, an IPv6 address in brackets."""
    address, port = listener.getsockname()[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def connect(
    endpoint: str,
    token: str,
    timeout_s: float = CONNECT_S,
    announce: Callable[[Wire], object] | None = None,
) -> Wire:
    """Reach the agent at `endpoint`; `announce` gets the wire first, so that another thread can abort the call."""
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
