import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agents import until

from nodekit.deploy.agent.agent_wire import Wire
from nodekit.deploy.connect.channel import ChannelLost
from nodekit.deploy.host import processes
from nodekit.inventory.schema import Host
from nodekit.slurm.allocation import allocation
from nodekit.slurm.allocation.handshake import Tasks

TOKEN = "0123456789abcdef" * 4
NODE = "n2"


class Relay:
    """Someone on the path between a task and its leader, who passes on what they say until told to stop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.task: socket.socket
        """The task's connection."""
        self.is_cut = False
        self.heard = bytearray()
        self.has_task_left = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        self.task, _ = self._listening.accept()
        self._leader = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._pass_on, args=(self._leader, self.task), daemon=True).start()
        self._pass_on(self.task, self._leader)
        self.has_task_left.set()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while said := source.recv(65536):
                self.heard += said
                if not self.is_cut:
                    sink.sendall(said)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of them has left

    def close(self) -> None:
        for each in (self._listening, self.task, self._leader):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    tasks = Tasks(TOKEN)
    yield tasks
    tasks.close()


@pytest.fixture
def called(tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """The task of a node, which has called by way of a relay."""
    monkeypatch.setenv("SLURMD_NODENAME", NODE)
    monkeypatch.setattr(allocation, "AGAIN_S", 0.02)
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)  # pytest stays as it is
    relay = Relay(tasks.port)
    place = tmp_path / "1.0.json"
    meeting = {"leader": "n1", "addresses": ["127.0.0.1"], "port": relay.port, "token": TOKEN}
    place.write_text(json.dumps(meeting))
    serving = threading.Thread(target=allocation.serve, args=(place,))
    serving.start()
    until(lambda: NODE in tasks.address, what="the task has called")
    yield relay
    place.write_text(json.dumps({**meeting, "over": True}))
    relay.close()
    serving.join()


def host() -> Host:
    return Host(name=NODE, address="127.0.0.1", connection="ssh", python="python3", workdir="/")


def test_a_task_is_a_link_to_its_node_and_its_secret_does_not_travel(tasks: Tasks, called: Relay) -> None:
    channel = tasks.open(host())
    text = "x" * (1 << 20)
    done = channel.call("execute", timeout_s=10, limit_s=10, argv=["cat"], text=text)
    assert done["out"] == text
    channel.close()
    assert called.has_task_left.wait(10)
    assert TOKEN.encode() not in called.heard


@pytest.mark.parametrize("head", [b"", struct.pack("!I", 300) + bytes(32)], ids=["bare", "framed"])
def test_what_a_stranger_says_after_the_leaders_proof_is_not_run(
    tasks: Tasks, called: Relay, tmp_path: Path, head: bytes
) -> None:
    called.is_cut = True
    program = f"open({str(tmp_path / 'owned')!r}, 'w').close()".encode().ljust(296)
    called.task.sendall(head + b"%d\n" % len(program) + program)
    assert called.has_task_left.wait(10)
    assert not (tmp_path / "owned").exists()


def test_a_link_whose_answers_were_changed_is_lost(tasks: Tasks, called: Relay) -> None:
    channel = tasks.open(host())
    called.is_cut = True
    called._leader.sendall(struct.pack("!I", 40) + bytes(32) + b'{"id": 0, "result": "a stranger\'s word"}')
    with pytest.raises(ChannelLost):
        channel.call("read_file", timeout_s=10, path="/dev/null")
    channel.close()


@pytest.mark.parametrize(
    "sent",
    [["two"], ["one", "one"], ["changed"], ["cut short"], ["own"]],
    ids=["left out", "repeated", "changed", "cut short", "sent back"],
)
def test_a_frame_is_refused_unless_it_is_the_next_one_of_the_other_side(sent: list[str]) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        ends = [stack.enter_context(each) for each in (*_pair(), *_pair())]
        client, server = (stack.enter_context(Wire(each)) for each in (ends[0], ends[3]))
        proving = pool.submit(client.prove, TOKEN, is_client=True)
        for source, sink, size_bytes in [(1, 2, 64), (2, 1, 32)]:
            threading.Thread(target=_copy, args=(ends[source], ends[sink], size_bytes), daemon=True).start()
        server.prove(TOKEN, is_client=False)
        _copy(ends[2], ends[1], 32)
        proving.result()
        frames = {name: _frame(client, ends[1], name.encode()) for name in ("one", "two")}
        frames |= {"changed": frames["one"][:-1] + b"X", "cut short": frames["one"][:-1]}
        frames["own"] = _frame(server, ends[2], b"one")
        ends[2].sendall(b"".join(frames[name] for name in sent))
        ends[2].shutdown(socket.SHUT_WR)
        for _ in sent[1:]:
            assert server.receive_frame() == b"one"
        with pytest.raises(ConnectionError):
            server.receive_frame()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return socket.create_connection(listening.getsockname()), listening.accept()[0]


def _copy(source: socket.socket, sink: socket.socket, size_bytes: int) -> None:
    sink.sendall(source.recv(size_bytes, socket.MSG_WAITALL))


def _frame(wire: Wire, end: socket.socket, data: bytes) -> bytes:
    """A frame as it comes out at the other end."""
    wire.send_frame(data)
    return end.recv(4 + 32 + len(data), socket.MSG_WAITALL)
