"""Test the network from one host: listen there, and connect to the others.

`begin` listens on some ports, `try_peers` connects to those of the others and sends them datagrams that must not be
fragmented, `arrived` returns whose datagrams came, `finish` closes everything. All sockets are in the server's own
process, so they are closed when the channel ends.
"""

from __future__ import annotations

import collections
import copy
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple, TypedDict

from nodekit.deploy.host import ports
from nodekit.deploy.host.probes.network import netjob, netstate
from nodekit.deploy.host.probes.network.nics import Nic, nics

SMALL_BYTES = 256  # the size of a datagram that passes wherever any does
_HELLO = b"nodekit "
_MAX_LINE = 512
OPEN_AT_ONCE = 256
_MOST_CALLERS = 256
_TICK_S = 0.05
# From linux/in.h: do not fragment, and ignore the path MTU that earlier packets have discovered.
_MTU_DISCOVER: Dict[int, Tuple[int, int]] = {socket.AF_INET: (0, 10), socket.AF_INET6: (41, 23)}
_PMTUDISC_PROBE = 3
_HEADERS_BYTES: Dict[int, int] = {socket.AF_INET: 28, socket.AF_INET6: 48}  # IP's and UDP's

# session → its listening end
_sessions: Dict[str, "_Session"] = {}


class Peer(TypedDict):
    """A host to connect to."""

    name: str
    address: str
    ports: Sequence[int]
    udp_port: Optional[int]
    sizes: Sequence[int]
    """Sizes of the datagrams to send, in bytes, with the IP header."""


class Tried(TypedDict):
    """The result of connecting to a peer."""

    connects: List[int]
    """The peer's ports that answered."""
    failed: Dict[str, List[int]]
    """Outcome → the peer's ports."""
    words: Dict[str, str]
    """Outcome → the kernel's message, or the peer's."""
    source: Optional[str]
    """The address of this host on the connections."""
    unsent: Dict[str, str]
    """Size of a datagram → why it was not sent."""
    dropped_from: List[int]
    """This host's ports of the connections that got no answer."""


class Here(TypedDict):
    """The state of a listening host's network."""

    nics: List[Nic]
    neighbours: Dict[str, netstate.NeighbourTable]
    rdma: List[netstate.RdmaPort]
    range: List[int]
    """The first and the last of the kernel's ephemeral ports."""
    ports: List[int]
    """The TCP ports on which it listens."""
    udp_port: Optional[int]
    """The port on which it receives datagrams."""
    taken: Optional[netstate.Taken]
    """The process that holds the rendezvous port; None if the port is free."""


def begin(
    session: str,
    name: str,
    token: str,
    address: Optional[str],
    port: Optional[int],
    num_sampled: int,
    lifetime_s: float,
) -> Here:
    """Listen at `address` on `port` and on some of the kernel's ephemeral ports; return the state of the network.

    Args:
        session: the name of this session for the other functions.
        name: of this host, sent to those that connect.
        token: a secret of this check's hosts, by which they authenticate each other.
        address: of the interface to test; None: listen nowhere.
        port: the rendezvous port; None: do not test it.
        num_sampled: how many ephemeral ports.
        lifetime_s: after so many seconds, close everything in any case.
    """
    low, high = netstate.port_range()
    found: Here = {
        "nics": nics(),
        "neighbours": netstate.neighbours(),
        "rdma": netstate.rdma_ports(),
        "range": [low, high],
        "ports": [],
        "udp_port": None,
        "taken": None,
    }
    opened = _Session(name, token, lifetime_s)
    _sessions[session] = opened
    if address is None:
        return found
    if port is not None:
        found["taken"] = netstate.taken(port)
        if found["taken"] is None:
            opened.listen(address, port)
    for start in _sample(low, high, num_sampled):
        for candidate in range(start, min(start + 50, high + 1)):
            try:
                opened.listen(address, candidate)
                break
            except OSError:  # the port is in use
                continue
    found["ports"] = opened.ports
    found["udp_port"] = opened.receive(address)
    opened.start()
    return found


def _sample(low: int, high: int, number: int) -> List[int]:
    """Return the middle of each of `number` equal parts of a range."""
    part = (high - low + 1) / number
    return sorted({int(low + part * (index + 0.5)) for index in range(number)})


# --- the end that listens -------------------------------------------------------------------------------------


