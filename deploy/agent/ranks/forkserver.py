"""A process with torch imported that forks workers from itself, so that no start or restart waits for imports.

The server is forked from the agent before the agent has threads, and has none itself. It answers requests, as JSON
lines over a socket pair. Workers that have ended stay unreaped until a request to clear up, so that no other process
gets their pids. When the socket closes, however the agent ended, the server kills the workers and exits.

To the user's script a forked worker looks like a fresh interpreter, except for what is imported already. Where a fork
cannot look like one (`refusal`), it executes the command instead.

The kernel frees the memory of a worker that has ended while the next attempt begins. The worker that replaces it runs
the user's program only after that, when files, ports and memory are free again.

Forking a process of this size takes 0.01 to 0.02 s. So while workers run, as many spare forks as were started last wait
for the next start. They share their memory with the server, and learn only then which command to run; those for kit's
training module rehearse it (`rehearsal.py`).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter
from types import ModuleType
from typing import Any, NoReturn

from nodekit.deploy.agent.ranks import children, fresh, worker
from nodekit.deploy.agent.ranks.early_ends import EarlyEnds
from nodekit.deploy.agent.ranks.rehearsal import rehearse
from nodekit.deploy.agent.ranks.target import TRAINING, Target, refusal, unforkable
from nodekit.deploy.host import processes

ANSWER_TIMEOUT_S = 120.0
IMPORTS_S = 240.0  # how long the imports may take, which may come over NFS
ENDING_LOOK_S = 0.005  # between two polls of ended workers whose memory the kernel still frees
IDLE_S = 1.0  # how long without a request until a spare fork is made: workers that start need the cores


class ServerLost(Exception):
    """The fork server did not answer as it should, and was killed with its workers."""


class ForkServer:
    """The agent's end of the connection to the fork server."""

    def __init__(self, pid: int, connection: socket.socket, early_ends: EarlyEnds) -> None:
        self.pid = pid
        self.early_ends = early_ends
        """Notices that a worker ends; not one that executes another program."""
        connection.settimeout(ANSWER_TIMEOUT_S)
        self._socket = connection
        self._answers = connection.makefile("rb")
        self._number = 0
        self._imports_since: float | None = None  # when `preload` asked for imports; None once they are done

    @classmethod
    def start(cls, preload: Sequence[str]) -> ForkServer:
        """Fork the server, which then imports `preload`; call this before threads are started or CUDA is used.

        An agent passes `PRELOAD` of deploy/agent/main.py.
        """
        if threading.active_count() > 1:
            raise RuntimeError("a fork server must be started before any thread")
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = socket.socketpair()
        early_ends = EarlyEnds()
        # The server blocks all signals, such as one to the agent's process group; workers get this mask back.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _Server(theirs, mask, early_ends).serve(preload, agent)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return cls(pid, ours, early_ends)

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """Send a request to the server, and return its answer."""
        with self._or_lost():
            self._send(op, args)
            answer = self._answer()
        self._imports_since = None
        return answer

    def post(self, op: str, **args: Any) -> None:
        """Send a request to the server without waiting for the answer; requests are handled in order."""
        with self._or_lost():
            self._send(op, args)

    def preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Have the server import more modules, in this environment; `is_ready` tells when they are imported."""
        with self._or_lost():
            self._send("preload", {"names": [*names], "env": dict(env)})
        self._imports_since = time.monotonic()

    def is_ready(self) -> bool:
        """Whether the server has finished its imports, so that it answers at once.

        Raises:
            ServerLost: the server has ended, or its imports take longer than `IMPORTS_S`.
        """
        if self._imports_since is None:
            return True
        with self._or_lost():
            if select.select([self._socket], [], [], 0)[0]:
                self._answer()
                self._imports_since = None
            elif time.monotonic() > self._imports_since + IMPORTS_S:
                raise TimeoutError(f"the imports take longer than {IMPORTS_S:.0f} s")
        return self._imports_since is None

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        """Kill the server, and raise `ServerLost`, if it does not answer as it should."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()
            raise ServerLost from error

    def _send(self, op: str, args: Mapping[str, Any]) -> None:
        # With a number, so that an answer left unread by an exception is not taken for that of a later request.
        self._number += 1
        self._socket.sendall(json.dumps({"number": self._number, "op": op, **args}).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        while True:
            answer: dict[str, Any] = json.loads(self._answers.readline())
            if answer["number"] == self._number:
                return answer

    def close(self) -> None:
        """Kill the server, and with it its workers."""
        if self._socket.fileno() < 0:
            return
        self._answers.close()
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Server:
    """The server's end of the connection: handles the agent's requests."""

    def __init__(
        self, connection: socket.socket, mask: set[signal.Signals | int], early_ends: EarlyEnds
    ) -> None:
        self._socket = connection
        self._mask = mask
        self._early_ends = early_ends
        self._path, self._env = sys.path[:], dict(os.environ)  # before imports have changed them
        self._began_s = time.time()
        self._set_by_imports: list[tuple[str, str | None, str]] = []  # a variable, its value before and after
        self._pids: dict[int, int] = {}
        self._waiting: dict[int, int] = {}  # pid of a fork that waits for a start → the pipe that it reads
        self._num_wanted = 0  # how many of these there should be
        # The options of kit's training module, if that was started last.
        self._rehearsed: Sequence[str] | None = None
        # Looked up once: a fork that went through all modules would make the kernel copy many shared pages.
        self._own_modules: list[str] = []
        self._agent = 0
        self._stuck: set[int] = set()
        self._ending: set[int] = set()  # pids of ended workers whose memory the kernel still frees

    def serve(self, preload: Sequence[str], agent: int) -> None:
        """Import `preload`, then handle requests until the agent is gone."""
        self._agent = agent
        worker.die_with(agent)
        processes.adopt_orphans()  # so that `clear_up` finds what workers leave behind
        ours = self._socket.fileno()
        os.closerange(3, ours)
        os.closerange(ours + 1, os.sysconf("SC_OPEN_MAX"))
        _import(preload)
        self._own_modules = fresh.loaded_of_ours()
        # From here on the socket shows the agent's end; then what workers have started is killed too.
        worker.die_with(None)
        for line in self._requests():
            request = json.loads(line)
            answer: dict[str, Any] = {"number": request["number"]}
            if request["op"] == "preload":
                self._preload(request["names"], request["env"])
            elif request["op"] == "start":
                answer["fresh"] = self._start(request["starts"])
            elif request["op"] == "clear":
                answer["stuck"] = self._clear(request["stay"], waits=request["waits"])
            answer["pids"] = self._pids
            answer["ended"] = children.exit_codes(self._pids)
            self._socket.sendall(json.dumps(answer).encode() + b"\n")
        children.clear_up(self._pids, but=self._stuck)

    def _requests(self) -> Iterator[bytes]:
        """Yield each request as it comes; while none comes, make forks for the next start."""
        unread = b""
        while True:
            line, is_whole, rest = unread.partition(b"\n")
            if is_whole:
                unread = rest
                yield line
            elif self._ending and not self._has_request(ENDING_LOOK_S):
                self._look_at_ending()
            elif len(self._waiting) < self._num_wanted and not self._has_request(IDLE_S):
                try:
                    self._waiting.update([self._new_fork(self._rehearsed)])
                except OSError:  # for lack of memory, say: try no more before the next start
                    self._num_wanted = 0
            elif came := self._socket.recv(1 << 16):
                unread += came
            else:
                return

    def _has_request(self, timeout_s: float) -> bool:
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def _clear(self, stay: Collection[int], *, waits: bool) -> dict[int, tuple[str, str]]:
        """Kill all workers except the local ranks in `stay`; return those that SIGKILL does not end.

        Args:
            stay: local ranks that go on in the next attempt.
            waits: whether to wait also until the kernel has freed the workers' memory.
        """
        self._ending = set()  # wait now for the ones that ended before this call
        staying = {key: pid for key, pid in self._pids.items() if key in stay}
        pids = {key: pid for key, pid in self._pids.items() if key not in staying}
        ending = None if waits else self._ending
        found = children.clear_up(pids, but=self._stuck, stay=staying.values(), ending=ending)
        self._pids = staying
        self._stuck |= found.keys()
        return found

    def _look_at_ending(self) -> None:
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if gone := {pid for pid in self._ending if os.waitid(os.P_PID, pid, ended)}:
            # Kill what they had started, now children of this process, before reaping them: the workers that replace
            # them wait until then.
            children.clear_up({}, but=self._stuck | self._ending, stay=self._pids.values())
            for pid in gone:
                os.waitpid(pid, 0)
            self._ending -= gone

    def _preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Import modules under `env`, the variables common to all ranks: libraries read and change them on import."""
        worker.die_with(self._agent)  # no worker is started yet that would have to be killed first
        os.environ.clear()
        os.environ.update(env)
        _import(names)
        self._own_modules = fresh.loaded_of_ours()
        worker.die_with(None)
        after = os.environ.items()
        self._set_by_imports = [(name, env.get(name), now) for name, now in after if env.get(name) != now]
        os.environ.clear()
        os.environ.update(self._env)

    def _start(self, starts: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        executed = {}
        unfit = unforkable()
        for start in starts:
            target = Target.parse(start["argv"])
            why_not = unfit or refusal(target, start["env"], start["cwd"], self._env)
            self._rehearsed = target.args if target and target.is_training and not why_not else None
            more = {"is_executed": bool(why_not), "after": [*self._ending]}
            self._pids[start["local_rank"]] = self._started({**start, **more})
            if why_not:
                executed[start["local_rank"]] = why_not
        self._num_wanted = max(self._num_wanted, len(starts) - len(executed))
        return executed

    def _started(self, start: Mapping[str, Any]) -> int:
        """Send a start to a spare fork, or to a new one, and return its pid."""
        while True:
            pid, pipe = self._waiting.popitem() if self._waiting else self._new_fork()
            os.kill(pid, signal.SIGCONT)  # in case a SIGSTOP has stopped it
            try:
                with open(pipe, "wb") as file:  # noqa: PTH123
                    file.write(json.dumps(start).encode())
            except BrokenPipeError:  # it was killed while it waited
                os.waitpid(pid, 0)
            else:
                return pid

    def _new_fork(self, rehearsed: Sequence[str] | None = None) -> tuple[int, int]:
        """Fork a process that waits for a start; return its pid, and the pipe by which to send the start.

        With `rehearsed`, the options of kit's training module, the fork first rehearses them (`rehearsal.py`).
        """
        server = os.getpid()
        theirs, ours = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(theirs)
            os.close(ours)
            raise
        if pid == 0:
            try:
                worker.die_with(server)
                self._socket.close()
                for pipe in (ours, *self._waiting.values()):
                    os.close(pipe)
                # A signal that comes while it waits must end it now, and not the worker later.
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                if rehearsed is not None:
                    rehearse(rehearsed)
                    fresh.forget_listings(self._began_s)
                with open(theirs, "rb") as file:  # noqa: PTH123
                    text = file.read()
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                if text:
                    start = json.loads(text)
                    worker.settle(server, self._agent, start["log"])
                    self._become(start, None if start["is_executed"] else Target.parse(start["argv"]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs)
        return pid, ours

    def _become(self, start: Mapping[str, Any], target: Target | None) -> NoReturn:
        argv, env, cwd = list(start["argv"]), dict(start["env"]), start["cwd"]
        torch = sys.modules.get("torch")
        if target is None or (torch and torch.cuda._is_in_bad_fork()):  # a preload has woken CUDA
            self._wait_to_begin(start)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            worker.execute(argv, env, cwd)
        assert target is not None
        argv[0] = sys.executable
        os.environ.clear()
        ctypes.CDLL(None).clearenv()  # also what libraries have set without python
        os.environ.update(env)
        os.environ.update({name: now for name, was, now in self._set_by_imports if env.get(name) == was})
        os.chdir(cwd)
        fresh.show_command(argv, env)
        if env.get("OMP_NUM_THREADS") != self._env.get("OMP_NUM_THREADS"):
            fresh.set_num_threads(int(env["OMP_NUM_THREADS"]))
        if torch and (problem := fresh.missing_gpus(torch, env)):
            os.write(2, os.fsencode(problem + "\n"))
            os._exit(1)
        fresh.forget_the_agent()
        fresh.forget_listings(self._began_s)
        # Its own forks, such as data loaders, must let the agent read them too.
        os.register_at_fork(after_in_child=functools.partial(worker.be_read_by, self._agent))
        # Referenced nowhere else, so that `fresh` can free it at the end as python does.
        sys.modules["__main__"] = ModuleType("__main__")
        sys.modules["__main__"].__dict__.update(
            __annotations__={}, __builtins__=builtins, __loader__=BuiltinImporter
        )
        if "__mp_main__" in sys.modules:
            sys.modules["__mp_main__"] = sys.modules["__main__"]  # multiprocessing's name for it
        sys.orig_argv[:] = argv
        sys.argv[:] = ["-m" if target.is_module else target.name, *target.args]
        sys.path[:] = self._path
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = target.folder(cwd)
        fresh.forget_ours(
            self._own_modules or fresh.loaded_of_ours(), but=TRAINING if target.is_training else ""
        )
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._wait_to_begin(start)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        fresh.run(target)

    def _wait_to_begin(self, start: Mapping[str, Any]) -> None:
        """Wait, in a worker, until the workers it replaces have freed their ports and files; then hold its mutex."""
        children.wait_until_reaped(start["after"])
        self._early_ends.hold(start["local_rank"])


def _import(names: Sequence[str]) -> None:
    """Import those of the modules that there are, and keep their objects out of the forks' garbage collection."""
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    sys.stdout.flush()
    sys.stderr.flush()
    # No rank needs to run the finalizers of what the imports made: torch has 170, which took a rank 0.04 s at its end.
    for each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        each.atexit = False
    gc.collect()
    gc.freeze()
    gc.enable()
