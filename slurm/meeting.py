"""How the tasks of an allocation meet: the first one listens, and the others call and are its hands.

What they say is authenticated, by a secret that only who can read the run's folder has, and not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nodekit.deploy.accept import Acceptor
from nodekit.deploy.link import Link, open_socket
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Host
from nodekit.slurm.own_job import node_name

MEET_S = 300.0
"""How long the tasks wait for the leader, and it for them: the slowest of them may still load its modules."""
LATE_S = 20.0  # for the rest, once the fewest are there
TALK_S = 10.0
UNHEARD_S = 5.0  # a link through which nothing comes is given up, and another one is tried
KEEP_ALIVE_S = 1
CALL_S = 3.0


@contextlib.contextmanager
def call(meeting: Mapping[str, Any], *, is_here: bool) -> Iterator[socket.socket]:
    """A connection to the leader, in this process or not; each side has shown that it can read the run's folder."""
    # Where a task calls from is the node's address for all others, so loopback comes last, and for the leader alone.
    addresses = [*meeting["addresses"], *(["127.0.0.1"] if is_here else [])]
    for address in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, meeting["port"]), timeout=CALL_S)
            break
    else:
        raise ConnectionError(f"nobody answers at {addresses}")
    with connection:
        connection.settimeout(TALK_S)
        _notice_loss(connection)
        with connection.makefile("rwb", buffering=0) as talk:
            own = secrets.token_hex(16)
            theirs = json.loads(_line(talk))["nonce"]
            proof = _proof(meeting["token"], "task", theirs, own)
            talk.write(json.dumps({"node": node_name(), "nonce": own, "proof": proof}).encode() + b"\n")
            if not hmac.compare_digest(
                json.loads(_line(talk))["proof"], _proof(meeting["token"], "leader", own)
            ):
                raise ConnectionError("that is not the leader")
        connection.settimeout(None)
        yield connection


def _notice_loss(connection: socket.socket) -> None:
    """Have the connection end when the other host is no more, whether something is under way or not."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
        (socket.TCP_KEEPINTVL, KEEP_ALIVE_S),
        (socket.TCP_KEEPCNT, int(UNHEARD_S / KEEP_ALIVE_S)),
        (socket.TCP_USER_TIMEOUT, int(1000 * UNHEARD_S)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _line(talk: Any) -> bytes:
    line: bytes = talk.readline(1000)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection ended")
    return line


def _proof(token: str, *words: str) -> str:
    return hmac.new(token.encode(), " ".join(words).encode(), "sha256").hexdigest()


class Tasks:
    """The tasks of the allocation, as the leader sees them: each calls, and is a link to its node."""

    def __init__(self, token: str) -> None:
        self.address: dict[str, str] = {}
        """Node → where it called from."""
        self._token = token
        self._came = threading.Condition()
        self._free: dict[str, socket.socket] = {}
        self._absent: set[str] = set()
        listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._greet, name="tasks")

    def _greet(self, connection: socket.socket, address: str, proven: Callable[[], None]) -> None:
        connection.settimeout(TALK_S)
        _notice_loss(connection)
        nonce = secrets.token_hex(16)
        with connection.makefile("rwb", buffering=0) as talk:
            talk.write(json.dumps({"nonce": nonce}).encode() + b"\n")
            said = json.loads(_line(talk))
            if not hmac.compare_digest(said["proof"], _proof(self._token, "task", nonce, said["nonce"])):
                raise ConnectionError("a stranger")
            proof = _proof(self._token, "leader", said["nonce"])
            talk.write(json.dumps({"proof": proof}).encode() + b"\n")
        connection.settimeout(None)
        proven()
        with self._came:
            if (old := self._free.pop(said["node"], None)) is not None:
                old.close()
            self._free[said["node"]] = connection
            self.address[said["node"]] = address
            self._absent.discard(said["node"])
            self._came.notify_all()

    def wait(self, names: list[str], *, least: int, say: Callable[[str], None]) -> list[str]:
        """Those of `names` that came: all, or after a while at least as many as are needed.

        Raises:
            KitError: too few came in time.
        """
        with self._came:
            if not self._came.wait_for(lambda: len(self.address) == len(names), timeout=LATE_S):
                absent = ", ".join(name for name in names if name not in self.address)
                say(f"waiting for the tasks on {absent}")
                self._came.wait_for(lambda: len(self.address) >= least, timeout=MEET_S - LATE_S)
            here = [name for name in names if name in self.address]
        if len(here) < least:
            absent = ", ".join(name for name in names if name not in here)
            raise KitError(
                f"no word from the tasks on {absent} within {MEET_S:.0f} s; what they said is in the folder slurm/ "
                "of the run: can they see the shared folder, and reach this node?"
            )
        return here

    def open(self, host: Host) -> Link:
        """A link to a node.

        Raises:
            HostError: its task has not called since the last one was lost.
        """
        with self._came:
            self._came.wait_for(lambda: host.name in self._free, timeout=TALK_S)
            connection = self._free.pop(host.name, None)
            (self._absent.discard if connection else self._absent.add)(host.name)
        if connection is None:
            raise HostError(host.name, f"its task has not called for {TALK_S:.0f} s")
        return open_socket(connection, host.name)

    def absent(self, names: list[str]) -> list[str]:
        """Those of `names` that never called, or have not since their link was lost."""
        with self._came:
            return [name for name in names if name in self._absent or name not in self.address]

    def lost(self) -> list[str]:
        """The nodes that called once and do not again, now that their links are closed."""
        with self._came:
            self._came.wait_for(lambda: self._free.keys() >= self.address.keys(), timeout=TALK_S)
            return [name for name in self.address if name not in self._free]

    def close(self) -> None:
        """Take no more calls."""
        self._acceptor.close()
