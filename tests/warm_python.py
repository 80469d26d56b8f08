"""A python that is there at once: a fork of one process that has imported torch and its friends already.

A test that starts the training module spends most of its time in imports, in every rank anew. `program` is the path of
a program (warm_client.c) to be used as ``python`` is. It has that one process fork a child, which becomes what was
asked for as kit's own ranks do (deploy/agent/ranks/forkserver.py), with the caller's files, folder and environment; it
passes signals on and ends as the child ends. What a fork cannot be (``python -c``, another PYTHONPATH) is executed
by the real python.

Its pid is not the child's: SIGSTOP, resource limits and ``/proc/PID`` are for the real one, ``sys.executable``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nodekit.deploy.agent.ranks import children, forkserver, worker
from nodekit.deploy.agent.ranks.early_ends import EarlyEnds
from nodekit.deploy.agent.ranks.target import Target, refusal

RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
LIBRARIES = (
    *("torch._dynamo", "torch.distributed.run", "torch.distributed.fsdp", "torch.utils.tensorboard"),
    *("sklearn.datasets", "sklearn.metrics", "transformers", "transformers.trainer", "accelerate"),
    *("lightning_fabric", "deepspeed", RENDEZVOUS),
    # When its first engine is made, DeepSpeed imports what torch.compile needs.
    *("deepspeed.ops.op_builder.all_ops", "torch._inductor.compile_fx", "horovod.torch"),
)
MARK = "NODEKIT_TEST_SESSION"
"""The variable that all processes of a worker's tests carry (conftest)."""
PRELOAD = (*LIBRARIES, "nodekit.training.loop", "nodekit.training.tasks.text")
SESSION = "NODEKIT_WARM_PYTHONS"
"""The variable with the folder of a session's programs: xdist's workers share the processes behind them."""


def begin_session() -> None:
    """Have programs be made for this process and its children; those behind them end with it."""
    os.environ[SESSION] = tempfile.mkdtemp(prefix=f"warm-{os.getpid()}-")


def end_session() -> None:
    """Remove the programs."""
    shutil.rmtree(os.environ.pop(SESSION))


def session() -> Path:
    """The folder of this session's programs."""
    return Path(os.environ[SESSION])


def end_with_session(selector: selectors.BaseSelector) -> None:
    """End, and with us all that we have forked, when the process ends that has begun the session."""
    of = int(session().name.split("-")[1])
    selector.register(os.pidfd_open(of), selectors.EVENT_READ, lambda: os._exit(0))


@functools.cache
def started(maker: str) -> Path:
    """The program's path; the process behind it, a file of ours that calls `serve`, is started by the first call."""
    folder = session() / Path(maker).stem
    client, address = folder / "python", folder / "socket"
    with once(folder) as is_first:
        if is_first:
            compile_client(client, ADDRESS=str(address))
            launch(maker, str(address), os.environ, home=folder)
    return client


