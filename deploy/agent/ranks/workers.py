"""The worker processes of one node, one round of them at a time: started, watched, stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodekit.deploy.agent.ranks import children
from nodekit.deploy.agent.ranks.early_ends import EarlyEnds
from nodekit.deploy.agent.ranks.forkserver import ForkServer, ServerLost
from nodekit.deploy.host import processes

_POLL_S = 0.01
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """One worker, and everything it needs."""

    local_rank: int
    argv: tuple[str, ...]
    """The user's command; ``python`` is this interpreter."""
    env: Mapping[str, str]
    """Its whole environment."""
    cwd: str
    log: str
    """The file for stdout and stderr: appended to, 0600."""


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A process that waits in the kernel and cannot be ended."""

    pid: int
    local_rank: int | None
    """None for a process that a rank has started."""
    state: str
    """The process state by the kernel's letter, mostly D."""
    wchan: str
    """The kernel function that it waits in; "" if the kernel does not say."""

    def __str__(self) -> str:
        who = "a process of the ranks" if self.local_rank is None else f"local rank {self.local_rank}"
        return f"{who} (pid {self.pid}, state {self.state}{f' in {self.wchan}' if self.wchan else ''})"


class Workers:
    """Starts workers as forks of `server`, or as fresh processes if there is no server or it cannot fork this command.

    To be used by one thread, which has to live as long as the workers: they die with it. Each round ends with `stop`,
    even if all workers have ended already; it ends every child of this process that is in another session.
    """

    def __init__(self, server: ForkServer | None) -> None:
        self._server = server
        # The limit for workers, whatever this process's own is by then.
        self._max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._pids: dict[int, int] = {}
        self._served = False
        self._ended: dict[int, int] = {}
        self._ends = select.epoll()
        self._handles: dict[int, int] = {}
        self._watched: set[int] = set()  # pids whose beginning end is reported by a thread
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ends.register(self._bell, select.EPOLLIN)
        self.fresh: dict[int, str] = {}
        """Local rank → why this worker of the round is not a fork."""
        self._logged: set[str] = set()  # the reasons that are in the log already, of all rounds
        self.stuck: list[Stuck] = []
        """The processes that SIGKILL did not end, of all rounds."""
        processes.adopt_orphans()

    @property
    def pids(self) -> dict[int, int]:
        """Local rank → pid, of all that were started and not stopped yet."""
        return dict(self._pids)

    def start_soon(self, starts: Sequence[WorkerStart]) -> None:
        """Start workers beside those that have stayed, without waiting; `poll` waits for it, then `pids` has them."""
        if self._server is not None:
            self._served = True
            with self._losing_the_server():
                self._server.post("start", starts=_requests(starts))
                return
        self.start(starts)

    def start(self, starts: Sequence[WorkerStart]) -> dict[int, int]:
        """Start a round of workers beside those that have stayed; return local rank → pid of all."""
        assert not any(start.local_rank in self._pids for start in starts), "stop comes before the next start"
        self.fresh, self._ended = {}, {}
        # Said first: `stop` must ask the server also if we are interrupted.
        self._served = self._server is not None
        answer = self._ask("start", starts=_requests(starts))
        if answer is not None:
            self.fresh = {int(local_rank): why for local_rank, why in answer["fresh"].items()}
            for why in {*self.fresh.values()} - self._logged:
                _LOGGER.warning("ranks are no forks, and import everything themselves: %s", why)
                self._logged.add(why)
        else:
            for start in starts:
                self.fresh[start.local_rank] = "there is no fork server"
                self._pids[start.local_rank] = self._spawn(start)
        return self.pids

    def preload(self, names: Sequence[str], env: Mapping[str, str]) -> None:
        """Have the fork server import what the workers will, in their environment; `warm_up` waits for it."""
        if self._server is not None:
            with self._losing_the_server():
                self._server.preload(names, env)

    def warm_up(self, pause: Callable[[], None]) -> None:
        """Wait until the fork server has its imports, so that a start takes no time; what `pause` raises ends that."""
        while self._server is not None:
            with self._losing_the_server():
                if self._server.is_ready():
                    return
                pause()
                time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a worker ends that had not at the last `poll`, for `timeout_s` at most.

        Returns False if none has ended; True if one may have, which `poll` then says, or after a call of `wake`.
        """
        is_sure = True
        there = {pid for local_rank, pid in self._pids.items() if local_rank not in self._ended}
        self._watch_early_ends()
        for pid in self._handles.keys() - there:
            self._forget(pid)
        for pid in there - self._handles.keys():
            try:
                handle = os.pidfd_open(pid)
            except OSError:  # it is gone, or the kernel is older than 5.3
                timeout_s, is_sure = min(timeout_s, _POLL_S), False
                continue
            try:
                self._ends.register(handle, select.EPOLLIN)
            except OSError:  # this user watches as many files as the kernel allows
                os.close(handle)
                timeout_s, is_sure = min(timeout_s, _POLL_S), False
            else:
                self._handles[pid] = handle
        found = self._ends.poll(timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return bool(found) or not is_sure

    def _watch_early_ends(self) -> None:
        """Have `wait` end as soon as a worker begins to end: some time before its parent is told."""
        if self._server is None:
            return
        early_ends = self._server.early_ends
        self._watched &= set(self._pids.values())
        for local_rank, pid in self._pids.items():
            if pid not in self._watched and early_ends.is_held(local_rank):
                self._watched.add(pid)
                tell = functools.partial(self._tell_early_end, early_ends, local_rank)
                with contextlib.suppress(RuntimeError):  # no thread can be started: its end is told later
                    threading.Thread(target=tell, name=f"nodekit-end{local_rank}", daemon=True).start()

    def _tell_early_end(self, early_ends: EarlyEnds, local_rank: int) -> None:
        early_ends.wait(local_rank)
        self.wake()

    def wake_by(self, descriptor: int) -> None:
        """Have `wait` end, too, when something has come that can be read from this: once, whether it is read or not."""
        with contextlib.suppress(FileExistsError):
            self._ends.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def wake(self) -> None:
        """End the present `wait`, or the next; from any thread."""
        os.eventfd_write(self._bell, 1)

    def _forget(self, pid: int) -> None:
        handle = self._handles.pop(pid)
        self._ends.unregister(handle)
        os.close(handle)

    def poll(self) -> dict[int, int]:
        """Local rank → exit code, negative for a signal, of those that have ended so far."""
        if self._served and (answer := self._ask("poll")) is not None:
            self._ended = {int(local_rank): code for local_rank, code in answer["ended"].items()}
        else:
            self._ended = children.exit_codes(self._pids)
        return dict(self._ended)

    def stop(
        self,
        grace_s: float,
        *,
        is_wanted: Callable[[], bool] = lambda: False,
        unsignalled: Collection[int] = (),
        staying: Callable[[], Collection[int]] = tuple,
        waits: bool = True,
    ) -> bool:
        """End all workers and what they started, by SIGTERM and then SIGKILL; whether a worker needed SIGKILL.

        Args:
            grace_s: seconds until SIGKILL.
            is_wanted: SIGKILL is put off beyond `grace_s`, even of 0, while this returns True; called before that, too.
            unsignalled: local ranks that get no SIGTERM: they were told to end by a message.
            staying: returns the local ranks that are not to be ended, but go on after the next `start`.
            waits: whether to wait until the kernel has freed their memory. If not, forks that are started in their
                place wait for that, and processes that cannot be ended are known at the next `stop`.
        """
        deadline = time.monotonic() + grace_s
        left = self._left(staying)
        if left and (grace_s > 0 or is_wanted()):
            signalled = {key: pid for key, pid in left.items() if key not in unsignalled}
            children.signal_groups(signalled, signal.SIGTERM)
            children.signal_groups(left, signal.SIGCONT)  # a stopped one hears only this
            while left := self._left(staying):
                if not is_wanted() and time.monotonic() > deadline:
                    break
                self.wait(_POLL_S)
        pids, stays = dict(self._pids), set(staying())  # a rank that says so only now stays as well
        stay = {key: pid for key, pid in pids.items() if key in stays and key not in self._ended}
        if self._served and (answer := self._ask("clear", stay=[*stay], waits=waits)) is not None:
            stuck = {int(pid): where for pid, where in answer["stuck"].items()}
        else:
            but = [each.pid for each in self.stuck]
            ending = {key: pid for key, pid in pids.items() if key not in stay}
            stuck = children.clear_up(ending, but=but, stay=stay.values())
            self._pids = stay
        for pid, (state, wchan) in stuck.items():
            local_rank = next((key for key, each in pids.items() if each == pid), None)
            self.stuck.append(Stuck(pid=pid, local_rank=local_rank, state=state, wchan=wchan))
        for pid in list(self._handles):
            self._forget(pid)
        self._served = self._served and (bool(self._pids) or not waits)  # what ends is still to be waited for
        return bool(left.keys() - stay.keys())

    def _left(self, staying: Callable[[], Collection[int]]) -> dict[int, int]:
        """Local rank → pid of the workers that have not ended, and are not to stay."""
        ended, stay = self.poll(), staying()
        return {key: pid for key, pid in self._pids.items() if key not in ended and key not in stay}

    def _ask(self, op: str, **args: Any) -> dict[str, Any] | None:
        """The server's answer; None without a server: then the workers are children of this process."""
        if self._server is None:
            return None
        with self._losing_the_server():
            answer = self._server.ask(op, **args)
            self._pids = {int(local_rank): pid for local_rank, pid in answer["pids"].items()}
            return answer
        return None

    @contextlib.contextmanager
    def _losing_the_server(self) -> Iterator[None]:
        """If the server is lost, go on without it."""
        try:
            yield
        except ServerLost as error:
            _LOGGER.warning("the fork server is lost (%r): workers start afresh", error.__cause__)
            self._server = None
            self._served = False

    def _spawn(self, start: WorkerStart) -> int:
        program = str(Path(__file__).with_name("worker.py"))
        ours = [str(os.getpid()), start.log, str(self._max_files), start.cwd]
        argv = [sys.executable, "-I", "-S", program, *ours, *start.argv]
        return os.posix_spawn(sys.executable, argv, start.env)


def _requests(starts: Sequence[WorkerStart]) -> list[dict[str, Any]]:
    """The form in which the fork server gets them."""
    return [
        {**dataclasses.asdict(start), "env": dict(start.env), "argv": list(start.argv)} for start in starts
    ]
