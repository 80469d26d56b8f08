"""A process with torch imported that forks workers from itself, so that a start, and a restart, costs no imports.

It is forked from the agent before that has threads, and has none itself. It speaks JSON lines over a socket pair
and only when asked: workers that ended stay unreaped, so no pid is anybody else's, until it is told to clear up.
When its socket closes, with the agent in whatever way that ended, it kills what it started and ends.

A forked worker is to the user's script what a fresh interpreter is, but for what is imported already. Where that
cannot be had (`refusal`), the child executes the command instead.

The memory of a worker that has ended is taken back while the next attempt begins. What takes its place begins the
user's program only after that, when files, ports and memory are free again.

To fork a process of this size takes 0.01 to 0.02 s. So once workers run, as many forks as were started last wait for
the next start. They share their memory with the server, and know nothing yet of what they will become; those for kit's
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
IMPORTS_S = 240.0  # for the imports, which may come over NFS
ENDING_LOOK_S = 0.005  # at those of which only memory is left
IDLE_S = 1.0  # without a request, until the next start is prepared for: workers that start need the cores


class ServerLost(Exception):
    """The fork server does not answer; it, and with it its workers, is dead."""


class ForkServer:
    """The agent's end."""

    def __init__(self, pid: int, connection: socket.socket, early_ends: EarlyEnds) -> None:
        self.pid = pid
        self.early_ends = early_ends
        """Of the workers, but for those that execute another program."""
        connection.settimeout(ANSWER_TIMEOUT_S)
        self._socket = connection
        self._answers = connection.makefile("rb")
        self._number = 0
        self._imports_since: float | None = None  # asked for by `preload`, and not known to be done

    @classmethod
    def start(cls, preload: Sequence[str]) -> ForkServer:
        """Fork the server, which then imports `preload` by itself; call it before anything else, CUDA above all.

        What an agent has it import is `PRELOAD` in deploy/agent/main.py.
        """
        if threading.active_count() > 1:
            raise RuntimeError("a fork server must be started before any thread")
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = socket.socketpair()
        early_ends = EarlyEnds()
        # The server hears no signal, whoever sends one to the agent's whole group; workers get this mask back.
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
        """Have the server do something."""
        with self._or_lost():
            self._send(op, args)
            answer = self._answer()
        self._imports_since = None
        return answer

    def post(self, op: str, **args: Any) -> None:
        """Have the server do something, before what it is asked next, and do not wait for it."""
        with self._or_lost():
            self._send(op, args)

    def preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Have the server import more, in this environment; `is_ready` tells when it has."""
        with self._or_lost():
            self._send("preload", {"names": [*names], "env": dict(env)})
        self._imports_since = time.monotonic()

    def is_ready(self) -> bool:
        """Whether the server has all its imports, so that it answers at once.

        Raises:
            ServerLost: it has ended, or its imports take longer than `IMPORTS_S`.
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
        """End the server where it does not answer as it should."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.close()
            raise ServerLost from error

    def _send(self, op: str, args: Mapping[str, Any]) -> None:
        # An answer that was never read, because of an exception, is not taken for the next one.
        self._number += 1
        self._socket.sendall(json.dumps({"number": self._number, "op": op, **args}).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        while True:
            answer: dict[str, Any] = json.loads(self._answers.readline())
            if answer["number"] == self._number:
                return answer

    def close(self) -> None:
        """End the server, and with it its workers."""
        if self._socket.fileno() < 0:
            return
        self._answers.close()
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Server:
    """The server's end."""

    def __init__(
        self, connection: socket.socket, mask: set[signal.Signals | int], early_ends: EarlyEnds
    ) -> None:
        self._socket = connection
        self._mask = mask
        self._early_ends = early_ends
        self._path, self._env = sys.path[:], dict(os.environ)  # before imports have changed them
        self._began_s = time.time()
        self._set_by_imports: list[tuple[str, str | None, str]] = []  # a variable, what it was, and is
        self._pids: dict[int, int] = {}
        self._waiting: dict[int, int] = {}  # pid of a fork that waits for a start → the pipe that it reads
        self._num_wanted = 0  # of these
        # The options of kit's training module, if that was started last.
        self._rehearsed: Sequence[str] | None = None
        # Known here: each fork would have the kernel copy many pages by looking at all modules.
        self._own_modules: list[str] = []
        self._agent = 0
        self._stuck: set[int] = set()
        self._ending: set[int] = set()  # of which nothing but memory is left

    def serve(self, preload: Sequence[str], agent: int) -> None:
        """Answer until the agent is gone."""
        self._agent = agent
        worker.die_with(agent)
        processes.adopt_orphans()  # so that `clear_up` finds what workers leave behind
        ours = self._socket.fileno()
        os.closerange(3, ours)
        os.closerange(ours + 1, os.sysconf("SC_OPEN_MAX"))
        _import(preload)
        self._own_modules = fresh.loaded_of_ours()
        worker.die_with(None)  # from here on we see its end ourselves, and end also what workers started
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
        """Each as it comes; while none does, forks for the next start are made."""
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
                except OSError:  # for lack of memory, say: not before the next start
                    self._num_wanted = 0
            elif came := self._socket.recv(1 << 16):
                unread += came
            else:
                return

    def _has_request(self, timeout_s: float) -> bool:
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def _clear(self, stay: Collection[int], *, waits: bool) -> dict[int, tuple[str, str]]:
        """End all workers but those that stay; those that SIGKILL does not end."""
        self._ending = set()  # those of the last attempt are waited for, like all that it has left
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
            # What they had started is ours now. What takes their place waits for its end, too: until they are reaped.
            children.clear_up({}, but=self._stuck | self._ending, stay=self._pids.values())
            for pid in gone:
                os.waitpid(pid, 0)
            self._ending -= gone

    def _preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Import these in what is common to the environments of all ranks: libraries read it then, and change it."""
        worker.die_with(self._agent)  # no worker is started yet that would have to be ended first
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
        """The pid of a fork that has been told what to become."""
        while True:
            pid, pipe = self._waiting.popitem() if self._waiting else self._new_fork()
            os.kill(pid, signal.SIGCONT)  # should somebody have stopped it
            try:
                with open(pipe, "wb") as file:  # noqa: PTH123
                    file.write(json.dumps(start).encode())
            except BrokenPipeError:  # somebody has ended it while it waited
                os.waitpid(pid, 0)
            else:
                return pid

    def _new_fork(self, rehearsed: Sequence[str] | None = None) -> tuple[int, int]:
        """A process that waits for what it is to become, and the pipe through which it is told.

        It first rehearses to be kit's training module with the options `rehearsed`.
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
                # A signal for it ends it, and is not kept for the worker that it would become.
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
        ctypes.CDLL(None).clearenv()  # what libraries set behind python's back
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
        os.register_at_fork(
            after_in_child=functools.partial(worker.be_read_by, self._agent)
        )  # its loaders' too
        sys.modules["__main__"] = ModuleType("__main__")  # and nowhere here, so that its end is as python's
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
        """In a worker: until what it takes the place of is gone, with its ports and files; then tell of its own end."""
        children.wait_until_reaped(start["after"])
        self._early_ends.hold(start["local_rank"])


def _import(names: Sequence[str]) -> None:
    """Import what there is of these, for the forks that are to come."""
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    sys.stdout.flush()
    sys.stderr.flush()
    # What imports have made is ours, and no rank's to take apart: torch has 170 of these, a rank's last 0.04 s.
    for each in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        each.atexit = False
    gc.collect()
    gc.freeze()
    gc.enable()