@contextlib.contextmanager
def once(folder: Path) -> Iterator[bool]:
    """Make a folder, or wait until another worker has filled it; yields whether it is this one that does."""
    with Path(session(), f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not folder.exists()
        folder.mkdir(exist_ok=True)
        yield is_first


def compile_client(client: Path, **names: str) -> None:
    """Make the program, of its source and these words."""
    words = [f"-D{name}={json.dumps(value)}" for name, value in names.items()]
    subprocess.run(["cc", "-O1", *words, "-o", client, Path(__file__).with_name("warm_client.c")], check=True)


def launch(
    maker: str, argument: str, env: Mapping[str, str], *, home: Path, flags: Sequence[str] = ("-u",)
) -> None:
    """Start the process behind a program, and wait until it listens."""
    # Neither the HOME nor the mark of whoever is the first: tests look for what theirs have left running.
    own = {"HOME": str(home), "XDG_STATE_HOME": str(home), "OMP_NUM_THREADS": "1", MARK: ""}
    subprocess.run(
        [sys.executable, *flags, maker, argument],
        env={**env, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # python makes of its own what cannot seek, as a child's may not
        start_new_session=True,
        check=True,
    )


def program() -> str:
    """The program's path; the process behind it is started by the first call."""
    return str(started(__file__))


TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR"
"""A variable that torch sets for itself in the caller, once anything of an earlier test there has asked for it."""


FAULTHANDLER = "PYTHONFAULTHANDLER"


def environment() -> dict[str, str]:
    """What the process behind it was started with and a caller has to hand on, for its ranks to be forks too."""
    return {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": program()}


class _Maker(forkserver._Server):
    """Forks children for clients, and tells each how its child has ended."""

    MAX_FILES = 3
    MAY_DIFFER = frozenset({"PYTHONPATH"})
    """Variables that are read when libraries are imported, and for whose sake the real python is started.

    Where any other one is not ours there is an error: else nobody would notice that all import torch again, but for how
    long the tests take.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening, set(), EarlyEnds())
        self._env.pop(TORCHS_OWN, None)
        del self._path[0]  # this file's folder
        self._agents: dict[int, int] = {}
        """Child → whom signals are for, if that is not the child."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, lambda: self._take(listening))
        end_with_session(self._selector)

    def _wait_to_begin(self, start: Mapping[str, Any]) -> None:
        """These take nobody's place."""

    def load(self, preload: Iterable[str]) -> None:
        """Import what children are not to import."""
        # Where there is no GPU, a library that looks for one has a torch for CUDA say no to all of its process's forks.
        has_gpus = Path("/dev/nvidiactl").exists()
        if not has_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        forkserver._import([*preload])
        if not has_gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        if rendezvous := sys.modules.get(RENDEZVOUS):
            # Upstream's, for an event that goes nowhere, reads the sources of the stack: half of what torchrun costs.
            assert hasattr(rendezvous, "get_method_name")
            rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has but one thread"
        have_huge_pages()

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _take(self, listening: socket.socket) -> None:
        self._accept(listening)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        of = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if of[1] != os.geteuid():
            connection.close()
            return
        length, files, *_ = socket.recv_fds(connection, 11, self.MAX_FILES)
        data = connection.recv(int(length or 0), socket.MSG_WAITALL)
        if data and len(data) == int(length):
            pid = self._fork(_asked(data), files)
            ended = os.pidfd_open(pid)
            whom = self._agents.pop(pid, pid)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._heard(connection, whom))
            self._selector.register(ended, selectors.EVENT_READ, lambda: self._ended(connection, pid, ended))
        for each in files:
            os.close(each)

    def _fork(self, asked: dict[str, Any], files: list[int]) -> int:
        server = os.getpid()
        if pid := os.fork():
            return pid
        try:
            worker.die_with(server)
            os.setsid()
            for number, each in enumerate(files):
                os.dup2(each, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            env = {name: value for name, value in asked["env"].items() if name != TORCHS_OWN}
            target = Target.parse(asked["argv"])
            self._ignore(asked["ignored"])
            if why := refusal(target, self._as_ours(env), asked["cwd"], self._env):
                names = why.partition("environment differs in ")[2]
                if names and not self.MAY_DIFFER.issuperset(names.split(", ")):
                    os.write(2, os.fsencode(f"not a fork: {why}\n"))
                    os._exit(1)
                target = None
            if env.get(FAULTHANDLER):
                faulthandler.enable()
            self._become({**asked, "env": env}, target)
        finally:
            os._exit(1)

    def _as_ours(self, env: Mapping[str, str]) -> dict[str, str]:
        """Every test has a HOME of its own, and nothing that is imported has read it; nor PYTHONFAULTHANDLER."""
        return {name: each for name, each in env.items() if name != FAULTHANDLER} | {
            "HOME": self._env["HOME"]
        }

    @staticmethod
    def _ignore(numbers: Iterable[int]) -> None:
        """Ignore what the client was started to ignore, as what is started by Slurm does with its warning."""
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def _heard(self, connection: socket.socket, pid: int) -> None:
        """A signal, or the client's own end."""
        if connection.fileno() < 0:
            return  # the same look has found its child's end first: the pid may be somebody else's
        said = b""
        with contextlib.suppress(OSError):
            said = connection.recv(4096)
        with contextlib.suppress(ProcessLookupError):
            if not said:
                self._selector.unregister(connection)
                children.signal_groups({0: pid}, signal.SIGKILL)
            for number in said:
                os.kill(pid, number)

    def _ended(self, connection: socket.socket, pid: int, ended: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        with contextlib.suppress(OSError), connection:
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def have_huge_pages() -> None:
    """Have this process's memory in pages of 2 MB, where the kernel can (6.1): a fork, and its end, cost half of it.

    Else each copies and drops an entry for each of its 4 kB, a hundred thousand of them.
    """
    libc = ctypes.CDLL(None)
    size, may_be_huge, collapse = 2 << 20, 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, _, _, inode, *path = line.split()
        begin, end = (int(each, 16) for each in area.split("-"))
        begin, end = -(-begin // size) * size, end // size * size
        if rights.startswith("rw") and inode == "0" and path in ([], ["[heap]"]) and begin < end:
            for advice in (may_be_huge, collapse):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _asked(data: bytes) -> dict[str, Any]:
    """What a client has been started with, of the words that it sends."""
    count, *words = map(os.fsdecode, data.split(b"\0")[:-1])
    argv, (cwd, *lists), env = (
        words[: int(count)],
        words[int(count) : int(count) + 4],
        words[int(count) + 4 :],
    )
    ignored, numbers, limits = ([*map(int, each.split())] for each in lists)
    return {
        "argv": ["python", *argv],
        "cwd": cwd,
        "ignored": ignored,
        "numbers": numbers,
        "limits": [*enumerate(zip(limits[::2], limits[1::2], strict=True))],
        "env": dict(each.split("=", 1) for each in env if "=" in each),
    }


def serve(address: str, preload: Iterable[str], kind: type[_Maker] = _Maker) -> None:
    """Listen, and in a child that stays import, and fork for whoever asks."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(100)
        os.dup2(2, 1)
        if not os.fork():
            maker = kind(listening)
            maker.load(preload)
            maker.run()


if __name__ == "__main__":
    # What torchrun starts its ranks with.
    os.environ["PYTHON_EXEC"] = str(Path(sys.argv[1]).with_name("python"))
    serve(sys.argv[1], PRELOAD)