class _Session:
    """The listening end: it answers each greeting with this host's name, signed with the token."""

    def __init__(self, name: str, token: str, lifetime_s: float) -> None:
        self.name = name
        self.token = token
        self.ports: List[int] = []
        self.datagrams: Optional[socket.socket] = None
        self.sizes: Dict[str, Set[int]] = {}
        self._until = time.monotonic() + lifetime_s
        self._listeners: List[socket.socket] = []
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def listen(self, address: str, port: int) -> None:
        listener = ports.listen(address, port)
        listener.setblocking(False)
        self._listeners.append(listener)
        self.ports.append(port)

    def receive(self, address: str) -> int:
        family = ports.family_of(address)
        self.datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self.datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.datagrams.setsockopt(*_MTU_DISCOVER[family], _PMTUDISC_PROBE)
        self.datagrams.bind((address, 0))
        self.datagrams.setblocking(False)
        port: int = self.datagrams.getsockname()[1]
        return port

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2)
        else:
            self._close_sockets()

    def _close_sockets(self) -> None:
        for each in (*self._listeners, self.datagrams):
            if each is not None:
                each.close()

    def _serve(self) -> None:
        said: Dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            assert self.datagrams is not None
            selector.register(self.datagrams, selectors.EVENT_READ)
            while not self._closed.is_set() and time.monotonic() < self._until:
                for key, _ in selector.select(_TICK_S):
                    ready: Any = key.fileobj
                    if ready is self.datagrams:
                        self._take_datagrams()
                    elif ready in said:
                        if self._answer(ready, said):
                            selector.unregister(ready)
                            ready.close()
                            del said[ready]
                    else:
                        for caller in _accept_all(ready):
                            said[caller] = b""
                            selector.register(caller, selectors.EVENT_READ)
                        while len(said) > _MOST_CALLERS:  # silent callers must not use up all descriptors
                            oldest = next(iter(said))
                            selector.unregister(oldest)
                            oldest.close()
                            del said[oldest]
            for caller in said:
                caller.close()
            self._close_sockets()

    def _answer(self, caller: socket.socket, said: Dict[socket.socket, bytes]) -> bool:
        """Read what has arrived, and answer a whole line; True if the caller is gone, or sends anything else."""
        try:
            data = caller.recv(_MAX_LINE)
            if not data:
                return True
            said[caller] += data
            if b"\n" in data:
                if not said[caller].startswith(_HELLO):
                    return True
                nonce = said[caller][len(_HELLO) :].split(b"\n")[0]
                caller.send(_signed(self.name, self.token, nonce) + b"\n")
        except OSError:
            return True
        # The caller closes first, and with a reset, so that no port of this host is left in TIME_WAIT.
        return len(said[caller]) > _MAX_LINE

    def _take_datagrams(self) -> None:
        assert self.datagrams is not None
        while True:
            try:
                data = self.datagrams.recv(1 << 16)
            except OSError:  # no more datagrams
                return
            token, _, rest = data.rstrip(b"\0").partition(b" ")
            size, _, name = rest.partition(b" ")
            if hmac.compare_digest(token, self.token.encode()):
                self.sizes.setdefault(name.decode("utf-8", "replace"), set()).add(int(size))


def _accept_all(listener: socket.socket) -> List[socket.socket]:
    callers: List[socket.socket] = []
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:  # no more callers
            return callers
        caller.setblocking(False)
        _reset_at_close(caller)
        callers.append(caller)


def _reset_at_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _signed(name: str, token: str, nonce: bytes) -> bytes:
    return (
        name.encode()
        + b" "
        + hmac.new(token.encode(), nonce + name.encode(), hashlib.sha256).hexdigest().encode()
    )


def arrived(session: str, wanted: Mapping[str, Sequence[int]], wait_s: float) -> Dict[str, List[int]]:
    """Return peer → sizes of the datagrams that have arrived, after waiting up to `wait_s` for those `wanted`."""
    own = _sessions[session]
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if all(set(sizes) <= own.sizes.get(name, set()) for name, sizes in wanted.items()):
            break
        time.sleep(0.01)
    return {name: sorted(sizes) for name, sizes in list(own.sizes.items())}


def finish(session: str) -> None:
    """Close everything of this session, and end its job in `netjob`."""
    netjob.end_job(session)
    opened = _sessions.pop(session, None)
    if opened is not None:
        opened.close()


# --- the end that connects ------------------------------------------------------------------------------------


class _Attempt:
    """One connection that is being tried."""

    def __init__(self, peer: Peer, port: int, until: float) -> None:
        self.peer = peer
        self.port = port
        self.until = until
        self.nonce = secrets.token_hex(16).encode()
        self.is_connected = False
        self.said = b""


def try_peers(session: str, peers: Sequence[Peer], answer_s: float, limit_s: float) -> Dict[str, Tried]:
    """Connect to every port of every peer, and send each peer datagrams.

    Args:
        session: as for `begin`.
        peers: the hosts to connect to.
        answer_s: how long to wait for a connection, and then for the answer.
        limit_s: how long everything together may take.

    Returns:
        The peer's name → the result.
    """
    own = _sessions[session]
    end = time.monotonic() + limit_s
    calls = _Calls(own.token, peers, answer_s)
    for peer in peers:
        calls.found[peer["name"]]["unsent"] = _send_datagrams(own, peer)
    return calls.run(end)


