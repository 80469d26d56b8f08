"""How the agents of one run talk about files: authenticated frames over TCP, and file bytes between them.

Both sides prove that they know the run's token (HMAC over both sides' nonces; the token itself never travels), and
every frame carries an HMAC under a key of this connection alone. File bytes carry none: their SHA-256 is in a frame.
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
from typing import Any, BinaryIO, Protocol

CHUNK_BYTES = 1 << 20
SILENCE_S = 10.0
"""How long one send or receive may stand still."""
_MAX_FRAME_BYTES = 64 << 20
_HELLO = b"kit-replicas-1\n"
_NONCE_BYTES = 32
_TAG_BYTES = 32
_HANDSHAKE_S = 5.0


class WireError(ConnectionError):
    """The other side is not one of this run's agents, or broke the rules, or is gone."""


class WrongToken(WireError):
    """The other side does not know the run's token."""


class Sink(Protocol):
    """What received bytes are written to."""

    def write(self, data: memoryview, /) -> object:
        """Take all of `data`."""


class Wire:
    """An authenticated connection; used by one thread at a time, except for `abort`."""

    def __init__(self, sock: socket.socket, key: bytes, *, is_client: bool) -> None:
        self._sock = sock
        self._key = key
        self._labels = (b"c", b"s") if is_client else (b"s", b"c")
        self._num_sent = self._num_received = 0

    def send(self, message: dict[str, Any]) -> None:
        """Send one frame."""
        data = json.dumps(message).encode()
        if len(data) > _MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(data)} bytes is more than {_MAX_FRAME_BYTES}")
        tag = self._tag(self._labels[0], self._num_sent, data)
        self._num_sent += 1
        self._sock.sendall(struct.pack("!I", len(data)) + tag + data)

    def receive(self, timeout_s: float = SILENCE_S) -> dict[str, Any]:
        """The next frame.

        Raises:
            OSError: none came in time, or the connection is lost.
        """
        self._sock.settimeout(max(timeout_s, 0.001))
        try:
            (size,) = struct.unpack("!I", _exactly(self._sock, 4))
            if size > _MAX_FRAME_BYTES:
                raise WireError(f"a frame of {size} bytes is more than {_MAX_FRAME_BYTES}")
            tag, data = _exactly(self._sock, _TAG_BYTES), _exactly(self._sock, size)
        finally:
            self._sock.settimeout(SILENCE_S)
        if not hmac.compare_digest(tag, self._tag(self._labels[1], self._num_received, data)):
            raise WireError("a frame was changed on its way")
        self._num_received += 1
        message = json.loads(data)
        if not isinstance(message, dict):
            raise WireError("a frame is not an object")
        return message

    def ask(self, message: dict[str, Any], timeout_s: float = SILENCE_S) -> dict[str, Any]:
        """Send one frame and return the answer."""
        self.send(message)
        return self.receive(timeout_s)

    def send_bytes(self, file: BinaryIO, size_bytes: int) -> None:
        """Send the first bytes of `file`, copied by the kernel alone."""
        if size_bytes and self._sock.sendfile(file, 0, size_bytes) != size_bytes:
            raise WireError("the file became shorter while it was sent")

    def receive_bytes(self, size_bytes: int, sink: Sink) -> str:
        """Write that many bytes to `sink`; returns their SHA-256."""
        digest = hashlib.sha256()
        chunk = memoryview(bytearray(min(CHUNK_BYTES, max(size_bytes, 1))))
        while size_bytes:
            received = self._sock.recv_into(chunk[:size_bytes])
            if not received:
                raise WireError("the connection was closed in the middle of a file")
            digest.update(chunk[:received])
            sink.write(chunk[:received])
            size_bytes -= received
        return digest.hexdigest()

    def abort(self) -> None:
        """Wake whoever uses the connection with a ConnectionError; from any thread."""
        with contextlib.suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _tag(self, label: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, label + struct.pack("!Q", number) + data, "sha256")


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=256)


def endpoint_of(listener: socket.socket) -> str:
    """`address:port`, an IPv6 address in brackets."""
    address, port = listener.getsockname()[:2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def connect(endpoint: str, token: str, timeout_s: float = _HANDSHAKE_S) -> Wire:
    """Reach the agent at `endpoint` and prove to each other that both are of this run."""
    address, _, port = endpoint.rpartition(":")
    sock = socket.create_connection((address.strip("[]"), int(port)), timeout=max(timeout_s, 0.001))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _exactly(sock, len(_HELLO) + _NONCE_BYTES)
        if not hello.startswith(_HELLO):
            raise WireError(f"{endpoint} is not an agent that speaks our protocol")
        nonces = hello[len(_HELLO) :] + secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(nonces[_NONCE_BYTES:] + _prove(token, b"client", nonces))
        try:
            proof = _exactly(sock, _TAG_BYTES)
        except ConnectionError:
            raise WrongToken(f"{endpoint} refused the run's token") from None
        if not hmac.compare_digest(proof, _prove(token, b"server", nonces)):
            raise WrongToken(f"{endpoint} does not know the run's token")
        sock.settimeout(SILENCE_S)
        return Wire(sock, _prove(token, b"frames", nonces), is_client=True)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, token: str) -> Wire:
    """The other side of `connect`."""
    sock.settimeout(_HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_HELLO + nonce)
    answer = _exactly(sock, _NONCE_BYTES + _TAG_BYTES)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _prove(token, b"client", nonces)):
        raise WrongToken("wrong token")
    sock.sendall(_prove(token, b"server", nonces))
    sock.settimeout(SILENCE_S)
    return Wire(sock, _prove(token, b"frames", nonces), is_client=False)


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, unless it is an error.

    Raises:
        OSError: it is.
    """
    if "error" in answer:
        raise OSError(str(answer["error"]))
    return answer


def _prove(token: str, what: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), what + nonces, "sha256")


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        part = sock.recv(size_bytes - len(data))
        if not part:
            raise WireError("the connection was closed")
        data += part
    return bytes(data)
