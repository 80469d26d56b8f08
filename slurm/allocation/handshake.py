"""Connect the tasks of an allocation: the leader listens, the others connect and run on their nodes what it asks for.

The traffic is authenticated, by a secret in the run's folder which only its readers know, but not encrypted.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, cast

from nodekit.deploy.agent.agent_wire import CHUNK_BYTES, Wire
from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.host.accept import Acceptor
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.schema import Host
from nodekit.slurm.allocation.requeue import node_name

MEET_S = 300.0
"""How long the tasks wait for the leader, and the leader for the tasks: the slowest one may still load its modules."""
LATE_S = 20.0  # how long to wait for all tasks; after that, for the fewest that the job needs
TALK_S = 10.0  # the longest wait for a task to authenticate itself, or to connect again
UNHEARD_S = 5.0  # a connection to a host that is silent for so long is closed, and the task connects again
KEEP_ALIVE_S = 1  # between two keepalives of TCP
CALL_S = 3.0  # the longest wait for a connection to one address


@contextlib.contextmanager
def call(contact: Mapping[str, Any], *, is_here: bool) -> Iterator[Wire]:
    """Connect to the leader and authenticate both sides; `is_here`: the leader runs in this process.

    Raises:
        ConnectionError: the leader does not answer at any of its addresses.
    """
    # The leader tells all others to reach this node at the address it connects from: so loopback is the last choice.
    addresses = [*contact["addresses"], *(["127.0.0.1"] if is_here else [])]
    for address in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, contact["port"]), timeout=CALL_S)
            break
    else:
        raise ConnectionError(f"nobody answers at {addresses}")
    with Wire(connection) as wire:
        _notice_loss(connection)
        wire.prove(contact["token"], is_client=True, timeout_s=TALK_S)
        wire.send({"node": node_name()})
        connection.settimeout(None)
        yield wire


def run_for(wire: Wire, argv: Sequence[str]) -> None:
    """Run a program until it ends, with its stdin and stdout connected to the other end of the wire.

    When the wire is lost, the program's stdin is closed.
    """
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        hearing = threading.Thread(target=_hear, args=(wire, program.stdin), daemon=True)
        hearing.start()
        try:
            while data := os.read(program.stdout.fileno(), CHUNK_BYTES):
                wire.send_frame(data)
        except OSError:
            pass  # the wire is lost, and `_hear` closes the program's stdin
        finally:
            wire.abort()
            program.stdout.close()
            hearing.join()


def _hear(wire: Wire, stdin: IO[bytes]) -> None:
    with contextlib.suppress(OSError), stdin:
        while True:
            stdin.write(wire.receive_frame())
            stdin.flush()


class _Frames(io.RawIOBase):
    """A wire as a binary stream."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest or self._wire.receive_frame()
        size_bytes = min(len(data), len(buffer))
        buffer[:size_bytes], self._rest = data[:size_bytes], data[size_bytes:]
        return size_bytes

    def write(self, data: Any) -> int:
        for start in range(0, len(data), CHUNK_BYTES):
            self._wire.send_frame(data[start : start + CHUNK_BYTES])
        return len(data)


class CalledProcess:
    """A process that was started by `run_for` at the other end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.stdin = cast(IO[bytes], _Frames(wire))
        self.stdout: IO[bytes] = io.BufferedReader(_Frames(wire))

    def stderr_tail(self) -> str:
        """Return "": the program's stderr stays on its host."""
        return ""

    def close(self) -> None:
        """End the program by closing its stdin."""
        self._wire.abort()
        self._wire.close()


def _notice_loss(connection: socket.socket) -> None:
    """Have the kernel close the connection when the other host is lost, also while nothing is being sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
        (socket.TCP_KEEPINTVL, KEEP_ALIVE_S),
        (socket.TCP_KEEPCNT, int(UNHEARD_S / KEEP_ALIVE_S)),
        (socket.TCP_USER_TIMEOUT, int(1000 * UNHEARD_S)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Tasks:
    """The leader's side of the connections from all tasks; each connection can become a channel to its node."""

    def __init__(self, token: str) -> None:
        self.address: dict[str, str] = {}
        """Node → the address it connected from."""
        self._token = token
        self._came = threading.Condition()
        self._free: dict[str, Wire] = {}
        self._absent: set[str] = set()
        listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self._greet, name="tasks")

    def _greet(self, connection: socket.socket, address: str, proven: Callable[[], None]) -> None:
        wire = Wire(connection)
        _notice_loss(connection)
        wire.prove(self._token, is_client=False, timeout_s=TALK_S)
        node = str(wire.receive(TALK_S)["node"])
        connection.settimeout(None)
        proven()
        with self._came:
            if (old := self._free.pop(node, None)) is not None:
                old.close()
            self._free[node] = wire
            self.address[node] = address
            self._absent.discard(node)
            self._came.notify_all()

    def wait(self, names: list[str], *, least: int, say: Callable[[str], None]) -> list[str]:
        """Wait for all of `names` to connect, after `LATE_S` for `least` of them; return those that have.

        Raises:
            KitError: fewer than `least` connected within `MEET_S`.
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
                f"no word from the tasks on {absent} within {MEET_S:.0f} s",
                cure="what they said is in the folder slurm/ of the run: can they see the shared folder, and "
                "reach this node?",
            )
        return here

    def open(self, host: Host) -> HostChannel:
        """Open a channel to a node.

        Raises:
            HostError: the node's task has not connected since its last channel was lost.
        """
        with self._came:
            self._came.wait_for(lambda: host.name in self._free, timeout=TALK_S)
            wire = self._free.pop(host.name, None)
            (self._absent.discard if wire else self._absent.add)(host.name)
        if wire is None:
            raise HostError(host.name, f"its task has not called for {TALK_S:.0f} s")
        return HostChannel(host.name, CalledProcess(wire))

    def absent(self, names: list[str]) -> list[str]:
        """Return the nodes of `names` that never connected, or have not done so since their channel was lost."""
        with self._came:
            return [name for name in names if name in self._absent or name not in self.address]

    def lost(self) -> list[str]:
        """Return the nodes that do not connect again; to be called when all channels are closed."""
        with self._came:
            self._came.wait_for(lambda: self._free.keys() >= self.address.keys(), timeout=TALK_S)
            return [name for name in self.address if name not in self._free]

    def close(self) -> None:
        """Stop listening, and close the connections that no channel uses."""
        self._acceptor.close()
        with self._came:
            while self._free:
                self._free.popitem()[1].close()