class _Calls:
    """Connections to all ports of all peers, at most `OPEN_AT_ONCE` at a time."""

    def __init__(self, token: str, peers: Sequence[Peer], answer_s: float) -> None:
        nothing: Tried = {
            "connects": [],
            "failed": {},
            "words": {},
            "source": None,
            "unsent": {},
            "dropped_from": [],
        }
        self.found: Dict[str, Tried] = {peer["name"]: copy.deepcopy(nothing) for peer in peers}
        self._token = token
        self._answer_s = answer_s
        self._most = OPEN_AT_ONCE
        longest = max((len(peer["ports"]) for peer in peers), default=0)
        self._wanted: Deque[Tuple[Peer, int]] = collections.deque(
            (peer, peer["ports"][index])
            for index in range(longest)
            for peer in peers
            if index < len(peer["ports"])
        )
        self._waiting: Dict[socket.socket, _Attempt] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, end: float) -> Dict[str, Tried]:
        """Try all connections, until `end` at the latest; return peer → result."""
        with self._selector:
            while self._wanted or self._waiting:
                while self._wanted and len(self._waiting) < self._most and time.monotonic() < end:
                    self._call(*self._wanted.popleft())
                for key, _ in self._selector.select(_TICK_S):
                    ready: Any = key.fileobj
                    try:
                        self._go_on(ready, self._waiting[ready])
                    except OSError as error:
                        self._end(ready, "stranger", "it hangs up (%s)" % error.strerror)
                now = time.monotonic()
                for connection, attempt in list(self._waiting.items()):
                    if now > attempt.until:
                        self._end(connection, "silent" if attempt.is_connected else "dropped")
                    elif now > end:
                        self._end(connection, "untried")
                if now > end:
                    for peer, port in self._wanted:
                        self._note(peer, port, "untried")
                    break
        return self.found

    def _call(self, peer: Peer, port: int) -> None:
        try:
            connection = socket.socket(ports.family_of(peer["address"]), socket.SOCK_STREAM)
        except OSError:  # no more file descriptors
            if not self._waiting:
                raise
            self._wanted.appendleft((peer, port))
            self._most = len(self._waiting)
            return
        connection.setblocking(False)
        _reset_at_close(connection)
        code = connection.connect_ex((peer["address"], port))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._note(peer, port, *_outcome(code))
            return
        self._waiting[connection] = _Attempt(peer, port, time.monotonic() + self._answer_s)
        self._selector.register(connection, selectors.EVENT_WRITE)

    def _go_on(self, connection: socket.socket, attempt: _Attempt) -> None:
        """Send the greeting once the connection is made, and then read the answer."""
        if attempt.is_connected:
            data = connection.recv(_MAX_LINE)
            attempt.said += data
            if not data or b"\n" in data or len(attempt.said) > _MAX_LINE:
                self._end(connection, *_who(attempt, self._token))
            return
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(connection, *_outcome(code))
            return
        attempt.is_connected = True
        attempt.until = time.monotonic() + self._answer_s
        self.found[attempt.peer["name"]]["source"] = connection.getsockname()[0]
        connection.send(_HELLO + attempt.nonce + b"\n")
        self._selector.modify(connection, selectors.EVENT_READ)

    def _end(self, connection: socket.socket, outcome: str, words: str = "") -> None:
        attempt = self._waiting.pop(connection)
        if outcome == "dropped":
            self.found[attempt.peer["name"]]["dropped_from"].append(connection.getsockname()[1])
        self._selector.unregister(connection)
        connection.close()
        self._note(attempt.peer, attempt.port, outcome, words)

    def _note(self, peer: Peer, port: int, outcome: str, words: str = "") -> None:
        found = self.found[peer["name"]]
        if outcome == "connects":
            found["connects"].append(port)
            return
        found["failed"].setdefault(outcome, []).append(port)
        if words:
            found["words"][outcome] = words


def _who(attempt: _Attempt, token: str) -> Tuple[str, str]:
    """Return the outcome of an answer, and the message: "connects" only if the peer itself has answered."""
    answer = attempt.said.split(b"\n")[0]
    name = answer.rpartition(b" ")[0].decode("utf-8", "replace")
    if hmac.compare_digest(answer, _signed(name, token, attempt.nonce)):
        return ("connects", "") if name == attempt.peer["name"] else ("stranger", "%s answers there" % name)
    return "stranger", "it answers %r" % answer[:40].decode("utf-8", "replace") if answer else "it hangs up"


def _outcome(code: int) -> Tuple[str, str]:
    if code == errno.ECONNREFUSED:
        return "refused", ""
    if code == errno.ETIMEDOUT:
        return "dropped", ""
    return "unreachable", os.strerror(code)


def _send_datagrams(own: _Session, peer: Peer) -> Dict[str, str]:
    """Send an unfragmented datagram of each size; return size → why, for those that could not even be sent."""
    unsent: Dict[str, str] = {}
    if own.datagrams is None or peer["udp_port"] is None:
        return unsent
    headers = _HEADERS_BYTES[ports.family_of(peer["address"])]
    for size in peer["sizes"]:
        text = ("%s %d %s" % (own.token, size, own.name)).encode()
        for _ in range(2):  # the first try may get the error of an earlier datagram
            try:
                own.datagrams.sendto(text.ljust(size - headers, b"\0"), (peer["address"], peer["udp_port"]))
                unsent.pop(str(size), None)
                break
            except OSError as error:
                unsent[str(size)] = errno.errorcode.get(error.errno or 0, "")
    return unsent
